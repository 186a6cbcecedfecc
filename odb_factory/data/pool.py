"""The worker processes of a rank: one pool that observes rows, plans and collates.

1. A call is submitted by the name of a method of `work`; calls begin in the order in which they are submitted.
2. `work` is inherited by fork, or pickled once for each worker under spawn and forkserver. Without workers a call is
   computed in place, when its result is asked for.
3. The seed of random numbers follows from seed, epoch and sample, so they depend neither on workers nor on a resume.
4. A worker ends with the process that started it, whatever ends that process; the training process handles Ctrl-C and
   SIGTERM.
5. A worker that fails, dies, or is late causes an error of one line with its row and the cause.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.multiprocessing  # tensors travel in shared memory
from torch.utils.data import _utils as torch_utils

from odb_factory.data.collate import CollatedDataset, Salvaged
from odb_factory.data.observe import ItemError, ItemObserver, ObservedDataset, RawItem, UnitsFrom
from odb_factory.data.order import DataLoaderParts
from odb_factory.data.samples import NOT_SENT, Dumped, Rejection, Sample, dump, fingerprint, load, name_rows
from odb_factory.ending import why_no_space, why_worker_died
from odb_factory.errors import ConfigError, DataError, one_line
from odb_factory.random_numbers import kept_random_numbers, random_seed, seed_random_numbers

R = TypeVar("R")

CHECK_S = 1.0
"""Seconds between two looks of a worker for its parent."""
POLL_S = 0.2
"""Seconds between two checks of a thread that waits for a result."""
JOIN_S = 5.0
"""Longest wait for the end of a killed process."""
DECIDED_BY_PARENT = (signal.SIGINT, signal.SIGTERM)
NO_WORKER = torch.zeros(0, 2, dtype=torch.int64)
CLOSED = "odb: this loader has been closed; make another one."

# In a worker process.


@dataclass(slots=True)
class _Worker:
    """This process as a worker. line: its line of the table of `_begin`. connection: see `dump`. problem: why
    the worker can compute nothing."""

    number: int
    line: np.ndarray
    connection: socket.socket
    work: Any = None
    problem: Exception | None = None


_worker: _Worker | None = None


def at(row: int) -> None:
    """Note the row of the dataset (-1: none) at which this worker is, for messages of the process that waits."""
    if _worker is not None:
        _worker.line[1] = row


class _Shipped:
    """A call in a worker process returns the content: inherited by fork, else pickled when the process starts, and
    unpickled once the worker watches its parent, because this may take long, or fail."""

    def __init__(self, content: Any, name: str):
        self.content, self.name = content, name

    def __call__(self) -> Any:
        return self.content

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            return partial, (pickle.loads, bytes(ForkingPickler.dumps(self.content)))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{self.name} {NOT_SENT.format(one_line(error))}") from None


def _begin(
    work: _Shipped,
    init_fn: _Shipped,
    seed: int,
    shared_table: torch.Tensor,
    lock: Any,
    connections: Sequence[socket.socket],
    outlives: bool,
) -> None:
    """The initializer of a worker process.

    shared_table: int64[num_workers, 2], the process id of each worker (0: it has not begun) and its current row (-1:
    none). lock: for the choice of a line of the table. outlives: SIGTERM does not end the worker.
    """
    global _worker
    table = shared_table.numpy()
    with lock:
        number = int(np.flatnonzero(table[:, 0] == 0)[0])
        table[number, 0] = os.getpid()
    _worker = _Worker(number, table[number], connections[number])
    # A garbage collection would touch every object of the parent process, and so copy its memory.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the training process too, which ends the pool
    # Unlike SIG_IGN, a handler is not inherited by programs that the worker starts.
    signal.signal(signal.SIGTERM, (lambda *_: None) if outlives else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DECIDED_BY_PARENT)
    threading.Thread(target=_end_with_parent, name="odb-parent-watch", daemon=True).start()
    torch.set_num_threads(1)
    try:
        _worker.work, seed = work(), random_seed(seed, number)
        dataset: Any = getattr(_worker.work, "dataset", None)
        torch_utils.worker._worker_info = torch_utils.worker.WorkerInfo(
            id=number, num_workers=len(table), seed=seed, dataset=dataset
        )
        seed_random_numbers(seed)
        if (initialize := init_fn()) is not None:
            initialize(number)
    except Exception as error:
        _worker.problem = error if isinstance(error, ConfigError) else DataError(f"a data worker: {one_line(error)}")


def _end_with_parent() -> None:
    """End this process within about a second of the end of the process that started it.

    When workers are forked, a later one holds the pipe of the parent too, but the id of the parent changes; with a
    forkserver the parent of the system is the server.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    is_child = os.getppid() == parent.pid
    while parent.is_alive() and not (is_child and os.getppid() != parent.pid):
        time.sleep(CHECK_S)
    os._exit(1)


