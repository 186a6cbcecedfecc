"""`ProcessGroupCoordinator`: data-parallel ranks that agree over a gloo group of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from odb_factory.comm.agreement import compare, ranks_alike
from odb_factory.comm.coordinator import (
    DIFFERENT_PLANS,
    LEFT_EPOCH,
    Coordinator,
    Failure,
    RankMetadata,
    SingleProcessCoordinator,
    decode,
    encode,
)
from odb_factory.comm.gloo import Group, world_size_of
from odb_factory.comm.lifeline import lifeline_of
from odb_factory.errors import CollectiveError


def make_coordinator(process_group: dist.ProcessGroup | None, timeout_s: float) -> Coordinator:
    """The coordinator of the data-parallel ranks in `process_group` (None: the default group, if there is one).

    Collective. timeout_s: how long a rank may give no sign of life (seconds).
    """
    if world_size_of(process_group) == 1:
        return SingleProcessCoordinator()
    return ProcessGroupCoordinator(process_group, timeout_s)


class ProcessGroupCoordinator:
    """The `Coordinator` of several ranks.

    Its groups are made in the training thread of all ranks, in the same order. After `agree` the first is used by the
    planning thread alone, the second by the thread that calls `gather_step`. Metadata have 29 bytes a sample and some
    hundred more: nothing grows with tokens or pixels.
    Raises `CollectiveError` if the ranks do not meet.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float):
        self.timeout_s = timeout_s
        self._lifeline = lifeline_of(process_group, timeout_s)
        self._training = self._lifeline.stream("training")
        self._group = Group(process_group, timeout_s, "planning")
        self._steps = Group(process_group, timeout_s, "agreements")
        self.rank, self.world_size = self._group.rank, self._group.world_size
        self._failed = self._is_closed = False

    def start(self) -> None: ...

    def check(self) -> None:
        self._lifeline.check()

    def progress(self, phase: str) -> None:
        self._lifeline.enter(self._training, phase)

    def agree(self, settings: Mapping[str, object]) -> None:
        compare(settings, lambda message: self._all_gather(message, "comparing settings"), rank=self.rank)

    def all_gather(self, metadata: RankMetadata, round_index: int) -> list[RankMetadata]:
        messages = [decode(answer) for answer in self._all_gather(encode(metadata), f"round {round_index}")]
        failures = {rank: message.reason for rank, message in enumerate(messages) if isinstance(message, Failure)}
        if failures:
            rank = min(failures, key=lambda rank: (failures[rank] == LEFT_EPOCH, rank))  # a failure says more
            cause = self._lifeline.cause() if failures[rank] == LEFT_EPOCH else None
            raise CollectiveError(cause or f"rank {rank} stopped: {failures[rank]}")
        return [message for message in messages if isinstance(message, RankMetadata)]

    def confirm(self, checksum: int, round_index: int) -> None:
        answers = self.gather_plans(str(checksum).encode(), round_index)
        if len(set(answers)) > 1:
            raise CollectiveError(DIFFERENT_PLANS.format(ranks_alike(answers)))

    def gather_plans(self, outline: bytes, round_index: int) -> list[bytes]:
        return self._all_gather(outline, f"comparing the plans of round {round_index}")

    def all_to_all(self, buffers: Sequence[bytes]) -> list[bytes]:
        self._check_not_left()
        return self._group.all_to_all(buffers, "redistributing samples")

    def gather_step(self, message: bytes, step_index: int) -> list[bytes]:
        self._check_not_left()
        return self._steps.all_gather(message, f"agreeing on optimizer step {step_index + 1} of the epoch")

    def leave_epoch(self) -> None:
        self.fail(LEFT_EPOCH)

    def fail(self, message: str) -> None:
        try:
            self._all_gather(encode(Failure(message)), "the end")
        except CollectiveError:
            pass  # the others have ended before this one

    def abort(self, message: str) -> None:
        if not self._failed:
            self._failed = True
            self._lifeline.fail(f"rank {self.rank} left the training: {message}")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._lifeline.leave(self._training)
            failed = self._failed or self._group.is_busy or self._steps.is_busy
            self._steps.close(failed=failed)
            self._group.close(failed=failed)

    def _all_gather(self, message: bytes, phase: str) -> list[bytes]:
        self._check_not_left()
        return self._group.all_gather(message, phase)

    def _check_not_left(self) -> None:
        if self._failed or self._is_closed:
            raise CollectiveError(self._lifeline.failure or f"rank {self.rank} has left the training.")
