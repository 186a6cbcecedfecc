"""Stop anywhere, resume anywhere: what is left of an epoch comes once; with kept optimizer steps in the same steps.

A state is the same on all ranks. With `keep` it is a cursor: the same training goes on, on any ranks and under any
budget (I9). With `fill` it has the samples that are held back; what is left comes once, on any ranks (I2).
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import run_ranks
from toy import Observer
from worlds import (
    KEEP,
    LENGTHS,
    SplitStream,
    Stream,
    ids_of,
    num_steps,
    of_steps,
    open_loader,
    run,
    usable,
)

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


def test_the_state_is_a_cursor() -> None:
    """Small, whatever the dataset."""
    settings = KEEP | {"global_batch_size": 64, "token_budget": 160}
    _, state = run([5] * 20_000, stop_after=20, world_size=2, **settings)
    assert state["optimizer_steps"] == 20 and state["planned"] == 1280
    assert len(json.dumps(state)) < 500
    after, _ = run([5] * 20_000, state=state, stop_after=1, **settings)
    assert after[0][0].step.index == 20
    _, state = run([1 + k % 20 for k in range(20_000)], stop_after=50, buffer_size=1024)
    assert len(json.dumps(state)) < 10_000, "with `fill` a number for each sample that is held back"


def test_a_loop_may_fetch_ahead_of_what_it_has_trained_on() -> None:
    """A prefetching loop has the next micro-batch, or the end of the epoch, when it says that a step is done. A step
    that was not named is done with a later one."""

    def drive(seat: Any) -> list[dict[str, Any]]:
        states, before = [], None
        with open_loader(LENGTHS, seat, shuffle=True, **EIGHT) as loader:
            for one, _, _ in loader:
                if before is not None and before.ends_optimizer_step and before.step.index not in (1, 2, 3):
                    loader.consume(before.step)
                    states.append(loader.state_dict())
                before = one
            loader.consume(before.step)
            return [*states, loader.state_dict()]

    (states,) = run_ranks(1, drive)
    assert [(state["epoch"], state["optimizer_steps"]) for state in states] == [(0, 1), (0, 5), (0, 6), (0, 7), (1, 0)]
    assert states[1] == run(LENGTHS, stop_after=5, **EIGHT)[1]


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
        ({}, {"lengths": LENGTHS[:-1]}, "samples was 60, is 59"),
        (EIGHT, {"seed": 8}, "seed was 7, is 8"),
        (EIGHT, {"order": 1}, "order"),
        (EIGHT, {"global_batch_size": 16}, "ranks) was 8, is 16"),
        (EIGHT, {"drop_last": True, "batch_size": 8}, "samples was 60, is 56"),
        (EIGHT, {"stream": Stream}, "samples was 60, is None"),
        (EIGHT, {"global_batch_size": "fill"}, "ranks) was 8, is fill"),
        ({}, EIGHT, "ranks) was fill, is 8"),
    ],
    ids=str,
)
def test_another_training_is_refused(mode: dict[str, Any], changed: dict[str, Any], word: str) -> None:
    """order: a sampler that draws by another rule than before."""
    _, state = run(LENGTHS, stop_after=4, **mode)
    other_order = changed.get("order", 0)
    if other_order:
        state["data"]["order"] += other_order
    changes = {key: value for key, value in changed.items() if key != "order"}
    refused(state, word, **{"lengths": LENGTHS} | mode | changes)


@pytest.mark.parametrize("mode", [{}, EIGHT], ids=["fill", "keep"])
def test_another_dataset_is_refused(mode: dict[str, Any]) -> None:
    """Of as many rows, which `datasets` tells apart."""

    class OfColumns(Observer):
        def __call__(self, item: dict[str, Any]) -> Any:
            return super().__call__((item["index"], item["length"]))

    def dataset(lengths: list[int]) -> Dataset:
        return Dataset.from_dict({"index": range(len(lengths)), "length": lengths})

    options = {"observer": OfColumns(), **mode}
    before, state = run(LENGTHS, stop_after=4, dataset=dataset(LENGTHS), **options)
    after, _ = run(LENGTHS, state=state, dataset=dataset(LENGTHS), **options)
    assert ids_of(before) + ids_of(after) == usable(LENGTHS)
    refused(state, "fingerprint was", dataset=dataset([*LENGTHS[:-1], 1]), **options)


def test_an_order_that_changes_once_a_state_is_loaded_is_refused() -> None:
    """As that of a generator from which something else draws meanwhile; samples would be lost in silence."""
    order = list(range(len(LENGTHS)))
    _, state = run(LENGTHS, stop_after=4, sampler=order, **EIGHT)

    def drive(seat: Any) -> None:
        with open_loader(LENGTHS, seat, sampler=order, **EIGHT) as loader:
            loader.load_state_dict(state)
            order.reverse()
            loader.begin()

    (ended,) = run_ranks(1, drive)
    assert isinstance(ended, DataError) and "drawn another order" in str(ended) and "ignore_data_skip" in str(ended)


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
    with pytest.raises(ConfigError, match="7 is not a multiple of 2 rows x 2 ranks"):
        run(LENGTHS, world_size=2, **options | {"global_batch_size": 7})


# Ranks that are not in agreement


def turned(alike: int, rank: int) -> list[int]:
    """An order of 200 rows of which only the first `alike` are the same on all ranks."""
    rest = list(range(alike, 200))
    return [*range(alike), *rest[rank:], *rest[:rank]]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("alike", "size"), [(0, 10), (70, 10), (100, 7), (198, 50), (198, 8)])
def test_orders_that_differ_anywhere_are_noticed(alike: int, size: int, drop_last: bool) -> None:
    """I11: before the first optimizer step."""

    def drive(seat: Any) -> Any:
        options = KEEP | {"global_batch_size": size, "drop_last": drop_last}
        steps = []
        with open_loader([5] * 200, seat, sampler=turned(alike, seat.rank), **options) as loader:
            try:
                for one, _, _ in loader:
                    steps.append(one.step.index)
            except CollectiveError as error:
                return steps, str(error)
        return steps, ""

    for steps, message in run_ranks(2, drive):
        assert "the ranks draw their samples in different orders" in message and "\n" not in message
        assert not steps


def test_ranks_that_stand_at_different_optimizer_steps_stop_before_the_first() -> None:
    _, state = run(LENGTHS, stop_after=4, **EIGHT)

    def drive(seat: Any) -> None:
        with open_loader(LENGTHS, seat, shuffle=True, **EIGHT) as loader:
            if seat.rank:
                loader.load_state_dict(state)
            loader.begin()

    for ended in run_ranks(2, drive):
        assert isinstance(ended, CollectiveError)
        assert "optimizer steps done in it (0 on rank 0; 4 on rank 1)" in str(ended)
