"""Stop anywhere, resume anywhere: what is left of an epoch comes once; with kept optimizer steps in the same steps.

With `keep` a resume is a cursor: the same training goes on, on any ranks and under any budget (I9). With `fill` each
rank goes on with its share, or, with other ranks, the rest is dealt out anew (I2).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from data.stops import (
    KEEP,
    LENGTHS,
    Observer,
    SplitStream,
    Stream,
    edited,
    ids_of,
    make_loader,
    num_steps,
    of_steps,
    run,
    usable,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import Table, run_ranks

from odb_factory.data.order import MEAN_OF_MICRO_BATCH
from odb_factory.data.progress import read_state
from odb_factory.data.saved import dump
from odb_factory.errors import CollectiveError, ConfigError, DataError
from odb_factory.planning import Cost

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
    states, taken, seen = None, {}, Counter[int]()
    for (change, steps), accumulation in zip([*stops, ({"world_size": 2}, None)], accumulations):
        mode = {"accumulation": accumulation, **kept, **change}
        done, states = run(lengths, states=states, stop_after=steps, stream=stream, **mode)
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
    states, taken, figures = None, {}, {}
    for stop in range(num_steps(whole)):
        done, states = run(
            LENGTHS, epochs=2, states=states, stop_after=1, stream=stream, **EIGHT | ways[stop % len(ways)]
        )
        taken |= of_steps(done)
        step = done[0][0].step
        figures[step.epoch, step.index] = (step.done, step.rejected, step.remainder, step.last, step.tokens)
    assert taken == expected
    assert figures == {
        (s.epoch, s.index): (s.done, s.rejected, s.remainder, s.last, s.tokens) for s in (one.step for one in whole[0])
    }


def test_the_state_is_a_cursor_and_the_same_on_all_ranks() -> None:
    """Less than a kilobyte, whatever the dataset; one rank's tells all."""
    _, states = run([5] * 20_000, stop_after=20, world_size=2, **KEEP | {"global_batch_size": 64, "token_budget": 160})
    own = [{key: value for key, value in state.items() if key not in ("rank", "probes")} for state in states]
    assert own[0] == own[1] and own[0]["optimizer_steps"] == 20 and own[0]["planned"] == 1280
    assert len(json.dumps(states[0])) < 1000
    after, _ = run(
        [5] * 20_000, states=states[1:], stop_after=1, **KEEP | {"global_batch_size": 64, "token_budget": 160}
    )
    assert after[0][0].step.index == 20


def test_a_loop_may_fetch_ahead_of_what_it_has_trained_on() -> None:
    """A prefetching loop has the next micro-batch, or the end of the epoch, when it says that a step is done."""
    whole, _ = run(LENGTHS, epochs=2, **EIGHT)

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
    for state in states:
        place = (state["epoch"], state["optimizer_steps"])
        done = [id for one in whole[0] for id in one.ids if (one.step.epoch, one.step.index) < place]
        assert [row for row, _ in state["probes"]] == done[-8:], "rows of steps that are done, and of no other"


def test_steps_that_were_not_named_one_by_one_are_done_with_a_later_one() -> None:
    _, (expected,) = run(LENGTHS, stop_after=5, **EIGHT)

    def drive(seat: Any) -> dict[str, Any]:
        loader = make_loader(LENGTHS, seat, **EIGHT)
        step = next(one.step for one, _, _ in loader if one.step.index == 4 and one.ends_optimizer_step)
        loader.consume(step)
        state = loader.state_dict()
        loader.close()
        return state

    (state,) = run_ranks(1, drive)
    assert json.loads(json.dumps(state)) == expected


# From a training without odb


@pytest.mark.parametrize("steps", [0, 1, 5, 8, 11])
def test_a_checkpoint_of_stock_is_gone_on_from(steps: int) -> None:
    """Its optimizer steps are ours: as many are passed over, whatever the share of an epoch that it tells."""
    whole, _ = run(LENGTHS, epochs=2, **EIGHT)
    after, _ = run(LENGTHS, epochs=2, skip={"optimizer_steps": steps, "epochs": 0.3}, **EIGHT | {"world_size": 2})
    assert list(of_steps(after).items()) == list(of_steps(whole).items())[steps:]
    passed = {(one.step.epoch, one.step.index): one.step.done for one in whole[0]}
    assert all(passed[one.step.epoch, one.step.index] == one.step.done for one in after[0])


