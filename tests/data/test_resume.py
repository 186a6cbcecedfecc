"""Stop and resume anywhere, on any ranks and under any budget: each sample left in the epoch comes once (I2), with kept
optimizer steps in the same step (I9)."""

from __future__ import annotations

import json
from collections import Counter
from operator import attrgetter
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import run_ranks
from toy import Observer
from worlds import KEEP, LENGTHS, SplitStream, Stream, ids_of, num_steps, of_steps, open_loader, run, usable

from odb_factory.data.order import MEAN_OF_MICRO_BATCH
from odb_factory.errors import CollectiveError, ConfigError, DataError

EIGHT = KEEP | {"global_batch_size": 8}
"""8 samples an optimizer step, whatever the ranks."""
ORDER = list(range(len(LENGTHS)))
DROPS_LAST = {"drop_last": True, "batch_size": 2}
SPLIT = {"world_size": 2, "stream": SplitStream}
KEPT_SPLIT = SPLIT | KEEP | {"batch_size": 2, "accumulation": 2}
MODES = [
    {"world_size": 1, "accumulation": 2, "buffer_size": 5},
    {"world_size": 3, "buffer_size": 64},
    {"world_size": 2, "join": False, "accumulation": 2},
    {"world_size": 3, "balance": True, "accumulation": 2},
    {"world_size": 3, **KEEP, "balance": False},
    {"world_size": 2, **KEEP, **DROPS_LAST, "accumulation": 2, "stock_mean": MEAN_OF_MICRO_BATCH},
    {"world_size": 2, **KEEP, "global_batch_size": 7, "stream": Stream},
    {"world_size": 2, "layout": "flat", "accumulation": 2, "balance": True},
    {"world_size": 2, **KEEP, "layout": "flat"},
    SPLIT,
    KEPT_SPLIT,
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_stop_at_any_step_loses_no_sample(mode: dict[str, Any]) -> None:
    """I2, I3: every sample comes once, and counts continue.

    With kept optimizer steps: the same micro-batches, totals, progress and end as without the stop (I9).
    """
    whole, end = run(LENGTHS, epochs=2, **mode)
    keeps = "global_batch_size" in mode
    covers = mode.get("join") is not False and not mode.get("drop_last")
    if covers:
        assert ids_of(whole) == ids_of(whole, 1) == usable(LENGTHS)
    for stop in range(1, num_steps(whole), 1 if keeps else 3):
        before, state = run(LENGTHS, epochs=2, stop_after=stop, **mode)
        after, end_after = run(LENGTHS, epochs=2, state=state, **mode)
        if keeps:
            assert [a + b for a, b in zip(before, after)] == whole, stop
            assert end_after == end, stop
            continue
        for epoch in (0, 1):
            ids = ids_of(before, epoch) + ids_of(after, epoch)
            assert ids == usable(LENGTHS) if covers else ids <= usable(LENGTHS), (stop, epoch)
        steps = [micro_batch.step for micro_batch in before[0] + after[0] if micro_batch.ends_optimizer_step]
        assert [step.index for step in steps if not step.epoch] == list(range(sum(not step.epoch for step in steps)))
        expected = whole[0][-1].step
        for step in filter(attrgetter("last"), steps):
            assert (step.done, step.rejected.total()) == (expected.done, expected.rejected.total())


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
    """Each sample comes once in the epoch, whatever the number of stops; with kept steps (`size`) in its step (I9)."""
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
    """The state is small, whatever the dataset."""
    settings = KEEP | {"global_batch_size": 64, "token_budget": 160}
    _, state = run([5] * 20_000, stop_after=20, world_size=2, **settings)
    assert state["optimizer_steps"] == 20 and state["planned"] == 1280
    assert len(json.dumps(state)) < 500
    after, _ = run([5] * 20_000, state=state, stop_after=1, **settings)
    assert after[0][0].step.index == 20
    _, state = run([1 + k % 20 for k in range(20_000)], stop_after=50, buffer_size=1024)
    assert len(json.dumps(state)) < 10_000, "with `fill` a number for each sample that is held back"


def test_a_loop_may_fetch_ahead_of_the_step_it_has_trained() -> None:
    """A prefetching loop has the next micro-batch, or the next epoch, when it reports a step as done. A step that was
    not reported is done with a later step."""

    def drive(seat: Any) -> list[dict[str, Any]]:
        states, before = [], None
        with open_loader(LENGTHS, seat, shuffle=True, **EIGHT) as loader:
            for epoch, num_steps in ((0, 8), (1, 2)):
                loader.set_epoch(epoch)
                for micro_batch, _, _ in loader:
                    if before is not None and before.ends_optimizer_step and before.step.index not in (1, 2, 3):
                        loader.consume(before.step)
                        states.append(loader.state_dict())
                    before = micro_batch
                    if before.step.index == num_steps:
                        break
        return states

    (states,) = run_ranks(1, drive)
    reached = [(0, 1), (0, 5), (0, 6), (0, 7), (1, 0), (1, 1)]
    assert [(state["epoch"], state["optimizer_steps"]) for state in states] == reached
    for (epoch, steps), state in zip(reached, states):
        assert state == run(LENGTHS, epochs=2, stop_after=8 * epoch + steps, **EIGHT)[1]


# Another training


def refused(state: Any, *words: str, lengths: Any = LENGTHS, **options: Any) -> None:
    """The message is one line that names the way out."""
    with pytest.raises(DataError) as caught:
        run(lengths, state=state, **options)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in (*words, "ignore_data_skip")), message


