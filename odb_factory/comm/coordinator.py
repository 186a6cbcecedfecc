"""What ranks tell each other, and the interface by which they do: `Coordinator`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from odb_factory.comm.lifeline import Lifeline
from odb_factory.planning import BufferMetadata, CostModel, Limits

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
    model: the cost model that this rank proposes; that of rank 0 is taken.
    limits: to which it has lowered its budgets, if it has; the least of all ranks are taken.
    """

    buffer: BufferMetadata
    rejected: Counter[str]
    overlong: int = 0
    order: int = 0
    model: CostModel = CostModel()
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
