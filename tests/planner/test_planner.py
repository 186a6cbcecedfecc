"""Rounds of `fill`, kept optimizer steps and `plan_micro_batches`: aligned (I1), lossless (I2), within budgets (I4),
making progress (I5), repeatable (I6), thrifty (I7)."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_checks import (
    Window,
    World,
    budgets,
    check_micro_batches,
    check_optimizer_step,
    check_plan,
    check_round,
    costs,
    emitted_of,
    flat_budgets,
    plan_round,
    planned,
    shape_of,
    step_costs,
    within,
)

from odb_factory import plan_micro_batches
from odb_factory.planner import (
    MAX_REDISTRIBUTED_BYTES,
    VIDEO,
    Budget,
    Collation,
    Cost,
    Plan,
    make_metadata,
    plan_buffers,
    plan_optimizer_step,
)
from odb_factory.planner.cost import STEP_COST
from odb_factory.planner.plan import exceeds_limit


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


# One kept optimizer step

held_by_ranks = st.lists(st.lists(costs(num_modalities=2), max_size=10), min_size=1, max_size=4)
MANY_DUMMY_MEDIA = Budget(110, collation=Collation(dummy_media_tokens=200, dummy_media_patches=400))


@given(held_by_ranks, budgets | flat_budgets, st.booleans(), st.integers(0, 100))
@example([[Cost(51), Cost(50, 1, 1, True)]], MANY_DUMMY_MEDIA, True, 0)
@example([[Cost(51)], [Cost(50, 1, 1, True)]], MANY_DUMMY_MEDIA, True, 0)
@example([[Cost(10), Cost(9), Cost(1)]], Budget(33, collation=Collation(dummy_media_tokens=10)), False, 0)
@example([[Cost(8)] * 3], Budget(24, collation=Collation(dummy_media_tokens=4)), False, 0)
@example([[Cost(3)] * 3], Budget(9, 3, Collation(dummy_media_patches=4)), False, 0)
@example([[Cost(9, modality=1), Cost(8)], [Cost(8, modality=1), Cost(7)]], Budget(100), True, 0)
def test_an_optimizer_step_keeps_its_promises(world: World, budget: Budget, balance: bool, noise: int) -> None:
    """I1, I2, I4, I5, I7 with media of two modalities, max_patches, dummy media, overlong samples.

    I6: equal, not identical arguments and another state of every global generator give the same plan.
    """
    plan = check_optimizer_step(world, budget, balance=balance)
    np.random.seed(noise)
    random.seed(noise)
    assert planned(copy.deepcopy(world), copy.deepcopy(budget), balance=balance) == plan


# Every tiny world, against every cut there is.


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to put the items into groups."""
    if not items:
        yield []
        return
    for partition in partitions(items[1:]):
        yield [[items[0]], *partition]
        for k, group in enumerate(partition):
            yield [*partition[:k], [items[0], *group], *partition[k + 1 :]]


@functools.cache
def group_costs(lengths: tuple[int, ...], budget: Budget, num_ranks: int = 1) -> set[tuple[int, ...]]:
    """The costs of the groups, the costliest first, for each cut of these samples within the budget.

    num_ranks: ranks that share them. No rank idles while another has a group of two or more.
    """
    cuts = set()
    for partition in partitions(lengths):
        groups = [[Cost(length) for length in group] for group in partition]
        idles = len(groups) % num_ranks and len(groups) < len(lengths)
        if not idles and all(len(group) == 1 or within(group, budget) for group in groups):
            costs_of_groups = [STEP_COST + math.prod(shape_of(group, budget)[:2]) for group in groups]
            cuts.add(tuple(sorted(costs_of_groups, reverse=True)))
    return cuts


