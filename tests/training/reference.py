"""The reference of a recorded training: stock's Trainer in one process, one batch an optimizer step; their distance.

Its batches are the rows that the audit files name, its loss is that of the definition; nothing else is of odb_factory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from support import read_jsonl
from torch.utils.data import DataLoader
from training.cases import IGNORE, Case, Collator, load_model, make_rows, precision
from training.gradient_ranks import RECORD, Recorder, trained, training_arguments
from transformers import AutoConfig, Trainer

Tensors = dict[str, torch.Tensor]


def mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A `compute_loss_func`: the mean over all supervised tokens of a batch."""
    targets = labels[:, 1:]
    supervised = targets != IGNORE
    logits, targets = outputs.logits[:, :-1][supervised], targets[supervised]
    return (torch.logsumexp(logits, -1) - logits.gather(-1, targets[:, None])[:, 0]).mean()


class InBatches(Trainer):
    """Takes these rows in each optimizer step."""

    batches: Sequence[list[int]]

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_sampler=self.batches, collate_fn=self.data_collator)


def replay(case: Case, path: str, world_size: int, folder: Path, batches: list[list[int]]) -> dict[str, Any]:
    """What stock's Trainer records (see `Recorder`) with these rows in each optimizer step, and the parameters that it
    starts from."""
    once = {"num_train_epochs": 1, "gradient_accumulation_steps": 1}
    arguments = {key: value for key, value in case.arguments.items() if "liger" not in key}
    model = load_model(case, path)
    start = {name: parameter.detach().clone() for name, parameter in trained(model)}
    with precision(case.dtype):
        trainer = InBatches(
            model=model,
            args=training_arguments(folder, **arguments | once),
            train_dataset=make_rows(case, path, world_size),
            data_collator=Collator(model, AutoConfig.from_pretrained(path)),
            compute_loss_func=mean,
            callbacks=[Recorder()],
        )
        trainer.batches = batches
        trainer.train()
    return torch.load(folder / RECORD) | {"start": start}


def ids_of_optimizer_steps(audits: list[list[dict[str, Any]]]) -> list[list[int]]:
    """The rows of each optimizer step, all ranks together, in no order that could matter."""
    steps: dict[int, list[int]] = {}
    for line in (line for audit in audits for line in audit):
        steps.setdefault(line["optimizer_step"], []).extend(line["ids"])
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return [sorted(steps[step]) for step in sorted(steps)]


# Comparison

LOSS_ROUNDING = 1e-4 if int(transformers.__version__.split(".")[0]) < 5 else 0.0
"""Transformers 4 rounds losses to four digits before it logs them."""


@dataclass(frozen=True)
class Cell:
    """Largest relative differences over all optimizer steps of a training; None: not known.

    gradient: of one parameter tensor, over that tensor's norm. parameters: of all of them together, over the way
    that they have come since the start. loss, grad_norm: of the logged figures.
    """

    optimizer_steps: int
    idle_steps: list[int]
    gradient: float | None
    parameters: float
    loss: float
    grad_norm: float


def compare(case: Case, path: str, world_size: int, output_dir: Path) -> Cell:
    """Replay the training recorded in `output_dir`, and measure. Every epoch trains on the same rows, each once."""
    audits = [read_jsonl(output_dir / f"odb_audit_rank{rank}.jsonl") for rank in range(world_size)]
    lines = [line for audit in audits for line in audit]
    epochs = range(max(line["epoch"] for line in lines) + 1)
    rows = [sorted(id for line in lines if line["epoch"] == epoch for id in line["ids"]) for epoch in epochs]
    assert all(ids == list(range(len(rows[0]))) for ids in rows)

    record = torch.load(output_dir / RECORD)
    reference = replay(case, path, world_size, output_dir / "replayed", ids_of_optimizer_steps(audits))
    logs = list(zip(record["logs"], reference["logs"], strict=True))
    assert len(record["gradients"]) in (0, len(logs))
    return Cell(
        optimizer_steps=len(logs),
        idle_steps=[sum(line["idle"] for line in lines if line["epoch"] == epoch) for epoch in epochs],
        gradient=max(map(of_one_tensor, record["gradients"], reference["gradients"]), default=None),
        parameters=max(
            distance(found, expected) / distance(reference["start"], expected)
            for found, expected in zip(record["parameters"], reference["parameters"], strict=True)
        ),
        loss=max(max(abs(one["loss"] - other["loss"]) - LOSS_ROUNDING, 0.0) / other["loss"] for one, other in logs),
        grad_norm=max(abs(one["grad_norm"] - other["grad_norm"]) / other["grad_norm"] for one, other in logs),
    )


def of_one_tensor(found: Tensors, expected: Tensors) -> float:
    """The largest relative difference of a tensor. What is all zero must be so in both."""
    assert found.keys() == expected.keys()
    differences = [((found[name] - value).norm().item(), value.norm().item()) for name, value in expected.items()]
    return max(difference / norm if norm else float(difference > 0) for difference, norm in differences)


def distance(found: Tensors, expected: Tensors) -> float:
    assert found.keys() == expected.keys()
    return torch.stack([(found[name] - value).double().norm() for name, value in expected.items()]).norm().item()
