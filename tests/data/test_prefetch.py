"""What runs ahead in the planning thread: how far, and that it ends; when the collating loader waits for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator
from typing import Any

import pytest

from odb_factory.data.loader import Pass
from odb_factory.data.workers import POLL_S, Prefetcher


def counting(begun: list[int], closed: list[bool], number: int = 100) -> Generator[int, None, None]:
    try:
        for k in range(number):
            begun.append(k)
            yield k
    finally:
        closed.append(True)


def take(items: Prefetcher) -> int:
    return items.poll(timeout=10)


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_no_item_is_begun_before_there_is_room_for_it(ahead: int) -> None:
    """What the planner holds for an optimizer step comes on top of those that are ready."""
    begun: list[int] = []
    closed: list[bool] = []
    items = Prefetcher(counting(begun, closed), ahead)
    assert not begun, "not before start"
    items.start()
    for k in range(4):
        time.sleep(3 * POLL_S)
        assert begun == list(range(k + ahead))
        assert take(items) == k
    items.close(10)
    assert closed and all(thread.name != "odb-planner" for thread in threading.enumerate())


def test_all_items_and_then_the_end() -> None:
    items = Prefetcher(counting([], [], 3), 2)
    items.start()
    assert [take(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(StopIteration):
        take(items)
    items.close(10)


def test_an_error_is_raised_behind_what_was_made_before_it() -> None:
    def failing() -> Generator[int, None, None]:
        yield 1
        raise OSError("gone")

    items = Prefetcher(failing(), 3)
    items.start()
    assert take(items) == 1
    with pytest.raises(OSError, match="gone"):
        take(items)
    items.close(10)


def test_a_source_that_is_left_at_once_has_begun_and_is_closed() -> None:
    """Other ranks wait for its first plan, or to be told: a generator that has not begun tells nobody."""
    begun: list[int] = []
    closed: list[bool] = []
    items = Prefetcher(counting(begun, closed), 1)
    items.stop()
    items.start()
    items.close(10)
    assert begun == [0] and closed == [True]


def test_nothing_is_there_before_it_has_begun() -> None:
    with pytest.raises(queue.Empty):
        Prefetcher(counting([], []), 1).poll()


class LatePlans:
    """Plans that have not been made yet; notes how long it was waited for them."""

    def __init__(self) -> None:
        self.waited: list[float | None] = []

    def poll(self, timeout: float | None = POLL_S) -> Any:
        self.waited.append(timeout)
        raise queue.Empty


def test_a_batch_that_is_ready_does_not_wait_for_a_plan() -> None:
    plans = LatePlans()
    current = Pass(planner=None, plans=plans, agreement=None)
    current.tasks.append(("micro-batch", ["sample"]))
    tasks = current.feed(num_workers=1)
    assert next(tasks) == ("micro-batch", ["sample"])
    assert next(tasks) is None and plans.waited == [0], "its batch may be ready, and torch asks before it gives it"
    current.in_flight.popleft()  # taken
    assert next(tasks) is None and plans.waited == [0, POLL_S], "nothing is ready: the processor is left to others"
