"""Which groups run at the same time, and on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odb_factory.planning.pools import Pools

Group = tuple[int, int]
"""A stretch [start, end) of the sorted samples."""
PoolGroup = tuple[int, np.ndarray]
"""A pool and a group of its samples, as positions in the table."""


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

    Sorted order is the match for which the sum of the maxima is least; where costs are equal, patches decide.
    groups: of each pool.
    """
    sizes = np.array([len(own) for own in groups])
    pool = np.repeat(np.arange(len(groups)), sizes)
    starts, ends = np.array([group for own in groups for group in own], dtype=np.int64).reshape(-1, 2).T
    costs = pools.rows.costs(starts, ends, pools.model)
    _, _, patches = pools.rows.shapes(starts, ends)
    order = np.lexsort((starts, -patches, -costs, pool))
    steps = (np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)) // pools.slots
    largest = np.zeros(int(steps.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(largest, steps, costs[order])
    return Cut(starts[order], ends[order], pool, steps, int(largest.sum()))


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


def place(
    groups: Sequence[PoolGroup], owner_rank: np.ndarray, num_ranks: int, *, balance: bool
) -> list[np.ndarray | None]:
    """The group of each rank in a micro-step: any group (`assign_to_ranks`), or, without balance, that of its pool."""
    if balance:
        return assign_to_ranks([group for _, group in groups], owner_rank, num_ranks)
    of_rank = dict(groups)
    return [of_rank.get(rank) for rank in range(num_ranks)]
