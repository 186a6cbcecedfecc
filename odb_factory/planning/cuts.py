"""Ways to cut all samples of an optimizer step into K micro-steps of groups, and what each of them costs.

Ranks wait for the costliest group of a micro-step. So a micro-step is given a *cap* on the cost of its groups, and a
cut is found by walking through the sorted samples and making each group as large as a cap allows. All arithmetic is
on integers, so that every rank computes the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from odb_factory.planning.candidates import Rows
from odb_factory.planning.cost import CostModel

NO_CAP = 1 << 62
PRECISION = 12
"""Caps are searched to one part in 2 ** PRECISION."""
TWO_CAPS_PRECISION = 6
MIN_CAPS, MAX_CAPS, MAX_STATES = 6, 24, 1 << 17
"""Of two caps the higher one is tried at so many values; fewer, or none, where that makes too many states."""

Group = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Pools:
    """The samples of an optimizer step, in pools: one for all ranks that share their samples, or one for each rank.

    rows: all samples, pool after pool. bounds: where each pool starts in them, and the end [pools + 1].
    slots: groups that a pool gives to each micro-step: the number of ranks that share it.
    """

    rows: Rows
    bounds: np.ndarray
    slots: int
    model: CostModel

    @property
    def starts(self) -> np.ndarray:
        return self.bounds[:-1]

    @property
    def ends(self) -> np.ndarray:
        return self.bounds[1:]


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


def lower_bound(pools: Pools, num_steps: int) -> int:
    """No cut into so many micro-steps is cheaper: the longest sample goes alone, or nothing is padded.

    What can make a group cheaper than the sum of its samples is not counted (dummy media that are not needed).
    """
    rows, model = pools.rows, pools.model
    single = model.of(rows.tokens, np.diff(rows.patches_before), rows.tokens * rows.tokens) - model.fixed
    before = np.concatenate([[0], np.cumsum(single)])
    load = int((before[pools.ends] - before[pools.starts]).max())
    return num_steps * model.fixed + max(-(-load // pools.slots), int(single.max()))


def make_cut(pools: Pools, groups: list[list[Group]]) -> Cut:
    """Match the groups of every pool by cost: the costliest of all pools go into the first micro-step, and so on.

    Sorted order is the match for which the sum of the maxima is least. groups: of each pool.
    """
    sizes = np.array([len(own) for own in groups])
    pool = np.repeat(np.arange(len(groups)), sizes)
    starts, ends = np.array([group for own in groups for group in own], dtype=np.int64).reshape(-1, 2).T
    costs = pools.rows.costs(starts, ends, pools.model)
    order = np.lexsort((starts, -costs, pool))
    steps = (np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)) // pools.slots
    largest = np.zeros(int(steps.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(largest, steps, costs[order])
    return Cut(starts[order], ends[order], pool, steps, int(largest.sum()))


def next_ends(rows: Rows, caps: np.ndarray, model: CostModel) -> np.ndarray:
    """The largest end of a group within both budgets and a cap on its cost, for every start; an array [caps, n + 1].

    caps: [caps, 1], or [1, n] for a cap of its own for every start. A sample that breaks a budget goes alone. A start
    whose sample alone costs more than the cap is its own end: nothing can be cut there.
    """
    num_rows, budget = len(rows), rows.budget
    starts, unlimited = np.arange(num_rows), np.int64(num_rows)
    variable = caps - model.fixed

    def most_rows(lengths: np.ndarray) -> np.ndarray:
        unit = model.token * lengths + model.square * lengths * lengths
        by_cost = np.where(unit > 0, variable // np.maximum(unit, 1), unlimited)
        most: np.ndarray = np.minimum(by_cost, budget.token_budget // lengths)
        return most

    ends = np.minimum(starts + np.maximum(most_rows(rows.length), 1), rows.max_end)
    starts = np.broadcast_to(starts, ends.shape)
    if model.patch:
        low, high = starts + 1, ends
        while (low < high).any():
            middle = (low + high + 1) // 2
            fits = rows.costs(starts, middle, model) <= caps
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        ends = low
    if budget.collation.dummy_media_tokens or budget.collation.dummy_media_patches:
        while True:
            count, lengths, patches = rows.shapes(starts, ends)
            padded = count * lengths
            exceeds = (padded > budget.token_budget) | (model.of(padded, patches, padded * lengths) > caps)
            if budget.max_patches is not None:
                exceeds |= patches > budget.max_patches
            exceeds &= count > 1
            if not exceeds.any():
                break
            fewer = np.maximum(np.minimum(count - 1, most_rows(lengths)), 1)
            ends = np.where(exceeds, starts + fewer, ends)
    ends = np.where(rows.costs(starts, starts + 1, model) <= caps, ends, starts)
    return np.concatenate([ends, np.full((len(ends), 1), num_rows)], axis=1)


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
    return _filled(pools, groups, slots)


def cut_by_two_caps(pools: Pools, num_first: int, num_second: int, below: int) -> Cut | None:
    """`num_first` micro-steps have one cap and `num_second` a lower one; nothing if that costs `below` or more.

    Both kinds of groups may follow each other in any order: how far i groups of one kind and j of the other can reach
    is found by dynamic programming over (i, j). The higher cap is tried at some values, the lower one is bisected.
    """
    rows, model = pools.rows, pools.model
    first_slots, second_slots = num_first * pools.slots, num_second * pools.slots
    num_states = len(pools.starts) * (min(first_slots, second_slots) + 1) * (first_slots + second_slots)
    num_caps = min(MAX_CAPS, MAX_STATES // num_states)
    if num_caps < MIN_CAPS or not len(rows):
        return None
    starts = np.arange(len(rows))
    whole = next_ends(rows, np.array([[NO_CAP]]), model)[0]
    lowest = max(int(rows.costs(starts, starts + 1, model).max()), below // (num_first + num_second))
    highest = min(int(rows.costs(starts, whole[:-1], model).max()), (below - 1 - num_second * model.fixed) // num_first)
    if highest < lowest:
        return None
    first = np.unique(lowest + (highest - lowest) * np.arange(1, num_caps + 1) // num_caps)
    # Beside each the lower one must be so low that the whole costs less than `below`.
    high = np.minimum((below - 1 - num_first * first) // num_second, first)
    bound = lower_bound(pools, num_first + num_second)
    low = np.maximum((bound - num_first * first) // num_second, model.fixed)
    first_ends = next_ends(rows, first[:, None], model)
    fits = high >= low
    for k in range(TWO_CAPS_PRECISION + 1):
        middle = (low + high) // 2 if k else high
        trying = np.flatnonzero(fits & (low <= high))
        second_ends = next_ends(rows, middle[trying, None], model)
        *_, reached = _reach(first_ends[trying], second_ends, first_slots, second_slots, pools.starts)
        reaches = np.zeros_like(fits)
        reaches[trying] = (reached[-1] >= pools.ends).all(axis=1)
        if not k:
            fits = reaches
            if not fits.any():
                return None
        else:
            high, low = np.where(reaches, middle, high), np.where(reaches, low, middle + 1)
    which = int(np.where(fits, num_first * first + num_second * high, NO_CAP).argmin())
    second_ends = next_ends(rows, high[which : which + 1, None], model)
    layers = list(_reach(first_ends[which : which + 1], second_ends, first_slots, second_slots, pools.starts))
    groups = [
        _path([layer[:, 0, pool].tolist() for layer in layers], first_ends[which].tolist(), second_slots, int(end))
        for pool, end in enumerate(pools.ends)
    ]
    return _filled(pools, groups, first_slots + second_slots)


def _reach(
    first_ends: np.ndarray, second_ends: np.ndarray, first_slots: int, second_slots: int, starts: np.ndarray
) -> Iterator[np.ndarray]:
    """How far groups of two kinds can reach from `starts`, in any order: layer t has all ways to use t of them.

    first_ends, second_ends: [caps, n + 1]. Yields arrays [i, caps, pools] for i of the first kind and t - i of the
    second, i counted from max(0, t - second_slots).
    """
    num_caps, width = first_ends.shape
    offset = (np.arange(num_caps) * width)[:, None]
    first_flat, second_flat = first_ends.ravel(), second_ends.ravel()
    layer = np.broadcast_to(starts, (1, num_caps, len(starts)))
    yield layer
    for t in range(1, first_slots + second_slots + 1):
        before, lowest = max(0, t - 1 - second_slots), max(0, t - second_slots)
        highest = min(first_slots, t)
        places = layer + offset
        following = np.zeros((highest - lowest + 1, *layer.shape[1:]), dtype=np.int64)
        by_second = second_flat[places[lowest - before : highest - before + 1]]
        following[: len(by_second)] = by_second
        by_first = first_flat[places[max(lowest - 1 - before, 0) : highest - before]]
        tail = following[len(following) - len(by_first) :]
        np.maximum(tail, by_first, out=tail)
        layer = following
        yield layer


def _path(layers: list[list[int]], first_ends: list[int], second_slots: int, end: int) -> list[Group]:
    """The groups on the way to the last state of `_reach`. layers: [t][i], of one cap and one pool."""
    groups, i = [], 0
    position = layers[-1][i]
    for t in range(len(layers) - 1, 0, -1):
        lowest, before = max(0, t - second_slots), max(0, t - 1 - second_slots)
        count = lowest + i
        start = layers[t - 1][count - 1 - before] if count else -1
        if count and first_ends[start] == position:
            i = count - 1 - before
        else:
            i = count - before
            start = layers[t - 1][i]
        if start < min(position, end):
            groups.append((start, min(position, end)))
        position = start
    return groups[::-1]


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


def _filled(pools: Pools, groups: list[list[Group]], slots: int) -> Cut:
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
