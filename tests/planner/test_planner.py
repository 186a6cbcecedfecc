"""One round of `fill`: aligned (I1), lossless (I2), making progress (I5), repeatable (I6), thrifty (I7)."""

from __future__ import annotations

import copy
import itertools
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_checks import Window, check_plan, check_round, emitted_of, plan_round
from planner_strategies import budgets, costs, flat_budgets

from odb_factory.planner import Budget, Collation, Cost


@st.composite
def a_window(draw: st.DrawFn) -> Window:
    held = draw(st.lists(costs(num_modalities=2), max_size=12))
    positions = sorted(draw(st.sets(st.integers(0, 50), min_size=len(held), max_size=len(held))))
    return Window(held, positions, exhausted=not held or draw(st.booleans()))


worlds = st.lists(a_window(), min_size=1, max_size=4)
rounds = st.fixed_dictionaries(
    {name: st.integers(0, 3) for name in ("seed", "epoch", "round_index")} | {"accumulation": st.integers(1, 4)}
)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(costs(num_modalities=2), min_size=1, max_size=40),
    budgets | flat_budgets,
    st.integers(1, 12),
    st.integers(1, 3),
    st.booleans(),
)
@example([Cost(14), Cost(18), Cost(15), Cost(16), Cost(1)], Budget(26, layout="flat"), 4, 1, False)
def test_the_oldest_sample_goes_out_in_every_round(
    samples: list[Cost], budget: Budget, buffer_size: int, num_ranks: int, balance: bool
) -> None:
    """I5: a sample waits for at most as many rounds as there are samples before it. Without balance the oldest sample
    of each rank goes, with balance the oldest of all ranks."""
    to_come = [list(range(rank, len(samples), num_ranks)) for rank in range(num_ranks)]
    held: list[list[int]] = [[] for _ in to_come]
    num_rounds, final = 0, False
    while not final:
        for own, coming in zip(held, to_come):
            fresh = coming[: buffer_size - len(own)]
            del coming[: len(fresh)]
            own += fresh
        world = [Window([samples[k] for k in own], own, exhausted=not coming) for own, coming in zip(held, to_come)]
        plan = check_round(world, budget, round_index=num_rounds, balance=balance)
        final, num_rounds = plan.final, num_rounds + 1
        gone = [{own[i] for i in emitted_of(plan, rank)} for rank, own in enumerate(held)]
        oldest = [own[:1] for own in held]
        if balance:
            oldest = [[min(itertools.chain(*oldest))]]
        assert set(itertools.chain(*oldest)) <= set().union(*gone)
        held = [[k for k in own if k not in emitted] for own, emitted in zip(held, gone)]
    assert not any(held) and num_rounds <= len(samples)


@pytest.mark.parametrize("is_oldest", [False, True])
def test_a_padded_sample_waits_for_its_like_unless_it_is_the_oldest(is_oldest: bool) -> None:
    lengths, first_positions = [48, 30] + [25] * 16, [0, 1, 2] if is_oldest else [1, 2, 0]
    plan = plan_round([Window([Cost(length) for length in lengths], [*first_positions, *range(3, 18)])], Budget(100))
    gone = sorted(sorted(lengths[i] for i in group) for group in plan.groups[0])
    assert gone == [[25] * 4] * 3 + [[30, 48]] * is_oldest


def test_a_rank_with_more_groups_carries_the_surplus_over() -> None:
    """I7: no idle step while a rank still draws samples, and no smaller groups for the sake of the count."""
    plan = plan_round([Window([Cost(8)] * 10), Window([Cost(8)] * 3)], Budget(16))
    assert [[len(group) for group in steps] for steps in plan.groups] == [[2], [2]]


