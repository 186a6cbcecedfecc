"""Which groups run at the same time, and on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from odb_factory.planning.pools import Pools

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


def match_patches(pools: Pools, cut: Cut) -> Cut:
    """Let groups of like patches meet, as far as no micro-step becomes costlier by it.

    Where the model does not say what a patch costs, ranks still wait for the vision tower of the one with most. A
    group may go into any micro-step whose costliest group costs as much or more; from the last micro-step on, each
    takes those with the fewest patches.
    """
    _, _, patches = pools.rows.shapes(cut.starts, cut.ends)
    if not len(patches) or (patches == patches[0]).all():
        return cut
    costs, steps = pools.rows.costs(cut.starts, cut.ends, pools.model), cut.steps.copy()
    caps = np.zeros(int(steps.max()) + 1, dtype=np.int64)
    np.maximum.at(caps, steps, costs)
    bounds = np.searchsorted(cut.pools, np.arange(len(pools.starts) + 1))
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        left = np.arange(start, end)
        for step in range(int(cut.steps[end - 1]) if end > start else 0, 0, -1):
            allowed = left[costs[left] <= caps[step]]
            count = int((cut.steps[start:end] == step).sum())
            chosen = allowed[np.argsort(patches[allowed], kind="stable")[:count]]
            steps[chosen] = step
            left = np.setdiff1d(left, chosen, assume_unique=True)
        steps[left] = 0
    return replace(cut, steps=steps)


def assign_to_ranks(groups: Sequence[np.ndarray], owner_rank: np.ndarray, num_ranks: int) -> list[np.ndarray | None]:
    """Give the groups of a micro-step to ranks, at most one to each: first where a rank holds most of a group.

    groups: at most `num_ranks`, as positions in the table. owner_rank: of each position the rank that holds it.
    """
    assigned: list[np.ndarray | None] = [None] * num_ranks
    which = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    pairs, counts = np.unique(which * num_ranks + owner_rank[np.concatenate(groups)], return_counts=True)
    left = dict.fromkeys(range(len(groups)))
    for pair in pairs[np.argsort(-counts, kind="stable")].tolist():
        group, rank = divmod(pair, num_ranks)
        if assigned[rank] is None and group in left:
            assigned[rank] = groups[group]
            del left[group]
    free = (rank for rank in range(num_ranks) if assigned[rank] is None)
    for group, rank in zip(left, free):
        assigned[rank] = groups[group]
    return assigned
