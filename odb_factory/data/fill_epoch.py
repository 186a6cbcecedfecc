"""An epoch whose optimizer steps are filled: as many samples as a number of micro-steps of the budget hold.

Round by round: fill the buffer, exchange, plan, carry the rest over.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from odb_factory.comm.coordinator import RankMetadata
from odb_factory.data.epoch import EpochContext, EpochPlanner, PlannedMicroBatch, nothing_left, sum_of_roots, sums
from odb_factory.data.samples import OptimizerStep, Rejection, Sample, Task
from odb_factory.data.state import BufferedSample, Snapshot
from odb_factory.errors import CollectiveError, DataError
from odb_factory.planning import BufferMetadata, CostModel, Limits, Plan, make_metadata, plan_buffers

# ----------------------------------------------------------------------------------------------------------------------
# Samples that a rank has drawn and that no optimizer step has had yet, and how they are found again after a stop.

ROW_CHANGED = (
    "the training data have changed since the checkpoint: a row{before} that waited or had just been trained on is "
    "now: {now}; bring it back, or set `resume: ignore_data` to begin the epoch anew."
)


@dataclass(slots=True)
class Drawn:
    """A sample in the buffer. draw: its number in this rank's draws; age: rounds it was kept back."""

    sample: Sample
    draw: int
    age: int = 0

    def as_saved(self) -> BufferedSample:
        return BufferedSample(self.draw, self.age, self.sample.cost.tokens, self.sample.content)


def found_again(waiting: Sequence[BufferedSample], observed: Iterator[Sample | Rejection]) -> Iterator[Drawn]:
    """What waited at a stop, observed again. Raises `DataError` with a row that is another than it was."""
    for held in waiting:
        item = next(observed, None)
        before = f" ({held.tokens} tokens)"
        if not isinstance(item, Sample):
            raise DataError(ROW_CHANGED.format(before=before, now=getattr(item, "message", "no row")))
        if item.cost.tokens != held.tokens or (held.content and item.content != held.content):
            now = f"row {item.id}, of {item.cost.tokens} tokens and with other content"
            raise DataError(ROW_CHANGED.format(before=before, now=now))
        yield Drawn(item, held.draw, held.age)


def check_filled(filled: Sequence[Drawn], before: Sequence[int]) -> None:
    """Raise `DataError` if the rows drawn for a round are others than before a stop. before: their checksums then."""
    for one, content in zip(filled, before):
        if content and one.sample.content != content:
            now = f"row {one.sample.id}, which says something else"
            raise DataError(ROW_CHANGED.format(before="", now=now))
    if len(filled) != len(before):
        now = f"one of {len(filled)} usable rows drawn at this place, where there were {len(before)}"
        raise DataError(ROW_CHANGED.format(before="", now=now))


# ----------------------------------------------------------------------------------------------------------------------

PLANNED_OTHERWISE = (
    "the plan that was under way at the checkpoint comes out otherwise now although its rows are the same (another "
    "version of odb_factory or numpy?), so what is left of it cannot be told; go on with the one that wrote it, or set "
    "`resume: ignore_data`."
)


