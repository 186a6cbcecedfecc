"""Estimated peak memory of the budgets of a look. An estimate: nothing is measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from odb_factory.dry_run.outcome import Outcome
from odb_factory.errors import ConfigError

if TYPE_CHECKING:
    from odb_factory.dry_run.look import Look

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)b?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Estimated bytes on each rank, at the peak of the heaviest micro-batch under these budgets.

    activations: without logits. logits: tokens x vocabulary, with copies and gradients; logits_with_fused_loss: what a
    loss without logits needs in their place. fits: whether the peak is within what was asked for.
    """

    token_budget: int
    max_patches: int | None
    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    logits: int
    logits_with_fused_loss: int
    peak: int
    peak_with_fused_loss: int
    fits: bool


def parse_size(text: str) -> int:
    """Bytes of `80GiB` or `24GB`. Raises a one-line `ConfigError`."""
    found = SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * UNITS[found[2].lower()]) if found else 0
    if not size:
        raise ConfigError(f"--memory: {text!r} is no size of memory; write it with its unit, like 80GiB.")
    return size


def memory_rows(found: Look, available: int) -> tuple[list[MemoryRow], tuple[str, ...]]:
    """A row for each budget of the look, and what the estimate takes for granted. available: bytes on each rank.

    Raises `ConfigError` for a model or a way of training that cannot be estimated.
    """
    from odb_factory.dry_run.memory.estimate import MicroBatchShape, estimate_peak_memory

    shapes = [
        MicroBatchShape(rows=one.rows, tokens=one.tokens, row_length=one.row_length, patches=one.patches)
        for outcome in found.budgets
        for one in outcome.heaviest
    ]
    estimate = estimate_peak_memory(found.asked.parsed, shapes, ranks=found.asked.ranks)
    of_shapes = iter(estimate.shapes)
    rows = []
    for outcome in found.budgets:
        heaviest = max((next(of_shapes) for _ in outcome.heaviest), key=lambda shape: shape.peak)
        assert outcome.token_budget is not None
        rows.append(
            MemoryRow(
                token_budget=outcome.token_budget,
                max_patches=outcome.max_patches,
                parameters=estimate.parameters,
                gradients=estimate.gradients,
                optimizer_state=estimate.optimizer_state,
                activations=heaviest.activations,
                logits=heaviest.logits,
                logits_with_fused_loss=heaviest.logits_with_fused_loss,
                peak=heaviest.peak,
                peak_with_fused_loss=heaviest.peak_with_fused_loss,
                fits=heaviest.peak <= available,
            )
        )
    return rows, estimate.notes


def fitting(outcome: Outcome, rows: Sequence[MemoryRow] | None) -> bool:
    """Whether the budget of an outcome fits; without estimates every one does."""
    return rows is None or any(row.fits and row.token_budget == outcome.token_budget for row in rows)
