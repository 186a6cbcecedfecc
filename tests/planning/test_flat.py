"""Flat micro-batches: bins that are even in tokens and patches (I7), within both budgets (I4), and full with `fill`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from plan_checks import (
    BufferMetadata,
    World,
    check_optimizer_step,
    check_round,
    costs_of,
    plan_buffers,
    planned,
)
from planning_strategies import within

from odb_factory.planning import (
    Budget,
    Collation,
    Cost,
    CostModel,
    Plan,
)

MODELS = [
    (CostModel(2), CostModel(8, 4, 1)),  # where it does not say what a patch costs, four count as a token
    (CostModel(20, 10, 2, 1), CostModel(20, 10, 2, 1)),
    (CostModel(20, 10, 2), CostModel(20, 10, 2)),
]
"""Of a planner, and what it shall then do best by."""


def flat(token_budget: int, max_patches: int | None = None, collation: Collation = Collation()) -> Budget:
    return Budget(token_budget, max_patches, collation, layout="flat")


def waited(steps: Sequence[Sequence[Sequence[Cost]]], model: CostModel) -> int:
    """What ranks wait for: of each micro-step the most tokens, patches and squares, each of any rank."""
    return sum(
        model.fixed
        + model.token * max(sum(cost.tokens for cost in group) for group in groups)
        + model.patch * max(sum(cost.patches for cost in group) for group in groups)
        + model.square * max(sum(cost.tokens**2 for cost in group) for group in groups)
        for groups in steps
    )


def steps_of(plan: Plan, world: World) -> list[list[list[Cost]]]:
    costs = [cost for own in world for cost in own]
    return [[[costs[i] for i in group] for group in groups] for groups in zip(*plan.groups)]


def assignments(world: World, num_steps: int, balance: bool) -> Iterator[list[list[list[Cost]]]]:
    """All ways to give the samples to ranks and micro-steps, without balance each to its own rank."""
    costs = [(rank, cost) for rank, own in enumerate(world) for cost in own]
    places = [
        [(step, to) for step in range(num_steps) for to in (range(len(world)) if balance else [rank])]
        for rank, _ in costs
    ]
    for chosen in itertools.product(*places):
        steps: list[list[list[Cost]]] = [[[] for _ in world] for _ in range(num_steps)]
        for (step, to), (_, cost) in zip(chosen, costs):
            steps[step][to].append(cost)
        yield steps


def least_wait(world: World, budget: Budget, model: CostModel, balance: bool) -> int | None:
    """Of all plans of one or two micro-steps in which no rank idles, by trying every one; None if there are none."""
    return min(
        (
            waited(steps, model)
            for num_steps in (1, 2)
            for steps in assignments(world, num_steps, balance)
            if all(group and (len(group) == 1 or within(group, budget)) for groups in steps for group in groups)
        ),
        default=None,
    )


def tiny_worlds(count: int, num_ranks: int, most: int) -> Iterator[tuple[World, Budget]]:
    """Worlds of up to `most` samples, some with patches, at least two for each rank."""
    rng = random.Random(count)
    for _ in range(count):
        patches = rng.choice([0, 20])
        own = [[] for _ in range(num_ranks)]
        for i in range(rng.randint(2 * num_ranks, most)):
            own[i % num_ranks].append(Cost(rng.randint(1, 30), rng.choice([0, rng.randint(0, patches)])))
        largest = max(cost.tokens for ranks in own for cost in ranks)
        yield own, flat(rng.randint(largest, 3 * largest))


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize(("model", "by"), MODELS)
def test_no_other_plan_of_a_tiny_optimizer_step_is_much_better(model: CostModel, by: CostModel, balance: bool) -> None:
    """I7, against every plan there is: mostly none is better at all."""
    ratios = []
    for world, budget in tiny_worlds(24, 2, 6):
        plan = check_optimizer_step(world, budget, balance=balance, model=model)
        best = least_wait(world, budget, by, balance)
        if best is not None:
            ratios.append(waited(steps_of(plan, world), by) / best)
    assert len(ratios) > 12 and min(ratios) >= 1
    assert max(ratios) < 1.06 and sum(ratio > 1 for ratio in ratios) <= 3


def test_samples_that_cannot_share_a_bin_take_as_many_micro_steps_as_that() -> None:
    """Where exchanges find no way into few bins: 60 and 40 share one, but no two of 51 and no three of 34 do."""
    for world, num_steps in (([[Cost(51)] * 20], 20), ([[Cost(60)] * 9 + [Cost(40)] * 9], 9), ([[Cost(34)] * 9], 5)):
        for owners in (1, 3):
            shares = [world[0][rank::owners] for rank in range(owners)]
            plan = check_optimizer_step(shares, flat(100))
            assert len(plan.totals) == -(-num_steps // owners)


def test_dummy_media_count_against_the_budget() -> None:
    """Two samples of 40 and dummy media of 30 are too much for 100; with media of their own they are not."""
    budget = flat(100, collation=Collation(dummy_media_tokens=30, dummy_media_patches=4))
    plan = planned([[Cost(40), Cost(40)]], budget, balance=True)
    assert [totals.padded_tokens for totals in plan.totals] == [70, 70]
    plan = planned([[Cost(40), Cost(40, 8, has_media=True)]], budget, balance=True)
    assert [(totals.padded_tokens, totals.patches) for totals in plan.totals] == [(80, 8)]


def test_what_is_rounded_up_counts_against_the_budget() -> None:
    budget = Budget(100, layout="flat", pad_to_multiple_of=64)
    plan = planned([[Cost(33), Cost(33)]], budget, balance=True)
    assert [totals.padded_tokens for totals in plan.totals] == [64, 64]
    assert plan.totals[0].max_rank_attention == 33**2 + 31**2


def drawn(num_ranks: int, count: int, images: float, seed: int = 0) -> list[list[Cost]]:
    """Lengths as chats have them; where a sample has an image, a tenth to nine tenths of its tokens are its."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(6.6, 0.6, (num_ranks, count)), 16, 8192).astype(int)
    part = rng.uniform(0.1, 0.9, lengths.shape) * (rng.random(lengths.shape) < images)
    return [
        [Cost(tokens, patches, 1, patches > 0) for tokens, patches in zip(*columns)]
        for columns in zip(lengths.tolist(), (4 * lengths * part).astype(int).tolist())
    ]


