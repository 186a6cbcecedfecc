"""Whole epochs of one or several ranks in lockstep: I1, I2, I5, I7 from the first draw to the last step.

The ranks run in one thread (see `lockstep`); nothing here needs `torch.distributed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from lockstep import Row, check_whole_optimizer_steps, rejection, run_epoch, sample, usable

from odb_factory.comm.ranks import RankMetadata, Ranks
from odb_factory.data.epoch import EpochContext, FillEpoch
from odb_factory.data.order import Share
from odb_factory.data.progress import Place
from odb_factory.data.samples import Rejection, Sample
from odb_factory.errors import CollectiveError, DataError
from odb_factory.planning import Budget, Collation


@st.composite
def datasets(draw: st.DrawFn) -> list[Row]:
    """Up to 40 rows, some rejected: singly, in a streak, or every one of a shard."""
    kinds = draw(st.lists(st.integers(1, 40) | st.just(None), max_size=40))
    stride, phase = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    if draw(st.booleans()):
        kinds = [None if i % stride == phase else kind for i, kind in enumerate(kinds)]
    return [rejection(i) if kind is None else sample(i, kind, kind % 3) for i, kind in enumerate(kinds)]


@st.composite
def run_options(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "world_size": draw(st.integers(1, 4)),
        "budget": Budget(
            draw(st.integers(1, 80)),
            draw(st.none() | st.integers(1, 8)),
            Collation(draw(st.sampled_from([1, 8])), draw(st.sampled_from([0, 4])), draw(st.sampled_from([0, 2]))),
        ),
        "buffer_size": draw(st.integers(1, 12)),
        "accumulation": draw(st.integers(1, 4)),
        "seed": draw(st.integers(0, 2)),
        "epoch": draw(st.integers(0, 2)),
    }


@settings(deadline=None)
@given(datasets(), run_options())
def test_an_epoch_of_any_world_keeps_its_promises(rows: list[Row], options: dict[str, Any]) -> None:
    """I1, I2, I5, I7 over a whole epoch: rejections interleaved, shards uneven or empty."""
    epochs = run_epoch(rows, **options)
    world_size, buffer_size = options["world_size"], options["buffer_size"]

    if not usable(rows):
        assert all(isinstance(epoch.error, DataError) for epoch in epochs)
        assert not any(epoch.steps for epoch in epochs)
        return
    assert [epoch.error for epoch in epochs] == [None] * world_size

    # I2: each id is emitted exactly once or rejected exactly once, on the rank whose shard it is in.
    for rank, epoch in enumerate(epochs):
        assert Counter(epoch.ids) == Counter(row.id for row in usable(rows[rank::world_size]))
        assert epoch.rejected == [row.id for row in rows[rank::world_size] if isinstance(row, Rejection)]

    # I1: the same optimizer steps on every rank, all but the last of `accumulation` micro-steps.
    check_whole_optimizer_steps(epochs)
    sizes = [step.num_micro_batches for step in epochs[0].steps]
    assert sizes[:-1] == [options["accumulation"]] * (len(sizes) - 1)
    assert 1 <= sizes[-1] <= options["accumulation"]
    assert all([len(tasks) for tasks in epoch.plans] == [len(tasks) for tasks in epochs[0].plans] for epoch in epochs)

    # I5: plans per epoch <= the largest shard; a sample waits a bounded number of rounds.
    assert len(epochs[0].plans) <= max(len(usable(rows[rank::world_size])) for rank in range(world_size))
    for epoch in epochs:
        rounds_in_buffer = Counter(id for buffer in epoch.buffers for id in buffer)
        assert all(count <= 1 + buffer_size for count in rounds_in_buffer.values())
        assert all(len(buffer) <= buffer_size for buffer in epoch.buffers)

    # I7: a rank idles only when nothing is left for it, and never all at once.
    for epoch in epochs:
        idle = [one.idle for one in epoch.micro_batches]
        assert idle == sorted(idle)
    assert all(one.totals.active_ranks for one in epochs[0].micro_batches)


@settings(deadline=None)
@given(datasets(), run_options())
def test_what_a_step_says_is_true_on_every_rank(rows: list[Row], options: dict[str, Any]) -> None:
    """I8 and progress rest on it: totals, `done`, `epoch_steps` and `last` are those of all ranks together."""
    assume(usable(rows))
    epochs = run_epoch(rows, **options)
    costs = {row.id: row.cost for row in usable(rows)}
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

    num_emitted, num_rejected = 0, len(rows) - len(usable(rows))
    steps = epochs[0].steps
    for index, step in enumerate(steps):
        trained = [costs[id] for epoch in epochs for one in epoch.optimizer_steps[index] for id in one.ids]
        assert (step.epoch, step.index) == (options["epoch"], index)
        assert (step.num_stock_means, step.stock_input_tokens) == (0, None), "no stock step to compare with"
        assert step.samples == len(trained)
        assert step.tokens == sum(cost.tokens for cost in trained)
        assert step.units == sum(cost.units for cost in trained)
        assert step.root_units == pytest.approx(sum(cost.units**0.5 for cost in trained))
        assert step.num_active == sum(not one.idle for epoch in epochs for one in epoch.optimizer_steps[index])
        num_emitted += len(trained)
        assert num_emitted <= step.done <= num_emitted + num_rejected
        assert step.progress == step.done / len(rows)
        assert step.epoch_steps > index, "a step beyond the estimate"
    assert num_emitted + num_rejected == len(rows)
    assert steps[-1].done == len(rows), "all is done with the last step"
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    last_plan = next(tasks for tasks in reversed(epochs[0].plans) if tasks)
    assert last_plan[-1][0].step.epoch_steps == len(steps), "exact in the end"


@settings(deadline=None)
@given(datasets(), run_options())
def test_a_task_carries_what_its_step_says(rows: list[Row], options: dict[str, Any]) -> None:
    """I2: the samples to collate are the ids of the step, in order; an idle step runs a real one, if it can its own."""
    assume(usable(rows))
    for epoch in run_epoch(rows, **options):
        last_held = next((set(buffer) for buffer in reversed(epoch.buffers) if buffer), None)
        shard = [row for row in usable(rows) if last_held is None or row.id in last_held]
        for one, samples in epoch.tasks:
            if not one.idle:
                assert tuple(item.id for item in samples) == one.ids
            else:
                (dummy,) = samples
                assert dummy in shard
                if last_held is not None:
                    assert dummy.cost.tokens == min(item.cost.tokens for item in shard), "the cheapest it held last"


@settings(deadline=None, max_examples=30)
@given(datasets(), run_options())
def test_an_epoch_is_the_same_again(rows: list[Row], options: dict[str, Any]) -> None:
    """I6: whatever order the threads of the ranks run in."""
    assume(usable(rows))
    first, second = (run_epoch(rows, **options) for _ in range(2))
    assert [epoch.plans for epoch in first] == [epoch.plans for epoch in second]


@settings(deadline=None, max_examples=30)
@given(datasets(), run_options(), st.integers(0, 39))
def test_a_fatal_row_stops_its_rank(rows: list[Row], options: dict[str, Any], position: int) -> None:
    """Never hang, never lose silently: the message of the row is the error of every rank."""
    assume(rows)
    position %= len(rows)
    rows[position] = rejection(position, fatal=True)
    epochs = run_epoch(rows, **options)
    assert all(isinstance(epoch.error, CollectiveError) for epoch in epochs)
    assert all(f"row {position}: cannot be read" in str(epoch.error) for epoch in epochs)
    assert not any(step.last for epoch in epochs for step in epoch.steps)


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_epoch_in_which_all_rows_are_rejected_is_an_error(world_size: int) -> None:
    """Never lose silently: the message counts the reasons."""
    rows = [Rejection(i, "unsupervised" if i % 2 else "overlong", "") for i in range(12)]
    epochs = run_epoch(rows, world_size=world_size)
    for epoch in epochs:
        assert isinstance(epoch.error, DataError)
        assert "no row of the training dataset can be trained on" in str(epoch.error)
        assert len(str(epoch.error).splitlines()) == 1
        assert "6 overlong" in str(epoch.error) and "6 unsupervised" in str(epoch.error)


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_empty_dataset_is_an_error(world_size: int) -> None:
    for epoch in run_epoch([], world_size=world_size):
        assert isinstance(epoch.error, DataError)
        assert "empty" in str(epoch.error)


def test_a_rank_with_an_empty_shard_does_not_call_the_dataset_empty() -> None:
    epochs = run_epoch([rejection(0)], world_size=2)
    assert all(isinstance(epoch.error, DataError) and "empty" not in str(epoch.error) for epoch in epochs)


@pytest.mark.parametrize(
    "rows",
    [
        [sample(0, 5)],
        [sample(0, 5), rejection(1)],
        [sample(0, 5), rejection(1), sample(2, 5), rejection(3), sample(4, 5)],
    ],
    ids=["fewer rows than ranks", "all of a shard rejected", "all of a longer shard rejected"],
)
def test_an_empty_shard_takes_part_in_every_step(rows: list[Row]) -> None:
    """I1, I2: a rank without a sample idles from the first step to the last."""
    full, empty = run_epoch(rows, world_size=2, accumulation=2)
    assert full.error is None and empty.error is None
    assert len(full.steps) == len(empty.steps)
    assert all(one.idle for one in empty.micro_batches)
    assert sorted(full.ids) == [row.id for row in usable(rows)]


@pytest.mark.parametrize("rows", [[sample(0, 5)], [sample(0, 5), rejection(1)]])
def test_an_idle_step_of_an_empty_shard_has_a_real_sample_to_run(rows: list[Row]) -> None:
    """An idle step is a real forward and backward of a small real batch, on every rank."""
    _, empty = run_epoch(rows, world_size=2)
    for _, samples in empty.tasks:
        assert all(isinstance(item, Sample) for item in samples)


def test_a_short_sample_among_long_ones_does_not_wait_for_its_like() -> None:
    """I5: rows of 16 fill their groups; the row of 3, the oldest, goes out with the first round."""
    rows: list[Row] = [sample(0, 3)] + [sample(i, 16) for i in range(1, 40)]
    (epoch,) = run_epoch(rows, budget=Budget(16), buffer_size=4)
    assert any(0 in one.ids for one, _ in epoch.plans[0])


def test_rejected_rows_are_done_as_soon_as_they_are_known() -> None:
    """Progress counts every row of the epoch: rows 0 to 3 are rejected before the first step."""
    rows: list[Row] = [rejection(i) for i in range(4)] + [sample(i, 8) for i in range(4, 64)]
    (epoch,) = run_epoch(rows)
    assert [step.done for step in epoch.steps] == [4 + 4 * k for k in range(1, 16)]


def test_the_buffer_is_filled_and_never_above_its_size() -> None:
    """Host memory: at most `buffer_size` samples wait, and one is drawn ahead to know when the sampler is exhausted."""
    drawn = 0

    def rows() -> Iterator[Sample]:
        nonlocal drawn
        for i in range(100):
            drawn += 1
            yield sample(i, 1 + i % 16)

    class Coordinator(Ranks):
        def all_gather(self, metadata: RankMetadata, round_index: int) -> list[RankMetadata]:
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
        group_size=256,
        seed=0,
        rank=0,
        coordinator=Coordinator(),
        find_dummy_sample=lambda: sample(0, 1),
        leave_out=print,
    )
    planner = FillEpoch(rows(), context, Place(), share=Share(), buffer_size=8, accumulation=1, join=True)
    for tasks in planner:
        emitted += sum(len(one.ids) for one, _ in tasks)
    assert emitted == 100
    assert max(buffers) == 8


def test_a_sampler_that_ends_with_the_buffer_full_is_known_to_be_exhausted() -> None:
    """One round for as many samples as the buffer holds: no further round that would find nothing."""
    (epoch,) = run_epoch([sample(i, 8) for i in range(8)], buffer_size=8)
    assert len(epoch.plans) == 1
    assert epoch.steps[-1].last


def test_rejected_rows_at_the_end_do_not_leave_a_last_round_empty() -> None:
    """The look-ahead passes over rejected rows, so the round with the last sample is the final one."""
    rows: list[Row] = [sample(i, 8) for i in range(8)] + [rejection(i) for i in range(8, 20)]
    (epoch,) = run_epoch(rows, buffer_size=8)
    assert len(epoch.plans) == 1
    assert epoch.steps[-1].done == 20


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


# Quota closure


@settings(deadline=None)
@given(datasets(), run_options())
@example([sample(i, 1) for i in range(3)], {"world_size": 1, "budget": Budget(1), "buffer_size": 2, "accumulation": 2})
def test_without_join_no_rank_idles_and_what_is_left_out_is_counted(rows: list[Row], options: dict[str, Any]) -> None:
    """I1, I3, I5: same steps, whole optimizer steps, none idle, no id twice, the rest reported."""
    options["buffer_size"] = max(options["buffer_size"], options["accumulation"])
    epochs = run_epoch(rows, join=False, **options)
    emitted = Counter(id for epoch in epochs for id in epoch.ids)
    if not emitted:
        assert all(isinstance(epoch.error, CollectiveError) for epoch in epochs)
        assert (
            min(len(usable(rows[rank :: options["world_size"]])) for rank in range(options["world_size"]))
            < (options["accumulation"])
        )
        return
    assert [epoch.error for epoch in epochs] == [None] * options["world_size"]
    assert all(count == 1 for count in emitted.values())
    assert set(emitted) <= {row.id for row in usable(rows)}
    check_whole_optimizer_steps(epochs)
    assert {step.num_micro_batches for step in epochs[0].steps} == {options["accumulation"]}
    assert not any(one.idle for epoch in epochs for one in epoch.micro_batches)
    for epoch in epochs:
        last = epoch.steps[-1]
        assert last.last and not any(step.last for step in epoch.steps[:-1])
        assert last.epoch_steps == len(epoch.steps)
        assert last.not_trained + len(emitted) + last.rejected.total() == len(rows)
        assert not any(step.not_trained for step in epoch.steps[:-1])
        assert all(len(buffer) <= options["buffer_size"] for buffer in epoch.buffers)


def test_without_join_a_single_rank_leaves_out_less_than_an_optimizer_step() -> None:
    """I3: nobody runs short but itself, and only what cannot fill a whole optimizer step is left."""
    (epoch,) = run_epoch([sample(i, 16) for i in range(20)], join=False, budget=Budget(16), accumulation=3)
    assert len(epoch.ids) == 18
    assert epoch.steps[-1].not_trained == 2


def test_without_join_a_buffer_smaller_than_an_optimizer_step_still_ends() -> None:
    """Never hang: with buffer_size below gradient_accumulation_steps no rank can fill an optimizer step."""
    (epoch,) = run_epoch([sample(i, 8) for i in range(20)], join=False, buffer_size=2, accumulation=4)
    assert epoch.error is None or isinstance(epoch.error, DataError)
