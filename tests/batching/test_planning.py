"""One round of all ranks: aligned (I1), lossless (I2), making progress (I5), repeatable (I6), thrifty (I7)."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from batching_strategies import budgets, collated, costs, within
from hypothesis import example, given, settings
from hypothesis import strategies as st

from odb_factory.batching import Budget, Collation, Cost, GroupCost, Offer, StepTotals, align, make_offer
from odb_factory.batching.grouping import form_groups
from odb_factory.batching.planning import MAX_WAIT_ROUNDS


@dataclass(frozen=True)
class Window:
    """The samples a rank holds: costs, ages in rounds, and whether its sampler is dry."""

    costs: Sequence[Cost]
    ages: Sequence[int]
    dry: bool


@dataclass(frozen=True)
class Plan:
    """A round in window positions: `groups[rank][step]`, empty on an idle step."""

    groups: list[list[list[int]]]
    totals: list[StepTotals]
    final: bool


def plan_round(world: Sequence[Window], budget: Budget, **options: Any) -> Plan:
    """A round as ranks go through it: each makes its offer, all align the offers."""
    num_groups = 1 if options.get("join", True) else options["accumulation"]
    formed = [make_offer(window.costs, window.ages, window.dry, budget, num_groups) for window in world]
    plan = align([offer for _, offer in formed], **options)
    groups = [
        [[] if chosen is None else groups[chosen] for chosen in steps]
        for (groups, _), steps in zip(formed, plan.groups)
    ]
    return Plan(groups, plan.totals, plan.final)


@st.composite
def a_window(draw: st.DrawFn) -> Window:
    held = draw(st.lists(costs(), max_size=12))
    ages = draw(st.lists(st.integers(0, MAX_WAIT_ROUNDS + 2), min_size=len(held), max_size=len(held)))
    return Window(held, ages, dry=not held or draw(st.booleans()))


worlds = st.lists(a_window(), min_size=1, max_size=4)
dry_worlds = worlds.map(lambda world: [Window(window.costs, window.ages, dry=True) for window in world])


@st.composite
def positions(draw: st.DrawFn) -> dict[str, int]:
    """Where in the run a round stands; `steps_before` need not be whole optimizer steps."""
    return {
        "seed": draw(st.integers(0, 3)),
        "epoch": draw(st.integers(0, 3)),
        "round_index": draw(st.integers(0, 3)),
        "steps_before": draw(st.integers(0, 9)),
        "accumulation": draw(st.integers(1, 4)),
    }


def emitted(plan: Plan, rank: int) -> list[int]:
    return [i for group in plan.groups[rank] for i in group]


def check_round(world: list[Window], budget: Budget, plan: Plan, steps_before: int, accumulation: int) -> None:
    """All that a single round promises."""
    num_steps = len(plan.totals)
    assert len(plan.groups) == len(world)
    assert all(len(steps) == num_steps for steps in plan.groups), "I1"
    assert plan.final is all(window.dry for window in world)
    for rank, window in enumerate(world):
        gone = Counter(emitted(plan, rank))
        assert set(gone) <= set(range(len(window.costs)))
        assert all(count == 1 for count in gone.values()), "I2: no sample twice"
        assert gone or not window.costs, "I5: progress on every rank that holds a sample"
        if plan.final:
            assert len(gone) == len(window.costs), "I2: a final round leaves nothing"
        for group in plan.groups[rank]:
            if len(group) >= 2:
                assert within([window.costs[i] for i in group], budget), "I4"
        busy = [bool(group) for group in plan.groups[rank]]
        assert busy == sorted(busy, reverse=True), "I7: idle steps only behind the last group"
        if not all(busy):
            assert window.dry, "I7"
            assert len(gone) == len(window.costs), "I7"
    busy_ranks = [totals.busy_ranks for totals in plan.totals]
    if plan.final:
        assert (steps_before + num_steps) % accumulation == 0, "I1"
        assert sum(not busy for busy in busy_ranks) < accumulation, "I7: filled up, and no further"
    else:
        assert all(busy_ranks), "I7: a step on which every rank idles only fills up the epoch"


@given(worlds, budgets, positions())
def test_a_round_keeps_its_promises(world: list[Window], budget: Budget, position: dict[str, int]) -> None:
    """I1, I2, I4, I5, I7 for one round of one to four ranks."""
    plan = plan_round(world, budget, **position)
    check_round(world, budget, plan, position["steps_before"], position["accumulation"])


def test_every_tiny_world_of_two_ranks_keeps_its_promises() -> None:
    """The same, without chance: all pairs of windows of up to three samples of one to three tokens."""
    budget = Budget(4)
    windows = [
        Window([Cost(tokens) for tokens in lengths], [age] * count, dry)
        for count in range(4)
        for lengths in itertools.combinations_with_replacement((1, 2, 3), count)
        for age in ((0, MAX_WAIT_ROUNDS) if count else (0,))
        for dry in ((False, True) if count else (True,))
    ]
    for world in itertools.product(windows, repeat=2):
        plan = plan_round(world, budget, seed=0, epoch=0, round_index=0, steps_before=1, accumulation=3)
        check_round(list(world), budget, plan, 1, 3)


@given(dry_worlds, budgets, positions())
def test_a_final_round_emits_everything_and_is_no_longer_than_needed(
    world: list[Window], budget: Budget, position: dict[str, int]
) -> None:
    """I1, I7: the rank with most groups sets the length, and idle steps fill the last optimizer step."""
    plan = plan_round(world, budget, **position)
    before, accumulation = position["steps_before"], position["accumulation"]
    formed = [form_groups(window.costs, budget) for window in world]
    needed = max(len(full) + bool(rest) for full, rest in formed)
    assert plan.final
    assert len(plan.totals) == -(-(before + needed) // accumulation) * accumulation - before


@given(worlds, budgets, positions())
def test_no_group_is_cut_down_to_raise_a_count(world: list[Window], budget: Budget, position: dict[str, int]) -> None:
    """I7: what a rank emits are groups it would also form alone; the other ranks only decide how many."""
    plan = plan_round(world, budget, **position)
    for window, steps in zip(world, plan.groups):
        alone = plan_round([Window(window.costs, window.ages, dry=True)], budget, **position).groups[0]
        assert {tuple(group) for group in steps if group} <= {tuple(group) for group in alone}


@given(worlds, budgets, positions())
def test_what_has_waited_longest_goes_first(world: list[Window], budget: Budget, position: dict[str, int]) -> None:
    """I5: where a rank keeps back a whole group, none it emits is younger; a wait is therefore bounded."""
    plan = plan_round(world, budget, **position)
    for rank, window in enumerate(world):
        gone = set(emitted(plan, rank))
        full, rest = form_groups(window.costs, budget)
        kept = [max(window.ages[i] for i in group) for group in full if gone.isdisjoint(group)]
        if rest and gone.isdisjoint(rest) and (age := max(window.ages[i] for i in rest)) >= MAX_WAIT_ROUNDS:
            kept.append(age)
        sent = [max(window.ages[i] for i in group) for group in plan.groups[rank] if group]
        assert not kept or max(kept) <= min(sent)


@given(worlds, budgets, positions())
def test_totals_are_the_sums_over_all_ranks(world: list[Window], budget: Budget, position: dict[str, int]) -> None:
    """Loss weights (I8) and progress rest on these sums; here they are added up again."""
    plan = plan_round(world, budget, **position)
    for k, totals in enumerate(plan.totals):
        groups = [[window.costs[i] for i in steps[k]] for window, steps in zip(world, plan.groups)]
        shapes = [collated(group, budget.collation) for group in groups if group]
        assert totals.samples == sum(map(len, groups))
        assert totals.tokens == sum(cost.tokens for group in groups for cost in group)
        assert totals.supervised_tokens == sum(cost.supervised_tokens for group in groups for cost in group)
        assert totals.padded_tokens == sum(rows * length for rows, length, _ in shapes)
        assert totals.busy_ranks == len(shapes)


@given(worlds, budgets, positions(), st.integers(0, 100))
def test_a_plan_depends_on_nothing_but_its_arguments(
    world: list[Window], budget: Budget, position: dict[str, int], noise: int
) -> None:
    """I6: equal, not identical arguments and another state of every global generator give the same plan."""
    plan = plan_round(world, budget, **position)
    np.random.seed(noise)
    random.seed(noise)
    again = [Window(tuple(window.costs), tuple(window.ages), window.dry) for window in copy.deepcopy(world)]
    assert plan_round(again, copy.deepcopy(budget), **position) == plan


@given(worlds, budgets, positions(), positions())
def test_seed_epoch_and_round_change_the_order_only(
    world: list[Window], budget: Budget, one: dict[str, int], other: dict[str, int]
) -> None:
    """The same groups, whatever the seed: only the steps they go out on differ."""
    other |= {key: one[key] for key in ("steps_before", "accumulation")}
    plans = [plan_round(world, budget, **position) for position in (one, other)]
    for first, second in zip(plans[0].groups, plans[1].groups):
        assert sorted(first) == sorted(second)


@pytest.mark.parametrize("key", ["seed", "epoch", "round_index"])
def test_the_order_is_another_one_for_another_seed_epoch_or_round(key: str) -> None:
    """Long groups do not always come first, nor in the same order every epoch."""
    window = Window([Cost(tokens) for tokens in range(50, 100)], [0] * 50, dry=True)
    position = {"seed": 1, "epoch": 1, "round_index": 1}
    orders = [plan_round([window], Budget(100), **position | {key: value}).groups[0] for value in range(5)]
    assert len({str(order) for order in orders}) == 5
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


def test_like_groups_meet_on_the_same_step() -> None:
    """Ranks wait for the slowest one in every step, so their k-th largest groups go out together, old or new."""
    world = [
        Window([Cost(tokens) for tokens in range(51, 100, 5)], list(range(10)), dry=True),
        Window([Cost(tokens) for tokens in range(53, 102, 5)], [0, 3] * 5, dry=True),
    ]
    plan = plan_round(world, Budget(100), seed=0, epoch=0, round_index=0)
    for mine, theirs in zip(*plan.groups):
        difference = world[0].costs[mine[0]].tokens - world[1].costs[theirs[0]].tokens
        assert abs(difference) == 2


@settings(deadline=None)
@given(st.lists(costs(), min_size=1, max_size=60), budgets, st.integers(1, 12))
def test_one_rank_keeps_a_sample_back_a_bounded_number_of_rounds(
    samples: list[Cost], budget: Budget, buffer_size: int
) -> None:
    """I5: on one rank only the part-filled last group waits, for `MAX_WAIT_ROUNDS` rounds at most."""
    to_come, held, ages, num_rounds = list(samples), [], [], 0
    final = False
    while not final:
        while to_come and len(held) < buffer_size:
            held.append(to_come.pop(0))
            ages.append(0)
        assert max(ages) <= MAX_WAIT_ROUNDS
        window = Window(held, ages, dry=not to_come)
        plan = plan_round([window], budget, seed=0, epoch=0, round_index=num_rounds)
        final = plan.final
        gone = set(emitted(plan, 0))
        kept = [i for i in range(len(held)) if i not in gone]
        full, rest = form_groups(held, budget)
        assert set(kept) <= set(rest)
        held, ages = [held[i] for i in kept], [ages[i] + 1 for i in kept]
        num_rounds += 1
    assert not held
    assert num_rounds <= len(samples)


def test_a_part_filled_group_waits_for_samples_and_no_longer_than_allowed() -> None:
    """Both sides of the bound: it does wait while it may, and goes out when it has waited long enough."""
    budget = Budget(16)
    for age, goes in ((0, False), (MAX_WAIT_ROUNDS - 1, False), (MAX_WAIT_ROUNDS, True)):
        window = Window([Cost(8), Cost(8), Cost(3)], [0, 0, age], dry=False)
        plan = plan_round([window], budget, seed=0, epoch=0, round_index=0)
        assert (2 in emitted(plan, 0)) is goes


def test_a_rank_with_more_groups_carries_the_surplus_over() -> None:
    """I7: no idle step while a rank still draws samples, and no smaller groups for the sake of the count."""
    many = Window([Cost(8)] * 10, [0] * 10, dry=False)
    few = Window([Cost(8)] * 3, [0] * 3, dry=False)
    plan = plan_round([many, few], Budget(16), seed=0, epoch=0, round_index=0)
    assert [[len(group) for group in steps] for steps in plan.groups] == [[2], [2]]


def test_a_dry_rank_does_not_hold_up_the_others() -> None:
    """A dry rank idles while the others go on; it does not end the round early."""
    dry = Window([Cost(8)] * 2, [0] * 2, dry=True)
    busy = Window([Cost(8)] * 6, [0] * 6, dry=False)
    plan = plan_round([dry, busy, Window([], [], dry=True)], Budget(16), seed=0, epoch=0, round_index=0)
    assert [[len(group) for group in steps] for steps in plan.groups] == [[2, 0], [2, 2], [0, 0]]
    assert not plan.final


def test_no_sample_at_all_is_no_step_at_all() -> None:
    plan = plan_round([Window([], [], dry=True)] * 2, Budget(8), seed=0, epoch=0, round_index=0, accumulation=4)
    assert plan == Plan(groups=[[], []], totals=[], final=True)


@given(a_window().filter(lambda window: window.costs), st.integers(1, 3))
def test_a_filler_larger_than_the_budget_still_makes_progress(window: Window, accumulation: int) -> None:
    """I5 where every text sample is overlong for what the collator injects beside it."""
    budget = Budget(8, 1, Collation(filler_tokens=50, filler_patches=9))
    plan = plan_round([window], budget, seed=0, epoch=0, round_index=0, accumulation=accumulation)
    check_round([window], budget, plan, 0, accumulation)


# Quota closure


@given(a_window(), budgets, st.integers(1, 6))
@example(
    Window([Cost(10, 1, 5, True)] * 2 + [Cost(10, 0, 5)] * 2, [0] * 4, dry=False),
    Budget(40, collation=Collation(filler_tokens=20)),
    2,
)
@example(
    Window([Cost(1), Cost(10), Cost(10)], [0] * 3, dry=False),
    Budget(33, collation=Collation(filler_tokens=10)),
    2,
)
def test_an_offer_is_made_of_what_is_held(window: Window, budget: Budget, num_groups: int) -> None:
    """I2, I4, I5: nothing twice, within both budgets, all of it when dry, and as many groups as asked for if it can."""
    groups, offer = make_offer(window.costs, window.ages, window.dry, budget, num_groups)
    offered = Counter(i for group in groups for i in group)
    assert all(groups) and all(count == 1 for count in offered.values())
    assert len(offered) == len(window.costs) or not window.dry
    assert window.dry or len(groups) >= min(num_groups, len(window.costs))
    assert offer.dry is window.dry
    for group, cost in zip(groups, offer.groups, strict=True):
        rows = [window.costs[i] for i in group]
        assert len(group) == 1 or within(rows, budget), "I4"
        assert (cost.rows, cost.length) == collated(rows, budget.collation)[:2]
        assert cost.tokens == sum(row.tokens for row in rows)
        assert cost.supervised_tokens == sum(row.supervised_tokens for row in rows)


@given(a_window(), budgets, st.integers(1, 3), st.data())
def test_families_never_share_a_group(window: Window, budget: Budget, num_groups: int, data: st.DataObject) -> None:
    """Each family of a dry window forms the groups it would form alone; nothing is lost between them."""
    costs = [dataclasses.replace(cost, family=data.draw(st.integers(0, 2))) for cost in window.costs]
    groups, offer = make_offer(costs, window.ages, window.dry, budget, num_groups)
    assert all(len({costs[i].family for i in group}) == 1 for group in groups)
    offered = Counter(i for group in groups for i in group)
    assert len(offered) + offer.kept_back == len(costs) and all(count == 1 for count in offered.values())
    alone = []
    for family in range(3):
        members = [i for i, cost in enumerate(costs) if cost.family == family]
        formed, _ = make_offer([costs[i] for i in members], [0] * len(members), True, budget)
        alone += [[members[i] for i in group] for group in formed]
    together, _ = make_offer(costs, window.ages, True, budget)
    assert sorted(together) == sorted(alone)


@given(worlds, budgets, positions())
def test_a_round_without_join_has_no_idle_step(world: list[Window], budget: Budget, position: dict[str, int]) -> None:
    """I1, I3, I4: whole optimizer steps, every rank busy in every one, no sample twice."""
    position["steps_before"] = 0
    plan = plan_round(world, budget, join=False, **position)
    assert len(plan.totals) % position["accumulation"] == 0
    assert all(totals.busy_ranks == len(world) for totals in plan.totals)
    for rank, window in enumerate(world):
        assert len(plan.groups[rank]) == len(plan.totals)
        assert all(plan.groups[rank])
        assert all(count == 1 for count in Counter(emitted(plan, rank)).values())
        assert all(len(group) == 1 or within([window.costs[i] for i in group], budget) for group in plan.groups[rank])


group_costs = st.builds(GroupCost, *[st.integers(1, 9)] * 4)
offers = st.lists(st.builds(Offer, st.lists(group_costs, max_size=9), st.booleans()), min_size=1, max_size=4)


@given(offers, st.integers(1, 3))
def test_an_epoch_without_join_ends_when_a_dry_rank_runs_short(world: list[Offer], accumulation: int) -> None:
    """I3, I5: not before, and every round until then takes an optimizer step."""
    world = [Offer(offer.groups, offer.dry or len(offer.groups) < accumulation) for offer in world]
    plan = align(world, seed=0, epoch=0, round_index=0, accumulation=accumulation, join=False)
    left = [len(offer.groups) - len(plan.totals) for offer in world]
    assert plan.final is any(offer.dry and count < accumulation for offer, count in zip(world, left))
    assert plan.final or plan.totals
    assert all(count >= 0 for count in left)
    if plan.final:
        assert min(left) < accumulation, "no optimizer step that all could have taken is left out"


def test_planning_needs_no_torch() -> None:
    """Pure code: it can be replayed anywhere."""
    code = "import sys, odb_factory.batching; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
