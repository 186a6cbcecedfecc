"""The passes of an `ODBLoader` over its epochs, one at a time: begun, handed on, left, given up.

A trap of torch shapes this: a DataLoader asks its sampler for the next index before it hands over a batch that is
ready. So the sampler (`TaskSampler`) never waits, it yields None while nothing is planned, and the worker's answer to
None is passed over.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from odb_factory.config import ResolvedConfig
from odb_factory.data.collate import Collated, Failure
from odb_factory.data.epoch import EpochContext
from odb_factory.data.handed_out import HandedOut
from odb_factory.data.loader_workers import END, LoaderWorkers, take
from odb_factory.data.plan_process import compute_here
from odb_factory.data.prefetch import BackgroundPrefetcher, InlinePrefetcher
from odb_factory.data.resume.progress import Progress
from odb_factory.data.step_agreement import StepAgreement
from odb_factory.data.step_times import StepTimes
from odb_factory.data.task_sampler import Pass
from odb_factory.errors import CollectiveError, ConfigError, DataError, one_line
from odb_factory.log import get_logger

ABORT_S = 7.0
"""After a failure planning is given this long to end; a DataLoader looks for dead workers every 5 s."""

logger = get_logger(__name__)


class Passes:
    """What begins, hands on and ends the passes of a loader, whose parts these are.

    settings: what all ranks must have in common; compared when a pass begins.
    epoch: of the pass under way, or of the next. under_way: the pass that has begun and is not over.
    handed_out: micro-batches whose optimizer step is not consumed. rejected: rows of the epoch that cannot be used.
    wants_save: whether this rank asks all ranks for a checkpoint; called before each optimizer step, in any thread.
    """

    def __init__(
        self,
        workers: LoaderWorkers,
        context: EpochContext,
        progress: Progress,
        times: StepTimes,
        *,
        config: ResolvedConfig,
        settings: Mapping[str, object],
    ):
        self._workers, self._context, self._progress, self._times = workers, context, progress, times
        self._config, self._settings, self._order = config, settings, workers.order
        self._coordinator = context.coordinator
        self.epoch = 0
        self.under_way: Pass | None = None
        self.handed_out = HandedOut()
        self.rejected: Counter[str] = Counter()
        self.wants_save: Callable[[], bool] = lambda: False

    def turn_to(self, epoch: int) -> None:
        """The next pass is over this epoch."""
        if epoch != self.epoch:
            if self._progress.is_loaded:
                logger.warning(
                    "epoch %d begins and the state that was loaded is dropped: it stands in epoch %d, begin with that",
                    epoch,
                    self.epoch,
                )
            self.leave()
            self.epoch = epoch
            self._progress.turn_to(epoch)

    def begun(self) -> Pass:
        """The pass under way, or one that is begun here and has its first plan. Collective."""
        if self.under_way is None:
            try:
                self.under_way = self._begin()
            except BaseException as error:
                self._abandon(error)
                raise
        return self.under_way

    def micro_batches(self) -> Iterator[Collated]:
        """Those of a pass that has begun, or of a new one; an iterator handed out before is over."""
        if self.under_way is not None and self.under_way.taken:
            self.leave()
        current = self.begun()
        current.taken = True
        return self._micro_batches(current)

    def collated(self, item: Collated | Failure) -> Collated:
        """Raises `DataError` where the collator failed."""
        if isinstance(item, Failure):
            raise DataError(item.message(self._workers.describe, self._config.on_error))
        return item

    def leave(self, timeout_s: float | None = None) -> None:
        """End the pass; within `timeout_s` (default: that of the coordinator) if the planning is stuck."""
        current, self.under_way = self.under_way, None
        if current is not None:
            current.close(self._coordinator.timeout_s if timeout_s is None else timeout_s)

    def release(self) -> None:
        """End what this process alone needs; a thread gives the rest back, the planning thread and the coordinator."""
        current, self.under_way = self.under_way, None
        if current is not None:
            current.stop()
            current.batches = None
        self._workers.close()

        def close_rest() -> None:
            if current is not None:
                current.close(ABORT_S)
            self._coordinator.close()

        threading.Thread(target=close_rest, name="odb-release", daemon=True).start()

    def _begin(self) -> Pass:
        if self._workers.is_closed:
            raise ConfigError("odb: this loader has been closed; make another one.")
        self._progress.turn_to(self.epoch)
        self.handed_out = HandedOut()
        place = self._progress.place
        self._order.set_epoch(self.epoch)
        self._order.start = self._progress.start()
        order = functools.partial(self._checked_order, tuple(place.values()), self._progress.order)
        process = self._workers.plan()
        context = dataclasses.replace(self._context, order=order, compute=process or compute_here)
        planner = self._progress.planner(self._workers.observe(self.epoch), context)
        plans = iter(planner)
        ahead = self._progress.plans_ahead(self._config.buffer_size)
        current = Pass(
            planner,
            BackgroundPrefetcher(plans, ahead) if self._workers.threaded else InlinePrefetcher(plans),
            StepAgreement(self._coordinator, lambda: self.wants_save()),
            process=process,
            keeps_tasks=self._config.oom == "split",
        )
        self.under_way = self._workers.feed.current = current
        if process is not None:
            process.start()
        current.batches = self._workers.collate(self.epoch)
        self._coordinator.start()
        self._coordinator.agree({**self._settings, **place})
        current.plans.start()
        while not current.tasks:
            try:
                current.tasks.extend(current.plans.poll())
            except queue.Empty:
                self._coordinator.check()
            except StopIteration:  # nothing is left of a resumed epoch but rows that cannot be used
                self._progress.turn_to(self.epoch + 1)
                self.turn_to(self.epoch + 1)
                return self._begin()
        first = current.tasks[0][0].step
        current.epoch_steps = first.epoch_steps
        current.agreement.start(first.index, self._workers.notes, self._workers.window)
        return current

    def _micro_batches(self, current: Pass) -> Iterator[Collated]:
        number, waits = itertools.count(1), False
        try:
            # No reference to the iterator but the pass's own: leaving must end the worker processes.
            while current.batches is not None:
                asked = time.perf_counter()
                if not waits:
                    self._coordinator.progress(f"micro-batch {next(number)} of epoch {self.epoch}")
                item = take(current.batches, "collates", self._workers.collated)
                self._times.wait(time.perf_counter() - asked)
                if item is END:
                    break
                waits = item is None
                if item is not None:
                    item = self._agreed(current, self.collated(item))
                    current.in_flight -= 1
                    self.handed_out.add(item[0], current.handed_on.popleft()[1] if current.keeps_tasks else None)
                    self.rejected = item[0].step.rejected
                    handed, item = [item], None  # whoever takes it holds the only reference
                    yield handed.pop()
                else:
                    self._coordinator.check()
            if current.error is not None:
                error, current.error = current.error, None
                try:
                    raise error
                finally:
                    del error
        except GeneratorExit:
            # Not waited for: the loop may have ended by an exception, of which the others must hear first.
            current.plans.stop()
            raise
        except BaseException as error:
            self._abandon(error)
            raise
        if self.under_way is current:
            self.leave()

    def _agreed(self, current: Pass, item: Collated) -> Collated:
        """The micro-batch as all ranks have agreed on its optimizer step, which is waited for with its first one."""
        micro_batch, measured, batch = item
        if micro_batch.index == 0:
            self._step = current.agreement.of(micro_batch.step)
        current.agreement.taken(micro_batch)
        return dataclasses.replace(micro_batch, step=self._step), measured, batch

    def _abandon(self, error: BaseException) -> None:
        """Leave after an error. The others know of an agreed one; of any other they are told, for they do not leave."""
        if not isinstance(error, CollectiveError):
            self._coordinator.abort(one_line(error))
        self.leave(ABORT_S)

    def _checked_order(self, place: tuple[int, ...], expected: int | None, optimizer_step: int) -> int:
        """A number made of order and place, by which the ranks compare them (planning thread).

        optimizer_step: the one that is planned, of kept ones.
        """
        if expected is not None and self._order.fingerprint != expected:
            raise DataError(
                "the sampler has drawn another order than before the stop, so what is left of the epoch cannot be "
                "told; give one whose order depends on its seed and epoch alone, or set `resume: ignore_data`"
            )
        return self._order.common((*place, self._order.checksum_through(optimizer_step)))
