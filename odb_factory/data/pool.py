"""The worker processes of a rank: one pool that observes rows, plans and collates.

1. A call is submitted by the name of a method of `work`; calls are begun in the order in which they are submitted.
2. `work` is inherited by fork, or pickled once for each worker under spawn and forkserver. Without workers a call is
   computed in place, when its result is asked for.
3. Random numbers are seeded by what is computed (seed, epoch, sample), so they depend neither on workers nor on a
   resume.
4. A worker ends with the process that started it, whatever ends that; the training process decides about Ctrl-C and
   SIGTERM.
5. A worker that fails, that dies, or that is not done in time, is one line with its row and the cause.
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
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.multiprocessing  # tensors travel in shared memory
from torch.utils.data import _utils as torch_utils

from odb_factory.data.collate import CollatedDataset, Salvaged
from odb_factory.data.observe import ItemError, ItemObserver, ObservedDataset, RawItem, UnitsFrom
from odb_factory.data.order import DataLoaderParts
from odb_factory.data.samples import Rejection, Sample, name_rows
from odb_factory.data.serialize import NOT_SENT, Dumped, dump, fingerprint, load
from odb_factory.ending import why_no_space, why_worker_died
from odb_factory.errors import ConfigError, DataError, one_line
from odb_factory.random_numbers import kept_random_numbers, random_seed, seed_random_numbers

R = TypeVar("R")

CHECK_S = 1.0
"""How often a worker looks for its parent."""
POLL_S = 0.2
"""How often a thread that waits for a result looks at other things."""
JOIN_S = 5.0
"""A killed process is waited for this long."""
DECIDED_BY_PARENT = (signal.SIGINT, signal.SIGTERM)
NO_WORKER = torch.zeros(0, 2, dtype=torch.int64)
CLOSED = "odb: this loader has been closed; make another one."

# In a worker process.


@dataclass(slots=True)
class _Worker:
    """This process as a worker. line: its own of the table of `_begin`. connection: see `serialize.dump`. problem: why
    it can compute nothing."""

    number: int
    line: np.ndarray
    connection: socket.socket
    work: Any = None
    problem: Exception | None = None


_worker: _Worker | None = None


def at(row: int) -> None:
    """This worker process is at this row of the dataset (-1: at none), for messages of the process that waits."""
    if _worker is not None:
        _worker.line[1] = row


class _Shipped:
    """Makes its content in a worker process: inherited by fork, else pickled when the process is started, and
    unpickled once the worker watches its parent: that may take long, or fail."""

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

    shared_table: int64[num_workers, 2], the process id of each worker (0: it has not begun) and the row that it is at
    (-1: none). lock: over the choice of a line of it. outlives: SIGTERM does not end the worker.
    """
    global _worker
    table = shared_table.numpy()
    with lock:
        number = int(np.flatnonzero(table[:, 0] == 0)[0])
        table[number, 0] = os.getpid()
    _worker = _Worker(number, table[number], connections[number])
    # A collection would look at every object of the process that this one was forked from, and so copy its memory.
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
"""What a call has come to, and the number of the worker."""


def _run(name: str, args: tuple[Any, ...]) -> Answer:
    """Raises only what arrives whole in another process."""
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


class Pending:
    """A call that a pool computes. rows: that it is about, for messages."""

    def __init__(self, pool: Pool, call: Callable[[], Any] | Future[Answer], rows: Sequence[int]):
        self._pool, self._call, self._rows = pool, call, rows
        self._arrived: Future[Any] = Future()
        if isinstance(call, Future):
            call.add_done_callback(partial(_arrive, pool, self._arrived))  # without a reference to this object

    def result(self, check: Callable[[], None] = lambda: None) -> Any:
        """The result of the call; waits for it.

        check: called several times a second while it waits; may raise. Raises `DataError` if the call cannot be
        computed.
        """
        if not isinstance(self._call, Future):
            with kept_random_numbers():
                return self._call()
        end = time.monotonic() + (self._pool.timeout or math.inf)
        while True:
            try:
                return self._arrived.result(POLL_S)
            except TimeoutError:
                check()
                if time.monotonic() > end:
                    raise DataError(self._pool.why_late()) from None
            except BrokenProcessPool:
                raise DataError(self._pool.why_broken()) from None
            except CancelledError:
                raise ConfigError(CLOSED) from None
            except NotSent as error:
                named = name_rows(self._rows) if self._rows else "a plan"
                raise DataError(
                    f"{named}: what a data worker has made cannot be sent to the training process "
                    f"({one_line(error)}); let dataset and collate_fn return what pickle takes, or set num_workers to "
                    "0."
                ) from None

    def cancel(self) -> None:
        """Nobody asks for the result any more."""
        if isinstance(self._call, Future):
            self._call.cancel()


