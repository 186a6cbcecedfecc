"""`Ranks`: what the data-parallel ranks tell each other, and as which bytes.

Metadata of samples stay in a group of ranks; all ranks together know sums only (`Sums`).
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field

import msgpack
import numpy as np
import torch.distributed as dist

from odb_factory.comm.agreement import compare
from odb_factory.comm.gloo import GROUP_SIZE, Group, Merge
from odb_factory.comm.lifeline import lifeline_of
from odb_factory.errors import CollectiveError
from odb_factory.planning import ROW, BufferMetadata, Limits, MicroStepTotals
from odb_factory.planning.keep import GroupOutline

# ----------------------------------------------------------------------------------------------------------------------
# What ranks tell each other before a plan.

DIFFERENT_PLANS = (
    "the ranks have computed different plans from the same metadata ({}); give every rank the same versions of "
    "odb_factory and numpy on the same kind of processor."
)
NO_SAMPLES = BufferMetadata(np.zeros(0, ROW), exhausted=True)
LEFT_EPOCH = "it left the epoch before its end; all ranks must take the same optimizer steps."


@dataclass(frozen=True, slots=True)
class RankMetadata:
    """What a rank tells the others before each plan: the samples it holds, and counts since this pass began.

    rejected: rows left out when read, by reason. overlong: samples that break a budget alone and are trained on.
    order: a checksum of the order in which it draws, or of that of all ranks; `compare_orders` judges it.
    limits: to which it has lowered its budgets, if it has; the least of all ranks are taken.
    failure: why it cannot go on, in place of all else.
    """

    buffer: BufferMetadata = NO_SAMPLES
    rejected: Counter[str] = field(default_factory=Counter)
    overlong: int = 0
    order: int = 0
    limits: Limits | None = None
    failure: str | None = None


# ----------------------------------------------------------------------------------------------------------------------
# Metadata as bytes. Nothing that comes from another rank is unpickled.

MAX_REASON_CHARACTERS = 2000
WIDTHS = (0, 1, 2, 4)
"""Bytes of a number of a column: none where all are 0."""


def encode(message: RankMetadata) -> bytes:
    """As msgpack: each column of `ROW` with as many bytes a sample as its largest number needs (text: about 14)."""
    table, limits, failure = message.buffer.rows, message.limits, message.failure
    most = [int(table[name].max(initial=0)) for name in ROW.names or ()]
    widths = [next(width for width in WIDTHS if number < 1 << 8 * width) for number in most]
    columns = zip(ROW.names or (), widths)
    rows = b"".join(table[name].astype(f"<u{width}").tobytes() for name, width in columns if width)
    told = [len(table), widths, rows, message.buffer.exhausted, message.rejected, message.overlong, message.order]
    told += [limits and astuple(limits), failure and failure[:MAX_REASON_CHARACTERS]]
    packed: bytes = msgpack.packb(told)
    return packed


def decode(message: bytes) -> RankMetadata:
    """Undo `encode`."""
    count, widths, columns, exhausted, rejected, overlong, order, limits, failure = msgpack.unpackb(message)
    rows, start = np.zeros(count, ROW), 0
    for name, width in zip(ROW.names or (), widths):
        if width:
            rows[name] = np.frombuffer(columns, f"<u{width}", count, start)
            start += width * count
    limits = limits and Limits(*limits)
    return RankMetadata(BufferMetadata(rows, exhausted), Counter(rejected), overlong, order, limits, failure)


# ----------------------------------------------------------------------------------------------------------------------
# What all ranks know of a plan: sums, for which the first rank of each group speaks.


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What some of the ranks tell of the optimizer step that they plan. Each default adds nothing.

    failure: why the ranks cannot go on: (one only left the epoch, its rank, reason). plans: of ranks that have made the
    same plan, (first rank of these, checksum, a rank). outline: of the plans. orders: (order as in `RankMetadata`, from
    this rank, to this one).
    exhausted, rejected, overlong: as in `RankMetadata`. means: tokens of stock's means that several groups
    share, by number; num_means: the other ones.
    """

    failure: tuple[bool, int, str] | None = None
    plans: Sequence[tuple[int, int, int]] = ()
    outline: GroupOutline | None = None
    orders: Sequence[tuple[int, int, int]] = ()
    exhausted: bool = True
    rejected: Counter[str] = field(default_factory=Counter)
    overlong: int = 0
    means: Counter[int] = field(default_factory=Counter)
    num_means: int = 0

    def encode(self) -> bytes:
        """As JSON, without what is as the default."""
        told = {name: value for name, value in vars(self).items() if value != getattr(NOTHING, name)}
        return json.dumps(told, default=astuple, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, message: bytes) -> Sums:
        told = json.loads(message)
        if told.get("outline"):
            num_steps, fewest, totals = told["outline"]
            told["outline"] = GroupOutline(num_steps, fewest, [MicroStepTotals(*one) for one in totals])
        if told.get("failure"):
            told["failure"] = tuple(told["failure"])
        for name, kind in (("rejected", str), ("means", int)):
            told[name] = Counter({kind(key): count for key, count in told.get(name, {}).items()})
        return cls(**told)

    @classmethod
    def merge(cls, messages: Sequence[bytes]) -> bytes:
        """Encoded, of all whose messages these are."""
        told = [cls.decode(message) for message in messages]
        failures = [one.failure for one in told if one.failure is not None]
        ranks: dict[int, dict[int, int]] = {}
        for first, checksum, rank in (plan for one in told for plan in one.plans):
            of_checksum = ranks.setdefault(first, {})
            of_checksum[checksum] = min(rank, of_checksum.get(checksum, rank))
        for others in ranks.values():
            if len(others) > 1:
                named = "; ".join(f"rank {rank}" for rank in sorted(others.values()))
                failures.append((False, min(others.values()), DIFFERENT_PLANS.format(named)))
        outlines = [one.outline for one in told if one.outline is not None]
        orders: list[tuple[int, int, int]] = []
        for order, start, end in sorted((o for one in told for o in one.orders), key=lambda one: one[1]):
            if orders and orders[-1][0] == order and orders[-1][2] + 1 == start:
                start = orders.pop()[1]
            orders.append((order, start, end))
        return cls(
            failure=min(failures, default=None),
            # Groups that have made other plans meet only when each is known to agree.
            plans=[(first, *one) for first, plans in ranks.items() for one in plans.items()] if len(ranks) == 1 else (),
            outline=GroupOutline.merge(outlines) if outlines else None,
            orders=tuple(orders),
            exhausted=all(one.exhausted for one in told),
            rejected=sum((one.rejected for one in told), Counter()),
            overlong=sum(one.overlong for one in told),
            means=sum((one.means for one in told), Counter()),
            num_means=sum(one.num_means for one in told),
        ).encode()


