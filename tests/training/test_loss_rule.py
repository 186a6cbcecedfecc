"""Losses that the trainer computes, in place of the model: the same as in stock training, at any weight of samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import item
from training.reference import Loss, dynamic, smoothed
from training.side_by_side import ODB, STOCK, Training, compare, train
from training.toy_training import BLOCK, audit, make
from transformers import AutoModelForCausalLM, Trainer

from odb_factory import enable_odb

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


def dft(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    supervised = labels != -100
    return dynamic(logits[supervised], labels[supervised]).sum() / num_items_in_batch


@pytest.mark.parametrize(
    ("name", "scaling", "layout"),
    [
        ("label smoothing", "sample", "flat"),
        ("label smoothing", "square", "padded"),
        ("compute_loss_func", "square", "flat"),
        ("compute_loss_func", "sample", "padded"),
    ],
)
def test_samples_of_a_micro_batch_have_different_weights(
    tiny_text, tmp_path, name: str, scaling: str, layout: str
) -> None:
    """Loss and gradient of the first optimizer step are those of each of its samples alone, weighed."""
    is_smoothed = name == "label smoothing"
    steps = {"max_steps": 1, "gradient_accumulation_steps": 2, "max_grad_norm": 1e9}
    trainer = make(tiny_text, tmp_path, label_smoothing_factor=0.1 * is_smoothed, **steps)
    if not is_smoothed:
        trainer.compute_loss_func = dft
    enable_odb(trainer, loss_scaling=scaling, layout=layout, **BLOCK)
    trainer.train()
    ids = [row for line in audit(tmp_path) for row in line["ids"]]
    assert len(ids) == 16 and max(len(line["ids"]) for line in audit(tmp_path)) > 3
    loss, norm = weighed_alone(str(tiny_text), smoothed(0.1) if is_smoothed else dynamic, ids, scaling)
    logged = trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(loss, rel=TOLERANCE)
    assert logged["grad_norm"] == pytest.approx(norm, rel=TOLERANCE)


def weighed_alone(path: str, token_loss: Loss, ids: list[int], scaling: str) -> tuple[float, float]:
    """Loss and norm of the gradient."""
    model = AutoModelForCausalLM.from_pretrained(path)
    units = [len(item(row)["input_ids"]) - 1 for row in ids]
    power = {"sample": 0.0, "square": 0.5}[scaling]
    whole = sum(number**power for number in units)
    total = 0.0
    for row, number in zip(ids, units):
        tokens = torch.tensor([item(row)["input_ids"]])
        loss = number**power / whole * token_loss(model(tokens).logits[0, :-1], tokens[0, 1:]).mean()
        loss.backward()
        total += loss.item()
    gradients = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    return total, float(torch.stack(gradients).norm())
