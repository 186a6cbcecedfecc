"""Whole filled epochs of up to 16 ranks in lockstep, with little in common: skewed and empty shards, rejected rows.

The ranks run in one thread (see `lockstep`); nothing here needs `torch.distributed`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from lockstep import (
    NO_FEATURES,
    Row,
    check_promises,
    check_whole_optimizer_steps,
    rejection,
    run_epoch,
    run_shards,
    sample,
    usable,
)
from planning_strategies import budgets, costs

from odb_factory.data.cursor import Place
from odb_factory.data.ranks import RankMetadata, Ranks
from odb_factory.data.samples import Rejection, Sample
from odb_factory.data.steps import EpochContext, FillEpoch
from odb_factory.planning import Budget, Collation, Cost

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


@settings(deadline=None, max_examples=60)
@given(cases())
@example(SPLIT_FOR_A_RANK_THAT_WOULD_IDLE)
@example(A_BUFFER_OF_ONE_STEP)
@example(FEWER_ROWS_THAN_THE_MULTIPLE_ALLOWS)
@example(MANY_MORE_GROUPS)
def test_an_epoch_of_any_world_keeps_its_promises(case: Case) -> None:
    """I1 to I5, I7; without join quota closure: the rows that are not trained on are counted."""
    world, options = case
    epochs = run_shards(world, **options)
    check_promises(world, epochs, **options)
    if case is MANY_MORE_GROUPS:
        assert {1000, 1001, 1002, 1003} <= set(epochs[1].ids[:8])


@settings(deadline=None, max_examples=20)
@given(st.data(), cases())
def test_it_does_not_matter_which_rank_is_first(data: Any, case: Case) -> None:
    """I6: the same epoch whatever rank runs ahead, and again."""
    world, options = case
    first = run_shards(world, **options)
    again = run_shards(world, order=data.draw(st.permutations(range(len(world)))), **options)
    assert [epoch.plans for epoch in again] == [epoch.plans for epoch in first]
    assert [repr(epoch.error) for epoch in again] == [repr(epoch.error) for epoch in first]


@settings(deadline=None, max_examples=40)
@given(cases())
def test_what_a_step_says_is_true_on_every_rank(case: Case) -> None:
    """I8, progress and the summary rest on it: totals, `done`, `epoch_steps` are those of all ranks together."""
    world, options = case
    epochs = run_shards(world, **options)
    assume(epochs[0].error is None)
    costs = {row.id: row.cost for shard in world for row in usable(shard)}
    num_rows = sum(map(len, world))
    check_whole_optimizer_steps(epochs)
    for micro_step in zip(*(epoch.micro_batches for epoch in epochs)):
        totals, ids = micro_step[0].totals, [id for one in micro_step for id in one.ids]
        assert [one.totals for one in micro_step] == [totals] * len(epochs)
        assert totals.samples == len(ids)
        assert totals.active_ranks == sum(not one.idle for one in micro_step)
        assert totals.tokens == sum(one.tokens for one in micro_step) == sum(costs[id].tokens for id in ids)
        assert totals.units == sum(one.num_units for one in micro_step)
        for one in micro_step:
            assert one.tokens == sum(costs[id].tokens for id in one.ids)
            assert one.units == tuple(costs[id].units for id in one.ids)

    num_emitted = 0
    steps = epochs[0].steps
    for index, step in enumerate(steps):
        trained = [costs[id] for epoch in epochs for one in epoch.optimizer_steps[index] for id in one.ids]
        assert (step.epoch, step.index) == (options["epoch"], index)
        assert (step.num_stock_means, step.stock_input_tokens) == (0, None), "no stock step to compare with"
        assert step.samples == len(trained)
        assert step.tokens == sum(cost.tokens for cost in trained)
        assert step.units == sum(cost.units for cost in trained)
        assert step.active_ranks == sum(not one.idle for epoch in epochs for one in epoch.optimizer_steps[index])
        num_emitted += len(trained)
        assert step.done == (num_rows if step.last else num_emitted + step.rejected.total())
        assert step.progress == step.done / num_rows
        assert step.epoch_steps > index, "a step beyond the estimate"
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    assert steps[-1].rejected.total() == sum(len(epoch.rejected) for epoch in epochs)
    seen = {id for epoch in epochs for buffer in epoch.buffers for id in buffer}
    assert steps[-1].overlong == sum(options["budget"].overlong(costs[id]) for id in seen)
    last_plan = next(tasks for tasks in reversed(epochs[0].plans) if tasks)
    assert last_plan[-1][0].step.epoch_steps == len(steps), "exact in the end"


@settings(deadline=None, max_examples=40)
@given(cases())
def test_a_task_carries_what_its_step_says(case: Case) -> None:
    """I2: the samples to collate are the ids of the step, in order; an idle step runs a real one, if it can its own."""
    world, options = case
    options["balance"] = False
    assume(any(map(usable, world)))
    for rank, epoch in enumerate(run_shards(world, **options)):
        last_held = next((set(buffer) for buffer in reversed(epoch.buffers) if buffer), None)
        held = [row for row in usable(world[rank]) if last_held is not None and row.id in last_held]
        for one, samples in epoch.tasks:
            if not one.idle:
                assert tuple(item.id for item in samples) == one.ids
                continue
            (dummy,) = samples
            if held:
                assert dummy in held and dummy.cost.tokens == min(item.cost.tokens for item in held), "the cheapest"
            else:
                assert any(dummy in usable(shard) for shard in world)


def test_the_buffer_is_filled_and_never_above_its_size() -> None:
    """Host memory: at most `buffer_size` samples wait, and one is drawn ahead to know when the sampler is exhausted."""
    drawn = 0

    def rows() -> Iterator[Sample]:
        nonlocal drawn
        for i in range(100):
            drawn += 1
            yield sample(i, 1 + i % 16)

    class OneRank(Ranks):
        def gather(self, metadata: Any) -> list[RankMetadata]:
            buffers.append(len(planner.held))
            assert drawn - emitted <= 8 + 1
            assert len(planner.held) == 8 or metadata.buffer.exhausted
            return [metadata]

    buffers: list[int] = []
    emitted = 0
    context = EpochContext(
        budget=Budget(32),
        num_samples=100,
        balance=False,
        seed=0,
        ranks=OneRank(),
        stand_in=lambda: sample(0, 1),
        leave_out=print,
    )
    planner = FillEpoch(rows(), context, Place(), buffer_size=8, accumulation=1, join=True)
    for tasks in planner:
        emitted += sum(len(one.ids) for one, _ in tasks)
    assert emitted == 100
    assert max(buffers) == 8


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


def test_rounds_of_the_same_samples_go_out_in_another_order() -> None:
    """Every round draws a new order, so that steps do not follow the same pattern of lengths all epoch long."""
    (epoch,) = run_epoch([sample(i, 21 + i % 20) for i in range(200)], budget=Budget(40), buffer_size=20)
    lengths = [[one.tokens for one, _ in tasks] for tasks in epoch.plans if len(tasks) == 19]
    assert len(lengths) > 5
    assert len({tokens.index(max(tokens)) for tokens in lengths}) > 1
