"""Cut samples into padded micro-batches: pools, caps on the padded shape, and which groups run together."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from odb_factory.planner.cost import STEP_COST, by_number
from odb_factory.planner.plan import PoolGroup, Samples

# ----------------------------------------------------------------------------------------------------------------------
# The samples of an optimizer step as pools that groups are cut from, and how large a group can be.
# All arithmetic is on integers, so that every rank computes the same.

NO_CAP = 1 << 62


class Pools:
    """The samples of an optimizer step, in pools: one for all ranks that share their samples, or one for each rank.

    Pool after pool, from long to short. A group is a stretch [start, end) of this order:
    neighbours differ little in length, so little is padded.

    slots: groups that a pool gives to each micro-step: the number of ranks that share it.
    index, pool_of, tokens, length (padded row length in tokens) follow the sorted order [n]. Those named `_before` are
    sums over all samples before each position, and over all at the end [n + 1]. max_end: where a group that starts
    here must end at the latest, for its pool and patches. starts, ends: of each pool.
    """

    def __init__(self, samples: Samples):
        self.slots, self.budget, rows = samples.slots, samples.budget, samples.rows
        budget, order = self.budget, np.lexsort((-rows["patches"], -rows["row_tokens"], samples.pool))
        self.index, self.pool_of, rows = samples.index[order], samples.pool[order], rows[order]
        bounds = np.concatenate([[0], np.cumsum(np.bincount(samples.pool, minlength=1))])
        self.starts, self.ends = bounds[:-1], bounds[1:]
        self.tokens = rows["row_tokens"].astype(np.int64)
        multiple = budget.collation.pad_to_multiple_of
        self.length = np.maximum(-(-self.tokens // multiple) * multiple, 1)
        sums = np.zeros((3, len(rows) + 1), dtype=np.int64)
        np.cumsum([rows[name] for name in ("patches", "has_media", "has_audio")], axis=1, out=sums[:, 1:])
        self.patches_before, self.media_before, self.audio_before = sums
        self.max_end = self.ends[self.pool_of]
        if budget.max_patches is not None:
            before = self.patches_before
            within = np.searchsorted(before, before[:-1] + budget.max_patches, side="right") - 1
            self.max_end = np.minimum(self.max_end, np.maximum(within, np.arange(len(rows)) + 1))

    def __len__(self) -> int:
        return len(self.index)

    def shapes(self, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`Budget.collated` of many groups, none of them empty."""
        count, ones = ends - starts, np.ones((), dtype=np.int64)
        media, audio = (
            (before[ends] - before[starts] for before in (self.media_before, self.audio_before))
            if self.budget.collation.has_dummies
            else (ones, ones)
        )
        patches = self.patches_before[ends] - self.patches_before[starts]
        return self.budget.collated(
            count=count,
            tokens=count,  # of no effect on padded rows
            patches=patches,
            media=media,
            audio=audio,
            longest=self.tokens[starts],
            first=self.tokens[ends - 1],
        )

    def costs(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The cost of many groups, none of them empty: tokens as collated."""
        rows, lengths, _ = self.shapes(starts, ends)
        costs: np.ndarray = STEP_COST + rows * lengths
        return costs

    @cached_property
    def single_costs(self) -> np.ndarray:
        """What each sample costs alone [n]."""
        starts = np.arange(len(self))
        return self.costs(starts, starts + 1)

    @cached_property
    def largest_ends(self) -> np.ndarray:
        """The largest ends that the budgets allow [n + 1]."""
        ends: np.ndarray = next_ends(self, np.array([[NO_CAP]]))[0]
        return ends

    @cached_property
    def cap_range(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each pool the lowest cap at which every sample can go alone, and the highest that any group asks for."""
        low = by_number(self.pool_of, self.single_costs, len(self.starts), np.maximum)
        costs = self.costs(np.arange(len(self)), self.largest_ends[:-1])
        high = by_number(self.pool_of, costs, len(self.starts), np.maximum)
        # A sample alone can cost more than one in a group: dummy media are added if there are no others.
        return low, np.maximum(low, high)


def lower_bound(pools: Pools, num_steps: int) -> int:
    """No cut into `num_steps` micro-steps is cheaper: the longest sample goes alone, or nothing is padded.

    Dummy media are not counted, because a group may need fewer of them than its samples alone.
    """
    of_pool = by_number(pools.pool_of, pools.tokens, len(pools.starts))
    return num_steps * STEP_COST + max(-(-int(of_pool.max()) // pools.slots), int(pools.tokens.max()))


def next_ends(pools: Pools, caps: np.ndarray) -> np.ndarray:
    """The largest end of a group within both budgets and a cap on its cost, for every start; an array [caps, n + 1].

    caps: [caps, 1], or [1, n] for a cap of its own for every start. A sample that breaks a budget goes alone. A start
    whose sample alone costs more than the cap is its own end: nothing can be cut there.
    """
    budget, num_rows = pools.budget, len(pools)
    starts, multiple = np.arange(num_rows), budget.row_multiple
    tokens, available = np.minimum(caps - STEP_COST, budget.token_budget), pools.max_end - starts

    def most_rows(lengths: np.ndarray) -> np.ndarray:
        max_rows = tokens // lengths
        is_cut = (max_rows > multiple) & (max_rows < available)  # the last samples go together, whatever their number
        friendly: np.ndarray = np.where(is_cut, max_rows // multiple * multiple, max_rows)
        return friendly

    ends = np.minimum(starts + np.maximum(most_rows(pools.length), 1), pools.max_end)
    starts = np.broadcast_to(starts, ends.shape)
    if budget.collation.has_dummies:
        while True:
            collated, lengths, patches = pools.shapes(starts, ends)
            count, padded = ends - starts, collated * lengths
            exceeds = ((budget.excess(padded, patches) > 0) | (STEP_COST + padded > caps)) & (count > 1)
            if not exceeds.any():
                break
            fewer = np.maximum(np.minimum(count - 1, most_rows(lengths)), 1)
            ends = np.where(exceeds, starts + fewer, ends)
    ends = np.where(pools.single_costs <= caps, ends, starts)
    return np.concatenate([ends, np.full((len(ends), 1), num_rows)], axis=1)


# ----------------------------------------------------------------------------------------------------------------------
# Which groups run at the same time, and on which rank.

Group = tuple[int, int]
"""A stretch [start, end) of the sorted samples."""


@dataclass(frozen=True, eq=False)
class Cut:
    """All samples in groups, each group in a micro-step.

    starts, ends, pools, steps: of each group its stretch, its pool, and its micro-step [groups]; the groups of a pool
    follow each other, the costliest first. cost: the sum over micro-steps of the costliest group.
    """

    starts: np.ndarray
    ends: np.ndarray
    pools: np.ndarray
    steps: np.ndarray
    cost: int


def make_cut(pools: Pools, groups: list[list[Group]], slots: int) -> Cut:
    """Match the groups of every pool by cost: the costliest of all pools go into the first micro-step, and so on.

    Sorted order is the match for which the sum of the maxima is least; if costs are equal, patches decide.
    groups: of each pool; split until each of its slots has one, as far as there are samples: no rank idles without
    need.
    """
    groups = [split_to_fill_slots(pools, of_pool, slots) for of_pool in groups]
    sizes = np.array([len(of_pool) for of_pool in groups])
    pool = np.repeat(np.arange(len(groups)), sizes)
    starts, ends = np.array([group for of_pool in groups for group in of_pool], dtype=np.int64).reshape(-1, 2).T
    costs = pools.costs(starts, ends)
    _, _, patches = pools.shapes(starts, ends)
    order = np.lexsort((starts, -patches, -costs, pool))
    steps = (np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)) // pools.slots
    largest = by_number(steps, costs[order], int(steps.max(initial=-1)) + 1, np.maximum)
    return Cut(starts[order], ends[order], pool, steps, int(largest.sum()))


def groups_of_cut(pools: Pools, cut: Cut) -> list[list[PoolGroup]]:
    """By micro-step."""
    steps: list[list[PoolGroup]] = [[] for _ in range(int(cut.steps.max(initial=-1)) + 1)]
    for step, pool, start, end in zip(*(column.tolist() for column in (cut.steps, cut.pools, cut.starts, cut.ends))):
        # The shortest first: dummy media added to the first row then rarely make it the longest.
        steps[step].append((pool, pools.index[start:end][::-1]))
    return steps


# ----------------------------------------------------------------------------------------------------------------------
# Ways to cut all samples of an optimizer step into groups for K micro-steps.
# Ranks wait for the costliest group of a micro-step. So a micro-step is given a *cap* on the cost of its groups, and
# a cut is found by walking through the sorted samples and making each group as large as the cap allows.

PRECISION = 12
"""The cap is searched to 1 part in 2 ** PRECISION."""
MIN_CAPS, MAX_CAPS, MAX_STATES, FINER_CAPS = 40, 256, 1 << 16, 16
"""Number of cap values tried for each micro-step (fewer, or none, for many samples); then FINER_CAPS values around the
chosen ones."""


def walk(ends: list[int], start: int, end: int) -> list[Group]:
    """The groups from `start` on, each as large as it can be."""
    groups = []
    while start < end:
        assert ends[start] > start
        groups.append((start, ends[start]))
        start = ends[start]
    return groups


def _after(ends: np.ndarray, num_groups: int) -> np.ndarray:
    """The position after `num_groups` groups, from each start [caps, n + 1]; the walk is doubled as often as needed."""
    reached = np.broadcast_to(np.arange(ends.shape[1]), ends.shape)
    while num_groups:
        if num_groups & 1:
            reached = np.take_along_axis(ends, reached, axis=1)
        num_groups >>= 1
        if num_groups:
            ends = np.take_along_axis(ends, ends, axis=1)
    return reached


def groups_needed(pools: Pools, num_pools: int) -> np.ndarray:
    """The fewest groups that the budgets allow in each pool [pools]."""
    ends = pools.largest_ends.tolist()
    needed = np.zeros(num_pools, dtype=np.int64)
    for number, (start, end) in enumerate(zip(pools.starts.tolist(), pools.ends.tolist())):
        needed[number] = len(walk(ends, start, end))
    return needed


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
    return make_cut(pools, groups, slots)


def cut_by_stretches(pools: Pools) -> Cut | None:
    """Of one pool: each micro-step takes the samples that follow, with a cap of its own (shortest path).

    Best if few ranks share the samples, or micro-steps are few: long samples then get another cap than short ones.
    For a single rank, which waits for nobody, it is the cheapest cut of all for the values of caps that are tried.
    """
    num_rows = len(pools)
    starts, highest = np.arange(num_rows), int(pools.cap_range[1].max())
    num_caps = min(MAX_CAPS, MAX_STATES // num_rows)
    if num_caps < MIN_CAPS or highest <= STEP_COST:
        return None
    spacing = -(-(highest - STEP_COST) // num_caps)
    caps = np.arange(highest, STEP_COST, -max(spacing, 1))
    while True:
        ends = next_ends(pools, caps[:, None])
        following = _after(ends, pools.slots)
        costs = np.where(following[:, :-1] > starts, caps[:, None], NO_CAP)
        least_cost, chosen = np.zeros(num_rows + 1, dtype=np.int64), [0] * num_rows
        for start in range(num_rows - 1, -1, -1):
            total = costs[:, start] + least_cost[following[:, start]]
            chosen[start] = int(total.argmin())
            least_cost[start] = total[chosen[start]]
        start, groups, used = 0, [], set()
        while start < num_rows:
            cap, end = chosen[start], int(following[chosen[start], start])
            groups += walk(ends[cap].tolist(), start, end)
            used.add(int(caps[cap]))
            start = end
        finer = min(FINER_CAPS, MAX_STATES // (num_rows * len(used)))
        if spacing <= 1 or finer <= 1:
            return make_cut(pools, [groups], -(-len(groups) // pools.slots) * pools.slots)
        # Once more, with the values between those that were used and the next lower ones.
        between = spacing * np.arange(finer) // finer
        caps, spacing = np.unique(np.array(sorted(used))[:, None] - between)[::-1], 1
        caps = np.append(highest, caps[(caps > STEP_COST) & (caps < highest)])


def split_to_fill_slots(pools: Pools, groups: list[Group], slots: int) -> list[Group]:
    """Split groups, the one with most rows first, until there are `slots` of them or none can be split."""
    grows = pools.budget.collation.has_dummies
    heap = [(start - end, start, end) for start, end in groups]
    heapq.heapify(heap)
    indivisible: list[Group] = []
    while heap and len(heap) + len(indivisible) < slots and heap[0][0] < -1:
        _, start, end = heapq.heappop(heap)
        # A half without the media of the whole gets dummy media, which may be too much for it. Then the longest or the
        # shortest goes alone: the media are not in both, and what keeps them fits as it did. If both audio and other
        # media are told apart, even that may be too much.
        places = ((start + end) // 2, start + 1, end - 1)
        middles = (k for k in places if not grows or (_fits(pools, start, k) and _fits(pools, k, end)))
        middle = next(middles, None)
        if middle is None:
            indivisible.append((start, end))
            continue
        for half in ((start, middle), (middle, end)):
            heapq.heappush(heap, (half[0] - half[1], *half))
    return [*indivisible, *((start, end) for _, start, end in heap)]


def _fits(pools: Pools, start: int, end: int) -> bool:
    """Whether a group is within the budgets, as collated (I4)."""
    starts, ends = np.array([start]), np.array([end])
    count, length, patches = pools.shapes(starts, ends)
    return end - start == 1 or not pools.budget.excess(count * length, patches).any()


# ----------------------------------------------------------------------------------------------------------------------
# Which of these cuts is the cheapest.

NUM_CANDIDATES = 4
"""Number of K tried, from the least that the budgets allow."""


def best_cut(pools: Pools) -> Cut:
    """The cheapest of the cuts that are tried, from the least K that the budgets allow."""
    min_steps = -(-int(groups_needed(pools, len(pools.starts)).max()) // pools.slots)
    best = cut_by_one_cap(pools, min_steps)
    if len(pools.starts) == 1:
        best = min(best, cut_by_stretches(pools) or best, key=lambda cut: cut.cost)
    for num_steps in range(min_steps + 1, min_steps + NUM_CANDIDATES):
        if lower_bound(pools, num_steps) < best.cost:
            best = min(best, cut_by_one_cap(pools, num_steps), key=lambda cut: cut.cost)
    return best
