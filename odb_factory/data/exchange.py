"""How the ranks of a training agree: one small message from each to all, once a round.

The messages travel over a gloo group of their own, so they never meet the collectives of the
training. Beside it runs a small key-value store in which each rank leaves its last word: when a
rank is missed, the others can say who it is and what it was doing.

The group is made in the main thread of all ranks, in the same order; after that it is used by the
planning thread alone. The store may be used by any thread.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from odb_factory.data.agreement import AgreedError, Report
from odb_factory.data.wire import all_gather, all_to_all, decode, encode
from odb_factory.log import get_logger

logger = get_logger(__name__)

WATCH_S = 0.5
LEFT = "it left the epoch before its end; all ranks must take the same steps."
FAREWELL_S = 5.0
"""A failing rank waits this long, at most, for the others to have read why."""
PART_S = 2.0
"""Rank 0 waits this long, at most, until no other rank asks the store that it serves."""
GRACE_S = 600.0
"""A rank that is still at it this long after another has failed is ended: time enough to finish a checkpoint."""


class GroupExchange:
    """The `Exchange` of all ranks of the default process group (see `odb_factory.data.agreement`).

    timeout_s: how long a rank waits for the others in a round. A message has 19 bytes a sample of the window and some
    hundred more: nothing grows with tokens or pixels.
    """

    def __init__(self, timeout_s: float, process_group: dist.ProcessGroup | None = None):
        self.timeout_s = timeout_s
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._group = dist.new_group(
            dist.get_process_group_ranks(process_group),
            backend="gloo",
            timeout=timedelta(seconds=timeout_s),
            use_local_synchronization=process_group is not None,
            group_desc="odb",
        )
        self._store = self._open_store()
        self._count = 0
        self._failed = False
        self._heard: str | None = None
        self._hearing = threading.Lock()
        self._closed, self._parted = threading.Event(), False
        self._watcher: threading.Thread | None = None

    def start(self) -> None:
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="odb-watch", daemon=True)
            self._watcher.start()

    def check(self) -> None:
        if self._heard is not None:
            raise AgreedError(self._heard)

    def __call__(self, report: Report, round_index: int) -> list[Report]:
        """The reports of all ranks, in rank order. Raises `AgreedError` if one failed, left or is missing."""
        answers = self._or_farewell(lambda: self._gather(encode(report), f"round {round_index}"))
        stopped = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, str)}
        if stopped:
            rank = min(stopped, key=lambda rank: (stopped[rank] == LEFT, rank))  # a failure says more
            raise AgreedError(f"rank {rank} stopped: {stopped[rank]}")
        return answers

    def trade(self, parcels: list[bytes]) -> list[bytes]:
        """The parcels of all ranks for this one, in rank order. Raises `AgreedError` if a rank is missing."""
        return self._or_farewell(lambda: self._together("handing over samples", all_to_all, parcels))

    def leave(self) -> None:
        self._say_last(LEFT)

    def fail(self, message: str) -> None:
        self._say_last(message)

    def farewell(self, message: str) -> None:
        """Say why this rank ends outside of planning (main thread); wait a little until the others have read it.

        The first farewell of all ranks stands. Ranks that show no sign of having read it are named.
        """
        store = self._store
        if self._failed or self._parted or store is None:
            return
        self._failed = True
        words = f"rank {self.rank} left the training: {message}"
        others = {rank: f"heard/{rank}" for rank in range(self.world_size) if rank != self.rank}
        try:
            first = store.compare_set("left", "", words).decode()
            if first != words:
                self._hear(first)
            _await(store, list(others.values()), FAREWELL_S)
            silent = [f"rank {rank}" for rank, key in others.items() if not store.check([key])]
        except RuntimeError:
            silent = ["rank 0"]  # it serves the store
        if silent:
            logger.error(
                "no sign of life from %s: it may have ended before rank %d; look for its own last message",
                ", ".join(silent),
                self.rank,
            )

    def close(self) -> None:
        """Give the group back; the planning thread has ended."""
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()
            if self._store is not None and not self._failed and self._heard is None:
                self._part()
        if self._group is not None and not self._failed and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = self._store = None

    def _part(self) -> None:
        """Ask the store no more; torch prints a backtrace for a rank that asks once rank 0 has ended."""
        if self._parted:
            return
        self._parted = True
        try:
            self._store.set(f"heard/{self.rank}", "")  # a failing rank need not wait for this one
            self._store.set(f"parted/{self.rank}", "")
            if self.rank == 0:
                _await(self._store, [f"parted/{rank}" for rank in range(1, self.world_size)], PART_S)
        except RuntimeError:
            pass  # rank 0 has ended

    def _open_store(self) -> dist.TCPStore:
        """A store that rank 0 serves on a free port of the address where the others have found it before."""
        place: list[Any] = [None]
        timeout = timedelta(seconds=min(self.timeout_s, 300))
        if self.rank == 0:
            host = os.environ.get("MASTER_ADDR") or socket.gethostname()
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
            place = [(host, store.port)]
        dist.broadcast_object_list(place, group_src=0, group=self._group)
        return store if self.rank == 0 else dist.TCPStore(*place[0], is_master=False, timeout=timeout)

    def _gather(self, message: bytes, word: str) -> list[Report | str]:
        """Everybody's message, decoded."""
        return [decode(answer) for answer in self._together(word, all_gather, message)]

    def _together(
        self, word: str, collective: Callable[[Any, dist.ProcessGroup], list[bytes]], given: Any
    ) -> list[bytes]:
        """Call a collective of all ranks with what this one gives. Raises `AgreedError` with those that are missing."""
        group, store = self._group, self._store
        if self._failed or group is None:
            raise AgreedError(self._heard or f"rank {self.rank} has left the exchange.")
        self._count += 1
        word = f"{word} (message {self._count})"
        started = time.monotonic()
        try:
            store.set(f"word/{self.rank}", word)
            return collective(given, group)
        except Exception as error:
            timed_out = time.monotonic() - started >= 0.9 * self.timeout_s
            raise AgreedError(self._missing(store, word, timed_out, error)) from None

    def _or_farewell(self, collective: Callable[[], Any]) -> Any:
        try:
            return collective()
        except AgreedError as error:
            if not self._closed.is_set():
                logger.error("%s", error)  # the training may be waiting in a collective of its own, and never ask
                self.farewell(str(error))
            raise

    def _say_last(self, message: str) -> None:
        try:
            self._gather(encode(message), "the end")
        except AgreedError:
            pass  # the others have ended before this one

    def _missing(self, store: dist.TCPStore, word: str, timed_out: bool, error: Exception) -> str:
        """Who did not answer, and what it said last."""
        try:
            if store.check(["left"]):
                return store.get("left").decode()
            keys = {rank: f"word/{rank}" for rank in range(self.world_size)}
            words = {r: store.get(key).decode() if store.check([key]) else "" for r, key in keys.items()}
        except RuntimeError:
            return f"rank {self.rank} lost rank 0, which has ended, in {word}; look for its own last message."
        behind = [f"rank {r} (last word: {said or 'none'})" for r, said in words.items() if said != word]
        names = ", ".join(behind) or "a rank that has ended"
        cause = " ".join(str(error).split())[:200]
        if not timed_out:
            return f"rank {self.rank} lost {names} in {word}; look for its own last message ({cause})"
        return (
            f"rank {self.rank} had no answer in {word} within {self.timeout_s:g} s from {names}; look for its own last "
            f"message, or raise exchange_timeout_s if it was only slow ({cause})"
        )

    def _watch(self) -> None:
        """Read the farewell of a failing rank, whatever this rank is waiting in."""
        while not self._closed.wait(WATCH_S):
            try:
                if not self._store.check(["left"]):
                    if self.rank != 0 and self._store.check(["parted/0"]):
                        return self._part()
                    continue
                self._hear(self._store.get("left").decode())
                self._store.set(f"heard/{self.rank}", "")
            except RuntimeError:
                return None
            if not self._closed.wait(GRACE_S):
                logger.error("rank %d is ended: for %g s it has been waiting for ranks that left", self.rank, GRACE_S)
                os._exit(1)

    def _hear(self, words: str) -> None:
        """Note and log, once, why another rank has left."""
        with self._hearing:
            if self._heard is None and not words.startswith(f"rank {self.rank} "):
                self._heard = words
                logger.error("%s", words)


def _await(store: dist.TCPStore, keys: list[str], limit_s: float) -> None:
    """Wait until all keys are there, for `limit_s` seconds at most."""
    until = time.monotonic() + limit_s
    while not store.check(keys) and time.monotonic() < until:
        time.sleep(WATCH_S / 50)