def _arrive(pool: Pool, arrived: Future[Any], call: Future[Answer]) -> None:
    """In a thread of the executor, for one answer after the other."""
    try:
        dumped, number = call.result()
        try:
            value = load(dumped, pool.connections[number])
        except Exception as cause:
            raise NotSent(one_line(cause)) from None
        if pool.device is not None:
            torch.accelerator.set_device_index(pool.device)  # this thread has one of its own
            value = torch_utils.pin_memory.pin_memory(value)
        arrived.set_result(value)
    except BaseException as error:
        # Its traceback holds this frame, and with it both futures, which hold the error: the pipes of the executor
        # would stay open until the garbage collector comes. Its cause is the traceback in the worker.
        error.__cause__ = None
        arrived.set_exception(error.with_traceback(None))


class Pool:
    """Computes methods of `work` in `num_workers` processes, or in place if there are none.

    work: `work.dataset`, if there is such, is what `worker_init_fn` finds in `get_worker_info()`. parts: those options
    of a DataLoader count that are about workers and pinned memory.

        with closing(Pool(work, parts)) as pool:
            pool.start()
            pending = [pool.submit("square", number, rows=[number]) for number in range(10)]
            squares = [one.result() for one in pending]
    """

    def __init__(self, work: Any, parts: DataLoaderParts):
        self.work, self.parts = work, parts
        self.num_workers, self.timeout = parts.num_workers, parts.timeout
        self._context: Any = parts.multiprocessing_context
        if self._context is None or isinstance(self._context, str):
            self._context = multiprocessing.get_context(self._context)
        self._executor: ProcessPoolExecutor | None = None
        self._processes: Mapping[int, Any] = {}
        self.connections: list[socket.socket] = []
        self.device: int | None = None
        self._table = NO_WORKER
        self._why_broken, self._owner = "", 0
        self._lock = threading.Lock()

    def start(self, seed: int = 0) -> None:
        """Start the workers, unless they run. Call it in the main thread: no thread of ours may run when they fork.

        seed: of what `worker_init_fn` draws.
        Raises `ConfigError` if what they need cannot be sent to them.
        """
        if not self.num_workers or self._executor is not None:
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
            # A job scheduler sends SIGTERM to all processes. A training process that handles it, to save a checkpoint
            # for one, needs its workers until then.
            callable(signal.getsignal(signal.SIGTERM)),
        )
        self._executor = executor = ProcessPoolExecutor(self.num_workers, self._context, _begin, arguments)
        self._processes, self._owner = executor._processes, os.getpid()  # by process id, as they are started
        _pools.add(self)
        # A worker that is being forked has the handlers of this process, which must not run in it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, DECIDED_BY_PARENT)
        try:
            for _ in range(self.num_workers):  # the first starts all workers that are forked, each starts a spawned one
                executor.submit(os.getpid)
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
        """Have `work.name(*args)` computed. rows: that it is about."""
        if not self.num_workers:
            return Pending(self, partial(getattr(self.work, name), *args), rows)
        executor = self._executor
        if executor is None:
            raise ConfigError(CLOSED)
        try:
            return Pending(self, executor.submit(_run, name, args), rows)
        except BrokenProcessPool:
            raise DataError(self.why_broken()) from None
        except RuntimeError:  # it is being shut down
            raise ConfigError(CLOSED) from None

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
        busy = ", ".join(f"row {row} (pid {pid})" for pid, row in self._table.tolist() if row >= 0)
        return (
            f"nothing came from the data workers within timeout: {self.timeout:g} s; they are at "
            f"{busy or 'no row'}: look for what they wait for, or raise `timeout`."
        )

    def why_broken(self) -> str:
        """Why a worker has died; ends the others."""
        with self._lock:
            if not self._why_broken:
                # The one that has died by itself, with its exit code; the executor terminates the others.
                dead: list[tuple[int, int | None]] = []
                until = time.monotonic() + JOIN_S
                while not dead and time.monotonic() < until:
                    time.sleep(0.01)
                    dead = [
                        (pid, one.exitcode) for pid, one in list(self._processes.items()) if one.exitcode is not None
                    ]
                pid, code = min(dead, key=lambda pid_and_code: pid_and_code[1] == -signal.SIGTERM, default=(0, None))
                row = dict(self._table.tolist()).get(pid, -1)
                place = f"at row {row} of the dataset" if row >= 0 else "at no row"
                self._why_broken = why_worker_died(pid, code, place)
                _kill(list(self._processes.values()))
        return self._why_broken

    def close(self) -> None:
        """End the workers, whatever they are doing. `start` starts other ones."""
        # A copy, in a process that was forked later, may hold a lock of the executor that nobody releases there.
        if self._executor is not None and os.getpid() == self._owner:
            processes = list(self._processes.values())
            self._executor.shutdown(wait=False, cancel_futures=True)
            _kill(processes)
        # Last: the handler of a signal may raise at any line above, and `_close_all` then calls this again.
        self._processes, self.connections, self._table = {}, [], NO_WORKER  # they hold file descriptors
        self._executor = None
        _pools.discard(self)


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(JOIN_S)


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
"""Those whose workers run."""
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Those of the executors."""


def _close_all() -> None:
    for pool in list(_pools):
        pool.close()
    for thread in list(_threads):  # Python wakes them next, by a pipe that each closes at its end
        thread.join(JOIN_S)


# A program that ends without closing its loader: Python waits for all that is submitted before it calls what `atexit`
# has. What is registered here it calls before.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]

# What the pool of a loader computes.

OBSERVES, COLLATES = range(2)
"""By which random numbers of the same sample differ."""
Draws = tuple[int, int]
"""The seed and the epoch that random numbers follow from."""
Row = int | RawItem | Rejection | Sample
"""The number of a row of the dataset, an item of a stream, or what either has been observed as."""


class Work:
    """rows: observed; groups: collates them."""

    def __init__(self, rows: ObservedDataset, groups: CollatedDataset):
        self.rows, self.groups = rows, groups

    @property
    def dataset(self) -> Any:
        return self.rows.dataset

    def observe(self, draws: Draws, rows: Sequence[Row]) -> list[Sample | Rejection]:
        observed = []
        for row in rows:
            if not isinstance(row, Sample | Rejection):
                id = row.id if isinstance(row, RawItem) else row
                at(id)
                seed_random_numbers(*draws, OBSERVES, id)
                row = self.rows[row]
            observed.append(row)
        return observed

    def collate(self, draws: Draws, samples: Sequence[Sample]) -> Salvaged:
        first = samples[0].id
        at(first)
        seed_random_numbers(*draws, COLLATES, first)
        return self.groups.salvage(samples)

    def stand_in(self, draws: Draws, rows: Sequence[Row]) -> tuple[Sample | None, dict[int, str]]:
        """The smallest of these rows that can be collated; of the others before it, why not."""
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

    def compute(self, function: Callable[..., R], args: Any, kwargs: Any) -> R:
        return function(*args, **kwargs)


def size(sample: Sample) -> tuple[int, int]:
    return sample.cost.patches + sample.cost.padded, sample.id


# A look at single rows before there is a loader. A worker reads them, if there are any: the workers to come must not
# inherit what a dataset opens when it is read first.


def look(parts: DataLoaderParts, function: Callable[[Any], R]) -> R:
    """`function(dataset)`, in a process of its own if these parts have workers; random numbers stay as they are."""
    parts = replace(parts, num_workers=min(parts.num_workers, 1), pin_memory=False)
    work = SimpleNamespace(dataset=parts.dataset, look=partial(function, parts.dataset))
    with closing(Pool(work, parts)) as pool:
        pool.start()
        result: R = pool.submit("look").result()
        return result


def ends_of(parts: DataLoaderParts) -> object:
    """What the first and the last row of a dataset with an index say, for ranks to compare; None if that is random.

    A row that reads differently the second time (augmentation, random masks) says nothing about the data.
    """
    try:
        first, again, last = look(parts, _ends)
    except Exception as error:  # the loader reports what cannot be read
        return type(error).__name__
    return [first, last] if first == again else None


def _ends(dataset: Any) -> list[int]:
    return [fingerprint(dataset[index]) for index in (0, 0, len(dataset) - 1)]


def why_not_observed(parts: DataLoaderParts, observer: ItemObserver) -> str:
    """Observe the first item of a dataset with an index, and note what units of its items are counted from.

    Returns "", or why items of this kind cannot be observed: they need a `cost_fn` or labels, or `cost_fn` returns no
    cost.
    """
    message, observer.units_from = look(parts, partial(_first_observed, observer))
    return message


def _first_observed(observer: ItemObserver, dataset: Any) -> tuple[str, UnitsFrom | None]:
    """What is wrong with the kind of an item, or ""; what its units are counted from."""
    message = ""
    try:
        observer(dataset[0])
    except ItemError as error:
        message = str(error)
    except Exception:  # a row that cannot be read; the loader reports it, by its policy
        pass
    return message, observer.units_from
