"""A resume of kept optimizer steps is a cursor: the same training goes on, on any ranks and under any budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
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
from thread_ranks import run_ranks

from odb_factory.data.order import StockMean
from odb_factory.data.state import read_state
from odb_factory.errors import CollectiveError, ConfigError, DataError

EIGHT = KEEP | {"global_batch_size": 8}
"""N whatever the ranks."""


def one_line(error: pytest.ExceptionInfo[Exception], *words: str) -> str:
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


# The same training goes on

WAYS = [
    {"world_size": 2},
    {"world_size": 3, "balance": False},
    {"world_size": 1, "token_budget": 64, "buffer_size": 100},
    {"world_size": 5, "token_budget": 20, "overlong": "singleton"},
    {"world_size": 1, "num_workers": 2, "collate_workers": 1},
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
        figures[step.epoch, step.index] = (step.done, step.rejected, step.not_trained, step.last, step.tokens)
    assert taken == expected
    assert figures == {
        (s.epoch, s.index): (s.done, s.rejected, s.not_trained, s.last, s.tokens)
        for s in (one.step for one in whole[0])
    }


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=30).filter(any),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([24, 64]), st.integers(1, 4)), min_size=1, max_size=3),
    st.sampled_from([None, Stream]),
)
def test_any_ranks_after_any(
    lengths: list[int], size: int, stops: list[tuple[int, int, int]], stream: type[Stream] | None
) -> None:
    options = KEEP | {"global_batch_size": size, "stream": stream}
    if size < len(lengths) and not any(lengths[:size]):
        lengths = [5, *lengths]
    whole, _ = run(lengths, **options)
    states, taken = None, {}
    for world_size, budget, steps in [*stops, (2, 32, 100)]:
        done, states = run(
            lengths, states=states, stop_after=steps, **options | {"world_size": world_size, "token_budget": budget}
        )
        taken |= of_steps(done)
        if done[0][-1].step.last:
            break
    assert taken == of_steps(whole) and ids_of(done) <= usable(lengths)


def test_the_state_is_a_cursor_and_the_same_on_all_ranks() -> None:
    """Less than a kilobyte, whatever the dataset; one rank's tells all."""
    _, states = run([5] * 20_000, stop_after=20, world_size=2, **KEEP | {"global_batch_size": 64, "token_budget": 160})
    own = [{key: value for key, value in state.items() if key not in ("rank", "probes")} for state in states]
    assert own[0] == own[1] and own[0]["optimizer_steps"] == 20 and own[0]["trained"] == 1280
    assert len(json.dumps(states[0])) < 1000
    after, _ = run(
        [5] * 20_000, states=states[1:], stop_after=1, **KEEP | {"global_batch_size": 64, "token_budget": 160}
    )
    assert after[0][0].step.index == 20


def test_between_two_epochs_the_next_one_begins() -> None:
    whole, _ = run(LENGTHS, epochs=2, **EIGHT)
    _, states = run(LENGTHS, epochs=1, **EIGHT)
    assert (states[0]["epoch"], states[0]["optimizer_steps"]) == (1, 0)
    after, _ = run(LENGTHS, epochs=2, states=states, **EIGHT | {"world_size": 2})
    assert of_steps(after) == {key: ids for key, ids in of_steps(whole).items() if key[0] == 1}


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
    with pytest.raises(DataError) as caught:
        run(LENGTHS, skip={"optimizer_steps": 3, "epochs": 0.3}, stream=Stream, **EIGHT)
    one_line(caught, "without a length", "resume: ignore_data")


# What is not the same training

OTHERS = [
    ({"seed": 8}, "seed was 7, is 8"),
    ({"lengths": LENGTHS[:-1]}, "samples was 60, is 59"),
    ({"global_batch_size": 16}, "global_batch_size was 8, is 16"),
    ({"drop_last": True, "batch_size": 8}, "left_out_by_drop_last was 0, is 4"),
    ({"stream": Stream}, "samples was 60, is None"),
]


