"""I8, I9: with any cut of an optimizer step over ranks and micro-steps, the losses add up to what the word says."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean

import pytest
from accounting.steps import Row, Slots, cut, optimizer_step, random_rows

from odb_factory.accounting.losses import loss_of
from odb_factory.data.samples import MicroBatch, token_weights

Losses = list[list[float]]
"""Of each sample the losses of its supervised tokens."""


def _mean(rows: Sequence[int], losses: Losses) -> float:
    return fmean(loss for k in rows for loss in losses[k])


def _stock(rows: list[Row], losses: Losses, stock_mean: str) -> float:
    """As stock makes it: sums over its own micro-batches, divided by what the Trainer divides by."""
    if stock_mean == "step":
        return math.fsum(map(math.fsum, losses)) / sum(row.stock_labels for row in rows)
    if stock_mean == "rank":
        ranks = sorted({row.stock_rank for row in rows})
        mine = [[k for k, row in enumerate(rows) if row.stock_rank == rank] for rank in ranks]
        labels = [sum(rows[k].stock_labels for k in own) for own in mine]
        return fmean(math.fsum(x for k in own for x in losses[k]) / n for own, n in zip(mine, labels))
    batches = sorted({row.stock_micro_batch for row in rows})
    return fmean(_mean([k for k, row in enumerate(rows) if row.stock_micro_batch == b], losses) for b in batches)


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
        loss = loss_of(token_weights(micro_batch, scaling, len(micro_batches)), micro_batch.units)
        if micro_batch.idle:
            assert (loss.scale, loss.row_weights) == (0.0, None)
        elif loss.row_weights is None:
            total += loss.scale * _mean(micro_batch.ids, losses)
        else:
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
        slots = cut(rng, len(rows), world_size=rng.randrange(1, 5), micro_batches=rng.randrange(1, 5))
        micro_batches = optimizer_step(rows, slots, stock_mean=stock_mean or "step")
        defined = _defined(scaling, rows, losses, slots, stock_mean)
        assert _summed(scaling, losses, micro_batches) == pytest.approx(defined, rel=1e-12), seed
        for one in (one for rank in micro_batches for one in rank):
            weights = token_weights(one, scaling, 1)
            assert stock_mean in ("rank", "micro_batch") or loss_of(weights, one.units).row_weights is None
