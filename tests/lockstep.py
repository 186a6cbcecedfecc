"""Whole epochs of many ranks in one thread: the production `FillEpoch` of each, and a coordinator between them.

A rank that calls its coordinator waits for the others; here the call itself runs them, each to its own
call, one inside the other. Once the last has told its report, all are there, and the calls
return one by one, each rank going on to its round. So nothing depends on threads or on time, a
rank that would wait for ever is seen at once (`Hang`), and any order of the ranks can be played.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from odb_factory.comm.codec import Failure, decode, encode
from odb_factory.comm.coordinator import CollectiveError, RankMetadata
from odb_factory.comm.redistribute import make_buffers, redistribute
from odb_factory.data import fill_epoch as rounds_module
from odb_factory.data.fill_epoch import FillEpoch, Task
from odb_factory.data.observe import ShardSampler
from odb_factory.data.samples import MicroBatch, Rejection, Sample
from odb_factory.data.serialize import pack
from odb_factory.planning import Budget, Collation, Cost, Plan
from odb_factory.planning.candidates import MAX_WAIT_ROUNDS
from odb_factory.planning.per_rank import LOWEST_CAP

Row = Sample | Rejection | Exception
"""What a sampler hands out; an exception is raised when it is its turn."""


NO_FEATURES = pack({})


class Hang(BaseException):
    """A rank waits for another one that will never answer. Nothing in the package may catch it."""


@dataclass
class Epoch:
    """What one rank saw: its rounds, the ids in its window and its report in each, what it rejected, its error."""

    rounds: list[list[Task]] = field(default_factory=list)
    windows: list[list[int]] = field(default_factory=list)
    reports: list[RankMetadata] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    undrawn: int = 0
    error: BaseException | None = None

    @property
    def steps(self) -> list[MicroBatch]:
        return [step for tasks in self.rounds for step, _ in tasks]

    @property
    def ids(self) -> list[int]:
        return [id for step in self.steps for id in step.ids]

    @property
    def groups(self) -> list[list[tuple[int, ...]]]:
        """The groups that each round has taken out of its window, in step order."""
        last_seen = {id: k for k, window in enumerate(self.windows) for id in window}
        groups: list[list[tuple[int, ...]]] = [[] for _ in self.windows]
        for step in self.steps:
            if not step.idle:
                groups[last_seen[step.ids[0]]].append(step.ids)
        return groups


class Lockstep:
    """What the coordinators of all ranks share. `order`: who is run first in a round, as threads would race."""

    def __init__(self, world_size: int, order: Sequence[int] | None = None):
        self.order = list(order or range(world_size))
        self.sources: dict[int, Generator[list[Task], None, None]] = {}
        self.told: dict[int, Any] = {}
        self.told_ahead: dict[int, Any] = {}
        self.running: set[int] = set()
        self.leaving: set[int] = set()
        self.on_round: Callable[[int, list[Task]], None] = lambda rank, tasks: None
        self.errors: dict[int, BaseException] = {}

    def round(self) -> bool:
        """Run every rank that has not ended for one round; whether one is left."""
        self.told, self.told_ahead = self.told_ahead, {}
        for rank in self.order:
            if rank in self.sources and rank not in self.told:
                self._advance(rank)
        return bool(self.sources)

    def tell(self, rank: int, message: Any) -> list[Any]:
        """What all ranks tell in this round, in rank order. Runs those that have not told yet."""
        if rank in self.told:  # last words after its report, while others have not returned with this round
            self.told_ahead[rank] = message
            return []
        self.told[rank] = message
        for other in self.order:
            if other not in self.told and other not in self.running:
                if other in self.sources:
                    self._advance(other)
                if other not in self.told:
                    raise Hang(f"rank {rank} waits for rank {other}, which has ended")
        return [self.told[rank] for rank in range(len(self.order))]

    def _advance(self, rank: int) -> None:
        source = self.sources[rank]
        self.running.add(rank)
        try:
            if rank in self.leaving:
                del self.sources[rank]
                source.close()
            else:
                self.on_round(rank, next(source))
        except StopIteration:
            del self.sources[rank]
        except Exception as error:
            self.errors[rank] = error
            self.sources.pop(rank, None)
        finally:
            self.running.discard(rank)


class Seat:
    """One rank's `Coordinator`. on_wire: its messages travel encoded, as between processes."""

    timeout_s = 0.0

    def __init__(self, lockstep: Lockstep, rank: int, on_wire: bool):
        self.lockstep, self.rank, self.on_wire = lockstep, rank, on_wire

    def all_gather(self, report: RankMetadata, round_index: int) -> list[RankMetadata]:
        # What a rank goes on changing is never shared.
        told = (
            encode(report) if self.on_wire else RankMetadata(report.window, report.rejected.copy(), model=report.model)
        )
        answers = self._tell(told)
        for rank, answer in enumerate(answers):
            if isinstance(answer, Failure):
                raise CollectiveError(f"rank {rank} stopped: {answer.reason}")
        return answers

    def confirm(self, checksum: int, round_index: int) -> None: ...

    def all_to_all(self, buffers: Sequence[bytes]) -> list[bytes]:
        raise AssertionError("see redistributing in run_shards")

    def leave_epoch(self) -> None:
        self.fail("it left the epoch")

    def fail(self, message: str) -> None:
        self._tell(encode(Failure(message)) if self.on_wire else Failure(message))

    def start(self) -> None: ...

    def check(self) -> None: ...

    def agree(self, settings: Mapping[str, object]) -> None: ...

    def abort(self, message: str) -> None: ...

    def close(self) -> None: ...

    def _tell(self, message: Any) -> list[Any]:
        answers = self.lockstep.tell(self.rank, message)
        return [decode(answer) for answer in answers] if self.on_wire else answers


