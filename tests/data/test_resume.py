"""Stop anywhere, resume anywhere: what is left of an epoch comes once; with nothing changed, in the same steps."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from data.stops import KEEP, LENGTHS, Observer, Stream, edited, ids_of, make_loader, num_steps, run, usable
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import Table

from odb_factory.data.order import OF_MICRO_BATCH
from odb_factory.data.state import pack_done
from odb_factory.data.step_times import StepTimes
from odb_factory.errors import DataError
from odb_factory.planning import Cost, CostModel

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


def check_every_stop(lengths: Sequence[int], *, epochs: int = 2, **mode: Any) -> list[list[Any]]:
    """Save and restore behind every optimizer step: what follows is what follows in the run that was not stopped.

    Each rank goes on from its own state alone. Returns the micro-batches of each rank of the whole run.
    """
    whole, end = run(lengths, epochs=epochs, **mode)
    for stop in range(1, num_steps(whole)):
        before, states = run(lengths, epochs=epochs, stop_after=stop, **mode)
        after, end_after = run(lengths, epochs=epochs, states=states, own_state=True, **mode)
        assert [a + b for a, b in zip(before, after)] == whole, stop
        assert end_after == end, stop
    return whole


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_stopped_at_every_step_it_goes_on_as_if_it_had_not_been(mode: dict[str, Any]) -> None:
    """Over two epochs: the same micro-batches, ids, totals, progress and ends, from this rank's own state."""
    whole = check_every_stop(LENGTHS, **mode)
    if mode.get("join") is not False and not mode.get("drop_last"):
        assert ids_of(whole) == ids_of(whole, 1) == usable(LENGTHS)


