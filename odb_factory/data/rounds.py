"""The rounds of one epoch on one rank: fill the window, exchange, plan, emit, carry the rest over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace

from odb_factory.batching import Budget, Offer, Plan, align, make_offer
from odb_factory.data.agreement import AgreedError, Exchange, Report
from odb_factory.data.samples import Rejection, Sample, Step
from odb_factory.errors import DataError, one_line
from odb_factory.log import get_logger

logger = get_logger(__name__)

Task = tuple[Step, list[Sample]]
"""A step and the samples to collate for it; on an idle step the sample that is run with weight 0."""
DIFFERENT_ORDERS = (
    "the ranks draw their samples in different orders, so some would be lost and others trained on twice; give every "
    "rank the same whole sampler, seeded alike (each takes its own share of it), not a share or an order of its own."
)


class EpochRounds:
    """Iterate over the rounds of one epoch, each a list of tasks; deterministic for its arguments (I6).

    num_samples: of the epoch on all ranks; None if nobody knows (a stream).
    order: gives the checksum of the order of draws, once the first sample is drawn.
    find_spare: a usable sample of the dataset, for the idle steps of a rank that never held one.
    """

    def __init__(
        self,
        observed: Iterator[Sample | Rejection],
        *,
        budget: Budget,
        buffer_size: int,
        num_samples: int | None,
        accumulation: int,
        join: bool,
        seed: int,
        epoch: int,
        rank: int,
        exchange: Exchange,
        find_spare: Callable[[], Sample],
        on_reject: Callable[[Rejection], None],
        order: Callable[[], int] = int,
    ):
        self.observed = observed
        self.budget = budget
        # Without join a window must be able to fill a whole optimizer step.
        self.buffer_size = buffer_size if join else max(buffer_size, accumulation)
        self.num_samples, self.accumulation, self.join = num_samples, accumulation, join
        self.seed, self.epoch, self.rank = seed, epoch, rank
        self.exchange, self.order, self.find_spare, self.on_reject = exchange, order, find_spare, on_reject

        self.rejected: Counter[str] = Counter()
        self.held: list[Sample] = []
        self.ages: list[int] = []
        self.spare: Sample | None = None
        self.next_sample: Sample | None = None
        self.steps = self.emitted = self.groups_emitted = self.overlong = 0
        self.final = False

    def __iter__(self) -> Generator[list[Task], None, None]:
        """Raises `AgreedError` on all ranks where one cannot go on; `DataError` if the others cannot be told."""
        try:
            yield from self._rounds()
            return
        except GeneratorExit:
            if not self.final:
                self.exchange.leave()
            raise
        except AgreedError:
            raise
        except DataError as error:
            message = str(error)
        except Exception as error:
            # Logged here and not chained: its traceback would keep the worker processes alive.
            logger.error("planning failed", exc_info=error)
            message = one_line(error)
        finally:
            self.observed = iter(())  # lets its worker processes go, whoever still holds this object
        if self.final:
            raise DataError(message)
        self.exchange.fail(message)
        raise AgreedError(message)

    def _rounds(self) -> Iterator[list[Task]]:
        round_index = 0
        tasks: list[Task] = []
        self.next_sample = self._draw()
        while not self.final:
            self._fill()
            groups, offer = make_offer(
                [sample.cost for sample in self.held],
                self.ages,
                dry=self.next_sample is None,
                budget=self.budget,
                num_groups=1 if self.join else self.accumulation,
            )
            reports = self.exchange(Report(offer, self.rejected, self.overlong, self.order()), round_index)
            if len({report.order for report in reports}) > 1:
                raise AgreedError(DIFFERENT_ORDERS)
            rejected = sum((report.rejected for report in reports), Counter())
            overlong = sum(report.overlong for report in reports)
            offers = [report.offer for report in reports]
            plan = align(
                offers,
                seed=self.seed,
                epoch=self.epoch,
                round_index=round_index,
                steps_before=self.steps,
                accumulation=self.accumulation,
                join=self.join,
            )
            round_index, self.final = round_index + 1, plan.final
            known = self.steps + len(plan.totals)
            epoch_steps = known if plan.final else max(known, self._epoch_steps(offers, rejected.total()))
            tasks += self._tasks(groups, plan, rejected=rejected, overlong=overlong, epoch_steps=epoch_steps)
            if self.final and self.emitted == 0:
                raise AgreedError(_nothing_left(rejected, self.num_samples))
            # Without join, the end may turn out to have been the step before: one is kept until the next plan.
            kept = 1 if not (self.final or self.join) else 0
            if self.final:
                step, samples = tasks[-1]
                done = self.emitted + rejected.total()
                if self.num_samples is not None:
                    done = self.num_samples
                left_out = done - self.emitted - rejected.total()
                end = {"rejected": rejected, "overlong": overlong, "left_out": left_out, "epoch_steps": epoch_steps}
                tasks[-1] = replace(step, last=True, done=done, **end), samples
            yield tasks[: len(tasks) - kept]
            tasks = tasks[len(tasks) - kept :]

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
            self.overlong += self.budget.overlong(sample.cost)
            self.held.append(sample)
            self.ages.append(0)
            self.next_sample = self._draw()

    def _tasks(
        self,
        groups: Sequence[Sequence[int]],
        plan: Plan,
        *,
        rejected: Counter[str],
        overlong: int,
        epoch_steps: int,
    ) -> list[Task]:
        """This rank's tasks of a planned round; what was not planned stays in the window, one round older."""
        tasks: list[Task] = []
        gone: set[int] = set()
        for index, (chosen, totals) in enumerate(zip(plan.groups[self.rank], plan.totals), start=self.steps):
            positions = groups[chosen] if chosen is not None else []
            samples = [self.held[i] for i in positions]
            gone.update(positions)
            self.emitted += totals.samples
            self.groups_emitted += totals.busy_ranks
            step = Step(
                epoch=self.epoch,
                index=index,
                ids=tuple(sample.id for sample in samples),
                tokens=sum(sample.cost.tokens for sample in samples),
                supervised_tokens=sum(sample.cost.supervised_tokens for sample in samples),
                totals=totals,
                done=self.emitted + rejected.total(),
                rejected=rejected,
                overlong=overlong,
                left_out=0,
                epoch_steps=epoch_steps,
                last=False,
            )
            tasks.append((step, samples or [self._idle_sample()]))
        self.steps += len(plan.totals)
        kept = [i for i in range(len(self.held)) if i not in gone]
        self.held = [self.held[i] for i in kept]
        self.ages = [self.ages[i] + 1 for i in kept]
        return tasks

    def _idle_sample(self) -> Sample:
        if self.spare is None:
            self.spare = self.find_spare()
        return self.spare

    def _epoch_steps(self, offers: Sequence[Offer], rejected: int) -> int:
        """Steps of the whole epoch if the samples to come form groups as those seen so far did, on all ranks."""
        if self.num_samples is None:
            return 0
        groups = self.groups_emitted + sum(len(offer.groups) + bool(offer.kept_back) for offer in offers)
        held = sum(offer.kept_back + sum(group.rows for group in offer.groups) for offer in offers)
        samples = max(self.emitted + held, 1)
        steps = round((self.num_samples - rejected) * groups / samples / len(offers))
        return -(-max(steps, 1) // self.accumulation) * self.accumulation


def _nothing_left(rejected: Counter[str], num_samples: int | None) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in rejected.items())
    if num_samples is not None and rejected.total() < num_samples:
        reasons += f"{', ' if reasons else ''}{num_samples - rejected.total()} left out because a rank ran short"
    return f"no row of the training dataset can be trained on: {reasons or 'it is empty'}."