NOTHING = Sums()


# ----------------------------------------------------------------------------------------------------------------------
# The ranks of the training, as the loader sees them.


class Ranks:
    """The data-parallel ranks: how they agree; one rank alone agrees with itself.

    process_group: of these ranks; None: the default group, if there is one. timeout_s: how long a rank may give no sign
    of life (seconds). group_size: ranks of a group (`Group`).
    group: the ranks of the group of this one.

    All ranks make the same calls in the same order, but for `check`, `progress` and `abort`; the calls of `reduce_step`
    have an order of their own. Metadata stay in a group (up to 41 bytes a sample and some hundred more); all ranks
    tell each other sums: nothing grows with tokens, pixels or, beyond a group, with ranks.
    Raises `CollectiveError` if the ranks do not meet.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, timeout_s: float = 30.0, group_size: int = GROUP_SIZE
    ):
        self.timeout_s = timeout_s
        self._lifeline = lifeline_of(process_group, timeout_s)
        self._training = self._lifeline.stream("training")
        self._group = Group(process_group, timeout_s, "planning", group_size)
        self._steps = Group(process_group, timeout_s, "agreements", group_size)
        self.rank, self.world_size = self._group.rank, self._group.world_size
        self.group = self._group.exchanges.group
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

    def compare_settings(self, settings: Mapping[str, object]) -> None:
        """Raise `CollectiveError` on every rank if the ranks' settings differ (I11); the message says in what."""
        group = self._open(self._group)
        compare(settings, lambda message: group.all_gather(message, "comparing settings"), rank=self.rank)

    def gather(self, metadata: RankMetadata, round_index: int) -> list[RankMetadata]:
        """The metadata of the ranks of the group, in rank order.

        Raises `CollectiveError` if a rank of the group failed or is missed; all others learn of it in `sum_up`.
        """
        if self.world_size == 1:
            return [metadata]
        answers = self._open(self._group).gather(encode(metadata), f"round {round_index}")
        messages = [decode(answer) for answer in answers]
        failures = [
            (message.failure == LEFT_EPOCH, rank, f"rank {rank} stopped: {message.failure}")
            for rank, message in zip(self.group, messages)
            if message.failure is not None
        ]
        if failures:
            self.sum_up(Sums(failure=min(failures)), round_index)
        return messages

    def sum_up(self, sums: Sums, round_index: int) -> Sums:
        """What all ranks tell. Raises `CollectiveError` on every rank if one has failed, or if those that should have
        made the same plan have made different ones (I6)."""
        phase = f"comparing the plans of round {round_index}"
        told = Sums.decode(self._open(self._group).reduce(sums.encode(), Sums.merge, phase))
        if told.failure is not None:
            has_left, _, reason = told.failure
            raise CollectiveError((self._lifeline.cause() if has_left else None) or reason)
        return told

    def swap(self, given: Mapping[int, bytes], sources: Sequence[int]) -> dict[int, bytes]:
        """Give each of these ranks of the group its bytes; returns what each of `sources`, which names this rank, gives
        to this one. All ranks call it."""
        return self._open(self._group).swap(given, sources, "redistributing samples")

    def reduce_step(self, message: bytes, merge: Merge, step_index: int) -> bytes:
        """`merge` of the messages of all ranks about an optimizer step before it begins. Another thread than the
        planning thread may call it: these messages have connections of their own."""
        phase = f"agreeing on optimizer step {step_index + 1} of the epoch"
        return self._open(self._steps).reduce(message, merge, phase)

    def stop(self, reason: str = LEFT_EPOCH) -> None:
        """Tell the others, in place of the next metadata, why this rank plans no further."""
        with contextlib.suppress(CollectiveError):  # all end
            self.gather(RankMetadata(failure=reason), -1)

    def abort(self, message: str) -> None:
        """Tell the others why this rank ends, whatever they are doing. The first such message of all ranks stands."""
        if not self._failed:
            self._failed = True
            self._lifeline.abort(f"rank {self.rank} left the training: {message}")

    def close(self) -> None:
        """Give connections, lifeline and threads back; nothing is called after it."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.world_size == 1:
            self._lifeline.close()
        self._lifeline.leave(self._training)
        failed = self._failed or self._group.is_busy or self._steps.is_busy
        self._steps.close(failed=failed)
        self._group.close(failed=failed)

    def _open(self, group: Group) -> Group:
        """Raises `CollectiveError` where this rank has left the training."""
        if self.world_size > 1 and (self._failed or self._is_closed):
            raise CollectiveError(self._lifeline.failure or f"rank {self.rank} has left the training.")
        return group
