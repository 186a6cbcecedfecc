"""Run a generator ahead of its consumer, in one background thread that is always joined."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import Any

POLL_S = 0.02


class BackgroundPrefetcher:
    """The items of `source`, produced by a daemon thread so many ahead; its exception is raised in `poll`.

    An item is begun when there is room for it: what the source holds for one that waits is not held beside `ahead`.
    The thread runs from `start` on, so that a caller can fork what it needs before.
    """

    def __init__(self, source: Generator[Any, None, None], ahead: int = 1):
        self._items: queue.Queue = queue.Queue()
        self._room = threading.Semaphore(ahead - 1)  # beside the first
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(source,), name="odb-planner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poll(self, timeout: float | None = POLL_S) -> Any:
        """The next item. Raises `queue.Empty` if there is none within `timeout` seconds, StopIteration at the end."""
        if self._thread.ident is None:
            raise queue.Empty
        item, error = self._items.get(timeout=timeout)
        self._room.release()
        if error is None:
            return item
        try:
            raise error
        finally:
            del error  # a frame that holds the error it raised would keep both alive, and the workers with them

    def stop(self) -> None:
        """Let the thread end when it can."""
        self._stop.set()

    def close(self, timeout_s: float) -> None:
        """Close the source and end the thread, within `timeout_s` if it is stuck in a worker or a peer."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self, source: Generator[Any, None, None]) -> None:
        try:
            # A source that has not begun could not tell the other ranks, which wait for its first item, that it leaves.
            self._items.put((next(source), None))
            while self._has_room():
                self._items.put((next(source), None))
            source.close()
        except BaseException as error:
            if not self._stop.is_set():  # nobody would take it, and its frames hold the workers
                self._items.put((None, error))

    def _has_room(self) -> bool:
        """Wait for it; False if the thread is to end."""
        while not self._stop.is_set():
            if self._room.acquire(timeout=POLL_S):
                return True
        return False


class InlinePrefetcher:
    """The same interface in the caller's own thread, for a loader without worker processes."""

    def __init__(self, source: Generator[Any, None, None]):
        self._source = source

    def start(self) -> None:
        pass

    def poll(self, timeout: float | None = POLL_S) -> Any:
        return next(self._source)

    def stop(self) -> None:
        pass

    def close(self, timeout_s: float) -> None:
        self._source.close()
