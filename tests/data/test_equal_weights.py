"""I9 for losses that are one mean over a micro-batch: samples that stock weighs differently never share one."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from odb_factory.data.order import MEAN_OF_MICRO_BATCH, StockSteps, split_by_weight
from odb_factory.planner import Budget, Cost, make_metadata, plan_optimizer_step

STOCK = StockSteps(global_batch_size=8, batch_size=2, world_size=2, num_samples=None, mean=MEAN_OF_MICRO_BATCH)


def buffers_of(rng: random.Random, stock: StockSteps, num_ranks: int, num_rows: int, left_out: int) -> list:
    """An optimizer step as its ranks hold it. left_out: rows that have been rejected."""
    positions = sorted(rng.sample(range(num_rows), num_rows - left_out))
    ranks = []
    for rank in range(num_ranks):
        mine = [position for position in positions if position % num_ranks == rank]
        costs = [Cost(rng.randrange(2, 60), units=1, has_media=True, modality=rng.randrange(2)) for _ in mine]
        ranks.append(make_metadata(costs, [0] * len(mine), exhausted=True, positions=mine))
    return ranks


@pytest.mark.parametrize("seed", range(40))
def test_samples_of_a_micro_batch_weigh_the_same(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks, batch_size = rng.choice((1, 2, 4)), rng.choice((1, 3, 4))
    stock = StockSteps(
        global_batch_size=24,
        batch_size=batch_size,
        world_size=num_ranks,
        num_samples=None,
        mean=MEAN_OF_MICRO_BATCH,
        equal_weights=True,
    )
    num_rows = rng.randrange(1, 25)
    buffers = buffers_of(rng, stock, num_ranks, num_rows, left_out=rng.randrange(min(3, num_rows)))
    before = [buffer.rows.copy() for buffer in buffers]
    separated = split_by_weight(buffers, stock)
    rows = np.concatenate([buffer.rows for buffer in buffers])
    divisors = stock.means_of(rows)[0][:, 0]

    assert all((buffer.rows == rows).all() for buffer, rows in zip(buffers, before)), "what is exchanged stays"
    for ours, theirs in zip(separated, buffers, strict=True):
        assert ours.exhausted == theirs.exhausted
        assert all((ours.rows[name] == theirs.rows[name]).all() for name in rows.dtype.names if name != "modality")
    plan = plan_optimizer_step(separated, Budget(200), balance=True)
    groups = [group for rank in plan.groups for group in rank if group]
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(len(rows)))
    for group in groups:
        assert len(set(divisors[group])) == 1
        assert len(set(rows["modality"][group])) == 1


def test_nothing_changes_where_all_weigh_the_same() -> None:
    buffers = buffers_of(random.Random(1), STOCK, 2, 8, left_out=0)
    for separated, buffer in zip(split_by_weight(buffers, STOCK), buffers, strict=True):
        assert (separated.rows == buffer.rows).all()
