"""I8, I9: with any cut of an optimizer step over ranks and micro-steps, the losses add up to what the word says."""

from __future__ import annotations

import math
import operator
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import pytest
from toy import a_micro_batch

from odb_factory.accounting.losses import loss_of
from odb_factory.data.samples import MicroBatch, SampleInfo, token_weights

Losses = list[list[float]]
"""Of each sample the losses of its supervised tokens."""
Slots = list[list[list[int]]]
"""[rank][micro-step] -> numbers of samples; some are idle."""


@dataclass(frozen=True)
class Row:
    """A sample: its tokens, its supervised tokens, the labels that stock counts, stock's rank and micro-batch."""

    tokens: int
    supervised: int
    labels: int
    rank: int
    micro_batch: int


def random_rows(rng: random.Random, num_rows: int) -> list[Row]:
    """Of micro-batches of three, which stock deals to two ranks in turn; some have a first label, too."""
    rows = []
    for k in range(num_rows):
        supervised = rng.randrange(1, 40)
        rows.append(Row(supervised + rng.randrange(1, 30), supervised, supervised + k % 2, k // 3 % 2, k // 3))
    return rows


def cut(rng: random.Random, num_rows: int) -> Slots:
    num_micro_steps = rng.randrange(1, 5)
    slots: Slots = [[[] for _ in range(num_micro_steps)] for _ in range(rng.randrange(1, 5))]
    for k in range(num_rows):
        rng.choice(rng.choice(slots)).append(k)
    return slots


def optimizer_step(rows: list[Row], slots: Slots, stock_mean: str) -> list[list[MicroBatch]]:
    """[rank][micro-step], as the loader of each rank hands them out. stock_mean: what stock takes a mean over."""
    mean_of = [0 if stock_mean == "step" else getattr(row, stock_mean) for row in rows]
    units = Counter[int]()
    for mean, row in zip(mean_of, rows):
        units[mean] += row.supervised if stock_mean == "micro_batch" else row.labels
    some = a_micro_batch()
    step = replace(
        some.step,
        num_micro_batches=len(slots[0]),
        num_stock_means=len(units),
        samples=len(rows),
        units=sum(row.supervised for row in rows),
        tokens=sum(row.tokens for row in rows),
        active_ranks=sum(bool(numbers) for rank in slots for numbers in rank),
    )
    samples = [SampleInfo(k, row.tokens, row.supervised, units[mean_of[k]]) for k, row in enumerate(rows)]

    def micro_batch(index: int, numbers: list[int]) -> MicroBatch:
        return replace(some, step=step, index=index, samples=tuple(samples[k] for k in numbers))

    return [[micro_batch(*numbers) for numbers in enumerate(rank)] for rank in slots]


def _mean(rows: Sequence[int], losses: Losses) -> float:
    return fmean(loss for k in rows for loss in losses[k])


def _stock(rows: list[Row], losses: Losses, stock_mean: str) -> float:
    """As stock makes it: sums over its own micro-batches, divided by what the Trainer divides by."""
    if stock_mean == "step":
        return math.fsum(map(math.fsum, losses)) / sum(row.labels for row in rows)
    groups: dict[int, list[int]] = {}
    for k, row in enumerate(rows):
        groups.setdefault(getattr(row, stock_mean), []).append(k)
    if stock_mean == "rank":
        sums = [
            (math.fsum(x for k in own for x in losses[k]), sum(rows[k].labels for k in own)) for own in groups.values()
        ]
        return fmean(total / labels for total, labels in sums)
    return fmean(_mean(own, losses) for own in groups.values())


def _defined(scaling: str, rows: list[Row], losses: Losses, slots: Slots, stock_mean: str) -> float:
    active = [ids for rank in slots for ids in rank if ids]
    if scaling == "stock":
        return _stock(rows, losses, stock_mean)
    if scaling == "exact":
        return _mean(range(len(rows)), losses)
    if scaling == "approx":
        tokens = [sum(rows[k].tokens for k in ids) for ids in active]
        return math.fsum(n * _mean(ids, losses) for n, ids in zip(tokens, active)) / sum(tokens)
    return fmean(_mean(ids, losses) for ids in active)


def _summed(scaling: str, losses: Losses, micro_batches: list[list[MicroBatch]]) -> float:
    """What an engine makes of the losses of all micro-batches: their sum over micro-steps, averaged over ranks."""
    total = 0.0
    for micro_batch in (one for rank in micro_batches for one in rank):
        loss: Any = loss_of(token_weights(micro_batch, scaling, len(micro_batches)), micro_batch.units)
        if micro_batch.idle:
            assert (loss.scale, loss.row_weights) == (0.0, None)
        elif loss.row_weights is None:
            total += loss.scale * _mean(micro_batch.ids, losses)
        else:
            assert math.fsum(map(operator.mul, loss.row_weights, micro_batch.units)) == pytest.approx(1), "of a mean"
            own = zip(loss.row_weights, micro_batch.ids)
            total += loss.scale * math.fsum(weight * math.fsum(losses[k]) for weight, k in own)
    return total / len(micro_batches)


@pytest.mark.parametrize(
    ("scaling", "stock_mean"),
    [("stock", "step"), ("stock", "rank"), ("stock", "micro_batch"), ("exact", ""), ("approx", ""), ("none", "")],
)
def test_any_cut_adds_up_to_the_definition(scaling: str, stock_mean: str) -> None:
    """A micro-batch whose samples weigh the same keeps the model's own mean."""
    for seed in range(40):
        rng = random.Random(seed)
        rows = random_rows(rng, rng.randrange(1, 25))
        losses = [[rng.uniform(0.1, 9) for _ in range(row.supervised)] for row in rows]
        slots = cut(rng, len(rows))
        micro_batches = optimizer_step(rows, slots, stock_mean or "step")
        defined = _defined(scaling, rows, losses, slots, stock_mean)
        assert _summed(scaling, losses, micro_batches) == pytest.approx(defined, rel=1e-12), seed
        for one in (one for rank in micro_batches for one in rank):
            weights = token_weights(one, scaling, 1)
            assert stock_mean in ("rank", "micro_batch") or loss_of(weights, one.units).row_weights is None