@pytest.mark.parametrize("layout", ["padded", "flat"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_tiny_world_is_cut_as_cheaply_as_can_be(num_ranks: int, layout: str) -> None:
    """I1 to I7, exhaustively: up to five samples that may change rank."""
    for token_budget, count in itertools.product((4, 7), range(1, 6)):
        budget = Budget(token_budget, layout=layout)
        for lengths in itertools.combinations_with_replacement((1, 2, 3, 5), count):
            world = [[Cost(length) for length in lengths[rank::num_ranks]] for rank in range(num_ranks)]
            spent = sum(step_costs(check_optimizer_step(world, budget)))
            best = min(sum(cut[::num_ranks]) for cut in group_costs(lengths, budget, num_ranks))
            assert spent == best, (budget, world, spent, best)


@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_every_tiny_world_of_ranks_that_keep_their_samples(layout: str) -> None:
    """I1 to I7, exhaustively: two ranks that cut their samples separately, against every pair of cuts."""
    worst, num_worse = 1.0, 0
    shares = [share for n in range(4) for share in itertools.combinations_with_replacement((1, 2, 3), n)]
    for token_budget in (4, 7):
        budget = Budget(token_budget, layout=layout)
        for first, second in itertools.combinations_with_replacement(shares[1:], 2):
            world = [list(map(Cost, first)), list(map(Cost, second))]
            plan = check_optimizer_step(world, budget, balance=False)
            best = min(
                sum(map(max, itertools.zip_longest(cut, other, fillvalue=0)))
                for cut in group_costs(first, budget)
                for other in group_costs(second, budget)
                # A rank idles only if all its groups have a single sample.
                if len(cut) >= min(len(other), len(first)) and len(other) >= min(len(cut), len(second))
            )
            ratio = sum(step_costs(plan)) / best
            worst, num_worse = max(worst, ratio), num_worse + (ratio > 1)
    assert worst < 1.2 and num_worse <= {"padded": 16, "flat": 2}[layout], (worst, num_worse)


# Single cases.


def test_ranks_that_one_modality_leaves_idle_compute_another() -> None:
    """Three texts and two videos for four ranks: five micro-batches in two micro-steps, not in one of three and one
    of two."""
    video = Cost(5, 8, has_media=True, modality=VIDEO)
    plan = check_optimizer_step([[Cost(3)], [Cost(4)], [Cost(5)], [video, video]], Budget(100))
    assert [step.active_ranks for step in plan.totals] == [4, 1]


@pytest.mark.parametrize("make", [plan_optimizer_step, functools.partial(plan_buffers, seed=0, epoch=0, round_index=0)])
def test_samples_that_weigh_too_much_stay_where_they_are(make: Callable[..., Plan]) -> None:
    for more, exceeds in ((0, False), (1, True)):
        own = make_metadata([Cost(8)] * 4, True, [MAX_REDISTRIBUTED_BYTES // 4 + more] * 4)
        buffers = [own, make_metadata([], True)]
        plan = make(buffers, Budget(16), balance=True)
        assert exceeds_limit(buffers) is exceeds
        assert plan.moves is not exceeds


def test_groups_of_like_patches_meet_where_that_costs_nothing() -> None:
    """The vision towers of all ranks wait for each other, too."""
    image, text = Cost(8, 8, has_media=True), Cost(4)
    for balance in (False, True):
        plan = planned([[image, text, text], [image, text, text]], Budget(8), balance=balance)
        assert [totals.max_rank_patches for totals in plan.totals] == [8, 0]


def test_micro_batches_have_a_multiple_of_rows() -> None:
    """`row_multiple`: of 1,000 samples on one rank at most a few micro-batches have another number of rows above it."""
    lengths = np.random.default_rng(0).integers(10, 200, 1000).tolist()
    for multiple, most in ((1, 1000), (8, 4)):
        plan = planned([[Cost(length) for length in lengths]], Budget(4096, row_multiple=multiple), balance=True)
        rows = [len(group) for group in plan.groups[0]]
        assert sum(count % 8 > 0 for count in rows if count > 8) <= most
        assert multiple > 1 or sum(count % 8 > 0 for count in rows) > 10
        assert sum(rows) == 1000


# I4: budgets are measured on the rows that a collator makes of a group

USED_UP = [Cost(7, 2, has_media=True), Cost(8, 4, has_media=True), Cost(3)]


@given(st.lists(costs(), min_size=1, max_size=5), budgets)
@example(USED_UP, Budget(24, max_patches=6))
@example(USED_UP, Budget(23))
@example(USED_UP, Budget(24, max_patches=5))
def test_fits_means_that_the_collated_rows_are_within_both_budgets(group: list[Cost], budget: Budget) -> None:
    """Also the shape itself, and `overlong`: a sample breaks a budget alone."""
    assert budget.shape(group) == shape_of(group, budget)
    assert budget.fits(group) is within(group, budget)
    assert budget.overlong(group[0]) is not within(group[:1], budget)


# `plan_micro_batches`

BUDGET, MAX_PATCHES = 64, 32


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], dict[str, Any]]:
    """Lengths and arguments that agree with each other; some samples are overlong."""
    lengths = draw(
        st.lists(st.integers(1, BUDGET) | st.sampled_from([1, 32, 33, 64, 65, 200]), min_size=1, max_size=40)
    )
    n, ranks = len(lengths), draw(st.integers(1, 5))
    arguments: dict[str, Any] = {"token_budget": BUDGET, "ranks": ranks, "overlong": "singleton"}
    arguments["layout"] = draw(st.sampled_from(["flat", "padded"]))
    if draw(st.booleans()):
        arguments["patches"] = draw(st.lists(st.integers(0, 40), min_size=n, max_size=n))
        arguments["max_patches"] = draw(st.none() | st.just(MAX_PATCHES))
    placed = draw(st.sampled_from(["anywhere", "groups", "owners"]))
    if placed == "groups":
        arguments["groups"] = draw(st.lists(st.sampled_from("abcdefgh"), min_size=n, max_size=n))
    if placed == "owners":
        arguments["owners"] = draw(st.lists(st.integers(0, ranks - 1), min_size=n, max_size=n))
    return lengths, arguments


@settings(max_examples=150, deadline=None)
@given(requests())
def test_any_plan_keeps_its_promises(world: tuple[list[int], dict[str, Any]]) -> None:
    """I1, I2, I4, I7; a group stays on one rank; I6: equal arguments give the same plan."""
    lengths, arguments = world
    micro_batches = plan_micro_batches(lengths, **arguments)
    assert len(micro_batches) == arguments["ranks"]
    patches = arguments.get("patches", [0] * len(lengths))
    costs = [Cost(*sizes, has_media=sizes[1] > 0) for sizes in zip(lengths, patches)]
    owner = arguments.get("owners")
    if "groups" in arguments:
        rank_of = {i: rank for rank, own in enumerate(micro_batches) for group in own for i in group}
        owner = [rank_of[i] for i in range(len(lengths))]
        assert len(set(zip(arguments["groups"], owner))) == len(set(arguments["groups"]))
    budget = Budget(BUDGET, arguments.get("max_patches"), layout=arguments["layout"])
    check_micro_batches(micro_batches, costs, owner if arguments["ranks"] > 1 else None, budget)
    assert plan_micro_batches(np.array(lengths), **arguments) == micro_batches, "I6"


def test_many_samples_are_balanced_whether_groups_are_kept_or_not() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(7, 1, 1024).astype(int) + 1, 16384)
    for arguments in ({}, {"groups": np.arange(1024) // 8}):
        micro_batches = plan_micro_batches(lengths, token_budget=16384, ranks=8, **arguments)
        loads = [sum(int(lengths[group].sum()) for group in own) for own in micro_batches]
        assert max(loads) <= 1.002 * sum(loads) / 8
        assert len(micro_batches[0]) <= -(-int(lengths.sum()) // (8 * 16384)) + 1


@pytest.mark.parametrize(
    ("lengths", "changes", "named"),
    [
        ([], {}, "lengths"),
        ([1.5], {}, "lengths"),
        ([[1, 2]], {}, "lengths"),
        ([4, 0], {}, "lengths"),
        ([4, 1 << 25], {}, "lengths"),
        ([4, 9], {"token_budget": 8}, "sample 1"),
        ([4, 9], {"patches": [9, 1], "max_patches": 8}, "sample 0"),
        ([4], {"token_budget": 0}, "token_budget"),
        ([4], {"token_budget": 8.0}, "token_budget"),
        ([4], {"ranks": 0}, "ranks"),
        ([4], {"max_patches": 8}, "max_patches"),
        ([4], {"patches": [1], "max_patches": -1}, "max_patches"),
        ([4], {"patches": [1], "max_patches": 0}, "max_patches"),
        ([4], {"patches": [1, 2]}, "patches"),
        ([4], {"patches": [-1]}, "patches"),
        ([4], {"groups": "ab"}, "groups"),
        ([4], {"groups": [[1]]}, "groups"),
        ([4], {"layout": "auto"}, "layout"),
        ([4], {"overlong": "drop"}, "overlong"),
        ([4], {"owners": [1]}, "owners"),
        ([4], {"owners": [0], "groups": [0]}, "owners"),
    ],
)
def test_bad_input_is_refused_in_one_line(lengths: Any, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as refused:
        plan_micro_batches(lengths, **{"token_budget": 1 << 26, **changes})
    assert "\n" not in str(refused.value)


def test_it_imports_no_torch() -> None:
    code = "import sys; from odb_factory import plan_micro_batches; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
