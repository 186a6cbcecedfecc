"""The epochs of a loader: collect samples, plan, redistribute, make micro-batches. Those of kept optimizer steps."""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from odb_factory.comm.agreement import ranks_alike
from odb_factory.comm.coordinator import DIFFERENT_PLANS, Coordinator, RankMetadata, redistribute
from odb_factory.data.order import StockSteps, by_weight, stock_input_tokens, stock_means
from odb_factory.data.plan_process import Compute, P, R, compute_here
from odb_factory.data.samples import MicroBatch, OptimizerStep, Rejection, Sample, Task
from odb_factory.data.serialize import sample_from_bytes, sample_to_bytes
from odb_factory.errors import CollectiveError, DataError, one_line
from odb_factory.log import get_logger
from odb_factory.planning import (
    MAX_REDISTRIBUTED_BYTES,
    Budget,
    BufferMetadata,
    CostModel,
    Limits,
    MicroStepTotals,
    Plan,
    exceeds_limit,
    make_metadata,
    plan_optimizer_step,
)
from odb_factory.planning.keep import (
    MAX_AGREEMENTS,
    GroupOutline,
    disagreement,
    group_of,
    joined,
    outline,
    plan_group,
    steps_to_reach,
)

# ----------------------------------------------------------------------------------------------------------------------
# The ranks of a group plan their part of an optimizer step, and agree with the other groups on K (I1, I6).


def plan_with_group(
    buffers: Sequence[BufferMetadata],
    budget: Budget,
    group_size: int,
    *,
    model: CostModel,
    coordinator: Coordinator,
    step_index: int,
    compute: Compute = compute_here,
) -> Plan:
    """What this rank's group does in an optimizer step, with the totals of all groups. Collective.

    buffers: one a rank, of all ranks. group_size: of ranks among which samples travel. compute: runs planners.
    Raises `CollectiveError` on all ranks if those of a group have computed different plans.
    """
    ranks = group_of(coordinator.rank, len(buffers), group_size)
    plan = compute(plan_group, buffers, budget, ranks, model=model)
    for _ in range(MAX_AGREEMENTS):
        answers = coordinator.gather_plans(outline(plan, ranks).to_bytes(), step_index)
        firsts = [answers[rank - rank % group_size] for rank in range(len(answers))]
        if answers != firsts:
            raise CollectiveError(DIFFERENT_PLANS.format(ranks_alike(answers)))
        outlines = [GroupOutline.from_bytes(answer) for answer in answers[::group_size]]
        least_steps = steps_to_reach(outlines)
        if not least_steps:
            return joined(plan, ranks, outlines)
        if len(plan.totals) < least_steps:
            plan = compute(plan_group, buffers, budget, ranks, model=model, least_steps=least_steps)
    raise disagreement(outlines)


# ----------------------------------------------------------------------------------------------------------------------
# What the epochs of both modes have in common: draw, redistribute, make micro-batches, end alike on all ranks.

logger = get_logger(__name__)

