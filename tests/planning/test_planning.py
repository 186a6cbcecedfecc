"""One round of all ranks: aligned (I1), lossless (I2), making progress (I5), repeatable (I6), thrifty (I7)."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_checks import BufferMetadata, check_round, costs_of, emitted, emitted_of, plan_buffers
from planning_strategies import budgets, costs, flat_budgets, within

from odb_factory import planning
from odb_factory.planning import MAX_REDISTRIBUTED_BYTES, Budget, Collation, Cost, CostModel, make_metadata
from odb_factory.planning.plan import exceeds_limit


@st.composite
def a_window(draw: st.DrawFn) -> BufferMetadata:
    held = draw(st.lists(costs(num_modalities=2), max_size=12))
    ages = draw(st.lists(st.integers(0, 34), min_size=len(held), max_size=len(held)))
    return BufferMetadata(held, ages, exhausted=not held or draw(st.booleans()))


worlds = st.lists(a_window(), min_size=1, max_size=4)
dry_worlds = worlds.map(lambda world: [BufferMetadata(window.costs, window.ages, exhausted=True) for window in world])


@st.composite
def positions(draw: st.DrawFn) -> dict[str, int]:
    """Where in the run a round stands."""
    return {
        "seed": draw(st.integers(0, 3)),
        "epoch": draw(st.integers(0, 3)),
        "round_index": draw(st.integers(0, 3)),
        "accumulation": draw(st.integers(1, 4)),
    }


def test_every_tiny_world_of_two_ranks_keeps_its_promises() -> None:
    """Without chance: all pairs of windows of up to three samples of one to three tokens."""
    budget = Budget(4)
    windows = [
        BufferMetadata([Cost(tokens) for tokens in lengths], [age] * count, exhausted)
        for count in range(4)
        for lengths in itertools.combinations_with_replacement((1, 2, 3), count)
        for age in ((0, 32) if count else (0,))
        for exhausted in ((False, True) if count else (True,))
    ]
    for world in itertools.product(windows, repeat=2):
        plan = plan_buffers(world, budget, seed=0, epoch=0, round_index=0, accumulation=3)
        check_round(list(world), budget, plan)


@given(dry_worlds, budgets, positions())
def test_a_final_round_emits_everything_and_is_no_longer_than_needed(
    world: list[BufferMetadata], budget: Budget, position: dict[str, int]
) -> None:
    """I1, I7: the rank with most groups sets the length; nothing fills the last optimizer step up."""
    plan = plan_buffers(world, budget, **position)
    assert plan.final
    assert sum(step.samples for step in plan.totals) == sum(len(window.costs) for window in world)
    assert not plan.totals or any(all(groups) for groups in plan.groups)


@given(worlds, budgets | flat_budgets, positions(), st.integers(0, 100), st.booleans())
def test_a_plan_depends_on_nothing_but_its_arguments(
    world: list[BufferMetadata], budget: Budget, position: dict[str, int], noise: int, balance: bool
) -> None:
    """I6: equal, not identical arguments and another state of every global generator give the same plan."""
    position["balance"] = balance
    plan = plan_buffers(world, budget, **position)
    np.random.seed(noise)
    random.seed(noise)
    again = [
        BufferMetadata(tuple(window.costs), tuple(window.ages), window.exhausted) for window in copy.deepcopy(world)
    ]
    assert plan_buffers(again, copy.deepcopy(budget), **position) == plan


@given(worlds, budgets | flat_budgets, positions(), positions())
def test_seed_epoch_and_round_change_the_order_only(
    world: list[BufferMetadata], budget: Budget, one: dict[str, int], other: dict[str, int]
) -> None:
    """The same groups, whatever the seed: only the steps they go out on differ."""
    other |= {key: one[key] for key in ("accumulation",)}
    plans = [plan_buffers(world, budget, **position) for position in (one, other)]
    for first, second in zip(plans[0].groups, plans[1].groups):
        assert sorted(first) == sorted(second)


@pytest.mark.parametrize("key", ["seed", "epoch", "round_index"])
def test_the_order_is_another_one_for_another_seed_epoch_or_round(key: str) -> None:
    """Long groups do not always come first, nor in the same order every epoch."""
    window = BufferMetadata([Cost(tokens) for tokens in range(50, 100)], [0] * 50, exhausted=True)
    position = {"seed": 1, "epoch": 1, "round_index": 1}
    orders = [plan_buffers([window], Budget(100), **position | {key: value}).groups[0] for value in range(5)]
    assert len({str(order) for order in orders}) == 5
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


def test_like_groups_meet_on_the_same_step() -> None:
    """Ranks wait for the slowest one in every step, so their k-th largest groups go out together, old or new."""
    world = [
        BufferMetadata([Cost(tokens) for tokens in range(51, 100, 5)], list(range(10)), exhausted=True),
        BufferMetadata([Cost(tokens) for tokens in range(53, 102, 5)], [0, 3] * 5, exhausted=True),
    ]
    plan, costs = plan_buffers(world, Budget(100), seed=0, epoch=0, round_index=0), costs_of(world)
    for mine, theirs in zip(*plan.groups):
        assert abs(costs[mine[0]].tokens - costs[theirs[0]].tokens) == 2


@settings(deadline=None, max_examples=50)
@given(
    st.lists(costs(num_modalities=2), min_size=1, max_size=40),
    budgets | flat_budgets,
    st.integers(1, 12),
    st.integers(1, 3),
)
@example([Cost(14), Cost(18), Cost(15), Cost(16), Cost(1)], Budget(26, layout="flat"), 4, 1)
def test_the_oldest_sample_goes_out_in_every_round(
    samples: list[Cost], budget: Budget, buffer_size: int, num_ranks: int
) -> None:
    """I5: so a sample waits for no more rounds than others are before it, and every round sends something out."""
    to_come, num_rounds, final = [samples[rank::num_ranks] for rank in range(num_ranks)], 0, False
    held: list[list[tuple[Cost, int]]] = [[] for _ in to_come]
    while not final:
        for own, coming in zip(held, to_come):
            fresh = coming[: buffer_size - len(own)]
            del coming[: len(fresh)]
            own += [(cost, 0) for cost in fresh]
        world = [
            BufferMetadata([cost for cost, _ in own], [age for _, age in own], exhausted=not coming)
            for own, coming in zip(held, to_come)
        ]
        plan = plan_buffers(world, budget, seed=0, epoch=0, round_index=num_rounds)
        check_round(world, budget, plan)
        final, num_rounds = plan.final, num_rounds + 1
        for rank, own in enumerate(held):
            gone = set(emitted_of(plan, rank))
            assert not own or 0 in gone, "the oldest stands first"
            held[rank] = [(cost, age + 1) for i, (cost, age) in enumerate(own) if i not in gone]
    assert not any(held) and num_rounds <= len(samples)


def test_older_samples_go_first_whatever_their_length() -> None:
    lengths = [50, 3, 40, 7, 60, 2, 30, 9] * 4
    window = BufferMetadata([Cost(length) for length in lengths], list(range(32)), exhausted=False)
    gone = emitted(plan_buffers([window], Budget(100, layout="flat"), seed=0, epoch=0, round_index=0), 0)
    assert sorted(gone) == list(range(32 - len(gone), 32)) and 8 < len(gone) < 32


@pytest.mark.parametrize("is_oldest", [False, True])
def test_a_padded_sample_waits_for_its_like_unless_it_is_the_oldest(is_oldest: bool) -> None:
    lengths, ages = [48, 30] + [25] * 16, [3 if is_oldest else 1, 1, 2] + [0] * 15
    window = BufferMetadata([Cost(length) for length in lengths], ages, exhausted=False)
    plan = plan_buffers([window], Budget(100), seed=0, epoch=0, round_index=0)
    gone = sorted(sorted(lengths[i] for i in group) for group in plan.groups[0])
    assert gone == [[25] * 4] * 3 + [[30, 48]] * is_oldest


def test_a_rank_with_more_groups_carries_the_surplus_over() -> None:
    """I7: no idle step while a rank still draws samples, and no smaller groups for the sake of the count."""
    many = BufferMetadata([Cost(8)] * 10, [0] * 10, exhausted=False)
    few = BufferMetadata([Cost(8)] * 3, [0] * 3, exhausted=False)
    plan = plan_buffers([many, few], Budget(16), seed=0, epoch=0, round_index=0)
    assert [[len(group) for group in steps] for steps in plan.groups] == [[2], [2]]


@given(a_window().filter(lambda window: window.costs), st.integers(1, 3))
def test_a_filler_larger_than_the_budget_still_makes_progress(window: BufferMetadata, accumulation: int) -> None:
    """I5 where every text sample is overlong for what the collator injects beside it."""
    budget = Budget(8, 1, Collation(dummy_media_tokens=50, dummy_media_patches=9))
    plan = plan_buffers([window], budget, seed=0, epoch=0, round_index=0, accumulation=accumulation)
    check_round([window], budget, plan)


# Quota closure


@given(worlds, budgets | flat_budgets, positions())
def test_a_round_without_join_has_no_idle_step(
    world: list[BufferMetadata], budget: Budget, position: dict[str, int]
) -> None:
    """I1, I3, I4: whole optimizer steps, every rank busy in every one, no sample twice."""
    plan = plan_buffers(world, budget, join=False, **position)
    assert len(plan.totals) % position["accumulation"] == 0
    assert all(totals.active_ranks == len(world) for totals in plan.totals)
    costs = costs_of(world)
    for rank in range(len(world)):
        assert len(plan.groups[rank]) == len(plan.totals)
        assert all(plan.groups[rank])
        assert all(count == 1 for count in Counter(emitted(plan, rank)).values())
        assert all(len(group) == 1 or within([costs[i] for i in group], budget) for group in plan.groups[rank])


@given(worlds, budgets | flat_budgets, st.integers(1, 3))
def test_an_epoch_without_join_ends_when_a_dry_rank_runs_short(
    world: list[BufferMetadata], budget: Budget, accumulation: int
) -> None:
    """I3, I5: not before, and every round until then takes an optimizer step."""
    world = [BufferMetadata(one.costs, one.ages, one.exhausted or len(one.costs) < accumulation) for one in world]
    plan = plan_buffers(world, budget, seed=0, epoch=0, round_index=0, accumulation=accumulation, join=False)
    left = [len(one.costs) - len(emitted(plan, rank)) for rank, one in enumerate(world)]
    assert plan.final is any(one.exhausted and count < accumulation for one, count in zip(world, left))
    assert plan.final or plan.totals
    if plan.final:
        assert min(left) < accumulation, "no optimizer step that all could have taken is left out"


# Balance


def test_balanced_ranks_share_what_they_hold() -> None:
    """One rank holds everything: all of them have the same number of groups, and what stays is given first."""
    world = [BufferMetadata([Cost(8)] * 16, [0] * 16, exhausted=True), *[BufferMetadata([], [], exhausted=True)] * 3]
    plan = plan_buffers(world, Budget(16), seed=0, epoch=0, round_index=0, balance=True)
    assert [[len(group) for group in steps] for steps in plan.groups] == [[2, 2]] * 4
    assert [totals.moved for totals in plan.totals] == [6, 6]


def test_a_group_that_cannot_be_halved_for_a_filler_is_split_elsewhere() -> None:
    """I7: of (6, 6, 6), one with media, the half without gets 20 tokens more than the budget has room for."""
    costs = [Cost(6), Cost(6, has_media=True), Cost(3), Cost(3, has_media=True), Cost(6), Cost(2)]
    world = [BufferMetadata(costs, [0] * 6, exhausted=True), *[BufferMetadata([], [], exhausted=True)] * 2]
    budget = Budget(20, collation=Collation(dummy_media_tokens=20))
    plan = plan_buffers(world, budget, seed=0, epoch=0, round_index=0, balance=True)
    assert plan.totals[0].active_ranks == 3


def test_balanced_groups_of_like_patches_meet() -> None:
    """The vision towers of all ranks wait for each other too."""
    world = [
        BufferMetadata([Cost(8, 8, has_media=True), Cost(8)] * 8, [0] * 16, exhausted=True),
        BufferMetadata([Cost(8, 4, has_media=True)] * 16, [0] * 16, exhausted=True),
    ]
    plan = plan_buffers(world, Budget(16), seed=0, epoch=0, round_index=0, balance=True)
    assert sum(totals.max_rank_patches for totals in plan.totals) * 2 <= 1.25 * sum(t.patches for t in plan.totals)


def test_samples_that_weigh_too_much_stay_where_they_are() -> None:
    rows = [make_metadata([Cost(8)] * 4, [0] * 4, True, [MAX_REDISTRIBUTED_BYTES // 4 + more] * 4) for more in (0, 1)]
    for own, exceeds in ((rows[0], False), (rows[1], True)):
        windows = [own, make_metadata([], [], True)]
        plan = planning.plan_buffers(windows, Budget(16), seed=0, epoch=0, round_index=0, balance=True)
        assert exceeds_limit(windows) is exceeds
        moved = sum(totals.moved for totals in plan.totals)
        assert (moved == 0) is exceeds


# Any cost model


def test_groups_that_take_as_long_meet() -> None:
    """By tokens 4 rows of 25 equal 2 of 50; by time two rows of 50 take twice as long, and meet their like."""
    lengths = [25] * 16 + [50] * 8
    world = [BufferMetadata([Cost(length) for length in lengths], [0] * len(lengths), exhausted=True)] * 2
    for options in ({}, {"balance": True}):
        plan = plan_buffers(world, Budget(100), seed=0, epoch=0, round_index=0, model=CostModel(0, 0, 0, 1), **options)
        costs = costs_of(world)
        for mine, theirs in zip(*plan.groups):
            assert costs[mine[0]].tokens == costs[theirs[0]].tokens


models = st.builds(CostModel, *[st.integers(0, 10**9)] * 4) | st.just(CostModel())


@given(worlds, budgets | flat_budgets, positions(), st.booleans(), models)
def test_a_round_keeps_its_promises(
    world: list[BufferMetadata], budget: Budget, position: dict[str, int], balance: bool, model: CostModel
) -> None:
    """I1, I2, I4, I5, I7 for one round of one to four ranks, whatever the cost model and the modalities.

    A balanced one is of all windows as one: something goes out, on every rank if there are enough samples.
    """
    plan = plan_buffers(world, budget, balance=balance, model=model, **position)
    check_round(world, budget, plan, balance and len(world) > 1)
    held = sum(len(window.costs) for window in world)
    if balance and held:
        assert plan.totals[0].samples
        assert plan.totals[0].active_ranks == len(world) or held < len(world), "I5, I7"
