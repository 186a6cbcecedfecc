"""Calls that may never return, given a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

CHECK_S = 0.1


def bounded(call: Callable[[], T], limit_s: float, check: Callable[[float], None] = lambda waited_s: None) -> T:
    """Return `call()`, or raise what it raises; raise `TimeoutError` if it has not returned after `limit_s` seconds.

    check: called with the seconds waited while it has not returned; what it raises ends the wait. The call runs in a
    daemon thread, which is given up then: torch makes process groups and asks its stores without another limit than
    the patience of the group.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="odb-bounded", daemon=True)
    thread.start()
    started = time.monotonic()
    while thread.is_alive():
        thread.join(min(CHECK_S, limit_s))
        waited_s = time.monotonic() - started
        if thread.is_alive() and waited_s >= limit_s:
            raise TimeoutError(f"no answer within {limit_s:g} s")
        check(waited_s)
    if errors:
        raise errors[0]
    return results[0]
