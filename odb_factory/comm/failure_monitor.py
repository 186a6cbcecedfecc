"""Which rank failed and why: reasons, progress and signs of life of all ranks in a key-value store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from odb_factory.comm.agreement import name_ranks
from odb_factory.comm.bounded import BoundedStore, StoreError, StoreSilent
from odb_factory.comm.coordinator import CollectiveError
from odb_factory.log import get_logger

logger = get_logger(__name__)

WATCH_INTERVAL_S = 0.5
RANKS_PER_INTERVAL = 256
"""With more ranks each looks less often, so that the store is not asked more often."""
ABORT_ACK_TIMEOUT_S = 5.0
"""A failing rank waits this long, at most, until the others have read why."""
SHUTDOWN_TIMEOUT_S = 2.0
"""Rank 0 waits this long, at most, until no other rank asks the store, which may end with it."""
LEAST_SILENCE_S = 10.0
"""A busy machine may be silent for some seconds."""
_FAILURE = "failure"
LOST = (
    "no sign of life from {} for {:g} s: it is frozen or lost, and the training cannot go on without it; look for its "
    "own last message, or raise exchange_timeout_s if it was only slow."
)


class FailureMonitor:
    """Tells every rank of the first failure of any; a thread looks for one twice a second.

    Each rank also gives a sign of life, and looks for that of the rank before it: one that is frozen while the others
    wait for it in a collective of the training, where no planning timeout runs, is found out all the same.
    The monitor never ends the process: `check` raises in the thread that calls it. timeout_s: how long a rank, or the
    store, may be silent (seconds, in which this process itself has run; 10 at least).

        >>> monitor = FailureMonitor(lambda: dist.TCPStore(...), rank=0, world_size=2, timeout_s=600)
        >>> monitor.start()
        >>> monitor.abort("rank 0 left the training: ValueError: ...")  # rank 1: monitor.check() raises CollectiveError
    """

    def __init__(self, open_store: Callable[[], dist.Store], rank: int, world_size: int, timeout_s: float):
        self.rank, self.world_size, self.timeout_s = rank, world_size, max(timeout_s, LEAST_SILENCE_S)
        self._open_store = open_store
        self._store: BoundedStore | None = None
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._aborted = self._shut_down = False
        self._watcher: threading.Thread | None = None

    def start(self) -> None:
        """Open the store and start to watch."""
        if self._watcher is not None:
            return
        try:
            self._store = BoundedStore(self._open_store)
        except StoreError as error:
            logger.warning(
                "rank %d cannot reach the process group's store (%s): why another rank fails will not be told here",
                self.rank,
                error,
            )
        self._watcher = threading.Thread(target=self._watch, name="odb-failure-monitor", daemon=True)
        self._watcher.start()

    @property
    def failure(self) -> str | None:
        """Why another rank has failed, as far as this one has been told."""
        return self._failure

    def check(self) -> None:
        """Raise `CollectiveError` if another rank has failed."""
        if self._failure is not None:
            raise CollectiveError(self._failure)

    def set_phase(self, phase: str, channel: str) -> None:
        """Say what this rank is about to do, so that the others can name it if it is missed. channel: of messages."""
        if self._store is not None:
            try:
                self._store.set(f"{channel}/{self.rank}", phase)
            except StoreError:
                pass  # the collective that follows finds out who is missing

    def abort(self, message: str) -> list[int]:
        """Tell the others why this rank ends, and wait a little until they have read it.

        Returns the ranks that show no sign of life: they are frozen or have ended.
        """
        store = self._store
        if self._aborted or self._shut_down or store is None:
            return []
        self._aborted = True
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        try:
            first = store.set_once(_FAILURE, message)
            if first != message:
                self._note(first)
            _await(store, [f"ack/{rank}" for rank in others], ABORT_ACK_TIMEOUT_S)
            silent = [rank for rank in others if not store.has([f"ack/{rank}"])]
        except StoreError:
            logger.error(
                "no sign of life from rank 0 or its launcher, which serve the store; look for their last message"
            )
            return []  # the others may never read it; they have their own timeouts
        if silent and first == message:  # else who failed first has been told, and may well have ended
            logger.error(
                "no sign of life from %s: it is frozen, or has ended before rank %d; look for its own last message",
                name_ranks(silent),
                self.rank,
            )
        return silent

    def explain(self, phase: str, channel: str, *, timeout_s: float | None, error: Exception) -> str:
        """Why a collective in `phase` has failed: the failure of another rank, or who is missing and where it is.

        timeout_s: the limit that has passed; None if the collective failed before.
        """
        cause = " ".join(str(error).split())[:200]
        behind = "another rank"
        if self._store is not None:
            try:
                failure = self._store.get(_FAILURE)
                if failure is not None:
                    return failure
                phases = [self._store.get(f"{channel}/{rank}") for rank in range(self.world_size)]
                missing = [(rank, reached) for rank, reached in enumerate(phases) if reached != phase]
                behind = ", ".join(f"rank {rank} (last seen in: {reached or 'nothing'})" for rank, reached in missing)
                behind = behind or "another rank"
            except StoreError as silence:
                behind = (
                    f"a rank that is frozen or lost, perhaps rank 0: the process group's store is silent ({silence})"
                )
        if timeout_s is None:
            return f"rank {self.rank} lost {behind} in {phase}; look for its own last message ({cause})."
        return (
            f"rank {self.rank} had no answer in {phase} within {timeout_s:g} s from {behind}; look for its own last "
            f"message, or raise exchange_timeout_s if it was only slow ({cause})."
        )

    def close(self) -> None:
        """End the thread; on rank 0 after the others have stopped asking the store."""
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join(ABORT_ACK_TIMEOUT_S)
            if not self._aborted and self._failure is None:
                self._shutdown()
        self._store = None

    def _shutdown(self) -> None:
        """Ask the store no more: torch prints a backtrace for a rank that asks once its server has ended."""
        if self._shut_down or self._store is None:
            return
        self._shut_down = True
        try:
            self._store.set(f"ack/{self.rank}", "")  # a failing rank need not wait for this one
            self._store.set(f"done/{self.rank}", "")
            if self.rank == 0:
                _await(self._store, [f"done/{rank}" for rank in range(1, self.world_size)], SHUTDOWN_TIMEOUT_S)
        except StoreError:
            pass  # its server has ended

    def _watch(self) -> None:
        interval_s = WATCH_INTERVAL_S * max(1.0, self.world_size / RANKS_PER_INTERVAL)
        watched = (self.rank - 1) % self.world_size
        beats, silent_s = 0, 0.0
        seen: str | None = None
        now: str | None
        while not self._closed.wait(interval_s) and self._store is not None:
            beats += 1
            try:
                found = self._look(self._store, beats, watched)
                if found is None:
                    return
                name, now = f"rank {watched}", found
            except StoreSilent:
                name, now = "the process that serves the process group's store (rank 0 or its launcher)", seen
            except StoreError:
                return  # its server has ended, with or without rank 0; collectives fail if it matters
            # Counted in looks, not by a clock: a process that was suspended itself does not blame the others.
            silent_s = silent_s + interval_s if now == seen else 0.0
            seen = now
            if silent_s >= self.timeout_s:
                self._report_lost(name)
                return

    def _look(self, store: BoundedStore, beats: int, watched: int) -> str | None:
        """Give a sign of life; the last sign of rank `watched`. None: nothing is left to be looked for."""
        failure = store.get(_FAILURE)
        if failure is not None:
            self._note(failure)
            store.set(f"ack/{self.rank}", "")
            return None
        if self.rank != 0 and store.has(["done/0"]):
            self._shutdown()
            return None
        store.set(f"beat/{self.rank}", str(beats))
        if store.has([f"done/{watched}"]):
            return f"done {beats}"
        return store.get(f"beat/{watched}") or "none yet"

    def _report_lost(self, name: str) -> None:
        lost = LOST.format(name, self.timeout_s)
        self._note(lost)
        try:
            if self._store is not None:
                self._store.set_once(_FAILURE, lost)
                self._store.set(f"ack/{self.rank}", "")
        except StoreError:
            pass  # the others find out as this one did

    def _note(self, failure: str) -> None:
        """Keep and log, once, why another rank has failed; the next call of `check` raises."""
        with self._lock:
            if self._failure is None and not failure.startswith(f"rank {self.rank} "):
                self._failure = failure
                logger.error("%s", failure)


def _await(store: BoundedStore, keys: Sequence[str], limit_s: float) -> None:
    """Wait until all keys are there, for `limit_s` seconds at most."""
    until = time.monotonic() + limit_s
    while keys and not store.has(keys) and time.monotonic() < until:
        time.sleep(0.01)
