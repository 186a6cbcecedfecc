"""Ranks that are threads of one process, and what stands between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from odb_factory.comm.agreement import compare
from odb_factory.comm.ranks import LEFT_EPOCH, Failure, RankMetadata, decode, encode
from odb_factory.errors import CollectiveError


class Table:
    """Where all ranks meet."""

    def __init__(self, world_size: int, timeout_s: float = 30.0):
        self.timeout_s = timeout_s
        self.barrier = threading.Barrier(world_size)
        self.told: list[Any] = [None] * world_size
        self.steps: Table | None = None

    @classmethod
    def with_steps(cls, world_size: int) -> Table:
        """Messages about optimizer steps have a channel of their own."""
        table = cls(world_size)
        table.steps = cls(world_size)
        return table

    def seat(self, rank: int) -> Seat:
        return Seat(self, rank)

    def abort(self) -> None:
        self.barrier.abort()
        if self.steps is not None:
            self.steps.abort()

    def exchange(self, rank: int, message: Any) -> list[Any]:
        """What all ranks tell, in rank order."""
        self.told[rank] = message
        self.barrier.wait(self.timeout_s)
        told = list(self.told)
        self.barrier.wait(self.timeout_s)
        return told


class Seat:
    """One rank, as `Ranks`."""

    def __init__(self, table: Table, rank: int):
        self.table, self.rank, self.timeout_s = table, rank, table.timeout_s
        self.world_size = table.barrier.parties

    def _tell(self, message: RankMetadata | Failure) -> list[Any]:
        answers = [decode(answer) for answer in self.table.exchange(self.rank, encode(message))]
        for rank, answer in enumerate(answers):
            if isinstance(answer, Failure):
                raise CollectiveError(f"rank {rank} stopped: {answer.reason}")
        return answers

    def all_gather(self, metadata: RankMetadata, round_index: int) -> list[RankMetadata]:
        return self._tell(metadata)

    def agree(self, settings: Mapping[str, object]) -> None:
        compare(settings, partial(self.table.exchange, self.rank), rank=self.rank)

    def confirm(self, checksum: int, round_index: int) -> None:
        if len(set(self.table.exchange(self.rank, checksum))) > 1:
            raise CollectiveError("the ranks have computed different plans")

    def gather_plans(self, outline: bytes, round_index: int) -> list[bytes]:
        return self.table.exchange(self.rank, outline)

    def all_to_all(self, buffers: Sequence[bytes]) -> list[bytes]:
        return [sent[self.rank] for sent in self.table.exchange(self.rank, buffers)]

    def gather_step(self, message: bytes, step_index: int) -> list[bytes]:
        assert self.table.steps is not None
        try:
            return self.table.steps.exchange(self.rank, message)
        except threading.BrokenBarrierError:
            raise CollectiveError("another rank has failed") from None

    def stop(self, message: str = LEFT_EPOCH) -> None:
        try:
            self._tell(Failure(message))
        except (CollectiveError, threading.BrokenBarrierError):
            pass

    def start(self) -> None: ...

    def check(self) -> None: ...

    def progress(self, phase: str) -> None: ...

    def abort(self, message: str) -> None:
        self.table.abort()

    def close(self) -> None: ...


def run_ranks(world_size: int, drive: Callable[[Seat], Any], limit_s: float = 60.0) -> list[Any]:
    """What `drive` returns on each rank, or the exception that it raised."""
    table = Table.with_steps(world_size)
    ended: list[Any] = [TimeoutError(f"no end within {limit_s} s")] * world_size

    def run(rank: int) -> None:
        try:
            ended[rank] = drive(table.seat(rank))
        except Exception as error:
            ended[rank] = error
            if not isinstance(error, CollectiveError):
                table.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    return ended
