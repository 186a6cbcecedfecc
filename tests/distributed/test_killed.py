"""The trainer is killed: within 10 s none of its data workers is alive, whatever it and they were doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from distributed.launch import Run, parent, shimmed
from distributed.ranks import TESTS, Collator, Observer
from distributed.rows import row
from support import MARK, end_marked_processes, marked_processes, proc_words, read_jsonl, training_config, write_dataset

from odb_factory.config import ODBConfig
from odb_factory.data.loader import ODBLoader

LIMIT_S = 10
"""From the end of the trainer to that of its last worker."""
START_S = 120


def all_end(alive: Callable[[], dict[int, list[str]]]) -> dict[int, list[str]]:
    """What is still alive at the limit."""
    until = time.monotonic() + LIMIT_S
    while (left := alive()) and time.monotonic() < until:
        time.sleep(0.1)
    return left


# A toy loader in each stage of its workers' lives


class SlowCollator(Collator):
    """Begins, and is never done."""

    def __init__(self, begun: Path):
        super().__init__()
        self.begun = begun

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        self.begun.touch()
        time.sleep(3600)


class SlowStart(Observer):
    """Begins to be unpickled, and is never done."""

    def __init__(self, begun: Path):
        super().__init__()
        self.begun = begun

    def __setstate__(self, state: dict[str, Any]) -> None:
        state["begun"].touch()
        time.sleep(3600)


def toy(start_method: str, rows: list[int], workers: tuple[int, int], **parts: Any) -> ODBLoader:
    return ODBLoader(
        rows,
        sampler=range(len(rows)),
        config=ODBConfig(token_budget=10**6, buffer_size=1, collate_workers=workers[1]),
        num_workers=workers[0],
        multiprocessing_context=start_method,
        **{"observer": Observer(), "collate_fn": Collator()} | parts,
    )


def be_killed(start_method: str, folder: str) -> None:
    """Have a worker blocked by a full pipe, one in a collation, and one that is still reading its arguments."""
    begun = [Path(folder, name) for name in ("collation", "arguments")]
    # A chunk of rows has a megabyte, and one chunk is asked for.
    full = toy(start_method, [50_000] * 100, (1, 0))
    full.start()
    slow = iter(toy(start_method, [5] * 20, (0, 1), collate_fn=SlowCollator(begun[0])))
    threading.Thread(target=next, args=(slow,), daemon=True).start()
    if start_method == "fork":
        begun.pop()
    else:
        starting = toy(start_method, [5] * 20, (1, 0), observer=SlowStart(begun[1]))
        threading.Thread(target=starting.start, daemon=True).start()
    while not all(path.exists() for path in begun):
        time.sleep(0.05)
    time.sleep(1)  # the pipe is full by now
    print("ready", flush=True)
    time.sleep(3600)


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_no_worker_outlives_a_killed_process(start_method: str, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    code = f"from distributed.test_killed import be_killed; be_killed({start_method!r}, {str(tmp_path)!r})"
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS)])
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {MARK: mark, "PYTHONPATH": path},
            start_new_session=True,
        )
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", (tmp_path / "log").read_text()
        num_workers = 2 if start_method == "fork" else 3
        assert len(marked_processes(mark)) > num_workers
        process.kill()
        process.wait(10)
        assert not all_end(lambda: marked_processes(mark))
    finally:
        watchdog.cancel()
        end_marked_processes(mark)


# Real trainings


