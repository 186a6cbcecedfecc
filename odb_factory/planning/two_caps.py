"""Micro-steps with two caps: where few groups have to hold all samples, one cap fits either the long or the short."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from odb_factory.planning.cuts import fill_slots
from odb_factory.planning.matching import Cut, Group
from odb_factory.planning.pools import NO_CAP, Pools, lower_bound, next_ends

PRECISION = 6
"""The lower cap is searched to one part in 2 ** PRECISION of what it may be."""
MIN_CAPS, MAX_CAPS, MAX_STATES = 6, 24, 1 << 17
"""The higher cap is tried at so many values; at fewer, or not at all, where that makes too many states."""


def cut_by_two_caps(pools: Pools, num_first: int, num_second: int, below: int) -> Cut | None:
    """`num_first` micro-steps have one cap and `num_second` a lower one; nothing if that costs `below` or more.

    Both kinds of groups may follow each other in any order: how far i groups of one kind and j of the other can reach
    is found by dynamic programming over (i, j). The higher cap is tried at some values, the lower one is bisected.
    """
    model = pools.model
    first_slots, second_slots = num_first * pools.slots, num_second * pools.slots
    num_states = len(pools.starts) * (min(first_slots, second_slots) + 1) * (first_slots + second_slots)
    num_caps = min(MAX_CAPS, MAX_STATES // num_states)
    if num_caps < MIN_CAPS or not len(pools.rows):
        return None
    lowest, highest = (int(caps.max()) for caps in pools.cap_range)
    lowest = max(lowest, below // (num_first + num_second))
    highest = min(highest, (below - 1 - num_second * model.fixed) // num_first)
    if highest < lowest:
        return None
    first = np.unique(lowest + (highest - lowest) * np.arange(num_caps) // (num_caps - 1))
    # Beside each the lower one must be so low that the whole costs less than `below`.
    high = np.minimum((below - 1 - num_first * first) // num_second, first)
    bound = lower_bound(pools, num_first + num_second)
    low = np.maximum((bound - num_first * first) // num_second, model.fixed)
    first_ends = next_ends(pools, first[:, None])
    fits = high >= low
    for k in range(PRECISION + 1):
        middle = (low + high) // 2 if k else high
        trying = np.flatnonzero(fits & (low <= high))
        second_ends = next_ends(pools, middle[trying, None])
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
    second_ends = next_ends(pools, high[which : which + 1, None])
    layers = list(_reach(first_ends[which : which + 1], second_ends, first_slots, second_slots, pools.starts))
    groups = [
        _path([layer[:, 0, pool].tolist() for layer in layers], first_ends[which].tolist(), second_slots, int(end))
        for pool, end in enumerate(pools.ends)
    ]
    return fill_slots(pools, groups, first_slots + second_slots)


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
