"""The rounds of one epoch on one rank: fill the window, exchange, plan, emit, carry the rest over."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from odb_factory.comm.coordinator import CollectiveError, Coordinator, RankMetadata
from odb_factory.comm.redistribute import redistribute
from odb_factory.data.samples import MicroBatch, Rejection, Sample
from odb_factory.data.serialize import sample_from_bytes, sample_to_bytes
from odb_factory.data.snapshot import BufferedSample, Snapshot
from odb_factory.errors import DataError, one_line
from odb_factory.log import get_logger
from odb_factory.planning import (
    MAX_REDISTRIBUTED_BYTES,
    Budget,
    BufferMetadata,
    CostModel,
    MicroStepTotals,
    Plan,
    make_metadata,
    plan_buffers,
)

logger = get_logger(__name__)

Task = tuple[MicroBatch, list[Sample]]
"""A step and the samples to collate for it; on an idle step the sample that is run with weight 0."""
PLANNED_OTHERWISE = (
    "the round that was under way at the checkpoint is planned otherwise now although its rows are the same (by "
    "another version of odb_factory or numpy?), so what is left of it cannot be told; go on with the one that wrote "
    "it, or set `resume: ignore_data`."
)
ROW_CHANGED = (
    "the training data have changed since the checkpoint: a row{before} that waited or had just been trained on is "
    "now: {now}; bring it back, or set `resume: ignore_data` to begin the epoch anew."
)
TOO_HEAVY = (
    f"balance: the samples of a buffer weigh more than {MAX_REDISTRIBUTED_BYTES >> 20} MiB, so they stay on the rank "
    "that drew them; let items hold paths instead of pixels, or lower buffer_size."
)


@dataclass(slots=True)
class Drawn:
    """A sample in the window. draw: its number in this rank's draws; age: rounds it was kept back."""

    sample: Sample
    draw: int
    age: int = 0

    def as_saved(self) -> BufferedSample:
        return BufferedSample(self.draw, self.age, self.sample.cost.tokens, self.sample.content)


