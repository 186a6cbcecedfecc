"""The two stages of an `ODBLoader`, each an ordinary torch DataLoader: one observes rows, one collates micro-batches.

A dataset that is iterated has a third before them, which reads.

Fork safety: workers are forked in the caller's thread, before the planning thread of the epoch starts, and the thread
that watches the other ranks holds no lock that a worker uses. A process that others fork in the middle of an epoch
(transformers' evaluation does) never touches the locks of our queues.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from odb_factory.data.collate import CollatedDataset
from odb_factory.data.observe import ObservedDataset
from odb_factory.data.order import DataLoaderParts, ShardSampler, StreamReader, make_loader, read, start
from odb_factory.data.processes import BusyRows, PlanProcess, worker_seed
from odb_factory.data.samples import ReadRows, Rejection, Sample, Task, no_usable_row
from odb_factory.ending import LESS_MEMORY, why_worker_failed
from odb_factory.errors import ConfigError, DataError, one_line

# ----------------------------------------------------------------------------------------------------------------------
# Run a generator ahead of its consumer; hand a DataLoader what its sampler does not know when it is made.

POLL_S = 0.02


class Prefetcher:
    """The items of `source`, made ahead of `poll` by a daemon thread, whose exception is raised in `poll`.

    ahead: items made before they are asked for; 0: each is made in `poll`, by the caller's thread. An item is begun
    when there is room for it: what the source holds for an item in the making is not held beside `ahead` others.
    The thread runs from `start` on, so that a caller can fork what it needs before.
    """

    def __init__(self, source: Generator[Any, None, None], ahead: int):
        self._source, self._has_thread = source, ahead > 0
        self._items: queue.Queue = queue.Queue()
        self._room = threading.Semaphore(max(ahead - 1, 0))  # beside the first
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="odb-planner", daemon=True)

    def start(self) -> None:
        if self._has_thread:
            self._thread.start()

    def poll(self, timeout: float | None = POLL_S) -> Any:
        """The next item. Raises `queue.Empty` if there is none within `timeout` seconds, StopIteration at the end."""
        if not self._has_thread:
            return next(self._source)
        if self._thread.ident is None:
            raise queue.Empty
        item, error = self._items.get(timeout=timeout)
        self._room.release()
        if error is None:
            return item
        try:
            raise error
        finally:
            del error  # a frame that holds the error it raised would keep both alive, and the workers with them

    def stop(self) -> None:
        """Let the thread end when it can."""
        self._stop.set()

    def close(self, timeout_s: float) -> None:
        """Close the source and end the thread, within `timeout_s` if it is stuck in a worker or a peer."""
        self.stop()
        if not self._has_thread:
            self._source.close()
        elif self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            # A source that has not begun could not report that it leaves to the ranks that wait for its first item.
            self._items.put((next(self._source), None))
            while not self._stop.is_set():
                if self._room.acquire(timeout=POLL_S):
                    self._items.put((next(self._source), None))
            self._source.close()
        except BaseException as error:
            if not self._stop.is_set():  # nobody would take it, and its frames hold the workers
                self._items.put((None, error))


class Feed:
    """The sampler of a DataLoader that yields what `source` does, once.

    torch makes an iterator that it does not use, so the source is taken when its first item is asked for. Nothing else
    holds it, because leaving an epoch must end the processes that it reads from.
    """

    source: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        source, self.source = self.source, iter(())
        yield from source


# ----------------------------------------------------------------------------------------------------------------------

OBSERVE_CHUNK = 8
"""Samples an observe worker hands over at a time: fewer messages, still a short first wait."""
OBSERVES, COLLATES, READS = range(3)
"""The stages, by which their workers draw other random numbers."""
END = object()
"""What `take` returns after the last."""
STAND_INS_TRIED, SMALL_ONES_TRIED = 64, 16
"""Rows that are tried for a micro-batch that weighs nothing, and how many at a time, of which the smallest is taken."""


class LoaderWorkers:
    """The DataLoaders that read, observe and collate, made of `parts`, and the worker processes of all.

    rows, groups: what observes and what collates. collate_workers: None: as many as there are observe workers; 0: this
    process collates. order: the rows of this rank, epoch by epoch; its `start` says where the next pass begins.
    read_rows: observes rows of the dataset, by their numbers (see `read`); None for a stream.

    A dataset that is iterated has one worker more, which reads it for the observe workers and is restarted in each
    epoch. Only what is collated is pinned. The seed of the workers is that of `generator` (None: the global one).
    Raises `ConfigError` where what the workers need cannot be sent to them.
    """

    def __init__(
        self,
        parts: DataLoaderParts,
        rows: ObservedDataset,
        groups: CollatedDataset,
        collate_workers: int | None,
        rank: int,
        world_size: int,
    ):
        num_workers = parts.num_workers
        self.num_collating = num_workers if collate_workers is None else collate_workers
        self._parts, self._rows, self._groups, self._rank = parts, rows, groups, rank
        self._tasks, self._chunks = Feed(), Feed()
        rows.busy, groups.busy = BusyRows(num_workers), BusyRows(self.num_collating)
        self._stand_in: Sample | None = None
        self._seen: list[Sample | Rejection] = []
        self._lock = threading.Lock()
        loaders = self._loaders = dict[int, DataLoader]()
        self.order: Any
        self.read_rows: ReadRows | None = None
        if parts.sampler is None:
            whole = parts.batch_size if parts.drop_last else None
            self.order = StreamReader(
                parts.dataset, rank, world_size, is_split=parts.already_split, whole_batches_of=whole
            )
            # A persistent worker would not hear of another epoch or state.
            once = {"persistent_workers": False} if num_workers else {}
            loaders[READS] = make_loader(self.order, parts, min(num_workers, 1), batch_size=OBSERVE_CHUNK, **once)
            rows.sends_dataset = False
            loaders[OBSERVES] = make_loader(rows, parts, num_workers, batch_sampler=self._chunks)
        else:
            self.read_rows = functools.partial(read, rows, parts=parts)
            self.order = ShardSampler(parts.sampler, rank, world_size)
            loaders[OBSERVES] = make_loader(rows, parts, num_workers, batch_size=OBSERVE_CHUNK, sampler=self.order)
        loaders[COLLATES] = make_loader(
            groups,
            parts,
            self.num_collating,
            sampler=self._tasks,
            batch_size=None,
            pin_memory=parts.pin_memory,
            pin_memory_device=parts.pin_memory_device,
        )

    def observe(self, epoch: int) -> Iterator[Sample | Rejection]:
        """The rows of this rank in the epoch that `order` is set to."""
        if READS in self._loaders:
            chunks = _taken(self._start(READS, epoch), "reads", BusyRows())
            # torch asks for some when it starts the workers, in the caller's thread: these are empty, so that nobody
            # waits there until the stream yields.
            ahead: Iterator[list[Any]] = itertools.repeat([], self._parts.prefetch_factor * self._parts.num_workers)
            self._chunks.source = itertools.chain(ahead, (list(self.order.items(chunk)) for chunk in chunks))
        observed = _taken(self._start(OBSERVES, epoch), "observes", self._rows.busy)
        return map(self._noted, itertools.chain.from_iterable(observed))

    def _noted(self, row: Sample | Rejection) -> Sample | Rejection:
        """The first rows of a stream are kept: one of them may be a stand-in."""
        if self.read_rows is None and len(self._seen) < SMALL_ONES_TRIED:
            self._seen.append(row)
        return row

    def collate(self, epoch: int, tasks: Iterator[Task | None]) -> Iterator[Any]:
        """The outcomes of these tasks, None for a task that is None; ask for them with `take`."""
        self._tasks.source = tasks
        return self._start(COLLATES, epoch)

    def plan_process(self) -> PlanProcess | None:
        """What plans an epoch; None: the caller's own thread, for nothing here has processes."""
        return PlanProcess(self._parts.multiprocessing_context) if self.num_collating else None

    def stand_in(self) -> Sample:
        """A sample for micro-batches that weigh nothing, which has been collated once: the smallest of the first usable
        rows in the order of all ranks. Found once, in this process, by any thread.

        Raises `DataError` if no row can be used.
        """
        with self._lock:
            self._stand_in = self._stand_in or self._find_stand_in()
            return self._stand_in

    def _find_stand_in(self) -> Sample:
        reasons: dict[int, str] = {}  # a row may be looked at twice
        for rows in self._rows_to_try():
            usable = _usable(rows, reasons)
            for _ in range(STAND_INS_TRIED // SMALL_ONES_TRIED):
                for sample in sorted(itertools.islice(usable, SMALL_ONES_TRIED), key=size):
                    try:
                        self._groups.collate([sample])
                    except DataError:
                        reasons[sample.id] = "that cannot be collated"
                    else:
                        return sample
        raise DataError(no_usable_row(Counter(reasons.values())))

    def _rows_to_try(self) -> Iterator[Iterable[Sample | Rejection]]:
        """Rows in the order of all ranks, read and observed in this process. Of a stream first those that this rank has
        drawn: a second iterator may move the file of the one under way, or end it."""
        if self.read_rows is not None:
            yield map(self._rows.__getitem__, self.order.whole())
            return
        yield list(self._seen)
        reader = StreamReader(self._parts.dataset, 0, 1)
        yield (self._rows[item] for item in reader.items(reader))

    def close(self) -> None:
        """End the worker processes."""
        self._rows.busy.close()
        self._groups.busy.close()
        self._loaders.clear()

    def _start(self, stage: int, epoch: int) -> Iterator[Any]:
        """Begin an epoch; starts the workers, unless they live on.

        Their seeds follow torch's global one, or that of the user's generator, of which nothing is drawn: a training
        sees the same random numbers with and without us, and workers of an epoch the same after a resume.
        """
        loader = self._loaders.get(stage)
        if loader is None:
            raise ConfigError("odb: this loader has been closed; make another one.")
        generator = self._parts.generator
        seed = torch.initial_seed() if generator is None else generator.initial_seed()
        loader.generator.manual_seed(worker_seed(seed, self._rank, stage, epoch))
        return start(loader, self._parts)


def take(batches: Iterator[Any], task: str, busy: BusyRows) -> Any:
    """What the workers of a DataLoader give next, or `END`. busy: where they are.

    Raises `DataError` where a worker has died or is not heard of; what a worker has raised is in its message.
    """
    try:
        return next(batches, END)
    except (ConnectionError, EOFError, FileNotFoundError, MemoryError, RuntimeError) as error:
        where, why = busy.describe(task), why_worker_failed(error)
        if str(error).startswith("DataLoader timed out after"):
            why = f"{str(error).rstrip('.')}; look for what it waits for, or raise `timeout`."
        elif isinstance(error, ConnectionError | EOFError | FileNotFoundError):
            why = f"a DataLoader worker was killed while it handed over its result ({one_line(error)}); {LESS_MEMORY}"
        if why is None:
            raise
        raise DataError(f"nothing came from {where}: {why}") from None


def size(sample: Sample) -> tuple[int, int]:
    return sample.cost.patches + sample.cost.padded, sample.id


def _usable(rows: Iterable[Sample | Rejection], reasons: dict[int, str]) -> Iterator[Sample]:
    """reasons: of the others, by their ids; filled here."""
    for row in rows:
        if isinstance(row, Sample):
            yield row
        else:
            reasons[row.id] = row.reason


def _taken(batches: Iterator[Any], task: str, busy: BusyRows) -> Iterator[Any]:
    return iter(functools.partial(take, batches, task, busy), END)
