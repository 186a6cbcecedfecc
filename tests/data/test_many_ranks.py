"""Epochs of up to 16 ranks with little in common: skewed and empty shards, overlong and rejected rows, odd budgets.

And every way in which some of the ranks do not reach the end: none of the others is left waiting.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lockstep import NO_FEATURES, Epoch, Row, check_promises, rejection, run_shards, sample, usable
from planning_strategies import budgets, costs, sized

from odb_factory.data.samples import Rejection, Sample
from odb_factory.errors import CollectiveError
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


@st.composite
def orders(draw: st.DrawFn, world: list[list[Row]]) -> list[int]:
    return draw(st.permutations(range(len(world))))


def endings(epochs: list[Epoch]) -> list[str | None]:
    return [epoch.error and f"{type(epoch.error).__name__}: {epoch.error}" for epoch in epochs]


def test_a_group_split_for_a_rank_that_would_idle_keeps_its_budget() -> None:
    """I4: the half without audio gets dummy audio, which is too much for two rows."""
    kinds = [Cost(1, 0, 1)] * 6 + [Cost(1, 0, 1, has_audio=True)]
    world = [[], *([a_row(id, kinds[id], False) for id in ids] for ids in (range(5), range(5, 7)))]
    budget = sized(Budget(4, collation=Collation(dummy_audio_tokens=2), row_multiple=2), 1, ())
    options = {"budget": budget, "buffer_size": 3, "balance": True}
    check_promises(world, run_shards(world, **options), **options)


@settings(deadline=None, max_examples=50)
@given(cases())
def test_any_number_of_ranks_keeps_its_promises(case: Case) -> None:
    """I1 to I5, I7."""
    world, options = case
    check_promises(world, run_shards(world, **options), **options)


@settings(deadline=None, max_examples=15)
@given(st.data(), cases())
def test_it_does_not_matter_which_rank_is_first(data: Any, case: Case) -> None:
    """I6: the same epoch whatever rank runs ahead, and again."""
    world, options = case
    first = run_shards(world, **options)
    again = run_shards(world, order=data.draw(orders(world)), **options)
    assert [epoch.plans for epoch in again] == [epoch.plans for epoch in first]
    assert endings(again) == endings(first)


@settings(deadline=None, max_examples=15)
@given(cases())
def test_what_all_ranks_are_told_is_the_same(case: Case) -> None:
    """I8, progress and the summary rest on it."""
    world, options = case
    epochs = run_shards(world, **options)
    for steps in zip(*(epoch.steps for epoch in epochs)):
        assert list(steps) == [steps[0]] * len(steps)
    for micro_step in zip(*(epoch.micro_batches for epoch in epochs)):
        totals = micro_step[0].totals
        assert [one.totals for one in micro_step] == [totals] * len(micro_step)
        assert totals.samples == sum(len(one.ids) for one in micro_step)
        assert totals.tokens == sum(one.tokens for one in micro_step)
        assert totals.units == sum(one.num_units for one in micro_step)
    if epochs[0].steps:
        last = epochs[0].steps[-1]
        assert last.rejected.total() == sum(len(epoch.rejected) for epoch in epochs)
        seen = {id for epoch in epochs for buffer in epoch.buffers for id in buffer}
        overlong = [row.id for shard in world for row in usable(shard) if options["budget"].overlong(row.cost)]
        assert last.overlong == len(seen.intersection(overlong))


@settings(deadline=None, max_examples=15)
@given(cases())
def test_all_rejected_on_one_rank_is_no_end_for_the_others(case: Case) -> None:
    """That rank ends with them, having idled from the first step to the last (I1, I2)."""
    world, options = case
    options |= {"join": True, "balance": False}
    rows = [*world, [rejection(10_000 + i) for i in range(9)]]
    assume(any(map(usable, world)))
    epochs = run_shards(rows, **options)
    check_promises(rows, epochs, **options)
    assert all(one.idle for one in epochs[-1].micro_batches)
    assert len(epochs[-1].rejected) == 9


def test_a_rank_with_many_more_groups_than_the_others_keeps_none_for_ever() -> None:
    """I5: one group a round goes out, with the oldest sample. Were it always the fullest, rows of 17 would wait."""
    few = [sample(i, 4) for i in range(800)]
    many = [sample(1000 + i, 17 if i < 4 else 30) for i in range(100)]
    epochs = run_shards([few, many], budget=Budget(32), buffer_size=8)
    check_promises([few, many], epochs, budget=Budget(32), buffer_size=8)
    assert {1000, 1001, 1002, 1003} <= set(epochs[1].ids[:8])


# Ranks that do not reach the end


@settings(deadline=None, max_examples=40)
@given(st.data(), cases(), st.integers(1, 3))
def test_fatal_rows_end_all_ranks_alike(data: Any, case: Case, num_fatal: int) -> None:
    """Also in the first round, and on several ranks in the same round: each names a row, its own if it has one."""
    world, options = case
    rows = [(rank, i) for rank, shard in enumerate(world) for i in range(len(shard))]
    assume(rows)
    for rank, i in data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=num_fatal)):
        world[rank][i] = rejection(world[rank][i].id, fatal=True)
    epochs = run_shards(world, order=data.draw(orders(world)), **options)
    if not options["join"] and epochs[0].error is None:
        check_promises(world, epochs, **options)  # it ended before any was drawn
        return
    assert all(isinstance(epoch.error, CollectiveError) for epoch in epochs)
    assert not any(step.last for epoch in epochs for step in epoch.steps)
    assert len({len(epoch.plans) for epoch in epochs}) == 1, "all take the same steps until then"
    if "no row of the training dataset" in str(epochs[0].error):
        return
    assert all("cannot be read" in str(epoch.error) for epoch in epochs)
    for rank, epoch in enumerate(epochs):
        fatal = next((row for row in world[rank] if isinstance(row, Rejection) and row.fatal), None)
        if not str(epoch.error).startswith("rank "):
            assert str(epoch.error) == fatal.message


@settings(deadline=None, max_examples=15)
@given(st.data(), cases())
def test_ranks_that_leave_keep_nobody_waiting(data: Any, case: Case) -> None:
    """Some are closed at a yield while the others go on to the next exchange: these end with an error at once."""
    world, options = case
    whole = run_shards(world, **options)
    assume(whole[0].error is None)
    after = data.draw(st.integers(1, len(whole[0].plans)))
    leavers = data.draw(st.sets(st.sampled_from(range(len(world))), min_size=1))
    epochs = run_shards(world, order=data.draw(orders(world)), leave_after=dict.fromkeys(leavers, after), **options)
    for rank, (epoch, complete) in enumerate(zip(epochs, whole)):
        assert epoch.plans == complete.plans[:after]
        if rank in leavers or after == len(complete.plans):
            assert epoch.error is None
        else:
            assert isinstance(epoch.error, CollectiveError)
            assert f"rank {min(leavers)} stopped: it left" in str(epoch.error)


@pytest.mark.parametrize("join", [True, False])
def test_an_error_that_nobody_foresaw_ends_all_ranks(join: bool) -> None:
    """A worker that is killed, say: torch raises from within the observing loader."""
    killed = OSError("DataLoader worker is\nkilled")
    world = [[sample(i, 8) for i in range(60)], [*(sample(100 + i, 8) for i in range(20)), killed]]
    well, broken = run_shards(world, join=join)
    assert isinstance(well.error, CollectiveError) and isinstance(broken.error, CollectiveError)
    assert str(broken.error) == "OSError: DataLoader worker is killed"
    assert str(well.error) == "rank 1 stopped: OSError: DataLoader worker is killed"
    assert len(well.plans) == len(broken.plans) > 0


@pytest.mark.parametrize("size", [1, 30], ids=["in the only round", "in the first of several rounds"])
def test_an_error_that_others_do_not_know_of_is_no_agreed_one(size: int) -> None:
    """Whoever raises `CollectiveError` need not tell the others; so they must know."""

    def no_dummy() -> Sample:
        raise OSError("the file is gone")

    epochs = run_shards([[sample(i, 8) for i in range(size)], []], find_dummy_sample=no_dummy)
    assert "the file is gone" in str(epochs[1].error)
    assert isinstance(epochs[0].error, CollectiveError) or not isinstance(epochs[1].error, CollectiveError)
