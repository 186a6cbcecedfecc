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
"""The one cap is searched to one part in 2 ** PRECISION."""
MAX_SLOTS = 4
"""Micro-steps are stretches of the sorted samples where no more ranks share them."""
MIN_CAPS, MAX_CAPS, MAX_STATES, FINER_CAPS = 32, 256, 1 << 18, 16
"""Caps of single micro-steps are tried at so many values; at fewer, or not at all, for very many samples. Those that
are used are then tried at so many more."""


def walk(ends: list[int], start: int, end: int) -> list[Group]:
    """The groups from `start` on, each as large as it can be."""
    groups = []
    while start < end:
        assert ends[start] > start
        groups.append((start, ends[start]))
        start = ends[start]
    return groups


def _after(ends: np.ndarray, num_groups: int) -> np.ndarray:
    """Where so many groups lead to, from every start [caps, n + 1]: the walk is doubled as often as needed."""
    reached = np.broadcast_to(np.arange(ends.shape[1]), ends.shape)
    while num_groups:
        if num_groups & 1:
            reached = np.take_along_axis(ends, reached, axis=1)
        num_groups >>= 1
        if num_groups:
            ends = np.take_along_axis(ends, ends, axis=1)
    return reached


def fewest_steps(pools: Pools) -> int:
    """The least K that the budgets allow."""
    ends = pools.largest_ends.tolist()
    bounds = zip(pools.starts.tolist(), pools.ends.tolist())
    return max(-(-len(walk(ends, start, end)) // pools.slots) for start, end in bounds)


def cut_by_one_cap(pools: Pools, num_steps: int) -> Cut:
    """All micro-steps have one cap, the lowest at which the samples of a pool fit into their slots (bisection).

    This is multiprocessor scheduling by the dual of bin packing (MULTIFIT: Coffman, Garey and Johnson 1978).
    """
    slots = num_steps * pools.slots
    low, high = pools.cap_range
    while (searching := (high - low) << PRECISION > high).any():
        middle = (low + high) // 2
        tried = next_ends(pools, middle[pools.pool_of][None])
        fits = _after(tried, slots)[0, pools.starts] >= pools.ends
        low, high = np.where(searching & ~fits, middle + 1, low), np.where(searching & fits, middle, high)
    chosen = next_ends(pools, high[pools.pool_of][None])[0].tolist()
    groups = [walk(chosen, *bounds) for bounds in zip(pools.starts.tolist(), pools.ends.tolist())]
    return fill_slots(pools, groups, slots)


def cut_by_stretches(pools: Pools) -> Cut | None:
    """Of one pool: each micro-step takes the samples that follow, with a cap of its own (shortest path).

    Best where few ranks share the samples; for a single rank, which waits for nobody, it is the cheapest cut of all,
    but for the values of caps that are tried.
    """
    rows, model = pools.rows, pools.model
    starts, highest = np.arange(len(rows)), int(pools.cap_range[1].max())
    num_caps = min(MAX_CAPS, MAX_STATES // len(rows))
    if num_caps < MIN_CAPS or pools.slots > MAX_SLOTS or highest <= model.fixed:
        return None
    spacing = -(-(highest - model.fixed) // num_caps)
    caps = np.arange(highest, model.fixed, -max(spacing, 1))
    while True:
        ends = next_ends(pools, caps[:, None])
        following = _after(ends, pools.slots)
        costs = np.where(following[:, :-1] > starts, caps[:, None], NO_CAP)
        least, chosen = np.zeros(len(rows) + 1, dtype=np.int64), [0] * len(rows)
        for start in range(len(rows) - 1, -1, -1):
            total = costs[:, start] + least[following[:, start]]
            chosen[start] = int(total.argmin())
            least[start] = total[chosen[start]]
        start, groups, used = 0, [], set()
        while start < len(rows):
            cap, end = chosen[start], int(following[chosen[start], start])
            groups += walk(ends[cap].tolist(), start, end)
            used.add(int(caps[cap]))
            start = end
        finer = min(FINER_CAPS, MAX_STATES // (len(rows) * len(used)))
        if spacing <= 1 or finer <= 1:
            return fill_slots(pools, [groups], -(-len(groups) // pools.slots) * pools.slots)
        # Once more, with the values between those that were used and the next lower ones.
        between = spacing * np.arange(finer) // finer
        caps, spacing = np.unique(np.array(sorted(used))[:, None] - between)[::-1], 1
        caps = np.append(highest, caps[(caps > model.fixed) & (caps < highest)])


def fill_slots(pools: Pools, groups: list[list[Group]], slots: int) -> Cut:
    """The cut with groups split until every slot has one, as far as there are samples: no rank idles without need."""
    return make_cut(pools, [split_to_fill_slots(pools.rows, own, slots) for own in groups])


def split_to_fill_slots(rows: Rows, groups: list[Group], slots: int) -> list[Group]:
    """Split groups, the one with most rows first, until there are `slots` of them or none can be split."""
    grows = rows.budget.collation.has_dummies
    heap = [(start - end, start, end) for start, end in groups]
    heapq.heapify(heap)
    whole: list[Group] = []
    while heap and len(heap) + len(whole) < slots and heap[0][0] < -1:
        _, start, end = heapq.heappop(heap)
        # A half without the media of the whole gets dummy media, which may be too much for it. Then the longest or the
        # shortest goes alone: the media are not in both, and what keeps them fits as it did. Where both audio and other
        # media are told apart, even that may be too much.
        places = ((start + end) // 2, start + 1, end - 1)
        middles = (k for k in places if not grows or (_fits(rows, start, k) and _fits(rows, k, end)))
        middle = next(middles, None)
        if middle is None:
            whole.append((start, end))
            continue
        for half in ((start, middle), (middle, end)):
            heapq.heappush(heap, (half[0] - half[1], *half))
    return [*whole, *((start, end) for _, start, end in heap)]


def _fits(rows: Rows, start: int, end: int) -> bool:
    return rows.largest_fitting_end(start, end, rows.budget.token_budget) == end
