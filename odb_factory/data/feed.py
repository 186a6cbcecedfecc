"""Between the planner and the collating workers: one pass over an epoch, and the sampler that hands its tasks on."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator

from odb_factory.data.ahead import Ahead, Direct
from odb_factory.data.rounds import EpochRounds, Task


class Pass:
    """One pass over an epoch: its rounds, the tasks planned and not yet handed on, its batches, how it failed."""

    def __init__(self, plan: EpochRounds, rounds: Ahead | Direct):
        self.plan, self.rounds = plan, rounds
        self.tasks: deque[Task] = deque()
        self.batches: Iterator | None = None
        self.error: Exception | None = None
        self.epoch_steps = 0
        self.taken = False

    def close(self, timeout_s: float) -> None:
        self.rounds.close(timeout_s)
        self.batches = None
        self.tasks.clear()


class TaskFeed:
    """The sampler of the collating loader: planned tasks, and None while there is none yet."""

    current: Pass

    def __iter__(self) -> Iterator[Task | None]:
        current = self.current
        while True:
            while current.tasks:
                yield current.tasks.popleft()
            try:
                current.tasks.extend(current.rounds.poll())
            except queue.Empty:
                yield None
            except StopIteration:
                return
            except Exception as error:
                # Not through torch's frames, which would keep its workers alive with the traceback.
                current.error = error
                return
