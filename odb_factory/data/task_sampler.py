"""Between the planner and the collating workers: one pass over an epoch, and the sampler that hands its tasks on."""

from __future__ import annotations

import itertools
import queue
from collections import deque
from collections.abc import Iterator

from odb_factory.data.epoch import EpochPlanner
from odb_factory.data.plan_process import PlanProcess
from odb_factory.data.prefetch import POLL_S, BackgroundPrefetcher, InlinePrefetcher
from odb_factory.data.samples import Task
from odb_factory.data.step_agreement import StepAgreement


class Pass:
    """One pass over an epoch: its planner, what is planned and not yet handed on, its batches, how it failed.

    plans: the planner's lists of tasks, made ahead. agreement: of all ranks on its optimizer steps. process: where
    planners compute, if not here.
    in_flight: tasks handed on whose batches have not been taken yet; keeps_tasks: they are in `handed_on`, in order,
    until somebody takes them out. epoch_steps: optimizer steps of the epoch as its first plan says.
    """

    def __init__(
        self,
        planner: EpochPlanner,
        plans: BackgroundPrefetcher | InlinePrefetcher,
        agreement: StepAgreement,
        *,
        process: PlanProcess | None = None,
        keeps_tasks: bool = False,
    ):
        self.planner, self.plans, self.agreement = planner, plans, agreement
        self.process, self.keeps_tasks = process, keeps_tasks
        self.tasks: deque[Task] = deque()
        self.handed_on: deque[Task] = deque()
        self.in_flight = 0
        self.batches: Iterator | None = None
        self.error: Exception | None = None
        self.epoch_steps = 0
        self.taken = False

    def stop(self) -> None:
        """Let the threads end when they can."""
        self.plans.stop()
        self.agreement.stop()

    def close(self, timeout_s: float) -> None:
        self.stop()
        self.plans.close(timeout_s)
        self.agreement.close(timeout_s)
        if self.process is not None:
            self.process.close()
        self.batches = None
        self.tasks.clear()
        self.handed_on.clear()

    def hand_on(self) -> Task:
        """The next task, to be collated."""
        task = self.tasks.popleft()
        self.in_flight += 1
        if self.keeps_tasks:
            self.handed_on.append(task)
        return task


class TaskSampler:
    """The sampler of the collating loader: planned tasks, and None while there is none yet.

    It waits a moment for a plan only if no batch is in flight, for torch asks here before it hands over one that is
    ready. torch hands the tasks to its workers in turn; None comes once for each, so that a task always goes to the
    same worker, whenever its plan was ready, and meets the same random numbers there (I6).
    """

    current: Pass

    def __init__(self, num_workers: int):
        self._num_workers = max(num_workers, 1)

    def __iter__(self) -> Iterator[Task | None]:
        current = self.current
        while True:
            while current.tasks:
                yield current.hand_on()
            try:
                current.tasks.extend(current.plans.poll(0 if current.in_flight else POLL_S))
            except queue.Empty:
                yield from itertools.repeat(None, self._num_workers)
            except StopIteration:
                return
            except Exception as error:
                # Not through torch's frames, which would keep its workers alive with the traceback.
                current.error = error
                return
