"""Dataset, model and collator that LLaMA-Factory builds from a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llamafactory.data import SFTDataCollatorWith4DAttentionMask, get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_model, load_tokenizer


@dataclass(frozen=True)
class Stock:
    """tokenizer_module: tokenizer and processor. datasets: the result of `get_dataset`. collator: as in `run_sft`."""

    tokenizer_module: dict[str, Any]
    template: Any
    datasets: dict[str, Any]
    model: Any
    collator: SFTDataCollatorWith4DAttentionMask


def load_data(config: dict[str, Any], stage: str = "sft") -> dict[str, Any]:
    """The result of `get_dataset`, with the plugin if `config` has an `odb:` block, which is then cleared."""
    model_args, data_args, training_args, _, _ = get_train_args(dict(config))
    tokenizer_module = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(tokenizer_module["tokenizer"], data_args)
    try:
        return get_dataset(template, model_args, data_args, training_args, stage=stage, **tokenizer_module)
    finally:
        get_train_args({key: value for key, value in config.items() if key != "odb"})


def load_stock(config: dict[str, Any]) -> Stock:
    model_args, data_args, training_args, finetuning_args, _ = get_train_args(dict(config))
    tokenizer_module = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(tokenizer_module["tokenizer"], data_args)
    datasets = get_dataset(template, model_args, data_args, training_args, stage="sft", **tokenizer_module)
    model = load_model(tokenizer_module["tokenizer"], model_args, finetuning_args, is_trainable=True)
    collator = SFTDataCollatorWith4DAttentionMask(
        template=template,
        model=model,
        pad_to_multiple_of=8,
        label_pad_token_id=-100,
        attn_implementation=getattr(model.config, "_attn_implementation", None),
        compute_dtype=model_args.compute_dtype,
        **tokenizer_module,
    )
    return Stock(tokenizer_module, template, datasets, model, collator)