TOO_HEAVY = (
    f"balance: the samples that a rank holds weigh more than {MAX_REDISTRIBUTED_BYTES >> 20} MiB, so they stay on the "
    "rank that drew them; let items hold paths instead of pixels, or lower buffer_size (or the optimizer batch)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochContext:
    """What every epoch of a loader is planned with.

    num_samples: of the epoch on all ranks; None if nobody knows (a stream).
    group_size: ranks among which samples travel, where steps are kept and the layout is flat; they plan by themselves.
    order: makes a number of the order drawn so far, given the optimizer step. compare_orders: with these numbers of all
    ranks, why they cannot go on (None: they can). propose: the cost model as it is known by then. lowered: to what this
    rank has lowered its budgets by then, if it has; `budget` stays as configured.
    compute: what runs planners, which are pure functions.
    leave_out: as `LeftOut.leave_out`.
    find_dummy_sample: a usable sample of the dataset, for the idle micro-batches of a rank that holds none.
    """

    budget: Budget
    num_samples: int | None
    balance: bool
    group_size: int
    seed: int
    rank: int
    coordinator: Coordinator
    find_dummy_sample: Callable[[], Sample]
    leave_out: Callable[..., None]
    order: Callable[[int], int] = int
    compare_orders: Callable[[Sequence[int]], str | None] = lambda orders: None
    propose: Callable[[], CostModel] = CostModel
    lowered: Callable[[], Limits | None] = lambda: None
    compute: Compute = compute_here


@dataclass(frozen=True, slots=True)
class PlannedMicroBatch:
    """A micro-batch of this rank before its optimizer step is complete.

    units: with `fill`, of each sample of all ranks in this micro-step. The others as in `MicroBatch`.
    """

    samples: Sequence[Sample]
    totals: MicroStepTotals
    stock_units: tuple[int, ...] = ()
    stock_batches: tuple[int, ...] = ()
    stock_means: tuple[int, ...] = ()
    stock_counted: tuple[int, ...] = ()
    number: int = 0
    round_index: int = 0
    positions: tuple[int, ...] = ()
    units: Sequence[int] = ()


class EpochPlanner(ABC):
    """Iterates over lists of tasks, each of whole optimizer steps; deterministic for its arguments (I6)."""

    def __init__(self, observed: Iterator[Sample | Rejection], context: EpochContext, epoch: int):
        self.observed, self.context, self.epoch = observed, context, epoch
        self.rejected: Counter[str] = Counter()
        self.overlong = 0
        self.final = False
        self._dummy: Sample | None = None
        self._has_warned = False

    @abstractmethod
    def _plan_epoch(self) -> Iterator[list[Task]]:
        """Observe, agree, plan, redistribute, until the epoch is over on all ranks; sets `final` with the last plan."""

    def __iter__(self) -> Generator[list[Task], None, None]:
        """Raises `CollectiveError` on all ranks where one cannot go on; `DataError` if the others cannot be told."""
        coordinator = self.context.coordinator
        try:
            yield from self._plan_epoch()
            return
        except GeneratorExit:
            if not self.final:
                coordinator.leave_epoch()
            raise
        except CollectiveError:
            raise
        except Exception as error:
            if not isinstance(error, DataError):
                # Logged here and not chained: its traceback would keep the worker processes alive.
                logger.error("planning failed", exc_info=error)
            message = one_line(error)
        finally:
            self.observed = iter(())  # lets its worker processes go, whoever still holds this object
        if self.final:
            raise DataError(message)
        coordinator.fail(message)
        raise CollectiveError(message)

    def _leave_out(self, row: Rejection, step: int) -> None:
        """step: index of the optimizer step that the row would have been in, or of the next one that is planned."""
        if row.fatal:
            raise DataError(row.message)
        self.rejected[row.reason] += 1
        self.context.leave_out([row.id], row.reason, row.message, epoch=self.epoch, step=step)

    def _compare_orders(self, numbers: Sequence[int]) -> None:
        problem = self.context.compare_orders(numbers)
        if problem is not None:
            raise CollectiveError(problem)

    def _compute(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """What a planner returns. The others compare theirs with it next, so metadata would not reach them."""
        try:
            return self.context.compute(function, *args, **kwargs)
        except Exception as error:
            if not isinstance(error, DataError):
                logger.error("planning failed", exc_info=error)
            raise self._told("planning", error) from None

    def _accept(self, plan: Plan, round_index: int) -> None:
        """All ranks have computed this plan, before anything is sent, trained on or left out by it."""
        self.context.coordinator.confirm(plan.checksum(), round_index)
        if plan.exceeds_transfer_limit and not self._has_warned:
            self._has_warned = True
            logger.warning(TOO_HEAVY)

    def _budget(self, ranks: Sequence[RankMetadata]) -> Budget:
        """To plan with: as configured, or the least to which any rank has lowered it."""
        return functools.reduce(lambda budget, rank: budget.within(rank.limits), ranks, self.context.budget)

    def _redistribute(self, plan: Plan, held: Sequence[Sample]) -> dict[int, Sample]:
        """The samples that this rank computes, by their number in the plan. held: those it has observed."""
        coordinator = self.context.coordinator
        try:
            return redistribute(
                plan,
                self.context.rank,
                held,
                coordinator.all_to_all,
                encode=sample_to_bytes,
                decode=sample_from_bytes,
            )
        except CollectiveError:
            raise
        except Exception as error:
            # The others may be in the collective already, where no metadata reach them.
            raise self._told("redistributing samples", error) from None

    def _told(self, task: str, error: Exception) -> CollectiveError:
        """The error once the others have been told of it, whatever they are doing."""
        message = one_line(error)
        self.context.coordinator.abort(f"{task}: {message}")
        return CollectiveError(message)

    def _tasks(self, step: OptimizerStep, planned: Sequence[PlannedMicroBatch]) -> list[Task]:
        tasks: list[Task] = []
        for index, one in enumerate(planned):
            micro_batch = MicroBatch(
                step=step,
                index=index,
                ids=tuple(sample.id for sample in one.samples),
                lengths=tuple(sample.cost.tokens for sample in one.samples),
                units=tuple(sample.cost.units for sample in one.samples),
                stock_units=one.stock_units,
                stock_batches=one.stock_batches,
                stock_means=one.stock_means,
                stock_counted=one.stock_counted,
                totals=one.totals,
                number=one.number,
                round_index=one.round_index,
                positions=one.positions,
                contents=tuple(sample.content for sample in one.samples),
            )
            tasks.append((micro_batch, list(one.samples) or [self._idle_sample()]))
        return tasks

    def _idle_sample(self) -> Sample:
        if self._dummy is None:
            self._dummy = self.context.find_dummy_sample()
        return self._dummy


class Sums(TypedDict):
    num_micro_batches: int
    num_active: int
    samples: int
    tokens: int
    padded_tokens: int
    units: int


def sums(planned: Sequence[PlannedMicroBatch]) -> Sums:
    """The fields of an `OptimizerStep` that are sums over its micro-steps."""
    totals = [one.totals for one in planned]
    return {
        "num_micro_batches": len(planned),
        "num_active": sum(one.active_ranks for one in totals),
        "samples": sum(one.samples for one in totals),
        "tokens": sum(one.tokens for one in totals),
        "padded_tokens": sum(one.padded_tokens for one in totals),
        "units": sum(one.units for one in totals),
    }


def sum_of_roots(units: Sequence[int] | np.ndarray) -> float:
    """Of the units of all samples of an optimizer step. `fsum` is exact before it rounds: the same on all ranks."""
    return math.fsum(np.sqrt(units).tolist())


def nothing_left(rejected: Counter[str], not_trained: int, why: str, epoch: int) -> str:
    """Why an epoch has no sample to train on. not_trained: usable rows, for the reason `why`."""
    reasons = [f"{count} {reason}" for reason, count in rejected.items()]
    if not_trained:
        reasons.append(f"{not_trained} left out {why}")
    empty = "it is empty"
    if epoch:
        empty = f"it yields nothing in epoch {epoch}; its `__iter__` must begin anew each time it is called"
    named = "; the warnings above name the first of them" if rejected else ""
    return f"no row of the training dataset can be trained on: {', '.join(reasons) or empty}{named}."


# ----------------------------------------------------------------------------------------------------------------------
# An epoch with kept optimizer steps: step t is the samples [tN, (t+1)N) of the order, planned by itself (I9).


OTHER_LENGTH = (
    "the training dataset (or its sampler) says by its __len__ that an epoch has {} samples, and yields {}; mend its "
    "__len__, for the steps of an epoch are counted by it."
)


class KeepEpoch(EpochPlanner):
    """Plans one optimizer step after the other.

    observed: what this rank draws, from the first sample of optimizer step `first_step` on.
    trained, rejected, overlong: of the steps before that, on all ranks.
    """

    def __init__(
        self,
        observed: Iterator[Sample | Rejection],
        context: EpochContext,
        *,
        stock: StockSteps,
        epoch: int,
        first_step: int = 0,
        trained: int = 0,
        rejected: Counter[str] | None = None,
        overlong: int = 0,
    ):
        super().__init__(observed, context, epoch)
        self.stock, self.first_step, self.trained = stock, first_step, trained
        self._rejected_before, self._overlong_before = rejected or Counter(), overlong
        self._positions = (
            stock.position(context.rank, number)
            for number in itertools.count(stock.first_number(context.rank, first_step))
        )
        self._next: tuple[int, Sample | Rejection] | None = None

    def _plan_epoch(self) -> Iterator[list[Task]]:
        self._next = self._draw()
        for index in itertools.count(self.first_step):
            positions, samples = self._observe(index)
            metadata = RankMetadata(
                make_metadata(
                    [sample.cost for sample in samples],
                    [0] * len(samples),
                    exhausted=self._next is None,
                    sizes=[len(sample.features) for sample in samples],
                    positions=[position - index * self.stock.global_batch_size for position in positions],
                ),
                self.rejected,
                self.overlong,
                self.context.order(index),
                self.context.propose(),
                self.context.lowered(),
            )
            ranks = self.context.coordinator.all_gather(metadata, index)
            self._compare_orders([rank.order for rank in ranks])
            buffers = [rank.buffer for rank in ranks]
            if self.stock.equal_weights:
                buffers = by_weight(buffers, self.stock)
            plan = self._plan(buffers, self._budget(ranks), ranks[0].model, index)
            self.final = all(buffer.exhausted for buffer in buffers)
            expected = self.stock.steps_an_epoch
            if expected is not None and self.final != (index + 1 >= expected):
                raise CollectiveError(OTHER_LENGTH.format(self.stock.num_samples, "fewer" if self.final else "more"))
            if samples:
                self._dummy = min(samples, key=lambda sample: sample.cost.tokens)
            yield self._tasks_of(index, plan, np.concatenate([buffer.rows for buffer in buffers]), samples, ranks)
            if self.final:
                return

    def _draw(self) -> tuple[int, Sample | Rejection] | None:
        """The next row of this rank and its position in the order; one is drawn ahead, so that the end is known."""
        item = next(self.observed, None)
        return None if item is None else (next(self._positions), item)

    def _observe(self, index: int) -> tuple[list[int], list[Sample]]:
        """Positions and samples of this rank in an optimizer step."""
        positions: list[int] = []
        samples: list[Sample] = []
        end = (index + 1) * self.stock.global_batch_size
        while self._next is not None and self._next[0] < end:
            position, item = self._next
            if isinstance(item, Rejection):
                self._leave_out(item, index)
            else:
                self.overlong += self.context.budget.overlong(item.cost)
                positions.append(position)
                samples.append(item)
            self._next = self._draw()
        return positions, samples

    def _plan(self, buffers: Sequence[BufferMetadata], budget: Budget, model: CostModel, index: int) -> Plan:
        """The plan of all ranks, or of this rank's group where there are too many of them; all agree on it."""
        context = self.context
        in_groups = context.balance and budget.layout == "flat" and len(buffers) > context.group_size
        if in_groups and not exceeds_limit(buffers):
            return plan_with_group(
                buffers,
                budget,
                context.group_size,
                model=model,
                coordinator=context.coordinator,
                step_index=index,
                compute=self._compute,
            )
        plan = self._compute(plan_optimizer_step, buffers, budget, balance=context.balance, model=model)
        self._accept(plan, index)
        return plan

    def _tasks_of(
        self, index: int, plan: Plan, rows: np.ndarray, samples: Sequence[Sample], ranks: Sequence[RankMetadata]
    ) -> list[Task]:
        rejected = sum((rank.rejected for rank in ranks), self._rejected_before)
        self.trained += len(rows)
        if self.final and self.trained == 0:
            raise CollectiveError(nothing_left(rejected, self.stock.not_trained, "by drop_last", self.epoch))
        held = self._redistribute(plan, samples)
        means = stock_means(rows, self.stock)
        stock_batches = rows["position"] // self.stock.batch_size
        planned = [
            PlannedMicroBatch(
                samples=[held[row] for row in group],
                totals=totals,
                stock_units=tuple(means.units[group].tolist()),
                stock_means=tuple(means.means[group].tolist()),
                stock_counted=tuple(means.counted[group].tolist()),
                stock_batches=tuple(stock_batches[group].tolist()),
            )
            for group, totals in zip(plan.groups[self.context.rank], plan.totals)
        ]
        if not planned:
            logger.warning("optimizer step %d of epoch %d has no usable sample: its loss is 0", index + 1, self.epoch)
            planned = [PlannedMicroBatch((), MicroStepTotals())]
        done = (index + 1) * self.stock.global_batch_size
        if self.stock.num_samples is None:
            done = self.trained + rejected.total()
        step = OptimizerStep(
            epoch=self.epoch,
            index=index,
            **sums(planned),
            root_units=sum_of_roots(rows["units"]),
            num_stock_means=means.num_means,
            stock_input_tokens=stock_input_tokens(
                rows, self.stock, self.context.rank, self.context.budget.collation.in_one_row()
            ),
            done=done if self.stock.num_samples is None else min(done, self.stock.num_samples),
            progress=self.stock.progress(index),
            rejected=rejected,
            overlong=self._overlong_before + sum(rank.overlong for rank in ranks),
            not_trained=self.stock.not_trained if self.final else 0,
            epoch_steps=self.stock.steps_an_epoch or (index + 1 if self.final else 0),
            last=self.final,
        )
        return self._tasks(step, planned)
