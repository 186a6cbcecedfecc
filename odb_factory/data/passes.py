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
from collections.abc import Callable, Iterator, Mapping, Sequence

from odb_factory.config import ResolvedConfig
from odb_factory.data.collate import Collated, Failure, Salvaged
from odb_factory.data.epoch import EpochContext
from odb_factory.data.handed_out import HandedOut
from odb_factory.data.left_out import COLLATION, LeftOut
from odb_factory.data.loader_workers import END, LoaderWorkers, take
from odb_factory.data.plan_process import compute_here
from odb_factory.data.prefetch import BackgroundPrefetcher, InlinePrefetcher
from odb_factory.data.resume.progress import Progress
from odb_factory.data.samples import MicroBatch, Sample
from odb_factory.data.step_agreement import Agreed, LateRow, Lost, StepAgreement
from odb_factory.data.step_times import StepTimes
from odb_factory.data.task_sampler import Pass
from odb_factory.errors import CollectiveError, ConfigError, DataError, one_line
from odb_factory.log import get_logger

ABORT_S = 7.0
"""After a failure planning is given this long to end; a DataLoader looks for dead workers every 5 s."""
STAND_INS_TRIED = 64
"""Rows that are tried to run a micro-batch with that has no row of its own left."""

logger = get_logger(__name__)


class Passes:
    """What begins, hands on and ends the passes of a loader, whose parts these are.

    settings: what all ranks must have in common; compared when a pass begins.
    epoch: of the pass under way, or of the next. under_way: the pass that has begun and is not over.
    handed_out: micro-batches whose optimizer step is not consumed. rejected: rows of the epoch that cannot be used.
    weights: of each sample of a micro-batch the share of the loss of its step. lost: see `Lost`.
    reweighs: of `StepAgreement`.
    """

    def __init__(
        self,
        workers: LoaderWorkers,
        context: EpochContext,
        progress: Progress,
        times: StepTimes,
        left_out: LeftOut,
        *,
        config: ResolvedConfig,
        settings: Mapping[str, object],
        reweighs: bool,
    ):
        self._workers, self._context, self._progress, self._times = workers, context, progress, times
        self._left_out, self._reweighs = left_out, reweighs
        self._config, self._settings, self._order = config, settings, workers.order
        self._coordinator = context.coordinator
        self.epoch = 0
        self.under_way: Pass | None = None
        self.handed_out = HandedOut()
        self.rejected: Counter[str] = Counter()
        self.weights: Callable[[MicroBatch], Sequence[float]] = lambda micro_batch: [0.0] * len(micro_batch.ids)
        self.lost = Lost()
        self._agreed: Agreed
        self._stand_in: Sample | None = None

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

    def collated(self, item: Collated | Salvaged | Failure) -> Collated:
        """Raises `DataError` where the collator failed."""
        if isinstance(item, tuple):
            return item
        raise self._error(item)

    def leave(self, timeout_s: float | None = None) -> None:
        """End the pass; within `timeout_s` (default: that of the coordinator) if the planning is stuck."""
        current, self.under_way = self.under_way, None
        if current is not None:
            current.close(self._coordinator.timeout_s if timeout_s is None else timeout_s)
            self.lost.add(current.agreement.told_at_the_end())

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
        self._left_out.forget()
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
            StepAgreement(self._coordinator, reweighs=self._reweighs),
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
                    current.in_flight -= 1
                    samples = current.handed_on.popleft()[1] if current.keeps_tasks else None
                    handed, item = [self._agree_on(current, item)], None
                    micro_batch = handed[0][0]
                    if samples is not None and len(samples) > len(micro_batch.ids):
                        samples = self._left_of(samples, micro_batch)
                    self.handed_out.add(micro_batch, samples)
                    self.rejected = micro_batch.step.rejected
                    # Whoever takes it holds the only reference.
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

    def _agree_on(self, current: Pass, item: Collated | Salvaged | Failure) -> Collated:
        """The micro-batch without the rows that are left out. Its first one waits until all ranks know of the step."""
        if isinstance(item, Failure):
            raise self._error(item)
        planned = item.micro_batch if isinstance(item, Salvaged) else item[0]
        if planned.index == 0:
            self._agreed = current.agreement.of(planned, tuple(item.lost) if isinstance(item, Salvaged) else ())
            self.lost.rows += len(self._agreed.rows)
            self.lost.add(self._agreed.told)
        micro_batch = self._agreed.apply(planned)
        if isinstance(item, Salvaged):
            micro_batch, measured, batch = self._salvage(current, item, micro_batch)
        else:
            _, measured, batch = item
        is_over = len(micro_batch.ids) > 1 and not measured.is_within(
            self._config.token_budget, self._config.max_patches
        )
        current.agreement.taken(planned, is_over_budget=is_over)
        return micro_batch, measured, batch

    def _salvage(self, current: Pass, item: Salvaged, micro_batch: MicroBatch) -> Collated:
        """micro_batch: as agreed on, which may hold rows that were found too late."""
        causes = {item.micro_batch.ids[number]: cause for number, cause in item.lost.items()}
        late = [number for number, id in enumerate(micro_batch.ids) if id in causes]
        weights = self.weights(micro_batch) if late else ()
        shares = {micro_batch.ids[number]: weights[number] for number in late}
        for id, cause in causes.items():
            message = f"{self._workers.describe(id)}: cannot be collated: {cause}"
            if id in shares:
                message += f"; its optimizer step had begun, of whose loss {shares[id]:.2%} is lost"
            step = micro_batch.step
            self._left_out.leave_out(
                [id], COLLATION, message, epoch=step.epoch, step=step.index, lost_weight=shares.get(id, 0.0)
            )
        if late:
            last = late[-1] if item.batch is None else None
            current.agreement.tell_late(
                [LateRow(micro_batch.lengths[i], micro_batch.units[i], weights[i], i == last) for i in late]
            )
            micro_batch = micro_batch.without(late)
        if item.batch is None or item.measured is None:
            return self._run_idle(item, micro_batch)
        return micro_batch, item.measured, item.batch

    def _run_idle(self, item: Salvaged, micro_batch: MicroBatch) -> Collated:
        """No row of it is left: run with another one, which weighs nothing."""
        candidates = itertools.chain(() if self._stand_in is None else [self._stand_in], self._workers.usable_rows())
        for sample in itertools.islice(candidates, STAND_INS_TRIED):
            found = self._workers.groups[micro_batch, [sample]]
            if isinstance(found, tuple):
                self._stand_in = sample
                return found
        raise self._error(item)

    def _left_of(self, samples: list[Sample], micro_batch: MicroBatch) -> list[Sample]:
        """Of the samples that a micro-batch was planned with; of one that has none left, what it is run with."""
        left = [sample for sample in samples if sample.id in micro_batch.ids]
        return left or ([] if self._stand_in is None else [self._stand_in])

    def _error(self, item: Salvaged | Failure) -> DataError:
        if isinstance(item, Salvaged):
            number, cause = next(iter(item.lost.items()), (0, "nor can any other row"))
            item = Failure(item.micro_batch.ids[number : number + 1], cause)
        return DataError(item.message(self._workers.describe, self._config.on_error))

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