def test_a_checkpoint_of_stock_says_nothing_of_a_stream() -> None:
    with pytest.raises(DataError, match="without a length.*resume: ignore_data"):
        run(LENGTHS, skip={"optimizer_steps": 3, "epochs": 0.3}, stream=Stream, **EIGHT)


# What is not the same training


def refused(states: list[Any], *words: str, lengths: Any = LENGTHS, **options: Any) -> None:
    """In one line that names the way out."""
    with pytest.raises(DataError) as caught:
        run(lengths, states=states, **options)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in (*words, "resume: ignore_data")), message


@pytest.mark.parametrize(
    ("mode", "changed", "word"),
    [
        ({}, {"seed": 8}, "seed was 7, is 8"),
        ({}, {"lengths": LENGTHS[:-1]}, "samples was 60, is 59"),
        (EIGHT, {"seed": 8}, "seed was 7, is 8"),
        (EIGHT, {"lengths": LENGTHS[:-1]}, "samples was 60, is 59"),
        (EIGHT, {"global_batch_size": 16}, "global_batch_size was 8, is 16"),
        (EIGHT, {"drop_last": True, "batch_size": 8}, "drop_last_remainder was 0, is 4"),
        (EIGHT, {"stream": Stream}, "samples was 60, is None"),
        (EIGHT, {"global_batch_size": "fill"}, "global_batch_size: the state was written with `keep`"),
        ({}, EIGHT, "global_batch_size: the state was written with `fill`"),
    ],
    ids=str,
)
def test_another_training_is_refused_unless_that_is_wanted(
    mode: dict[str, Any], changed: dict[str, Any], word: str
) -> None:
    _, states = run(LENGTHS, stop_after=4, **mode)
    options = {"lengths": LENGTHS} | mode | changed
    refused(states, word, **options)
    lengths = options.pop("lengths")
    taken, _ = run(lengths, states=states, resume="ignore_data", **options)
    assert taken[0][0].step.index == 0 and ("drop_last" in options or ids_of(taken) == usable(lengths))


def test_another_order_with_the_same_seed_is_refused() -> None:
    """A sampler that draws by another rule than before."""
    _, states = run(LENGTHS, stop_after=4, **EIGHT)
    states[0]["data"]["order"] += 1
    refused(states, "order", **EIGHT)


@pytest.mark.parametrize("mode", [{}, EIGHT], ids=["fill", "keep"])
@pytest.mark.parametrize("at_end", [False, True])
def test_rows_that_say_something_else_are_noticed(mode: dict[str, Any], at_end: bool) -> None:
    """A few of those trained on last are read again; in an epoch and at its end, on any ranks, with any settings."""
    stop = num_steps(run(LENGTHS, **mode)[0]) if at_end else 4
    taken, states = run(LENGTHS, stop_after=stop, epochs=2, **mode)
    assert taken[0][-1].step.last == at_end
    changed = Observer({taken[0][-1].ids[0]: 2})
    for way in ({}, {"world_size": 2}, {"token_budget": 64}):
        refused(states, "was trained on, and now: it says something else", epochs=2, observer=changed, **mode | way)


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


def test_a_stream_that_was_split_goes_on_with_the_same_ranks_alone() -> None:
    filled, states = run(LENGTHS, world_size=2, stop_after=3, stream=SplitStream)
    rest, _ = run(LENGTHS, world_size=2, stream=SplitStream, states=states, own_state=True)
    assert ids_of(filled) + ids_of(rest) == ids_of(run(LENGTHS, world_size=2, stream=SplitStream)[0])
    refused(states, "ranks 2 -> 1: a stream that was split", stream=SplitStream)
    refused(states[::-1][:1], "the state of rank 1 for rank 0: a stream", stream=SplitStream, world_size=2)
    options = EIGHT | {"stream": SplitStream, "batch_size": 2, "accumulation": 2, "global_batch_size": "keep"}
    whole, _ = run(LENGTHS, world_size=2, **options)
    before, states = run(LENGTHS, world_size=2, stop_after=3, **options)
    after, _ = run(LENGTHS, world_size=2, states=states, own_state=True, **options)
    assert of_steps(before) | of_steps(after) == of_steps(whole)
    refused(states, "ranks 2 -> 1", **options | {"accumulation": 4})
    with pytest.raises(ConfigError, match="7 is no multiple of 2 rows x 2 ranks"):
        run(LENGTHS, world_size=2, **options | {"global_batch_size": 7})


