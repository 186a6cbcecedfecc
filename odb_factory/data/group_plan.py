"""The ranks of a group plan their part of an optimizer step, and agree with the other groups on K (I1, I6)."""

from __future__ import annotations

from collections.abc import Sequence

from odb_factory.comm.agreement import ranks_alike
from odb_factory.comm.coordinator import DIFFERENT_PLANS, Coordinator
from odb_factory.data.plan_process import Compute, compute_here
from odb_factory.errors import CollectiveError
from odb_factory.planning import Budget, BufferMetadata, CostModel, Plan
from odb_factory.planning.flat_groups import (
    MAX_AGREEMENTS,
    GroupOutline,
    disagreement,
    group_of,
    joined,
    outline,
    plan_group,
    steps_to_reach,
)


def plan_with_group(
    buffers: Sequence[BufferMetadata],
    budget: Budget,
    group_size: int,
    *,
    model: CostModel,
    coordinator: Coordinator,
    step_index: int,
    compute: Compute = compute_here,
) -> Plan:
    """What this rank's group does in an optimizer step, with the totals of all groups. Collective.

    buffers: one a rank, of all ranks. group_size: of ranks among which samples travel. compute: runs planners.
    Raises `CollectiveError` on all ranks if those of a group have computed different plans.
    """
    ranks = group_of(coordinator.rank, len(buffers), group_size)
    plan = compute(plan_group, buffers, budget, ranks, model=model)
    for _ in range(MAX_AGREEMENTS):
        answers = coordinator.gather_plans(outline(plan, ranks).to_bytes(), step_index)
        firsts = [answers[rank - rank % group_size] for rank in range(len(answers))]
        if answers != firsts:
            raise CollectiveError(DIFFERENT_PLANS.format(ranks_alike(answers)))
        outlines = [GroupOutline.from_bytes(answer) for answer in answers[::group_size]]
        least_steps = steps_to_reach(outlines)
        if not least_steps:
            return joined(plan, ranks, outlines)
        if len(plan.totals) < least_steps:
            plan = compute(plan_group, buffers, budget, ranks, model=model, least_steps=least_steps)
    raise disagreement(outlines)
