"""Plan one optimizer step whose samples are given: all of them, on all ranks, cut into K micro-steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from odb_factory.planning.candidates import Rows
from odb_factory.planning.cost import Budget, CostModel
from odb_factory.planning.metadata import BufferMetadata
from odb_factory.planning.per_rank import Steps
from odb_factory.planning.plan import Plan, exceeds, pool, to_plan
from odb_factory.planning.pooled import Group, _deal, _like_with_like, _spread

NUM_CANDIDATES = 4
"""So many K are tried, from the least that the budgets allow."""


def plan_optimizer_step(
    buffers: Sequence[BufferMetadata], budget: Budget, *, balance: bool, model: CostModel = CostModel()
) -> Plan:
    """Cut the samples of one optimizer step into K micro-steps, the same K on all ranks.

    buffers: one a rank, the samples of this optimizer step that it holds.
    balance: a sample may go to another rank than the one that holds it, unless they are too heavy to travel.
    model: K and the cut are those for which the sum over micro-steps of what the costliest rank costs is least.

    Every sample is in exactly one micro-batch, every micro-batch of two or more is within both budgets, and a rank
    idles, in the last micro-steps, only where there are too few samples. The costliest micro-step comes first.
    """
    table, starts, owner_rank = pool(buffers)
    balance = balance and len(buffers) > 1
    exceeds_transfer_limit = balance and exceeds(buffers)
    if balance and not exceeds_transfer_limit:
        rows = Rows(table, np.arange(len(table)), budget)
        steps = [_deal(rows, step, owner_rank, len(buffers)) for step in _cut_pooled(rows, len(buffers), model)]
    else:
        ranks = [Rows(table, np.arange(start, end), budget) for start, end in itertools.pairwise(starts)]
        steps = _cut_per_rank(ranks, model)
    final = all(buffer.exhausted for buffer in buffers)
    return to_plan(steps, table, starts, owner_rank, budget, final, exceeds_transfer_limit)


def _cut_pooled(rows: Rows, num_ranks: int, model: CostModel) -> list[list[Group]]:
    if not len(rows):
        return []
    whole = rows.cut(rows.budget.token_budget)
    least = math.ceil(len(whole) / num_ranks)
    best: tuple[int, list[list[Group]]] | None = None
    for num_steps in range(least, least + NUM_CANDIDATES):
        groups = _spread(rows, list(whole), num_steps * num_ranks)
        steps = _like_with_like(rows, groups, num_ranks, model)
        cost = sum(max(rows.cost(*group, model) for group in step) for step in steps)
        if best is None or cost < best[0]:
            best = cost, steps
    return sorted(best[1], key=lambda step: (-len(step), -max(rows.cost(*group, model) for group in step)))


def _cut_per_rank(ranks: Sequence[Rows], model: CostModel) -> Steps:
    whole = [rows.cut(rows.budget.token_budget) for rows in ranks]
    least = max(map(len, whole))
    best: tuple[int, list[list[Group]]] | None = None
    for num_steps in range(least, least + NUM_CANDIDATES if least else 0):
        cuts = []
        for rows, groups in zip(ranks, whole):
            groups = _spread(rows, list(groups), num_steps)
            cuts.append(sorted(groups, key=lambda group: (-rows.cost(*group, model), group)))
        cost = sum(
            max(rows.cost(*group, model) for rows, group in zip(ranks, step) if group)
            for step in itertools.zip_longest(*cuts)
        )
        if best is None or cost < best[0]:
            best = cost, cuts
    if best is None:
        return []
    grouped = [[rows.group(*group) for group in groups] for rows, groups in zip(ranks, best[1])]
    return [list(step) for step in itertools.zip_longest(*grouped)]
