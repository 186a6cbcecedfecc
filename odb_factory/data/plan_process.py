"""Plans are made in a separate process: the training thread never waits for the interpreter lock of a planner.

Planners are pure functions of a few integers a sample: these go to the process, a plan comes back.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, Protocol, TypeVar

from odb_factory.comm.standing import is_stopped, waiting
from odb_factory.errors import DataError, one_line

# ----------------------------------------------------------------------------------------------------------------------
# A worker process that watches the process that started it. No torch here: a planner's process needs none.
# A DataLoader worker whose trainer was killed may never end by itself. It fills the pipe of its result queue, nobody
# reads, and at its exit Python waits for the thread that feeds the pipe. So every worker of ours has a daemon thread
# that ends it hard once its parent is gone, whatever the worker is doing.

CHECK_S = 1.0
"""How often a worker looks for its parent."""

_watching: int | None = None
"""The process whose parent is watched: a forked child inherits the variable, not the thread."""


def watch_parent(pid: int) -> None:
    """End this worker within about a second of the end of process `pid`, which started it.

    Does nothing in `pid` itself: only a worker may be ended like this.
    """
    global _watching
    if os.getpid() in (pid, _watching):
        return
    _watching = os.getpid()
    threading.Thread(target=_watch, args=(pid,), name="odb-parent-watch", daemon=True).start()


def _watch(pid: int) -> None:
    # Where workers are forked, a later one holds the pipe of the parent, too; but the parent's id changes.
    # With forkserver the system's parent is the server.
    is_child = os.getppid() == pid
    while not (_has_ended(pid) or (is_child and os.getppid() != pid)):
        time.sleep(CHECK_S)
    os._exit(1)


def _has_ended(pid: int) -> bool:
    parent = multiprocessing.parent_process()
    if parent is not None:
        return not parent.is_alive()
    # Its arguments are still being read, so multiprocessing does not know of the parent yet.
    if os.name != "posix":
        return False
    try:
        os.kill(pid, 0)  # sends nothing; on Windows it would end the process
    except ProcessLookupError:
        return True
    return False


# ----------------------------------------------------------------------------------------------------------------------

PLANNING_CHECK_S = 1.0
"""How often one who waits for a plan looks whether the process still lives."""

P = ParamSpec("P")
R = TypeVar("R")


class Compute(Protocol):
    """Computes a pure function, somewhere."""

    def __call__(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...


def compute_here(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """In the caller's thread, as a loader without worker processes does everything."""
    return function(*args, **kwargs)


class PlanProcess:
    """A process that computes functions of modules, one after the other; it lives until `close`.

    multiprocessing_context: as a DataLoader takes it. Where processes are forked, start it in the thread that forks the
    workers, before the planning thread runs.

        process = PlanProcess()
        process.start()
        plan = process(plan_optimizer_step, buffers, budget, balance=True)
        process.close()
    """

    def __init__(self, multiprocessing_context: Any = None):
        context = multiprocessing_context
        if context is None or isinstance(context, str):
            context = multiprocessing.get_context(context)
        self._connection, self._theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(self._theirs, os.getpid()), name="odb-planner", daemon=True
        )

    def start(self) -> None:
        self._process.start()
        self._theirs.close()  # so that its end is seen here

    def __call__(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Raises what the function raises, and `DataError` if the process is gone."""
        try:
            self._connection.send((function, args, kwargs))
            with waiting(self._describe):
                while not self._connection.poll(PLANNING_CHECK_S):
                    if self._exit_code(0) is not None:
                        raise EOFError
                result, error = self._connection.recv()
        except (EOFError, OSError):
            raise DataError(
                f"the process that plans ended by itself, exit code {self._exit_code(PLANNING_CHECK_S)}; look for the "
                "system's out-of-memory killer, or set `collate_workers: 0`: then the training process plans, and "
                "collates."
            ) from None
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End it, whatever it is doing; started or not, and safe to call twice."""
        if self._connection.closed:
            return
        if self._process.pid is not None:
            self._process.kill()
            self._process.join()
        with contextlib.suppress(ValueError):  # another thread, which starts a process, has just reaped it
            self._process.close()
        self._theirs.close()
        self._connection.close()

    def _describe(self) -> str:
        pid = self._process.pid or 0
        return f"the process that plans (pid {pid}{', which is stopped by a signal' if is_stopped(pid) else ''})"

    def _exit_code(self, timeout_s: float) -> int | None:
        """None if it runs on, and once it is closed."""
        try:
            self._process.join(timeout_s)
            return self._process.exitcode
        except ValueError:
            return None


def _serve(connection: Connection, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the trainer, which closes this
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not what a trainer does that is to stop
    watch_parent(parent)
    while True:
        function, args, kwargs = connection.recv()
        try:
            connection.send((function(*args, **kwargs), None))
        except Exception as error:
            error.add_note(traceback.format_exc())
            try:
                connection.send((None, error))
            except Exception:  # what it holds cannot be sent
                connection.send((None, RuntimeError(one_line(error))))
