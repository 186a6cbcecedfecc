"""Calls that may never return, given a limit: every call of a key-value store goes through here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from odb_factory.errors import one_line

T = TypeVar("T")

CALL_LIMIT_S = 10.0
"""A healthy store answers within milliseconds."""


class _Call(Generic[T]):
    """A call that runs in a daemon thread, which is given up where it hangs."""

    def __init__(self, call: Callable[[], T]):
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), name="odb-bounded", daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._result.append(call())
        except BaseException as error:
            self._error = error

    def ends_within(self, limit_s: float) -> bool:
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result[0]


def bounded(call: Callable[[], T], limit_s: float) -> T:
    """Return `call()`, or raise what it raises; raise `TimeoutError` if it has not returned after `limit_s` seconds.

    torch's store clients wait without limit for a server that is frozen, whatever timeout they were given.
    """
    running = _Call(call)
    if not running.ends_within(limit_s):
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return running.result()


class StoreError(Exception):
    """The store does not answer, or its server has ended."""


class StoreSilent(StoreError):
    """The store does not answer in time."""


class BoundedStore:
    """A `torch.distributed.Store` whose calls end within `limit_s` seconds, whatever its server does.

    Every method raises `StoreError` where there is no answer in time, and at once while an earlier call hangs: a
    client makes one call at a time. If that call ends after all, the store is used again.
    """

    def __init__(self, open_store: Callable[[], dist.Store], limit_s: float = CALL_LIMIT_S):
        self.limit_s = limit_s
        self._hanging: _Call[Any] | None = None
        self._store = self._call(open_store)

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(key, value))

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` are there."""
        return self._call(lambda: self._store.check(list(keys)))

    def get(self, key: str) -> str | None:
        """The value of `key`, None if there is none yet; never waits for it."""
        return self._call(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def set_once(self, key: str, value: str) -> str:
        """Set `key` unless it has a value; returns the value it has then."""
        return self._call(lambda: self._store.compare_set(key, "", value).decode())

    def _call(self, call: Callable[[], T]) -> T:
        if self._hanging is not None and not self._hanging.ends_within(0):
            raise StoreSilent(f"no answer within {self.limit_s:g} s")
        running = _Call(call)
        if not running.ends_within(self.limit_s):
            self._hanging = running
            raise StoreSilent(f"no answer within {self.limit_s:g} s")
        try:
            return running.result()
        except Exception as error:
            raise StoreError(one_line(error)) from None
