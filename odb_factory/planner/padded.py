"""Cut samples into padded micro-batches: pools, caps on the padded shape, and which groups run together."""

from __future__ import annotations

import heapq
from functools import cached_property

import numpy as np

from odb_factory.planner.cost import STEP_COST, by_number
from odb_factory.planner.plan import Samples, Step, to_steps

NO_CAP = 1 << 62
Group = tuple[int, int]
"""A range [start, end) of the sorted samples. Neighbours have similar lengths, so there is little padding."""


class Pools:
    """The samples of an optimizer step, sorted by pool, then from long to short, and the largest groups of them.

    All arithmetic is on integers, so that every rank computes the same.

    index: the sorted samples, as positions in the table [n]. pool_of, tokens, length: the pool, the row tokens and the
    padded row length of each [n]. sums_before: sums of `MEASURES` over all samples before each, and at the end over all
    [n + 1, 4]. starts, ends: bounds of each pool. max_end: the latest end of a group that starts at each sample, by its
    pool and by patches [n].
    """

    def __init__(self, samples: Samples):
        order = np.lexsort((-samples.rows["patches"], -samples.rows["row_tokens"], samples.pool))
        self.slots, self.budget = samples.slots, samples.budget
        self.index, self.pool_of = samples.index[order], samples.pool[order]
        bounds = np.searchsorted(self.pool_of, np.arange(samples.num_pools + 1))
        self.starts, self.ends = bounds[:-1], bounds[1:]
        self.tokens = samples.rows["row_tokens"][order].astype(np.int64)
        multiple = self.budget.collation.pad_to_multiple_of
        self.length = np.maximum(-(-self.tokens // multiple) * multiple, 1)
        self.sums_before = np.zeros((len(order) + 1, 4), dtype=np.int64)
        np.cumsum(samples.measures[order], axis=0, out=self.sums_before[1:])
        self.max_end = self.ends[self.pool_of]
        if self.budget.max_patches is not None:
            before = self.sums_before[:, 1]
            within = np.searchsorted(before, before[:-1] + self.budget.max_patches, side="right") - 1
            self.max_end = np.minimum(self.max_end, np.maximum(within, np.arange(len(order)) + 1))

    def __len__(self) -> int:
        return len(self.index)

    def shapes(self, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Collated tokens (padding included) and patches of many groups, none of them empty."""
        sums, count = self.sums_before[ends] - self.sums_before[starts], ends - starts
        rows, lengths, patches = self.budget.collated(sums, count, self.tokens[starts], self.tokens[ends - 1])
        return rows * lengths, patches

    def walk(self, ends: np.ndarray, start: int, end: int) -> list[Group]:
        """The groups from `start` to `end`. ends: the end of the group that starts at each sample."""
        groups, end_of = [], ends.tolist()
        while start < end:
            assert end_of[start] > start
            groups.append((start, end_of[start]))
            start = end_of[start]
        return groups

    def walks(self, ends: np.ndarray) -> list[list[Group]]:
        """The groups of each pool."""
        return [self.walk(ends, *bounds) for bounds in zip(self.starts.tolist(), self.ends.tolist())]

    @cached_property
    def single_costs(self) -> np.ndarray:
        """The cost of each sample alone [n]."""
        starts = np.arange(len(self))
        costs: np.ndarray = STEP_COST + self.shapes(starts, starts + 1)[0]
        return costs

    @cached_property
    def largest_ends(self) -> np.ndarray:
        """The largest ends that the budgets allow [n + 1]."""
        ends: np.ndarray = self.next_ends(np.array([[NO_CAP]]))[0]
        return ends

    @cached_property
    def cap_range(self) -> tuple[np.ndarray, np.ndarray]:
        """For each pool the lowest cap at which every sample can go alone, and the highest cap that any group needs."""
        costs = STEP_COST + self.shapes(np.arange(len(self)), self.largest_ends[:-1])[0]
        low, high = (
            by_number(self.pool_of, values, len(self.starts), np.maximum) for values in (self.single_costs, costs)
        )
        # A sample alone can cost more than a group: a group without media gets dummy media.
        return low, np.maximum(low, high)

    def next_ends(self, caps: np.ndarray) -> np.ndarray:
        """The largest end of a group within both budgets and a cap on its cost, for every start [caps, n + 1].

        caps: [caps, 1], or [1, n] with a separate cap for each start. A sample that breaks a budget goes alone. If a
        sample alone costs more than the cap, its end is its start: no group can start there.
        """
        starts, multiple = np.arange(len(self)), self.budget.row_multiple
        tokens, available = np.minimum(caps - STEP_COST, self.budget.token_budget), self.max_end - starts

        def most_rows(lengths: np.ndarray) -> np.ndarray:
            max_rows = tokens // lengths
            is_cut = (max_rows > multiple) & (max_rows < available)  # the last samples go together, whatever the number
            friendly: np.ndarray = np.where(is_cut, max_rows // multiple * multiple, max_rows)
            return friendly

        ends = np.minimum(starts + np.maximum(most_rows(self.length), 1), self.max_end)
        starts = np.broadcast_to(starts, ends.shape)
        while self.budget.collation.has_dummies:
            padded, patches = self.shapes(starts, ends)
            count = ends - starts
            exceeds = ((self.budget.excess(padded, patches) > 0) | (STEP_COST + padded > caps)) & (count > 1)
            if not exceeds.any():
                break
            fewer = np.maximum(np.minimum(count - 1, most_rows(padded // count)), 1)
            ends = np.where(exceeds, starts + fewer, ends)
        ends = np.where(self.single_costs <= caps, ends, starts)
        return np.concatenate([ends, np.full((len(ends), 1), len(self))], axis=1)

    def fits(self, start: int, end: int) -> bool:
        """Whether a collated group is within the budgets (I4)."""
        return end - start == 1 or not self.budget.excess(*self.shapes(np.array([start]), np.array([end]))).any()


# ----------------------------------------------------------------------------------------------------------------------
# Ways to cut all samples of an optimizer step into groups for K micro-steps.
# Ranks wait for the costliest group of a micro-step. So each micro-step has a *cap* on the cost of its groups, and a
# cut walks through the sorted samples and makes each group as large as the cap allows.

Cut = tuple[int, list[Step]]
"""The sum over micro-steps of the costliest group, and the groups of each micro-step."""
PRECISION = 12
"""The cap is searched to 1 part in 2 ** PRECISION."""
MAX_TRIES, FEW_SAMPLES = 15, 128
"""Caps tried at once for up to FEW_SAMPLES samples, and in proportion fewer for more."""
MIN_CAPS, MAX_CAPS, MAX_STATES, FINER_CAPS = 40, 256, 1 << 16, 16
"""Number of cap values tried for each micro-step (fewer, or none, for many samples), then FINER_CAPS values around the
chosen caps."""
NUM_CANDIDATES = 4
"""Number of values of K tried, from the least that the budgets allow."""


def best_cut(pools: Pools) -> list[Step]:
    """The cheapest of several cuts."""
    min_steps = -(-max(map(len, pools.walks(pools.largest_ends))) // pools.slots)
    cuts = [cut_by_one_cap(pools, min_steps)]
    stretches = cut_by_stretches(pools) if pools.pool_of[-1] == 0 else None  # there is one pool
    if stretches is not None:
        cuts.append(stretches)
    if stretches is None or pools.slots > 1:  # for a single rank, stretches are optimal
        cuts += [cut_by_one_cap(pools, min_steps + more) for more in range(1, NUM_CANDIDATES)]
    return min(cuts, key=lambda cut: cut[0])[1]


def cut_by_one_cap(pools: Pools, num_steps: int) -> Cut:
    """Give all micro-steps one cap: the lowest at which the samples of a pool fit into their slots.

    Each round tries several caps between the bounds: of few samples numpy takes as long for many caps as for one.
    Source: MULTIFIT, multiprocessor scheduling by the dual of bin packing (Coffman, Garey and Johnson 1978).
    """
    slots = num_steps * pools.slots
    low, high = pools.cap_range
    tries = max(MAX_TRIES * FEW_SAMPLES // max(len(pools), FEW_SAMPLES), 1)
    parts = np.arange(1, tries + 1)[:, None]
    while (searching := (high - low) << PRECISION > high).any():
        caps = low + (high - low) * parts // (tries + 1)
        fits = _after(pools.next_ends(caps[:, pools.pool_of]), slots)[:, pools.starts] >= pools.ends
        # The first cap that fits becomes the upper bound, the one before it the lower.
        first = np.where(fits.any(axis=0), fits.argmax(axis=0), tries)
        bounds, pool = np.concatenate([low[None] - 1, caps, high[None]]), np.arange(len(low))
        low = np.where(searching, bounds[first, pool] + 1, low)
        high = np.where(searching, bounds[first + 1, pool], high)
    return _match(pools, pools.walks(pools.next_ends(high[pools.pool_of][None])[0]), slots)


def cut_by_stretches(pools: Pools) -> Cut | None:
    """For a single pool: each micro-step takes the next samples, with a separate cap (shortest path).

    Best if few ranks share the samples, or if micro-steps are few: long samples then get another cap than short ones.
    For a single rank, which waits for no other, the cut is optimal for the values of caps that are tried.
    """
    num_rows = len(pools)
    starts, highest = np.arange(num_rows), int(pools.cap_range[1].max())
    num_caps = min(MAX_CAPS, MAX_STATES // num_rows)
    if num_caps < MIN_CAPS or highest <= STEP_COST:
        return None
    spacing = -(-(highest - STEP_COST) // num_caps)
    caps = np.arange(highest, STEP_COST, -spacing)
    while True:
        # The least cost from each sample to the end, over all caps of the micro-step that begins there.
        ends = pools.next_ends(caps[:, None])
        following = _after(ends, pools.slots)
        costs = np.where(following[:, :-1] > starts, caps[:, None], NO_CAP)
        least_cost, chosen = np.zeros(num_rows + 1, dtype=np.int64), [0] * num_rows
        for start in range(num_rows - 1, -1, -1):
            total = costs[:, start] + least_cost[following[:, start]]
            chosen[start] = int(total.argmin())
            least_cost[start] = total[chosen[start]]
        # The groups along the shortest path.
        start, groups, used = 0, list[Group](), set[int]()
        while start < num_rows:
            cap, end = chosen[start], int(following[chosen[start], start])
            groups += pools.walk(ends[cap], start, end)
            used.add(int(caps[cap]))
            start = end
        finer = min(FINER_CAPS, MAX_STATES // (num_rows * len(used)))
        if spacing <= 1 or finer <= 1:
            return _match(pools, [groups], -(-len(groups) // pools.slots) * pools.slots)
        # Again, with finer values between each cap that was used and the next lower cap.
        between = spacing * np.arange(finer) // finer
        caps, spacing = np.unique(np.array(sorted(used))[:, None] - between)[::-1], 1
        caps = np.append(highest, caps[(caps > STEP_COST) & (caps < highest)])


def _after(ends: np.ndarray, num_groups: int) -> np.ndarray:
    """The position after `num_groups` groups from each start [caps, n + 1], by repeated doubling of the walk."""
    before = np.arange(0, ends.size, ends.shape[1])[:, None]
    ends = (ends + before).ravel()  # positions in all rows together
    reached = np.arange(len(ends))
    while num_groups:
        if num_groups & 1:
            reached = ends[reached]
        if num_groups := num_groups >> 1:
            ends = ends[ends]
    return reached.reshape(len(before), -1) - before


def _match(pools: Pools, groups: list[list[Group]], slots: int) -> Cut:
    """Match the groups of every pool by cost: the costliest groups go into the first micro-step, and so on.

    Sorted order minimises the sum of the maxima; between equal costs patches decide.
    groups: the groups of each pool. They are split until every slot has one, as far as there are samples, so that no
    rank idles without need.
    """
    groups = [_split_to_fill_slots(pools, groups_of_pool, slots) for groups_of_pool in groups]
    sizes = np.array([len(groups_of_pool) for groups_of_pool in groups])
    pool = np.repeat(np.arange(len(groups)), sizes)
    starts, ends = np.array([group for groups_of_pool in groups for group in groups_of_pool]).T
    padded, patches = pools.shapes(starts, ends)
    order = np.lexsort((starts, -patches, -padded, pool))
    step = (np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)) // pools.slots
    longest = by_number(step, STEP_COST + padded[order], int(step.max()) + 1, np.maximum)
    # The shortest sample first: dummy media in the first row then rarely make it the longest.
    stretches = [pools.index[starts[k] : ends[k]][::-1] for k in order]
    return int(longest.sum()), to_steps(step, pool, stretches)


def _split_to_fill_slots(pools: Pools, groups: list[Group], slots: int) -> list[Group]:
    """Split groups, the one with most rows first, until there are `slots` of them or none can be split."""
    grows = pools.budget.collation.has_dummies
    heap = [(start - end, start, end) for start, end in groups]
    heapq.heapify(heap)
    indivisible: list[Group] = []
    while heap and len(heap) + len(indivisible) < slots and heap[0][0] < -1:
        _, start, end = heapq.heappop(heap)
        # A half without media gets dummy media, which may exceed the budget. Then the longest or the shortest sample
        # goes alone: the part that keeps the media fits as before. With both dummy images and dummy audio even that may
        # not fit.
        for middle in ((start + end) // 2, start + 1, end - 1):
            if not grows or (pools.fits(start, middle) and pools.fits(middle, end)):
                heapq.heappush(heap, (start - middle, start, middle))
                heapq.heappush(heap, (middle - end, middle, end))
                break
        else:
            indivisible.append((start, end))
    return [*indivisible, *((start, end) for _, start, end in heap)]
