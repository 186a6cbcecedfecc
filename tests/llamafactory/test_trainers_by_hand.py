"""Trainers of LLaMA-Factory that a script or a fork makes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_model, load_tokenizer
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer
from llamafactory.train.tuner import run_exp
from support import training_config
from transformers import DataCollatorForSeq2Seq

from odb_factory.errors import ODBError


class TextCollator(DataCollatorForSeq2Seq):
    """Knows no template, and no media."""

    def __call__(self, features: list[dict[str, Any]], return_tensors: Any = None) -> Any:
        names = ("input_ids", "attention_mask", "labels")
        return super().__call__([{name: one[name] for name in names} for one in features], return_tensors)


def made_by_hand(config: dict[str, Any]) -> CustomSeq2SeqTrainer:
    """As LLaMA-Factory's workflow makes it, but with a collator that knows no template."""
    model_args, data_args, training_args, finetuning_args, _ = get_train_args(config)
    tokenizer_module = load_tokenizer(model_args)
    tokenizer = tokenizer_module["tokenizer"]
    template = get_template_and_fix_tokenizer(tokenizer, data_args)
    dataset = get_dataset(template, model_args, data_args, training_args, "sft", **tokenizer_module)
    return CustomSeq2SeqTrainer(
        model=load_model(tokenizer, model_args, finetuning_args, training_args.do_train),
        args=training_args,
        finetuning_args=finetuning_args,
        data_collator=TextCollator(tokenizer, pad_to_multiple_of=8),
        callbacks=[],
        **dataset,
        **tokenizer_module,
    )


def losses(trainer: CustomSeq2SeqTrainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_collator_without_a_template(tiny_text: Path, data_dir: Path, tmp_path: Path) -> None:
    config = training_config(
        tiny_text, data_dir, tmp_path / "out", max_steps=3, per_device_train_batch_size=4, disable_shuffling=True
    )
    stock = losses(made_by_hand(config))
    ours = losses(made_by_hand(config | {"odb": {"token_budget": 512}}))
    assert len(ours) == 3 and ours == pytest.approx(stock, rel=1e-5)


def test_rows_without_a_supervised_token(tiny_text: Path, data_dir: Path, tmp_path: Path) -> None:
    """Stock takes such optimizer steps with a loss of 0, and no weight changes."""
    with pytest.raises(ODBError, match=r"can be trained on: 48 unsupervised \(no token carries loss; cutoff_len"):
        run_exp(training_config(tiny_text, data_dir, tmp_path / "out", cutoff_len=1, odb={"token_budget": 512}))