class FillEpoch:
    """Iterate over the rounds of one epoch, each a list of tasks; deterministic for its arguments (I6).

    snapshots: one for each round begun, for whoever consumes the tasks to take a state from.

    num_samples: of the epoch on all ranks; None if nobody knows (a stream).
    order: gives a number made of the order of draws, once the first sample is drawn.
    compare_orders: with these numbers of all ranks, why they cannot go on (None: they can).
    done_before: samples of the epoch that were done before its order began (dealt out anew after a stop).
    resume: a snapshot to go on from, and the steps of its round that are consumed; `observed` then begins with
    what was waiting in it.
    propose: the cost model as it is known when a round begins.
    emitted_before: the draws of those steps, to be sure that the round is planned as it was.
    find_dummy_sample: a usable sample of the dataset, for the idle steps of a rank that never held one.
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
        balance: bool = False,
        seed: int,
        epoch: int,
        rank: int,
        coordinator: Coordinator,
        find_dummy_sample: Callable[[], Sample],
        on_reject: Callable[[Rejection], None],
        order: Callable[[], int] = int,
        compare_orders: Callable[[Sequence[int]], str | None] = lambda orders: None,
        propose: Callable[[], CostModel] = CostModel,
        emitted_before: Sequence[int] = (),
        done_before: int = 0,
        resume: tuple[Snapshot, int] | None = None,
    ):
        self.observed = observed
        self.budget = budget
        # Without join a window must be able to fill a whole optimizer step.
        self.buffer_size = buffer_size if join else max(buffer_size, accumulation)
        self.num_samples, self.accumulation, self.join, self.balance = num_samples, accumulation, join, balance
        self.seed, self.epoch, self.rank = seed, epoch, rank
        self.coordinator, self.order, self.find_dummy_sample, self.on_reject = (
            coordinator,
            order,
            find_dummy_sample,
            on_reject,
        )

        self.resume, self.done_before, self.propose = resume, done_before, propose
        self.compare_orders, self.emitted_before = compare_orders, list(emitted_before)
        self.snapshots: deque[Snapshot] = deque()
        self.rejected: Counter[str] = Counter()
        self.held: list[Drawn] = []
        self.spare: Drawn | None = None
        self.found: Sample | None = None
        self.next: Drawn | None = None
        self.model: CostModel | None = None
        self.drawn = self.round_index = 0
        self.steps = self.emitted = self.tokens_emitted = self.overlong = 0
        self.final = self.exceeds_transfer_limit = False

    def __iter__(self) -> Generator[list[Task], None, None]:
        """Raises `CollectiveError` on all ranks where one cannot go on; `DataError` if the others cannot be told."""
        try:
            yield from self._rounds()
            return
        except GeneratorExit:
            if not self.final:
                self.coordinator.leave_epoch()
            raise
        except CollectiveError:
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
        self.coordinator.fail(message)
        raise CollectiveError(message)

    def _rounds(self) -> Iterator[list[Task]]:
        tasks: list[Task] = []
        num_consumed, emitted_before = 0, self.emitted_before
        if self.resume is None:
            self.next = self._draw()
        else:
            snapshot, num_consumed = self.resume
            self._restore(snapshot)
        while not self.final:
            model = self.propose() if self.model is None else self.model
            snapshot = self._snapshot(model)
            filled = self._fill()
            self._check_filled(filled)
            self.snapshots.append(replace(snapshot, filled=tuple(one.sample.content for one in filled)))
            samples = [one.sample for one in self.held]
            window = make_metadata(
                [sample.cost for sample in samples],
                [one.age for one in self.held],
                exhausted=self.next is None,
                sizes=[len(sample.features) for sample in samples],
            )
            metadata = RankMetadata(window, self.rejected, self.overlong, self.order(), model)
            ranks = self.coordinator.all_gather(metadata, self.round_index)
            problem = self.compare_orders([rank.order for rank in ranks])
            if problem is not None:
                raise CollectiveError(problem)
            rejected = sum((rank.rejected for rank in ranks), Counter())
            overlong = sum(rank.overlong for rank in ranks)
            windows = [rank.window for rank in ranks]
            plan = plan_buffers(
                windows,
                self.budget,
                seed=self.seed,
                epoch=self.epoch,
                round_index=self.round_index,
                steps_before=self.steps,
                accumulation=self.accumulation,
                join=self.join,
                balance=self.balance,
                model=ranks[0].model,
            )
            # Before anything is sent, trained on or left out by a plan that only some ranks have.
            self.coordinator.confirm(plan.checksum(), self.round_index)
            self.model = None
            if plan.exceeds_transfer_limit and not self.exceeds_transfer_limit:
                self.exceeds_transfer_limit = True
                logger.warning(TOO_HEAVY)
            self.final = plan.final
            known = self.steps + len(plan.totals)
            epoch_steps = known if plan.final else max(known, self._epoch_steps(windows, plan.totals, rejected.total()))
            tasks += self._tasks(plan, rejected=rejected, overlong=overlong, epoch_steps=epoch_steps)
            if num_consumed > len(tasks) or emitted_before != [
                draw for step, _ in tasks[:num_consumed] for draw in step.draws
            ]:
                raise DataError(PLANNED_OTHERWISE)
            self.round_index += 1
            if self.final and self.emitted + self.done_before == 0:
                raise CollectiveError(_nothing_left(rejected, self.num_samples))
            # Without join, the end may turn out to have been the step before: one is kept until the next plan.
            kept = 1 if not (self.final or self.join) else 0
            if self.final and tasks:
                step, samples = tasks[-1]
                settled = self._settled(rejected)
                done = settled if self.num_samples is None else self.num_samples
                step = replace(step, last=True, done=done, left_out=done - settled)
                tasks[-1] = replace(step, rejected=rejected, overlong=overlong, epoch_steps=epoch_steps), samples
            tasks, num_consumed, emitted_before = tasks[num_consumed:], 0, []
            yield tasks[: len(tasks) - kept]
            tasks = tasks[len(tasks) - kept :]

    def _draw(self) -> Drawn | None:
        """The next usable sample of the sampler, None when it is exhausted."""
        for item in self.observed:
            self.drawn += 1
            if isinstance(item, Sample):
                return Drawn(item, self.drawn - 1)
            if item.fatal:
                raise DataError(item.message)
            self.rejected[item.reason] += 1
            self.on_reject(item)
        return None

    def _fill(self) -> list[Drawn]:
        """Fill the window; one sample ahead is drawn, so that a exhausted sampler is known before the plan.

        Returns the samples that were drawn for it.
        """
        filled: list[Drawn] = []
        while self.next is not None and len(self.held) < self.buffer_size:
            self.overlong += self.budget.overlong(self.next.sample.cost)
            self.held.append(self.next)
            self.next = self._draw()
            if self.next is not None:
                filled.append(self.next)
        if self.held:
            # Of this window, not of the epoch: what a resumed run has to find again shall not be far back.
            self.spare = min(self.held, key=lambda one: one.sample.cost.tokens)
        return filled

    def _check_filled(self, filled: list[Drawn]) -> None:
        """Raise `DataError` if the rows drawn for a round that was under way are others than before the stop."""
        if self.resume is None or self.round_index != self.resume[0].round_index:
            return
        before = self.resume[0].filled
        for one, content in zip(filled, before):
            if content and one.sample.content != content:
                now = f"row {one.sample.id}, which says something else"
                raise DataError(ROW_CHANGED.format(before="", now=now))
        if len(filled) != len(before):
            now = f"one of {len(filled)} usable rows drawn for the round under way, which had {len(before)}"
            raise DataError(ROW_CHANGED.format(before="", now=now))

    def _snapshot(self, model: CostModel) -> Snapshot:
        return Snapshot(
            round_index=self.round_index,
            steps=self.steps,
            emitted=self.emitted,
            tokens_emitted=self.tokens_emitted,
            drawn=self.drawn,
            rejected=dict(self.rejected),
            overlong=self.overlong,
            held=tuple(one.as_saved() for one in self.held),
            next=None if self.next is None else self.next.as_saved(),
            spare=None if self.spare is None else self.spare.as_saved(),
            model=model,
        )

    def _restore(self, snapshot: Snapshot) -> None:
        """Go back to `snapshot`."""
        drawn: dict[int, Drawn] = {}
        for held in snapshot.waiting:
            item = next(self.observed, None)
            before = f" ({held.tokens} tokens)"
            if not isinstance(item, Sample):
                raise DataError(ROW_CHANGED.format(before=before, now=getattr(item, "message", "no row")))
            if item.cost.tokens != held.tokens or (held.content and item.content != held.content):
                now = f"row {item.id}, of {item.cost.tokens} tokens and with other content"
                raise DataError(ROW_CHANGED.format(before=before, now=now))
            drawn[held.draw] = Drawn(item, held.draw, held.age)
        self.held = [drawn[held.draw] for held in snapshot.held]
        self.next = None if snapshot.next is None else drawn[snapshot.next.draw]
        self.spare = None if snapshot.spare is None else drawn[snapshot.spare.draw]
        self.drawn, self.round_index, self.steps = snapshot.drawn, snapshot.round_index, snapshot.steps
        self.emitted, self.tokens_emitted = snapshot.emitted, snapshot.tokens_emitted
        self.rejected, self.overlong, self.model = Counter(snapshot.rejected), snapshot.overlong, snapshot.model

    def _tasks(self, plan: Plan, *, rejected: Counter[str], overlong: int, epoch_steps: int) -> list[Task]:
        """This rank's tasks of a planned round; what was not planned stays in the window, one round older."""
        samples = self._redistribute(plan)
        gone = self._gone(plan)
        tasks: list[Task] = []
        for k, (group, totals) in enumerate(zip(plan.groups[self.rank], plan.totals)):
            chosen = [samples[row] for row in group]
            self.emitted += totals.samples
            self.tokens_emitted += totals.tokens
            step = MicroBatch(
                epoch=self.epoch,
                index=self.steps + k,
                ids=tuple(sample.id for sample in chosen),
                tokens=sum(sample.cost.tokens for sample in chosen),
                supervised_tokens=sum(sample.cost.supervised_tokens for sample in chosen),
                totals=totals,
                done=self._settled(rejected),
                rejected=rejected,
                overlong=overlong,
                left_out=0,
                epoch_steps=epoch_steps,
                last=False,
                round_index=self.round_index,
                draws=tuple(self.held[i].draw for i in gone[k]),
                contents=tuple(sample.content for sample in chosen),
            )
            tasks.append((step, chosen or [self._idle_sample()]))
        self.steps += len(plan.totals)
        all_gone = {i for positions in gone for i in positions}
        # New objects: a snapshot's counterpart must not grow older with them.
        self.held = [Drawn(one.sample, one.draw, one.age + 1) for i, one in enumerate(self.held) if i not in all_gone]
        return tasks

    def _redistribute(self, plan: Plan) -> dict[int, Sample]:
        held = [one.sample for one in self.held]
        send = self.coordinator.all_to_all
        try:
            return redistribute(plan, self.rank, held, send, encode=sample_to_bytes, decode=sample_from_bytes)
        except CollectiveError:
            raise
        except Exception as error:
            # The others may be in the collective already, where no metadata reach them.
            message = str(error) if isinstance(error, DataError) else one_line(error)
            self.coordinator.abort(f"redistributing samples: {message}")
            raise CollectiveError(message) from None

    def _gone(self, plan: Plan) -> list[list[int]]:
        """Of each step the positions in this rank's window of what goes out in it, here or on another rank."""
        start, end = plan.starts[self.rank : self.rank + 2]
        takers = plan.groups if plan.moves else [plan.groups[self.rank]]
        return [[row - start for group in groups for row in group if start <= row < end] for groups in zip(*takers)]

    def _settled(self, rejected: Counter[str]) -> int:
        """Samples of the epoch emitted or rejected by now, on all ranks."""
        return self.done_before + self.emitted + rejected.total()

    def _idle_sample(self) -> Sample:
        if self.spare is not None:
            return self.spare.sample
        if self.found is None:
            self.found = self.find_dummy_sample()
        return self.found

    def _epoch_steps(self, windows: Sequence[BufferMetadata], planned: Sequence[MicroStepTotals], rejected: int) -> int:
        """Steps of the whole epoch if the samples to come are as long, and the steps to come as full, as until now."""
        if self.num_samples is None:
            return 0
        seen = self.emitted + sum(len(window.rows) for window in windows)
        tokens_seen = self.tokens_emitted + sum(int(window.rows["tokens"].sum(dtype=np.int64)) for window in windows)
        emitted = self.tokens_emitted + sum(totals.tokens for totals in planned)
        tokens = (self.num_samples - self.done_before - rejected) * tokens_seen / max(seen, 1)
        steps = round((self.steps + len(planned)) * tokens / max(emitted, 1))
        return -(-max(steps, 1) // self.accumulation) * self.accumulation


def _nothing_left(rejected: Counter[str], num_samples: int | None) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in rejected.items())
    if num_samples is not None and rejected.total() < num_samples:
        reasons += f"{', ' if reasons else ''}{num_samples - rejected.total()} left out because a rank ran short"
    reasons = f"{reasons}; the warnings above name the first of them" if reasons else "it is empty"
    return f"no row of the training dataset can be trained on: {reasons}."
