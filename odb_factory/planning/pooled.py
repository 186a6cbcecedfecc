"""Plan a round in which samples may change rank: the buffers of all ranks are cut into groups as one.

The more samples to choose from, the closer the lengths within a group, and the costs of the groups that run at the
same time. Groups are cut from the pooled samples by length (next-fit decreasing), and those of like cost share a
micro-step. What does not fill a micro-step waits for the next round.
"""

from __future__ import annotations

import math

import numpy as np

from odb_factory.planning.candidates import Rows
from odb_factory.planning.cost import CostModel
from odb_factory.planning.cuts import split_to_fill_slots
from odb_factory.planning.matching import Group, assign_to_ranks
from odb_factory.planning.metadata import Steps


def plan_pooled(rows: Rows, owner_rank: np.ndarray, num_ranks: int, model: CostModel, *, final: bool) -> Steps:
    """The micro-steps of one round.

    owner_rank: of each position in the table the rank that holds the sample. final: everything is planned.
    Every rank has a group in every micro-step, unless there are too few samples left for that.
    """
    if not len(rows):
        return []
    groups = rows.next_fit(rows.budget.token_budget)
    overdue = [bool(rows.overdue_before[end] - rows.overdue_before[start]) for start, end in groups]
    if final:
        num_steps = math.ceil(len(groups) / num_ranks)
    else:
        num_steps = max(len(groups) // num_ranks, math.ceil(sum(overdue) / num_ranks), 1)
    slots = num_steps * num_ranks
    if len(groups) < slots:
        groups = _lower_cap_to_fill_slots(rows, groups, slots)
    elif len(groups) > slots:
        # What is overdue goes first, then what is costly; the rest is held back.
        order = sorted(range(len(groups)), key=lambda i: (not overdue[i], -rows.cost(*groups[i], model), i))
        groups = [groups[i] for i in order[:slots]]
    matched = _match_by_cost(rows, groups, num_ranks, model)
    return [assign_to_ranks([rows.group(*group) for group in step], owner_rank, num_ranks) for step in matched]


def _lower_cap_to_fill_slots(rows: Rows, groups: list[Group], slots: int) -> list[Group]:
    """All samples in at most `slots` groups, and as many as there can be, small and even: no rank shall idle.

    groups: fewer than that, as cut at the whole budget.
    """
    low, high = 1, rows.budget.token_budget
    while low < high:
        token_cap = (low + high) // 2
        smaller = rows.next_fit(token_cap)
        if len(smaller) <= slots:
            high, groups = token_cap, smaller
        else:
            low = token_cap + 1
    return split_to_fill_slots(rows, groups, slots)


def _match_by_cost(rows: Rows, groups: list[Group], num_ranks: int, model: CostModel) -> list[list[Group]]:
    """Groups of like cost in one micro-step.

    Where the model does not say what a patch costs, the groups are first divided by patches into as many classes as
    each class then has micro-steps: ranks wait for the vision tower of the one with most.
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
