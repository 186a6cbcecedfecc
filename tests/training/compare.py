"""How far a recorded training is from its reference, and the table that says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from training.gradient_ranks import RECORD
from training.reference import Reference, Tensors, ids_of_optimizer_steps, read_audits

LOSS_ROUNDING = 5e-5 if int(transformers.__version__.split(".")[0]) < 5 else 0.0
"""Transformers 4 rounds the loss to four digits before it logs it."""


@dataclass(frozen=True)
class Cell:
    """Largest relative differences over all optimizer steps of a training; None: not known.

    gradient: of one parameter tensor, over that tensor's norm. parameters: of all of them together, over the way
    that they have come since the start. loss, grad_norm: of the logged figures.
    """

    name: tuple[str, ...]
    optimizer_steps: int
    idle_steps: list[int]
    gradient: float | None
    parameters: float
    loss: float
    grad_norm: float | None

    @property
    def line(self) -> str:
        found = (self.gradient, self.parameters, self.loss, self.grad_norm)
        figures = ["" if figure is None else f"{figure:.1e}" for figure in found]
        idle = " + ".join(map(str, self.idle_steps))
        return f"| {' | '.join([*self.name, str(self.optimizer_steps), idle, *figures])} |"


COLUMNS = ("training", "model", "dtype", "engine", "ranks", "GA", "optimizer steps", "idle")
FIGURES = ("gradient", "parameters", "loss", "grad_norm")


def compare(
    name: tuple[str, ...], output_dir: Path, world_size: int, replay: Callable[[list[list[int]]], Reference]
) -> Cell:
    """Replay what `output_dir` tells of, and measure. Checks that every epoch trains on the same rows, each once."""
    audits = read_audits(output_dir, world_size)
    lines = [line for audit in audits for line in audit]
    epochs = range(max(line["epoch"] for line in lines) + 1)
    rows = [sorted(id for line in lines if line["epoch"] == epoch for id in line["ids"]) for epoch in epochs]
    assert all(ids == list(range(len(rows[0]))) for ids in rows)

    record = torch.load(output_dir / RECORD)
    reference = replay(ids_of_optimizer_steps(audits))
    num_steps = len(reference.parameters)
    assert num_steps == len(record["parameters"]) == len(record["logs"])
    assert len(record["gradients"]) in (0, num_steps)
    norms = [entry.get("grad_norm") for entry in record["logs"]]
    return Cell(
        name=name,
        optimizer_steps=num_steps,
        idle_steps=[sum(line["idle"] for line in lines if line["epoch"] == epoch) for epoch in epochs],
        gradient=max(map(of_one_tensor, record["gradients"], reference.gradients), default=None),
        parameters=max(
            distance(found, expected) / distance(reference.start, expected)
            for found, expected in zip(record["parameters"], reference.parameters)
        ),
        loss=max(
            max(abs(entry["loss"] - expected) - LOSS_ROUNDING, 0.0) / expected
            for entry, expected in zip(record["logs"], reference.losses)
        ),
        grad_norm=max(abs(found - expected) / expected for found, expected in zip(norms, reference.norms)),
    )


def of_one_tensor(found: Tensors, expected: Tensors) -> float:
    """The largest relative difference of a tensor. What is all zero must be so in both."""
    assert found.keys() == expected.keys()
    differences = [((found[name] - value).norm().item(), value.norm().item()) for name, value in expected.items()]
    return max(difference / norm if norm else float(difference > 0) for difference, norm in differences)


def distance(found: Tensors, expected: Tensors) -> float:
    assert found.keys() == expected.keys()
    return torch.stack([(found[name] - value).double().norm() for name, value in expected.items()]).norm().item()


def summary(cells: list[Cell]) -> str:
    """The cells as a table in Markdown."""
    names = (*COLUMNS, *FIGURES)
    sides = ["--:" if name in ("ranks", "GA", "optimizer steps", *FIGURES) else "---" for name in names]
    return "\n".join([f"| {' | '.join(names)} |", f"|{'|'.join(sides)}|", *(cell.line for cell in cells)])
