"""No call of a store waits without a limit, whatever its server does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from odb_factory.comm.bounded import BoundedStore, StoreError, bounded

SERVER = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


@contextmanager
def served() -> Iterator[tuple[subprocess.Popen, int]]:
    """A process that serves a store, and its port."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server, int(server.stdout.readline())
    finally:
        server.kill()
        server.wait(10)


def freeze(process: subprocess.Popen) -> None:
    """Return once it has stopped: a signal takes its time on a busy machine."""
    os.kill(process.pid, signal.SIGSTOP)
    until = time.monotonic() + 20
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < until
        time.sleep(0.01)


def connect(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))


def test_a_call_that_ends_in_time() -> None:
    assert bounded(lambda: 3, 5) == 3
    assert bounded(lambda: None, 5) is None
    with pytest.raises(KeyError):
        bounded(lambda: {}["x"], 5)


def test_a_call_that_hangs() -> None:
    with pytest.raises(TimeoutError, match="no answer within 0.1 s"):
        bounded(lambda: threading.Event().wait(20), 0.1)


def test_a_store_keeps_what_it_is_told() -> None:
    with served() as (_, port):
        store = BoundedStore(lambda: connect(port))
        assert store.get("a") is None and not store.has(["a"])
        store.set("a", "1")
        assert store.get("a") == "1" and store.has(["a"]) and not store.has(["a", "b"])
        assert store.set_once("b", "2") == "2" and store.set_once("b", "3") == "2"


@pytest.mark.parametrize("call", ["has", "get", "set_once"])  # `set` does not wait for an answer
def test_a_server_that_is_frozen(call: str) -> None:
    """torch's own client would wait for ever (its timeout is for keys that are missing, not for a silent server)."""
    arguments = {"has": (["a"],), "get": ("a",), "set_once": ("a", "1")}
    with served() as (server, port):
        store = BoundedStore(lambda: connect(port), limit_s=0.5)
        store.set("a", "0")
        freeze(server)
        started = time.monotonic()
        with pytest.raises(StoreError, match="no answer within 0.5 s"):
            getattr(store, call)(*arguments[call])
        with pytest.raises(StoreError):
            store.set("a", "1")  # and is not asked again
        assert time.monotonic() - started < 10


def test_a_server_that_has_ended() -> None:
    with served() as (server, port):
        store = BoundedStore(lambda: connect(port))
        server.kill()
        server.wait(10)
        with pytest.raises(StoreError):
            store.get("a")
