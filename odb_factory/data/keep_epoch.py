"""An epoch with kept optimizer steps: step t is the samples [tN, (t+1)N) of the order, planned by itself (I9)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from odb_factory.comm.coordinator import RankMetadata
from odb_factory.data.epoch import EpochContext, EpochPlanner, PlannedMicroBatch, nothing_left, sum_of_roots, sums
from odb_factory.data.group_plan import plan_with_group
from odb_factory.data.samples import OptimizerStep, Rejection, Sample, Task
from odb_factory.data.stock_steps import StockSteps, by_weight, stock_input_tokens, stock_means
from odb_factory.errors import CollectiveError
from odb_factory.log import get_logger
from odb_factory.planning import (
    Budget,
    BufferMetadata,
    CostModel,
    MicroStepTotals,
    Plan,
    exceeds_limit,
    make_metadata,
    plan_optimizer_step,
)

logger = get_logger(__name__)

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
