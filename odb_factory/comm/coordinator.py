"""`Coordinator`: what ranks tell each other, as which bytes, and how samples travel between them."""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from odb_factory.comm.lifeline import Lifeline
from odb_factory.planning import ROW, BufferMetadata, Limits, Plan

# ----------------------------------------------------------------------------------------------------------------------
# What ranks tell each other, and the interface by which they do: `Coordinator`.

DIFFERENT_PLANS = (
    "the ranks have computed different plans from the same metadata ({}); give every rank the same versions of "
    "odb_factory and numpy on the same kind of processor."
)


LEFT_EPOCH = "it left the epoch before its end; all ranks must take the same optimizer steps."


@dataclass(frozen=True, slots=True)
class RankMetadata:
    """What a rank tells the others before each plan: the samples it holds, and counts of this epoch.

    rejected: rows that are not trained on, by reason. overlong: samples that break a budget alone and are trained on.
    order: a checksum of the order in which all ranks together draw (the same on all ranks).
    limits: to which it has lowered its budgets, if it has; the least of all ranks are taken.
    """

    buffer: BufferMetadata
    rejected: Counter[str]
    overlong: int = 0
    order: int = 0
    limits: Limits | None = None


class Coordinator(Protocol):
    """How the data-parallel ranks agree. All ranks make the same calls in the same order, but for `check`, `progress`
    and `abort`; the calls of `gather_step` have an order of their own.

    rank, world_size: position among the data-parallel ranks. timeout_s: how long a rank may give no sign of life
    (seconds).
    """

    rank: int
    world_size: int
    timeout_s: float

    def start(self) -> None:
        """The worker processes of the loader have been started: threads may be."""

    def check(self) -> None:
        """Raise `CollectiveError` if another rank has failed; for the training thread while it waits."""

    def progress(self, phase: str) -> None:
        """The training thread does its next step, `phase`; a rank that comes there late is named."""

    def agree(self, settings: Mapping[str, object]) -> None:
        """Raise `CollectiveError` on every rank if the ranks' settings differ (I11); the message says in what."""

    def all_gather(self, metadata: RankMetadata, round_index: int) -> list[RankMetadata]:
        """The metadata of all ranks, in rank order. Raises `CollectiveError` if a rank failed or is missing."""

    def confirm(self, checksum: int, round_index: int) -> None:
        """Raise `CollectiveError` on every rank if the ranks have computed different plans (I6)."""

    def gather_plans(self, outline: bytes, round_index: int) -> list[bytes]:
        """What the ranks say of the plans of their groups, in rank order."""

    def all_to_all(self, buffers: Sequence[bytes]) -> list[bytes]:
        """Send `buffers[r]` to rank r; returns what each rank has sent to this one, in rank order."""

    def gather_step(self, message: bytes, step_index: int) -> list[bytes]:
        """What the ranks say of an optimizer step before it begins, in rank order. Another thread than the one that
        plans may call it: these messages have a channel of their own."""

    def leave_epoch(self) -> None:
        """Tell the others, in place of the next metadata, that this rank leaves the epoch before its end."""

    def fail(self, message: str) -> None:
        """Tell the others, in place of the next metadata, why this rank cannot go on."""

    def abort(self, message: str) -> None:
        """Tell the others why this rank ends, whatever they are doing. The first such message of all ranks stands."""

    def close(self) -> None:
        """Give process group, store and threads back; nothing is called after it."""


class SingleProcessCoordinator:
    """The `Coordinator` of a training with one data-parallel rank."""

    rank = 0
    world_size = 1
    timeout_s = 30.0

    def __init__(self) -> None:
        self._lifeline: Lifeline | None = None

    def start(self) -> None:
        if self._lifeline is None:
            self._lifeline = Lifeline(0, 1, None, self.timeout_s)

    def check(self) -> None: ...

    def progress(self, phase: str) -> None: ...

    def agree(self, settings: Mapping[str, object]) -> None: ...

    def all_gather(self, metadata: RankMetadata, round_index: int) -> list[RankMetadata]:
        return [metadata]

    def confirm(self, checksum: int, round_index: int) -> None: ...

    def gather_plans(self, outline: bytes, round_index: int) -> list[bytes]:
        return [outline]

    def all_to_all(self, buffers: Sequence[bytes]) -> list[bytes]:
        return list(buffers)

    def gather_step(self, message: bytes, step_index: int) -> list[bytes]:
        return [message]

    def leave_epoch(self) -> None: ...

    def fail(self, message: str) -> None: ...

    def abort(self, message: str) -> None: ...

    def close(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()


# ----------------------------------------------------------------------------------------------------------------------
# Metadata as bytes. Nothing that comes from another rank is unpickled.

MAX_REASON_CHARACTERS = 2000
_JSON_LENGTH_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """What a rank sends in place of something else: why it cannot go on."""

    reason: str


def encode(message: RankMetadata | Failure) -> bytes:
    """The length of a JSON header, the header, the buffered samples as an array of `ROW` (29 bytes a sample)."""
    if isinstance(message, Failure):
        header: dict[str, object] = {"failure": message.reason[:MAX_REASON_CHARACTERS]}
        rows = b""
    else:
        header = {
            "exhausted": message.buffer.exhausted,
            "rejected": message.rejected,
            "overlong": message.overlong,
            "order": message.order,
            "limits": None if message.limits is None else dataclasses.astuple(message.limits),
        }
        rows = message.buffer.rows.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(_JSON_LENGTH_BYTES, "little") + text + rows


def decode(message: bytes) -> RankMetadata | Failure:
    """Undo `encode`."""
    end = _JSON_LENGTH_BYTES + int.from_bytes(message[:_JSON_LENGTH_BYTES], "little")
    header = json.loads(message[_JSON_LENGTH_BYTES:end])
    if "failure" in header:
        return Failure(header["failure"])
    buffer = BufferMetadata(np.frombuffer(message, dtype=ROW, offset=end), header["exhausted"])
    return RankMetadata(
        buffer,
        Counter(header["rejected"]),
        header["overlong"],
        header["order"],
        None if header["limits"] is None else Limits(*header["limits"]),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Send the samples that a balanced plan gives to another rank than the one that holds them.

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
