"""Run a generator ahead of its consumer, in one background thread that is always joined."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import Any

POLL_S = 0.02


class BackgroundPrefetcher:
    """The items of `source`, produced by a daemon thread so many ahead; its exception is raised in `poll`.

    The thread runs from `start` on, so that a caller can fork what it needs before.
    """

    def __init__(self, source: Generator[Any, None, None], ahead: int = 1):
        self._items: queue.Queue = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(source,), name="odb-planner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poll(self, timeout: float | None = POLL_S) -> Any:
        """The next item. Raises `queue.Empty` if there is none within `timeout` seconds, StopIteration at the end."""
        if self._thread.ident is None:
            raise queue.Empty
        item, error = self._items.get(timeout=timeout)
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
            for item in source:
                if not self._put((item, None)):
                    source.close()
                    return
            self._put((None, StopIteration()))
        except BaseException as error:
            self._put((None, error))

    def _put(self, pair: tuple[Any, BaseException | None]) -> bool:
        while not self._stop.is_set():
            try:
                self._items.put(pair, timeout=POLL_S)
                return True
            except queue.Full:
                continue
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