BOTH = [
    ("rank", 1, "`rank` is 1, not 0 to 0"),
    ("rank", "0", "`rank` is '0', not a whole number"),
    ("world_size", 0, "`world_size` is 0, not at least 1"),
    ("epoch", -1, "`epoch` is -1"),
    ("data", [], "`data` is [], not an object"),
    ("data.samples", 12.5, "`data.samples` is 12.5"),
    ("data.split", None, "`data.split` is None, not true or false"),
    ("data.split", True, "split was True, is False"),
    ("rejected", {"invalid": -1}, "`rejected.invalid` is -1"),
    ("rejected", 3, "`rejected` is 3, not an object"),
    ("overlong", True, "`overlong` is True"),
    ("probes", [[1]], "`probes[0]` is [1], not 2 values"),
    ("rows_from", {"overlong": 3}, "`rows_from.overlong` is 3, not text"),
    ("version", 7, "version 7"),
    ("version", None, "version None"),
]
KEPT = [
    ("data.global_batch_size", 0, "`data.global_batch_size` is 0"),
    ("optimizer_steps", 2.5, "`optimizer_steps` is 2.5, not a whole number"),
    ("optimizer_steps", 8, "an epoch has 60 samples"),
    ("optimizer_steps", 3, "24 samples were drawn"),
    ("planned", 33, "32 samples were drawn"),
    ("planned", None, "`planned` is None"),
    ("rejected", {"invalid": 10}, "32 samples were drawn"),
    ("share", {"done_before": None, "drawn": 0, "waiting": []}, "but `mode` is keep"),
]
FILLED = [
    ("planned", 61, "`planned` is 61, but an epoch has 60 samples"),
    ("rejected", {"invalid": 55}, "an epoch has 60 samples"),
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
]
EDITS = [(mode, *edit) for mode, edits in (("keep", BOTH + KEPT), ("fill", BOTH + FILLED)) for edit in edits]
STATE_MODES: dict[str, dict[str, Any]] = {"keep": EIGHT, "fill": {"buffer_size": 16}}


@pytest.fixture(scope="module")
def stopped() -> dict[str, Any]:
    """By mode: a state in the middle of an epoch; with `fill` samples are held back."""
    states = {
        mode: run(LENGTHS, stop_after=4 if mode == "keep" else 9, **options)[1][0]
        for mode, options in STATE_MODES.items()
    }
    assert len(states["fill"]["share"]["waiting"]) > 1
    return states


@pytest.mark.parametrize(
    ("mode", "path", "value", "words"), EDITS, ids=[f"{mode} {path} {words}" for mode, path, _, words in EDITS]
)
def test_a_state_that_contradicts_itself_is_refused(mode: str, path: str, value: Any, words: str, stopped: Any) -> None:
    """In one line that names the field and the way out; `resume: ignore_data` takes it all the same."""
    state = edited(stopped[mode], path, value)
    refused([state], words, **STATE_MODES[mode])
    taken, _ = run(LENGTHS, states=[state], resume="ignore_data", **STATE_MODES[mode])
    assert ids_of(taken, max(state["epoch"], 0)) == usable(LENGTHS)


@pytest.mark.parametrize("mode", STATE_MODES)
def test_a_state_without_a_field_is_refused(mode: str, stopped: dict[str, Any]) -> None:
    state = stopped[mode]
    assert json.loads(json.dumps(read_state(state).to_dict())) == state
    for key in state:
        refused(
            [{name: value for name, value in state.items() if name != key}], f"`{key}` is missing", **STATE_MODES[mode]
        )


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
            loader.load_state_dict([state])
        loader.begin()
    except CollectiveError as error:
        return str(error)
    finally:
        loader.close()
    return ""


def test_ranks_that_stand_at_different_optimizer_steps_stop_before_the_first(stopped: dict[str, Any]) -> None:
    for message in run_ranks(2, lambda seat: begin(seat, stopped["keep"] if seat.rank else None, **EIGHT)):
        assert "optimizer steps done in it (0 on rank 0; 4 on rank 1)" in message


def test_a_state_is_loaded_without_a_random_number() -> None:
    """Rows that are trained on again may draw some."""

    class Drawing(Observer):
        def __call__(self, item: tuple[int, int]) -> tuple[dict[str, Any], Any]:
            torch.rand(1)
            return super().__call__(item)

    _, states = run(LENGTHS, stop_after=2)
    loader = make_loader(LENGTHS, Table(1).seat(0), observer=Drawing())
    before = torch.get_rng_state()
    loader.load_state_dict(states)
    assert torch.equal(torch.get_rng_state(), before)
    loader.close()