@pytest.mark.parametrize(("num_ranks", "share"), [(8, 16), (8, 32), (64, 16)])
def test_ranks_wait_for_tokens_and_for_patches_less_than_three_hundredths(num_ranks: int, share: int) -> None:
    """Both within 3 % of the largest sample or the mean, whichever is more: no plan is better than that."""
    for images in (0.0, 0.5):
        world = drawn(num_ranks, share, images)
        budget = flat(16384, 4 * 16384)
        plan = planned(world, budget, balance=True)
        samples = [cost for own in world for cost in own]
        for name in ("tokens", "patches"):
            amounts = [getattr(cost, name) for cost in samples]
            bound = max(sum(amounts) / num_ranks, *amounts)
            assert sum(getattr(totals, f"max_rank_{name}") for totals in plan.totals) <= 1.03 * bound, name
        spent = sum(totals.max_rank_tokens for totals in plan.totals)
        assert spent <= 1.005 * sum(cost.tokens for cost in samples) / num_ranks


def test_without_balance_ranks_wait_for_the_one_that_holds_most() -> None:
    world = drawn(8, 32, 0.0)
    plan = planned(world, flat(16384), balance=False)
    most = max(sum(cost.tokens for cost in own) for own in world)
    assert most <= sum(totals.max_rank_tokens for totals in plan.totals) <= 1.005 * most


def test_attention_is_evened_out_where_it_costs() -> None:
    """Ranks with the same tokens, but some with long samples: by their squares they are even as well."""
    world = drawn(4, 32, 0.0)
    plans = [planned(world, flat(16384), balance=True, model=model) for model in (CostModel(), CostModel(500, 1, 0, 1))]
    most = [sum(totals.max_rank_attention for totals in plan.totals) for plan in plans]
    squares = sum(cost.tokens**2 for own in world for cost in own) / 4
    assert most[1] <= 1.002 * squares < 1.01 * squares < most[0]


# Fill


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("images", [0.0, 0.5])
def test_bins_are_filled_to_the_budget(balance: bool, images: float) -> None:
    """All samples differ in length, and yet every micro-batch is full but for less than one percent."""
    buffers = [BufferMetadata(own, [0] * len(own), exhausted=False) for own in drawn(4, 128, images)]
    budget = flat(16384, 4 * 16384)
    plan = plan_buffers(buffers, budget, seed=0, epoch=0, round_index=0, balance=balance)
    check_round(buffers, budget, plan, balance)
    real = sum(totals.tokens for totals in plan.totals)
    assert real >= 0.993 * len(plan.totals) * 4 * 16384
    held = sum(cost.tokens for cost in costs_of(buffers))
    assert held - real < 16384 * (4 if balance else 8), "what waits is less than a micro-step, and what a rank has more"


def test_the_end_is_spread_evenly() -> None:
    """Ten samples for three micro-batches of four: all ranks wait for 4, 3 and 3."""
    buffers = [BufferMetadata([Cost(10)] * 10, [0] * 10, exhausted=True)] * 2
    plan = plan_buffers(buffers, flat(40), seed=0, epoch=0, round_index=0)
    assert sorted(totals.max_rank_tokens for totals in plan.totals) == [30, 30, 40]


def test_a_rank_without_samples_does_not_hold_up_the_others() -> None:
    """A rank whose data has ended idles; it neither ends the round nor makes it shorter."""
    ended = BufferMetadata([Cost(8)] * 2, [0] * 2, exhausted=True)
    busy = BufferMetadata([Cost(8)] * 16, [0] * 16, exhausted=False)
    nothing = BufferMetadata([], [], exhausted=True)
    plan = plan_buffers([ended, busy, nothing], flat(16), seed=0, epoch=0, round_index=0)
    sizes = [[len(group) for group in steps] for steps in plan.groups]
    assert sizes[0][:2] == [1, 1] and set(sizes[1]) == {2} and not any(sizes[2])
