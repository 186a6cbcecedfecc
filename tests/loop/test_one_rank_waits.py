"""One rank alone: where no data come, a line names the worker, the row and for how long."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from toy import Rows, item, pad

from odb_factory import ODBDataLoader
from odb_factory.comm import lifeline

HANGS = 37
LIMIT_S = 60
RELEASED = threading.Event()
"""Set when a test has ended, for a row that hangs in this process."""


@pytest.fixture(autouse=True)
def lines_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Not once a minute; and no worker is left behind."""
    monkeypatch.setattr(lifeline, "LINE_EVERY_S", 1.0)
    RELEASED.clear()
    yield
    RELEASED.set()
    for child in multiprocessing.active_children():
        child.kill()
        until = time.monotonic() + 10
        while child.is_alive() and time.monotonic() < until:
            with contextlib.suppress(RuntimeError):  # torch raises it in the main thread when a worker is killed
                child.join(0.1)


def item_that_hangs(k: int) -> dict:
    if k == HANGS:
        RELEASED.wait(3600)
    return item(k)


def iterate(loader: ODBDataLoader) -> None:
    """Take batches in a thread, as long as they come."""

    def run() -> None:
        try:
            for _ in loader:
                time.sleep(0.01)
        except Exception:
            pass  # its workers are killed in the end

    threading.Thread(target=run, daemon=True).start()


def wait_for_line(caplog: pytest.LogCaptureFixture, pattern: str) -> str:
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        found = [line for line in caplog.messages if re.search(pattern, line)]
        if found:
            return found[0]
        time.sleep(0.1)
    pytest.fail(f"no line like {pattern}: {caplog.messages}")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_row_that_hangs_is_named(caplog: pytest.LogCaptureFixture, num_workers: int) -> None:
    caplog.set_level(logging.WARNING)
    loader = ODBDataLoader(
        Rows(item_that_hangs), token_budget=64, batch_size=4, buffer_size=4, collate_fn=pad, num_workers=num_workers
    )
    iterate(loader)
    who = "the data worker" if num_workers else "this process"
    line = wait_for_line(caplog, f"no data to go on with: it waits for {who}.* row {HANGS} of the training dataset")
    assert re.search(r"\(\d+ s\)$", line)


@pytest.mark.parametrize(("stopped", "named"), [(0, "a data worker that observes"), (1, "the process that plans")])
def test_a_worker_that_is_stopped_is_named(caplog: pytest.LogCaptureFixture, stopped: int, named: str) -> None:
    caplog.set_level(logging.WARNING)
    loader = ODBDataLoader(
        Rows(num_rows=100_000), token_budget=64, batch_size=4, buffer_size=4, collate_fn=pad, num_workers=1
    )
    iterate(loader)
    until = time.monotonic() + LIMIT_S
    while len(children := sorted(child.pid for child in multiprocessing.active_children())) < 3:
        assert time.monotonic() < until
        time.sleep(0.1)
    time.sleep(2)
    os.kill(children[stopped], signal.SIGSTOP)  # they start in this order: observe, plan, collate
    wait_for_line(caplog, f"{named}.*stopped by a signal")
