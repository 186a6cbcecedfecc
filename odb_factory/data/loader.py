"""`ODBLoader`: two ordinary torch DataLoaders with the planner between them.

The first observes: rows become light samples in its workers. The second collates: its sampler
yields whole micro-batches, its workers run the framework's collator. Between them one background
thread plans, ahead of what is being collated (`Pass`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor

from odb_factory.comm.agreement import block_settings, releases
from odb_factory.comm.ranks import Ranks
from odb_factory.config import ResolvedConfig
from odb_factory.data.collate import Collated, CollatedDataset, Outcome
from odb_factory.data.cursor import RESTART, Cursor, TrainingData, epoch_of
from odb_factory.data.epoch import EpochContext, EpochPlanner, FillEpoch, KeepEpoch
from odb_factory.data.observe import DEFAULT_PATCH_SIZE, ItemObserver, Measure, ObservedDataset, Observer, measure_batch
from odb_factory.data.order import DataLoaderParts, OptimizerStepRule, Start, ends_of, length_of
from odb_factory.data.processes import PlanProcess, compute_here
from odb_factory.data.samples import COLLATION, LeftOut, MicroBatch, OptimizerStep, Sample, Task
from odb_factory.data.serialize import Picklable
from odb_factory.data.step_agreement import Agreed, LateRow, Reports, StepAgreement
from odb_factory.data.workers import END, POLL_S, LoaderWorkers, Prefetcher, size, take
from odb_factory.errors import CollectiveError, DataError, one_line
from odb_factory.log import get_logger
from odb_factory.planning import Budget, Collation, CostModel, Limits, Sizes

logger = get_logger(__name__)

# ----------------------------------------------------------------------------------------------------------------------
# The `Budget` of a config, and the layout of its micro-batches.

LayoutName = Literal["padded", "flat"]


def make_budget(config: ResolvedConfig, collation: Collation, layout: LayoutName) -> Budget:
    """The planner's budget. collation: what the collator adds. layout: of the micro-batches, `auto` resolved."""
    is_flat = layout == "flat"
    multiple = config.pad_to_multiple_of or 1 if is_flat else 1
    limit = config.token_budget // multiple * multiple
    return Budget(
        config.token_budget,
        config.max_patches,
        collation if is_flat else collation.in_one_row(),
        layout,
        Sizes(multiple, tuple(config.length_buckets or ()), limit),
        1 if is_flat else config.row_multiple,
        config.caps,
    )


# ----------------------------------------------------------------------------------------------------------------------
# One pass over an epoch, between the planner and the collating workers.
# A trap of torch shapes it: a DataLoader asks its sampler for the next index before it hands over a batch that is
# ready. So `Pass.feed` never waits, it yields None while nothing is planned, and the worker's answer to None is
# passed over.


