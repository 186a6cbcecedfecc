"""Plan a round in which ranks hand samples to each other: the windows of all are cut into groups as one.

The more samples to choose from, the closer the lengths within a group, and the closer the groups of a step. Groups
are cut from the joint window by length (next-fit decreasing), and those of like cost go out in one step. What does
not fill a step waits for the next round.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from odb_factory.planning.candidates import Rows
from odb_factory.planning.cost import CostModel
from odb_factory.planning.per_rank import Steps

Group = tuple[int, int]


def plan_pooled(rows: Rows, home: np.ndarray, num_ranks: int, model: CostModel, *, final: bool) -> Steps:
    """The steps of one round. home: of each position in the table the rank that holds the sample.

    Every rank has a group in every step, unless there are too few samples left for that. final: everything goes out.
    """
    if not len(rows):
        return []
    groups = rows.cut(rows.budget.token_budget)
    overdue = [bool(rows.overdue_before[end] - rows.overdue_before[start]) for start, end in groups]
    if final:
        num_steps = math.ceil(len(groups) / num_ranks)
    else:
        num_steps = max(len(groups) // num_ranks, math.ceil(sum(overdue) / num_ranks), 1)
    slots = num_steps * num_ranks
    if len(groups) < slots:
        groups = _spread(rows, groups, slots)
    elif len(groups) > slots:
        # What has waited too long goes first, then what is costly; the rest is kept back.
        order = sorted(range(len(groups)), key=lambda i: (not overdue[i], -rows.cost(*groups[i], model), i))
        groups = [groups[i] for i in order[:slots]]
    return [_deal(rows, step, home, num_ranks) for step in _like_with_like(rows, groups, num_ranks, model)]


def _spread(rows: Rows, groups: list[Group], slots: int) -> list[Group]:
    """All samples in at most `slots` groups, and as many as there can be: small even steps rather than idle ranks.

    groups: fewer than that, as cut at the whole budget.
    """
    low, high = 1, rows.budget.token_budget
    while low < high:
        level = (low + high) // 2
        smaller = rows.cut(level)
        if len(smaller) <= slots:
            high, groups = level, smaller
        else:
            low = level + 1
    heap = [(start - end, start, end) for start, end in groups]
    heapq.heapify(heap)
    while heap and len(heap) < slots and heap[0][0] < -1:
        _, start, end = heapq.heappop(heap)
        # A half without the media of the whole gets a filler, which may be too much for it. Then the longest or the
        # shortest goes alone: the media are not in both, and what keeps them fits as it did.
        places = ((start + end) // 2, start + 1, end - 1)
        middle = next(k for k in places if _fits(rows, start, k) and _fits(rows, k, end))
        for half in ((start, middle), (middle, end)):
            heapq.heappush(heap, (half[0] - half[1], *half))
    return [(start, end) for _, start, end in heap]


def _fits(rows: Rows, start: int, end: int) -> bool:
    return rows.fitted(start, end, rows.budget.token_budget) == end


def _like_with_like(rows: Rows, groups: list[Group], num_ranks: int, model: CostModel) -> list[list[Group]]:
    """Groups of like cost in one step.

    Where the model does not say what a patch costs, the groups are first parted by patches into as many classes as
    each class then has steps: ranks wait for the vision tower of the one with most.
    """
    cost = {group: (-rows.cost(*group, model), group[0]) for group in groups}
    patches = {group: rows.shape(*group)[2] for group in groups}
    num_steps = math.ceil(len(groups) / num_ranks)
    num_classes = 1
    if not model.patch and len(set(patches.values())) > 1:
        num_classes = round(math.sqrt(num_steps))
        groups = sorted(groups, key=lambda group: (-patches[group], cost[group]))
    size = math.ceil(num_steps / num_classes) * num_ranks
    ordered = [
        group for k in range(0, len(groups), size) for group in sorted(groups[k : k + size], key=cost.__getitem__)
    ]
    return [ordered[k : k + num_ranks] for k in range(0, len(ordered), num_ranks)]


def _deal(rows: Rows, groups: list[Group], home: np.ndarray, num_ranks: int) -> list[np.ndarray | None]:
    """A group for each rank, if possible one of which it holds the most samples: the fewer travel."""
    dealt: list[np.ndarray | None] = [None] * num_ranks
    left: list[np.ndarray] = []
    for start, end in groups:
        group = rows.group(start, end)
        holders, counts = np.unique(home[group], return_counts=True)
        best = next((rank for rank in holders[np.argsort(-counts, kind="stable")] if dealt[rank] is None), None)
        if best is None:
            left.append(group)
        else:
            dealt[best] = group
    free = (rank for rank in range(num_ranks) if dealt[rank] is None)
    for rank, group in zip(free, left):
        dealt[rank] = group
    return dealt
