"""Send the samples that a balanced plan gives to another rank than the one that holds them."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import TypeVar

from odb_factory.planning import Plan

T = TypeVar("T")
_LENGTH_BYTES = 8


def make_buffers(plan: Plan, rank: int, held: Sequence[T], encode: Callable[[T], bytes]) -> list[bytes]:
    """What this rank sends to each rank: its samples in the order in which they will be taken, each behind its length.

    held: the samples in this rank's buffer.
    """
    start, end = plan.starts[rank : rank + 2]
    buffers = []
    for taker, groups in enumerate(plan.groups):
        mine = [held[row - start] for group in groups for row in group if start <= row < end] if taker != rank else []
        encoded = map(encode, mine)
        buffers.append(b"".join(part for one in encoded for part in (len(one).to_bytes(_LENGTH_BYTES, "little"), one)))
    return buffers


def redistribute(
    plan: Plan,
    rank: int,
    held: Sequence[T],
    all_to_all: Callable[[Sequence[bytes]], list[bytes]],
    *,
    encode: Callable[[T], bytes],
    decode: Callable[[bytes], T],
) -> dict[int, T]:
    """The samples that this rank has for the plan, by their number in it.

    All ranks know the plan, so what travels needs no address. Collective, unless the plan moves nothing.
    """
    samples = dict(enumerate(held, plan.starts[rank]))
    if plan.moves:
        received = [iter(_split(buffer)) for buffer in all_to_all(make_buffers(plan, rank, held, encode))]
        for row in (row for group in plan.groups[rank] for row in group):
            owner = bisect.bisect_right(plan.starts, row) - 1
            if owner != rank:
                samples[row] = decode(next(received[owner]))
    return samples


def _split(buffer: bytes) -> list[bytes]:
    parts, position = [], 0
    while position < len(buffer):
        start = position + _LENGTH_BYTES
        position = start + int.from_bytes(buffer[start - _LENGTH_BYTES : start], "little")
        parts.append(buffer[start:position])
    return parts
