"""Ranks that are threads of one process, and what stands between them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from odb_factory.comm.gloo import Exchanges
from odb_factory.comm.ranks import Ranks
from odb_factory.errors import CollectiveError


class Table:
    """Where all ranks meet."""

    def __init__(self, world_size: int, timeout_s: float = 30.0, group_size: int = 256):
        self.timeout_s, self.world_size, self.group_size = timeout_s, world_size, group_size
        self.is_over = False
        self.told: dict[Any, dict[int, Any]] = {}
        self.changed = threading.Condition()
        self.steps: Table | None = None

    @classmethod
    def with_steps(cls, world_size: int, group_size: int = 256) -> Table:
        """Messages about optimizer steps have a channel of their own."""
        table = cls(world_size, group_size=group_size)
        table.steps = cls(world_size, group_size=group_size)
        return table

    def seat(self, rank: int) -> Seat:
        return Seat(self, rank)

    def abort(self) -> None:
        for table in filter(None, (self, self.steps)):
            with table.changed:
                table.is_over = True
                table.changed.notify_all()

    def tell(self, place: Any, rank: int, message: Any) -> dict[int, Any]:
        with self.changed:
            told = self.told.setdefault(place, {})
            told[rank] = message
            self.changed.notify_all()
            return told

    def meet(self, place: Any, ranks: range, rank: int, message: Any) -> list[Any]:
        """What these ranks tell at this place, in rank order. A rank that is none of them only listens."""
        told = self.tell(place, rank, message) if rank in ranks else self.told.setdefault(place, {})
        with self.changed:
            if not self.changed.wait_for(lambda: len(told) == len(ranks) or self.is_over, self.timeout_s):
                raise TimeoutError(f"rank {rank} waits in vain at {place}, where {sorted(told)} are")
            if len(told) < len(ranks):
                raise CollectiveError("another rank has failed")
            return [told[one] for one in ranks]


class TableGroup:
    """As `Group`."""

    is_busy = False

    def __init__(self, table: Any, rank: int):
        self.table, self.rank, self.world_size = table, rank, table.world_size
        self.exchanges = Exchanges(rank, table.world_size, table.group_size)
        self.counts: Counter[Any] = Counter()

    def _next(self, *place: Any) -> tuple[Any, ...]:
        """A place where these ranks meet for the next time."""
        self.counts[place] += 1
        return *place, self.counts[place]

    def _meet(self, kind: str, ranks: range, message: Any) -> list[Any]:
        return self.table.meet(self._next(kind, ranks.start), ranks, self.rank, message)

    def all_gather(self, message: bytes, phase: str = "") -> list[bytes]:
        return self._meet("all", range(self.world_size), message)

    def gather(self, message: bytes, phase: str = "") -> list[bytes]:
        return self._meet("group", self.exchanges.group, message)

    def reduce(self, message: bytes, merge: Callable[[Sequence[bytes]], bytes], phase: str = "") -> bytes:
        return merge(self._meet("sum", range(self.world_size), message))

    def swap(self, given: Mapping[int, bytes], sources: Sequence[int], phase: str = "") -> dict[int, bytes]:
        """Only ranks that give or get something come here."""
        for rank, text in given.items():
            assert rank in self.exchanges.group and text, "samples stay in a group"
            self.table.tell(self._next("swap", self.rank, rank), self.rank, text)
        return {
            rank: self.table.meet(self._next("swap", rank, self.rank), range(rank, rank + 1), self.rank, None)[0]
            for rank in sources
        }

    def close(self, *, failed: bool = False) -> None: ...


class Seat(Ranks):
    """One rank: the production `Ranks` over a table."""

    def __init__(self, table: Any, rank: int):
        self.table, self.timeout_s = table, table.timeout_s
        self._lifeline: Any = SimpleNamespace(cause=lambda: None, failure=None)
        self._training = "training"
        self._group: Any = TableGroup(table, rank)
        self._steps: Any = TableGroup(table.steps or table, rank)
        self.rank, self.world_size, self.group = rank, table.world_size, self._group.exchanges.group
        self._failed = self._is_closed = False

    def start(self) -> None: ...

    def check(self) -> None: ...

    def progress(self, phase: str) -> None: ...

    def abort(self, message: str) -> None:
        self.table.abort()

    def close(self) -> None: ...


def run_ranks(world_size: int, drive: Callable[[Seat], Any], limit_s: float = 60.0, group_size: int = 256) -> list[Any]:
    """What `drive` returns on each rank, or the exception that it raised."""
    table = Table.with_steps(world_size, group_size)
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
