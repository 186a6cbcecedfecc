"""Whole epochs of many ranks, one of which runs at a time: the production planner of each, what stands between them.

A rank that asks the others waits, and another one runs, until it waits too or has made a plan. So nothing depends on
time, a rank that would wait for ever is seen at once (`Hang`), and any order of the ranks can be played.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plan_checks import check_groups
from thread_ranks import Seat

from odb_factory.data.cursor import Place
from odb_factory.data.order import MEAN_OF_STEP, ShardSampler, Start, StockMean, StockSteps, shard
from odb_factory.data.ranks import RankMetadata
from odb_factory.data.samples import MicroBatch, OptimizerStep, Rejection, Sample
from odb_factory.data.serialize import pack
from odb_factory.data.steps import EpochContext, EpochPlanner, FillEpoch, Held, KeepEpoch
from odb_factory.errors import CollectiveError
from odb_factory.planner import Budget, Cost

Row = Sample | Rejection | Exception
"""What a sampler hands out; an exception is raised when it is its turn."""
Task = tuple[MicroBatch, list[Sample]]
"""A micro-batch, and what is collated for it."""


NO_FEATURES = pack({})


class Hang(BaseException):
    """A rank waits for another one that will never answer. Nothing in the package may catch it."""


@dataclass
class Epoch:
    """What one rank saw: its plans, the ids in its buffer and its metadata in each, why it rejected rows, its error."""

    plans: list[list[Task]] = field(default_factory=list)
    buffers: list[list[int]] = field(default_factory=list)
    metadata: list[RankMetadata] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    undrawn: int = 0
    error: BaseException | None = None

    @property
    def tasks(self) -> list[Task]:
        return [task for tasks in self.plans for task in tasks]

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [micro_batch for micro_batch, _ in self.tasks]

    @property
    def optimizer_steps(self) -> list[list[MicroBatch]]:
        """The micro-batches of each optimizer step."""
        return [list(group) for _, group in itertools.groupby(self.micro_batches, lambda one: one.step.index)]

    @property
    def steps(self) -> list[OptimizerStep]:
        return [micro_batches[0].step for micro_batches in self.optimizer_steps]

    @property
    def ids(self) -> list[int]:
        return [id for one in self.micro_batches for id in one.ids]


def of_all_ranks(step: OptimizerStep) -> OptimizerStep:
    """What is the same on all ranks."""
    return replace(step, stock_input_tokens=None)


class Lockstep:
    """What all ranks share. `order`: who is run first, as threads would race.

    Each rank has a thread, and one of all threads runs: the others wait for others, or for the next round.
    """

    timeout_s = 0.0

    def __init__(self, world_size: int, order: Sequence[int] | None = None):
        self.world_size = world_size
        self.order = list(order or range(world_size))
        self.sources: dict[int, Generator[list[MicroBatch], None, None]] = {}
        self.told: defaultdict[Any, dict[int, Any]] = defaultdict(dict)
        self.waits: dict[int, tuple[Any, range]] = {}
        self.planned: set[int] = set()
        self.leaving: set[int] = set()
        self.on_plan: Callable[[int, list[MicroBatch]], None] = lambda rank, plan: None
        self.errors: dict[int, BaseException] = {}
        self.hangs = False
        self.turns = [threading.Semaphore(0) for _ in range(world_size)]
        self.control = threading.Semaphore(0)

    def start(self) -> None:
        for rank in self.order:
            threading.Thread(target=self._live, args=(rank,), daemon=True).start()

    def round(self) -> bool:
        """Run every rank that has not ended for one plan; whether one is left."""
        self.planned.clear()
        has_run = False
        while rank := next((str(one) for one in self.order if self._can_run(one)), ""):
            self._run(int(rank))
            has_run = True
        if self.sources and not has_run:
            waits = dict(self.waits)
            self.end()
            raise Hang(f"ranks wait for others, which have ended or wait elsewhere: {waits}")
        return bool(self.sources)

    def end(self) -> None:
        """Let the threads end."""
        self.hangs = True
        while self.sources:
            self._run(next(iter(self.sources)))

    def tell(self, place: Any, rank: int, message: Any) -> None:
        assert rank not in self.told[place], f"rank {rank} comes twice to {place}"
        self.told[place][rank] = message

    def meet(self, place: Any, ranks: range, rank: int, message: Any) -> list[Any]:
        """What these ranks tell at this place, in rank order. A rank that is none of them only listens."""
        if rank in ranks:
            self.tell(place, rank, message)
        if len(self.told[place]) < len(ranks):
            self.waits[rank] = place, ranks
            self._pause(rank)
            del self.waits[rank]
        return [self.told[place][one] for one in ranks]

    def _can_run(self, rank: int) -> bool:
        if rank not in self.sources or rank in self.planned:
            return False
        place, ranks = self.waits.get(rank, (None, range(0)))
        return len(self.told[place]) >= len(ranks)

    def _run(self, rank: int) -> None:
        self.turns[rank].release()
        self.control.acquire()

    def _pause(self, rank: int) -> None:
        """Another rank runs."""
        self.control.release()
        self.turns[rank].acquire()
        if self.hangs:
            raise Hang

    def _live(self, rank: int) -> None:
        self.turns[rank].acquire()
        source = self.sources[rank]
        try:
            while not self.hangs:
                if rank in self.leaving:
                    source.close()
                    break
                self.on_plan(rank, next(source))
                self.planned.add(rank)
                self._pause(rank)
        except StopIteration:
            pass
        except BaseException as error:
            if not self.hangs:
                self.errors[rank] = error
        finally:
            del self.sources[rank]
            self.control.release()


class RecordedFill(FillEpoch):
    """What it holds when it tells the others."""

    @property
    def buffered(self) -> list[Sample]:
        return [one.sample for one in self.held]


class RecordedKeep(KeepEpoch):
    buffered: Sequence[Sample] = ()

    def collect(self, index: int) -> list[Held]:
        held = super().collect(index)
        self.buffered = [one.sample for one in held]
        return held


FILL_OPTIONS: dict[str, Any] = {"buffer_size": 8, "accumulation": 1, "join": True}
CONTEXT_OPTIONS = {"budget": Budget(32), "balance": False, "seed": 0}


def run_shards(
    shards: Sequence[Sequence[Row]],
    *,
    order: Sequence[int] | None = None,
    leave_after: dict[int, int] | None = None,
    stock: StockSteps | None = None,
    epoch: int = 0,
    **options: Any,
) -> list[Epoch]:
    """One epoch of one rank a shard; the `Epoch` of each.

    leave_after: {rank: plans after which it is closed}. stock: of `KeepEpoch`, and `FillEpoch` is run without it.
    options: of `EpochContext` and of the planner.
    """
    epochs = [Epoch(undrawn=len(shard)) for shard in shards]
    lockstep = Lockstep(len(shards), order)
    lockstep.on_plan = lambda rank, plan: epochs[rank].plans.append([(one, list(one.light)) for one in plan])
    everything = [row for shard in shards for row in shard]

    class Recorded(Seat):
        def gather(self, metadata: RankMetadata) -> list[RankMetadata]:
            epoch = epochs[self.rank]
            if metadata.failure is None and not ranks[self.rank].final:
                epoch.buffers.append([sample.id for sample in ranks[self.rank].buffered])
                epoch.metadata.append(replace(metadata, rejected=metadata.rejected.copy()))
            return super().gather(metadata)

    def draw(rank: int) -> Iterator[Row]:
        for row in shards[rank]:
            epochs[rank].undrawn -= 1
            if isinstance(row, Exception):
                raise row
            yield row

    context = {
        "num_samples": len(everything),
        "stand_in": lambda: next(row for row in everything if isinstance(row, Sample)),
        **CONTEXT_OPTIONS,
    } | {key: value for key, value in options.items() if key in EpochContext.__dataclass_fields__}
    settings = {key: value for key, value in options.items() if key not in EpochContext.__dataclass_fields__}
    place = {key: settings.pop(key) for key in Place.__dataclass_fields__ if key in settings}
    planner: Callable[..., EpochPlanner] = RecordedKeep
    if stock is None:
        planner, settings = RecordedFill, FILL_OPTIONS | settings
    else:
        settings["stock"] = stock
    ranks: list[Any] = [
        planner(
            draw(rank),
            EpochContext(
                ranks=Recorded(lockstep, rank),
                leave_out=lambda reason, message, rank=rank: epochs[rank].rejected.append(reason),
                **context,
            ),
            Place(epoch=epoch, **place),
            **settings,
        )
        for rank in range(len(shards))
    ]
    lockstep.sources = {rank: iter(plans) for rank, plans in enumerate(ranks)}
    lockstep.start()
    num_plans = 0
    while lockstep.round():
        num_plans += 1
        lockstep.leaving = {rank for rank, after in (leave_after or {}).items() if after <= num_plans}
        if num_plans > 2 * len(everything) + 10:
            lockstep.end()
            raise Hang("plans without end")
    for rank, error in lockstep.errors.items():
        epochs[rank].error = error
    return epochs


def run_epoch(rows: Sequence[Row], *, world_size: int = 1, **options: Any) -> list[Epoch]:
    """One filled epoch over `rows`, sharded over `world_size` ranks as the loader does it."""
    shards = [[rows[i] for i in ShardSampler(range(len(rows)), rank, world_size)] for rank in range(world_size)]
    return run_shards(shards, **options)


def stock_steps(
    num_rows: int | None,
    *,
    size: int,
    batch_size: int = 1,
    world_size: int = 1,
    drop_last: bool = False,
    mean: StockMean = MEAN_OF_STEP,
    is_split: bool = False,
) -> StockSteps:
    """size: N. num_rows: of the epoch, None where nobody knows."""
    remainder = num_rows % (batch_size * world_size) if drop_last and num_rows else 0
    return StockSteps(
        global_batch_size=size,
        batch_size=batch_size,
        world_size=world_size,
        num_samples=None if num_rows is None else num_rows - remainder,
        remainder=remainder,
        mean=mean,
        is_split=is_split,
    )


def kept_shards(rows: Sequence[Row], stock: StockSteps, first_step: int = 0) -> list[list[Row]]:
    """What each rank draws of `rows` from an optimizer step on."""
    stop = stock.num_samples if stock.remainder else None
    starts = [
        Start(first=stock.first_number(rank, first_step) * stock.world_size + rank, stop=stop)
        for rank in range(stock.world_size)
    ]
    return [[row for _, row in shard(rows, rank, stock.world_size, start)] for rank, start in enumerate(starts)]


def run_kept(rows: Sequence[Row], stock: StockSteps, *, first_step: int = 0, **options: Any) -> list[Epoch]:
    """One epoch of kept optimizer steps over `rows` (those that `drop_last` leaves out among them)."""
    context = {
        "balance": True,
        "num_samples": None if stock.num_samples is None else len(rows),
        "stand_in": lambda: usable(rows)[0],
    }
    shards = kept_shards(rows, stock, first_step)
    return run_shards(shards, stock=stock, optimizer_steps=first_step, **context | options)


def sample(id: int, tokens: int, patches: int = 0) -> Sample:
    return Sample(id, Cost(tokens, patches, max(tokens - 1, 1), patches > 0), NO_FEATURES)


def rejection(id: int, *, fatal: bool = False) -> Rejection:
    return Rejection(id, "unreadable", f"row {id}: cannot be read", fatal)


def usable(rows: Iterable[Row]) -> list[Sample]:
    return [row for row in rows if isinstance(row, Sample)]


def check_optimizer_steps(epochs: Sequence[Epoch], costs: Mapping[int, Cost], budget: Budget) -> None:
    """I1, I4, I6, I8: the same optimizer steps on all ranks, each of as many micro-batches as it says, in one piece,
    with the totals of all ranks, by which losses are weighed. A task has the samples of its micro-batch, in order; an
    idle one a real sample."""
    steps = [of_all_ranks(step) for step in epochs[0].steps]
    for epoch in epochs:
        assert [of_all_ranks(step) for step in epoch.steps] == steps
        assert all(tasks[-1][0].ends_optimizer_step for tasks in epoch.plans if tasks), (
            "a plan is whole optimizer steps"
        )
        for step, micro_batches in zip(epoch.steps, epoch.optimizer_steps):
            assert [one.index for one in micro_batches] == list(range(step.num_micro_batches))
            assert [one.ends_optimizer_step for one in micro_batches] == [False] * (len(micro_batches) - 1) + [True]
            assert all(one.step is step for one in micro_batches)
        for one, samples in epoch.tasks:
            if one.idle:
                assert len(samples) == 1 and samples[0].cost == costs[samples[0].id]
                continue
            assert tuple(item.id for item in samples) == one.ids
            assert one.units == tuple(costs[id].units for id in one.ids)
            assert one.tokens == sum(costs[id].tokens for id in one.ids)
    assert [step.last for step in steps] == [False] * (len(steps) - 1) + [True]
    for tasks in zip(*(epoch.plans for epoch in epochs)):
        groups = [[[costs[id] for id in one.ids] for one, _ in of_rank] for of_rank in tasks]
        check_groups(groups, budget)
        for k, micro_step in enumerate(zip(*groups)):
            totals = [of_rank[k][0].totals for of_rank in tasks]
            assert totals == totals[:1] * len(epochs), "I6: all ranks plan the same"
            check_sums(totals[0], micro_step)
    for index, step in enumerate(steps):
        check_sums(step, [[costs[id] for id in one.ids] for epoch in epochs for one in epoch.optimizer_steps[index]])


def check_sums(totals: Any, groups: Sequence[Sequence[Cost]]) -> None:
    """Of an optimizer step or a micro-step: those of its micro-batches."""
    every = [cost for group in groups for cost in group]
    assert totals.samples == len(every) and totals.active_ranks == sum(map(bool, groups))
    assert totals.tokens == sum(cost.tokens for cost in every)
    assert totals.units == sum(cost.units for cost in every)


def check_promises(
    shards: Sequence[Sequence[Row]],
    epochs: Sequence[Epoch],
    *,
    budget: Budget = Budget(32),
    buffer_size: int = 8,
    accumulation: int = 1,
    join: bool = True,
    balance: bool = False,
    **_: Any,
) -> None:
    """I1 to I5 and I7 of a filled epoch without fatal rows, and of I6 that all ranks planned the same.

    With balance, I7 speaks of the samples of all ranks together, and so does the progress of I5.
    """
    num_rows = sum(map(len, shards))
    held = [{row.id: row.cost for row in usable(shard)} for shard in shards]
    costs = {id: cost for rank in held for id, cost in rank.items()}
    num_rejected = sum(len(epoch.rejected) for epoch in epochs)
    emitted = Counter(id for epoch in epochs for id in epoch.ids)
    if epochs[0].error is not None:
        assert all(isinstance(epoch.error, CollectiveError) for epoch in epochs), "all ranks end alike"
        assert not emitted
        assert not any(held) or (
            not join and any(_ran_short(*rank, emitted, accumulation) for rank in zip(held, epochs))
        )
        return
    assert [epoch.error for epoch in epochs] == [None] * len(epochs)

    check_optimizer_steps(epochs, costs, budget)
    steps = epochs[0].steps
    sizes = [step.num_micro_batches for step in steps]
    assert sizes[:-1] == [accumulation] * (len(steps) - 1), "I1"
    assert sizes[-1] == accumulation or (join and 0 < sizes[-1] < accumulation), "only the last may be smaller"
    assert all(count == 1 for count in emitted.values()) and costs.keys() >= set(emitted), "I2, I3: no id twice"
    for rank, epoch in zip(held, epochs):
        assert balance or rank.keys() >= set(epoch.ids), "only balanced samples leave their rank"
        idle = [one.idle for one in epoch.micro_batches]
        assert join or not any(idle), "I3"
        assert balance or idle == sorted(idle), "I7: a rank idles behind its last sample"
    assert steps[-1].remainder == num_rows - len(emitted) - num_rejected
    assert not any(step.remainder for step in steps[:-1]) and steps[-1].epoch_steps == len(steps)
    if join:
        assert [epoch.rejected for epoch in epochs] == [
            [row.reason for row in shard if isinstance(row, Rejection)] for shard in shards
        ]
        assert len(emitted) == len(costs) and steps[-1].remainder == 0, "I2"
    else:
        assert any(_ran_short(*rank, emitted, accumulation) for rank in zip(held, epochs)), "I3"
    totals = [one.totals for one in epochs[0].micro_batches]
    assert all(step.active_ranks for step in totals), "I7: never all at once"
    if balance:
        few = [step for step in totals if step.active_ranks < len(epochs)]
        assert all(step.samples == step.active_ranks for step in few), "I7: there are too few for all ranks"

    # A balanced round sends out a sample for each rank, or all there are.
    most_rounds = max(map(len, held)) + (len(costs) // len(held) if balance else 0)
    assert len(epochs[0].buffers) <= most_rounds, "I5"
    for epoch in epochs:
        num_rounds_held = Counter(id for buffer in epoch.buffers for id in buffer)
        # A sample is kept back only by older ones, and one of these goes out in every round.
        assert all(count <= 1 + buffer_size for count in num_rounds_held.values()), "I5: a bounded wait"
        for k, (buffer, after) in enumerate(zip(epoch.buffers, [*epoch.buffers[1:], []]), start=1):
            assert len(buffer) <= buffer_size
            gone = set(buffer) - set(after)
            closing = not join and k == len(epoch.buffers)
            assert gone or not buffer or closing or balance, "I5: progress on every rank that holds a sample"


def check_kept(
    rows: Sequence[Row],
    epochs: Sequence[Epoch],
    stock: StockSteps,
    *,
    budget: Budget = Budget(32),
    balance: bool = True,
    first_step: int = 0,
    **_: Any,
) -> None:
    """I1, I2, I4, I5, I7 and I9 of an epoch of kept optimizer steps without fatal rows; of I6 that all plan the same.

    rows: in the order of all ranks, those that `drop_last` leaves out among them.
    """
    size, world_size = stock.global_batch_size, stock.world_size
    end = len(rows) - stock.remainder
    expected = [rows[start : min(start + size, end)] for start in range(first_step * size, end, size)]
    costs = {row.id: row.cost for row in usable(rows)}
    if not any(map(usable, expected)):
        assert all(isinstance(epoch.error, CollectiveError) for epoch in epochs), "all ranks end alike"
        return
    assert [epoch.error for epoch in epochs] == [None] * len(epochs)
    check_optimizer_steps(epochs, costs, budget)
    assert [len(epoch.plans) for epoch in epochs] == [len(expected)] * world_size, "I5: a plan is an optimizer step"
    rejected: Counter[str] = Counter()
    for k, wanted in enumerate(expected):
        micro_steps = list(zip(*(epoch.optimizer_steps[k] for epoch in epochs)))
        step = micro_steps[0][0].step
        ids = [id for micro_step in micro_steps for one in micro_step for id in one.ids]
        assert sorted(ids) == sorted(row.id for row in usable(wanted)), "I2, I9"
        rejected += Counter(row.reason for row in wanted if isinstance(row, Rejection))
        assert step.index == first_step + k and step.rejected == rejected
        assert step.done == min((step.index + 1) * size, end)
        assert step.remainder == (stock.remainder if step.last else 0)
        if not ids:
            assert len(micro_steps) == 1 and step.active_ranks == 0
        for totals in [micro_step[0].totals for micro_step in micro_steps]:
            assert totals.active_ranks or not ids, "I7: never all at once"
            if balance and totals.active_ranks < world_size:
                assert totals.samples == totals.active_ranks, "I7: there are too few for all ranks"
        for rank, epoch in enumerate(epochs):
            idle = [one.idle for one in epoch.optimizer_steps[k]]
            assert idle == sorted(idle), "I7: a rank idles behind its last sample of the step"
            if not balance and not stock.is_split:
                own = {row.id for row in usable(wanted[(rank - step.index * size) % world_size :: world_size])}
                assert {id for one in epoch.optimizer_steps[k] for id in one.ids} == own, "none leaves its rank"


def _ran_short(costs: dict[int, Cost], epoch: Epoch, emitted: Counter[int], accumulation: int) -> bool:
    """Whether a rank has drawn all its samples, and those it has left are too few for an optimizer step."""
    return epoch.undrawn == 0 and len(costs.keys() - emitted.keys()) < accumulation