class Pass:
    """One pass over an epoch: tasks that are planned and not yet handed on, batches, the error that ended planning.

    plans: the planner's lists of tasks, made ahead. agreement: of all ranks on its optimizer steps. process: the
    planner process; None: plans are computed in this one.
    in_flight: of each task whose batch is not taken yet, in order, its samples if they are kept (`oom: split`,
    `skip`), else None. epoch_steps: optimizer steps of the epoch according to its first plan. agreed: the
    agreement on the optimizer step under way. is_taken: an iterator over its micro-batches has been handed out.
    is_empty: nothing was left of a resumed epoch but rows that cannot be used.
    """

    agreed: Agreed

    def __init__(
        self, planner: EpochPlanner, plans: Prefetcher, agreement: StepAgreement, process: PlanProcess | None = None
    ):
        self.planner, self.plans, self.agreement, self.process = planner, plans, agreement, process
        self.tasks: deque[Task] = deque()
        self.in_flight: deque[list[Sample] | None] = deque()
        self.epoch_steps = 0
        self.batches: Iterator[Outcome | None] | None = None
        self.error: Exception | None = None
        self.is_taken = self.is_empty = False

    def feed(self, num_workers: int, *, keeps_samples: bool = False) -> Iterator[Task | None]:
        """Planned tasks to be collated, and None while there is none yet.

        Waits a moment for a plan only if no batch is in flight. torch hands tasks to its workers in turn; None comes
        once for each worker, so that a task always goes to the same worker and meets the same random numbers there
        (I6), whenever its plan was ready.
        """
        while True:
            while self.tasks:
                task = self.tasks.popleft()
                self.in_flight.append(task[1] if keeps_samples else None)
                yield task
            if self.is_empty:
                return
            try:
                self.tasks.extend(self.plans.poll(0 if self.in_flight else POLL_S))
            except queue.Empty:
                yield from itertools.repeat(None, max(num_workers, 1))
            except StopIteration:
                return
            except Exception as error:
                # Not through torch's frames, which would keep its workers alive with the traceback.
                self.error = error
                return

    def stop(self) -> None:
        """Let the threads end when they can."""
        self.plans.stop()
        self.agreement.stop()

    def close(self, timeout_s: float) -> None:
        self.stop()
        self.plans.close(timeout_s)
        self.agreement.close(timeout_s)
        if self.process is not None:
            self.process.close()
        self.batches = None
        self.tasks.clear()
        self.in_flight.clear()


# ----------------------------------------------------------------------------------------------------------------------

ABORT_S = 7.0
"""After a failure planning is given this long to end; a DataLoader looks for dead workers every 5 s."""


