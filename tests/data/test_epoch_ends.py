"""Ranks that do not reach the end of an epoch, in both modes: none of the others is left waiting."""

from __future__ import annotations

from typing import Any

import pytest
from data import test_fill_epoch, test_keep_epoch
from data.stops import KEEP, run
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lockstep import (
    Row,
    check_promises,
    kept_shards,
    rejection,
    run_epoch,
    run_kept,
    run_shards,
    sample,
    stock_steps,
    usable,
)

from odb_factory.data.samples import Rejection, Sample
from odb_factory.errors import CollectiveError

Case = tuple[list[list[Row]], dict[str, Any]]


@st.composite
def kept(draw: st.DrawFn) -> Case:
    rows, stock, options = draw(test_keep_epoch.cases())
    return kept_shards(rows, stock), options | {"stock": stock}


cases = st.one_of(kept(), test_fill_epoch.cases())


@settings(deadline=None, max_examples=60)
@given(st.data(), cases, st.integers(1, 3))
def test_fatal_rows_end_all_ranks_alike(data: Any, case: Case, num_fatal: int) -> None:
    """Also in the first round, and on several ranks in the same round: each names a row, its own if it has one.

    With kept steps at the optimizer step that the first of them is in, and not before it.
    """
    world, options = case
    stock = options.get("stock")
    rows = [(rank, i) for rank, shard in enumerate(world) for i in range(len(shard))]
    assume(rows)
    fatal = data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=num_fatal))
    for rank, i in fatal:
        world[rank][i] = rejection(world[rank][i].id, fatal=True)
    epochs = run_shards(world, order=data.draw(st.permutations(range(len(world)))), **options)
    if options.get("join") is False and epochs[0].error is None:
        check_promises(world, epochs, **options)  # it ended before any was drawn
        return
    assert all(isinstance(epoch.error, CollectiveError) for epoch in epochs)
    assert not any(step.last for epoch in epochs for step in epoch.steps)
    assert len({len(epoch.plans) for epoch in epochs}) == 1, "all take the same steps until then"
    if "no row of the training dataset" in str(epochs[0].error):
        return
    assert all("cannot be read" in str(epoch.error) for epoch in epochs)
    if stock is not None:
        first = min(stock.position(rank, i) for rank, i in fatal)
        assert len(epochs[0].plans) == first // stock.global_batch_size
    for rank, epoch in enumerate(epochs):
        own = next((row for row in world[rank] if isinstance(row, Rejection) and row.fatal), None)
        if not str(epoch.error).startswith("rank "):
            assert own is not None and str(epoch.error) == own.message


@settings(deadline=None, max_examples=40)
@given(st.data(), cases)
def test_ranks_that_leave_keep_nobody_waiting(data: Any, case: Case) -> None:
    """Some are closed at a yield while the others go on to the next exchange: these end with an error at once."""
    world, options = case
    assume(any(map(usable, world)))
    whole = run_shards(world, **options)
    assume(whole[0].error is None)
    after = data.draw(st.integers(1, len(whole[0].plans)))
    leavers = data.draw(st.sets(st.sampled_from(range(len(world))), min_size=1))
    order = data.draw(st.permutations(range(len(world))))
    epochs = run_shards(world, order=order, leave_after=dict.fromkeys(leavers, after), **options)
    for rank, (epoch, complete) in enumerate(zip(epochs, whole)):
        assert epoch.plans == complete.plans[:after]
        if rank in leavers or after == len(complete.plans):
            assert epoch.error is None
        else:
            assert isinstance(epoch.error, CollectiveError)
            assert f"rank {min(leavers)} stopped: it left" in str(epoch.error)


@pytest.mark.parametrize(
    "options",
    [{"join": True}, {"join": False}, {"stock": stock_steps(80, size=8, world_size=2), "balance": True}],
    ids=["join", "no join", "keep"],
)
def test_an_error_that_nobody_foresaw_ends_all_ranks(options: dict[str, Any]) -> None:
    """A worker that is killed, say: torch raises from within the observing loader."""
    killed = OSError("DataLoader worker is\nkilled")
    world = [[sample(i, 8) for i in range(60)], [*(sample(100 + i, 8) for i in range(20)), killed]]
    well, broken = run_shards(world, **options)
    assert isinstance(well.error, CollectiveError) and isinstance(broken.error, CollectiveError)
    assert str(broken.error) == "OSError: DataLoader worker is killed"
    assert str(well.error) == "rank 1 stopped: OSError: DataLoader worker is killed"
    assert len(well.plans) == len(broken.plans) > 0


@pytest.mark.parametrize("size", [1, 30], ids=["in the only round", "in the first of several rounds"])
def test_an_error_that_others_do_not_know_of_is_no_agreed_one(size: int) -> None:
    """Whoever raises `CollectiveError` need not tell the others; so they must know."""

    def no_dummy() -> Sample:
        raise OSError("the file is gone")

    epochs = run_shards([[sample(i, 8) for i in range(size)], []], stand_in=no_dummy)
    assert "the file is gone" in str(epochs[1].error)
    assert isinstance(epochs[0].error, CollectiveError) or not isinstance(epochs[1].error, CollectiveError)


REJECTED = [Rejection(i, "unsupervised" if i % 2 else "overlong", "") for i in range(12)]
WITHOUT_A_USABLE_ROW: list[tuple[list[Row], dict[str, Any], list[str]]] = [
    (REJECTED, {}, ["6 overlong", "6 unsupervised", "; the warnings above name the first of them"]),
    ([rejection(0)], {}, ["1 unreadable"]),
    ([], {}, ["it is empty."]),
    ([sample(i, 4) for i in range(5)], {"batch_size": 6, "drop_last": True}, ["5 dropped by drop_last."]),
]


@pytest.mark.parametrize("mode", ["keep", "fill"])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(("rows", "rule", "words"), WITHOUT_A_USABLE_ROW, ids=["rejected", "one", "empty", "drop_last"])
def test_an_epoch_without_a_usable_row_is_an_error(
    rows: list[Row], rule: dict[str, Any], words: list[str], world_size: int, mode: str
) -> None:
    """Never lose silently: on every rank, in one line that counts the reasons."""
    if mode == "keep":
        epochs = run_kept(rows, stock_steps(len(rows), size=12, world_size=world_size, **rule))
    elif rule:
        pytest.skip("refused with `fill`")
    else:
        epochs = run_epoch(rows, world_size=world_size)
    for epoch in epochs:
        message = str(epoch.error)
        assert isinstance(epoch.error, CollectiveError) and "\n" not in message
        assert message.startswith("no row of the training dataset can be trained on: ")
        assert all(word in message for word in words) and ("empty" in message) == (not rows)


def test_rejected_rows_of_a_stream_leave_no_remainder() -> None:
    """Nobody knows how many rows it has."""
    (epoch,) = run_epoch(REJECTED, num_samples=None)
    assert "12" not in str(epoch.error) and "remain" not in str(epoch.error)


def test_fewer_rows_than_a_batch_of_every_rank_are_named() -> None:
    """Some of the ranks would look beyond what `drop_last` leaves, and take the order of the others for another."""
    with pytest.raises(CollectiveError, match="3 dropped by drop_last"):
        run([5] * 3, world_size=4, **KEEP, drop_last=True)
