"""The order of an epoch, and the shard of it that one rank draws."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from odb_factory.comm.agreement import ranks_alike

FINGERPRINTED = 64
DIFFERENT_ORDERS = (
    "the ranks draw their samples in different orders ({}), so some would be lost and others trained on twice; give "
    "every rank the same whole sampler, seeded alike (each takes its own share of it), not a share of it."
)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a rank begins in the order of an epoch.

    done: bool a position of the order, what is left out (None: nothing).
    replay: numbers in this rank's shard that come once more, in ascending order, before it goes on with number `first`.
    stop: the position of the order before which it ends (None: its end).
    block: positions of an optimizer step, for `ShardSampler.checksum_through` (0: none are kept).
    """

    done: np.ndarray | None = None
    replay: tuple[int, ...] = ()
    first: int = 0
    stop: int | None = None
    block: int = 0


def shard(order: Iterable[Any], rank: int, world_size: int, start: Start) -> Iterator[tuple[int, Any]]:
    """(position in the order, item) of what a rank draws: every `world_size`-th item of those that are left."""
    left: Iterator[tuple[int, Any]] = enumerate(order)
    if start.done is not None:
        done = start.done
        left = ((i, item) for i, item in left if i >= len(done) or not done[i])
    mine = itertools.islice(left, rank, start.stop, world_size)
    if not start.replay:
        yield from itertools.islice(mine, start.first, None)
        return
    replay = set(start.replay)
    for number, pair in enumerate(mine):
        if number >= start.first or number in replay:
            yield pair


class ShardSampler(Sampler[int]):
    """The shard of a rank in `sampler`: no padding, no index twice (I2).

    start: where the next iteration begins. fingerprint: a checksum of the first indices of the order that was begun
    last, to compare between ranks and runs. first: those indices, of all ranks.
    """

    def __init__(self, sampler: Any, rank: int, world_size: int):
        self.sampler, self.rank, self.world_size = sampler, rank, world_size
        self.start = Start()
        self.fingerprint = 0
        self.first: list[int] = []
        self._checksums: dict[int, int] = {}

    def peek(self) -> int:
        """The fingerprint of the order that comes next, which stays the next."""
        with self._generators_kept():
            self._open()
        return self.fingerprint

    def whole(self) -> Iterator[int]:
        """Indices of all ranks: the first of the order that was begun last, then those of an order drawn for this."""
        yield from self.first
        with self._generators_kept():
            order = [int(index) for index in self.sampler]
        yield from order

    @contextmanager
    def _generators_kept(self) -> Iterator[None]:
        """An order that is drawn here leaves those to come as they would have been."""
        generator = getattr(self.sampler, "generator", None)
        before = None if generator is None else generator.get_state()
        with torch.random.fork_rng(devices=[]):
            yield
        if generator is not None:
            generator.set_state(before)

    def __iter__(self) -> Iterator[int]:
        self._checksums = {}
        order = self._open()
        if self.start.block:
            order = itertools.chain.from_iterable(self._blocks(order, self.start.block))
        return (index for _, index in shard(order, self.rank, self.world_size, self.start))

    def _open(self) -> Iterator[int]:
        order = map(int, self.sampler)
        self.first = list(itertools.islice(order, FINGERPRINTED))
        self.fingerprint = zlib.crc32(repr((len(self.sampler), self.first)).encode())
        return itertools.chain(self.first, order)

    def _blocks(self, order: Iterator[int], size: int) -> Iterator[list[int]]:
        checksum = self.fingerprint
        for number in itertools.count():
            block = list(itertools.islice(order, size))
            if not block:
                return
            checksum = zlib.crc32(np.array(block, dtype="<i8").tobytes(), checksum)
            self._checksums[number] = checksum
            yield block

    def checksum_through(self, block: int) -> int:
        """Of all indices of the order up to the end of this block, of which every rank has drawn its own.

        No earlier block is asked for after it.
        """
        for earlier in [number for number in self._checksums if number < block]:
            del self._checksums[earlier]
        return self._checksums.get(block, self.fingerprint)

    def common(self, place: tuple[int, ...]) -> int:
        """What `compare` compares: a number made of the order and the place in it."""
        return zlib.crc32(repr((self.fingerprint, place)).encode())

    def compare(self, numbers: Sequence[int]) -> str | None:
        """Why the ranks, with these numbers of `common`, cannot go on; None if they can."""
        return DIFFERENT_ORDERS.format(ranks_alike(numbers)) if len(set(numbers)) > 1 else None

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
