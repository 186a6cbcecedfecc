"""Losses of the user's own: the same as in stock training, or refused by name before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training.side_by_side import ODB, STOCK, ReadsRows, Training, compare, train
from training.test_enable import BLOCK, make
from transformers import Trainer

from odb_factory import ConfigError, enable_odb

TOLERANCE = 1e-5


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """As functions for the Trainer are."""
    logits, labels = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / num_items_in_batch


class Overrides(ReadsRows):
    """Takes the loss over, and divides by what it is told are the tokens of the optimizer step."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        if num_items_in_batch is None:  # in an evaluation of transformers 4
            num_items_in_batch = (labels != -100).sum()
        loss = summed(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def test_an_override_that_divides_by_the_items_of_the_batch(tiny_text, tmp_path) -> None:
    training = Training(batch=2, accumulation=2, arguments={"num_train_epochs": 1})
    for kind in (STOCK, ODB):
        train(training, str(tiny_text), tmp_path / kind, odb=kind == ODB, trainer_class=Overrides)
    assert compare(tmp_path, training, 1).most < TOLERANCE


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "smoothing, sample": ({"label_smoothing_factor": 0.1}, {"loss_scaling": "sample"}, "label_smoothing_factor: 0.1"),
    "function, square": ({}, {"loss_scaling": "square"}, r"compute_loss_func \(summed\)"),
    "smoothing, stock": ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor: 0.1"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_over_a_whole_micro_batch_has_one_weight(tiny_text, tmp_path, case: str) -> None:
    """`stock` has several where the model takes no number of items: it is the mean of the means of micro-batches."""
    changes, block, name = CASES[case]
    trainer = make(Trainer, tiny_text, tmp_path, gradient_accumulation_steps=2, **changes)
    if case == "smoothing, stock":
        trainer.model_accepts_loss_kwargs = False
    if "function" in case:
        trainer.compute_loss_func = summed
    enable_odb(trainer, **BLOCK | block)
    with pytest.raises(ConfigError, match=f"^odb.loss_scaling: .* {name} .*`loss_scaling: exact`") as refused:
        trainer.train()
    assert "\n" not in str(refused.value)
    assert trainer.state.global_step == 0


def test_label_smoothing_is_not_multiplied_by_the_accumulation(tiny_text, tmp_path, caplog) -> None:
    """Stock adds up means; with odb the loss is the mean of the optimizer step, whatever the accumulation."""
    losses = []
    for accumulation, batch in ((1, 8), (4, 2)):
        changes = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": batch}
        trainer = make(Trainer, tiny_text, tmp_path / str(batch), label_smoothing_factor=0.1, max_steps=3, **changes)
        enable_odb(trainer, **BLOCK)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    (said,) = [one.getMessage() for one in caplog.records if "label_smoothing_factor" in one.getMessage()]
    assert "4 times larger" in said and "\n" not in said