@pytest.mark.parametrize(
    ("mode", "changed", "word"),
    [
        ({}, {"lengths": LENGTHS[:-1]}, "samples was 60, is 59"),
        (EIGHT, {"seed": 8}, "seed was 7, is 8"),
        (EIGHT | {"sampler": ORDER}, {"sampler": ORDER[::-1]}, "another order"),
        (EIGHT, {"global_batch_size": 16}, "ranks) was 8, is 16"),
        (EIGHT, {"drop_last": True, "batch_size": 8}, "samples was 60, is 56"),
        (EIGHT, {"stream": Stream}, "samples was 60, is None"),
        (EIGHT, {"global_batch_size": "fill"}, "ranks) was 8, is fill"),
        ({}, EIGHT, "ranks) was fill, is 8"),
        (SPLIT, {"world_size": 1}, "split_among was 2, is 1"),
        (KEPT_SPLIT, {"world_size": 1}, "split_among was 2, is 1"),
    ],
    ids=str,
)
def test_another_training_is_refused(mode: dict[str, Any], changed: dict[str, Any], word: str) -> None:
    _, state = run(LENGTHS, stop_after=4, **mode)
    refused(state, word, **mode | changed)


@pytest.mark.parametrize("mode", [{}, EIGHT], ids=["fill", "keep"])
def test_another_dataset_is_refused(mode: dict[str, Any]) -> None:
    """The other dataset has as many rows; `datasets` distinguishes the two."""

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


def test_a_split_stream_has_steps_of_whole_micro_batches() -> None:
    with pytest.raises(ConfigError, match="7 is not a multiple of 2 rows x 2 ranks"):
        run(LENGTHS, **KEPT_SPLIT | {"global_batch_size": 7})


# Ranks that differ stop before the first optimizer step (I11)


def turned(alike: int, rank: int) -> list[int]:
    """An order of 200 rows: the first `alike` are the same on all ranks."""
    rest = list(range(alike, 200))
    return [*range(alike), *rest[rank:], *rest[:rank]]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("alike", "size"), [(0, 10), (70, 10), (100, 7), (198, 50), (198, 8)])
def test_orders_that_differ_anywhere_are_noticed(alike: int, size: int, drop_last: bool) -> None:
    def drive(seat: Any) -> None:
        options = KEEP | {"global_batch_size": size, "drop_last": drop_last}
        with open_loader([5] * 200, seat, sampler=turned(alike, seat.rank), **options) as loader:
            next(iter(loader))

    for error in run_ranks(2, drive):
        assert isinstance(error, CollectiveError)
        assert "the ranks draw their samples in different orders" in str(error) and "\n" not in str(error)


def test_ranks_that_are_at_different_optimizer_steps_are_noticed() -> None:
    _, state = run(LENGTHS, stop_after=4, **EIGHT)

    def drive(seat: Any) -> None:
        with open_loader(LENGTHS, seat, shuffle=True, **EIGHT) as loader:
            if seat.rank:
                loader.load_state_dict(state)
            loader.begin()

    for error in run_ranks(2, drive):
        assert isinstance(error, CollectiveError)
        assert "optimizer steps done in it (0 on rank 0; 4 on rank 1)" in str(error)
