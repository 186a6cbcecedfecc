"""Whole filled epochs of up to 16 ranks in lockstep, with little in common: skewed and empty shards, rejected rows.

The ranks run in one thread (see `lockstep`); nothing here needs `torch.distributed`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lockstep import (
    NO_FEATURES,
    Row,
    check_promises,
    rejection,
    run_epoch,
    run_shards,
    sample,
    usable,
)
from planner_strategies import budgets, costs

from odb_factory.data.samples import Rejection, Sample
from odb_factory.planner import Budget, Collation, Cost

Case = tuple[list[list[Row]], dict[str, Any]]
REASONS = ("overlong", "unreadable", "unsupervised")
REJECTED = {"none": lambda i: False, "some": lambda i: i % 3 == 1, "all": lambda i: True}


def a_row(id: int, cost: Cost, rejected: bool) -> Row:
    return Rejection(id, REASONS[id % 3], "") if rejected else Sample(id, cost, NO_FEATURES)


@st.composite
def shards(draw: st.DrawFn, sizes: tuple[int, ...], rejected: tuple[str, ...], max_ranks: int = 16) -> list[list[Row]]:
    """Shards that need not be alike; the samples of one may be 300 times as long as those of another."""
    ids = itertools.count()
    world = []
    for _ in range(draw(st.integers(1, max_ranks))):
        size, rejects = draw(st.sampled_from(sizes)), REJECTED[draw(st.sampled_from(rejected))]
        if draw(st.booleans()):
            longest = draw(st.sampled_from([1, 10, 300]))
            kinds = [Cost(longest - i % longest, 0, 1) for i in range(size)]
        else:
            kinds = draw(st.lists(costs(), min_size=size, max_size=size))
        world.append([a_row(next(ids), cost, rejects(i)) for i, cost in enumerate(kinds)])
    return world


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Shards and options. Without join a nearly empty shard ends the epoch at once, so there are few of them."""
    accumulation, join = draw(st.integers(1, 5)), draw(st.sampled_from([True, True, False]))
    options = {
        "budget": draw(budgets),
        "buffer_size": draw(st.integers(1 if join else accumulation, 16)),
        "accumulation": accumulation,
        "join": join,
        "balance": join and draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
        "epoch": draw(st.integers(0, 3)),
    }
    if join or draw(st.integers(0, 5)) == 0:
        return draw(shards((0, 1, 2, 5, 9, 30), ("none", "none", "some", "all"))), options
    return draw(shards((9, 16, 30), ("none", "some"))), options


SPLIT_FOR_A_RANK_THAT_WOULD_IDLE: Case = (
    [[], *([a_row(id, Cost(1, 0, 1, has_audio=id == 6), False) for id in ids] for ids in (range(5), range(5, 7)))],
    {
        # The half without audio gets dummy audio, which is too much for two rows (I4).
        "budget": Budget(4, collation=Collation(dummy_audio_tokens=2), row_multiple=2),
        "buffer_size": 3,
        "balance": True,
    },
)
FEWER_ROWS_THAN_THE_MULTIPLE_ALLOWS: Case = (
    [[sample(id, 1) for id in ids] for ids in (range(3), range(3, 8))],
    # One micro-step: the three rows, no multiple of two, are not cut apart (I7).
    {"budget": Budget(4, row_multiple=2), "buffer_size": 4},
)
A_BUFFER_OF_ONE_STEP: Case = (
    [[sample(i, 1) for i in range(3)]],
    {"budget": Budget(1), "buffer_size": 2, "accumulation": 2, "join": False},
)
# One group a round goes out, with the oldest sample. Were it always the fullest, the rows of 17 would wait (I5).
MANY_MORE_GROUPS: Case = (
    [[sample(i, 4) for i in range(800)], [sample(1000 + i, 17 if i < 4 else 30) for i in range(100)]],
    {"budget": Budget(32), "buffer_size": 8},
)


@settings(deadline=None, max_examples=80)
@given(st.data(), cases())
@example(None, SPLIT_FOR_A_RANK_THAT_WOULD_IDLE)
@example(None, A_BUFFER_OF_ONE_STEP)
@example(None, FEWER_ROWS_THAN_THE_MULTIPLE_ALLOWS)
@example(None, MANY_MORE_GROUPS)
def test_an_epoch_of_any_world_keeps_its_promises(data: Any, case: Case) -> None:
    """I1 to I5, I7, I8; without join quota closure: the rows that are not trained on are counted. I6: the same epoch
    whatever rank runs ahead. Progress and the summary rest on what a step says: it is of all ranks together."""
    world, options = case
    epochs = run_shards(world, **options)
    check_promises(world, epochs, **options)
    if case is MANY_MORE_GROUPS:
        assert {1000, 1001, 1002, 1003} <= set(epochs[1].ids[:8])
    if data is not None:
        again = run_shards(world, order=data.draw(st.permutations(range(len(world)))), **options)
        assert [epoch.plans for epoch in again] == [epoch.plans for epoch in epochs]
        assert [repr(epoch.error) for epoch in again] == [repr(epoch.error) for epoch in epochs]
    if epochs[0].error is not None:
        return
    costs = {row.id: row.cost for shard in world for row in usable(shard)}
    num_rows, num_emitted, steps = sum(map(len, world)), 0, epochs[0].steps
    for index, step in enumerate(steps):
        num_emitted += step.samples
        assert (step.epoch, step.index) == (options.get("epoch", 0), index)
        assert (step.num_stock_means, step.stock_input_tokens) == (0, None), "no stock step to compare with"
        assert step.done == (num_rows if step.last else num_emitted + step.rejected.total())
        assert step.progress == step.done / num_rows
        assert step.epoch_steps > index, "a step beyond the estimate"
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    assert steps[-1].rejected.total() == sum(len(epoch.rejected) for epoch in epochs)
    seen = {id for epoch in epochs for buffer in epoch.buffers for id in buffer}
    assert steps[-1].overlong == sum(options["budget"].overlong(costs[id]) for id in seen)
    for rank, epoch in enumerate(epochs):
        last_held = next((set(buffer) for buffer in reversed(epoch.buffers) if buffer), set())
        held = [row for row in usable(world[rank]) if row.id in last_held]
        for dummy in [samples[0] for one, samples in epoch.tasks if one.idle and held and not options.get("balance")]:
            assert dummy in held and dummy.cost.tokens == min(item.cost.tokens for item in held), "the cheapest"


@pytest.mark.parametrize("num_rejected", [0, 12])
def test_a_round_is_the_last_if_only_rejected_rows_follow(num_rejected: int) -> None:
    """The buffer is full when the sampler ends; no further round that would find nothing."""
    rows: list[Row] = [sample(i, 8) for i in range(8)] + [rejection(8 + i) for i in range(num_rejected)]
    (epoch,) = run_epoch(rows, buffer_size=8)
    assert len(epoch.plans) == 1
    assert epoch.steps[-1].last and epoch.steps[-1].done == len(rows)


def test_the_estimate_of_the_epoch_follows_the_steps_planned_so_far() -> None:
    """The learning rate and the progress bar read it: even data make it exact from the first round on."""
    (epoch,) = run_epoch([sample(i, 8) for i in range(400)], buffer_size=40, accumulation=2)
    assert {step.epoch_steps for step in epoch.steps} == {50}


def test_order_changes_with_the_epoch_and_the_seed() -> None:
    rows = [sample(i, 8) for i in range(100)]
    orders = {
        str(run_epoch(rows, buffer_size=100, seed=seed, epoch=epoch)[0].ids) for seed in (0, 1) for epoch in (0, 1)
    }
    assert len(orders) == 4
