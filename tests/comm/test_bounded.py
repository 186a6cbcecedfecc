"""A call that hangs is given up."""

from __future__ import annotations

import threading

import pytest

from odb_factory.comm.gloo import bounded
from odb_factory.errors import CollectiveError


def test_a_call_that_ends_in_time() -> None:
    assert bounded(lambda: 3, 5) == 3
    assert bounded(lambda: None, 5) is None
    with pytest.raises(KeyError):
        bounded(lambda: {}["x"], 5)


def test_a_call_that_hangs() -> None:
    with pytest.raises(TimeoutError, match="no answer within 0.1 s"):
        bounded(lambda: threading.Event().wait(20), 0.1)


def test_a_failure_ends_the_wait() -> None:
    def check(waited_s: float) -> None:
        if waited_s > 0.2:
            raise CollectiveError("rank 1 stopped")

    with pytest.raises(CollectiveError, match="rank 1 stopped"):
        bounded(lambda: threading.Event().wait(20), 10, check)