@pytest.mark.parametrize(("changed", "word"), OTHERS, ids=[word for _, word in OTHERS])
def test_another_training_is_refused_unless_that_is_wanted(changed: dict[str, Any], word: str) -> None:
    _, states = run(LENGTHS, stop_after=4, **EIGHT)
    options = EIGHT | changed
    lengths = options.pop("lengths", LENGTHS)
    with pytest.raises(DataError) as caught:
        run(lengths, states=states, **options)
    one_line(caught, word, "resume: ignore_data")
    taken, _ = run(lengths, states=states, resume="ignore_data", **options)
    assert taken[0][0].step.index == 0


def test_another_order_with_the_same_seed_is_refused() -> None:
    """A sampler that draws by another rule than before."""
    _, states = run(LENGTHS, stop_after=4, **EIGHT)
    states[0]["data"]["order"] += 1
    with pytest.raises(DataError) as caught:
        run(LENGTHS, states=states, **EIGHT)
    one_line(caught, "order", "resume: ignore_data")


@pytest.mark.parametrize(("then", "now"), [(EIGHT, {}), ({}, EIGHT)], ids=["keep to fill", "fill to keep"])
def test_a_state_of_the_other_mode_is_refused(then: dict[str, Any], now: dict[str, Any]) -> None:
    _, states = run(LENGTHS, stop_after=4, **then)
    with pytest.raises(DataError) as caught:
        run(LENGTHS, states=states, **now)
    one_line(caught, "global_batch_size", f"`{'keep' if then else 'fill'}`", "resume: ignore_data")
    taken, _ = run(LENGTHS, states=states, resume="ignore_data", **now)
    assert ids_of(taken) == usable(LENGTHS)


@pytest.mark.parametrize("at_end", [False, True])
def test_rows_that_say_something_else_are_noticed(at_end: bool) -> None:
    """A few of those trained on last are read again, on any ranks."""
    taken, states = run(LENGTHS, stop_after=8 if at_end else 4, epochs=2, **EIGHT)
    changed = Observer({taken[0][-1].ids[0]: 2})
    for way in WAYS[:2]:
        with pytest.raises(DataError) as caught:
            run(LENGTHS, states=states, epochs=2, observer=changed, **EIGHT | way)
        one_line(caught, "was trained on, and now: it says something else", "resume: ignore_data")


def test_a_stream_that_was_split_goes_on_with_the_same_ranks_alone() -> None:
    options = EIGHT | {"stream": SplitStream, "batch_size": 2, "accumulation": 2, "global_batch_size": "keep"}
    whole, _ = run(LENGTHS, world_size=2, **options)
    before, states = run(LENGTHS, world_size=2, stop_after=3, **options)
    after, _ = run(LENGTHS, world_size=2, states=states, own_state=True, **options)
    assert of_steps(before) | of_steps(after) == of_steps(whole)
    with pytest.raises(DataError) as caught:
        run(LENGTHS, world_size=1, states=states, **options | {"accumulation": 4})
    one_line(caught, "ranks 2 -> 1", "resume: ignore_data")
    with pytest.raises(ConfigError, match="7 is no multiple of 2 rows x 2 ranks"):
        run(LENGTHS, world_size=2, **options | {"global_batch_size": 7})


EDITS = [
    ("rank", 1, "`rank` is 1, not 0 to 0"),
    ("world_size", 0, "`world_size` is 0"),
    ("epoch", -1, "`epoch` is -1"),
    ("data", [], "`data` is [], not an object"),
    ("data.samples", "60", "`data.samples` is '60'"),
    ("data.global_batch_size", 0, "`data.global_batch_size` is 0"),
    ("data.split", None, "`data.split` is None, not true or false"),
    ("data.split", True, "split was True, is False"),
    ("optimizer_steps", 2.5, "`optimizer_steps` is 2.5, not a whole number"),
    ("optimizer_steps", 8, "an epoch has 60 samples"),
    ("optimizer_steps", 3, "24 samples were drawn"),
    ("trained", 33, "32 samples were drawn"),
    ("trained", None, "`trained` is None"),
    ("rejected", {"invalid": -1}, "`rejected.invalid` is -1"),
    ("rejected", {"invalid": 10}, "32 samples were drawn"),
    ("overlong", True, "`overlong` is True"),
    ("probes", [[1]], "`probes[0]` is [1], not 2 values"),
    ("share", {"done_before": None, "drawn": 0, "waiting": []}, "but `mode` is keep"),
    ("mode", "both", "`mode` is 'both', not keep or fill"),
    ("version", 3, "version 3"),
]


