"""Worker processes of a rank: they end with it, they plan, and they publish which row they work at.

Nothing here imports torch before it is needed, because the process that plans does without.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import get_spawning_popen
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np

from odb_factory.errors import DataError, one_line

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# ----------------------------------------------------------------------------------------------------------------------
# A worker process that watches the process that started it.
# A DataLoader worker whose trainer was killed may never end by itself. It fills the pipe of its result queue, nobody
# reads, and at its exit Python waits for the thread that feeds the pipe. So every worker of ours has a daemon thread
# that ends it hard once its parent is gone, whatever the worker is doing.

CHECK_S = 1.0
"""How often a worker looks for its parent, and one who waits for a plan for the process that makes it."""

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
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return True
    return False


def leave_inherited() -> None:
    """Let the garbage collector pass over all that this process has of the trainer it was forked from: a collection
    looks at every object (.3 s), and so copies the memory that the two share (about 120 MiB)."""
    gc.freeze()


# A job scheduler sends SIGTERM to all processes. A training process that handles it, to save a checkpoint for one,
# needs its workers until then, so these do not end at once.

SIGTERM_GRACE_S = 120.0


def outlive_sigterm() -> bool:
    """Whether workers of this process do not end at once by SIGTERM: it handles the signal itself."""
    return callable(signal.getsignal(signal.SIGTERM))


def _end_later(*_: object) -> None:
    timer = threading.Timer(SIGTERM_GRACE_S, os._exit, [1])
    timer.daemon = True
    timer.start()


# ----------------------------------------------------------------------------------------------------------------------
# What a data worker does beside its tasks: watch its parent process, run `worker_init_fn`, publish its row.

RETRY_PAUSE_S = 0.1


def worker_seed(seed: int, rank: int, stage: int, epoch: int) -> int:
    """A seed for the workers of one stage; torch adds the number of the worker to it.

    seed: torch's global one, or that of the DataLoader's generator. The seeds of ranks, stages and epochs are
    independent (numpy's `SeedSequence`).
    """
    return int(np.random.SeedSequence(seed, spawn_key=(rank, stage, epoch)).generate_state(1, np.uint64)[0] >> 1)


class BusyRows:
    """The row that each worker of a stage works at, for messages of the process that waits for them.

    A table in shared memory, a line for each worker and one for the process itself: process id, row (-1: none), and
    since when (`time.monotonic`, the same in all processes of a machine). Workers beyond `num_workers` share the last.
    """

    def __init__(self, num_workers: int = 0):
        import torch

        self._table = torch.zeros(num_workers + 1, 3, dtype=torch.float64)
        if num_workers:
            self._table.share_memory_()

    @contextmanager
    def at(self, row: int) -> Iterator[None]:
        """The calling process works at this row."""
        import torch
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        line = self._table[-1 if info is None else min(info.id, len(self._table) - 1)]
        line[:] = torch.tensor([os.getpid(), row, time.monotonic()], dtype=torch.float64)
        try:
            yield
        finally:
            line[1] = -1

    def close(self) -> None:
        """Release the shared memory; the workers have ended."""
        self._table = self._table.clone()

    def describe(self, task: str) -> str:
        """The worker that has been at its row for longest. task: a verb, such as "observes"."""
        lines = [(int(pid), int(row), since) for pid, row, since in self._table.tolist() if pid]
        busy = sorted((since, pid, row) for pid, row, since in lines if row >= 0)
        if not busy:
            return f"a data worker that {task}"
        _, pid, row = busy[0]
        who = "this process, which" if pid == os.getpid() else f"the data worker (pid {pid}) that"
        return f"{who} {task} row {row} of the training dataset"


def retried(call: Callable[[], T], final: tuple[type[Exception], ...] = ()) -> T:
    """`call()`, repeated once if it raises: a second read of a network disk often succeeds. final: not repeated."""
    try:
        return call()
    except final:
        raise
    except Exception as error:
        if isinstance(error, OSError):
            time.sleep(RETRY_PAUSE_S)
    return call()


class WorkerDataset:
    """A dataset that is sent to worker processes, and wraps the user's own (`dataset`).

    A worker process that is being started watches its parent before it unpickles anything else, which may take long or
    never end; a process that unpickles it for another purpose does not.
    sends_dataset: False if `dataset` is for `worker_init_fn` alone: only a forked worker has it.
    """

    dataset: Any
    sends_dataset = True

    def __reduce__(self) -> tuple[Any, ...]:
        parent = os.getpid() if get_spawning_popen() is not None else None
        return _new, (parent, type(self)), self.__dict__ if self.sends_dataset else self.__dict__ | {"dataset": None}


def _new(parent: int | None, kind: Any) -> Any:
    """Called before the attributes are unpickled."""
    if parent is not None:
        watch_parent(parent)
    return kind.__new__(kind)


class WorkerInit:
    """The `worker_init_fn` of our DataLoaders: watches the parent, outlives SIGTERM with it, then calls the user's own
    (if any).

    The user's finds its own dataset in `get_worker_info().dataset` (None in a collating worker that was not forked).
    """

    def __init__(self, init_fn: Callable[[int], None] | None):
        self.init_fn, self._outlives = init_fn, outlive_sigterm()

    def __call__(self, worker_id: int) -> None:
        from torch.utils.data import get_worker_info

        parent = multiprocessing.parent_process()
        assert parent is not None and parent.pid is not None, "only a worker calls this"
        leave_inherited()
        watch_parent(parent.pid)
        if self._outlives:
            signal.signal(signal.SIGTERM, _end_later)
        if self.init_fn is not None:
            info = get_worker_info()
            assert info is not None
            ours: Any = info.dataset
            object.__setattr__(info, "dataset", ours.dataset)  # it refuses plain assignment
            self.init_fn(worker_id)


# ----------------------------------------------------------------------------------------------------------------------
# Plans are made in a separate process: the training thread never waits for the interpreter lock of a planner.
# Planners are pure functions of a few integers a sample: these go to the process, a plan comes back.


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
            target=_serve, args=(self._theirs, os.getpid(), outlive_sigterm()), name="odb-planner", daemon=True
        )

    def start(self) -> None:
        self._process.start()
        self._theirs.close()  # so that its end is seen here

    def __call__(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Raises what the function raises, and `DataError` if the process is gone."""
        try:
            self._connection.send((function, args, kwargs))
            while not self._connection.poll(CHECK_S):
                if self._exit_code(0) is not None:
                    raise EOFError
            result, error = self._connection.recv()
        except (EOFError, OSError):
            raise DataError(
                f"the process that plans ended by itself, exit code {self._exit_code(CHECK_S)}; look for the "
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
        with suppress(ValueError):  # another thread, which starts a process, has just reaped it
            self._process.close()
        self._theirs.close()
        self._connection.close()

    def _exit_code(self, timeout_s: float) -> int | None:
        """None if it runs on, and once it is closed."""
        try:
            self._process.join(timeout_s)
            return self._process.exitcode
        except ValueError:
            return None


def _serve(connection: Connection, parent: int, outlives: bool) -> None:
    leave_inherited()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the trainer, which closes this
    signal.signal(signal.SIGTERM, _end_later if outlives else signal.SIG_DFL)  # not what the trainer does
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
