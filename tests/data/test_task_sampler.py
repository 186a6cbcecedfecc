"""What the collating loader is handed, and when it is made to wait."""

from __future__ import annotations

import queue
from typing import Any

from odb_factory.data.workers import POLL_S, Pass, TaskSampler


class LatePlans:
    """Plans that have not been made yet; notes how long it was waited for them."""

    def __init__(self) -> None:
        self.waited: list[float | None] = []

    def poll(self, timeout: float | None = POLL_S) -> Any:
        self.waited.append(timeout)
        raise queue.Empty


def test_a_batch_that_is_ready_does_not_wait_for_a_plan() -> None:
    plans = LatePlans()
    feed = TaskSampler(num_workers=1)
    current = feed.current = Pass(planner=None, plans=plans, agreement=None)
    current.tasks.append(("micro-batch", ["sample"]))
    tasks = iter(feed)
    assert next(tasks) == ("micro-batch", ["sample"])
    assert next(tasks) is None and plans.waited == [0], "its batch may be ready, and torch asks before it gives it"
    current.in_flight -= 1  # taken
    assert next(tasks) is None and plans.waited == [0, POLL_S], "nothing is ready: the processor is left to others"
