"""The optimizer steps of an epoch, one after the other: observe, gather, plan, exchange, micro-batches.

`EpochPlanner.step` is the life of a sample. One background thread on each rank runs it, ahead of the training, and
makes all calls between ranks: one gather a plan, and an exchange if samples move. Every rank has the same table of
integers, so each computes the plan, the totals of all ranks, the weights and the end of the epoch by itself.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from odb_factory.data.agreement import first_unlike
from odb_factory.data.cursor import Place
from odb_factory.data.order import StockSteps, split_by_weight
from odb_factory.data.ranks import LEFT_EPOCH, RankMetadata, Ranks
from odb_factory.data.samples import (
    MicroBatch,
    OptimizerStep,
    Rejection,
    Remaining,
    Sample,
    SampleInfo,
    no_usable_row,
    token_weights,
)
from odb_factory.errors import CollectiveError, DataError, one_line
from odb_factory.log import get_logger
from odb_factory.planner import (
    MAX_REDISTRIBUTED_BYTES,
    Budget,
    Limits,
    MicroStepTotals,
    Plan,
    make_metadata,
    plan_buffers,
    plan_optimizer_step,
)
from odb_factory.planner.plan import exceeds_limit, pool, sum_totals

logger = get_logger(__name__)

TOO_HEAVY = (
    f"balance: the samples that a rank holds weigh more than {MAX_REDISTRIBUTED_BYTES >> 20} MiB, so they stay on the "
    "rank that drew them; let items hold paths instead of pixels, or lower buffer_size (or the optimizer batch)."
)
OTHER_LENGTH = (
    "an epoch of the training dataset (or its sampler) has {} samples by its `__len__`, and yields {}; fix its "
    "`__len__`: the steps of an epoch are counted by it."
)
DIFFERENT_PLANS = (
    "the ranks have computed different plans from the same metadata (rank 0 and rank {}); give every rank the same "
    "versions of odb_factory and numpy on the same kind of processor."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochContext:
    """What every epoch of a loader is planned with.

    num_samples: of the epoch on all ranks; None if nobody knows (a stream). seed: of the order of filled micro-steps.
    order: the fingerprint of the order. compare_orders: with those of all ranks, why they cannot go on (None: they
        can).
    lowered: the limits to which this rank has lowered its budgets (None: not lowered);
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
    order: Callable[[], int] = int
    compare_orders: Callable[[Sequence[int]], str | None] = lambda orders: None
    lowered: Callable[[], Limits | None] = lambda: None
    compute: Callable[..., Any] = lambda function, *args, **options: function(*args, **options)
    loss_scaling: str = "exact"


@dataclass(slots=True)
class Held:
    """A sample of a rank that can be planned. position: in its optimizer step; with `fill`, in the order of the epoch.
    age: with `fill`, rounds it was kept back."""

    sample: Sample
    position: int
    age: int = 0


class Planned(NamedTuple):
    """A micro-batch of this rank that is not yet part of an optimizer step.

    positions: with `fill`, of the samples of all ranks in the micro-step.
    """

    samples: list[Sample]
    infos: tuple[SampleInfo, ...]
    totals: MicroStepTotals
    positions: Sequence[int] = ()


