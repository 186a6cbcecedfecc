"""Losses that the trainer computes, in place of the model: the same as in stock training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training.side_by_side import ODB, STOCK, Training, compare, train
from transformers import Trainer

TOLERANCE = 1e-5


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """As functions for the Trainer are."""
    logits, labels = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / num_items_in_batch


class Overrides(Trainer):
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


class Ignores(Trainer):
    """Takes the model's loss as it is: stock adds up the means of its micro-batches."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return (loss, outputs) if return_outputs else loss


class ReturnsAnother(Trainer):
    """Computes the model's loss and trains on one of its own."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("trainer_class", [Overrides, Ignores, ReturnsAnother])
def test_an_override_divides_by_the_items_of_the_batch_or_ignores_them(tiny_text, tmp_path, trainer_class) -> None:
    training = Training(batch=2, accumulation=2, arguments={"num_train_epochs": 1})
    for kind in (STOCK, ODB):
        train(training, str(tiny_text), tmp_path / kind, odb=kind == ODB, trainer_class=trainer_class)
    assert compare(tmp_path, training, 1).grad_norm < TOLERANCE
