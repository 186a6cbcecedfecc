"""Where this process stands: what its threads wait for, and the line of Python that its main thread executes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])
_WAITS = (
    "threading.py",
    "queue.py",
    "selectors.py",
    "multiprocessing/connection.py",
    "multiprocessing/popen_fork.py",
    "multiprocessing/queues.py",
    "torch/utils/data/dataloader.py",
)
"""Ends of the file names of code that only waits; the code that called it is what a reader wants to know."""

_waits: dict[int, tuple[float, Callable[[], str]]] = {}
"""By thread: since when it waits (`time.monotonic`), and for what."""


@contextmanager
def waiting(what: Callable[[], str]) -> Iterator[None]:
    """The calling thread waits for `what()`, a worker process of this rank for instance; called only for messages."""
    thread = threading.get_ident()
    _waits[thread] = time.monotonic(), what
    try:
        yield
    finally:
        _waits.pop(thread, None)


def long_waits(least_s: float) -> list[str]:
    """What threads of this process have waited for, for at least `least_s` seconds."""
    now = time.monotonic()
    found = [(now - since, what) for since, what in list(_waits.values()) if now - since >= least_s]
    return [f"{what()} ({seconds:.0f} s)" for seconds, what in sorted(found, key=lambda wait: -wait[0])]


def main_thread_line() -> tuple[str, bool]:
    """The innermost line of the main thread's stack outside of this package and of code that only waits, as
    `file:line in function`; whether the thread is in such code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and (
        frame.f_code.co_filename.endswith(_WAITS) or frame.f_code.co_filename.startswith(_PACKAGE)
    ):
        frame = frame.f_back
    is_within = frame is not innermost
    frame = frame or innermost
    if frame is None:
        return "an unknown place", False
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}", is_within


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped by a signal (SIGSTOP); False where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
