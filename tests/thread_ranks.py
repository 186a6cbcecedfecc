"""Ranks that are threads of one process, and their communication."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from odb_factory.data.ranks import Ranks
from odb_factory.errors import CollectiveError

LOST = "another rank has failed"


class Table:
    """Where all ranks meet."""

    def __init__(self, world_size: int):
        self.world_size, self.is_over = world_size, False
        self.messages: dict[Any, dict[int, bytes]] = {}
        self.changed = threading.Condition()

    def tell(self, place: Any, rank: int, message: bytes) -> None:
        with self.changed:
            messages = self.messages.setdefault(place, {})
            assert rank not in messages, f"rank {rank} comes twice to {place}"
            messages[rank] = message
            self.changed.notify_all()

    def answers(self, place: Any, count: int) -> list[bytes]:
        """The messages of `count` ranks at this place, in rank order."""
        with self.changed:
            messages = self.messages.setdefault(place, {})
            if not self.changed.wait_for(lambda: len(messages) == count or self.is_over, 30):
                raise TimeoutError(f"waits in vain at {place}, where {sorted(messages)} are")
            if len(messages) < count:
                raise CollectiveError(LOST)
            return [messages[rank] for rank in sorted(messages)]

    def abort(self, message: str = "") -> None:
        with self.changed:
            self.is_over = True
            self.changed.notify_all()


class TableChannel:
    """The interface of `Channel`. counts: number of meetings at each place."""

    def __init__(self, table: Table, rank: int, name: str):
        self.table, self.rank, self.name = table, rank, name
        self.counts: Counter[Any] = Counter()

    def _next(self, *place: Any) -> tuple[Any, ...]:
        self.counts[place] += 1
        return *place, self.counts[place]

    def gather(self, own: bytes, about: str) -> list[bytes]:
        place = self._next(self.name)
        self.table.tell(place, self.rank, own)
        return self.table.answers(place, self.table.world_size)

    def exchange(self, outgoing: Mapping[int, bytes], incoming: Mapping[int, int], about: str) -> dict[int, bytes]:
        """Called by ranks that send or receive bytes."""
        for rank, text in outgoing.items():
            assert text, "no rank sends nothing"
            self.table.tell(self._next("exchange", self.rank, rank), self.rank, text)
        received = {rank: self.table.answers(self._next("exchange", rank, self.rank), 1)[0] for rank in incoming}
        assert {rank: len(text) for rank, text in received.items()} == dict(incoming)
        return received


class Seat(Ranks):
    """One rank: the production `Ranks` over a table."""

    def __init__(self, table: Table, rank: int):
        self.silence_s, self.rank, self.world_size, self._is_closed = 30.0, rank, table.world_size, False
        self.channel: Any = TableChannel(table, rank, "all")
        self.ring: Any = SimpleNamespace(
            main=TableChannel(table, rank, "compare"),
            failure=None,
            cause=lambda wait_s: None,
            check=lambda: None,
            fail=table.abort,
            give_back=lambda channel: None,
        )


def run_ranks(world_size: int, drive: Callable[[Seat], Any]) -> list[Any]:
    """The result of `drive` on each rank, or the exception that it raised."""
    table = Table(world_size)
    ended: list[Any] = [TimeoutError("no end within 60 s")] * world_size

    def run(rank: int) -> None:
        try:
            ended[rank] = drive(Seat(table, rank))
        except Exception as error:
            ended[rank] = error
            if not isinstance(error, CollectiveError):
                table.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ended