def run_shards(
    shards: Sequence[Sequence[Row]],
    *,
    order: Sequence[int] | None = None,
    leave_after: dict[int, int] | None = None,
    on_wire: bool = True,
    **options: Any,
) -> list[Epoch]:
    """One epoch of one rank a shard; the `Epoch` of each.

    leave_after: {rank: rounds after which it is closed}. options: of `FillEpoch`.
    """
    epochs = [Epoch(undrawn=len(shard)) for shard in shards]
    lockstep = Lockstep(len(shards), order)
    lockstep.on_round = lambda rank, tasks: epochs[rank].rounds.append(tasks)
    everything = [row for shard in shards for row in shard]
    held: list[list[Sample]] = [[] for _ in shards]

    class Recorded(Seat):
        def all_gather(self, report: RankMetadata, round_index: int) -> list[RankMetadata]:
            epoch = epochs[self.rank]
            assert round_index == len(epoch.windows)
            epoch.windows.append([one.sample.id for one in ranks[self.rank].held])
            epoch.reports.append(RankMetadata(report.window, report.rejected.copy()))
            held[self.rank] = [one.sample for one in ranks[self.rank].held]
            return super().all_gather(report, round_index)

    def redistributing(
        plan: Plan, rank: int, samples: Sequence[Sample], _: Any, *, encode: Any, decode: Any
    ) -> dict[int, Sample]:
        """Ranks run one inside the other and cannot meet twice in a round; so the buffers of all are made here."""

        def all_to_all(_: Any) -> list[bytes]:
            return [make_buffers(plan, other, held[other], encode)[rank] for other in range(len(shards))]

        return redistribute(plan, rank, samples, all_to_all, encode=encode, decode=decode)

    def draw(rank: int) -> Iterator[Row]:
        for row in shards[rank]:
            epochs[rank].undrawn -= 1
            if isinstance(row, Exception):
                raise row
            yield row

    defaults = {"budget": Budget(32), "buffer_size": 8, "accumulation": 1, "join": True, "seed": 0, "epoch": 0}
    defaults["find_dummy_sample"] = lambda: next(row for row in everything if isinstance(row, Sample))
    ranks = [
        FillEpoch(
            draw(rank),
            rank=rank,
            coordinator=Recorded(lockstep, rank, on_wire),
            on_reject=lambda rejection, rank=rank: epochs[rank].rejected.append(rejection.id),
            num_samples=len(everything),
            **defaults | options,
        )
        for rank in range(len(shards))
    ]
    lockstep.sources = {rank: iter(rounds) for rank, rounds in enumerate(ranks)}
    num_rounds = 0
    with mock.patch.object(rounds_module, "redistribute", redistributing):
        while lockstep.round():
            num_rounds += 1
            lockstep.leaving = {rank for rank, after in (leave_after or {}).items() if after <= num_rounds}
            if num_rounds > 2 * len(everything) + 10:
                raise Hang("rounds without end")
    for rank, error in lockstep.errors.items():
        epochs[rank].error = error
    return epochs


def run_epoch(rows: Sequence[Row], *, world_size: int = 1, **options: Any) -> list[Epoch]:
    """One epoch over `rows`, sharded over `world_size` ranks as the loader does it."""
    shards = [[rows[i] for i in ShardSampler(range(len(rows)), rank, world_size)] for rank in range(world_size)]
    return run_shards(shards, **options)