@pytest.fixture(scope="module")
def stopped() -> dict[str, Any]:
    _, (state,) = run(LENGTHS, stop_after=4, **EIGHT)
    return state


@pytest.mark.parametrize(("path", "value", "words"), EDITS, ids=[f"{path} {value}" for path, value, _ in EDITS])
def test_a_state_that_contradicts_itself_is_refused(path: str, value: Any, words: str, stopped: Any) -> None:
    """In one line that names the field and the way out; `resume: ignore_data` takes it all the same."""
    state = edited(stopped, path, value)
    with pytest.raises(DataError) as caught:
        run(LENGTHS, states=[state], **EIGHT)
    one_line(caught, words, "resume: ignore_data")
    taken, _ = run(LENGTHS, states=[state], resume="ignore_data", **EIGHT)
    assert ids_of(taken, max(state["epoch"], 0)) == usable(LENGTHS)


def test_a_state_without_a_field_is_refused(stopped: dict[str, Any]) -> None:
    assert json.loads(json.dumps(read_state(stopped).to_dict())) == stopped
    for key in stopped:
        with pytest.raises(DataError, match=f"`{key}` is missing"):
            run(LENGTHS, states=[{name: value for name, value in stopped.items() if name != key}], **EIGHT)


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


DIFFERENCES = [
    ({"batch_size": 1}, {"batch_size": 2}, "per_device_train_batch_size (1 on rank 0; 2 on rank 1)"),
    ({}, {"accumulation": 8}, "gradient_accumulation_steps (4 on rank 0; 8 on rank 1)"),
    ({}, {"global_batch_size": 16}, "odb.global_batch_size ('keep' on rank 0; 16 on rank 1)"),
    ({}, {"global_batch_size": "fill"}, "odb.global_batch_size ('keep' on rank 0; 'fill' on rank 1)"),
    ({}, {"drop_last": True}, "drop_last (False on rank 0; True on rank 1)"),
    ({}, {"stock_mean": StockMean("rank")}, "what stock's loss is the mean of ('step' on rank 0; 'rank' on rank 1)"),
    ({}, {"balance": False}, "odb.balance (True on rank 0; False on rank 1)"),
    ({}, {"loss_scaling": "exact"}, "odb.loss_scaling ('stock' on rank 0; 'exact' on rank 1)"),
]


@pytest.mark.parametrize(("one", "other", "words"), DIFFERENCES, ids=[words for _, _, words in DIFFERENCES])
def test_ranks_with_other_settings_stop_before_the_first_step(
    one: dict[str, Any], other: dict[str, Any], words: str
) -> None:
    """I11."""

    def drive(seat: Any) -> str:
        loader = make_loader(LENGTHS, seat, **KEEP | (one, other)[seat.rank])
        try:
            loader.begin()
        except CollectiveError as error:
            return str(error)
        finally:
            loader.close()
        return ""

    for message in run_ranks(2, drive):
        assert words in message and "\n" not in message


def test_ranks_that_stand_at_different_optimizer_steps_stop_before_the_first(stopped: dict[str, Any]) -> None:
    def drive(seat: Any) -> str:
        loader = make_loader(LENGTHS, seat, **EIGHT)
        try:
            if seat.rank:
                loader.load_state_dict([stopped])
            loader.begin()
        except CollectiveError as error:
            return str(error)
        finally:
            loader.close()
        return ""

    for message in run_ranks(2, drive):
        assert "optimizer steps done in it (0 on rank 0; 4 on rank 1)" in message
