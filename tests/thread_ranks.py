"""Ranks that are threads of one process, and what stands between them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from odb_factory.data.ranks import Ranks
from odb_factory.errors import CollectiveError


class Table:
    """Where all ranks meet."""

    def __init__(self, world_size: int, timeout_s: float = 30.0):
        self.timeout_s, self.world_size = timeout_s, world_size
        self.is_over = False
        self.told: dict[Any, dict[int, Any]] = {}
        self.changed = threading.Condition()

    def seat(self, rank: int) -> Seat:
        return Seat(self, rank)

    def abort(self) -> None:
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

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


class TableChannel:
    """As `Channel`."""

    def __init__(self, table: Any, rank: int, name: str = "all"):
        self.table, self.rank, self.world_size, self.name = table, rank, table.world_size, name
        self.counts: Counter[Any] = Counter()

    def _next(self, *place: Any) -> tuple[Any, ...]:
        """A place where these ranks meet for the next time."""
        self.counts[place] += 1
        return *place, self.counts[place]

    def gather(self, own: bytes, about: str = "") -> list[bytes]:
        answers: list[bytes] = self.table.meet(self._next(self.name), range(self.world_size), self.rank, own)
        return answers

    def exchange(self, outgoing: Mapping[int, bytes], incoming: Mapping[int, int], about: str = "") -> dict[int, bytes]:
        """Only ranks that give or get something come here."""
        for rank, text in outgoing.items():
            assert text, "no rank is met for nothing"
            self.table.tell(self._next("exchange", self.rank, rank), self.rank, text)
        received = {
            rank: self.table.meet(self._next("exchange", rank, self.rank), range(rank, rank + 1), self.rank, None)[0]
            for rank in incoming
        }
        assert {rank: len(text) for rank, text in received.items()} == dict(incoming)
        return received


class Seat(Ranks):
    """One rank: the production `Ranks` over a table."""

    def __init__(self, table: Any, rank: int):
        self.table, self.silence_s = table, table.timeout_s
        self._ring: Any = SimpleNamespace(cause=lambda wait_s: None, failure=None)
        self._channel: Any = TableChannel(table, rank)
        self._compared = TableChannel(table, rank, "compare")
        self.rank, self.world_size = rank, table.world_size
        self._has_failed = self._is_closed = False

    def check(self) -> None: ...

    def compare(self, message: bytes) -> list[bytes]:
        return self._compared.gather(message)

    def abort(self, message: str) -> None:
        self.table.abort()

    def close(self) -> None: ...


def run_ranks(world_size: int, drive: Callable[[Seat], Any], limit_s: float = 60.0) -> list[Any]:
    """What `drive` returns on each rank, or the exception that it raised."""
    table = Table(world_size)
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
