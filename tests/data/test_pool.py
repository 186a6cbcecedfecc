"""The worker processes of a rank, from outside: the same micro-batches with any workers, the options of torch for
workers, failures in one line; nothing is left behind."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from distributed.ranks import run_ranks
from support import MARK, end_marked_processes, marked_processes
from torch.utils.data import IterableDataset, get_worker_info
from toy import NUM_ROWS, Rows, item, pad
from transformers.trainer_utils import seed_worker

from odb_factory import DataError, ODBDataLoader, pop_step_info
from odb_factory.llamafactory.media import EncodedImage
from odb_factory.random_numbers import random_states

TESTS = Path(__file__).parents[1]


def make(dataset: Any = None, **options: Any) -> ODBDataLoader:
    defaults = {"token_budget": 100, "batch_size": 8, "collate_fn": pad}
    return ODBDataLoader(Rows() if dataset is None else dataset, **defaults | options)


def batches_of(loader: Any) -> list[Any]:
    """The batches of an epoch, without their step info."""
    return [batch for batch in loader if pop_step_info(batch)]


# Random numbers


class Drawing(Rows):
    """Each row brings random numbers of all three kinds. broken: a row that cannot be read."""

    def __init__(self, broken: int | None = None):
        super().__init__()
        self.broken = broken

    def __getitem__(self, k: int) -> Any:
        if k == self.broken:
            raise OSError("no such file")
        return super().__getitem__(k) | {"drawn": _drawn()}


def _drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]


def drawing(items: list[dict[str, Any]]) -> dict[str, Any]:
    worker = get_worker_info()
    return pad(items) | {
        "of_rows": [row.get("drawn") for row in items],
        "drawn": _drawn(),
        "seed": worker and worker.seed,
    }


def epochs(count: int = 2, broken: int | None = None, state: Any = None, **options: Any) -> list[list[Any]]:
    """For each epoch the ids and the random numbers of rows and collator."""
    with make(Drawing(broken), shuffle=True, collate_fn=drawing, **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return [
            [(batch["input_ids"].tolist(), batch["of_rows"], batch["drawn"]) for batch in batches_of(loader)]
            for _ in range(count)
        ]


@pytest.mark.parametrize(
    ("mode", "workers"),
    [
        ("keep", {"num_workers": 2, "persistent_workers": True}),
        ("keep", {"num_workers": 1, "multiprocessing_context": "forkserver"}),
        ("fill", {"num_workers": 1}),
        ("fill", {"num_workers": 1, "multiprocessing_context": "spawn"}),
    ],
)
def test_micro_batches_and_random_numbers_do_not_depend_on_workers(mode: Any, workers: dict[str, Any]) -> None:
    """I6, in both epochs, also with rows left out; the random numbers of the training process do not change."""
    torch.manual_seed(5)
    before = random_states()
    options = {"global_batch_size": mode, "on_error": "skip", "broken": 7}
    expected = epochs(num_workers=0, **options)
    assert str(random_states()) == str(before)
    assert epochs(**workers, **options) == expected
    assert expected[0] != expected[1]
    drawn = [numbers for _, of_rows, own in expected[0] + expected[1] for numbers in (*of_rows, own)]
    numbers = list(itertools.chain.from_iterable(drawn))
    assert len(set(numbers)) == len(numbers)


def test_random_numbers_are_the_same_after_a_resume() -> None:
    """They follow from the sample."""
    torch.manual_seed(5)
    (expected,) = epochs(1, num_workers=2)
    with make(Drawing(), shuffle=True, collate_fn=drawing, num_workers=2) as loader:
        for taken, batch in enumerate(loader, start=1):
            if pop_step_info(batch).ends_optimizer_step and taken > 3:
                break
        state = loader.state_dict()
    (rest,) = epochs(1, state=state, num_workers=2)
    assert rest == expected[taken:] != []


@pytest.mark.integration
@pytest.mark.parametrize("by_generator", [False, True])
def test_random_numbers_follow_the_seed_of_the_dataloader(by_generator: bool) -> None:
    """The global seed, or the seed of the generator."""

    def numbers(seed: int) -> list[Any]:
        torch.manual_seed(77 if by_generator else seed)
        generator = torch.Generator().manual_seed(seed) if by_generator else None
        return [drawn for epoch in epochs(num_workers=1, generator=generator) for *_, drawn in epoch]

    with_5 = numbers(5)
    assert numbers(5) == with_5 and not {*map(str, numbers(1005))} & {*map(str, with_5)}


def seeds_of(rank: int) -> list[Any]:
    torch.manual_seed(5)  # the same on both ranks, as in trainers
    # As the Trainer of transformers sets it, with the rank.
    init_fn = functools.partial(seed_worker, num_workers=1, rank=rank)
    with make(collate_fn=drawing, worker_init_fn=init_fn, num_workers=1) as loader:
        return [value for batch in batches_of(loader) for value in (batch["seed"], batch["drawn"][0])]


@pytest.mark.integration
def test_ranks_draw_other_random_numbers(tmp_path: Any) -> None:
    here, there = (outcome.value for outcome in run_ranks("data.test_pool:seeds_of", tmp_path))
    assert here and there and not set(here) & set(there)


# Datasets and collators that travel

VALUES: list[Any] = [
    [1, True, [2, 3], None, 2.5, (1, "b")],
    [EncodedImage(b"file", None, 2), {"path": "b.png"}],
    torch.empty(0, 4),
    torch.tensor([True, False]),
    torch.randn(3, 2, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)),
    torch.arange(12).reshape(3, 4).t(),
    torch.eye(3).to_sparse(),
    np.zeros((0, 3), np.float32),
    np.arange(6, dtype=np.int16).reshape(3, 2),
    torch.arange(7, dtype=torch.uint8),
]


def carrying(k: int) -> dict[str, Any]:
    return item(k) | {"values": VALUES}


def carried(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Changes its items in place, as collators may: tensors, arrays, keys."""
    values = items[0].pop("values")
    for value in values[-2:]:
        value += 0
    return pad(items) | {"values": values}


