"""The reference of a recorded training: one plain process, one batch an optimizer step, its own loss; their distance.

Nothing of odb_factory is used but the ids in the audit files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from support import read_jsonl
from training.cases import IGNORE, LEARNING_RATE, Case, Collator, load_model, make_rows, precision
from training.gradient_ranks import RECORD
from transformers import AutoConfig

Tensors = dict[str, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Loss of each supervised token, given its row of logits and its label."""


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(logits, -1) - logits.gather(-1, labels[:, None])[:, 0]


def smoothed(epsilon: float) -> Loss:
    """The Trainer's label smoothing: a share `epsilon` of the loss is the mean over the vocabulary."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        everywhere = torch.logsumexp(logits, -1, keepdim=True) - logits
        return (1 - epsilon) * token_loss(logits, labels) + epsilon * everywhere.mean(-1)

    return loss


def dynamic(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """LLaMA-Factory's `use_dft_loss`: a token's loss weighs as much as its probability, which has no gradient."""
    loss = token_loss(logits, labels)
    return loss * torch.exp(-loss.detach())


class Reference:
    """Takes optimizer steps like the Trainer's; `gradients`, `parameters`, `losses` and `norms` tell what each did."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        loss: Loss = token_loss,
        learning_rate: float = LEARNING_RATE,
        max_norm: float = float("inf"),
        autocast: bool = False,
    ):
        self.model, self.loss, self.max_norm, self.autocast = model.train(), loss, max_norm, autocast
        self.learning_rate = learning_rate
        self.start = self._copy()
        self.gradients: list[Tensors] = []
        self.parameters: list[Tensors] = []
        self.losses: list[float] = []
        self.norms: list[float] = []

    def step(self, batch: dict[str, torch.Tensor], loss_scaling: str = "exact") -> None:
        """One optimizer step on one batch: the mean loss of all its supervised tokens in one go.

        loss_scaling: `sample` or `square`: the mean over the rows of their own means, or weighed by the square root of
        their supervised tokens.
        """
        inputs = dict(batch)
        targets = inputs.pop("labels")[:, 1:]
        supervised = targets != IGNORE
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            logits = self.model(**inputs).logits[:, :-1]
        counts = supervised.sum(1, keepdim=True)
        shares = {"sample": 1 / counts, "square": 1 / counts.sqrt()}.get(loss_scaling, torch.ones_like(counts))
        weights = (shares * supervised)[supervised]
        logits = logits[supervised]
        if self.autocast:
            logits = logits.float()
        loss = (self.loss(logits, targets[supervised]) * weights).sum() / weights.sum()
        names, parameters = zip(*((name, p) for name, p in self.model.named_parameters() if p.requires_grad))
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found)]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
        scale = min(1.0, self.max_norm / (norm + 1e-6))
        gradients = [gradient * scale for gradient in gradients]
        self.update(parameters, gradients)
        self.gradients.append(dict(zip(names, gradients)))
        self.parameters.append(self._copy())
        self.losses.append(loss.item())
        self.norms.append(norm)

    def update(self, parameters: tuple[torch.nn.Parameter, ...], gradients: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients):
                parameter -= self.learning_rate * gradient

    def _copy(self) -> Tensors:
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}


class AdamReference(Reference):
    """The same with Adam (no weight decay), written out."""

    BETAS, EPS = (0.9, 0.999), 1e-8

    def update(self, parameters: tuple[torch.nn.Parameter, ...], gradients: list[torch.Tensor]) -> None:
        if not self.gradients:
            self.first = [torch.zeros_like(p) for p in parameters]
            self.second = [torch.zeros_like(p) for p in parameters]
        step = len(self.gradients) + 1
        (beta1, beta2), rate = self.BETAS, self.learning_rate
        with torch.no_grad():
            for p, gradient, first, second in zip(parameters, gradients, self.first, self.second):
                first.mul_(beta1).add_(gradient, alpha=1 - beta1)
                second.mul_(beta2).add_(gradient**2, alpha=1 - beta2)
                p -= rate * (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + self.EPS)


def ids_of_optimizer_steps(audits: list[list[dict[str, Any]]]) -> list[list[int]]:
    """The rows of each optimizer step, all ranks together, in no order that could matter."""
    steps: dict[int, list[int]] = {}
    for line in (line for audit in audits for line in audit):
        steps.setdefault(line["optimizer_step"], []).extend(line["ids"])
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return [sorted(steps[step]) for step in sorted(steps)]


def read_audits(folder: Path, world_size: int) -> list[list[dict[str, Any]]]:
    return [read_jsonl(folder / f"odb_audit_rank{rank}.jsonl") for rank in range(world_size)]


def replay(case: Case, path: str | Path, world_size: int, steps: list[list[int]]) -> Reference:
    """The reference of a case: from the same parameters, the same rows in each optimizer step."""
    arguments = case.arguments
    kind = AdamReference if arguments.get("optim") == "adamw_torch" else Reference
    model = load_model(case, path)
    with precision(case.dtype):
        rows = make_rows(case, path, world_size)
        collate = Collator(model, AutoConfig.from_pretrained(path))
        reference = kind(
            model,
            loss=smoothed(arguments["label_smoothing_factor"]) if "label_smoothing_factor" in arguments else token_loss,
            learning_rate=arguments.get("learning_rate", LEARNING_RATE),
            max_norm=arguments.get("max_grad_norm", float("inf")),
            autocast=arguments.get("bf16", False),
        )
        for ids in steps:
            reference.step(collate([rows[i] for i in ids]), case.loss_scaling)
    return reference


# Comparison

LOSS_ROUNDING = 5e-5 if int(transformers.__version__.split(".")[0]) < 5 else 0.0
"""Transformers 4 rounds the loss to four digits before it logs it."""


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
    grad_norm: float | None


def compare(output_dir: Path, world_size: int, replay: Callable[[list[list[int]]], Reference]) -> Cell:
    """Replay the training recorded in `output_dir`, and measure. Every epoch trains on the same rows, each once."""
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
