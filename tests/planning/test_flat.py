"""Flat micro-batches: bins that are even in tokens and patches (I7), within both budgets (I4), and full with `fill`."""

from __future__ import annotations

import numpy as np
import pytest
from plan_checks import (
    BufferMetadata,
    check_optimizer_step,
    check_round,
    costs_of,
    plan_buffers,
    planned,
)

from odb_factory.planning import (
    Budget,
    Collation,
    Cost,
    CostModel,
)


def flat(token_budget: int, max_patches: int | None = None, collation: Collation = Collation()) -> Budget:
    return Budget(token_budget, max_patches, collation, layout="flat")


def test_samples_that_cannot_share_a_bin_take_as_many_micro_steps_as_that() -> None:
    """Where exchanges find no way into few bins: 60 and 40 share one, but no two of 51 and no three of 34 do."""
    for world, num_steps in (([[Cost(51)] * 20], 20), ([[Cost(60)] * 9 + [Cost(40)] * 9], 9), ([[Cost(34)] * 9], 5)):
        for owners in (1, 3):
            shares = [world[0][rank::owners] for rank in range(owners)]
            plan = check_optimizer_step(shares, flat(100))
            assert len(plan.totals) == -(-num_steps // owners)


def drawn(num_ranks: int, count: int, images: float, seed: int = 0) -> list[list[Cost]]:
    """Lengths as chats have them; where a sample has an image, a tenth to nine tenths of its tokens are its."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(6.6, 0.6, (num_ranks, count)), 16, 8192).astype(int)
    part = rng.uniform(0.1, 0.9, lengths.shape) * (rng.random(lengths.shape) < images)
    return [
        [Cost(tokens, patches, 1, patches > 0) for tokens, patches in zip(*columns)]
        for columns in zip(lengths.tolist(), (4 * lengths * part).astype(int).tolist())
    ]


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
