"""Ways to cut all samples of an optimizer step into groups for K micro-steps.

Ranks wait for the costliest group of a micro-step. So a micro-step is given a *cap* on the cost of its groups, and a
cut is found by walking through the sorted samples and making each group as large as the cap allows.
"""

from __future__ import annotations

import heapq

import numpy as np

from odb_factory.planning.candidates import Rows
from odb_factory.planning.matching import Cut, Group, make_cut
from odb_factory.planning.pools import NO_CAP, Pools, next_ends

PRECISION = 12
"""A cap is searched to one part in 2 ** PRECISION."""


def walk(ends: list[int], start: int, end: int) -> list[Group]:
    """The groups from `start` on, each as large as it can be."""
    groups = []
    while start < end:
        groups.append((start, ends[start]))
        start = ends[start]
    return groups


def _after(ends: np.ndarray, num_groups: int) -> np.ndarray:
    """Where so many groups lead to, from every start [n + 1]: the walk is doubled as often as needed."""
    reached = np.arange(len(ends))
    while num_groups:
        if num_groups & 1:
            reached = ends[reached]
        num_groups >>= 1
        if num_groups:
            ends = ends[ends]
    return reached


def fewest_steps(pools: Pools) -> int:
    """The least K that the budgets allow."""
    ends = next_ends(pools.rows, np.array([[NO_CAP]]), pools.model)[0].tolist()
    return max(-(-len(walk(ends, *bounds)) // pools.slots) for bounds in zip(pools.starts, pools.ends))


def cut_by_one_cap(pools: Pools, num_steps: int) -> Cut:
    """All micro-steps have one cap, the lowest at which the samples of a pool fit into their slots (bisection).

    This is multiprocessor scheduling by the dual of bin packing (MULTIFIT: Coffman, Garey and Johnson 1978).
    """
    rows, model = pools.rows, pools.model
    pool = np.repeat(np.arange(len(pools.starts)), np.diff(pools.bounds))
    slots = num_steps * pools.slots
    single = rows.costs(np.arange(len(rows)), np.arange(len(rows)) + 1, model)
    ends = next_ends(rows, np.array([[NO_CAP]]), model)[0]
    low, high = np.zeros((2, len(pools.starts)), dtype=np.int64)
    np.maximum.at(low, pool, single)
    np.maximum.at(high, pool, rows.costs(np.arange(len(rows)), ends[:-1], model))
    while (searching := (high - low) << PRECISION > high).any():
        middle = (low + high) // 2
        tried = next_ends(rows, middle[pool][None], model)[0]
        fits = _after(tried, slots)[pools.starts] >= pools.ends
        low, high = np.where(searching & ~fits, middle + 1, low), np.where(searching & fits, middle, high)
    chosen = next_ends(rows, high[pool][None], model)[0].tolist()
    groups = [walk(chosen, *bounds) for bounds in zip(pools.starts.tolist(), pools.ends.tolist())]
    return fill_slots(pools, groups, slots)


def cheapest_cut(pools: Pools) -> Cut:
    """For one rank, which waits for nobody: the groups for which the sum of costs is least (shortest path)."""
    rows, model = pools.rows, pools.model
    ends = next_ends(rows, np.array([[NO_CAP]]), model)[0].tolist()
    following = [0] * len(rows)
    costs = np.zeros(len(rows) + 1, dtype=np.int64)
    for start in range(len(rows) - 1, -1, -1):
        choices = np.arange(start + 1, ends[start] + 1)
        count, lengths, patches = rows.shapes(np.full(len(choices), start), choices)
        padded = count * lengths
        total = model.of(padded, patches, padded * lengths) + costs[choices]
        fits = (count == 1) | (padded <= rows.budget.token_budget)
        if rows.budget.max_patches is not None:
            fits &= (count == 1) | (patches <= rows.budget.max_patches)
        best = int(np.where(fits, total, NO_CAP).argmin())
        costs[start], following[start] = total[best], choices[best]
    return make_cut(pools, [walk(following, 0, len(rows))])


def fill_slots(pools: Pools, groups: list[list[Group]], slots: int) -> Cut:
    """The cut with groups split until every slot has one, as far as there are samples: no rank idles without need."""
    return make_cut(pools, [split_to_fill_slots(pools.rows, own, slots) for own in groups])


def split_to_fill_slots(rows: Rows, groups: list[Group], slots: int) -> list[Group]:
    """Split groups, the one with most rows first, until there are `slots` of them or each has a single row."""
    collation = rows.budget.collation
    grows = collation.dummy_media_tokens > 0 or collation.dummy_media_patches > 0
    heap = [(start - end, start, end) for start, end in groups]
    heapq.heapify(heap)
    while heap and len(heap) < slots and heap[0][0] < -1:
        _, start, end = heapq.heappop(heap)
        # A half without the media of the whole gets dummy media, which may be too much for it. Then the longest or the
        # shortest goes alone: the media are not in both, and what keeps them fits as it did.
        places = ((start + end) // 2, start + 1, end - 1)
        middle = next(k for k in places if not grows or (_fits(rows, start, k) and _fits(rows, k, end)))
        for half in ((start, middle), (middle, end)):
            heapq.heappush(heap, (half[0] - half[1], *half))
    return [(start, end) for _, start, end in heap]


def _fits(rows: Rows, start: int, end: int) -> bool:
    return rows.largest_fitting_end(start, end, rows.budget.token_budget) == end