class EpochPlanner(ABC):
    """Iterates over lists of micro-batches, each of whole optimizer steps; deterministic for its arguments (I6).

    observed: what this rank draws of the epoch from `place` on.
    first_index: of the first plan. is_left: nobody takes what is planned from now on, and workers may have ended.
    final: the last plan of the epoch has been made.
    num_planned: samples of the epoch in optimizer steps so far, on all ranks. rejected, overlong: of this rank, since
    `place`.
    """

    first_index = 0
    is_left = False
    _next: object | None
    """The row that is drawn ahead, None at the end."""
    _task = ""
    """What this rank does between a gather and the end of the exchange, where no metadata reach the others."""
    _table: tuple[np.ndarray, list[int], np.ndarray]
    """As `pool` returns it: what all ranks hold."""

    def __init__(self, observed: Iterator[Sample | Rejection], context: EpochContext, place: Place):
        self.observed, self.context, self.place = observed, context, place
        self.epoch, self.num_planned = place.epoch, place.planned
        self.rank = context.ranks.rank
        self.rejected: Counter[str] = Counter()
        self.overlong = 0
        self.final = False
        self._idle_sample: Sample | None = None
        self._has_warned = False
        self._checksum = 0

    def step(self, index: int) -> list[MicroBatch]:
        """Plan one optimizer step (`keep`), or as many as the buffers fill (`fill`); the same on all ranks."""
        held = self.collect(index)  # observed samples of this rank
        packed = self.pack(held)  # for the ranks that may compute them
        ranks = self.gather(held, packed)  # what every rank holds: integers
        plan = self.plan(ranks, index)  # pure, the same on all ranks
        by_row = self.exchange(plan, held, packed)  # samples travel to the rank that computes them
        return self.micro_batches(plan, by_row, ranks, index)  # with the loss weights of the whole step

    @abstractmethod
    def collect(self, index: int) -> list[Held]:
        """Take observed samples."""

    def pack(self, held: Sequence[Held]) -> list[bytes]:
        """The samples as other ranks get them, whose sizes stand in the table; nothing if none can move."""
        self._idle_sample = min(
            (entry.sample for entry in held), key=lambda sample: sample.cost.tokens, default=self._idle_sample
        )
        if self.context.ranks.world_size == 1 or not self.context.balance:
            return [b""] * len(held)
        return [pickle.dumps(entry.sample, 5) for entry in held]

    def gather(self, held: Sequence[Held], packed: Sequence[bytes]) -> list[RankMetadata]:
        """What every rank holds. Collective. Raises `CollectiveError` if the ranks do not fit together."""
        context = self.context
        buffer = make_metadata(
            [entry.sample.cost for entry in held],
            [entry.age for entry in held],
            exhausted=self._next is None,
            sizes=[len(text) for text in packed],
            positions=[entry.position for entry in held],
        )
        metadata = RankMetadata(
            buffer, Counter(self.rejected), self.overlong, context.order(), self._checksum, context.lowered()
        )
        ranks = context.ranks.gather(metadata)
        self._task = "planning"
        self._table = pool([rank.buffer for rank in ranks])
        if (problem := context.compare_orders([rank.order for rank in ranks])) is not None:
            raise CollectiveError(problem)
        self._compare_plans(ranks)
        return ranks

    def plan(self, ranks: list[RankMetadata], index: int) -> Plan:
        """The plan of all ranks; sets `final`."""
        budget = functools.reduce(lambda budget, rank: budget.within(rank.limits), ranks, self.context.budget)
        plan = self._make_plan(ranks, budget, index)
        self._checksum = plan.checksum()
        if self.context.balance and not self._has_warned and exceeds_limit([rank.buffer for rank in ranks]):
            self._has_warned = True
            logger.warning(TOO_HEAVY)
        return plan

    def exchange(self, plan: Plan, held: Sequence[Held], packed: Sequence[bytes]) -> dict[int, Sample]:
        """The samples that this rank computes, by their number in the plan, and those it holds. Collective if any
        moves.

        All ranks have the same plan, so what travels needs no address: the samples for a rank are in the order in which
        it takes them, and their sizes stand in the table.
        """
        start = plan.starts[self.rank]
        by_row = {start + i: entry.sample for i, entry in enumerate(held)}
        table, _, owner = self._table
        # A rank that holds nothing and gets nothing, such as one whose part of a stream is empty, idles with a sample
        # of another.
        is_idle = np.bincount(owner, minlength=len(plan.groups)) == 0
        is_idle &= [self.context.balance and len(table) > 0 and not any(groups) for groups in plan.groups]
        if not plan.moves and not is_idle.any():
            self._task = ""
            return by_row
        self._task = "redistributing samples"
        size_of, owner_of = table["bytes"].tolist(), owner.tolist()
        outgoing: dict[int, list[int]] = {}
        incoming: dict[int, list[int]] = {}
        for taker, groups in enumerate(plan.groups):
            for number in [int(table["row_tokens"].argmin())] if is_idle[taker] else itertools.chain(*groups):
                if taker == self.rank != owner_of[number]:
                    incoming.setdefault(owner_of[number], []).append(number)
                elif taker != self.rank == owner_of[number]:
                    outgoing.setdefault(taker, []).append(number)
        received = self.context.ranks.exchange(
            {taker: b"".join(packed[number - start] for number in numbers) for taker, numbers in outgoing.items()},
            {sender: sum(size_of[number] for number in numbers) for sender, numbers in incoming.items()},
        )
        for sender, numbers in incoming.items():
            content, place = received[sender], 0
            for number in numbers:
                by_row[number] = pickle.loads(content[place : place + size_of[number]])
                place += size_of[number]
        self._idle_sample = self._idle_sample or next(iter(by_row.values()), None)
        self._task = ""
        return by_row

    @abstractmethod
    def micro_batches(
        self, plan: Plan, by_row: dict[int, Sample], ranks: list[RankMetadata], index: int
    ) -> list[MicroBatch]:
        """Those of this rank."""

    @abstractmethod
    def _make_plan(self, ranks: list[RankMetadata], budget: Budget, index: int) -> Plan:
        """The plan of all ranks: a pure function of what they hold."""

    @abstractmethod
    def _draw(self) -> None:
        """Draw the next row; one is drawn ahead, so that the end of the epoch is known."""

    def __iter__(self) -> Generator[list[MicroBatch], None, None]:
        """Raises `CollectiveError` on all ranks; after the last plan, when no rank listens any more, `DataError`."""
        ranks, has_ended = self.context.ranks, False
        try:
            self._draw()
            for index in itertools.count(self.first_index):
                micro_batches = self.step(index)
                if self.final:  # nothing follows that would show another plan of it
                    self._compare_plans(ranks.gather(RankMetadata(plan=self._checksum)))
                    has_ended = True
                yield micro_batches
                if self.final:
                    return
        except GeneratorExit:
            if not has_ended:
                ranks.stop()
            raise
        except CollectiveError:
            raise
        except Exception as error:
            message = LEFT_EPOCH if self.is_left else one_line(error)
            if not self.is_left and not isinstance(error, DataError):
                # Logged here and not chained: its traceback would keep the worker processes alive.
                logger.error("planning failed", exc_info=error)
        finally:
            self.observed = iter(())  # lets its worker processes go
        if has_ended:
            raise DataError(message)
        if self._task and not self.is_left:
            ranks.abort(f"{self._task}: {message}")
        else:
            ranks.stop(message)
        raise CollectiveError(message)

    def _compare_plans(self, ranks: Sequence[RankMetadata]) -> None:
        """The ranks tell which plan they made last (I6)."""
        if (deviating_rank := first_unlike([rank.plan for rank in ranks])) is not None:
            raise CollectiveError(DIFFERENT_PLANS.format(deviating_rank))

    def _optimizer_step(
        self, planned: Sequence[Planned], ranks: Sequence[RankMetadata], index: int, **figures: Any
    ) -> list[MicroBatch]:
        """The micro-batches of an optimizer step. figures: fields of `OptimizerStep`."""
        step = OptimizerStep(
            **asdict(sum_totals([batch.totals for batch in planned])),
            epoch=self.epoch,
            index=index,
            num_micro_batches=len(planned),
            rejected=self._all_rejected(ranks),
            overlong=self.place.overlong + sum(rank.overlong for rank in ranks),
            **figures,
        )
        micro_batches, context = [], self.context
        for number, (light, infos, totals, _) in enumerate(planned):
            if not light:  # idle: the shortest sample of the last buffer, one of another rank's, or any usable row
                self._idle_sample = self._idle_sample or context.stand_in()
                light = [self._idle_sample]
            micro_batch = MicroBatch(step=step, index=number, samples=infos, totals=totals, light=light)
            weights = token_weights(micro_batch, context.loss_scaling, context.ranks.world_size)
            weighed = tuple(info._replace(weight=weight) for info, weight in zip(infos, weights))
            micro_batches.append(replace(micro_batch, samples=weighed))
        return micro_batches

    def _leave_out(self, row: Rejection) -> None:
        if row.fatal:
            raise DataError(row.message)
        self.rejected[row.reason] += 1
        self.context.leave_out(row.reason, row.message)

    def _all_rejected(self, ranks: Sequence[RankMetadata]) -> Counter[str]:
        """Rows of the epoch that all ranks have rejected until now, by reason."""
        return sum((rank.rejected for rank in ranks), Counter(self.place.rejected))

    def _nothing_left(self, rejected: Counter[str], remainder: int, reason: str) -> CollectiveError:
        """The error of an epoch that has no sample to train on. remainder: usable rows, for this `reason`."""
        empty = "it is empty"
        if self.epoch:
            empty = f"it yields nothing in epoch {self.epoch}; its `__iter__` must restart each time it is called"
        other_reasons = [f"{remainder} {reason}"] if remainder else []
        return CollectiveError(no_usable_row(rejected, other_reasons, empty))