class FillEpoch(EpochPlanner):
    """Plans round by round; hands on whole optimizer steps of `accumulation` micro-steps (the last may have fewer).

    snapshots: one for each round begun, for whoever consumes the tasks to take a state from.

    join: ranks that have run out of samples take idle micro-batches; else the epoch ends for all when one runs short.
    done_before: samples of the epoch that were done before its order began (dealt out anew after a stop).
    resume: a snapshot to go on from, and the micro-steps of its round that are consumed; `observed` then begins with
    what was buffered in it. emitted_before: the positions of those, to be sure that the round is planned as it was.
    """

    def __init__(
        self,
        observed: Iterator[Sample | Rejection],
        context: EpochContext,
        *,
        epoch: int,
        buffer_size: int,
        accumulation: int,
        join: bool,
        emitted_before: Sequence[int] = (),
        done_before: int = 0,
        resume: tuple[Snapshot, int] | None = None,
    ):
        super().__init__(observed, context, epoch)
        # Without join a buffer must be able to fill a whole optimizer step.
        self.buffer_size = buffer_size if join else max(buffer_size, accumulation)
        self.accumulation, self.join = accumulation, join
        self.resume, self.done_before, self.emitted_before = resume, done_before, list(emitted_before)
        self.snapshots: deque[Snapshot] = deque()
        self.held: list[Drawn] = []
        self.next: Drawn | None = None
        self.dummy: Drawn | None = None
        self.proposed: tuple[CostModel, Limits | None] | None = None
        self.drawn = self.round_index = 0
        self.micro_steps = self.emitted = self.tokens_emitted = self.trained = 0

    def _plan_epoch(self) -> Iterator[list[Task]]:
        planned: list[PlannedMicroBatch] = []
        num_consumed = 0
        if self.resume is None:
            self.next = self._draw()
        else:
            snapshot, num_consumed = self.resume
            self._restore(snapshot)
        while not self.final:
            ranks = self._exchange()
            buffers = [rank.buffer for rank in ranks]
            plan = self._compute(
                plan_buffers,
                buffers,
                self._budget(ranks),
                seed=self.context.seed,
                epoch=self.epoch,
                round_index=self.round_index,
                accumulation=self.accumulation,
                join=self.join,
                balance=self.context.balance,
                model=ranks[0].model,
            )
            self._accept(plan, self.round_index)
            self.proposed, self.final = None, plan.final
            rejected = sum((rank.rejected for rank in ranks), Counter())
            epoch_steps = self._epoch_steps(buffers, plan, rejected.total())
            planned += self._without(num_consumed, self._carry_out(plan, np.concatenate([one.rows for one in buffers])))
            num_consumed = 0
            self.round_index += 1
            if self.final and self.emitted + self.done_before == 0:
                not_trained = (self.context.num_samples or 0) - rejected.total()
                raise CollectiveError(nothing_left(rejected, not_trained, "because a rank ran short", self.epoch))
            tasks: list[Task] = []
            # Without join, the end may turn out to have been the step before: one is kept until the next plan.
            kept = 0 if self.final or self.join else self.accumulation
            while len(planned) >= self.accumulation + kept or (self.final and planned):
                step, planned = planned[: self.accumulation], planned[self.accumulation :]
                overlong = sum(rank.overlong for rank in ranks)
                last = self.final and not planned
                tasks += self._optimizer_step(step, rejected, overlong, epoch_steps, last=last)
            yield tasks

    def _exchange(self) -> list[RankMetadata]:
        """Fill the buffer and learn what the others hold."""
        model, limits = self.proposed or (self.context.propose(), self.context.lowered())
        snapshot = self._snapshot(model, limits)
        filled = self._fill()
        if self.resume is not None and self.round_index == self.resume[0].round_index:
            check_filled(filled, self.resume[0].filled)
        self.snapshots.append(replace(snapshot, filled=tuple(one.sample.content for one in filled)))
        samples = [one.sample for one in self.held]
        buffer = make_metadata(
            [sample.cost for sample in samples],
            [one.age for one in self.held],
            exhausted=self.next is None,
            sizes=[len(sample.features) for sample in samples],
        )
        metadata = RankMetadata(buffer, self.rejected, self.overlong, self.context.order(0), model, limits)
        ranks = self.context.coordinator.all_gather(metadata, self.round_index)
        self._compare_orders([rank.order for rank in ranks])
        return ranks

    def _draw(self) -> Drawn | None:
        """The next usable sample of the sampler, None when it is exhausted."""
        for item in self.observed:
            self.drawn += 1
            if isinstance(item, Sample):
                return Drawn(item, self.drawn - 1)
            self._leave_out(item, self.micro_steps // self.accumulation)
        return None

    def _fill(self) -> list[Drawn]:
        """Fill the buffer; one sample ahead is drawn, so that an exhausted sampler is known before the plan.

        Returns the samples that were drawn for it.
        """
        filled: list[Drawn] = []
        while self.next is not None and len(self.held) < self.buffer_size:
            self.overlong += self.context.budget.overlong(self.next.sample.cost)
            self.held.append(self.next)
            self.next = self._draw()
            if self.next is not None:
                filled.append(self.next)
        if self.held:
            # Of this buffer, not of the epoch: what a resumed run has to find again shall not be far back.
            self.dummy = min(self.held, key=lambda one: one.sample.cost.tokens)
            self._dummy = self.dummy.sample
        return filled

    def _snapshot(self, model: CostModel, limits: Limits | None) -> Snapshot:
        return Snapshot(
            round_index=self.round_index,
            steps=self.micro_steps,
            emitted=self.emitted,
            tokens_emitted=self.tokens_emitted,
            drawn=self.drawn,
            rejected=dict(self.rejected),
            overlong=self.overlong,
            held=tuple(one.as_saved() for one in self.held),
            next=None if self.next is None else self.next.as_saved(),
            dummy=None if self.dummy is None else self.dummy.as_saved(),
            model=model,
            limits=limits,
        )

    def _restore(self, snapshot: Snapshot) -> None:
        """Go back to `snapshot`."""
        drawn = {one.draw: one for one in found_again(snapshot.waiting, self.observed)}
        self.held = [drawn[held.draw] for held in snapshot.held]
        self.next = None if snapshot.next is None else drawn[snapshot.next.draw]
        self.dummy = None if snapshot.dummy is None else drawn[snapshot.dummy.draw]
        self._dummy = None if self.dummy is None else self.dummy.sample
        self.drawn, self.round_index, self.micro_steps = snapshot.drawn, snapshot.round_index, snapshot.steps
        self.emitted = self.trained = snapshot.emitted
        self.tokens_emitted = snapshot.tokens_emitted
        self.rejected, self.overlong = Counter(snapshot.rejected), snapshot.overlong
        self.proposed = (snapshot.model, snapshot.limits)

    def _carry_out(self, plan: Plan, rows: np.ndarray) -> list[PlannedMicroBatch]:
        """This rank's micro-batches of a plan; what was not planned stays in the buffer, one round older.

        rows: the samples of all ranks, as `ROW`.
        """
        samples = self._redistribute(plan, [one.sample for one in self.held])
        gone = self._emitted_positions(plan)
        planned = [
            PlannedMicroBatch(
                samples=[samples[row] for row in group],
                totals=totals,
                number=self.micro_steps + k,
                round_index=self.round_index,
                positions=tuple(self.held[i].draw for i in gone[k]),
                units=rows["units"][list(itertools.chain.from_iterable(groups))].tolist(),
            )
            for k, (group, groups, totals) in enumerate(
                zip(plan.groups[self.context.rank], zip(*plan.groups), plan.totals)
            )
        ]
        self.micro_steps += len(planned)
        self.emitted += sum(totals.samples for totals in plan.totals)
        self.tokens_emitted += sum(totals.tokens for totals in plan.totals)
        all_gone = {i for positions in gone for i in positions}
        # New objects: a snapshot's counterpart must not grow older with them.
        self.held = [Drawn(one.sample, one.draw, one.age + 1) for i, one in enumerate(self.held) if i not in all_gone]
        return planned

    def _emitted_positions(self, plan: Plan) -> list[list[int]]:
        """Of each micro-step the positions in this rank's buffer of what goes out in it, here or on another rank."""
        start, end = plan.starts[self.context.rank : self.context.rank + 2]
        takers = plan.groups if plan.moves else [plan.groups[self.context.rank]]
        return [[row - start for group in groups for row in group if start <= row < end] for groups in zip(*takers)]

    def _without(self, num_consumed: int, planned: list[PlannedMicroBatch]) -> list[PlannedMicroBatch]:
        """What is left of a round of which the training has taken so many micro-steps before it stopped."""
        consumed = planned[:num_consumed]
        if num_consumed:
            emitted = [position for one in consumed for position in one.positions]
            if num_consumed > len(planned) or self.emitted_before != emitted:
                raise DataError(PLANNED_OTHERWISE)
        self.trained += sum(one.totals.samples for one in consumed)
        return planned[num_consumed:]

    def _optimizer_step(
        self,
        planned: Sequence[PlannedMicroBatch],
        rejected: Counter[str],
        overlong: int,
        epoch_steps: int,
        *,
        last: bool,
    ) -> list[Task]:
        self.trained += sum(one.totals.samples for one in planned)
        processed = self.done_before + self.trained + rejected.total()
        num_samples = self.context.num_samples
        done = num_samples if last and num_samples is not None else processed
        step = OptimizerStep(
            epoch=self.epoch,
            index=planned[0].number // self.accumulation,
            **sums(planned),
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
        return self._tasks(step, planned)

    def _epoch_steps(self, buffers: Sequence[BufferMetadata], plan: Plan, rejected: int) -> int:
        """Optimizer steps of the whole epoch; estimated, unless this is its last plan.

        As if the samples to come are as long, and the micro-steps to come as full, as until now.
        """
        micro_steps = self.micro_steps + len(plan.totals)
        if not plan.final:
            if self.context.num_samples is None:
                return 0
            seen = self.emitted + sum(len(buffer.rows) for buffer in buffers)
            tokens_seen = self.tokens_emitted + sum(int(one.rows["tokens"].sum(dtype=np.int64)) for one in buffers)
            emitted = self.tokens_emitted + sum(totals.tokens for totals in plan.totals)
            tokens = (self.context.num_samples - self.done_before - rejected) * tokens_seen / max(seen, 1)
            micro_steps = max(micro_steps, round(micro_steps * tokens / max(emitted, 1)), 1)
        return -(-micro_steps // self.accumulation)
