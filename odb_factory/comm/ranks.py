"""`Ranks`: what the data-parallel ranks tell each other, as which bytes, and how samples travel between them."""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from odb_factory.comm.agreement import compare, ranks_alike
from odb_factory.comm.gloo import Group
from odb_factory.comm.lifeline import lifeline_of
from odb_factory.errors import CollectiveError
from odb_factory.planning import ROW, BufferMetadata, Limits, Plan

# ----------------------------------------------------------------------------------------------------------------------
# What ranks tell each other before a plan.

DIFFERENT_PLANS = (
    "the ranks have computed different plans from the same metadata ({}); give every rank the same versions of "
    "odb_factory and numpy on the same kind of processor."
)


LEFT_EPOCH = "it left the epoch before its end; all ranks must take the same optimizer steps."


@dataclass(frozen=True, slots=True)
class RankMetadata:
    """What a rank tells the others before each plan: the samples it holds, and counts since this pass began.

    rejected: rows that are not trained on, by reason. overlong: samples that break a budget alone and are trained on.
    order: a checksum of the order in which it draws, or of that of all ranks; `compare_orders` judges it.
    limits: to which it has lowered its budgets, if it has; the least of all ranks are taken.
    """

    buffer: BufferMetadata
    rejected: Counter[str]
    overlong: int = 0
    order: int = 0
    limits: Limits | None = None


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
# The ranks of the training, as the loader sees them.


class Ranks:
    """The data-parallel ranks: how they agree; one rank alone agrees with itself.

    process_group: of these ranks; None: the default group, if there is one. timeout_s: how long a rank may give no sign
    of life (seconds).

    All ranks make the same calls in the same order, but for `check`, `progress` and `abort`; the calls of `gather_step`
    have an order of their own. The groups are made in the training thread of all ranks, in the same order. After
    `agree`, `_group` is used by the planning thread alone, `_steps` by the thread that calls `gather_step`. Metadata
    have 29 bytes a sample and some hundred more: nothing grows with tokens or pixels.
    Raises `CollectiveError` if the ranks do not meet.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, timeout_s: float = 30.0):
        self.timeout_s = timeout_s
        self._lifeline = lifeline_of(process_group, timeout_s)
        self._training = self._lifeline.stream("training")
        self._group = Group(process_group, timeout_s, "planning")
        self._steps = Group(process_group, timeout_s, "agreements")
        self.rank, self.world_size = self._group.rank, self._group.world_size
        self._failed = self._is_closed = False

    def start(self) -> None:
        """Call once the worker processes have been forked: from here on threads may start."""
        self._lifeline.start()  # that of a rank alone logs long waits for its own workers

    def check(self) -> None:
        """Raise `CollectiveError` if another rank has failed; for the training thread while it waits."""
        self._lifeline.check()

    def progress(self, phase: str) -> None:
        """The training thread does its next step, `phase`; a rank that comes there late is named."""
        self._lifeline.enter(self._training, phase)

    def agree(self, settings: Mapping[str, object]) -> None:
        """Raise `CollectiveError` on every rank if the ranks' settings differ (I11); the message says in what."""
        compare(settings, lambda message: self._all_gather(message, "comparing settings"), rank=self.rank)

    def all_gather(self, metadata: RankMetadata, round_index: int) -> list[RankMetadata]:
        """The metadata of all ranks, in rank order. Raises `CollectiveError` if a rank failed or is missing."""
        if self.world_size == 1:
            return [metadata]
        messages = [decode(answer) for answer in self._all_gather(encode(metadata), f"round {round_index}")]
        failures = {rank: message.reason for rank, message in enumerate(messages) if isinstance(message, Failure)}
        if failures:
            rank = min(failures, key=lambda rank: (failures[rank] == LEFT_EPOCH, rank))  # a failure says more
            cause = self._lifeline.cause() if failures[rank] == LEFT_EPOCH else None
            raise CollectiveError(cause or f"rank {rank} stopped: {failures[rank]}")
        return [message for message in messages if isinstance(message, RankMetadata)]

    def confirm(self, checksum: int, round_index: int) -> None:
        """Raise `CollectiveError` on every rank if the ranks have computed different plans (I6)."""
        answers = self.gather_plans(str(checksum).encode(), round_index)
        if len(set(answers)) > 1:
            raise CollectiveError(DIFFERENT_PLANS.format(ranks_alike(answers)))

    def gather_plans(self, outline: bytes, round_index: int) -> list[bytes]:
        """Of each rank the outline of its group's plan, or the checksum of its plan, in rank order."""
        return self._all_gather(outline, f"comparing the plans of round {round_index}")

    def all_to_all(self, buffers: Sequence[bytes]) -> list[bytes]:
        """Send `buffers[r]` to rank r; returns what each rank has sent to this one, in rank order."""
        self._check_not_left()
        return self._group.all_to_all(buffers, "redistributing samples")

    def gather_step(self, message: bytes, step_index: int) -> list[bytes]:
        """The messages of all ranks about an optimizer step before it begins, in rank order. Another thread than the
        planning thread may call it: these messages have a group of their own."""
        self._check_not_left()
        return self._steps.all_gather(message, f"agreeing on optimizer step {step_index + 1} of the epoch")

    def stop(self, reason: str = LEFT_EPOCH) -> None:
        """Tell the others, in place of the next metadata, why this rank plans no further."""
        try:
            self._all_gather(encode(Failure(reason)), "the end")
        except CollectiveError:
            pass  # the others have ended before this one

    def abort(self, message: str) -> None:
        """Tell the others why this rank ends, whatever they are doing. The first such message of all ranks stands."""
        if not self._failed:
            self._failed = True
            self._lifeline.abort(f"rank {self.rank} left the training: {message}")

    def close(self) -> None:
        """Give groups, lifeline and threads back; nothing is called after it."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.world_size == 1:
            self._lifeline.close()
        self._lifeline.leave(self._training)
        failed = self._failed or self._group.is_busy or self._steps.is_busy
        self._steps.close(failed=failed)
        self._group.close(failed=failed)

    def _all_gather(self, message: bytes, phase: str) -> list[bytes]:
        self._check_not_left()
        return self._group.all_gather(message, phase)

    def _check_not_left(self) -> None:
        if self.world_size > 1 and (self._failed or self._is_closed):
            raise CollectiveError(self._lifeline.failure or f"rank {self.rank} has left the training.")


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
