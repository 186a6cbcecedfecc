"""Who computes which group: so that as few samples as possible travel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