class ODBLoader:
    """Iterate over the collated micro-batches of one epoch on this rank: (`MicroBatch`, `Measured`, batch).

    parts: the dataset that `observer` reads rows from, its order over all ranks, the framework's collator, unchanged,
    and the workers. rule: what makes an optimizer step. collation: what the collator adds to a group (default: its
    `pad_to_multiple_of`). layout: of the micro-batches, whatever the config asks for; with_boundaries: flat ones carry
    what `varlen_arguments` returns. positions: makes the positions of a padded batch with images that has none, for the
    flat layout. measure, patch_size: how collated batches are measured.
    ranks: the data-parallel ones (default: this process alone). With several ranks, all make their loaders at
    the same place of the program. agree_on: settings, beside the config's, that all ranks must have in common.
    fingerprint: of the dataset, where a framework has taken columns away (default: its own). keeps_samples: for
    `samples_of`. plans_here: in this process, also where it has workers. is_evaluated: of `ObservedDataset`.
    counts_labels: units are counted from the labels of batches; otherwise a `cost_fn` gives them.
    budget: as configured. lowered: to what the training has lowered it since (see `lower`).
    left_out: rows that this rank leaves out. reports: what all ranks report of their steps; the training takes them.
    groups: what collates its micro-batches, in its layout.
    epoch: of the pass under way, or of the next. under_way: the pass that has begun and is not over.
    weights: of each sample of a micro-batch the share of the loss of its optimizer step; the training sets it.
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
        plans_here: bool = False,
        is_evaluated: bool = False,
    ):
        self.dataset, self.config, self.layout, self.rule = parts.dataset, config, layout, rule
        self._keeps_samples, self._plans_here = keeps_samples, plans_here
        # The Trainer wraps its collator to remove columns from items.
        collator = getattr(parts.collate_fn, "data_collator", parts.collate_fn)
        collation = collation or Collation(pad_to_multiple_of=getattr(collator, "pad_to_multiple_of", None) or 1)
        self.counts_labels = bool(getattr(observer, "counts_labels", True))
        self._ranks = ranks or Ranks()
        self.rank, self.world_size = rank, world_size = self._ranks.rank, self._ranks.world_size
        self.budget = budget = make_budget(config, collation, layout)
        self.lowered: Limits | None = None
        self.left_out = LeftOut()
        self.groups = CollatedDataset(
            Picklable(parts.collate_fn, "collate_fn"),
            patch_size,
            parts.dataset,
            budget,
            measure,
            self.counts_labels,
            with_boundaries,
            skips=config.on_error == "skip",
            falls_back=config.layout == "auto",
            positions=None if positions is None else Picklable(positions, "get_rope_index"),
        )
        self._rows = rows = ObservedDataset(parts.dataset, observer, config, budget, is_evaluated=is_evaluated)
        self._workers = LoaderWorkers(parts, rows, self.groups, config.collate_workers, rank, world_size)
        self._order = self._workers.order
        # The length of a split stream may be that of this rank's part or of the whole.
        is_split = getattr(self._order, "is_split", False)
        self.num_samples: int | None = (
            None if is_split else length_of(parts.dataset if parts.sampler is None else parts.sampler)
        )
        self._context = EpochContext(
            budget=budget,
            num_samples=self.num_samples,
            balance=bool(config.balance),
            seed=seed,
            ranks=self._ranks,
            stand_in=self._workers.stand_in,
            leave_out=self.left_out.leave_out,
            compare_orders=self._order.compare,
            model=CostModel() if config.cost_model is None else CostModel(*config.cost_model),
            lowered=lambda: self.lowered,
        )
        self._stock = stock = rule.stock_steps(config, world_size, self.num_samples, is_split=is_split)
        self._is_split = is_split
        self._cursor = Cursor(
            TrainingData(
                global_batch_size="fill" if stock is None else stock.global_batch_size,
                samples=self.num_samples if stock is None else stock.num_samples,
                seed=parts.sampler.initial_seed if isinstance(parts.sampler, SeedableRandomSampler) else None,
                fingerprint=fingerprint or getattr(parts.dataset, "_fingerprint", None),
                split_among=world_size if is_split else None,
            )
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
        if isinstance(observer, ItemObserver) and parts.sampler is not None and world_size > 1:
            # A sampler that is already a rank's part would be split again; the first and the last row show it.
            self._settings["what the first and the last row of the dataset say"] = ends_of(parts)
        # Rows that fail change the divisor, unless stock's is fixed or samples cannot be weighed.
        is_fixed = rule.stock_mean.divisor is not None or rule.stock_mean.factor != 1 or rule.equal_weights
        self._reweighs = config.loss_scaling != "stock" or not is_fixed
        self.epoch = 0
        self.under_way: Pass | None = None
        self.weights: Callable[[MicroBatch], Sequence[float]] = lambda micro_batch: [0.0] * len(micro_batch.ids)
        self._not_consumed: deque[tuple[MicroBatch, list[Sample] | None]] = deque()
        self.reports = Reports()

    @property
    def global_batch_size(self) -> int | None:
        """Samples of an optimizer step on all ranks; None with `fill`."""
        return None if self._stock is None else self._stock.global_batch_size

    @property
    def num_optimizer_steps(self) -> int | None:
        """Optimizer steps of an epoch; None if not known (`fill`, no length)."""
        return None if self._stock is None else self._stock.steps_an_epoch

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
        while self._not_consumed and _place(self._not_consumed[0][0].step) <= _place(step):
            self._not_consumed.popleft()
        if self.under_way is not None or step.last:  # or asked for what comes after the last
            remaining = {} if self.under_way is None else self.under_way.planner.remaining
            self._cursor.consume(step, remaining.get(step.index, self._cursor.place.remaining))
            for index in [index for index in list(remaining) if index <= step.index]:
                del remaining[index]

    def leave(self, timeout_s: float | None = None) -> None:
        """Leave the epoch, on all ranks at the same optimizer step.

        timeout_s: how long to wait for planning that is stuck (default: that of the ranks).
        """
        current, self.under_way = self.under_way, None
        if current is not None:
            current.close(self._ranks.timeout_s if timeout_s is None else timeout_s)

    def lower(self, limits: Limits) -> None:
        """Plans to come are made with budgets no higher than these, on all ranks."""
        self.lowered = limits.least(self.lowered)

    def samples_of(self, micro_batch: MicroBatch) -> list[Sample]:
        """The samples of a micro-batch whose optimizer step is not yet consumed (with `keeps_samples`)."""
        wanted = _place(micro_batch.step), micro_batch.index
        for one, samples in self._not_consumed:
            if (_place(one.step), one.index) == wanted and samples is not None:
                return samples
        raise LookupError(f"the samples of micro-batch {micro_batch.index} are not held")

    def stand_in(self, collated: Sequence[Sample] = ()) -> Sample:
        """The smallest of these samples and of `LoaderWorkers.stand_in`: for a micro-batch that weighs nothing."""
        return min([*collated, self._workers.stand_in()], key=size)

    def describe(self, id: int) -> str:
        """Where a row comes from, for messages."""
        return self._rows.where(id)

    def leave_out(
        self, micro_batch: MicroBatch, causes: Mapping[int, str], reason: str, *, empties: bool
    ) -> list[LateRow]:
        """Leave out rows of a micro-batch; returns the late ones.

        micro_batch: as all ranks have agreed on it, without the rows that failed in time. causes: id -> why, of
        both. empties: no row is left, and the micro-batch idles.
        """
        late = [one for one in micro_batch.samples if one.id in causes]
        shares = dict(zip(micro_batch.ids, self.weights(micro_batch))) if late else {}
        epoch, step = _place(micro_batch.step)
        for id, cause in causes.items():
            message, share = f"{self.describe(id)}: {cause}", shares.get(id, 0.0)
            if id in shares:
                message += f"; its optimizer step had begun: {share:.2%} of its loss is lost"
            self.left_out.leave_out([id], reason, message, epoch=epoch, step=step, lost_weight=share)
        return [LateRow(one.tokens, one.units, shares[one.id], empties and one is late[-1]) for one in late]

    def collate(self, micro_batch: MicroBatch, samples: list[Sample]) -> Collated:
        """Collate these samples in this process. Raises `DataError` if that fails."""
        outcome = self.groups[micro_batch, samples]
        assert outcome is not None
        if outcome.problem or outcome.failed or outcome.measured is None:
            raise DataError(self._problem(outcome))
        return micro_batch, outcome.measured, outcome.batch

    def state_dict(self) -> dict[str, Any]:
        """Where the training stands after the last optimizer step consumed: JSON types, the same on all ranks.

        Less than a kilobyte; with `fill`, also a number for each sample that is held back.
        """
        return self._cursor.state(self._fingerprint(self._cursor.place.epoch))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state that any rank has written, on any number of ranks.

        Raises `DataError` if the data are not those of the state.
        """
        epoch = epoch_of(state)
        self.leave()
        self._order.pass_over(epoch)
        self._cursor.load(state, self._fingerprint(epoch))
        self.epoch = epoch

    def go_to(self, epoch: int, optimizer_steps: int = 0) -> None:
        """Stand after this many (kept) optimizer steps of an epoch, as a training without odb does."""
        self.leave()
        place = {} if self._stock is None else {"planned": optimizer_steps * self._stock.global_batch_size}
        self._cursor.open(epoch, is_loaded=True, optimizer_steps=optimizer_steps, **place)
        self._order.pass_over(epoch)
        self.epoch = epoch

    def estimate_optimizer_steps(self) -> int:
        """Optimizer steps of an epoch. With `fill` it begins the epoch and is an estimate; 0 if not known."""
        an_epoch = self.num_optimizer_steps
        return self.begin().epoch_steps if an_epoch is None else an_epoch

    @property
    def has_rows(self) -> bool:
        """Whether rows can be read by their index, which a stream does not allow."""
        return self._workers.read_rows is not None

    def first_samples(self) -> Iterator[Sample]:
        """The first samples of the epoch under way in the order of all ranks."""
        if self._workers.read_rows is not None:
            rows = self._workers.read_rows(dict.fromkeys(self._order.first))
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

    @property
    def next_planned(self) -> OptimizerStep | None:
        """The optimizer step of the next task of the pass that is not handed on yet."""
        tasks = () if self.under_way is None else self.under_way.tasks
        return tasks[0][0].step if tasks else None

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
        self._workers.close()
        self._ranks.close()

    def abort(self, message: str) -> None:
        """Report to the other ranks why this one ends, then close without waiting for them."""
        self._ranks.abort(message)
        self.close(ABORT_S)

    def release(self) -> None:
        """End what this process alone needs, for garbage collection: calls no collective and waits for no rank.

        A thread ends the rest, the planning thread and the connections of the ranks.
        """
        current, self.under_way = self.under_way, None
        if current is not None:
            current.stop()
            current.batches = None
        self._workers.close()

        def close_rest() -> None:
            if current is not None:
                current.close(ABORT_S)
            self._ranks.close()

        threading.Thread(target=close_rest, name="odb-release", daemon=True).start()

    def _begin(self) -> Pass:
        workers, cursor, ranks = self._workers, self._cursor, self._ranks
        cursor.turn_to(self.epoch)
        self._not_consumed.clear()
        self.left_out.forget()
        now = cursor.place
        self._order.set_epoch(self.epoch)
        self._order.start = self._start
        process = None if self._plans_here else workers.plan_process()
        context = dataclasses.replace(
            self._context,
            order=functools.partial(self._checked_order, tuple(now.settings.values()), cursor.order),
            compute=process or compute_here,
        )
        observed, stock = workers.observe(self.epoch), self._stock
        planner: EpochPlanner
        if stock is not None:
            planner = KeepEpoch(observed, context, now, stock=stock)
            # With the optimizer step handed on, one more is held than the buffer has room for.
            ahead = max(1, self.config.buffer_size * self.world_size // stock.global_batch_size)
        else:
            planner = FillEpoch(
                observed,
                context,
                now,
                buffer_size=self.config.buffer_size,
                accumulation=self.rule.accumulation,
                join=self.config.join,
            )
            ahead = 2
        if not workers.num_collating:
            ahead = 0
        agreement = StepAgreement(ranks, self.reports, reweighs=self._reweighs)
        current = Pass(planner, Prefetcher(iter(planner), ahead), agreement, process)
        self.under_way = current
        if process is not None:
            process.start()
        tasks = current.feed(workers.num_collating, keeps_samples=self._keeps_samples)
        current.batches = workers.collate(self.epoch, tasks)
        ranks.start()
        ranks.compare_settings({**self._settings, **now.settings})
        current.plans.start()
        while not current.tasks:
            try:
                current.tasks.extend(current.plans.poll())
            except queue.Empty:
                ranks.check()
            except StopIteration:
                current.is_empty = True
                cursor.turn_to(self.epoch + 1)
                return current
        first = current.tasks[0][0].step
        current.epoch_steps = first.epoch_steps
        current.agreement.start(first.index, self.groups.notes, workers.window)
        return current

    @property
    def _start(self) -> Start:
        """Where the order of the epoch begins that the cursor stands in; of a split stream, this rank's part of it."""
        place, stock = self._cursor.place, self._stock
        if stock is not None:
            first = place.optimizer_steps * stock.global_batch_size
            if self._is_split:
                first = stock.first_number(self.rank, place.optimizer_steps)
            stop = stock.num_samples if stock.remainder else None
            return Start(first=first, stop=stop, block=stock.global_batch_size)
        assert place.remaining is not None
        if not self._is_split:
            return Start(first=place.remaining.first, held=place.remaining.held)
        held, firsts = place.remaining.of_ranks(self.world_size)
        positions = (held[self.rank] // self.world_size).tolist()
        return Start(first=int(firsts[self.rank]) // self.world_size, held=positions)

    def _micro_batches(self, current: Pass) -> Iterator[Collated]:
        number, waits = itertools.count(1), False
        try:
            # No reference to the iterator but the pass's own: leaving must end the worker processes.
            while current.batches is not None:
                if not waits:
                    self._ranks.progress(f"micro-batch {next(number)} of epoch {self.epoch}")
                outcome = take(current.batches, "collates", self.groups.busy)
                if outcome is END:
                    break
                waits = outcome is None
                if waits:
                    self._ranks.check()
                    continue
                samples = current.in_flight.popleft()
                failed = outcome.failed
                handed, outcome = [self._agree_on(current, outcome)], None
                micro_batch = handed[0][0]
                if samples is not None and failed:
                    left = [sample for sample in samples if sample.id not in failed]
                    samples = left or [self.stand_in()]
                self._not_consumed.append((micro_batch, samples))
                # The receiver holds the only reference.
                yield handed.pop()
            if current.error is not None:
                error, current.error = current.error, None
                try:
                    raise error
                finally:
                    del error
        except GeneratorExit:
            # Not waited for: the loop may have ended by an exception, which must be reported to the others first.
            current.plans.stop()
            raise
        except BaseException as error:
            self._abandon(error)
            raise
        if self.under_way is current:
            self.leave()

    def _agree_on(self, current: Pass, outcome: Outcome) -> Collated:
        """The micro-batch without the rows that are left out. The first of a step waits for the agreement on it."""
        planned = outcome.micro_batch
        if outcome.problem or (outcome.failed and self.config.on_error == "raise"):
            raise DataError(self._problem(outcome))
        if planned.index == 0:
            current.agreed = current.agreement.agree_on(planned, outcome.failed_places)
        micro_batch, measured, batch = current.agreed.apply(planned), outcome.measured, outcome.batch
        late: list[LateRow] = []
        if outcome.failed and not planned.idle:
            causes = {id: f"cannot be collated: {cause}" for id, cause in outcome.failed.items()}
            late = self.leave_out(micro_batch, causes, COLLATION, empties=measured is None)
            if late:
                micro_batch = micro_batch.only([i for i, id in enumerate(micro_batch.ids) if id not in causes])
        if measured is None:
            try:
                measured, batch = self.groups.collate([self.stand_in()])
            except DataError:
                raise DataError(self._problem(outcome)) from None
        is_over = len(micro_batch.ids) > 1 and not measured.is_within(self.budget)
        current.agreement.taken(planned, late, is_over_budget=is_over)
        return micro_batch, measured, batch

    def _problem(self, outcome: Outcome) -> str:
        """Why the micro-batch cannot be trained on."""
        if outcome.problem:
            return outcome.problem
        id, cause = next(iter(outcome.failed.items()))
        may_skip = self.config.on_error == "raise" and not self._rows.is_evaluated
        skips = " (`on_error: skip` leaves out media that cannot be decoded)" if may_skip else ""
        return f"{self.describe(id)}: cannot be collated: {cause}; fix or remove the row{skips}."

    def _abandon(self, error: BaseException) -> None:
        """Leave after an error. All ranks have a `CollectiveError`; any other is reported to them."""
        if not isinstance(error, CollectiveError):
            self._ranks.abort(one_line(error))
        self.leave(ABORT_S)

    def _checked_order(self, place: tuple[int, ...], expected: int | None, optimizer_step: int) -> int:
        """A checksum of order and place, which the ranks compare (planning thread).

        optimizer_step: the index of the kept step that is planned.
        """
        if expected is not None and self._order.fingerprint != expected:
            raise DataError(
                "the sampler has drawn another order than before the stop, so the rest of the epoch is not known; give "
                f"one whose order depends on its seed and epoch alone, or {RESTART}"
            )
        return self._order.common(place, optimizer_step)

    def _fingerprint(self, epoch: int) -> int:
        """That of the order of an epoch; a sampler can draw another order while a pass is under way."""
        if self.under_way is not None and epoch == self.epoch:
            return self._order.fingerprint
        self._order.set_epoch(epoch)
        return self._order.peek()


def _place(step: OptimizerStep) -> tuple[int, int]:
    return step.epoch, step.index
