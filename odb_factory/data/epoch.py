"""The epochs of a loader, optimizer step by optimizer step: collect, agree, plan, distribute, micro-batches."""

from __future__ import annotations

import contextlib
import functools
import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from odb_factory.comm.ranks import RankMetadata, Ranks, Sums
from odb_factory.data.cursor import Place, Remaining
from odb_factory.data.order import StockSteps, split_by_weight
from odb_factory.data.processes import Compute, compute_here
from odb_factory.data.samples import MicroBatch, OptimizerStep, Rejection, Sample, SampleInfo, Task, no_usable_row
from odb_factory.data.serialize import redistribute
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
    make_metadata,
    plan_buffers,
    plan_optimizer_step,
)
from odb_factory.planning.keep import GroupOutline, agreed_plans
from odb_factory.planning.plan import exceeds_limit, pool, sum_totals

logger = get_logger(__name__)

TOO_HEAVY = (
    f"balance: the samples that a rank holds weigh more than {MAX_REDISTRIBUTED_BYTES >> 20} MiB, so they stay on the "
    "rank that drew them; let items hold paths instead of pixels, or lower buffer_size (or the optimizer batch)."
)
OTHER_LENGTH = (
    "an epoch of the training dataset (or its sampler) has {} samples by its `__len__`, and yields {}; fix its "
    "`__len__`: the steps of an epoch are counted by it."
)
ROOT_SCALE = 1 << 52
"""Of sums of square roots, as whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochContext:
    """What every epoch of a loader is planned with.

    num_samples: of the epoch on all ranks; None if nobody knows (a stream). seed: of the order of filled micro-steps.
    order: a checksum of the order drawn so far, given the index of the plan. compare_orders: with the checksums of all
        ranks, why they cannot go on (None: they can).
    model: what micro-batches cost. lowered: the limits to which this rank has lowered its budgets (None: not lowered);
        `budget` stays as configured.
    compute: what runs planners, which are pure functions.
    leave_out: as `LeftOut.leave_out`.
    stand_in: a usable sample of the dataset, for the idle micro-batches of a rank that holds none.
    """

    budget: Budget
    num_samples: int | None
    balance: bool
    seed: int
    ranks: Ranks
    stand_in: Callable[[], Sample]
    leave_out: Callable[..., None]
    order: Callable[[int], int] = int
    compare_orders: Callable[[Sequence[int]], str | None] = lambda orders: None
    model: CostModel = CostModel()
    lowered: Callable[[], Limits | None] = lambda: None
    compute: Compute = compute_here


@dataclass(slots=True)
class Held:
    """A sample of a rank that can be planned. position: in its optimizer step; with `fill`, in the order of the epoch.
    age: with `fill`, rounds it was kept back."""

    sample: Sample
    position: int
    age: int = 0


class Planned(NamedTuple):
    """A micro-batch of this rank that is not yet part of an optimizer step.

    With `fill`: units, positions: of the samples of all ranks in the micro-step.
    """

    samples: list[Sample]
    infos: tuple[SampleInfo, ...]
    totals: MicroStepTotals
    units: Sequence[int] = ()
    positions: Sequence[int] = ()


class EpochPlanner(ABC):
    """Iterates over lists of tasks, each of whole optimizer steps; deterministic for its arguments (I6).

    observed: what this rank draws of the epoch from `place` on.
    first_index: of the first plan. final: the last plan of the epoch has been made.
    planning_ranks: those that make one plan together, between which samples travel.
    num_planned: samples of the epoch in optimizer steps so far, on all ranks. rejected, overlong: of this rank, since
    `place`.
    remaining: with `fill`, what is left of the order after an optimizer step, by the index of the step.
    """

    first_index = 0
    _next: object | None
    """The row that is drawn ahead, None at the end."""

    def __init__(self, observed: Iterator[Sample | Rejection], context: EpochContext, place: Place):
        self.observed, self.context, self.place = observed, context, place
        self.epoch, self.num_planned = place.epoch, place.planned
        self.rank, self.planning_ranks = context.ranks.rank, range(context.ranks.world_size)
        self.rejected: Counter[str] = Counter()
        self.overlong = 0
        self.final = False
        self.remaining: dict[int, Remaining] = {}
        self._idle_sample: Sample | None = None
        self._has_warned = False

    def step(self, index: int) -> list[Task]:
        """Plan one optimizer step (`keep`), or as many as the buffers fill (`fill`); the same on all ranks."""
        held = self.collect(index)  # observed samples of this rank
        samples = [one.sample for one in held]
        self._idle_sample = min(samples, key=lambda sample: sample.cost.tokens, default=self._idle_sample)
        ranks = self.agree(held, index)  # what the ranks hold: integers only
        plan = self.plan(ranks, index)  # pure, the same on all ranks that make it together
        mine = self.distribute(plan, samples)  # samples travel to the rank that computes them
        return self.micro_batches(plan, mine, ranks, index)  # with the loss weights of the whole step

    @abstractmethod
    def collect(self, index: int) -> list[Held]:
        """Take observed samples."""

    def agree(self, held: Sequence[Held], index: int) -> list[RankMetadata]:
        """What the ranks of the group hold; with `fill` it is all ranks. Collective."""
        context = self.context
        buffer = make_metadata(
            [one.sample.cost for one in held],
            [one.age for one in held],
            exhausted=self._next is None,
            sizes=[len(one.sample.features) for one in held],
            positions=[one.position for one in held],
        )
        mine = RankMetadata(buffer, self.rejected, self.overlong, context.order(index), context.lowered())
        return context.ranks.gather(mine, index)

    def plan(self, ranks: list[RankMetadata], index: int) -> Plan:
        """The plan that all ranks have confirmed; sets `final`. Collective."""
        budget = functools.reduce(lambda budget, rank: budget.within(rank.limits), ranks, self.context.budget)
        with self._telling_others("planning"):
            plan = self._make_plan(ranks, budget, index)
        if self.context.balance and not self._has_warned and exceeds_limit([rank.buffer for rank in ranks]):
            self._has_warned = True
            logger.warning(TOO_HEAVY)
        return plan

    def distribute(self, plan: Plan, held: Sequence[Sample]) -> dict[int, Sample]:
        """The samples that this rank computes, by their number in the plan. Collective, unless none moves."""
        with self._telling_others("redistributing samples"):
            return redistribute(plan, self.planning_ranks, self.rank, held, self.context.ranks.swap)

    @abstractmethod
    def micro_batches(self, plan: Plan, mine: dict[int, Sample], ranks: list[RankMetadata], index: int) -> list[Task]:
        """Those of this rank."""

    @abstractmethod
    def _make_plan(self, ranks: list[RankMetadata], budget: Budget, index: int) -> Plan:
        """A plan that the ranks have confirmed."""

    @abstractmethod
    def _draw(self) -> None:
        """Draw the next row; one is drawn ahead, so that the end of the epoch is known."""

    def __iter__(self) -> Generator[list[Task], None, None]:
        """Raises `CollectiveError` on all ranks; after the last plan, when no rank listens any more, `DataError`."""
        ranks = self.context.ranks
        try:
            self._draw()
            for index in itertools.count(self.first_index):
                yield self.step(index)
                if self.final:
                    return
        except GeneratorExit:
            if not self.final:
                ranks.stop()
            raise
        except CollectiveError:
            raise
        except Exception as error:
            message = _reason(error, "planning")
        finally:
            self.observed = iter(())  # lets its worker processes go
        if self.final:
            raise DataError(message)
        ranks.stop(message)
        raise CollectiveError(message)

    @contextlib.contextmanager
    def _telling_others(self, task: str) -> Iterator[None]:
        """Tell the other ranks of an error while they may be in a collective, where no metadata reach them."""
        try:
            yield
        except CollectiveError:
            raise
        except Exception as error:
            message = _reason(error, task)
            self.context.ranks.abort(f"{task}: {message}")
        else:
            return
        raise CollectiveError(message)

    def _optimizer_step(self, planned: Sequence[Planned], sums: Sums, index: int, **figures: Any) -> list[Task]:
        """The tasks of an optimizer step. sums: of all ranks. figures: fields of `OptimizerStep`."""
        step = OptimizerStep(
            **asdict(sum_totals([one.totals for one in planned])),
            epoch=self.epoch,
            index=index,
            num_micro_batches=len(planned),
            root_units=sums.roots / ROOT_SCALE,
            rejected=self._all_rejected(sums),
            overlong=self.place.overlong + sums.overlong,
            **figures,
        )
        tasks = []
        for number, one in enumerate(planned):
            samples = one.samples
            if not samples:  # idle: the shortest sample of the last buffer, or any usable row
                self._idle_sample = self._idle_sample or self.context.stand_in()
                samples = [self._idle_sample]
            tasks.append((MicroBatch(step=step, index=number, samples=one.infos, totals=one.totals), samples))
        return tasks

    def _leave_out(self, row: Rejection, step: int) -> None:
        """step: index of the optimizer step that the row would have been in, or of the next one that is handed on."""
        if row.fatal:
            raise DataError(row.message)
        self.rejected[row.reason] += 1
        self.context.leave_out([row.id], row.reason, row.message, epoch=self.epoch, step=step)

    def _all_rejected(self, sums: Sums) -> Counter[str]:
        """Rows of the epoch that all ranks have rejected until now, by reason. sums: of all ranks."""
        return sums.rejected + Counter(self.place.rejected)

    def _nothing_left(self, rejected: Counter[str], remainder: int, why: str) -> CollectiveError:
        """The error of an epoch that has no sample to train on. remainder: usable rows, for the reason `why`."""
        empty = "it is empty"
        if self.epoch:
            empty = f"it yields nothing in epoch {self.epoch}; its `__iter__` must restart each time it is called"
        others = [f"{remainder} {why}"] if remainder else []
        return CollectiveError(no_usable_row(rejected, others, empty))

    def _sums(self, ranks: list[RankMetadata], units: Sequence[int] | np.ndarray, **others: Any) -> Sums:
        """Of these ranks. units: of their samples that are planned. others: fields of `Sums`."""
        values, counts = np.unique(np.asarray(units, dtype=np.int64), return_counts=True)
        # Square roots of whole numbers are multiples of 2 ** -52: no order of the ranks changes their sum.
        roots = [int(root * ROOT_SCALE) for root in np.sqrt(values).tolist()]
        return Sums(
            exhausted=all(rank.buffer.exhausted for rank in ranks),
            rejected=sum((rank.rejected for rank in ranks), Counter()),
            overlong=sum(rank.overlong for rank in ranks),
            roots=sum(root * count for root, count in zip(roots, counts.tolist())),
            **others,
        )


def _reason(error: Exception, task: str) -> str:
    if not isinstance(error, DataError):
        # Logged here and not chained: its traceback would keep the worker processes alive.
        logger.error("%s failed", task, exc_info=error)
    return one_line(error)


# ----------------------------------------------------------------------------------------------------------------------


class KeepEpoch(EpochPlanner):
    """Kept optimizer steps: step t is the samples [tN, (t+1)N) of the order, planned by itself (I9).

    Each group of ranks plans its own samples, with `balance: false` each rank; all agree on K (I1).
    """

    sums: Sums
    """Of all ranks, in the optimizer step that is planned."""

    def __init__(
        self, observed: Iterator[Sample | Rejection], context: EpochContext, place: Place, *, stock: StockSteps
    ):
        super().__init__(observed, context, place)
        self.stock, self.first_index = stock, place.optimizer_steps
        self.planning_ranks = context.ranks.group if context.balance else range(self.rank, self.rank + 1)
        first = stock.first_number(self.rank, place.optimizer_steps)
        self._positions = (stock.position(self.rank, number) for number in itertools.count(first))
        self._next: tuple[int, Sample | Rejection] | None = None

    def collect(self, index: int) -> list[Held]:
        """The samples of this rank in an optimizer step."""
        first = index * self.stock.global_batch_size
        held: list[Held] = []
        while self._next is not None and self._next[0] < first + self.stock.global_batch_size:
            position, row = self._next
            if isinstance(row, Rejection):
                self._leave_out(row, index)
            else:
                self.overlong += self.context.budget.overlong(row.cost)
                held.append(Held(row, position=position - first))
            self._draw()
        return held

    def micro_batches(self, plan: Plan, mine: dict[int, Sample], ranks: list[RankMetadata], index: int) -> list[Task]:
        stock, sums, group = self.stock, self.sums, self.context.ranks.group
        rejected = self._all_rejected(sums)
        rows, starts, _ = pool([rank.buffer for rank in ranks])
        self.num_planned += sum(one.samples for one in plan.totals)
        if self.final and self.num_planned == 0:
            raise self._nothing_left(rejected, stock.remainder, "dropped by drop_last")
        groups, totals = plan.groups[self.rank - self.planning_ranks.start], plan.totals
        if not groups:
            logger.warning("optimizer step %d of epoch %d has no usable sample: its loss is 0", index + 1, self.epoch)
            groups, totals = [[]], [MicroStepTotals()]
        of_stock = stock.means_of(rows, sums.means)[starts[self.planning_ranks.start - group.start] :]
        done = self.num_planned + rejected.total()
        if stock.num_samples is not None:
            done = min((index + 1) * stock.global_batch_size, stock.num_samples)
        planned = []
        for of_rank, of_step in zip(groups, totals):
            samples = [mine[row] for row in of_rank]
            infos = tuple(SampleInfo.of(*one) for one in zip(samples, of_stock[of_rank].tolist()))
            planned.append(Planned(samples, infos, of_step))
        divisor = stock.mean.divisor
        return self._optimizer_step(
            planned,
            sums,
            index,
            num_stock_means=(len(sums.means) + sums.num_means if divisor is None else divisor) / stock.mean.factor,
            stock_input_tokens=stock.input_tokens(rows, self.rank, group, self.context.budget.collation.in_one_row()),
            done=done,
            progress=stock.progress(index),
            remainder=stock.remainder if self.final else 0,
            epoch_steps=stock.steps_an_epoch or (index + 1 if self.final else 0),
            last=self.final,
        )

    def _draw(self) -> None:
        """Draw the next row, with its position in the order of all ranks."""
        row = next(self.observed, None)
        self._next = None if row is None else (next(self._positions), row)

    def _make_plan(self, ranks: list[RankMetadata], budget: Budget, index: int) -> Plan:
        """What the group of this rank does, or the rank alone, with the totals of all ranks (I1, I6).

        Raises `CollectiveError` on all ranks if those of a group have computed different plans.
        """
        context, stock, buffers = self.context, self.stock, [rank.buffer for rank in ranks]
        group, leads = context.ranks.group, self.rank == context.ranks.group.start
        rows, _, _ = pool(buffers)
        means, num_means = stock.sums_of_means(rows, group)
        if stock.equal_weights:
            # Where all ranks are one group it shares no mean with another.
            is_known = len(group) == context.ranks.world_size
            shared = means if is_known else context.ranks.sum_up(Sums(means=means if leads else Counter()), index).means
            buffers = split_by_weight(buffers, stock, shared)
        mine = Sums()
        if leads:
            # Positions in a split stream differ from rank to rank; they are compared once.
            is_compared = index == self.first_index or not stock.is_split
            held = enumerate(ranks if is_compared else (), group.start)
            orders = tuple((rank.order, number, number) for number, rank in held)
            mine = self._sums(ranks, rows["units"], means=means, num_means=num_means, orders=orders)

        def make(least_steps: int) -> Plan:
            own = buffers[self.planning_ranks.start - group.start : self.planning_ranks.stop - group.start]
            balance, model = context.balance, context.model
            return context.compute(
                plan_optimizer_step, own, budget, balance=balance, model=model, least_steps=least_steps
            )

        def exchange(plans: Sequence[Plan], outline: GroupOutline) -> GroupOutline:
            speaks = self.rank == self.planning_ranks.start
            told = (self.planning_ranks.start, plans[0].checksum(), self.rank)
            self.sums = context.ranks.sum_up(replace(mine, plans=[told], outline=outline if speaks else None), index)
            assert self.sums.outline is not None
            return self.sums.outline

        (plan,) = agreed_plans([make], exchange)
        numbers = [order for order, first, last in self.sums.orders for _ in range(first, last + 1)]
        if numbers and (problem := context.compare_orders(numbers)) is not None:
            raise CollectiveError(problem)
        self.final = self.sums.exhausted
        expected = stock.steps_an_epoch
        if expected is not None and self.final != (index + 1 >= expected):
            raise CollectiveError(OTHER_LENGTH.format(stock.num_samples, "fewer" if self.final else "more"))
        return plan


# ----------------------------------------------------------------------------------------------------------------------


class FillEpoch(EpochPlanner):
    """Filled optimizer steps: as many samples as `accumulation` micro-steps hold (the last step may have fewer).

    Round by round: fill the buffer, plan, carry the rest over.
    join: ranks that have run out of samples take idle micro-batches; else the epoch ends for all when one runs short.
    """

    def __init__(
        self,
        observed: Iterator[Sample | Rejection],
        context: EpochContext,
        place: Place,
        *,
        buffer_size: int,
        accumulation: int,
        join: bool,
    ):
        super().__init__(observed, context, place)
        # Without join a buffer must be able to fill a whole optimizer step.
        self.buffer_size = buffer_size if join else max(buffer_size, accumulation)
        self.accumulation, self.join = accumulation, join
        self.held: list[Held] = []
        self._left_before = place.remaining or Remaining()
        ranks = context.ranks
        held, firsts = self._left_before.of_ranks(ranks.world_size)
        self._positions = itertools.chain(
            held[ranks.rank].tolist(), itertools.count(int(firsts[ranks.rank]), ranks.world_size)
        )
        self._num_drawn: np.ndarray = np.zeros(ranks.world_size, dtype=np.int64)  # of each rank, but the one ahead
        self._num_sent = np.zeros(ranks.world_size, dtype=np.int64)  # of each rank, samples that were planned
        self._waiting = np.zeros(0, dtype=np.int64)  # positions that the last plan left
        self._next: Held | None = None
        self._planned: list[Planned] = []
        self._next_step = place.optimizer_steps
        self._micro_steps = self._emitted = self._tokens_emitted = 0

    def collect(self, index: int) -> list[Held]:
        """Fill the buffer; one sample ahead is drawn, so that an exhausted share is known before the plan."""
        while self._next is not None and len(self.held) < self.buffer_size:
            self.overlong += self.context.budget.overlong(self._next.sample.cost)
            self.held.append(self._next)
            self._draw()
        return self.held

    def micro_batches(self, plan: Plan, mine: dict[int, Sample], ranks: list[RankMetadata], index: int) -> list[Task]:
        buffers, sums = [rank.buffer for rank in ranks], self._sums(ranks, ())
        rejected = self._all_rejected(sums)
        epoch_steps = self._epoch_steps(buffers, plan, rejected.total())
        self._carry_out(plan, mine, ranks)
        num_samples = self.context.num_samples
        if self.final and self.place.planned + self._emitted == 0:
            remainder = max((num_samples or 0) - rejected.total(), 0)
            raise self._nothing_left(rejected, remainder, "that remain because a rank ran short")
        tasks: list[Task] = []
        # Without join, the end may turn out to have been the step before: one is kept until the next plan.
        kept = 0 if self.final or self.join else self.accumulation
        while len(self._planned) >= self.accumulation + kept or (self.final and self._planned):
            planned, self._planned = self._planned[: self.accumulation], self._planned[self.accumulation :]
            self.num_planned += sum(one.totals.samples for one in planned)
            processed, last = self.num_planned + rejected.total(), self.final and not self._planned
            done = num_samples if last and num_samples is not None else processed
            self.remaining[self._next_step] = self._remaining_now()
            tasks += self._optimizer_step(
                planned,
                self._sums(ranks, [units for one in planned for units in one.units]),
                self._next_step,
                num_stock_means=0,
                stock_input_tokens=None,
                done=done,
                progress=None if num_samples is None else min(done / max(num_samples, 1), 1.0),
                remainder=done - processed,
                epoch_steps=epoch_steps,
                last=last,
            )
            self._next_step += 1
        return tasks

    def _draw(self) -> None:
        """Draw the next usable sample of the share; None when it is exhausted."""
        self._next = None
        for row in self.observed:
            position = next(self._positions)
            if isinstance(row, Sample):
                self._next = Held(row, position)
                return
            self._leave_out(row, self._next_step)

    def _make_plan(self, ranks: list[RankMetadata], budget: Budget, index: int) -> Plan:
        if (problem := self.context.compare_orders([rank.order for rank in ranks])) is not None:
            raise CollectiveError(problem)
        plan = self.context.compute(
            plan_buffers,
            [rank.buffer for rank in ranks],
            budget,
            seed=self.context.seed,
            epoch=self.epoch,
            round_index=index,
            accumulation=self.accumulation,
            join=self.join,
            balance=self.context.balance,
            model=self.context.model,
        )
        self.context.ranks.sum_up(Sums(plans=[(0, plan.checksum(), self.rank)]), index)
        self.final = plan.final
        return plan

    def _carry_out(self, plan: Plan, mine: dict[int, Sample], ranks: list[RankMetadata]) -> None:
        """Take this rank's micro-batches out of a plan; what was not planned stays in the buffer, one round older."""
        rows, starts, owners = pool([rank.buffer for rank in ranks])
        self._num_drawn = self._num_sent + np.diff(starts) + [rank.rejected.total() for rank in ranks]
        is_left = np.ones(len(rows), dtype=bool)
        for own, groups, totals in zip(plan.groups[self.rank], zip(*plan.groups), plan.totals):
            of_step = list(itertools.chain.from_iterable(groups))
            is_left[of_step] = False
            samples, units, positions = [mine[row] for row in own], rows["units"][of_step], rows["position"][of_step]
            infos = tuple(map(SampleInfo.of, samples))
            self._planned.append(Planned(samples, infos, totals, units.tolist(), positions.tolist()))
        self._num_sent += np.bincount(owners[~is_left], minlength=len(ranks))
        self._waiting = rows["position"][is_left]
        self._micro_steps += len(plan.totals)
        self._emitted += sum(totals.samples for totals in plan.totals)
        self._tokens_emitted += sum(totals.tokens for totals in plan.totals)
        self.held = [one for one, stays in zip(self.held, is_left[starts[self.rank] :]) if stays]
        for one in self.held:
            one.age += 1

    def _remaining_now(self) -> Remaining:
        """What is left once the optimizer steps handed on so far are taken; the same on all ranks."""
        kept = [position for one in self._planned for position in one.positions]
        return self._left_before.after(self._num_drawn, np.append(self._waiting, kept))

    def _epoch_steps(self, buffers: Sequence[BufferMetadata], plan: Plan, rejected: int) -> int:
        """Optimizer steps of the whole epoch; estimated, unless this is its last plan.

        As if the samples to come are as long, and the micro-steps to come as full, as until now.
        """
        micro_steps = self._micro_steps + len(plan.totals)
        if not plan.final:
            if self.context.num_samples is None:
                return 0
            seen = self._emitted + sum(len(buffer.rows) for buffer in buffers)
            tokens_seen = self._tokens_emitted + sum(int(one.rows["tokens"].sum(dtype=np.int64)) for one in buffers)
            emitted = self._tokens_emitted + sum(totals.tokens for totals in plan.totals)
            left = self.context.num_samples - self.place.planned - rejected
            micro_steps = max(micro_steps, round(micro_steps * left * tokens_seen / max(seen, 1) / max(emitted, 1)), 1)
        return self.place.optimizer_steps + -(-micro_steps // self.accumulation)
