"""Plan one optimizer step whose samples are given: all of them, on all ranks, cut into K micro-steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from odb_factory.planning.candidates import Rows
from odb_factory.planning.cost import Budget, CostModel
from odb_factory.planning.cuts import cut_by_one_cap, cut_by_stretches, fewest_steps
from odb_factory.planning.flat_keep import cut_flat
from odb_factory.planning.flat_samples import Samples
from odb_factory.planning.matching import Cut, PoolGroup, make_cut, place
from odb_factory.planning.metadata import BufferMetadata
from odb_factory.planning.plan import Plan, exceeds_limit, pool, to_plan
from odb_factory.planning.pools import Pools, lower_bound
from odb_factory.planning.two_caps import cut_by_two_caps

NUM_CANDIDATES = 4
"""So many K are tried, from the least that the budgets allow."""
MAX_STEPS_OF_TWO_CAPS = 4
"""Up to this K micro-steps may have different caps: with more of them that saves next to nothing."""


def plan_optimizer_step(
    buffers: Sequence[BufferMetadata], budget: Budget, *, balance: bool, model: CostModel = CostModel()
) -> Plan:
    """Cut the samples of one optimizer step into K micro-steps, the same K on all ranks.

    buffers: one a rank, the samples of this optimizer step that it holds.
    balance: a sample may go to another rank than the one that holds it, unless they are too heavy to travel.
    model: K and the cut are those for which the sum over micro-steps of what the costliest rank costs is least.

    Every sample is in exactly one micro-batch, every micro-batch of two or more is within both budgets, and a rank
    idles, in the last micro-steps, only where there are too few samples. The costliest micro-step comes first, so that
    the peak of memory shows at once.

        buffers = [make_metadata([Cost(8), Cost(3)], [0, 0], exhausted=False)]
        plan = plan_optimizer_step(buffers, Budget(16), balance=True)
        plan.groups  # [[[1, 0]]]: of rank 0 the samples of each micro-step
    """
    table, starts, owner_rank = pool(buffers)
    balance = balance and len(buffers) > 1
    exceeds_transfer_limit = balance and exceeds_limit(buffers)
    balance = balance and not exceeds_transfer_limit
    index, num_ranks = np.arange(len(table)), len(buffers)
    if budget.layout == "flat":
        pool_of = np.zeros_like(owner_rank) if balance else owner_rank
        cut = cut_flat(Samples(table, index, pool_of, num_ranks if balance else 1, budget), model)
    elif balance:
        cut = _cut_padded(Pools(Rows(table, index, budget), np.array([0, len(table)]), num_ranks, model))
    else:
        cut = _cut_padded(Pools(Rows(table, index, budget, owner_rank), np.array(starts), 1, model))
    steps = [place(step, owner_rank, num_ranks, balance=balance) for step in cut]
    final = all(buffer.exhausted for buffer in buffers)
    return to_plan(steps, table, starts, owner_rank, budget, final, exceeds_transfer_limit)


def _cut_padded(pools: Pools) -> list[list[PoolGroup]]:
    """The groups of each micro-step, the costliest micro-step first."""
    cut = _best_cut(pools)
    steps: list[list[PoolGroup]] = [[] for _ in range(int(cut.steps.max(initial=-1)) + 1)]
    for step, pool_of, start, end in zip(*(column.tolist() for column in (cut.steps, cut.pools, cut.starts, cut.ends))):
        steps[step].append((pool_of, pools.rows.group(start, end)))
    return steps


def _best_cut(pools: Pools) -> Cut:
    if not len(pools.rows):
        return make_cut(pools, [[] for _ in pools.starts])
    least = fewest_steps(pools)
    best = cut_by_one_cap(pools, least)
    if len(pools.starts) == 1:
        best = min(best, cut_by_stretches(pools) or best, key=lambda cut: cut.cost)
    for num_steps in range(least + 1, least + NUM_CANDIDATES):
        if lower_bound(pools, num_steps) < best.cost:
            best = min(best, cut_by_one_cap(pools, num_steps), key=lambda cut: cut.cost)
    for num_steps in range(max(least, 2), min(least + NUM_CANDIDATES, MAX_STEPS_OF_TWO_CAPS + 1)):
        for num_first in range(1, num_steps):
            other = cut_by_two_caps(pools, num_first, num_steps - num_first, best.cost)
            if other is not None and other.cost < best.cost:
                best = other
    return best