def test_values_come_back_as_they_were_and_may_be_changed() -> None:
    """From the dataset to a collator in a worker, and from there: ids, media references, tensors, with their types."""
    with make(Rows(carrying), collate_fn=carried, num_workers=2) as loader:
        for batch in batches_of(loader):
            assert repr(batch["values"]) == repr(VALUES)
            batch["values"][-1].zero_(), batch["input_ids"].fill_(7)


class Changing(Rows):
    """A dataset that changes between epochs."""

    shift = 0

    def __getitem__(self, k: int) -> Any:
        return {key: [id + self.shift for id in ids] for key, ids in item(k).items()}


@pytest.mark.integration
@pytest.mark.parametrize("persistent", [False, True])
def test_a_dataset_that_changes_between_epochs_is_seen_as_in_torch(persistent: bool) -> None:
    dataset = Changing()
    with make(dataset, num_workers=1, persistent_workers=persistent) as loader:
        batches_of(loader)
        dataset.shift = 1000
        first_ids = {int(batch["input_ids"][0, 0]) for batch in batches_of(loader)}
    assert (min(first_ids) > 1000) is not persistent


class WithModel:
    """A collator that holds the model, as LLaMA-Factory's does; the model holds functions that cannot be pickled."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1000, 1000)
        self.model.scale = 3
        self.model.forward = lambda x: x  # as set by engines
        self.extra_repr = self.model.extra_repr

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        told = (self.model.weight.device.type, self.model.scale, self.extra_repr())
        return pad(items) | {"told": told, "sent": len(get_worker_info().dataset)}


@pytest.mark.integration
def test_a_model_in_the_collator_is_sent_without_weights() -> None:
    with make(collate_fn=WithModel(), multiprocessing_context="forkserver", num_workers=1) as loader:
        batches = batches_of(loader)
    assert {batch["told"] for batch in batches} == {("meta", 3, "in_features=1000, out_features=1000, bias=True")}
    assert all(batch["sent"] == NUM_ROWS for batch in batches)


# Failures


def fail(how: str) -> None:
    if how == "exit":
        os._exit(3)
    if how == "sys.exit":
        sys.exit(3)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sleeps":
        time.sleep(30)
    if how == "odd error":
        raise Odd(lambda: None)


class Failing(Rows):
    """At row 100."""

    def __init__(self, how: str):
        super().__init__(num_rows=200)
        self.how = how

    def __getitem__(self, k: int) -> Any:
        if k == 100:
            fail(self.how)
        return item(k)


class Unsendable(IterableDataset):
    """The fifth item cannot be pickled."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (item(k) | ({"made_by": lambda: None} if k == 4 else {}) for k in range(9))


class Odd(Exception):
    """Cannot be pickled."""


def collating(how: str, **options: Any) -> dict[str, Any]:
    """Options of a loader whose collator fails."""
    return {"collate_fn": lambda items: fail(how), "cost_fn": lambda item: 5, **options}


def unsendable(items: list[dict[str, Any]]) -> dict[str, Any]:
    return pad(items) | {"made_by": lambda: None}