@pytest.mark.parametrize("balance", [False, True])
def test_a_plan_by_measured_times_loses_nothing_over_a_stop(balance: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: each run, rank and round measures something else; a round that was under way is planned again as it was."""
    measured = (CostModel(k * 7919 % 101, k * 31 % 7, 0, k % 3) for k in itertools.count(1))
    monkeypatch.setattr(StepTimes, "fit", lambda self: next(measured))
    mode = {"world_size": 2, "cost_model": "time", "balance": balance, "accumulation": 2}
    for stop in range(1, num_steps(run(LENGTHS, **mode)[0]), 2):
        before, states = run(LENGTHS, stop_after=stop, **mode)
        after, _ = run(LENGTHS, states=states, **mode)
        assert ids_of(before) + ids_of(after) == usable(LENGTHS), stop


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


def test_in_another_layout_the_rest_of_an_epoch_is_dealt_out_anew(caplog: pytest.LogCaptureFixture) -> None:
    """What `auto` is resolved to may change with the machine; every row is trained on once all the same."""
    mode = {"world_size": 2, "accumulation": 2}
    before, states = run(LENGTHS, stop_after=2, **mode)
    with caplog.at_level(logging.INFO, "odb_factory"):
        after, _ = run(LENGTHS, states=states, layout="flat", pad_to_multiple_of=4, **mode)
    assert ids_of(before) + ids_of(after) == usable(LENGTHS)
    assert "layout 'padded' -> 'flat', pad_to_multiple_of 1 -> 4" in caplog.text


def test_a_waiting_row_that_has_changed_is_noticed() -> None:
    _, states = run(LENGTHS, stop_after=4)
    changed = [length and length + 1 for length in LENGTHS]
    with pytest.raises(DataError, match="changed since the checkpoint.*resume: ignore_data"):
        run(changed, states=states)


def changed_at(stop: int, which: str) -> dict[int, int]:
    """A row that says something else in as many tokens. which: it waits at that stop, or was consumed just before."""
    (micro_batches,), _ = run(LENGTHS)
    if which == "consumed":
        return {micro_batches[stop - 1].ids[0]: 2}
    _, (state,) = run(LENGTHS, stop_after=stop)
    waits = set(state["snapshot"]["held"]["draw"] + state["snapshot"]["next"]["draw"])
    waiting = (id for one in micro_batches[stop:] for id, draw in zip(one.ids, one.positions) if draw in waits)
    return {next(waiting): 2}


@pytest.mark.parametrize("stop", [7, 9])
@pytest.mark.parametrize("which", ["waiting", "consumed"])
def test_a_row_that_says_something_else_in_as_many_tokens_is_noticed(stop: int, which: str) -> None:
    """Before anything is trained on; and it is not called another version's plan."""
    _, states = run(LENGTHS, stop_after=stop)
    with pytest.raises(DataError, match="have changed since the checkpoint.*resume: ignore_data") as caught:
        run(LENGTHS, states=states, observer=Observer(changed_at(stop, which)))
    assert "comes out otherwise" not in str(caught.value)


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
    ("world_size", 0, "`world_size` is 0"),
    ("epoch", -1, "`epoch` is -1"),
    ("data", [], "`data` is [], not an object"),
    ("data.samples", 12.5, "`data.samples` is 12.5"),
    ("data.split", None, "`data.split`"),
    ("plan", "x", "`plan`"),
    ("done", "@@@@", "`done` is '@@@@', not text in base64"),
    ("done", "AAAA", "`done` cannot be unpacked"),
    ("done", lambda _: pack_done(np.ones(16, dtype=bool)), "`done` marks 16 positions of an order of 60"),
    ("consumed", 0, "`consumed` is 0, but a round is under way"),
    ("consumed", True, "`consumed` is True"),
    ("snapshot", None, "no round is under way"),
    ("snapshot.held", {}, "`snapshot.held.draw` is missing"),
    ("snapshot.held.draw", lambda draws: [draws[0]] * len(draws), "`snapshot.held` is"),
    ("snapshot.held.age", lambda ages: ages[1:], "columns differ in length"),
    ("snapshot.held.draw", lambda draws: [10**6, *draws[1:]], "`snapshot.drawn`"),
    ("snapshot.held.content", "AAA=", "not four for each sample"),
    ("snapshot.drawn", 1, "`snapshot.drawn` is 1"),
    ("snapshot.steps", 10**6, "`snapshot.steps` is 1000000"),
    ("snapshot.emitted", 10**6, "an epoch has 60 samples"),
    ("snapshot.rejected", {"invalid": -1}, "`snapshot.rejected.invalid` is -1"),
    ("snapshot.rejected", {"invalid": 50}, "more samples are held or rejected"),
    ("snapshot.model.token", None, "`snapshot.model.token`"),
    ("emitted", lambda draws: draws + draws[:1], "`emitted`"),
    ("emitted", lambda draws: [0, *draws], "these samples were not in the buffer"),
    ("probes.rows", [1], "`probes.rows`"),
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
    """A state in the middle of an epoch and of a round, with samples held back from the one before."""
    for stop in range(6, 20):
        _, (state,) = run(LENGTHS, stop_after=stop, buffer_size=16)
        if len(state["snapshot"]["held"]["draw"]) > 1 and state["emitted"]:
            return state
    raise AssertionError("no round holds samples back")


@pytest.mark.parametrize("nothing", [None, [], "x", {}, 7], ids=str)
def test_what_is_no_state_is_refused(nothing: Any) -> None:
    with pytest.raises(DataError, match="data state cannot be read.*resume: ignore_data"):
        run(LENGTHS, states=[nothing])
    assert ids_of(run(LENGTHS, states=[nothing], resume="ignore_data")[0]) == usable(LENGTHS)


def test_more_steps_than_the_round_has_are_not_consumed() -> None:
    _, (state,) = run(LENGTHS, stop_after=4)
    with pytest.raises(DataError, match="comes out otherwise now"):
        run(LENGTHS, states=[state | {"consumed": 10**6}])


def test_a_planner_that_has_changed_is_noticed() -> None:
    """What is left of the round under way could not be told: samples would come twice, others never."""
    _, states = run(LENGTHS, stop_after=5)
    assert len(states[0]["emitted"]) > 1
    with pytest.raises(DataError, match="comes out otherwise now"):
        run(LENGTHS, states=[states[0] | {"emitted": states[0]["emitted"][::-1]}])


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
    done = np.random.default_rng(0).random(10_000_000) < 0.5
    assert len(pack_done(done)) < 2_000_000