Answer = tuple[Dumped, int]
"""The result of a call, and the number of the worker."""


def _run(name: str, args: tuple[Any, ...]) -> Answer:
    """Call a method of `work`. Raises only errors that another process can unpickle."""
    assert _worker is not None
    try:
        if _worker.problem is not None:
            raise _worker.problem
        value = getattr(_worker.work, name)(*args)
    except BaseException as error:
        raise (ConfigError if isinstance(error, ConfigError) else DataError)(one_line(error)) from None
    finally:
        at(-1)
    try:
        return dump(value, _worker.connection), _worker.number
    except Exception as error:
        raise NotSent(why_no_space(error) or one_line(error)) from None


class NotSent(DataError):
    """A result could not be sent to the training process."""


# In the training process.


Arrived = SimpleQueue[tuple[Any, Exception | None]]
"""The value of a call, or why it has none."""
Requests = SimpleQueue[Callable[[], None] | None]
"""What a thread of the pool asks the executor. The main thread does not: the handler of a signal may raise at any line
of `concurrent.futures`, and leave one of its locks closed for ever; a `SimpleQueue` has no such line."""


def _serve(requests: Requests) -> None:
    for request in iter(requests.get, None):
        request()
        del request  # it holds a result


class Pending:
    """A call that a pool computes. rows: the rows that it reads, for messages. in_place: the call, if there are no
    workers."""

    def __init__(self, pool: Pool, rows: Sequence[int], in_place: Callable[[], Any] | None = None):
        self._pool, self._rows, self._in_place, self._executor = pool, rows, in_place, pool.executor
        self._arrived: Arrived = SimpleQueue()
        self._call: Future[Answer] | None = None

    def begin(self, name: str, args: tuple[Any, ...]) -> None:
        """Send the call to a worker; in the thread of requests."""
        assert self._executor is not None
        try:
            self._call = self._executor.submit(_run, name, args)
        except BrokenProcessPool as error:
            self._arrived.put((None, error))
        except RuntimeError:
            self._arrived.put((None, ConfigError(CLOSED)))
        else:
            self._call.add_done_callback(partial(_arrive, self._pool, self._arrived))  # without `self`, which holds it

    def end(self) -> None:
        """Do not compute the call, unless it has begun; in the thread of requests."""
        if self._call is not None:
            self._call.cancel()

    def result(self, check: Callable[[], None] = lambda: None) -> Any:
        """The result of the call; waits for it. Call it once.

        check: called several times a second while this waits; may raise. Raises `DataError` if the call cannot be
        computed.
        """
        if self._in_place is not None:
            with kept_random_numbers():
                return self._in_place()
        end = time.monotonic() + (self._pool.timeout or math.inf)
        while True:
            try:
                value, error = self._arrived.get(timeout=POLL_S)
                break
            except Empty:
                if self._executor is not self._pool.executor:
                    raise ConfigError(CLOSED) from None
                check()
                if time.monotonic() > end:
                    raise DataError(self._pool.why_late()) from None
        if error is None:
            return value
        try:
            raise error
        except BrokenProcessPool:
            raise DataError(self._pool.why_broken()) from None
        except CancelledError:
            raise ConfigError(CLOSED) from None
        except NotSent as not_sent:
            named = name_rows(self._rows) if self._rows else "a plan"
            raise DataError(
                f"{named}: the result of a data worker cannot be sent to the training process ({one_line(not_sent)}); "
                "let dataset and collate_fn return objects that pickle takes, or set num_workers to 0."
            ) from None
        finally:
            del error  # a frame that holds the error it raised would keep both alive

    def cancel(self) -> None:
        """Do not compute the call, unless it has begun."""
        self._pool.requests.put(self.end)


