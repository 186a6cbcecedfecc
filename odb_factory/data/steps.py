"""The optimizer steps of an epoch: observe, gather, plan, exchange, micro-batches.

`EpochPlanner.step` is the life of a sample. One background thread on each rank runs it, ahead of the training, and
makes all calls between ranks: one gather a plan, and an exchange if samples move. Every rank has the same table of
integers, so each computes the plan, the totals of all ranks, the weights and the end of the epoch by itself.
"""

from __future__ import annotations

import functools
import io
import itertools
import pickle
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from odb_factory.config import ResolvedConfig
from odb_factory.data.cursor import Place
from odb_factory.data.order import ShardSampler, StockSteps, StreamReader, split_by_weight
from odb_factory.data.pool import Pool, size
from odb_factory.data.ranks import LEFT_EPOCH, RankMetadata, Ranks, first_unlike
from odb_factory.data.samples import (
    LeftOut,
    MicroBatch,
    OptimizerStep,
    Rejection,
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
    BufferMetadata,
    Limits,
    MicroStepTotals,
    Plan,
    make_metadata,
    plan_buffers,
    plan_optimizer_step,
)
from odb_factory.planner.plan import exceeds_limit, pool, sum_totals

logger = get_logger(__name__)

MAX_SPARES = 16
TOO_HEAVY = (
    f"balance: the samples of a rank take more than {MAX_REDISTRIBUTED_BYTES >> 20} MiB, so they stay on the rank that "
    "drew them; let items hold paths instead of pixels, or lower buffer_size (or the optimizer batch)."
)
OTHER_LENGTH = (
    "an epoch of the training dataset (or its sampler) has {} samples by its `__len__`, and yields {}; fix its "
    "`__len__`: the steps of an epoch are counted by it."
)
DIFFERENT_PLANS = (
    "the ranks have computed different plans from the same metadata (rank 0 and rank {}); give every rank the same "
    "versions of odb_factory and numpy on the same kind of processor."
)


class PlannedLoader(Protocol):
    """The part of an `ODBLoader` that its planner uses.

    budget: as configured; lowered: the limits to which this rank has lowered it since.
    num_samples: of the epoch on all ranks; None if unknown (a stream). seed: of the order of filled micro-steps.
    order: where the rows come from; the ranks compare its fingerprint.
    spares: at most `MAX_SPARES` samples, of the last plans first and the smallest of a plan first: an idle micro-batch
    has the first of them.
    """

    config: ResolvedConfig
    budget: Budget
    lowered: Limits | None
    num_samples: int | None
    seed: int
    ranks: Ranks
    order: ShardSampler | StreamReader
    pool: Pool
    left_out: LeftOut
    spares: list[Sample]

    def stand_in(self) -> Sample:
        """A usable sample of the dataset."""