# ----------------------------------------------------------------------------------------------------------------------


class KeepEpoch(EpochPlanner):
    """Kept optimizer steps: step t is the samples [tN, (t+1)N) of the order, planned by itself (I9)."""

    def __init__(
        self, observed: Iterator[Sample | Rejection], context: EpochContext, place: Place, *, stock: StockSteps
    ):
        super().__init__(observed, context, place)
        self.stock, self.first_index = stock, place.optimizer_steps
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
                self._leave_out(row)
            else:
                self.overlong += self.context.budget.overlong(row.cost)
                held.append(Held(row, position=position - first))
            self._draw()
        return held

    def micro_batches(
        self, plan: Plan, by_row: dict[int, Sample], ranks: list[RankMetadata], index: int
    ) -> list[MicroBatch]:
        stock, rejected = self.stock, self._all_rejected(ranks)
        rows, _, _ = self._table
        self.num_planned += sum(micro_step.samples for micro_step in plan.totals)
        if self.final and self.num_planned == 0:
            raise self._nothing_left(rejected, stock.remainder, "dropped by drop_last")
        groups, totals = plan.groups[self.rank], plan.totals
        if not groups:
            logger.warning("optimizer step %d of epoch %d has no usable sample: its loss is 0", index + 1, self.epoch)
            groups, totals = [[]], [MicroStepTotals()]
        of_stock, num_means = stock.means_of(rows)
        done = self.num_planned + rejected.total()
        if stock.num_samples is not None:
            done = min((index + 1) * stock.global_batch_size, stock.num_samples)
        planned = []
        for of_rank, of_step in zip(groups, totals):
            samples = [by_row[row] for row in of_rank]
            infos = tuple(SampleInfo.of(sample, *means) for sample, means in zip(samples, of_stock[of_rank].tolist()))
            planned.append(Planned(samples, infos, of_step))
        divisor = num_means if stock.mean.divisor is None else stock.mean.divisor
        return self._optimizer_step(
            planned,
            ranks,
            index,
            num_stock_means=divisor / stock.mean.factor,
            stock_input_tokens=stock.input_tokens(rows, self.rank, self.context.budget.collation.in_one_row()),
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
        context, buffers = self.context, [rank.buffer for rank in ranks]
        if self.stock.equal_weights:
            buffers = split_by_weight(buffers, self.stock)
        plan: Plan = context.compute(plan_optimizer_step, buffers, budget, balance=context.balance)
        self.final = plan.final
        expected = self.stock.steps_an_epoch
        if expected is not None and self.final != (index + 1 >= expected):
            raise CollectiveError(OTHER_LENGTH.format(self.stock.num_samples, "fewer" if self.final else "more"))
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

    def micro_batches(
        self, plan: Plan, by_row: dict[int, Sample], ranks: list[RankMetadata], index: int
    ) -> list[MicroBatch]:
        rejected = self._all_rejected(ranks)
        epoch_steps = self._epoch_steps(plan, rejected.total())
        self._carry_out(plan, by_row, ranks)
        num_samples = self.context.num_samples
        if self.final and self.place.planned + self._emitted == 0:
            remainder = max((num_samples or 0) - rejected.total(), 0)
            raise self._nothing_left(rejected, remainder, "that remain because a rank ran short")
        micro_batches: list[MicroBatch] = []
        # Without join, the end may turn out to have been the step before: one is kept until the next plan.
        num_kept = 0 if self.final or self.join else self.accumulation
        while len(self._planned) >= self.accumulation + num_kept or (self.final and self._planned):
            planned, self._planned = self._planned[: self.accumulation], self._planned[self.accumulation :]
            self.num_planned += sum(micro_batch.totals.samples for micro_batch in planned)
            processed, last = self.num_planned + rejected.total(), self.final and not self._planned
            done = num_samples if last and num_samples is not None else processed
            micro_batches += self._optimizer_step(
                planned,
                ranks,
                self._next_step,
                num_stock_means=0,
                stock_input_tokens=None,
                done=done,
                progress=None if num_samples is None else min(done / max(num_samples, 1), 1.0),
                remainder=done - processed,
                epoch_steps=epoch_steps,
                last=last,
                remaining=self._remaining_now(),
            )
            self._next_step += 1
        return micro_batches

    def _draw(self) -> None:
        """Draw the next usable sample of the share; None when it is exhausted."""
        self._next = None
        for row in self.observed:
            position = next(self._positions)
            if isinstance(row, Sample):
                self._next = Held(row, position)
                return
            self._leave_out(row)

    def _make_plan(self, ranks: list[RankMetadata], budget: Budget, index: int) -> Plan:
        plan: Plan = self.context.compute(
            plan_buffers,
            [rank.buffer for rank in ranks],
            budget,
            seed=self.context.seed,
            epoch=self.epoch,
            round_index=index,
            accumulation=self.accumulation,
            join=self.join,
            balance=self.context.balance,
        )
        self.final = plan.final
        return plan

    def _carry_out(self, plan: Plan, by_row: dict[int, Sample], ranks: list[RankMetadata]) -> None:
        """Take this rank's micro-batches out of a plan; what was not planned stays in the buffer, one round older."""
        rows, starts, owners = self._table
        self._num_drawn = self._num_sent + np.diff(starts) + [rank.rejected.total() for rank in ranks]
        is_left = np.ones(len(rows), dtype=bool)
        for of_rank, groups, totals in zip(plan.groups[self.rank], zip(*plan.groups), plan.totals):
            of_step = list(itertools.chain.from_iterable(groups))
            is_left[of_step] = False
            samples, positions = [by_row[row] for row in of_rank], rows["position"][of_step]
            self._planned.append(Planned(samples, tuple(map(SampleInfo.of, samples)), totals, positions.tolist()))
        self._num_sent += np.bincount(owners[~is_left], minlength=len(ranks))
        self._waiting = rows["position"][is_left]
        self._micro_steps += len(plan.totals)
        self._emitted += sum(totals.samples for totals in plan.totals)
        self._tokens_emitted += sum(totals.tokens for totals in plan.totals)
        self.held = [entry for entry, stays in zip(self.held, is_left[starts[self.rank] :]) if stays]
        for entry in self.held:
            entry.age += 1

    def _remaining_now(self) -> Remaining:
        """What is left once the optimizer steps handed on so far are taken; the same on all ranks."""
        pending = [position for micro_batch in self._planned for position in micro_batch.positions]
        return self._left_before.after(self._num_drawn, np.append(self._waiting, pending))

    def _epoch_steps(self, plan: Plan, rejected: int) -> int:
        """Optimizer steps of the whole epoch; estimated, unless this is its last plan.

        As if the samples to come are as long, and the micro-steps to come as full, as until now.
        """
        micro_steps = self._micro_steps + len(plan.totals)
        if not plan.final:
            if self.context.num_samples is None:
                return 0
            rows, _, _ = self._table
            seen, tokens_seen = (
                self._emitted + len(rows),
                self._tokens_emitted + int(rows["tokens"].sum(dtype=np.int64)),
            )
            emitted = self._tokens_emitted + sum(totals.tokens for totals in plan.totals)
            left = self.context.num_samples - self.place.planned - rejected
            micro_steps = max(micro_steps, round(micro_steps * left * tokens_seen / max(seen, 1) / max(emitted, 1)), 1)
        return self.place.optimizer_steps + -(-micro_steps // self.accumulation)
