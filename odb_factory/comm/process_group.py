"""`ProcessGroupCoordinator`: data-parallel ranks that agree over a gloo group of their own."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from odb_factory.comm.agreement import compare, name_ranks, ranks_alike
from odb_factory.comm.codec import Failure, decode, encode
from odb_factory.comm.coordinator import (
    DIFFERENT_PLANS,
    LEFT_EPOCH,
    CollectiveError,
    Coordinator,
    RankMetadata,
    SingleProcessCoordinator,
)
from odb_factory.comm.failure_monitor import FailureMonitor
from odb_factory.comm.gloo import all_gather, all_gather_small, all_to_all, open_group
from odb_factory.errors import DataError
from odb_factory.log import get_logger

logger = get_logger(__name__)


def make_coordinator(process_group: dist.ProcessGroup | None, timeout_s: float) -> Coordinator:
    """The coordinator of the data-parallel ranks in `process_group` (None: the default group, if there is one).

    Collective. timeout_s: how long a rank waits for the others (seconds).
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(process_group) == 1:
        return SingleProcessCoordinator()
    return ProcessGroupCoordinator(process_group, timeout_s)


class ProcessGroupCoordinator:
    """The `Coordinator` of several ranks.

    Its groups are made in the training thread of all ranks, in the same order. After `agree` the first is used by the
    planning thread alone, the second by the thread that calls `gather_step`. Metadata have 25 bytes a sample and some
    hundred more: nothing grows with tokens or pixels.
    Raises `CollectiveError` if the ranks do not meet.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, timeout_s: float):
        self.timeout_s = timeout_s
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._group = open_group(process_group, timeout_s)
        self._steps_group = open_group(process_group, timeout_s)
        self._count = itertools.count(1)
        self._failed = self._is_closed = False
        self._busy: set[dist.ProcessGroup] = set()
        self._monitor = FailureMonitor(_store_of(process_group, self._group), self.rank, self.world_size, timeout_s)

    def start(self) -> None:
        self._monitor.start()

    def check(self) -> None:
        self._monitor.check()

    def agree(self, settings: Mapping[str, object]) -> None:
        def gather(message: bytes) -> list[bytes]:
            return self._collective("comparing settings", partial(all_gather, message))

        compare(settings, gather, rank=self.rank)

    def all_gather(self, metadata: RankMetadata, round_index: int) -> list[RankMetadata]:
        answers = self._collective(f"round {round_index}", partial(all_gather, encode(metadata)))
        messages = [decode(answer) for answer in answers]
        failures = {rank: message.reason for rank, message in enumerate(messages) if isinstance(message, Failure)}
        if failures:
            rank = min(failures, key=lambda rank: (failures[rank] == LEFT_EPOCH, rank))  # a failure says more
            raise CollectiveError(f"rank {rank} stopped: {failures[rank]}")
        return [message for message in messages if isinstance(message, RankMetadata)]

    def confirm(self, checksum: int, round_index: int) -> None:
        answers = self.gather_plans(str(checksum).encode(), round_index)
        if len(set(answers)) > 1:
            raise CollectiveError(DIFFERENT_PLANS.format(ranks_alike(answers)))

    def gather_plans(self, outline: bytes, round_index: int) -> list[bytes]:
        return self._collective(f"comparing the plans of round {round_index}", partial(all_gather, outline))

    def all_to_all(self, buffers: Sequence[bytes]) -> list[bytes]:
        return self._collective("redistributing samples", partial(all_to_all, buffers))

    def gather_step(self, message: bytes, step_index: int) -> list[bytes]:
        phase, gather = f"agreeing on optimizer step {step_index + 1} of the epoch", partial(all_gather_small, message)
        return self._collective(phase, gather, self._steps_group)

    def leave_epoch(self) -> None:
        self.fail(LEFT_EPOCH)

    def fail(self, message: str) -> None:
        try:
            self._call("the end", partial(all_gather, encode(Failure(message))))
        except CollectiveError:
            pass  # the others have ended before this one

    def abort(self, message: str) -> None:
        self._abort(message)

    def _abort(self, message: str) -> list[int]:
        """Returns the ranks that show no sign of life."""
        if self._failed:
            return []
        self._failed = True
        self._monitor.start()  # it may fail before it has begun
        return self._monitor.abort(f"rank {self.rank} left the training: {message}")

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        failed = self._failed or self._monitor.failure is not None
        self._monitor.close()
        # Groups in use, or whose peers are gone, are left to the end of the process: giving them back may block.
        if not failed and not self._busy and dist.is_initialized():
            dist.destroy_process_group(self._steps_group)
            dist.destroy_process_group(self._group)

    def _collective(
        self, phase: str, call: Callable[..., list[bytes]], group: dist.ProcessGroup | None = None
    ) -> list[bytes]:
        """Run a collective; if it fails, tell the ranks that are not missing."""
        try:
            return self._call(phase, call, group)
        except CollectiveError as error:
            if not self._is_closed and not self._failed and self._monitor.failure is None:
                logger.error("%s", error)  # the training may be waiting in a collective of its own, and never ask
                silent = self._abort(str(error))
                if silent:
                    raise CollectiveError(f"{error} No sign of life from {name_ranks(silent)}.") from None
            raise

    def _call(
        self, phase: str, call: Callable[..., list[bytes]], group: dist.ProcessGroup | None = None
    ) -> list[bytes]:
        """Run a collective of `group` (None: that of the plans). Raises `CollectiveError` with the ranks that are
        missing."""
        if self._failed or self._is_closed:
            raise CollectiveError(self._monitor.failure or f"rank {self.rank} has left the training.")
        group, plans = group or self._group, group is None
        if plans:
            phase = f"{phase} (message {next(self._count)})"
        started = time.monotonic()
        self._busy.add(group)
        try:
            self._monitor.set_phase(phase, "plans" if plans else "steps")
            return call(group, check=self._monitor.check)
        except CollectiveError:
            raise  # another rank has failed, and says why
        except Exception as error:
            timed_out = time.monotonic() - started >= 0.9 * self.timeout_s
            limit_s = self.timeout_s if timed_out else None
            channel = "plans" if plans else "steps"
            raise CollectiveError(self._monitor.explain(phase, channel, timeout_s=limit_s, error=error)) from None
        finally:
            self._busy.discard(group)


def _store_of(process_group: dist.ProcessGroup | None, group: dist.ProcessGroup) -> Callable[[], dist.Store]:
    """How to open a store that all ranks reach: the process group's own under a prefix, where torch offers it.

    Otherwise rank 0 serves one on a free port. Collective over `group`.
    """
    connect_again = _own_store(process_group)
    if connect_again is not None:
        prefix = all_gather(uuid.uuid4().hex.encode(), group)[0].decode()
        # A connection of its own: a call that hangs must not block those of torch.
        return lambda: dist.PrefixStore(f"odb_factory/{prefix}", connect_again())
    timeout = timedelta(seconds=30)
    store, place = None, b"none"
    if dist.get_rank(process_group) == 0:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        place = json.dumps([host, store.port]).encode()
    host, port = json.loads(all_gather(place, group)[0])

    def connect() -> dist.Store:
        if store is not None:
            return store
        try:
            return dist.TCPStore(host, port, is_master=False, timeout=timeout)
        except Exception:
            raise DataError(f"port {port} of {host} cannot be reached from here; open it between the nodes") from None

    return connect


def _own_store(process_group: dist.ProcessGroup | None) -> Callable[[], dist.Store] | None:
    """Opens a second connection to the store of a process group; None if there is no such thing."""
    parent = process_group if process_group is not None else dist.group.WORLD
    try:
        assert parent is not None
        return getattr(parent.get_group_store(), "clone", None)
    except (AttributeError, RuntimeError):  # an older torch, or a backend without a store
        return None
