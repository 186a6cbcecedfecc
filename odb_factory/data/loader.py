"""`ODBLoader`: a pool of worker processes that observes rows and collates micro-batches, and the planner between them.

One background thread plans, ahead of what is being collated (`Pass`).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor

from odb_factory.config import ResolvedConfig
from odb_factory.data.agreement import block_settings, compare, releases
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
from odb_factory.data.ranks import Ranks
from odb_factory.data.samples import LeftOut, MicroBatch, OptimizerStep, Rejection, Remaining, Sample, no_usable_row
from odb_factory.data.serialize import Picklable
from odb_factory.data.steps import EpochContext, EpochPlanner, FillEpoch, KeepEpoch
from odb_factory.errors import CollectiveError, ConfigError, DataError, one_line
from odb_factory.log import get_logger
from odb_factory.planner import Budget, Collation, Limits
from odb_factory.random_numbers import random_seed

logger = get_logger(__name__)

LayoutName = Literal["padded", "flat"]
OBSERVE_CHUNK = 8
"""Rows that a worker observes at a time: fewer messages, still a short first wait."""
STAND_IN_CHUNK = 16
"""Rows of which the smallest that can be collated stands in for the samples of an idle micro-batch."""
ROWS_TO_TRY = 64
"""Rows from which those of the check of a layout are chosen."""
ABORT_S = 7.0
"""After a failure planning is given this long to end."""
STEPS_AHEAD = 2
BYTES_AHEAD = 1 << 28
"""Optimizer steps that are planned ahead of the one that is collated, and most bytes of the samples in them (256 MiB);
samples beyond these steps: `buffer_size`."""


class Pass:
    """One pass over an epoch: plans optimizer steps ahead, hands on their micro-batches in order.

    planner: iterated by a thread of its own or, without a window, by who asks for a micro-batch. collate: begins to
    collate samples. window: micro-batches that are collated ahead; 0: there are no worker processes.
    planned: micro-batches, not yet handed to the pool. in_flight: those being collated, in order. epoch_steps:
    optimizer steps of the epoch according to its first plan.
    is_taken: an iterator over its micro-batches has been handed out. is_empty: nothing was left of a resumed epoch but
    rows that cannot be used.
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
        # What the thread has planned; at the end the error, if there was one, and None.
        self._plans: deque[list[MicroBatch] | BaseException | None] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if window:
            self._thread = threading.Thread(target=self._run, name="odb-planner", daemon=True)
            self._thread.start()

    def plan(self, timeout_s: float) -> bool:
        """Take a plan, if there is one within `timeout_s` seconds; False at the end of the epoch.

        Raises what the planner has raised.
        """
        if self._thread is None:
            plan = next(self._source, None)
            self.planned.extend(plan or ())
            return plan is not None
        with self._changed:
            self._changed.wait_for(lambda: self._plans, timeout_s)
            if not self._plans:
                return True
            taken = self._plans[0]
            if taken is None or (isinstance(taken, BaseException) and self.in_flight):
                return False  # the error comes after what is in flight
            self._plans.popleft()
            self._changed.notify_all()
        if isinstance(taken, list):
            self.planned.extend(taken)
            return True
        try:
            raise taken
        finally:
            del taken  # a frame that holds the error it raised would keep both alive, and the workers with them

    def next(self, check: Callable[[], None]) -> tuple[MicroBatch, Salvaged] | None:
        """The next micro-batch, None at the end of the epoch. check: called while it waits; may raise."""
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
        with self._changed:
            self.planner.is_left = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """End the thread, within `timeout_s` if it is stuck in a worker or a peer."""
        self.stop()
        if self._thread is None:
            self._source.close()
        else:
            self._thread.join(timeout_s)
        for _, pending in self.in_flight:
            pending.cancel()
        self.planned.clear()
        self.in_flight.clear()

    def _run(self) -> None:
        try:
            for plan in self._source:
                with self._changed:
                    self._plans.append(plan)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self.planner.is_left or self._has_room())
                    if self.planner.is_left:
                        break
            self._source.close()
        except BaseException as error:
            if not self.planner.is_left:  # nobody would take it, and its frames hold the workers
                self._plans.append(error)
        with self._changed:
            self._plans.append(None)
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Whether to plan another time: what waits has room for it beside the step that is collated."""
        micro_batches = [micro_batch for plan in self._plans if isinstance(plan, list) for micro_batch in plan]
        steps = {micro_batch.step.index for micro_batch in micro_batches}
        samples = [sample for micro_batch in micro_batches for sample in micro_batch.light]
        size = sum(len(sample.features) for sample in samples)
        return not steps or (size < BYTES_AHEAD and (len(steps) < STEPS_AHEAD or len(samples) < self._most_samples))


class ODBLoader:
    """Iterate over the collated micro-batches of one epoch on this rank: (`MicroBatch`, `Measured`, batch).

    parts: the dataset that `observer` reads rows from, its order over all ranks, the framework's collator, unchanged,
    and the workers. rule: what makes an optimizer step. collation: what the collator adds to a group (default: its
    `pad_to_multiple_of`). layout: of the micro-batches, whatever the config asks for; with_boundaries: flat ones carry
    what `varlen_arguments` returns. positions: makes the positions of a padded batch with images that has none, for the
    flat layout. measure, patch_size: how collated batches are measured.
    ranks: the data-parallel ones (default: this process alone). With several ranks, all make their loaders at
    the same place of the program. agree_on: settings, beside the config's, that all ranks must have in common.
    fingerprint: of the dataset, if a framework has taken columns away (default: its own). keeps_samples: a
    micro-batch keeps its light samples, to be collated again. is_evaluated: of `ObservedDataset`.
    budget: as configured. lowered: to what the training has lowered it since (see `lower`).
    num_samples, num_optimizer_steps: of an epoch; None if not known (no length; the steps of `fill`).
    global_batch_size: samples of an optimizer step on all ranks; None with `fill`.
    left_out: rows that this rank leaves out.
    groups: what collates its micro-batches, in its layout. has_rows: rows have numbers; those of a stream have none.
    epoch: of the pass under way, or of the next. under_way: the pass that has begun and is not over.
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
        self.dataset, self.config, self.rule = parts.dataset, config, rule
        self._keeps_samples, self._seed = keeps_samples, seed
        # The Trainer wraps its collator to remove columns from items.
        collator = getattr(parts.collate_fn, "data_collator", parts.collate_fn)
        collation = collation or Collation(pad_to_multiple_of=getattr(collator, "pad_to_multiple_of", None) or 1)
        self._ranks = ranks or Ranks()
        self.rank, self.world_size = rank, world_size = self._ranks.rank, self._ranks.world_size
        self.budget = budget = Budget(
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
            budget,
            measure,
            # Units are counted from the labels of batches; otherwise a `cost_fn` gives them.
            counts_labels=bool(getattr(observer, "counts_labels", True)),
            with_boundaries=with_boundaries,
            falls_back=config.layout == "auto",
            positions=None if positions is None else Picklable(positions, "get_rope_index"),
        )
        self._rows = rows = ObservedDataset(parts.dataset, observer, config, budget, is_evaluated=is_evaluated)
        self._parts, self._pool = parts, Pool(Work(rows, self.groups), parts)
        self._window = parts.prefetch_factor * parts.num_workers  # also chunks of rows that are observed ahead
        self.has_rows = parts.sampler is not None
        self._order: Any
        if self.has_rows:
            self._order = ShardSampler(parts.sampler, rank, world_size)
        else:
            whole = parts.batch_size if parts.drop_last else 0
            self._order = StreamReader(
                parts.dataset, rank, world_size, is_split=parts.already_split, whole_batches_of=whole
            )
        self._stand_in: Sample | None = None
        self._first_seen: list[Sample | Rejection] = []  # of a stream
        self._lock, self._is_closed = threading.Lock(), False
        # The length of a split stream may be that of this rank's part or of the whole.
        is_split = getattr(self._order, "is_split", False)
        self.num_samples: int | None = (
            None if is_split else length_of(parts.dataset if parts.sampler is None else parts.sampler)
        )
        self._stock = stock = rule.stock_steps(config, world_size, self.num_samples, is_split=is_split)
        if stock is not None and stock.remainder:
            self._order.stop = stock.num_samples
        self.global_batch_size: int | None = None if stock is None else stock.global_batch_size
        self.num_optimizer_steps: int | None = None if stock is None else stock.steps_an_epoch
        self._cursor = Cursor(
            {
                "global_batch_size": "fill" if stock is None else stock.global_batch_size,
                "samples": self.num_samples if stock is None else stock.num_samples,
                "seed": parts.sampler.initial_seed if isinstance(parts.sampler, SeedableRandomSampler) else None,
                "fingerprint": fingerprint or getattr(parts.dataset, "_fingerprint", None),
                "split_among": world_size if is_split else None,
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
        if isinstance(observer, ItemObserver) and parts.sampler is not None and world_size > 1 and not is_evaluated:
            # A dataset that is already a rank's part would be split again; the first and the last row show it.
            self._settings["what the first and the last row of the dataset say"] = ends_of(parts)
        self.epoch = 0
        self.under_way: Pass | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; each epoch has its own order."""
        if epoch != self.epoch:
            if self._cursor.is_loaded:
                logger.warning(
                    "epoch %d begins and the state that was loaded is dropped: it stands in epoch %d, begin with that",
                    epoch,
                    self.epoch,
                )
            self.leave()
            self.epoch = epoch
            self._cursor.turn_to(epoch)

    def consume(self, step: OptimizerStep) -> None:
        """This optimizer step, and all before it, have been trained on: the next state is that after it."""
        if self.under_way is not None or step.last:  # or asked for what comes after the last
            self._cursor.consume(step)

    def leave(self, timeout_s: float | None = None) -> None:
        """Leave the epoch, on all ranks at the same optimizer step.

        timeout_s: how long to wait for planning that is stuck (default: that of the ranks).
        """
        current, self.under_way = self.under_way, None
        if current is not None:
            current.close(self._ranks.silence_s if timeout_s is None else timeout_s)
            if not self._parts.persistent_workers:
                self._pool.close()

    def lower(self, limits: Limits) -> None:
        """Plans to come are made with budgets no higher than these, on all ranks."""
        self.lowered = limits.least(self.lowered)

    def stand_in(self, collated: Sequence[Sample] = ()) -> Sample:
        """The smallest of these samples and of one that is found once, by any thread: for a micro-batch that weighs
        nothing.

        The one is the smallest of the first usable rows in the order of all ranks, and has been collated. Raises
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
        return self._ranks.ring.main.gather(message, "comparing settings")

    def describe(self, id: int) -> str:
        """Where a row comes from, for messages."""
        return self._rows.where(id)

    def collate(self, micro_batch: MicroBatch) -> Collated:
        """Collate it again, in this process. Raises `DataError` if that fails."""
        failed, measured, batch = self.groups.salvage(micro_batch.light)
        if measured is None or failed:
            raise self._not_collated(failed)
        return micro_batch, measured, batch

    def state_dict(self) -> dict[str, Any]:
        """Where the training stands after the last optimizer step consumed: JSON types, the same on all ranks.

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
        """Optimizer steps of an epoch. With `fill` it begins the epoch and is an estimate; 0 if not known."""
        an_epoch = self.num_optimizer_steps
        return self.begin().epoch_steps if an_epoch is None else an_epoch

    def first_samples(self) -> Iterator[Sample]:
        """The first samples of the epoch under way in the order of all ranks."""
        if self.has_rows:
            self._start_workers()
            rows = self._observe(dict.fromkeys(self._order.order[:ROWS_TO_TRY].tolist()))
            yield from (row for row in rows if isinstance(row, Sample))

    def begin(self) -> Pass:
        """The pass under way, or one that begins here and has its first plan. Collective."""
        if self.under_way is None:
            try:
                self.under_way = self._begin()
            except BaseException as error:
                self._abandon(error)
                raise
        return self.under_way

    def __iter__(self) -> Iterator[Collated]:
        """Begin the epoch, or continue one that `begin` has begun; ends an iterator that was handed out before."""
        if self.under_way is not None and self.under_way.is_taken:
            self.leave()
        current = self.begin()
        current.is_taken = True
        return self._micro_batches(current)

    def close(self, timeout_s: float | None = None) -> None:
        """Leave the epoch, end the worker processes, release the connections of the ranks. timeout_s: see `leave`."""
        self.leave(timeout_s)
        self._is_closed = True
        self._pool.close()
        self._ranks.close()

    def abort(self, message: str) -> None:
        """Report to the other ranks why this one ends, then close without waiting for them."""
        self._ranks.ring.fail(message)
        self.close(ABORT_S)

    def release(self, pid: int) -> None:
        """End what this process alone needs, for garbage collection: calls no collective and waits for no rank.

        pid: of the process that made the loader; a worker process, which inherits it, does nothing.

        A thread ends the rest, the planning thread and the connections of the ranks. At the end of the program this
        one does: the interpreter must not be taken down under a thread that computes.
        """
        if os.getpid() != pid:
            return
        if self.under_way is not None:
            self.under_way.stop()
        self._is_closed = True
        self._pool.close()
        if threading.main_thread().is_alive():
            threading.Thread(target=self.close, args=(ABORT_S,), name="odb-release", daemon=True).start()
        else:
            self.close(ABORT_S)

    def _begin(self) -> Pass:
        cursor, ranks = self._cursor, self._ranks
        cursor.turn_to(self.epoch)
        place, stock = cursor.place, self._stock
        self._order.set_epoch(self.epoch)
        start = place.remaining
        if stock is not None:
            start = Remaining(first=place.optimizer_steps * stock.global_batch_size)
        assert start is not None
        self._order.start = start
        if not self._parts.persistent_workers:  # they would not notice how the dataset has changed
            self._pool.close()
        self._start_workers()  # before there are threads
        compare({**self._settings, **place.settings}, self._compare)
        context = EpochContext(
            budget=self.budget,
            num_samples=self.num_samples,
            config=self.config,
            seed=self._seed,
            ranks=ranks,
            stand_in=self.stand_in,
            leave_out=self.left_out.leave_out,
            reader=self._order,
            lowered=lambda: self.lowered,
            # function: of a module, and pure
            compute=lambda function, *args, **kwargs: self._pool.submit("compute", function, args, kwargs).result(),
        )
        observed = self._observe(iter(self._order))
        if self.has_rows:
            cursor.check_order(self._order.fingerprint)
        planner: EpochPlanner
        if stock is not None:
            planner = KeepEpoch(observed, context, place, start, stock=stock)
        else:
            planner = FillEpoch(observed, context, place, start, accumulation=self.rule.accumulation)

        def collate(samples: Sequence[Sample]) -> Pending:
            return self._pool.submit("collate", self._draws, samples, rows=[sample.id for sample in samples])

        self.under_way = current = Pass(planner, collate, self._window, self.config.buffer_size)
        while not current.planned:
            if not current.plan(POLL_S):
                current.is_empty = True
                cursor.turn_to(self.epoch + 1)
                return current
            ranks.ring.check()
        current.epoch_steps = current.planned[0].step.epoch_steps
        return current

    # What its workers do

    def _start_workers(self) -> None:
        """Start them, unless they run. In the main thread."""
        if self._is_closed:
            raise ConfigError(CLOSED)
        self._pool.start(random_seed(self._draws[0], self.rank))

    @property
    def _draws(self) -> Draws:
        """The seed follows torch's global one, or that of the user's generator, of which nothing is drawn."""
        generator = self._parts.generator
        return torch.initial_seed() if generator is None else generator.initial_seed(), self.epoch

    def _observe(self, rows: Iterable[Row]) -> Iterator[Sample | Rejection]:
        calls = (((self._draws, chunk), _ids(chunk)) for chunk in batched(rows, OBSERVE_CHUNK))
        with closing(self._pool.map("observe", calls, self._window)) as observed:
            for row in itertools.chain.from_iterable(observed):
                if not self.has_rows and len(self._first_seen) < STAND_IN_CHUNK:
                    self._first_seen.append(row)
                yield row

    def _find_stand_in(self) -> Sample:
        self._start_workers()
        sources: list[Iterable[Row]]
        if self.has_rows:
            sources = [map(int, self._order.order)]
        else:
            # First what this rank has drawn: a second iterator may move the file of the one under way, or end it.
            sources = [list(self._first_seen), StreamReader(self._parts.dataset, 0, 1)]
        reasons: dict[int, str] = {}  # a row may be looked at twice
        for source in sources:
            for chunk in batched(source, STAND_IN_CHUNK):
                sample, unusable = self._pool.submit("stand_in", self._draws, chunk, rows=_ids(chunk)).result()
                if sample is not None:
                    return sample
                reasons |= unusable
        raise DataError(no_usable_row(Counter(reasons.values())))

    # Its micro-batches

    def _micro_batches(self, current: Pass) -> Iterator[Collated]:
        try:
            while (result := current.next(self._ranks.ring.check)) is not None:
                handed, result = [self._usable(*result)], None
                # The receiver holds the only reference.
                yield handed.pop()
        except GeneratorExit:
            # Not waited for: the loop may have ended by an exception, which must be reported to the others first.
            current.stop()
            raise
        except BaseException as error:
            self._abandon(error)
            raise
        if self.under_way is current:
            self.leave()

    def _usable(self, micro_batch: MicroBatch, salvaged: Salvaged) -> Collated:
        """The micro-batch without the rows that cannot be collated: they weigh 0 (`on_error: skip`)."""
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
            self._ranks.ring.cause(0.0)  # the main thread is told
        else:
            self._ranks.ring.fail(one_line(error))
        self.leave(ABORT_S)


def batched(rows: Iterable[Row], count: int) -> Iterator[list[Row]]:
    """Lists of `count` rows; the last may have fewer."""
    rest = iter(rows)
    while chunk := list(itertools.islice(rest, count)):
        yield chunk


def _ids(rows: Sequence[Row]) -> list[int]:
    return [row if isinstance(row, int) else row.id for row in rows]
