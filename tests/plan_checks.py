"""What a single plan promises: of an optimizer step that is kept, and of a round of `fill`. In both layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planning_strategies import attention_of, shape_of, within

from odb_factory import planning
from odb_factory.planning import Budget, Cost, CostModel, Plan, make_metadata, plan_optimizer_step

World = Sequence[Sequence[Cost]]
"""Of each rank the samples of the optimizer step that it holds."""


def planned(world: World, budget: Budget, *, balance: bool, model: CostModel = CostModel()) -> Plan:
    buffers = [make_metadata(own, [0] * len(own), exhausted=False) for own in world]
    return plan_optimizer_step(buffers, budget, balance=balance, model=model)


def cost_of(group: Sequence[Cost], budget: Budget, model: CostModel) -> int:
    rows, length, patches = shape_of(group, budget)
    return model.of(rows * length, patches, attention_of(group, budget))


def step_costs(plan: Plan, costs: Sequence[Cost], budget: Budget, model: CostModel) -> list[int]:
    """What the costliest rank of each micro-step costs."""
    return [
        max(cost_of([costs[i] for i in group], budget, model) for group in step if group) for step in zip(*plan.groups)
    ]


def check_optimizer_step(world: World, budget: Budget, plan: Plan, balance: bool, model: CostModel) -> None:
    """All that the plan of an optimizer step promises."""
    costs, num_steps = [cost for own in world for cost in own], len(plan.totals)
    assert len(plan.groups) == len(world)
    assert all(len(steps) == num_steps for steps in plan.groups), "I1: the same K on all ranks"
    assert Counter(i for steps in plan.groups for group in steps for i in group) == Counter(range(len(costs))), "I2"
    groups = [group for steps in plan.groups for group in steps if group]
    for group in groups:
        assert len(group) == 1 or within([costs[i] for i in group], budget), "I4"
        assert len({costs[i].modality for i in group}) == 1
    assert all(totals.active_ranks for totals in plan.totals), "no micro-step without a sample"
    for rank, steps in enumerate(plan.groups):
        busy = [bool(group) for group in steps]
        assert busy == sorted(busy, reverse=True), "I7: a rank idles behind its last group"
        own = range(*plan.starts[rank : rank + 2])
        if not balance:
            assert all(i in own for group in steps for i in group), "a rank keeps its samples"
            assert all(busy) or all(len(group) <= 1 for group in steps), "I7: idle only for want of samples"
    if balance:
        active_ranks = [totals.active_ranks for totals in plan.totals]
        assert all(active == len(world) for active in active_ranks[:-1]), "I7"
        assert active_ranks[-1:] in ([], [len(world)]) or all(len(group) == 1 for group in groups), "I7"
    if budget.layout == "padded":
        in_order = step_costs(plan, costs, budget, model)
        assert in_order == sorted(in_order, reverse=True), "the costliest micro-step comes first"


# Rounds


@dataclass(frozen=True)
class BufferMetadata:
    """The samples a rank holds: costs, ages in rounds, and whether its sampler is exhausted."""

    costs: Sequence[Cost]
    ages: Sequence[int]
    exhausted: bool


def plan_buffers(world: Sequence[BufferMetadata], budget: Budget, **options: Any) -> Plan:
    windows = [make_metadata(window.costs, window.ages, window.exhausted) for window in world]
    return planning.plan_buffers(windows, budget, **options)


def costs_of(world: Sequence[BufferMetadata]) -> list[Cost]:
    """By the number that a sample has in a plan."""
    return [cost for window in world for cost in window.costs]


def emitted(plan: Plan, rank: int) -> list[int]:
    """The samples that go out on a rank, by their number in the plan."""
    return [i for group in plan.groups[rank] for i in group]


def emitted_of(plan: Plan, rank: int) -> list[int]:
    """The samples that leave the window of a rank, as positions in it."""
    start, end = plan.starts[rank : rank + 2]
    return [i - start for steps in plan.groups for group in steps for i in group if start <= i < end]


def check_round(
    world: Sequence[BufferMetadata],
    budget: Budget,
    plan: Plan,
    balance: bool = False,
) -> None:
    """All that a single round promises."""
    num_steps, costs = len(plan.totals), costs_of(world)
    assert len(plan.groups) == len(world)
    assert all(len(steps) == num_steps for steps in plan.groups), "I1"
    assert plan.final is all(window.exhausted for window in world)
    out = Counter(i for rank in range(len(world)) for i in emitted(plan, rank))
    assert set(out) <= set(range(len(costs)))
    assert all(count == 1 for count in out.values()), "I2: no sample twice"
    assert not plan.final or len(out) == len(costs), "I2: a final round leaves nothing"
    for rank, window in enumerate(world):
        gone = emitted_of(plan, rank)
        assert balance or len(emitted(plan, rank)) == len(gone), "a rank keeps its samples"
        assert gone or not window.costs or balance, "I5: progress on every rank that holds a sample"
        for group in plan.groups[rank]:
            if len(group) >= 2:
                assert within([costs[i] for i in group], budget), "I4"
                assert len({costs[i].modality for i in group}) == 1
        busy = [bool(group) for group in plan.groups[rank]]
        assert busy == sorted(busy, reverse=True), "I7: idle steps only behind the last group"
        if not all(busy):
            assert balance or window.exhausted, "I7"
            assert len(gone) == len(window.costs), "I7"
    assert all(totals.active_ranks for totals in plan.totals), "I7: in every micro-step some rank has a group"
