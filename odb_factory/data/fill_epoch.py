"""An epoch whose optimizer steps are filled: as many samples as a number of micro-steps of the budget hold.

Round by round: fill the buffer, plan, carry the rest over.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from odb_factory.comm.ranks import RankMetadata
from odb_factory.data.epoch import EpochContext, EpochPlanner, Held, nothing_left, sum_of_roots
from odb_factory.data.samples import MicroBatch, OptimizerStep, Rejection, Sample, SampleInfo, Task
from odb_factory.data.state import Place, Share
from odb_factory.errors import CollectiveError
from odb_factory.planning import Budget, BufferMetadata, MicroStepTotals, Plan, plan_buffers
from odb_factory.planning.plan import pool


@dataclass(slots=True)
class Drawn:
    """A sample in the buffer. draw: its number in this rank's share; age: rounds it was kept back."""

    sample: Sample
    draw: int
    age: int = 0


class Planned(NamedTuple):
    """A micro-batch of this rank whose optimizer step is not complete.

    given: draws of this rank that go out in the micro-step, here or on another rank. units: of all its samples.
    """

    samples: list[Sample]
    totals: MicroStepTotals
    given: tuple[int, ...]
    units: list[int]


class FillEpoch(EpochPlanner):
    """Hands on whole optimizer steps of `accumulation` micro-steps (the last may have fewer).

    share: what this rank has done of its share before; `observed` is the rest, first what was passed over.
    join: ranks that have run out of samples take idle micro-batches; else the epoch ends for all when one runs short.
    drawn: rows drawn of the share. rejected_draws: those among them that cannot be trained on, since the epoch began.
    """

    def __init__(
        self,
        observed: Iterator[Sample | Rejection],
        context: EpochContext,
        place: Place,
        *,
        share: Share,
        buffer_size: int,
        accumulation: int,
        join: bool,
    ):
        super().__init__(observed, context, place)
        # Without join a buffer must be able to fill a whole optimizer step.
        self.buffer_size = buffer_size if join else max(buffer_size, accumulation)
        self.accumulation, self.join = accumulation, join
        self.held: list[Drawn] = []
        self.drawn, self.rejected_draws = share.drawn, set[int]()
        self._draws = itertools.chain(share.waiting, itertools.count(share.drawn))
        self._next: Drawn | None = None
        self._planned: list[Planned] = []
        self._next_step = place.optimizer_steps
        self._micro_steps = self._emitted = self._tokens_emitted = 0

    def collect(self, index: int) -> Held:
        """Fill the buffer; one sample ahead is drawn, so that an exhausted share is known before the plan."""
        while self._next is not None and len(self.held) < self.buffer_size:
            self.overlong += self.context.budget.overlong(self._next.sample.cost)
            self.held.append(self._next)
            self._draw()
        return Held([one.sample for one in self.held], [one.age for one in self.held], [0] * len(self.held))

    def micro_batches(
        self, plan: Plan, mine: dict[int, Sample], ranks: Sequence[RankMetadata], index: int
    ) -> list[Task]:
        buffers, rejected = [rank.buffer for rank in ranks], self._rejected_of(ranks)
        epoch_steps = self._epoch_steps(buffers, plan, rejected.total())
        self._carry_out(plan, mine, buffers)
        if self.final and self.place.trained + self._emitted == 0:
            not_trained = (self.context.num_samples or 0) - rejected.total()
            raise CollectiveError(nothing_left(rejected, not_trained, "because a rank ran short", self.epoch))
        tasks: list[Task] = []
        # Without join, the end may turn out to have been the step before: one is kept until the next plan.
        kept = 0 if self.final or self.join else self.accumulation
        while len(self._planned) >= self.accumulation + kept or (self.final and self._planned):
            planned, self._planned = self._planned[: self.accumulation], self._planned[self.accumulation :]
            tasks += self._optimizer_step(planned, rejected, self._overlong_of(ranks), epoch_steps)
        return tasks

    def _draw(self) -> None:
        """Draw the next usable sample of the share; None when it is exhausted."""
        self._next = None
        for row in self.observed:
            draw = next(self._draws)
            self.drawn = max(self.drawn, draw + 1)
            if isinstance(row, Sample):
                self._next = Drawn(row, draw)
                return
            self.rejected_draws.add(draw)
            self._leave_out(row, self._next_step + len(self._planned) // self.accumulation)

    def _make_plan(self, buffers: Sequence[BufferMetadata], budget: Budget, index: int) -> Plan:
        plan = self.context.compute(
            plan_buffers,
            buffers,
            budget,
            seed=self.context.seed,
            epoch=self.epoch,
            round_index=index,
            accumulation=self.accumulation,
            join=self.join,
            balance=self.context.balance,
            model=self.context.model,
        )
        self.context.coordinator.confirm(plan.checksum(), index)
        self.final = plan.final
        return plan

    def _carry_out(self, plan: Plan, mine: dict[int, Sample], buffers: Sequence[BufferMetadata]) -> None:
        """Take this rank's micro-batches out of a plan; what was not planned stays in the buffer, one round older."""
        rank = self.context.rank
        start, end = plan.starts[rank : rank + 2]
        units = pool(buffers)[0]["units"]
        gone: set[int] = set()
        for own, groups, totals in zip(plan.groups[rank], zip(*plan.groups), plan.totals):
            takers = groups if plan.moves else [own]
            given = [row - start for group in takers for row in group if start <= row < end]
            gone.update(given)
            self._planned.append(
                Planned(
                    [mine[row] for row in own],
                    totals,
                    tuple(self.held[i].draw for i in given),
                    units[list(itertools.chain.from_iterable(groups))].tolist(),
                )
            )
        self._micro_steps += len(plan.totals)
        self._emitted += sum(totals.samples for totals in plan.totals)
        self._tokens_emitted += sum(totals.tokens for totals in plan.totals)
        self.held = [one for i, one in enumerate(self.held) if i not in gone]
        for one in self.held:
            one.age += 1

    def _optimizer_step(
        self, planned: Sequence[Planned], rejected: Counter[str], overlong: int, epoch_steps: int
    ) -> list[Task]:
        self.trained += sum(one.totals.samples for one in planned)
        processed = self.trained + rejected.total()
        last = self.final and not self._planned
        num_samples = self.context.num_samples
        done = num_samples if last and num_samples is not None else processed
        step = OptimizerStep.of(
            [one.totals for one in planned],
            epoch=self.epoch,
            index=self._next_step,
            root_units=sum_of_roots([units for one in planned for units in one.units]),
            num_stock_means=0,
            stock_input_tokens=None,
            done=done,
            progress=None if num_samples is None else min(done / max(num_samples, 1), 1.0),
            rejected=rejected,
            overlong=overlong,
            not_trained=done - processed,
            epoch_steps=epoch_steps,
            last=last,
        )
        self._next_step += 1
        return [
            (
                MicroBatch(
                    step=step,
                    index=index,
                    samples=tuple(map(SampleInfo.of, one.samples)),
                    totals=one.totals,
                    given=one.given,
                    drawn=self.drawn,
                ),
                self._samples_for(one.samples),
            )
            for index, one in enumerate(planned)
        ]

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
            left = self.context.num_samples - self.place.trained - rejected
            micro_steps = max(micro_steps, round(micro_steps * left * tokens_seen / max(seen, 1) / max(emitted, 1)), 1)
        return self.place.optimizer_steps + -(-micro_steps // self.accumulation)
