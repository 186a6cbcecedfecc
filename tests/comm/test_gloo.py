"""Calls with a limit, and the connections between the ranks."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from typing import Any

import pytest

from odb_factory.comm import gloo
from odb_factory.errors import CollectiveError, ConfigError


def hang() -> bool:
    return threading.Event().wait(20)


def fail_later(waited_s: float) -> None:
    if waited_s > 0.2:
        raise CollectiveError("rank 1 stopped")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [(lambda: {}["x"], KeyError, "x"), (hang, TimeoutError, "0.3 s"), (hang, CollectiveError, "rank 1 stopped")],
    ids=["raises", "hangs", "a failure meanwhile"],
)
def test_a_call_does_not_hang(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    limit_s, check = (10.0, fail_later) if error is CollectiveError else (0.3, lambda waited_s: None)
    with pytest.raises(error, match=text):
        gloo.bounded(call, limit_s, check)
    assert gloo.bounded(lambda: None, 5) is None


@pytest.mark.parametrize(
    ("hard", "num_sockets", "raised"), [(4096, 10, None), (4096, 2000, 4096), (resource.RLIM_INFINITY, 9000, 9256)]
)
def test_open_files_are_allowed(
    monkeypatch: pytest.MonkeyPatch, hard: int, num_sockets: int, raised: int | None
) -> None:
    """Up to the hard limit, and only if a mesh needs it; beyond it one line names the number."""
    limits = {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.update({kind: pair}))
    monkeypatch.setattr(gloo.os, "listdir", lambda path: [])
    gloo.allow_open_files(num_sockets)
    assert limits == ({} if raised is None else {resource.RLIMIT_NOFILE: (raised, hard)})
    if hard == 4096:
        with pytest.raises(ConfigError, match="may have 4096, and needs 16640 to reach 16384 other ranks"):
            gloo.allow_open_files(16384)
