"""The rounds of one epoch on one rank: fill the window, exchange, plan, emit, carry the rest over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from odb_factory.batching import Budget, Plan, Window, plan_round
from odb_factory.data.samples import Rejection, Sample, Step
from odb_factory.errors import DataError

Task = tuple[Step, list[Sample]]
"""A step and the samples to collate for it; on an idle step the sample that is run with weight 0."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank tells the others in a round: its window and the rows it has rejected so far this epoch."""

    window: Window
    rejected: int


Exchange = Callable[[Report], list[Report]]
"""This rank's report in, the reports of all ranks out, in rank order."""


class EpochRounds:
    """Iterate over the rounds of one epoch, each a list of tasks; deterministic for its arguments (I6)."""

    def __init__(
        self,
        observed: Iterator[Sample | Rejection],
        *,
        budget: Budget,
        buffer_size: int,
        num_samples: int,
        accumulation: int,
        seed: int,
        epoch: int,
        rank: int,
        exchange: Exchange,
        on_reject: Callable[[Rejection], None],
    ):
        self.observed = observed
        self.budget, self.buffer_size = budget, buffer_size
        self.num_samples, self.accumulation = num_samples, accumulation
        self.seed, self.epoch, self.rank = seed, epoch, rank
        self.exchange, self.on_reject = exchange, on_reject

        self.rejected: Counter[str] = Counter()
        self.held: list[Sample] = []
        self.ages: list[int] = []
        self.spare: Sample | None = None
        self.next_sample: Sample | None = None
        self.steps = self.emitted = 0

    def __iter__(self) -> Iterator[list[Task]]:
        try:
            yield from self._rounds()
        finally:
            self.observed = iter(())  # lets its worker processes go, whoever still holds this object

    def _rounds(self) -> Iterator[list[Task]]:
        round_index, final = 0, False
        self.next_sample = self._draw()
        while not final:
            self._fill()
            window = Window([sample.cost for sample in self.held], self.ages, dry=self.next_sample is None)
            reports = self.exchange(Report(window, self.rejected.total()))
            plan = plan_round(
                [report.window for report in reports],
                self.budget,
                seed=self.seed,
                epoch=self.epoch,
                round_index=round_index,
                steps_before=self.steps,
                accumulation=self.accumulation,
            )
            final = plan.final
            yield self._tasks(plan, rejected=sum(report.rejected for report in reports))
            round_index += 1
        if self.emitted == 0:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.rejected.items())
            raise DataError(f"no row of the training dataset can be trained on: {reasons or 'it is empty'}.")

    def _draw(self) -> Sample | None:
        """The next usable sample of the sampler, None when it is dry."""
        for item in self.observed:
            if isinstance(item, Sample):
                return item
            if item.fatal:
                raise DataError(item.message)
            self.rejected[item.reason] += 1
            self.on_reject(item)
        return None

    def _fill(self) -> None:
        """Fill the window; one sample ahead is drawn, so that a dry sampler is known before the plan."""
        while self.next_sample is not None and len(self.held) < self.buffer_size:
            sample = self.next_sample
            if self.spare is None or sample.cost.tokens < self.spare.cost.tokens:
                self.spare = sample
            self.held.append(sample)
            self.ages.append(0)
            self.next_sample = self._draw()

    def _tasks(self, plan: Plan, rejected: int) -> list[Task]:
        """This rank's tasks of a planned round; what was not planned stays in the window, one round older."""
        first, total = self.steps, len(plan.totals)
        self.steps += total
        planned = self.emitted + sum(totals.samples for totals in plan.totals)
        epoch_steps = self._epoch_steps(plan.final, planned, rejected)
        tasks: list[Task] = []
        for offset, (group, totals) in enumerate(zip(plan.groups[self.rank], plan.totals)):
            samples = [self.held[i] for i in group]
            self.emitted += totals.samples
            last = plan.final and offset == total - 1
            step = Step(
                epoch=self.epoch,
                index=first + offset,
                ids=tuple(sample.id for sample in samples),
                tokens=sum(sample.cost.tokens for sample in samples),
                supervised_tokens=sum(sample.cost.supervised_tokens for sample in samples),
                totals=totals,
                done=self.num_samples if last else self.emitted + rejected,
                epoch_steps=epoch_steps,
                last=last,
            )
            tasks.append((step, samples or [self.spare]))
        gone = {i for group in plan.groups[self.rank] for i in group}
        kept = [i for i in range(len(self.held)) if i not in gone]
        self.held = [self.held[i] for i in kept]
        self.ages = [self.ages[i] + 1 for i in kept]
        return tasks

    def _epoch_steps(self, final: bool, planned: int, rejected: int) -> int:
        """Steps of the whole epoch if the samples to come fill steps as those planned so far did."""
        if final:
            return self.steps
        left = max(self.num_samples - planned - rejected, 0)
        steps = self.steps + round(left * self.steps / max(planned, 1))
        return -(-steps // self.accumulation) * self.accumulation
