"""What the epochs of both modes have in common: draw, redistribute, make micro-batches, end alike on all ranks."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from odb_factory.comm.coordinator import Coordinator, RankMetadata
from odb_factory.comm.redistribute import redistribute
from odb_factory.data.plan_process import Compute, P, R, compute_here
from odb_factory.data.samples import MicroBatch, OptimizerStep, Rejection, Sample, Task
from odb_factory.data.serialize import sample_from_bytes, sample_to_bytes
from odb_factory.errors import CollectiveError, DataError, one_line
from odb_factory.log import get_logger
from odb_factory.planning import MAX_REDISTRIBUTED_BYTES, Budget, CostModel, Limits, MicroStepTotals, Plan

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
