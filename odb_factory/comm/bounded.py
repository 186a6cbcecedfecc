"""Calls that may never return, given a limit: every call of a key-value store goes through here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from odb_factory.errors import one_line

T = TypeVar("T")

CALL_LIMIT_S = 10.0
"""A healthy store answers within milliseconds."""


def bounded(call: Callable[[], T], limit_s: float) -> T:
    """Return `call()`, or raise what it raises; raise `TimeoutError` if it has not returned after `limit_s` seconds.

    The call runs in a daemon thread, which is given up where it hangs: torch's store clients wait without limit for a
    server that is frozen, whatever timeout they were given.
    """
    result: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="odb-bounded", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors.pop()
    if not result:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return result.pop()


class StoreError(Exception):
    """The store does not answer, or its server has ended."""


class BoundedStore:
    """A `torch.distributed.Store` whose calls end within `limit_s` seconds, whatever its server does.

    A store that failed once is not asked again. Every method raises `StoreError` from then on.
    """

    def __init__(self, open_store: Callable[[], dist.Store], limit_s: float = CALL_LIMIT_S):
        self.limit_s = limit_s
        self._failure: str | None = None
        self._store: dist.Store | None = None
        self._store = self._call(open_store)

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._opened.set(key, value))

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` are there."""
        return self._call(lambda: self._opened.check(list(keys)))

    def get(self, key: str) -> str | None:
        """The value of `key`, None if there is none yet; never waits for it."""
        return self._call(lambda: self._opened.get(key).decode() if self._opened.check([key]) else None)

    def set_once(self, key: str, value: str) -> str:
        """Set `key` unless it has a value; returns the value it has then."""
        return self._call(lambda: self._opened.compare_set(key, "", value).decode())

    @property
    def _opened(self) -> dist.Store:
        assert self._store is not None
        return self._store

    def _call(self, call: Callable[[], T]) -> T:
        if self._failure is not None:
            raise StoreError(self._failure)
        try:
            return bounded(call, self.limit_s)
        except Exception as error:
            self._failure = one_line(error)
            raise StoreError(self._failure) from None
