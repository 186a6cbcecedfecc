"""`ODBLoader`: a pool of worker processes that observes rows and collates micro-batches, and the planner between them.

One background thread plans, ahead of what is being collated (`Pass`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from queue import Empty, SimpleQueue
from typing import Any, Literal

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor

from odb_factory.config import ResolvedConfig
from odb_factory.data.collate import Collated, CollatedDataset, Salvaged
from odb_factory.data.cursor import Cursor
from odb_factory.data.observe import DEFAULT_PATCH_SIZE, ItemObserver, Measure, ObservedDataset, Observer, measure_batch
from odb_factory.data.order import (
    DataLoaderParts,
    OptimizerStepRule,
    ShardSampler,
    StreamReader,
    length_of,
)
from odb_factory.data.pool import CLOSED, POLL_S, Draws, Pending, Pool, Row, Work, ends_of, size
from odb_factory.data.ranks import Ranks, block_settings, compare, releases
from odb_factory.data.samples import (
    LeftOut,
    MicroBatch,
    OptimizerStep,
    Picklable,
    Rejection,
    Remaining,
    Sample,
    no_usable_row,
)
from odb_factory.data.steps import EpochPlanner, FillEpoch, KeepEpoch
from odb_factory.errors import CollectiveError, ConfigError, DataError, one_line
from odb_factory.log import get_logger
from odb_factory.planner import Budget, Collation, Limits
from odb_factory.random_numbers import random_seed

logger = get_logger(__name__)

LayoutName = Literal["padded", "flat"]
OBSERVE_CHUNK = 8
"""Rows that a worker observes at a time: fewer messages, still a short first wait."""
STAND_IN_CHUNK = 16
"""Rows among which the smallest that can be collated is chosen as a stand-in."""
ROWS_TO_TRY = 64
"""Rows from which the check of a layout chooses."""
ABORT_S = 7.0
"""After a failure planning has this long to end."""
ALONE_S = 10.0
ALONE = (
    "rank %d has left the epoch before its end, and waits until the other ranks leave it, at most %g s "
    "(exchange_timeout_s): all ranks must leave at the same optimizer step"
)
STEPS_AHEAD = 2
"""Optimizer steps that are planned ahead of the step that is collated; more of them if they have fewer samples than
`buffer_size`."""
BYTES_AHEAD = 1 << 28
"""Largest size of the samples in these steps (256 MiB)."""


class Pass:
    """One pass over an epoch: plans optimizer steps ahead and returns their micro-batches in order.

    planner: iterated in a thread of its own; if there are no worker processes, when a micro-batch is asked for.
    collate: begins to collate samples. window: micro-batches that are collated ahead; 0: there are no workers.
    planned: micro-batches that are not yet collated. in_flight: those being collated, in order. epoch_steps: optimizer
    steps of the epoch according to its first plan.
    is_taken: an iterator over its micro-batches exists. is_empty: the rest of a resumed epoch has no usable row.
    """

    def __init__(
        self, planner: EpochPlanner, collate: Callable[[Sequence[Sample]], Pending], window: int, most_samples: int
    ):
        self.planner, self._collate, self._window, self._most_samples = planner, collate, window, most_samples
        self.planned: deque[MicroBatch] = deque()
        self.in_flight: deque[tuple[MicroBatch, Pending]] = deque()
        self.epoch_steps = 0
        self.is_taken = self.is_empty = False
        self._source = iter(planner)
        self._plans: SimpleQueue[list[MicroBatch] | None] = SimpleQueue()  # from the thread; None: the last one
        self._taken: SimpleQueue[None] = SimpleQueue()  # to the thread: a plan has been taken
        self._is_over = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if window:
            self._thread = threading.Thread(target=self._run, name="odb-planner", daemon=True)
            self._thread.start()

    def plan(self, timeout_s: float) -> bool:
        """Take a plan, if there is one within `timeout_s` seconds; False at the end of the epoch.

        Raises the error of the planner, once nothing is in flight.
        """
        if self._thread is None:
            plan = next(self._source, None)
            self.planned.extend(plan or ())
            return plan is not None
        if not self._is_over:
            try:
                plan = self._plans.get(timeout=timeout_s)
            except Empty:
                return True
            if plan is not None:
                self._taken.put(None)
                self.planned.extend(plan)
                return True
            self._is_over = True
        if self._error is None or self.in_flight:
            return False
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error  # a frame that holds the error it raised would keep both alive, and the workers with them

    def next(self, check: Callable[[], None]) -> tuple[MicroBatch, Salvaged] | None:
        """The next micro-batch; None at the end of the epoch. check: called while it waits; may raise."""
        has_more = not (self.is_empty or self.planner.is_left)
        while has_more and len(self.in_flight) < max(self._window, 1):
            if self.planned:
                micro_batch = self.planned.popleft()
                self.in_flight.append((micro_batch, self._collate(micro_batch.light)))
            elif self.in_flight:
                has_more = self.plan(0) and bool(self.planned)
            else:
                has_more = self.plan(POLL_S)
                check()
        if not self.in_flight:
            return None
        salvaged = self.in_flight[0][1].result(check)
        return self.in_flight.popleft()[0], salvaged

    def stop(self) -> None:
        """Let the thread end when it can."""
        self.planner.is_left = True
        self._taken.put(None)

    def close(self, timeout_s: float) -> None:
        """End planning; wait at most `timeout_s` seconds if it is stuck in a worker or a peer."""
        self.stop()
        thread, ranks = self._thread, self.planner.loader.ranks
        if thread is None:  # the other ranks, which may be in a collective of the training, have to hear of it
            thread = threading.Thread(target=self._source.close, name="odb-planner", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                thread.start()
        if thread.ident is not None:
            thread.join(min(timeout_s, ALONE_S))
        if thread.is_alive() and timeout_s > ALONE_S:
            if ranks.world_size > 1:
                logger.warning(ALONE, ranks.rank, timeout_s)
            thread.join(timeout_s - ALONE_S)
        for _, pending in self.in_flight:
            pending.cancel()
        self.planned.clear()
        self.in_flight.clear()

    def _run(self) -> None:
        waiting: deque[list[MicroBatch]] = deque()
        try:
            for plan in self._source:
                self._plans.put(plan)
                waiting.append(plan)
                while not (self.planner.is_left or (self._taken.empty() and self._has_room(waiting))):
                    self._taken.get()
                    waiting.popleft()
                if self.planner.is_left:
                    break
            self._source.close()
        except BaseException as error:
            if not self.planner.is_left:  # a pass that is left raises no error, whose frames would hold the workers
                self._error = error
        self._plans.put(None)

    def _has_room(self, waiting: Iterable[Sequence[MicroBatch]]) -> bool:
        """Whether the thread may plan once more, next to the plans that wait."""
        micro_batches = list(itertools.chain.from_iterable(waiting))
        num_steps = len({micro_batch.step.index for micro_batch in micro_batches})
        sizes = [len(sample.features) for micro_batch in micro_batches for sample in micro_batch.light]
        return not num_steps or (
            sum(sizes) < BYTES_AHEAD and (num_steps < STEPS_AHEAD or len(sizes) < self._most_samples)
        )


class ODBLoader:
    """Iterate over the collated micro-batches of one epoch on this rank: (`MicroBatch`, `Measured`, batch).

    parts: the dataset that `observer` reads rows from, its order over all ranks, the framework's collator, unchanged,
    and the workers. rule: the optimizer steps of stock. collation: what the collator adds to a group (default: its
    `pad_to_multiple_of`). layout: of the micro-batches, whatever the config asks for; with_boundaries: flat ones carry
    the result of `varlen_arguments`. positions: computes the positions of a padded batch with images that has none, for
    the flat layout. measure, patch_size: how collated batches are measured.
    ranks: the data-parallel ranks (default: this process alone). All ranks make their loaders at the same place of the
    program. agree_on: settings, in addition to the config's, that all ranks must have in common.
    fingerprint: of the dataset, if a framework has removed columns (default: its own). keeps_samples: a micro-batch
    keeps its light samples, to be collated again. is_evaluated: see `ObservedDataset`.
    budget: as configured. lowered: the limits to which the training has lowered it since (see `lower`).
    num_samples, num_optimizer_steps: of an epoch; None if unknown (no length; the steps of `fill`).
    global_batch_size: samples of an optimizer step on all ranks; None with `fill`.
    left_out: logs the rows that this rank leaves out.
    groups: collates the micro-batches, in their layout. has_rows: rows have numbers; those of a stream have none.
    epoch: of the current pass, or of the next. under_way: the current pass. spares: see `PlannedLoader`.
    Call `close` when done; it ends the worker processes.
    """

    def __init__(
        self,
        parts: DataLoaderParts,
        config: ResolvedConfig,
        *,
        observer: Observer,
        rule: OptimizerStepRule,
        collation: Collation | None = None,
        layout: LayoutName = "padded",
        with_boundaries: bool = False,
        positions: Callable[[Mapping[str, Any]], Tensor] | None = None,
        measure: Measure = measure_batch,
        patch_size: int = DEFAULT_PATCH_SIZE,
        seed: int = 0,
        ranks: Ranks | None = None,
        agree_on: Mapping[str, object] | None = None,
        fingerprint: str | None = None,
        keeps_samples: bool = False,
        is_evaluated: bool = False,
    ):
        self.dataset, self.config, self.rule, self.seed = parts.dataset, config, rule, seed
        self._keeps_samples = keeps_samples
        self.ranks = ranks = ranks or Ranks()
        self.rank, self.world_size = ranks.rank, ranks.world_size
        # The Trainer wraps its collator to remove columns from items.
        collator = getattr(parts.collate_fn, "data_collator", parts.collate_fn)
        collation = collation or Collation(pad_to_multiple_of=getattr(collator, "pad_to_multiple_of", None) or 1)
        self.budget = Budget(
            config.token_budget,
            config.max_patches,
            collation if layout == "flat" else collation.in_one_row(),
            layout,
            pad_to_multiple_of=config.pad_to_multiple_of or 1,
            row_multiple=config.row_multiple,
        )
        self.lowered: Limits | None = None
        self.left_out = LeftOut()
        self.groups = CollatedDataset(
            Picklable(parts.collate_fn, "collate_fn"),
            patch_size,
            self.budget,
            measure,
            # Units are counted from the labels of batches; otherwise a `cost_fn` gives them.
            counts_labels=bool(getattr(observer, "counts_labels", True)),
            with_boundaries=with_boundaries,
            falls_back=config.layout == "auto",
            positions=None if positions is None else Picklable(positions, "get_rope_index"),
        )
        self._rows = ObservedDataset(parts.dataset, observer, config, self.budget, is_evaluated=is_evaluated)
        self._parts, self.pool = parts, Pool(Work(self._rows, self.groups), parts)
        self._window = parts.prefetch_factor * parts.num_workers  # also chunks of rows that are observed ahead
        self.spares: list[Sample] = []
        self._stand_in: Sample | None = None
        self._lock, self._is_closed = threading.Lock(), False
        self.has_rows = parts.sampler is not None
        self.order: Any
        if self.has_rows:
            self.order = ShardSampler(parts.sampler, self.rank, self.world_size)
        else:
            whole = parts.batch_size if parts.drop_last else 0
            self.order = StreamReader(
                parts.dataset, self.rank, self.world_size, is_split=parts.already_split, whole_batches_of=whole
            )
        # The length of a split stream may be that of this rank's part or of the whole.
        is_split = getattr(self.order, "is_split", False)
        self.num_samples: int | None = (
            None if is_split else length_of(parts.sampler if self.has_rows else parts.dataset)
        )
        self._stock = stock = rule.stock_steps(config, self.world_size, self.num_samples, is_split=is_split)
        if stock is not None and stock.remainder:
            self.order.stop = stock.num_samples
        self.global_batch_size: int | None = None if stock is None else stock.global_batch_size
        self.num_optimizer_steps: int | None = None if stock is None else stock.steps_an_epoch
        self._cursor = Cursor(
            {
                "global_batch_size": self.global_batch_size or "fill",
                "samples": self.num_samples if stock is None else stock.num_samples,
                "seed": parts.sampler.initial_seed if isinstance(parts.sampler, SeedableRandomSampler) else None,
                "fingerprint": fingerprint or getattr(parts.dataset, "_fingerprint", None),
                "split_among": self.world_size if is_split else None,
            }
        )
        self._settings = {
            **releases(),
            **block_settings(config),
            **rule.settings,
            "seed": seed,
            "collation": collation,
            "layout of the micro-batches": layout,
            "number of samples": self.num_samples,
            **(agree_on or {}),
        }
        if isinstance(observer, ItemObserver) and self.has_rows and self.world_size > 1 and not is_evaluated:
            # A dataset that is already a rank's part would be split again; the first and the last row show it.
            self._settings["checksums of the first and the last row of the dataset"] = ends_of(parts)
        self.epoch = 0
        self.under_way: Pass | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; each epoch has its own order."""
        if epoch != self.epoch:
            if self._cursor.is_loaded:
                logger.warning(
                    "epoch %d begins, and the loaded state, of epoch %d, is dropped; begin with the epoch of the state",
                    epoch,
                    self.epoch,
                )
            self.leave()
            self.epoch = epoch
            self._cursor.turn_to(epoch)

    def consume(self, step: OptimizerStep) -> None:
        """Note that this optimizer step, and all before it, have been trained on: the next state is that after it."""
        if self.under_way is not None or step.last:  # the iterator may have ended the pass after the last step
            self._cursor.consume(step)

    def leave(self, timeout_s: float | None = None) -> None:
        """Leave the epoch, on all ranks at the same optimizer step.

        timeout_s: how long to wait for planning that is stuck (default: `silence_s` of the ranks).
        """
        current, self.under_way = self.under_way, None
        if current is not None:
            current.close(self.ranks.silence_s if timeout_s is None else timeout_s)
            if not self._parts.persistent_workers:
                self.pool.close()

    def lower(self, limits: Limits) -> None:
        """Make further plans with budgets no higher than these, on all ranks."""
        self.lowered = limits.least(self.lowered)

    def stand_in(self, collated: Sequence[Sample] = ()) -> Sample:
        """The sample of a micro-batch that weighs nothing: the smallest of `collated` and of a sample that is searched
        once, by any thread.

        The search takes the smallest of the first usable rows in the order of all ranks, if it can be collated. Raises
        `DataError` if no row can be used.
        """
        with self._lock:
            self._stand_in = self._stand_in or self._find_stand_in()
        return min([*collated, self._stand_in], key=size)

    def over_all_ranks(self, counts: Counter[str]) -> Counter[str]:
        """The sum of these counts over all ranks. Collective; main thread."""
        return sum(map(pickle.loads, self._compare(pickle.dumps(counts))), Counter())

    def _compare(self, message: bytes) -> list[bytes]:
        """The messages of all ranks. Main thread."""
        return self.ranks.ring.main.gather(message, "comparing settings")

    def describe(self, id: int) -> str:
        """Where a row comes from, for messages."""
        return self._rows.where(id)

    def collate(self, micro_batch: MicroBatch) -> Collated:
        """Collate a micro-batch again, in this process. Raises `DataError` if that fails."""
        failed, measured, batch = self.groups.salvage(micro_batch.light)
        if measured is None or failed:
            raise self._not_collated(failed)
        return micro_batch, measured, batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last optimizer step consumed: JSON types, the same on all ranks.

        Less than a kilobyte; with `fill`, also a number for each sample that is held back.
        """
        return self._cursor.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state that any rank has written, on any number of ranks.

        Raises `DataError` if the data are not those of the state; if their order differs, when the epoch begins.
        """
        self._cursor.load(state)
        self.leave()
        self.epoch = self._cursor.place.epoch

    def go_to(self, epoch: int, optimizer_steps: int = 0) -> None:
        """Stand after this many (kept) optimizer steps of an epoch, as a training without odb does."""
        self.leave()
        place = {} if self._stock is None else {"planned": optimizer_steps * self._stock.global_batch_size}
        self._cursor.open(epoch, is_loaded=True, optimizer_steps=optimizer_steps, **place)
        self.epoch = epoch

    def estimate_optimizer_steps(self) -> int:
        """Optimizer steps of an epoch. With `fill` an estimate, for which the epoch begins; 0 if unknown."""
        an_epoch = self.num_optimizer_steps
        return self.begin().epoch_steps if an_epoch is None else an_epoch

    def first_samples(self) -> Iterator[Sample]:
        """The first samples of the current epoch, in the order of all ranks."""
        if self.has_rows:
            self._start_workers()
            rows = self._observe(dict.fromkeys(self.order.order[:ROWS_TO_TRY].tolist()))
            yield from (row for row in rows if isinstance(row, Sample))

    def begin(self) -> Pass:
        """The current pass, or a new one with its first plan. Collective."""
        if self.under_way is None:
            try:
                self.under_way = self._begin()
            except BaseException as error:
                self._abandon(error)
                raise
        return self.under_way

    def __iter__(self) -> Iterator[Collated]:
        """Begin the epoch, or continue the pass of `begin`; ends the iterator before this one."""
        if self.under_way is not None and self.under_way.is_taken:
            self.leave()
        current = self.begin()
        current.is_taken = True
        return self._micro_batches(current)

    def close(self, timeout_s: float | None = None) -> None:
        """Leave the epoch, end the worker processes, release the connections of the ranks. timeout_s: see `leave`."""
        self.leave(timeout_s)
        self._is_closed = True
        self.pool.close()
        self.ranks.close()

    def abort(self, message: str) -> None:
        """Report to the other ranks why this one ends, then close without waiting for them."""
        self.ranks.ring.fail(message)
        self.close(ABORT_S)

    def release(self, pid: int) -> None:
        """Close for garbage collection: calls no collective and waits for no rank.

        pid: of the process that made the loader; a worker process, which inherits the loader, does nothing.

        Another thread ends the planning thread and the connections of the ranks. At the end of the program this thread
        does: the interpreter must not be taken down under a thread that computes.
        """
        if os.getpid() != pid:
            return
        if self.under_way is not None:
            self.under_way.stop()
        self._is_closed = True
        self.pool.close()
        if threading.main_thread().is_alive():
            threading.Thread(target=self.close, args=(ABORT_S,), name="odb-release", daemon=True).start()
        else:
            self.close(ABORT_S)

    def _begin(self) -> Pass:
        cursor, order, stock = self._cursor, self.order, self._stock
        cursor.turn_to(self.epoch)
        place = cursor.place
        order.set_epoch(self.epoch)
        order.start = place.remaining
        if stock is not None:
            order.start = Remaining(first=place.optimizer_steps * stock.global_batch_size)
        if not self._parts.persistent_workers:  # they would not notice how the dataset has changed
            self.pool.close()
        self._start_workers()  # before there are threads
        compare({**self._settings, **place.settings}, self._compare)
        arguments = self, self._observe(iter(order)), place
        if self.has_rows:
            cursor.check_order(order.fingerprint)
        planner: EpochPlanner
        if stock is not None:
            planner = KeepEpoch(*arguments, stock=stock)
        else:
            planner = FillEpoch(*arguments, accumulation=self.rule.accumulation)

        def collate(samples: Sequence[Sample]) -> Pending:
            return self.pool.submit("collate", self._draws, samples, rows=[sample.id for sample in samples])

        self.under_way = current = Pass(planner, collate, self._window, self.config.buffer_size)
        while not current.planned:
            if not current.plan(POLL_S):
                current.is_empty = True
                cursor.turn_to(self.epoch + 1)
                return current
            self.ranks.ring.check()
        current.epoch_steps = current.planned[0].step.epoch_steps
        return current

    # The calls of its workers

    def _start_workers(self) -> None:
        """Start the workers, unless they run. In the main thread."""
        if self._is_closed:
            raise ConfigError(CLOSED)
        self.pool.start(random_seed(self._draws[0], self.rank))

    @property
    def _draws(self) -> Draws:
        """The seed is torch's global one, or that of the user's generator, from which nothing is drawn."""
        generator = self._parts.generator
        return torch.initial_seed() if generator is None else generator.initial_seed(), self.epoch

    def _observe(self, rows: Iterable[Row]) -> Iterator[Sample | Rejection]:
        calls = (((self._draws, chunk), _ids(chunk)) for chunk in batched(rows, OBSERVE_CHUNK))
        with closing(self.pool.map("observe", calls, self._window)) as observed:
            yield from itertools.chain.from_iterable(observed)

    def _find_stand_in(self) -> Sample:
        self._start_workers()
        sources: list[Iterable[Row]]
        if self.has_rows:
            sources = [map(int, self.order.order)]
        else:  # first the samples at hand: a second iterator of a stream may move the file of the first one, or end it
            sources = [self.spares, StreamReader(self._parts.dataset, 0, 1)]
        reasons: dict[int, str] = {}  # a row may be looked at twice
        for source in sources:
            for chunk in batched(source, STAND_IN_CHUNK):
                sample, unusable = self.pool.submit("stand_in", self._draws, chunk, rows=_ids(chunk)).result()
                if sample is not None:
                    return sample
                reasons |= unusable
        raise DataError(no_usable_row(Counter(reasons.values())))

    # Micro-batches

    def _micro_batches(self, current: Pass) -> Iterator[Collated]:
        try:
            while (result := current.next(self.ranks.ring.check)) is not None:
                handed, result = [self._usable(*result)], None
                # The receiver holds the only reference.
                yield handed.pop()
        except GeneratorExit:
            # Without a wait: the loop may have ended by an exception, which must be reported to the other ranks first.
            current.stop()
            raise
        except BaseException as error:
            self._abandon(error)
            raise
        if self.under_way is current:
            self.leave()

    def _usable(self, micro_batch: MicroBatch, salvaged: Salvaged) -> Collated:
        """The micro-batch without its rows that cannot be collated: they weigh 0 (`on_error: skip`)."""
        failed, measured, batch = salvaged
        if failed and self.config.on_error == "raise":
            raise self._not_collated(failed)
        if failed and not micro_batch.idle:
            late = [(sample, failed[sample.id]) for sample in micro_batch.samples if sample.id in failed]
            usable = [number for number, id in enumerate(micro_batch.ids) if id not in failed]
            causes = tuple((sample, f"cannot be collated: {cause}") for sample, cause in late)
            micro_batch = micro_batch.only(usable, causes)
        if measured is None:
            try:
                micro_batch = dataclasses.replace(micro_batch, light=[self.stand_in()])
                measured, batch = self.groups.collate(micro_batch.light)
            except DataError:
                raise self._not_collated(failed) from None
        if not self._keeps_samples:
            micro_batch = dataclasses.replace(micro_batch, light=())
        return micro_batch, measured, batch

    def _not_collated(self, failed: Mapping[int, str]) -> DataError:
        """Why the micro-batch cannot be trained on."""
        id, cause = next(iter(failed.items()))
        may_skip = self.config.on_error == "raise" and not self._rows.is_evaluated
        skips = " (`on_error: skip` leaves such rows out)" if may_skip else ""
        return DataError(f"{self.describe(id)}: cannot be collated: {cause}; fix or remove the row{skips}.")

    def _abandon(self, error: BaseException) -> None:
        """Leave after an error. All ranks have a `CollectiveError`; any other is reported to them."""
        if isinstance(error, CollectiveError):
            self.ranks.ring.cause(0.0)  # the main thread knows the failure now
        else:
            self.ranks.ring.fail(one_line(error))
        self.leave(ABORT_S)


def batched(rows: Iterable[Row], count: int) -> Iterator[list[Row]]:
    """Lists of `count` rows; the last may have fewer."""
    rest = iter(rows)
    while chunk := list(itertools.islice(rest, count)):
        yield chunk


def _ids(rows: Sequence[Row]) -> list[int]:
    return [row if isinstance(row, int) else row.id for row in rows]