class Held(NamedTuple):
    """A sample of this rank that can be planned, and its position in the order of the epoch."""

    sample: Sample
    position: int


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

    observed: the rows that this rank draws of the rest of the epoch, which begins at `place`.
    step_size: N if optimizer steps are kept, else 0. first_index: of the first plan.
    is_left: the loader takes no further plan, and workers may have ended.
    final: the last plan of the epoch has been made.
    num_planned: samples of the epoch in optimizer steps so far, on all ranks. rejected, overlong: rows of this rank
    since `place`.
    """

    step_size = first_index = 0
    is_left = False
    _task = ""
    """The task of this rank between a gather and the end of the exchange, when a failure cannot be sent as metadata."""
    _table: tuple[np.ndarray, list[int], np.ndarray]
    """The samples of all ranks, as `pool` returns them."""

    def __init__(self, loader: PlannedLoader, observed: Iterator[Sample | Rejection], place: Place):
        self.loader, self.place, self._start = loader, place, loader.order.start
        self.epoch, self.num_planned = place.epoch, place.planned
        self.rank, self.world_size = loader.ranks.rank, loader.ranks.world_size
        self.balance = bool(loader.config.balance)
        self.rejected: Counter[str] = Counter()
        self.overlong = 0
        self.final = False
        self.held: list[Held] = []
        self._rows: Iterator[tuple[int, Sample | Rejection]]
        self._rows = zip(self._start.positions(self.rank, self.world_size), observed)
        self._next: tuple[int, Sample | Rejection] | None = None
        self._has_warned = False
        self._checksum = 0

    def step(self, index: int) -> list[MicroBatch]:
        """Plan one optimizer step (`keep`), or as many as the buffers fill (`fill`); the same on all ranks."""
        loader = self.loader
        # Observe: draw rows of this rank; one is drawn ahead, so that the end of the epoch is known before the plan.
        while self._next is not None and self._takes(*self._next, index):
            position, row = self._next
            if isinstance(row, Rejection):
                if row.fatal:
                    raise DataError(row.message)
                self.rejected[row.reason] += 1
                loader.left_out.leave_out(row.reason, row.message)
            else:
                self.overlong += loader.budget.overlong(row.cost)
                self.held.append(Held(row, position))
            self._next = next(self._rows, None)
        held = self.held
        samples = [entry.sample for entry in held]
        can_move = self.world_size > 1 and self.balance
        packed = [pickle.dumps(sample, 5) if can_move else b"" for sample in samples]

        # Gather: every rank learns what all hold, as integers.
        buffer = make_metadata(
            [sample.cost for sample in samples],
            exhausted=self._next is None,
            sizes=[len(content) for content in packed],
            positions=[entry.position - index * self.step_size for entry in held],
        )
        own = RankMetadata(
            buffer, Counter(self.rejected), self.overlong, loader.order.fingerprint, self._checksum, loader.lowered
        )
        ranks = loader.ranks.gather(own)
        self._task = "planning"
        if (problem := loader.order.compare([rank.order for rank in ranks])) is not None:
            raise CollectiveError(problem)
        self._compare_plans(ranks)

        # Plan: a pure function of what the ranks hold.
        buffers = [rank.buffer for rank in ranks]
        self._table = pool(buffers)
        if can_move and not self._has_warned and exceeds_limit(buffers):
            self._has_warned = True
            logger.warning(TOO_HEAVY)
        budget = functools.reduce(lambda budget, rank: budget.within(rank.limits), ranks, loader.budget)
        plan: Plan = loader.pool.submit("compute", self._make_plan(buffers, budget, index)).result()
        self.final, self._checksum = plan.final, plan.checksum()

        # Exchange, then cut into micro-batches, with the loss weights of the whole step.
        by_row = self._exchange(plan, samples, packed)
        self._task = ""
        loader.spares = [*sorted(by_row.values(), key=size), *loader.spares][:MAX_SPARES]
        return self._micro_batches(plan, by_row, ranks, index)

    @abstractmethod
    def _takes(self, position: int, row: Sample | Rejection, index: int) -> bool:
        """Whether the row that is drawn ahead belongs to this plan."""

    @abstractmethod
    def _make_plan(self, buffers: list[BufferMetadata], budget: Budget, index: int) -> Callable[[], Plan]:
        """The function that computes the plan of all ranks, for a worker process."""

    @abstractmethod
    def _micro_batches(
        self, plan: Plan, by_row: dict[int, Sample], ranks: list[RankMetadata], index: int
    ) -> list[MicroBatch]:
        """The micro-batches of this rank. by_row: as `_exchange` returns it."""

    def _exchange(self, plan: Plan, samples: Sequence[Sample], packed: Sequence[bytes]) -> dict[int, Sample]:
        """The samples that this rank computes or holds, by their number in the plan. Collective if any moves.

        All ranks have the same plan, so the bytes need no address: a rank sends samples in the order in which the
        receiver takes them, and their sizes stand in the table.
        """
        start = plan.starts[self.rank]
        by_row = dict(enumerate(samples, start))
        table, _, owner = self._table
        # A rank without any sample, such as one whose part of a stream is empty, gets one to idle with.
        has_none = np.bincount(owner, minlength=self.world_size) == 0
        has_none &= [self.balance and len(table) > 0 and not any(groups) for groups in plan.groups]
        if not plan.moves and not has_none.any():
            return by_row
        self._task = "redistributing samples"
        # Who sends which sample to whom: every rank derives the same from the plan.
        size_of, owner_of = table["bytes"].tolist(), owner.tolist()
        outgoing: dict[int, list[int]] = {}
        incoming: dict[int, list[int]] = {}
        for taker, groups in enumerate(plan.groups):
            for number in [int(table["row_tokens"].argmin())] if has_none[taker] else itertools.chain(*groups):
                if taker == self.rank != owner_of[number]:
                    incoming.setdefault(owner_of[number], []).append(number)
                elif taker != self.rank == owner_of[number]:
                    outgoing.setdefault(taker, []).append(number)
        received = self.loader.ranks.channel.exchange(
            {taker: b"".join(packed[number - start] for number in numbers) for taker, numbers in outgoing.items()},
            {sender: sum(size_of[number] for number in numbers) for sender, numbers in incoming.items()},
            "redistributing samples",
        )
        for sender, numbers in incoming.items():
            content = io.BytesIO(received[sender])
            by_row |= {number: pickle.load(content) for number in numbers}
        return by_row

    def __iter__(self) -> Generator[list[MicroBatch], None, None]:
        """Raises `CollectiveError` on all ranks; after the last plan, when no rank listens any more, `DataError`."""
        ranks, has_ended = self.loader.ranks, False
        try:
            self._next = next(self._rows, None)
            for index in itertools.count(self.first_index):
                micro_batches = self.step(index)
                if self.final:  # no further gather would compare this plan
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
            self._rows = iter(())  # lets its worker processes go
        if has_ended:
            raise DataError(message)
        if self._task and not self.is_left:
            ranks.ring.fail(f"{self._task}: {message}")
        else:
            ranks.stop(message)
        raise CollectiveError(message)

    def _compare_plans(self, ranks: Sequence[RankMetadata]) -> None:
        """Compare the checksums of the last plan of each rank (I6)."""
        if (deviating_rank := first_unlike([rank.plan for rank in ranks])) is not None:
            raise CollectiveError(DIFFERENT_PLANS.format(deviating_rank))

    def _optimizer_step(
        self, planned: Sequence[Planned], ranks: Sequence[RankMetadata], index: int, **figures: Any
    ) -> list[MicroBatch]:
        """The micro-batches of an optimizer step. figures: fields of `OptimizerStep`."""
        loader = self.loader
        step = OptimizerStep(
            **asdict(sum_totals([batch.totals for batch in planned])),
            epoch=self.epoch,
            index=index,
            num_micro_batches=len(planned),
            rejected=self._all_rejected(ranks),
            overlong=self.place.overlong + sum(rank.overlong for rank in ranks),
            **figures,
        )
        micro_batches = []
        for number, (samples, infos, totals, _) in enumerate(planned):
            light = samples or loader.spares[:1] or [loader.stand_in()]
            micro_batch = MicroBatch(step=step, index=number, samples=infos, totals=totals, light=light)
            weights = token_weights(micro_batch, loader.config.loss_scaling, self.world_size)
            weighed = tuple(info._replace(weight=weight) for info, weight in zip(infos, weights))
            micro_batches.append(replace(micro_batch, samples=weighed))
        return micro_batches

    def _all_rejected(self, ranks: Sequence[RankMetadata]) -> Counter[str]:
        """Rows of the epoch that all ranks have rejected until now, by reason."""
        return sum((rank.rejected for rank in ranks), Counter(self.place.rejected))

    def _nothing_left(self, rejected: Counter[str], remainder: int, reason: str) -> CollectiveError:
        """The error of an epoch that has no sample to train on. remainder: usable rows that the epoch leaves out, for
        this `reason`."""
        empty = "it is empty"
        if self.epoch:
            empty = f"it yields nothing in epoch {self.epoch}; its `__iter__` must restart each time it is called"
        other_reasons = [f"{remainder} {reason}"] if remainder else []
        return CollectiveError(no_usable_row(rejected, other_reasons, empty))


class KeepEpoch(EpochPlanner):
    """Kept optimizer steps: step t is the samples [tN, (t+1)N) of the order, planned by itself (I9)."""

    def __init__(self, *arguments: Any, stock: StockSteps):
        super().__init__(*arguments)
        self.stock, self.first_index, self.step_size = stock, self.place.optimizer_steps, stock.global_batch_size
        self._rows = ((stock.position(position), row) for position, row in self._rows)

    def _takes(self, position: int, row: Sample | Rejection, index: int) -> bool:
        return position < (index + 1) * self.step_size

    def _make_plan(self, buffers: list[BufferMetadata], budget: Budget, index: int) -> Callable[[], Plan]:
        if self.stock.rule.equal_weights and self.loader.config.loss_scaling == "stock":
            buffers = split_by_weight(buffers, self.stock)
        return functools.partial(plan_optimizer_step, buffers, budget, balance=self.balance)

    def _micro_batches(
        self, plan: Plan, by_row: dict[int, Sample], ranks: list[RankMetadata], index: int
    ) -> list[MicroBatch]:
        # Does the epoch end where stock ends it?
        stock, mean, rejected = self.stock, self.stock.rule.stock_mean, self._all_rejected(ranks)
        self.held = []  # a step is planned whole
        expected = stock.steps_an_epoch
        if expected is not None and plan.final != (index + 1 >= expected):
            raise CollectiveError(OTHER_LENGTH.format(stock.num_samples, "fewer" if plan.final else "more"))
        rows, _, _ = self._table
        self.num_planned += len(rows)
        if self.final and self.num_planned == 0:
            raise self._nothing_left(rejected, stock.remainder, "dropped by drop_last")
        groups, totals = plan.groups[self.rank], plan.totals
        if not groups:
            logger.warning("optimizer step %d of epoch %d has no usable sample: its loss is 0", index + 1, self.epoch)
            groups, totals = [[]], [MicroStepTotals()]
        # Each sample of this rank with the weight that stock gives it.
        of_stock, num_means = stock.means_of(rows)
        planned = []
        for group, micro_step in zip(groups, totals):
            samples = [by_row[row] for row in group]
            infos = tuple(SampleInfo.of(sample, *means) for sample, means in zip(samples, of_stock[group].tolist()))
            planned.append(Planned(samples, infos, micro_step))
        done = self.num_planned + rejected.total()
        if stock.num_samples is not None:
            done = min((index + 1) * self.step_size, stock.num_samples)
        return self._optimizer_step(
            planned,
            ranks,
            index,
            num_stock_means=(num_means if mean.divisor is None else mean.divisor) / mean.factor,
            stock_input_tokens=stock.input_tokens(rows, self.rank, self.loader.budget.collation.in_one_row()),
            done=done,
            progress=stock.progress(index),
            remainder=stock.remainder if self.final else 0,
            epoch_steps=stock.steps_an_epoch or (index + 1 if self.final else 0),
            last=self.final,
        )


class FillEpoch(EpochPlanner):
    """Filled optimizer steps: as many samples as `accumulation` micro-steps hold (the last step may have fewer).

    Each round fills the buffer, plans, and carries the rest over.
    `join` of the config: ranks that have run out of samples take idle micro-batches; without it the epoch ends for all
    ranks if one runs short.
    """

    def __init__(self, *arguments: Any, accumulation: int):
        super().__init__(*arguments)
        config = self.loader.config
        self.accumulation, self.join, self.buffer_size = accumulation, config.join, config.buffer_size
        if not self.join:  # a buffer must be able to fill a whole optimizer step
            self.buffer_size = max(self.buffer_size, accumulation)
        self._num_sent = np.zeros(self.world_size, dtype=np.int64)  # of each rank, samples that were planned
        self._queue: list[Planned] = []
        self._next_step = self.place.optimizer_steps
        self._micro_steps = self._emitted = self._tokens_emitted = 0

    def _takes(self, position: int, row: Sample | Rejection, index: int) -> bool:
        return len(self.held) < self.buffer_size or isinstance(row, Rejection)  # the sample drawn ahead can be planned

    def _make_plan(self, buffers: list[BufferMetadata], budget: Budget, index: int) -> Callable[[], Plan]:
        return functools.partial(
            plan_buffers,
            buffers,
            budget,
            seed=self.loader.seed,
            epoch=self.epoch,
            round_index=index,
            accumulation=self.accumulation,
            join=self.join,
            balance=self.balance,
        )

    def _micro_batches(
        self, plan: Plan, by_row: dict[int, Sample], ranks: list[RankMetadata], index: int
    ) -> list[MicroBatch]:
        rejected, num_samples = self._all_rejected(ranks), self.loader.num_samples
        epoch_steps = self._epoch_steps(plan, rejected.total())

        # Queue this rank's micro-batches; the other samples stay in the buffer.
        rows, starts, owners = self._table
        num_drawn = self._num_sent + np.diff(starts) + [rank.rejected.total() for rank in ranks]
        is_left = np.ones(len(rows), dtype=bool)
        for own_group, groups, totals in zip(plan.groups[self.rank], zip(*plan.groups), plan.totals):
            numbers = list(itertools.chain.from_iterable(groups))
            is_left[numbers] = False
            samples, positions = [by_row[row] for row in own_group], rows["position"][numbers].tolist()
            self._queue.append(Planned(samples, tuple(map(SampleInfo.of, samples)), totals, positions))
            self._emitted += totals.samples
            self._tokens_emitted += totals.tokens
        self._micro_steps += len(plan.totals)
        self._num_sent += np.bincount(owners[~is_left], minlength=len(ranks))
        self.held = list(itertools.compress(self.held, is_left[starts[self.rank] :]))
        if self.final and self.place.planned + self._emitted == 0:
            remainder = max((num_samples or 0) - rejected.total(), 0)
            raise self._nothing_left(rejected, remainder, "that remain because a rank ran short")

        # Return whole optimizer steps. Without join, the next plan may show that a step is the last of the epoch: one
        # step waits for it.
        micro_batches: list[MicroBatch] = []
        num_kept = 0 if self.final or self.join else self.accumulation
        while len(self._queue) >= self.accumulation + num_kept or (self.final and self._queue):
            planned, self._queue = self._queue[: self.accumulation], self._queue[self.accumulation :]
            self.num_planned += sum(micro_batch.totals.samples for micro_batch in planned)
            processed, last = self.num_planned + rejected.total(), self.final and not self._queue
            done = num_samples if last and num_samples is not None else processed
            waiting = [position for micro_batch in self._queue for position in micro_batch.positions]
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
                remaining=self._start.after(num_drawn, np.append(rows["position"][is_left], waiting)),
            )
            self._next_step += 1
        return micro_batches

    def _epoch_steps(self, plan: Plan, rejected: int) -> int:
        """Optimizer steps of the whole epoch; estimated, unless this is its last plan: further samples count as long,
        and further micro-steps as full, as those until now."""
        micro_steps, num_samples = self._micro_steps + len(plan.totals), self.loader.num_samples
        if not plan.final:
            if num_samples is None:
                return 0
            rows, _, _ = self._table
            seen = max(self._emitted + len(rows), 1)
            tokens_seen = self._tokens_emitted + int(rows["tokens"].sum(dtype=np.int64))
            tokens_emitted = max(self._tokens_emitted + sum(totals.tokens for totals in plan.totals), 1)
            left = num_samples - self.place.planned - rejected
            micro_steps = max(micro_steps, round(micro_steps * left * tokens_seen / seen / tokens_emitted), 1)
        return self.place.optimizer_steps + -(-micro_steps // self.accumulation)
