"""Stop anywhere, resume anywhere: what is left of an epoch comes once."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from data.stops import KEEP, LENGTHS, Observer, SplitStream, Stream, edited, ids_of, make_loader, num_steps, run, usable
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import Table

from odb_factory.data.order import OF_MICRO_BATCH
from odb_factory.data.state import dump
from odb_factory.errors import DataError
from odb_factory.planning import Cost

SLOW = pytest.mark.full_grid
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
        "stock_mean": OF_MICRO_BATCH,
    },
    {"world_size": 2, **KEEP, "global_batch_size": 7, "stream": Stream},
    {"world_size": 2, "layout": "flat", "accumulation": 2, "balance": True},
    {"world_size": 2, **KEEP, "layout": "flat"},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_stop_at_any_step_loses_no_sample(mode: dict[str, Any]) -> None:
    """I2, I3: each rank goes on from its own state alone; every sample comes once, and counts go on.

    With kept optimizer steps: the same micro-batches, totals, progress and end as without the stop (I9).
    """
    whole, end = run(LENGTHS, epochs=2, **mode)
    covers = mode.get("join") is not False and not mode.get("drop_last")
    if covers:
        assert ids_of(whole) == ids_of(whole, 1) == usable(LENGTHS)
    stops = num_steps(whole)
    for stop in range(1, stops, 1 if mode.get("global_batch_size") else 3):
        before, states = run(LENGTHS, epochs=2, stop_after=stop, **mode)
        after, end_after = run(LENGTHS, epochs=2, states=states, own_state=True, **mode)
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


@pytest.mark.parametrize("mode", [MODES[1], MODES[5], MODES[6].values[0]], ids=str)
def test_stopped_again_and_again_it_still_loses_no_sample(mode: dict[str, Any]) -> None:
    """I2: a state taken after each optimizer step of a run that goes on from the one before."""
    states, seen = None, Counter[int]()
    while True:
        taken, states = run(LENGTHS, states=states, own_state=True, stop_after=1, **mode)
        seen += ids_of(taken)
        step = taken[0][-1].step
        assert step.done == len(LENGTHS) if step.last and "stream" not in mode else step.done <= len(LENGTHS)
        if step.last:
            break
        assert states[0]["trained"] == seen.total()
    assert seen == usable(LENGTHS)


@pytest.mark.parametrize("mode", [*MODES[:4], MODES[7]], ids=str)
def test_a_state_that_was_loaded_and_not_used_is_the_same_state(mode: dict[str, Any]) -> None:
    """A second stop before the first step loses nothing."""
    _, states = run(LENGTHS, stop_after=3, **mode)
    options = {key: value for key, value in mode.items() if key != "world_size"}
    loader = make_loader(LENGTHS, Table(mode["world_size"]).seat(0), **options)
    loader.load_state_dict(states)
    assert json.loads(json.dumps(loader.state_dict())) == states[0]
    loader.close()


changes = st.fixed_dictionaries(
    {
        "world_size": st.integers(1, 4),
        "buffer_size": st.integers(1, 16),
        "token_budget": st.sampled_from([24, 32, 64]),
        "layout": st.sampled_from(["padded", "flat"]),
    }
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=40).filter(any),
    st.lists(st.tuples(changes, st.integers(1, 6)), min_size=1, max_size=3),
    changes,
    st.sampled_from([None, Stream]),
)
def test_any_ranks_and_settings_after_any(
    lengths: list[int], stops: list[tuple[dict[str, int], int]], last: dict[str, int], stream: Any
) -> None:
    """Identity coverage over the whole epoch, however often it was stopped and with what it went on."""
    seen: Counter = Counter()
    states = None
    for mode, steps in stops:
        done, states = run(lengths, states=states, stop_after=steps, stream=stream, **mode)
        seen += ids_of(done)
        if any(one.step.last for one in done[0]):
            break
    else:
        done, _ = run(lengths, states=states, stream=stream, **last)
        seen += ids_of(done)
    assert seen == usable(lengths)


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"seed": 8}, ("order", "seed was 7, is 8")), ({"lengths": LENGTHS[:-1]}, ("samples was 60, is 59",))],
)
def test_other_data_are_refused_unless_that_is_wanted(changed: dict[str, Any], words: tuple[str, ...]) -> None:
    _, states = run(LENGTHS, stop_after=4)
    lengths = changed.pop("lengths", LENGTHS)
    with pytest.raises(DataError) as caught:
        run(lengths, states=states, **changed)
    assert all(word in str(caught.value) for word in (*words, "resume: ignore_data"))
    steps, _ = run(lengths, states=states, resume="ignore_data", **changed)
    assert ids_of(steps) == usable(lengths)


def test_any_setting_may_change_while_the_ranks_are_the_same() -> None:
    """What `auto` is resolved to may change with the machine; every row is trained on once all the same."""
    mode = {"world_size": 2, "accumulation": 2}
    before, states = run(LENGTHS, stop_after=2, **mode)
    changes = {"layout": "flat", "pad_to_multiple_of": 4, "token_budget": 64, "balance": True, "accumulation": 3}
    after, _ = run(LENGTHS, states=states, own_state=True, **mode | changes)
    assert ids_of(before) + ids_of(after) == usable(LENGTHS)


def test_a_split_stream_goes_on_with_as_many_ranks(caplog: pytest.LogCaptureFixture) -> None:
    before, states = run(LENGTHS, world_size=2, stop_after=3, stream=SplitStream)
    after, _ = run(LENGTHS, world_size=2, stream=SplitStream, states=states, own_state=True)
    assert ids_of(before) + ids_of(after) == ids_of(run(LENGTHS, world_size=2, stream=SplitStream)[0])
    with pytest.raises(DataError, match="ranks 2 -> 1: a stream that was split.*resume: ignore_data"):
        run(LENGTHS, stream=SplitStream, states=states)


@pytest.mark.parametrize("at_end", [False, True])
def test_other_rows_of_the_same_lengths_are_noticed(at_end: bool) -> None:
    """In the middle of an epoch and at its end, where nothing waits; also where the rest is dealt out anew."""
    stop = num_steps(run(LENGTHS)[0]) if at_end else 4
    taken, states = run(LENGTHS, stop_after=stop, epochs=2)
    assert taken[0][-1].step.last == at_end
    others = Observer(dict.fromkeys(range(len(LENGTHS)), 2))
    for changes in ({}, {"world_size": 2}, {"token_budget": 64}):
        with pytest.raises(DataError, match="row .* was trained on, and now: it says something else"):
            run(LENGTHS, states=states, epochs=2, observer=others, **changes)


class Random(Observer):
    """Rows are drawn at random each time they are read."""

    def __call__(self, item: tuple[int, int]) -> tuple[dict[str, Any], Cost]:
        features, cost = super().__call__(item)
        features["input_ids"] = [next(COUNT)] * cost.tokens
        return features, cost


COUNT = itertools.count()


def test_rows_that_are_drawn_at_random_are_not_taken_for_other_data() -> None:
    for stop in (1, 4, 9):
        before, states = run(LENGTHS, stop_after=stop, observer=Random())
        after, _ = run(LENGTHS, states=states, observer=Random())
        assert ids_of(before) + ids_of(after) == usable(LENGTHS)


EDITS = [
    ("rank", 1, "`rank` is 1, not 0 to 0"),
    ("rank", "0", "`rank` is '0', not a whole number"),
    ("world_size", 0, "`world_size` is 0, not at least 1"),
    ("epoch", -1, "`epoch` is -1"),
    ("data", [], "`data` is [], not an object"),
    ("data.samples", 12.5, "`data.samples` is 12.5"),
    ("data.split", None, "`data.split` is None, not true or false"),
    ("trained", 61, "`trained` is 61, but an epoch has 60 samples"),
    ("rejected", {"invalid": -1}, "`rejected.invalid` is -1"),
    ("rejected", {"invalid": 55}, "an epoch has 60 samples"),
    ("rejected", 3, "`rejected` is 3, not an object"),
    ("share", None, "`share` is None, but `mode` is fill"),
    ("share.drawn", 61, "`share.drawn` is 61, but 60 samples were to be drawn"),
    ("share.drawn", 1, "must be of the 1 rows that were drawn"),
    ("share.waiting", {}, "`share.waiting` is {}, not a list"),
    ("share.waiting", lambda draws: draws + draws[:1], "must be of the"),
    ("share.waiting", lambda draws: [*draws, 1.5], "]` is 1.5, not a whole number"),
    ("share.done_before", "@@@@", "`share.done_before` is '@@@@', not text in base64"),
    ("share.done_before", "AAAA", "`share.done_before` cannot be unpacked"),
    ("share.done_before", dump(np.ones(16, dtype=bool)), "`share.done_before` marks 16 positions of an order of 60"),
    ("share.done_before", dump(np.arange(60) < 50), "but 10 samples were to be drawn"),
    ("probes", [[1]], "`probes[0]` is [1], not 2 values"),
    ("rows_from", {"overlong": 3}, "`rows_from.overlong` is 3, not text"),
    ("mode", "both", "`mode` is 'both', not keep or fill"),
    ("version", 2, "version 2"),
    ("version", None, "version None"),
]


@pytest.mark.parametrize(("path", "value", "words"), EDITS, ids=lambda x: x if isinstance(x, str) else None)
def test_a_state_that_contradicts_itself_is_refused(path: str, value: Any, words: str, stopped: Any) -> None:
    """In one line that names the field and the way out; `resume: ignore_data` takes it all the same."""
    state = edited(stopped, path, value)
    with pytest.raises(DataError) as caught:
        run(LENGTHS, states=[state])
    message = str(caught.value)
    assert words in message and "resume: ignore_data" in message and "\n" not in message
    steps, _ = run(LENGTHS, states=[state], resume="ignore_data")
    assert ids_of(steps) == usable(LENGTHS)


@pytest.fixture(scope="module")
def stopped() -> dict[str, Any]:
    """A state in the middle of an epoch, with samples held back."""
    _, (state,) = run(LENGTHS, stop_after=9, buffer_size=16)
    assert len(state["share"]["waiting"]) > 1
    return state


@pytest.mark.parametrize("nothing", [None, [], "x", {}, 7], ids=str)
def test_what_is_no_state_is_refused(nothing: Any) -> None:
    with pytest.raises(DataError, match="data state cannot be read.*resume: ignore_data"):
        run(LENGTHS, states=[nothing])
    assert ids_of(run(LENGTHS, states=[nothing], resume="ignore_data")[0]) == usable(LENGTHS)


def test_states_that_are_not_all_there_are_refused() -> None:
    _, states = run(LENGTHS, stop_after=4, world_size=2)
    with pytest.raises(DataError, match="written by 2 ranks"):
        run(LENGTHS, states=states[:1], world_size=1)
    with pytest.raises(DataError, match="version 99"):
        run(LENGTHS, states=[states[0] | {"version": 99}], world_size=1)


def test_size_of_a_state() -> None:
    """10 million samples: kilobytes; with other ranks than before, a bitmap below 2 MB."""
    _, states = run([1 + k % 20 for k in range(20_000)], stop_after=50, buffer_size=1024)
    assert len(json.dumps(states[0])) < 10_000
    assert len(dump(np.random.default_rng(0).random(10_000_000) < 0.5)) < 2_000_000
