"""Stop anywhere, resume anywhere: what is left of an epoch comes once; with nothing changed, in the same steps."""

from __future__ import annotations

import copy
import itertools
import json
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset
from toy import pad

from odb_factory.comm.codec import Failure, decode, encode
from odb_factory.comm.coordinator import CollectiveError
from odb_factory.config import ODBConfig
from odb_factory.data.done_bitmap import pack_done
from odb_factory.data.loader import ODBLoader
from odb_factory.data.observe import RowDropped
from odb_factory.data.step_times import StepTimes
from odb_factory.errors import DataError
from odb_factory.planning import Cost, CostModel


class Observer:
    """A row is its length; 0: dropped. changed: {row: the token that it is made of, if that is not 1}."""

    def __init__(self, changed: dict[int, int] | None = None):
        self.changed = changed or {}

    def __call__(self, dataset: Any, index: int) -> tuple[dict[str, Any], Cost]:
        length = dataset[index]
        if length == 0:
            raise RowDropped("invalid", "it is empty")
        ids = [self.changed.get(index, 1)] * length
        return {"input_ids": ids, "labels": ids}, Cost(length, 0, length)

    def describe(self, dataset: Any, index: int) -> str:
        return f"row {index}"


class Table:
    """The exchange of ranks that are threads."""

    timeout_s = 10.0

    def __init__(self, world_size: int):
        self.barrier = threading.Barrier(world_size)
        self.told: dict[int, bytes] = {}
        self.parcels: dict[int, list[bytes]] = {}

    def seat(self, rank: int) -> Any:
        return Seat(self, rank)


class Seat:
    def __init__(self, table: Table, rank: int):
        self.table, self.rank, self.timeout_s = table, rank, table.timeout_s
        self.world_size = table.barrier.parties

    def _tell(self, message: Any) -> list[Any]:
        self.table.told[self.rank] = encode(message)
        self.table.barrier.wait(self.timeout_s)
        answers = [decode(self.table.told[rank]) for rank in range(self.table.barrier.parties)]
        self.table.barrier.wait(self.timeout_s)
        for answer in answers:
            if isinstance(answer, Failure):
                raise CollectiveError(answer.reason)
        return answers

    def all_gather(self, report: Any, round_index: int) -> list[Any]:
        return self._tell(report)

    def confirm(self, checksum: int, round_index: int) -> None: ...

    def agree(self, settings: Any) -> None: ...

    def all_to_all(self, parcels: list[bytes]) -> list[bytes]:
        self.table.parcels[self.rank] = parcels
        self.table.barrier.wait(self.timeout_s)
        return [self.table.parcels[rank][self.rank] for rank in range(self.table.barrier.parties)]

    def leave_epoch(self) -> None:
        self.fail("it left")

    def fail(self, message: str) -> None:
        try:
            self._tell(Failure(message))
        except CollectiveError:
            pass

    def start(self) -> None: ...

    def check(self) -> None: ...

    def abort(self, message: str) -> None: ...

    def close(self) -> None: ...