def sample(id: int, tokens: int, patches: int = 0) -> Sample:
    return Sample(id, Cost(tokens, patches, max(tokens - 1, 1), patches > 0), NO_FEATURES)


def rejection(id: int, *, fatal: bool = False) -> Rejection:
    return Rejection(id, "unreadable", f"row {id}: cannot be read", fatal)


def usable(rows: Iterable[Row]) -> list[Sample]:
    return [row for row in rows if isinstance(row, Sample)]


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
    """I1 to I5 and I7, and of I6 that all ranks planned the same, for an epoch without fatal rows.

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

    rounds = [len(tasks) for tasks in epochs[0].rounds]
    steps = epochs[0].steps
    totals = [step.totals for step in steps]
    assert all([len(tasks) for tasks in epoch.rounds] == rounds for epoch in epochs), "I1"
    assert len(steps) % accumulation == 0, "I1"
    assert [step.last for step in steps] == [False] * (len(steps) - 1) + [True]
    assert all([step.totals for step in epoch.steps] == totals for epoch in epochs), "I6: all ranks plan the same"

    assert all(count == 1 for count in emitted.values()) and costs.keys() >= set(emitted), "I2, I3: no id twice"
    for rank, epoch in zip(held, epochs):
        assert balance or rank.keys() >= set(epoch.ids), "only balanced samples leave their rank"
        idle = [step.idle for step in epoch.steps]
        assert join or not any(idle), "I3"
        assert balance or idle == sorted(idle), "I7: a rank idles behind its last sample"
    assert steps[-1].left_out == num_rows - len(emitted) - num_rejected
    if join:
        assert len(emitted) == len(costs) and steps[-1].left_out == 0, "I2"
        assert sum(not step.active_ranks for step in totals) < accumulation, "I7: filled up, and no further"
    else:
        assert any(_ran_short(*rank, emitted, accumulation) for rank in zip(held, epochs)), "I3"

    for k, step in enumerate(totals):
        groups = [[costs[id] for id in epoch.steps[k].ids] for epoch in epochs]
        assert all(len({cost.modality for cost in group}) <= 1 for group in groups)
        assert all(len(group) < 2 or budget.fits(group) for group in groups), "I4"
        if balance and step.active_ranks < len(epochs):
            assert step.samples == step.active_ranks, "I7: there are too few for all ranks"

    # A balanced round sends out a sample for each rank, or all there are.
    most_rounds = max(map(len, held)) + (len(costs) // len(held) if balance else 0)
    assert len(epochs[0].windows) <= most_rounds, "I5"
    # Once it may wait no longer, a sample is kept back only by older ones, and one of these goes out every round.
    longest_wait = MAX_WAIT_ROUNDS + buffer_size - 1
    for epoch in epochs:
        num_rounds_held = Counter(id for window in epoch.windows for id in window)
        assert all(count <= 1 + longest_wait for count in num_rounds_held.values()), "I5: a bounded wait"
        for k, (window, after) in enumerate(zip(epoch.windows, [*epoch.windows[1:], []]), start=1):
            assert len(window) <= buffer_size
            gone = set(window) - set(after)
            closing = not join and k == len(epoch.windows)
            assert gone or not window or closing or balance, "I5: progress on every rank that holds a sample"
            plain = budget.max_patches is None and budget.collation == Collation()
            if join and not balance and plain and k < len(epoch.windows):
                left = [costs[id] for id in after if id in window]
                taken = [[costs[id] for id in step.ids] for step in epoch.steps if step.ids and step.ids[0] in gone]
                assert not any(_could_take(group, cost, budget) for group in taken for cost in left), "I7: cut down"


def _could_take(group: Sequence[Cost], other: Cost, budget: Budget) -> bool:
    """Whether a shorter sample was left behind beside a group that is not even full for the lowest level."""
    lowest = replace(budget, token_budget=int(LOWEST_CAP * budget.token_budget))
    is_like = other.modality == group[0].modality and other.tokens < max(cost.tokens for cost in group)
    return is_like and lowest.fits([other, *group])


def _ran_short(costs: dict[int, Cost], epoch: Epoch, emitted: Counter[int], accumulation: int) -> bool:
    """Whether a rank has drawn all its samples, and those it has left are too few for an optimizer step."""
    return epoch.undrawn == 0 and len(costs.keys() - emitted.keys()) < accumulation
