"""Trainings of ranks that are threads, to be stopped and resumed: rows are lengths, batches come from `ODBLoader`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from thread_ranks import run_ranks
from torch.utils.data import IterableDataset
from toy import core_loader

from odb_factory.data.samples import MicroBatch

LENGTHS = [3 + k * 7 % 23 if k % 11 else 0 for k in range(60)]
KEEP: dict[str, Any] = {"global_batch_size": "keep", "balance": True, "accumulation": 4}


def loader_of(lengths: Sequence[int], seat: Any, stream: Any = None, **options: Any) -> Any:
    """stream: the class of a dataset that is iterated. options: of `core_loader`."""
    rows = stream(lengths, seat.rank, seat.world_size) if stream else None
    return core_loader(lengths, stream=rows, ranks=seat, **{"shuffle": True, "token_budget": 32} | options)


def run(
    lengths: Sequence[int],
    *,
    world_size: int = 1,
    state: dict[str, Any] | None = None,
    stop_after: int | None = None,
    epochs: int = 1,
    go_to: tuple[int, int] | None = None,
    **options: Any,
) -> tuple[list[list[MicroBatch]], dict[str, Any]]:
    """Train from `state` on: the micro-batches of each rank, and the state behind the last optimizer step, on any rank.

    stop_after: optimizer steps. go_to: (epoch, optimizer steps), as of `ODBLoader.go_to`.
    """
    taken: list[list[MicroBatch]] = [[] for _ in range(world_size)]

    def drive(seat: Any) -> dict[str, Any]:
        num_steps = 0
        with loader_of(lengths, seat, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            if go_to is not None:
                loader.go_to(*go_to)
            while loader.epoch < epochs:
                for one, _, _ in loader:
                    taken[seat.rank].append(one)
                    if one.ends_optimizer_step:
                        loader.consume(one.step)
                        num_steps += 1
                        if num_steps == stop_after:
                            return loader.state_dict()
                loader.set_epoch(loader.epoch + 1)
            return loader.state_dict()

    after = run_ranks(world_size, drive, limit_s=30)
    failed = [ended for ended in after if isinstance(ended, Exception)]
    if failed:
        raise next((error for error in failed if str(error) != "another rank has failed"), failed[0])
    states = json.loads(json.dumps(after))
    assert states == after == states[:1] * world_size, "JSON types, the same on all ranks"
    return taken, states[0]


class Stream(IterableDataset):
    """One that all ranks iterate alike; has no length."""

    is_split = False

    def __init__(self, lengths: Sequence[int], rank: int, world_size: int):
        self.rows = list(enumerate(lengths))

    def __iter__(self) -> Any:
        return iter(self.rows)


class SplitStream(Stream):
    """One that gives each rank a part of its own."""

    is_split = True

    def __init__(self, lengths: Sequence[int], rank: int, world_size: int):
        super().__init__(lengths, rank, world_size)
        self.rows = self.rows[rank::world_size]


def ids_of(taken: list[list[MicroBatch]], epoch: int = 0) -> Counter:
    return Counter(id for rank in taken for one in rank if one.step.epoch == epoch for id in one.ids)


def num_steps(taken: list[list[MicroBatch]]) -> int:
    return sum(one.ends_optimizer_step for one in taken[0])


def of_steps(taken: list[list[MicroBatch]]) -> dict[tuple[int, int], tuple[int, ...]]:
    """The ids of all ranks of each optimizer step."""
    steps: dict[tuple[int, int], list[int]] = {}
    for rank in taken:
        for one in rank:
            steps.setdefault((one.step.epoch, one.step.index), []).extend(one.ids)
    return {key: tuple(sorted(ids)) for key, ids in sorted(steps.items())}


def usable(lengths: Sequence[int]) -> Counter:
    return Counter(i for i, length in enumerate(lengths) if length)
