"""I8, I9: with any cut of an optimizer step over ranks and micro-steps, the losses add up to the defined loss."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean

import pytest
from toy import a_micro_batch

from odb_factory.accounting import loss_of
from odb_factory.config import LOSS_SCALINGS
from odb_factory.data.samples import MicroBatch, SampleInfo, token_weights


@dataclass(frozen=True)
class Row:
    """A sample: its tokens, the losses of its supervised tokens, the labels that stock counts; and the number of the
    step, of the rank and of the micro-batch that stock may take a mean over."""

    tokens: int
    losses: list[float]
    labels: int
    step: int
    rank: int
    micro_batch: int


def random_rows(rng: random.Random) -> list[Row]:
    """Rows in micro-batches of three, which stock deals to two ranks in turn; some have a first label, too."""
    rows = []
    for k in range(rng.randrange(1, 25)):
        losses = [rng.uniform(0.1, 9) for _ in range(rng.randrange(1, 40))]
        rows.append(Row(len(losses) + rng.randrange(1, 30), losses, len(losses) + k % 2, 0, k // 3 % 2, k // 3))
    return rows


def random_cut(rng: random.Random, rows: list[Row]) -> list[list[list[Row]]]:
    """[rank][micro-step], lists of samples; some are empty (idle)."""
    num_micro_steps = rng.randrange(1, 5)
    slots: list[list[list[Row]]] = [[[] for _ in range(num_micro_steps)] for _ in range(rng.randrange(1, 5))]
    for row in rows:
        rng.choice(rng.choice(slots)).append(row)
    return slots


def counted(row: Row, mean: str) -> int:
    """The contribution of the row to the denominator of stock's mean."""
    return len(row.losses) if mean == "micro_batch" else row.labels


def planned(rows: list[Row], slots: list[list[list[Row]]], mean: str) -> list[list[MicroBatch]]:
    """[rank][micro-step], as the loader of each rank returns them."""
    units = Counter[int]()
    for row in rows:
        units[getattr(row, mean)] += counted(row, mean)
    template = a_micro_batch()
    step = replace(
        template.step,
        num_micro_batches=len(slots[0]),
        num_stock_means=len(units),
        samples=len(rows),
        units=sum(len(row.losses) for row in rows),
        tokens=sum(row.tokens for row in rows),
        active_ranks=sum(bool(own) for rank in slots for own in rank),
    )

    def info(row: Row) -> SampleInfo:
        return SampleInfo(rows.index(row), row.tokens, len(row.losses), units[getattr(row, mean)])

    return [
        [replace(template, step=step, index=n, samples=tuple(map(info, own))) for n, own in enumerate(rank)]
        for rank in slots
    ]


def mean_of(rows: Iterable[Row]) -> float:
    return fmean(loss for row in rows for loss in row.losses)


def defined(scaling: str, rows: list[Row], slots: list[list[list[Row]]], mean: str) -> float:
    active = [own for rank in slots for own in rank if own]
    if scaling == "stock":
        groups = [[row for row in rows if getattr(row, mean) == k] for k in {getattr(row, mean) for row in rows}]
        return fmean(
            math.fsum(loss for row in own for loss in row.losses) / sum(counted(row, mean) for row in own)
            for own in groups
        )
    if scaling == "exact":
        return mean_of(rows)
    if scaling == "approx":
        tokens = [sum(row.tokens for row in own) for own in active]
        return math.fsum(n * mean_of(own) for n, own in zip(tokens, active)) / sum(tokens)
    return fmean(map(mean_of, active))


@pytest.mark.parametrize(
    ("scaling", "mean"), [("stock", "rank"), ("stock", "micro_batch"), *((name, "step") for name in LOSS_SCALINGS)]
)
def test_any_cut_adds_up_to_the_definition(scaling: str, mean: str) -> None:
    """The engine adds the losses of micro-batches up over micro-steps and averages over ranks.

    A micro-batch whose samples have equal weights keeps the model's own mean.
    """
    for seed in range(40):
        rng = random.Random(seed)
        rows = random_rows(rng)
        slots = random_cut(rng, rows)
        total = 0.0
        for of_rank, batches in zip(slots, planned(rows, slots, mean)):
            for own, micro_batch in zip(of_rank, batches):
                scale, row_weights = loss_of(token_weights(micro_batch, scaling, len(slots)), micro_batch.units)
                if micro_batch.idle:
                    assert (scale, row_weights) == (0.0, None)
                elif row_weights is None:
                    total += scale * mean_of(own)
                else:
                    assert mean in ("rank", "micro_batch")
                    weighed = list(zip(row_weights, own))
                    assert math.fsum(weight * len(row.losses) for weight, row in weighed) == pytest.approx(1)
                    total += scale * math.fsum(weight * math.fsum(row.losses) for weight, row in weighed)
        assert total / len(slots) == pytest.approx(defined(scaling, rows, slots, mean), rel=1e-12), seed