def _arrive(pool: Pool, arrived: Arrived, call: Future[Answer]) -> None:
    """Receive a result; in a thread of the executor, one answer after the other, or in that of requests, if the answer
    is already there."""
    try:
        dumped, number = call.result()
        try:
            value = load(dumped, pool.connections[number])
        except Exception as cause:
            raise NotSent(one_line(cause)) from None
        if pool.device is not None:
            torch.accelerator.set_device_index(pool.device)  # each thread has its own device index
            value = torch_utils.pin_memory.pin_memory(value)
        arrived.put((value, None))
    except Exception as error:
        # The traceback of the error holds this frame, and with it both futures, which hold the error: the pipes of the
        # executor would stay open until the garbage collector comes. The cause is the traceback in the worker.
        error.__cause__ = None
        arrived.put((None, error.with_traceback(None)))


class Pool:
    """Computes methods of `work` in `num_workers` processes, or in place if there are none.

    work: `worker_init_fn` finds `work.dataset`, if any, in `get_worker_info()`. parts: options of a DataLoader,
    of which those of workers and pinned memory count.

        with closing(Pool(work, parts)) as pool:
            pool.start()
            pending = [pool.submit("square", number, rows=[number]) for number in range(10)]
            squares = [call.result() for call in pending]
    """

    def __init__(self, work: Any, parts: DataLoaderParts):
        self.work, self.parts = work, parts
        self.num_workers, self.timeout = parts.num_workers, parts.timeout
        self._context: Any = parts.multiprocessing_context
        if self._context is None or isinstance(self._context, str):
            self._context = multiprocessing.get_context(self._context)
        self.executor: ProcessPoolExecutor | None = None
        self._processes: Mapping[int, Any] = {}
        self.connections: list[socket.socket] = []
        self.device: int | None = None
        self.requests: Requests = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._table = NO_WORKER
        self._why_broken, self._owner = "", 0
        self._lock = threading.Lock()

    def start(self, seed: int = 0) -> None:
        """Start the workers, unless they run. Call it in the main thread: no thread of ours may run when they fork.

        seed: of the random numbers of `worker_init_fn`.
        Raises `ConfigError` if `work` cannot be sent to the workers.
        """
        if not self.num_workers or self.executor is not None:
            return
        self._why_broken, self._table = "", torch.tensor([[0, -1]] * self.num_workers).share_memory_()
        pairs = [socket.socketpair() for _ in range(self.num_workers)]
        self.connections = [parent_end for parent_end, _ in pairs]
        self.device = torch.accelerator.current_device_index() if self.parts.pin_memory else None
        arguments = (
            _Shipped(self.work, f"dataset: {type(self.parts.dataset).__name__}, or its cost_fn,"),
            _Shipped(self.parts.worker_init_fn, "worker_init_fn:"),
            seed,
            self._table,
            self._context.Lock(),
            [worker_end for _, worker_end in pairs],
            # A job scheduler sends SIGTERM to all processes. A training process with a handler, which may save a
            # checkpoint, needs its workers until then.
            callable(signal.getsignal(signal.SIGTERM)),
        )
        self.executor = executor = ProcessPoolExecutor(self.num_workers, self._context, _begin, arguments)
        self._processes, self._owner = executor._processes, os.getpid()  # by process id, as they are started
        _pools.add(self)
        # A worker that is being forked has the handlers of this process, which must not run in it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, DECIDED_BY_PARENT)
        try:
            for _ in range(self.num_workers):  # the first call starts all forked workers, each call one spawned worker
                executor.submit(os.getpid)
            self.requests = SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self.requests,), name="odb-requests", daemon=True)
            self._thread.start()
        except BaseException:
            self.close()
            raise
        finally:
            manager: Any = executor._executor_manager_thread
            if manager is not None:
                _threads.add(manager)
            for _, worker_end in pairs:
                worker_end.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # last: a handler may raise here

    def submit(self, name: str, *args: Any, rows: Sequence[int] = ()) -> Pending:
        """Compute `work.name(*args)`. rows: the rows that it reads."""
        if not self.num_workers:
            return Pending(self, rows, partial(getattr(self.work, name), *args))
        if self.executor is None:
            raise ConfigError(CLOSED)
        pending = Pending(self, rows)
        self.requests.put(partial(pending.begin, name, args))
        return pending

    def map(
        self, name: str, calls: Iterable[tuple[tuple[Any, ...], Sequence[int]]], ahead: int
    ) -> Generator[Any, None, None]:
        """The results of these calls (arguments, rows), in order; `ahead` of them are submitted before their turn."""
        pending: deque[Pending] = deque()
        try:
            for args, rows in calls:
                pending.append(self.submit(name, *args, rows=rows))
                if len(pending) > ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for submitted in pending:
                submitted.cancel()

    def why_late(self) -> str:
        """Why a result has not come within `timeout`."""
        busy = ", ".join(f"row {row} (pid {pid})" for pid, row in self._table.tolist() if row >= 0)
        return (
            f"no result of the data workers within timeout: {self.timeout:g} s; they are at {busy or 'no row'}: find "
            "the cause of their wait, or raise `timeout`."
        )

    def why_broken(self) -> str:
        """Why a worker has died; ends the other workers."""
        with self._lock:
            if not self._why_broken:
                # The worker that has died by itself, with its exit code; the executor terminates the others.
                codes: dict[int, int] = {}
                until = time.monotonic() + JOIN_S
                while self._processes and not codes and time.monotonic() < until:
                    time.sleep(0.01)
                    processes = list(self._processes.items())
                    codes = {pid: process.exitcode for pid, process in processes if process.exitcode is not None}
                pid = min(codes, key=lambda pid: codes[pid] == -signal.SIGTERM, default=0)
                row = dict(self._table.tolist()).get(pid, -1)
                place = f"at row {row} of the dataset" if row >= 0 else "at no row"
                self._why_broken = why_worker_died(pid, codes.get(pid), place)
                _kill(list(self._processes.values()))
        return self._why_broken

    def close(self) -> None:
        """End the workers, whatever they are doing. `start` starts new ones."""
        # In a process that was forked later, a lock of the executor may be held for ever.
        if self.executor is not None and os.getpid() == self._owner:
            processes = list(self._processes.values())
            self.requests.put(None)
            self.executor.shutdown(wait=False, cancel_futures=True)
            _kill(processes)
            if self._thread is not None and self._thread is not threading.current_thread():  # it may collect garbage
                self._thread.join(JOIN_S)
        # Last: the handler of a signal may raise at any line above, and `_close_all` then calls this again. These hold
        # file descriptors.
        self._processes, self.connections, self._table = {}, [], NO_WORKER
        self.executor = None
        _pools.discard(self)


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(JOIN_S)


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
"""Pools whose workers run."""
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads of the executors."""


def _close_all() -> None:
    for pool in list(_pools):
        pool.close()
    for thread in list(_threads):  # Python wakes them next, by pipes that they close when they end
        thread.join(JOIN_S)


# For a program that ends without closing its loader: Python waits for all submitted calls before it runs the functions
# of `atexit`. It runs the functions that are registered here before.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]

# The work of the pool of a loader.

OBSERVES, COLLATES = range(2)
"""Parts of the seed, so that a sample has other random numbers when it is observed than when it is collated."""
Draws = tuple[int, int]
"""Seed and epoch, from which random numbers follow."""
Row = int | RawItem | Rejection | Sample
"""The number of a row of the dataset, an item of a stream, or either after it was observed."""


class Work:
    """The methods that a worker computes. rows: observes rows of the dataset. groups: collates samples."""

    def __init__(self, rows: ObservedDataset, groups: CollatedDataset):
        self.rows, self.groups = rows, groups

    @property
    def dataset(self) -> Any:
        return self.rows.dataset

    def observe(self, draws: Draws, rows: Sequence[Row]) -> list[Sample | Rejection]:
        return [row if isinstance(row, Sample | Rejection) else self._observe(draws, row) for row in rows]

    def _observe(self, draws: Draws, row: int | RawItem) -> Sample | Rejection:
        id = row.id if isinstance(row, RawItem) else row
        at(id)
        seed_random_numbers(*draws, OBSERVES, id)
        return self.rows[row]

    def collate(self, draws: Draws, samples: Sequence[Sample]) -> Salvaged:
        first = samples[0].id
        at(first)
        seed_random_numbers(*draws, COLLATES, first)
        return self.groups.salvage(samples)

    def stand_in(self, draws: Draws, rows: Sequence[Row]) -> tuple[Sample | None, dict[int, str]]:
        """The smallest of these rows that can be collated; for the rows before it, the reason why not, by id."""
        observed = self.observe(draws, rows)
        reasons = {row.id: row.reason for row in observed if isinstance(row, Rejection)}
        for sample in sorted((row for row in observed if isinstance(row, Sample)), key=size):
            try:
                self.groups.collate([sample])
            except DataError:
                reasons[sample.id] = "that cannot be collated"
            else:
                return sample, reasons
        return None, reasons

    def compute(self, function: Callable[[], R]) -> R:
        """function: pure; of a module."""
        return function()


def size(sample: Sample) -> tuple[int, int]:
    """The order of samples by size (tokens and patches), then by id."""
    return sample.cost.patches + sample.cost.padded, sample.id


# A look at single rows before there is a loader. A worker process reads them, if the loader has workers: its workers
# must not inherit files that a dataset opens at its first read.


def look(parts: DataLoaderParts, function: Callable[[Any], R]) -> R:
    """`function(dataset)`, in another process if these parts have workers; random numbers stay as they are."""
    parts = replace(parts, num_workers=min(parts.num_workers, 1), pin_memory=False)
    work = SimpleNamespace(dataset=parts.dataset, look=partial(function, parts.dataset))
    with closing(Pool(work, parts)) as pool:
        pool.start()
        result: R = pool.submit("look").result()
        return result


def ends_of(parts: DataLoaderParts) -> object:
    """Fingerprints of the first and the last row of a dataset with an index, for ranks to compare; None if they are
    random: a row that reads differently the second time (augmentation, random masks)."""
    try:
        first, again, last = look(parts, _ends)
    except Exception as error:  # the loader reports what cannot be read
        return type(error).__name__
    return [first, last] if first == again else None


def _ends(dataset: Any) -> list[int]:
    return [fingerprint(dataset[index]) for index in (0, 0, len(dataset) - 1)]


def why_not_observed(parts: DataLoaderParts, observer: ItemObserver) -> str:
    """Observe the first item of a dataset with an index, and set `units_from` of the observer.

    Returns "", or why items of this kind cannot be observed: they need a `cost_fn` or labels, or `cost_fn` returns no
    cost.
    """
    message, observer.units_from = look(parts, partial(_first_observed, observer))
    return message


def _first_observed(observer: ItemObserver, dataset: Any) -> tuple[str, UnitsFrom | None]:
    """Why items of this kind cannot be observed, or ""; `units_from` of the observer."""
    message = ""
    try:
        observer(dataset[0])
    except ItemError as error:
        message = str(error)
    except Exception:  # the row cannot be read; the loader reports it, by its policy
        pass
    return message, observer.units_from
