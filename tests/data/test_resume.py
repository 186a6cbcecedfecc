"""Stop anywhere, resume anywhere: what is left of an epoch comes once; with kept optimizer steps in the same steps.

A state is the same on all ranks. With `keep` it is a cursor: the same training goes on, on any ranks and under any
budget (I9). With `fill` it has the samples that are held back; what is left comes once, on any ranks (I2).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from data.stops import (
    KEEP,
    LENGTHS,
    Observer,
    SplitStream,
    Stream,
    ids_of,
    make_loader,
    num_steps,
    of_steps,
    run,
    usable,
)
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import Table, run_ranks

from odb_factory.data.cursor import Remaining
from odb_factory.data.order import MEAN_OF_MICRO_BATCH
from odb_factory.errors import CollectiveError, ConfigError, DataError

EIGHT = KEEP | {"global_batch_size": 8}
"""N whatever the ranks."""
SLOW = pytest.mark.nightly
MODES = [
    pytest.param({"world_size": 1}, marks=SLOW),
    {"world_size": 1, "accumulation": 2, "buffer_size": 5},
    pytest.param({"world_size": 2, "accumulation": 2}, marks=SLOW),
    {"world_size": 3, "buffer_size": 64},
    {"world_size": 2, "join": False, "accumulation": 2},
    {"world_size": 3, "balance": True, "accumulation": 2},
    pytest.param({"world_size": 2, "stream": Stream}, marks=SLOW),
    pytest.param({"world_size": 1, **KEEP}, marks=SLOW),
    {"world_size": 3, **KEEP, "balance": False},
    {
        "world_size": 2,
        **KEEP,
        "batch_size": 2,
        "accumulation": 2,
        "drop_last": True,
        "stock_mean": MEAN_OF_MICRO_BATCH,
    },
    {"world_size": 2, **KEEP, "global_batch_size": 7, "stream": Stream},
    {"world_size": 2, "layout": "flat", "accumulation": 2, "balance": True},
    {"world_size": 2, **KEEP, "layout": "flat"},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_stop_at_any_step_loses_no_sample(mode: dict[str, Any]) -> None:
    """I2, I3: every sample comes once, and counts go on.

    With kept optimizer steps: the same micro-batches, totals, progress and end as without the stop (I9).
    """
    whole, end = run(LENGTHS, epochs=2, **mode)
    covers = mode.get("join") is not False and not mode.get("drop_last")
    if covers:
        assert ids_of(whole) == ids_of(whole, 1) == usable(LENGTHS)
    stops = num_steps(whole)
    for stop in range(1, stops, 1 if mode.get("global_batch_size") else 3):
        before, state = run(LENGTHS, epochs=2, stop_after=stop, **mode)
        after, end_after = run(LENGTHS, epochs=2, state=state, **mode)
        if mode.get("global_batch_size"):
            assert [a + b for a, b in zip(before, after)] == whole, stop
            assert end_after == end, stop
            continue
        for epoch in (0, 1):
            ids = ids_of(before, epoch) + ids_of(after, epoch)
            assert ids == usable(LENGTHS) if covers else ids <= usable(LENGTHS), (stop, epoch)
        steps = [one.step for one in before[0] + after[0] if one.ends_optimizer_step]
        assert [step.index for step in steps if not step.epoch] == list(range(sum(not step.epoch for step in steps)))
        for step in steps:
            if step.last:
                assert (step.done, step.rejected.total()) == (
                    whole[0][-1].step.done,
                    whole[0][-1].step.rejected.total(),
                )


@pytest.mark.parametrize("mode", [*MODES[:4], MODES[7]], ids=str)
def test_a_state_that_was_loaded_and_not_used_is_the_same_state(mode: dict[str, Any]) -> None:
    """A second stop before the first step loses nothing."""
    _, state = run(LENGTHS, stop_after=3, **mode)
    options = {key: value for key, value in mode.items() if key != "world_size"}
    loader = make_loader(LENGTHS, Table(mode["world_size"]).seat(0), **options)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    loader.close()


changes = st.fixed_dictionaries(
    {
        "world_size": st.integers(1, 4),
        "buffer_size": st.integers(1, 16),
        "token_budget": st.sampled_from([24, 32, 64]),
        "layout": st.sampled_from(["padded", "flat"]),
        "balance": st.booleans(),
    }
)


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=40).filter(any),
    st.none() | st.integers(1, 9),
    st.lists(st.tuples(changes, st.integers(1, 6)), min_size=1, max_size=3),
    st.lists(st.integers(1, 3), min_size=4, max_size=4),
    st.sampled_from([None, Stream]),
)
def test_any_ranks_and_settings_after_any(
    lengths: list[int],
    size: int | None,
    stops: list[tuple[dict[str, Any], int]],
    accumulations: list[int],
    stream: type[Stream] | None,
) -> None:
    """Each sample once over the epoch, however often it was stopped; with kept steps (`size`) in its step (I9)."""
    if size is not None and size < len(lengths) and not any(lengths[:size]):
        lengths = [5, *lengths]
    kept = {} if size is None else KEEP | {"global_batch_size": size}
    state, taken, seen = None, {}, Counter[int]()
    for (change, steps), accumulation in zip([*stops, ({"world_size": 2}, None)], accumulations):
        mode = {"accumulation": accumulation, **kept, **change}
        done, state = run(lengths, state=state, stop_after=steps, stream=stream, **mode)
        taken |= of_steps(done)
        seen += ids_of(done)
        if done[0][-1].step.last:
            break
    assert seen == usable(lengths)
    if size is not None:
        assert taken == of_steps(run(lengths, stream=stream, **kept)[0])


WAYS = [
    {"world_size": 2},
    {"world_size": 3, "balance": False},
    {"world_size": 1, "token_budget": 64, "buffer_size": 100},
    {"world_size": 5, "token_budget": 20, "overlong": "singleton"},
    {"world_size": 1, "num_workers": 2},
]


@pytest.mark.parametrize("stream", [None, Stream])
def test_another_way_may_be_taken_at_every_optimizer_step(stream: Any) -> None:
    """I9: ranks, budget, balance, buffer and workers change at each stop; every step has the samples it had."""
    whole, _ = run(LENGTHS, epochs=2, stream=stream, **EIGHT)
    expected = of_steps(whole)
    ways = WAYS[:-1] if stream else WAYS
    state, taken, figures = None, {}, {}
    for stop in range(num_steps(whole)):
        done, state = run(LENGTHS, epochs=2, state=state, stop_after=1, stream=stream, **EIGHT | ways[stop % len(ways)])
        taken |= of_steps(done)
        step = done[0][0].step
        figures[step.epoch, step.index] = (step.done, step.rejected, step.remainder, step.last, step.tokens)
    assert taken == expected
    assert figures == {
        (s.epoch, s.index): (s.done, s.rejected, s.remainder, s.last, s.tokens) for s in (one.step for one in whole[0])
    }


def test_the_state_is_a_cursor() -> None:
    """Less than a kilobyte, whatever the dataset."""
    settings = KEEP | {"global_batch_size": 64, "token_budget": 160}
    _, state = run([5] * 20_000, stop_after=20, world_size=2, **settings)
    assert state["optimizer_steps"] == 20 and state["planned"] == 1280
    assert len(json.dumps(state)) < 500
    after, _ = run([5] * 20_000, state=state, stop_after=1, **settings)
    assert after[0][0].step.index == 20


@settings(deadline=None)
@given(st.data())
def test_what_is_left_of_a_filled_epoch(data: st.DataObject) -> None:
    """I2: after any draws of any ranks, again and again, exactly the positions that were not trained on are left."""
    size, remaining, done = data.draw(st.integers(1, 60)), Remaining(), set[int]()
    for world_size in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)):
        order = [
            [*held.tolist(), *range(first, size, world_size)] for held, first in zip(*remaining.of_ranks(world_size))
        ]
        assert sorted(p for mine in order for p in mine) == sorted(set(range(size)) - done)
        drawn = [data.draw(st.integers(0, len(mine))) for mine in order]
        taken = sorted(p for mine, number in zip(order, drawn) for p in mine[:number])
        waiting = data.draw(st.sets(st.sampled_from(taken))) if taken else set()
        done |= set(taken) - waiting
        remaining = remaining.after(np.array(drawn), np.array(sorted(waiting), dtype=np.int64))
    assert set(remaining.held) | set(range(remaining.first, size)) == set(range(size)) - done
    assert list(remaining.held) == sorted(p for p in remaining.held if p < remaining.first)


def test_a_loop_may_fetch_ahead_of_what_it_has_trained_on() -> None:
    """A prefetching loop has the next micro-batch, or the end of the epoch, when it says that a step is done."""

    def drive(seat: Any) -> list[dict[str, Any]]:
        loader, states = make_loader(LENGTHS, seat, **EIGHT), []
        before = None
        for one, _, _ in loader:
            if before is not None and before.ends_optimizer_step:
                loader.consume(before.step)
                states.append(loader.state_dict())
            before = one
        loader.consume(before.step)
        states.append(loader.state_dict())
        loader.close()
        return states

    (states,) = run_ranks(1, drive)
    assert [(state["epoch"], state["optimizer_steps"]) for state in states] == [*((0, k) for k in range(1, 8)), (1, 0)]


def test_steps_that_were_not_named_one_by_one_are_done_with_a_later_one() -> None:
    _, expected = run(LENGTHS, stop_after=5, **EIGHT)

    def drive(seat: Any) -> dict[str, Any]:
        loader = make_loader(LENGTHS, seat, **EIGHT)
        step = next(one.step for one, _, _ in loader if one.step.index == 4 and one.ends_optimizer_step)
        loader.consume(step)
        state = loader.state_dict()
        loader.close()
        return state

    assert run_ranks(1, drive) == [expected]


# From a training without odb


@pytest.mark.parametrize("steps", [0, 1, 5, 8, 11])
def test_a_checkpoint_of_stock_is_gone_on_from(steps: int) -> None:
    """Its optimizer steps are ours: as many are passed over."""
    whole, _ = run(LENGTHS, epochs=2, **EIGHT)
    after, _ = run(LENGTHS, epochs=2, go_to=divmod(steps, 8), **EIGHT | {"world_size": 2})
    assert list(of_steps(after).items()) == list(of_steps(whole).items())[steps:]
    passed = {(one.step.epoch, one.step.index): one.step.done for one in whole[0]}
    assert all(passed[one.step.epoch, one.step.index] == one.step.done for one in after[0])


# What is not the same training


def refused(state: Any, *words: str, lengths: Any = LENGTHS, **options: Any) -> None:
    """In one line that names the way out."""
    with pytest.raises(DataError) as caught:
        run(lengths, state=state, **options)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in (*words, "ignore_data_skip")), message


@pytest.mark.parametrize(
    ("mode", "changed", "word"),
    [
        ({}, {"seed": 8}, "seed was 7, is 8"),
        ({}, {"lengths": LENGTHS[:-1]}, "samples was 60, is 59"),
        (EIGHT, {"seed": 8}, "seed was 7, is 8"),
        (EIGHT, {"lengths": LENGTHS[:-1]}, "samples was 60, is 59"),
        (EIGHT, {"global_batch_size": 16}, "global_batch_size was 8, is 16"),
        (EIGHT, {"drop_last": True, "batch_size": 8}, "samples was 60, is 56"),
        (EIGHT, {"stream": Stream}, "samples was 60, is None"),
        (EIGHT, {"global_batch_size": "fill"}, "global_batch_size was 8, is fill"),
        ({}, EIGHT, "global_batch_size was fill, is 8"),
    ],
    ids=str,
)
def test_another_training_is_refused(mode: dict[str, Any], changed: dict[str, Any], word: str) -> None:
    _, state = run(LENGTHS, stop_after=4, **mode)
    refused(state, word, **{"lengths": LENGTHS} | mode | changed)


def test_another_order_with_the_same_seed_is_refused() -> None:
    """A sampler that draws by another rule than before."""
    _, state = run(LENGTHS, stop_after=4, **EIGHT)
    state["data"]["order"] += 1
    refused(state, "order", **EIGHT)


@pytest.mark.parametrize("mode", [{}, EIGHT], ids=["fill", "keep"])
def test_another_dataset_is_refused(mode: dict[str, Any]) -> None:
    """Of as many rows, which `datasets` tells apart."""

    class OfSeat(Observer):
        def __call__(self, item: dict[str, Any]) -> Any:
            return super().__call__((item["index"], item["length"]))

    def dataset(lengths: list[int]) -> Dataset:
        return Dataset.from_dict({"index": range(len(lengths)), "length": lengths})

    options = {"observer": OfSeat(), **mode}
    before, state = run(LENGTHS, stop_after=4, dataset=dataset(LENGTHS), **options)
    after, _ = run(LENGTHS, state=state, dataset=dataset(LENGTHS), **options)
    assert ids_of(before) + ids_of(after) == usable(LENGTHS)
    refused(state, "fingerprint was", dataset=dataset([*LENGTHS[:-1], 1]), **options)


def test_a_stream_that_was_split_goes_on_with_the_same_ranks_alone() -> None:
    whole, _ = run(LENGTHS, world_size=2, stream=SplitStream)
    for stop in (3, 4, 6):
        filled, state = run(LENGTHS, world_size=2, stop_after=stop, stream=SplitStream)
        rest, _ = run(LENGTHS, world_size=2, stream=SplitStream, state=state)
        assert ids_of(filled) + ids_of(rest) == ids_of(whole)
    refused(state, "split_among was 2, is 1", stream=SplitStream)
    options = EIGHT | {"stream": SplitStream, "batch_size": 2, "accumulation": 2, "global_batch_size": "keep"}
    whole, _ = run(LENGTHS, world_size=2, **options)
    before, state = run(LENGTHS, world_size=2, stop_after=3, **options)
    after, _ = run(LENGTHS, world_size=2, state=state, **options)
    assert of_steps(before) | of_steps(after) == of_steps(whole)
    refused(state, "split_among was 2, is 1", **options | {"accumulation": 4})
    with pytest.raises(ConfigError, match="7 is no multiple of 2 rows x 2 ranks"):
        run(LENGTHS, world_size=2, **options | {"global_batch_size": 7})


@pytest.mark.parametrize("nothing", [None, [], "x", {}, 7, {"version": 9}], ids=str)
def test_what_is_no_state_is_refused(nothing: Any) -> None:
    loader = make_loader(LENGTHS, Table(1).seat(0))
    with pytest.raises(DataError, match="ignore_data_skip"):
        loader.load_state_dict(nothing)
    loader.close()


def test_size_of_a_filled_state() -> None:
    """A number for each sample that is held back."""
    _, state = run([1 + k % 20 for k in range(20_000)], stop_after=50, buffer_size=1024)
    assert len(json.dumps(state)) < 10_000


# Ranks that are not in agreement


class Turned:
    """An order of which only the first `alike` indices are the same on all ranks."""

    def __init__(self, num_rows: int, alike: int, rank: int):
        first, rest = list(range(alike)), list(range(alike, num_rows))
        self.order = first + rest[rank:] + rest[:rank]

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("alike", "size"), [(0, 10), (70, 10), (100, 7), (198, 50), (198, 8)])
def test_orders_that_differ_anywhere_are_noticed(alike: int, size: int, drop_last: bool) -> None:
    """I11: at the optimizer step in which they differ, before it is trained on; those before it are alike."""

    def drive(seat: Any) -> Any:
        loader = make_loader([5] * 200, seat, **KEEP | {"global_batch_size": size, "drop_last": drop_last})
        loader._order.sampler = Turned(200, alike, seat.rank)
        steps = []
        try:
            for one, _, _ in loader:
                steps.append(one.step.index)
        except CollectiveError as error:
            return steps, str(error)
        finally:
            loader.close()
        return steps, ""

    for steps, message in run_ranks(2, drive):
        assert "the ranks draw their samples in different orders" in message and "\n" not in message
        assert max(steps, default=-1) == alike // size - 1


def begin(seat: Any, state: dict[str, Any] | None = None, **options: Any) -> str:
    """The error that a rank begins with; "": none."""
    loader = make_loader(LENGTHS, seat, **options)
    try:
        if state is not None:
            loader.load_state_dict(state)
        loader.begin()
    except CollectiveError as error:
        return str(error)
    finally:
        loader.close()
    return ""


def test_ranks_that_stand_at_different_optimizer_steps_stop_before_the_first() -> None:
    _, state = run(LENGTHS, stop_after=4, **EIGHT)
    for message in run_ranks(2, lambda seat: begin(seat, state if seat.rank else None, **EIGHT)):
        assert "optimizer steps done in it (0 on rank 0; 4 on rank 1)" in message
