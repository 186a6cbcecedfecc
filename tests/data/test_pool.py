"""The worker processes of a rank, from outside: the same micro-batches with any workers; nothing is left behind."""

from __future__ import annotations

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
from typing import Any

import numpy as np
import pytest
import torch
from toy import Rows, item, pad

from odb_factory import DataError, ODBDataLoader, pop_step_info
from odb_factory.llamafactory.media import EncodedImage
from odb_factory.random_numbers import random_states

TESTS = Path(__file__).parents[1]
OPTIONS: dict[str, Any] = {"token_budget": 100, "batch_size": 8}


class Drawing(Rows):
    """Each row brings random numbers of all three kinds."""

    broken: int | None = None

    def __getitem__(self, k: int) -> Any:
        if k == self.broken:
            raise OSError("no such file")
        return super().__getitem__(k) | {"drawn": _drawn()}


def _drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]


def drawing(items: list[dict[str, Any]]) -> dict[str, Any]:
    return pad(items) | {"of_rows": [row.get("drawn") for row in items], "drawn": _drawn()}


def epochs(count: int = 2, broken: int | None = None, **options: Any) -> list[list[Any]]:
    """For each epoch the ids and the random numbers of rows and collator. broken: a row that cannot be read."""
    rows = Drawing()
    rows.broken = broken
    with ODBDataLoader(rows, shuffle=True, collate_fn=drawing, **OPTIONS | options) as loader:
        return [
            [
                (pop_step_info(batch).samples, batch["input_ids"].tolist(), batch["of_rows"], batch["drawn"])
                for batch in loader
            ]
            for _ in range(count)
        ]


@pytest.mark.parametrize("mode", ["keep", "fill"])
def test_micro_batches_and_random_numbers_do_not_depend_on_workers(mode: Any) -> None:
    """I6, in both epochs, also with rows left out; the random numbers of the training process do not change."""
    torch.manual_seed(5)
    before = random_states()
    options = {"global_batch_size": mode, "on_error": "skip", "broken": 7}
    expected = epochs(num_workers=0, **options)
    assert str(random_states()) == str(before)
    assert epochs(num_workers=1, **options) == epochs(num_workers=2, persistent_workers=True, **options) == expected
    assert expected[0] != expected[1]
    drawn = [numbers for _, _, of_rows, own in expected[0] + expected[1] for numbers in (*of_rows, own)]
    numbers = list(itertools.chain.from_iterable(drawn))
    assert len(set(numbers)) == len(numbers)


def test_random_numbers_are_the_same_after_a_resume() -> None:
    """They follow from the sample."""
    torch.manual_seed(5)
    options = {"shuffle": True, "collate_fn": drawing, "num_workers": 2, **OPTIONS}
    (expected,) = epochs(1, num_workers=2)
    taken, rest = [], []
    with ODBDataLoader(Drawing(), **options) as loader:
        for batch in loader:
            taken.append(batch["drawn"])
            if pop_step_info(batch).ends_optimizer_step and len(taken) > 3:
                break
        state = loader.state_dict()
    with ODBDataLoader(Drawing(), **options) as loader:
        loader.load_state_dict(state)
        for batch in loader:
            pop_step_info(batch)
            rest.append(batch["drawn"])
    assert taken and rest and taken + rest == [own for *_, own in expected]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_start_methods_give_the_same(method: str) -> None:
    torch.manual_seed(5)
    assert epochs(1, num_workers=1, multiprocessing_context=method) == epochs(1, num_workers=0)


# Values that travel


def same(value: Any, other: Any) -> bool:
    """Equal, and of the same types: a collator distinguishes 1, 1.0 and True."""
    if isinstance(value, (list, tuple)):
        return type(value) is type(other) and len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, (torch.Tensor, np.ndarray)):
        is_alike = type(value) is type(other) and (value.dtype, value.shape) == (other.dtype, other.shape)
        dense = [one.to_dense() if isinstance(one, torch.Tensor) else one for one in (value, other)]
        return is_alike and dense[0].tolist() == dense[1].tolist()
    return type(value) is type(other) and (value is other or value == other)


LISTS: list[Any] = [[1, True], [1, [2, 3], None, 2.5], (1, "b"), [EncodedImage(b"file", None, 2), {"path": "b.png"}]]
TENSORS: list[Any] = [
    torch.tensor(3),
    torch.empty(0, 4),
    torch.tensor([True, False]),
    torch.randn(3, 2, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)),
    torch.arange(12).reshape(3, 4).t(),
    torch.ones(1).expand(2, 3),
    torch.arange(7, dtype=torch.uint8),
    np.arange(6, dtype=np.int16).reshape(3, 2),
    np.zeros((0, 3), np.float32),
    torch.eye(3).to_sparse(),
]


def carrying(k: int) -> dict[str, Any]:
    return item(k) | {"values": LISTS + TENSORS}


def carried(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Changes its items in place, as collators may: tensors, arrays, keys."""
    values = items[0].pop("values")
    for value in values[-4:-2]:
        value += 0
    return pad(items) | {"values": values}


def test_values_come_back_as_they_were_and_may_be_changed() -> None:
    """From the dataset to a collator in a worker, and from there: ids, media references, tensors, with their types."""
    with ODBDataLoader(Rows(carrying), collate_fn=carried, num_workers=2, **OPTIONS) as loader:
        for batch in loader:
            pop_step_info(batch)
            for value, other in zip(batch["values"], LISTS + TENSORS, strict=True):
                assert same(value, other), other
            batch["values"][len(LISTS) + 3].zero_(), batch["input_ids"].fill_(7)


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
    dataset = options.pop("dataset", None) or Rows()
    with pytest.raises(DataError, match=words) as caught:
        with ODBDataLoader(dataset, **{"num_workers": 2, "collate_fn": pad} | OPTIONS | options) as loader:
            list(map(pop_step_info, loader))
    assert "\n" not in str(caught.value)
    assert_no_child()


def assert_no_child() -> None:
    end = time.monotonic() + 20
    while multiprocessing.active_children() and time.monotonic() < end:
        time.sleep(0.05)
    assert not multiprocessing.active_children()


# Nothing is left behind


@pytest.mark.parametrize(("rows", "epochs"), [(400, 8), pytest.param(4800, 20, marks=pytest.mark.nightly)])
def test_memory_and_descriptors_stay_the_same_over_epochs(rows: int, epochs: int) -> None:
    """The nightly case has more than 6,000 micro-batches."""
    held = []
    options = OPTIONS | {"persistent_workers": True}
    with ODBDataLoader(Rows(num_rows=rows), num_workers=2, collate_fn=pad, **options) as loader:
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
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
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
        while (left := _group(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left
        ends = {"return": 0, "raise": 1, "SIGTERM": 7 if handles else -signal.SIGTERM}
        assert process.returncode == ends.get(name, -getattr(signal, name, 0))
    finally:
        for pid in _group(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()


def _group(group: int) -> list[int]:
    """Living processes of a process group."""

    def stat_of(pid: str) -> list[str]:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return []

    fields: Iterator[tuple[str, list[str]]] = ((pid, stat_of(pid)) for pid in os.listdir("/proc") if pid.isdigit())
    return [int(pid) for pid, stat in fields if stat and int(stat[2]) == group and stat[0] != "Z"]