def fails_to_begin(worker_id: int) -> None:
    raise ValueError("no such disk")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset": Failing("killed")}, "row 100 .*out-of-memory killer"),
        ({"dataset": Failing("exit")}, r"row 100 .*exit code 3"),
        ({"dataset": Failing("sys.exit")}, "SystemExit: 3"),
        ({"dataset": Failing("odd error")}, "row 100 .*Odd"),
        ({"dataset": Unsendable()}, "row 4 .*cannot be sent to another process"),
        (collating("odd error"), r"row.* \d+.*Odd"),
        (collating("killed"), "out-of-memory killer"),
        ({"worker_init_fn": fails_to_begin}, "no such disk"),
        ({"dataset": Failing("sleeps"), "timeout": 1}, "timeout: 1 s.*row 100"),
        (collating("sleeps", timeout=1), "timeout: 1 s.*row "),
        # A queue of torch would lose the batch, and the trainer would wait for ever.
        ({"collate_fn": unsendable, "cost_fn": lambda item: 5}, "^rows .*cannot be sent to the training process"),
    ],
)
def test_a_worker_that_fails_is_one_line_with_row_and_cause(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words) as caught, make(**{"num_workers": 2} | options) as loader:
        batches_of(loader)
    assert "\n" not in str(caught.value)
    end = time.monotonic() + 20
    while multiprocessing.active_children() and time.monotonic() < end:
        time.sleep(0.05)
    assert not multiprocessing.active_children()


# Nothing is left behind


@pytest.mark.parametrize(("rows", "epochs"), [(400, 8), pytest.param(4800, 20, marks=pytest.mark.nightly)])
def test_memory_and_descriptors_stay_the_same_over_epochs(rows: int, epochs: int) -> None:
    """The nightly case has more than 6,000 micro-batches."""
    held = []
    with make(Rows(num_rows=rows), num_workers=2, persistent_workers=True) as loader:
        for _ in range(epochs):
            for batch in loader:
                pop_step_info(batch)
            del batch
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024
            held.append((len(os.listdir("/proc/self/fd")), resident))
    assert held[-1][0] <= held[1][0] + 2, held
    assert held[-1][1] <= held[1][1] + 20, f"MiB: {held}"


PROGRAM = """
import os, signal, sys, time
from multiprocessing import util
sys.path.insert(0, {tests!r})
from toy import Rows, pad
from odb_factory import ODBDataLoader, pop_step_info

class Slow(Rows):
    def __getitem__(self, k):
        if k >= 64:
            time.sleep(3600)
        return super().__getitem__(k)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
if {handles!r}:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
if {end!r} == "return, handled":  # a signal that reaches workers before they have their handler
    util.register_after_fork(os, lambda _: os.kill(os.getpid(), signal.SIGTERM))
loader = ODBDataLoader(Slow(num_rows=128), num_workers=2, collate_fn=pad, token_budget=100, batch_size=8)
for number, batch in enumerate(loader):
    pop_step_info(batch)
    if number == 0:
        print("ready", flush=True)
        if {end!r}.startswith("return"):
            break
        if {end!r} == "raise":
            raise ValueError("of the user")
"""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "end", ["return", "return, handled", "raise", "SIGINT", "SIGTERM", "SIGTERM, handled", "SIGKILL"]
)
def test_no_process_outlives_a_program_that_does_not_close_its_loader(end: str, tmp_path: Path) -> None:
    """Its workers are at rows that never end; the signal reaches all processes, as from a terminal or a scheduler."""
    handles = end.endswith("handled")
    code = PROGRAM.format(tests=str(TESTS), handles=handles, end=end)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | {MARK: str(tmp_path)},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        name = end.split(",")[0]
        if name == "SIGKILL":
            process.kill()
        elif name.startswith("SIG"):
            os.killpg(process.pid, getattr(signal, name))
        process.wait(60)
        deadline = time.monotonic() + 20
        while (left := marked_processes(str(tmp_path))) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left
        ends = {"return": 0, "raise": 1, "SIGTERM": 7 if handles else -signal.SIGTERM}
        assert process.returncode == ends.get(name, -getattr(signal, name, 0))
    finally:
        end_marked_processes(str(tmp_path))
        process.kill()


def test_the_main_thread_enters_no_lock_that_a_signal_could_leave_closed() -> None:
    """A handler that raises between a Python lock's `__enter__` and its `with` leaves it closed for ever."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_qualname.startswith("Condition."):
            entered.add(frame.f_code.co_qualname)

    with make(Rows(num_rows=256), num_workers=2) as loader:
        batches = iter(loader)
        pop_step_info(next(batches))
        sys.setprofile(note)
        try:
            for batch in batches:
                pop_step_info(batch)
        finally:
            sys.setprofile(None)
    assert not entered
