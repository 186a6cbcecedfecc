"""Datasets that LLaMA-Factory builds from a configuration."""

from __future__ import annotations

from typing import Any

from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer


def load_data(config: dict[str, Any], stage: str = "sft") -> dict[str, Any]:
    """The result of `get_dataset`, with the plugin if `config` has an `odb:` block, which is then cleared."""
    model_args, data_args, training_args, _, _ = get_train_args(dict(config))
    tokenizer_module = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(tokenizer_module["tokenizer"], data_args)
    try:
        return get_dataset(template, model_args, data_args, training_args, stage=stage, **tokenizer_module)
    finally:
        get_train_args({key: value for key, value in config.items() if key != "odb"})