def drawn(images: float) -> list[list[Cost]]:
    """128 chats on each of four ranks. images: share of samples with an image, which has 10 % to 90 % of the tokens."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.6, 0.6, (4, 128)), 16, 8192).astype(int)
    part = rng.uniform(0.1, 0.9, lengths.shape) * (rng.random(lengths.shape) < images)
    return [
        [Cost(tokens, patches, 1, patches > 0) for tokens, patches in zip(*columns)]
        for columns in zip(lengths.tolist(), (4 * lengths * part).astype(int).tolist())
    ]


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("images", [0.0, 0.5])
def test_bins_are_filled_to_the_budget(balance: bool, images: float) -> None:
    """All samples differ in length, and micro-batches are full except for less than one percent."""
    buffers = list(map(Window, drawn(images)))
    budget = Budget(16384, 4 * 16384, layout="flat")
    plan = check_round(buffers, budget, balance=balance)
    real = sum(totals.tokens for totals in plan.totals)
    assert real >= 0.993 * len(plan.totals) * 4 * 16384
    held = sum(cost.tokens for window in buffers for cost in window.costs)
    assert held - real < 16384 * (4 if balance else 8), "less than a micro-step waits, plus the surplus of a rank"


# Quota closure


@given(worlds, budgets | flat_budgets, rounds)
def test_a_round_without_join_has_no_idle_step(world: list[Window], budget: Budget, position: dict[str, int]) -> None:
    """I1, I3, I4: whole optimizer steps, every rank busy in every one, no sample twice. The epoch ends when an
    exhausted rank runs short, and not before (I5)."""
    accumulation = position["accumulation"]
    world = [window._replace(exhausted=window.exhausted or len(window.costs) < accumulation) for window in world]
    plan = plan_round(world, budget, join=False, **position)
    check_plan(plan, [window.costs for window in world], budget, shares=False, complete=False)
    assert len(plan.totals) % accumulation == 0
    assert all(group for groups in plan.groups for group in groups)
    left = [len(window.costs) - len(emitted_of(plan, rank)) for rank, window in enumerate(world)]
    assert plan.final is any(window.exhausted and count < accumulation for window, count in zip(world, left))
    assert plan.totals or plan.final
    assert not plan.final or min(left) < accumulation, "no optimizer step that all could have taken is left out"


@pytest.mark.parametrize("key", ["seed", "epoch", "round_index"])
def test_seed_epoch_and_round_change_the_order_only(key: str) -> None:
    """Long groups do not always come first, nor in the same order every epoch."""
    window = Window([Cost(tokens) for tokens in range(50, 100)], exhausted=True)
    position = {"seed": 1, "epoch": 1, "round_index": 1}
    orders = [plan_round([window], Budget(100), **position | {key: value}).groups[0] for value in range(5)]
    assert len({str(order) for order in orders}) == 5
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


# Halving (6, 6, 6), one of them with media, would give 20 dummy tokens to the half without: another group is split.
NOT_HALVED = [Cost(6), Cost(6, has_media=True), Cost(3), Cost(3, has_media=True), Cost(6), Cost(2)]


@given(worlds, budgets | flat_budgets, rounds, st.booleans(), st.integers(0, 100))
@example(
    [Window(NOT_HALVED, exhausted=True), *[Window([], exhausted=True)] * 2],
    Budget(20, collation=Collation(dummy_media_tokens=20)),
    {"seed": 0, "epoch": 0, "round_index": 0, "accumulation": 1},
    True,
    0,
)
def test_a_round_keeps_its_promises(
    world: list[Window], budget: Budget, position: dict[str, int], balance: bool, noise: int
) -> None:
    """I1, I2, I4, I5, I7 for one round of one to four ranks. With balance every rank computes a sample, if there are
    enough. I6: equal arguments give the same plan in any state of the global generators."""
    position["balance"] = balance
    plan = check_round(world, budget, **position)
    held = sum(len(window.costs) for window in world)
    if balance and held:
        assert plan.totals[0].samples
        assert plan.totals[0].active_ranks == len(world) or held < len(world), "I5, I7"
    np.random.seed(noise)
    random.seed(noise)
    assert plan_round(copy.deepcopy(world), copy.deepcopy(budget), **position) == plan
