"""One kept optimizer step of all ranks: lossless (I2), aligned (I1), within budgets (I4), repeatable (I6), thrifty (I7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from planning_strategies import budgets, collated, costs, within

from odb_factory.planning import (
    Budget,
    Cost,
    CostModel,
    Plan,
    make_metadata,
    plan_optimizer_step,
)

World = Sequence[Sequence[Cost]]
"""Of each rank the samples of the optimizer step that it holds."""

worlds = st.lists(st.lists(costs(), max_size=10), min_size=1, max_size=4)
models = st.builds(CostModel, *[st.integers(0, 10**6)] * 4) | st.just(CostModel())


def planned(world: World, budget: Budget, *, balance: bool, model: CostModel = CostModel()) -> Plan:
    buffers = [make_metadata(own, [0] * len(own), exhausted=False) for own in world]
    return plan_optimizer_step(buffers, budget, balance=balance, model=model)


def cost_of(group: Sequence[Cost], budget: Budget, model: CostModel) -> int:
    rows, length, patches = collated(group, budget.collation)
    return model.of(rows * length, patches, rows * length * length)


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
    waited = step_costs(plan, costs, budget, model)
    assert waited == sorted(waited, reverse=True), "the costliest micro-step comes first"


@given(worlds, budgets, st.booleans(), models)
def test_an_optimizer_step_keeps_its_promises(world: World, budget: Budget, balance: bool, model: CostModel) -> None:
    """I1, I2, I4, I7 with media, max_patches, dummy media, overlong samples and any cost model."""
    plan = planned(world, budget, balance=balance, model=model)
    check_optimizer_step(world, budget, plan, balance and len(world) > 1, model)