def run(
    lengths: Sequence[int],
    *,
    world_size: int = 1,
    states: list[dict[str, Any]] | None = None,
    own_state: bool = False,
    stop_after: int | None = None,
    epochs: int = 1,
    **options: Any,
) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """Train some steps from `states` on: the steps of each rank, and the states behind the last of them.

    own_state: each rank is given its own state alone.
    """
    table, failed = Table(world_size), []
    steps: list[list[Any]] = [[] for _ in range(world_size)]
    after: list[Any] = [None] * world_size
    accumulation = options.pop("accumulation", 1)
    stream = options.pop("stream", None)
    seed = options.pop("seed", 7)
    observer = options.pop("observer", None) or Observer()

    def rank_runs(rank: int) -> None:
        sampler = None
        if not stream:
            sampler = SeedableRandomSampler(lengths, generator=torch.Generator(), data_seed=seed)
        loader = ODBLoader(
            stream(lengths) if stream else lengths,
            sampler=sampler,
            observer=observer,
            collate_fn=pad,
            config=ODBConfig(**{"token_budget": 32, "buffer_size": 8, "collate_workers": 0} | options),
            accumulation=accumulation,
            seed=seed,
            coordinator=table.seat(rank),
        )
        try:
            if states is not None:
                loader.load_state_dict([states[rank]] if own_state else states)
            while loader.epoch < epochs:
                for step, _, _ in loader:
                    steps[rank].append(step)
                    loader.consume(step)
                    if stop_after is not None and len(steps[rank]) == stop_after:
                        after[rank] = loader.state_dict()
                        return
                loader.set_epoch(loader.epoch + 1)
            after[rank] = loader.state_dict()
        except Exception as error:
            failed.append(error)
            table.barrier.abort()
        finally:
            loader.close()

    threads = [threading.Thread(target=rank_runs, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if failed:
        raise next((error for error in failed if not isinstance(error, threading.BrokenBarrierError)), failed[0])
    return steps, json.loads(json.dumps(after))


class Stream(IterableDataset):
    def __init__(self, lengths: Sequence[int]):
        self.lengths = lengths

    def __iter__(self) -> Any:
        return iter(self.lengths)


def ids_of(steps: list[list[Any]], epoch: int = 0) -> Counter:
    return Counter(id for rank in steps for step in rank if step.epoch == epoch for id in step.ids)


def usable(lengths: Sequence[int]) -> Counter:
    return Counter(i for i, length in enumerate(lengths) if length)


LENGTHS = [3 + k * 7 % 23 if k % 11 else 0 for k in range(60)]
MODES = [
    {"world_size": 1},
    {"world_size": 1, "accumulation": 2, "buffer_size": 5},
    {"world_size": 2, "accumulation": 2},
    {"world_size": 3, "buffer_size": 64},
    {"world_size": 2, "join": False, "accumulation": 2},
    {"world_size": 3, "balance": True, "accumulation": 2},
    {"world_size": 2, "stream": Stream},
]


def check_every_stop(lengths: Sequence[int], *, epochs: int = 2, **mode: Any) -> list[list[Any]]:
    """Save and restore behind every step: the steps that follow are those of the run that was not stopped.

    Each rank goes on from its own state alone. Returns the steps of each rank of the whole run.
    """
    whole, end = run(lengths, epochs=epochs, **mode)
    for stop in range(1, len(whole[0])):
        before, states = run(lengths, epochs=epochs, stop_after=stop, **mode)
        after, end_after = run(lengths, epochs=epochs, states=states, own_state=True, **mode)
        assert [a + b for a, b in zip(before, after)] == whole, stop
        assert end_after == end, stop
    return whole


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_stopped_at_every_step_it_goes_on_as_if_it_had_not_been(mode: dict[str, Any]) -> None:
    """Over two epochs: the same steps, ids, totals, progress and ends, from this rank's own state."""
    whole = check_every_stop(LENGTHS, **mode)
    assert mode.get("join") is False or ids_of(whole) == ids_of(whole, 1) == usable(LENGTHS)


@pytest.mark.parametrize("balance", [False, True])
def test_a_plan_by_measured_times_loses_nothing_over_a_stop(balance: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: each run, rank and round measures something else; a round that was under way is planned again as it was."""
    measured = (CostModel(k * 7919 % 101, k * 31 % 7, 0, k % 3) for k in itertools.count(1))
    monkeypatch.setattr(StepTimes, "fit", lambda self: next(measured))
    mode = {"world_size": 2, "cost_model": "time", "balance": balance, "accumulation": 2}
    for stop in range(1, len(run(LENGTHS, **mode)[0][0]), 3):
        before, states = run(LENGTHS, stop_after=stop, **mode)
        after, _ = run(LENGTHS, states=states, **mode)
        assert ids_of(before) + ids_of(after) == usable(LENGTHS), stop


@pytest.mark.parametrize("mode", MODES[:4], ids=str)
def test_a_state_that_was_loaded_and_not_used_is_the_same_state(mode: dict[str, Any]) -> None:
    """A second stop before the first step loses nothing."""
    world_size = mode["world_size"]
    _, states = run(LENGTHS, stop_after=5, **mode)
    sampler = SeedableRandomSampler(LENGTHS, generator=torch.Generator(), data_seed=7)
    loader = ODBLoader(
        LENGTHS,
        sampler=sampler,
        observer=Observer(),
        collate_fn=pad,
        config=ODBConfig(
            **{"token_budget": 32, "buffer_size": 8, "collate_workers": 0}
            | {key: value for key, value in mode.items() if key == "buffer_size"}
        ),
        accumulation=mode.get("accumulation", 1),
        seed=7,
        coordinator=Seat(Table(world_size), 0),
    )
    loader.load_state_dict(states)
    assert json.loads(json.dumps(loader.state_dict())) == states[0]
    loader.close()


changes = st.fixed_dictionaries(
    {"world_size": st.integers(1, 4), "buffer_size": st.integers(1, 16), "token_budget": st.sampled_from([24, 32, 64])}
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
        if any(step.last for step in done[0]):
            break
    else:
        done, _ = run(lengths, states=states, stream=stream, **last)
        seen += ids_of(done)
    assert seen == usable(lengths)


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"seed": 8}, ("order", "seed 7 then, 8 now")), ({"lengths": LENGTHS[:-1]}, ("samples 60 then, 59 now",))],
)
def test_other_data_are_refused_unless_that_is_wanted(changed: dict[str, Any], words: tuple[str, ...]) -> None:
    _, states = run(LENGTHS, stop_after=4)
    lengths = changed.pop("lengths", LENGTHS)
    with pytest.raises(DataError) as caught:
        run(lengths, states=states, **changed)
    assert all(word in str(caught.value) for word in (*words, "resume: ignore_data"))
    steps, _ = run(lengths, states=states, resume="ignore_data", **changed)
    assert ids_of(steps) == usable(lengths)


def test_a_waiting_row_that_has_changed_is_noticed() -> None:
    _, states = run(LENGTHS, stop_after=4)
    changed = [length and length + 1 for length in LENGTHS]
    with pytest.raises(DataError, match="changed since the checkpoint.*resume: ignore_data"):
        run(changed, states=states)


def changed_at(stop: int, which: str) -> dict[int, int]:
    """A row that says something else in as many tokens. which: it waits at that stop, or was consumed just before."""
    (steps,), _ = run(LENGTHS)
    if which == "consumed":
        return {steps[stop - 1].ids[0]: 2}
    _, (state,) = run(LENGTHS, stop_after=stop)
    waits = set(state["snapshot"]["held"]["draw"] + state["snapshot"]["next"]["draw"])
    return {next(id for step in steps[stop:] for id, draw in zip(step.ids, step.draws) if draw in waits): 2}


@pytest.mark.parametrize("stop", [7, 9])
@pytest.mark.parametrize("which", ["waiting", "consumed"])
def test_a_row_that_says_something_else_in_as_many_tokens_is_noticed(stop: int, which: str) -> None:
    """Before anything is trained on; and it is not called another version's plan."""
    _, states = run(LENGTHS, stop_after=stop)
    with pytest.raises(DataError, match="have changed since the checkpoint.*resume: ignore_data") as caught:
        run(LENGTHS, states=states, observer=Observer(changed_at(stop, which)))
    assert "planned otherwise" not in str(caught.value)


@pytest.mark.parametrize("at_end", [False, True])
def test_other_rows_of_the_same_lengths_are_noticed(at_end: bool) -> None:
    """In the middle of an epoch and at its end, where nothing waits; also where the rest is dealt out anew."""
    stop = len(run(LENGTHS)[0][0]) if at_end else 4
    steps, states = run(LENGTHS, stop_after=stop, epochs=2)
    assert steps[0][-1].last == at_end
    others = Observer(dict.fromkeys(range(len(LENGTHS)), 2))
    for changes in ({}, {"world_size": 2}, {"token_budget": 64}):
        with pytest.raises(DataError, match="row .* was trained on, and now: it says something else"):
            run(LENGTHS, states=states, epochs=2, observer=others, **changes)


class Random(Observer):
    """Rows are drawn at random each time they are read."""

    def __call__(self, dataset: Any, index: int) -> tuple[dict[str, Any], Cost]:
        features, cost = super().__call__(dataset, index)
        features["input_ids"] = [next(COUNT)] * cost.tokens
        return features, cost


COUNT = itertools.count()


def test_rows_that_are_drawn_at_random_are_not_taken_for_other_data() -> None:
    for stop in (1, 4, 9):
        before, states = run(LENGTHS, stop_after=stop, observer=Random())
        after, _ = run(LENGTHS, states=states, observer=Random())
        assert ids_of(before) + ids_of(after) == usable(LENGTHS)


def edited(state: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a state with another value at `path`; a function makes it from the old one."""
    state = copy.deepcopy(state)
    *parts, last = path.split(".")
    place = state
    for part in parts:
        place = place[part]
    place[last] = value(place[last]) if callable(value) else value
    return state


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
    with pytest.raises(DataError, match="planned otherwise now"):
        run(LENGTHS, states=[state | {"consumed": 10**6}])


def test_a_planner_that_has_changed_is_noticed() -> None:
    """What is left of the round under way could not be told: samples would come twice, others never."""
    _, states = run(LENGTHS, stop_after=5)
    assert len(states[0]["emitted"]) > 1
    with pytest.raises(DataError, match="planned otherwise now"):
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
