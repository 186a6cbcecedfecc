"""How far a run with filled optimizer steps has come, and how many there will be: estimates, and the schedule by them.

With kept optimizer steps all of this is known ahead, and nothing of it is used.
"""

from __future__ import annotations

import math
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from odb_factory.config import ODBConfig
from odb_factory.data.loader import ODBLoader
from odb_factory.data.samples import OptimizerStep
from odb_factory.log import get_logger
from odb_factory.training.schedule import ScheduleClock, follow_clock, learning_rate_factor, rescale_learning_rate

logger = get_logger(__name__)


class FillSchedule:
    """epochs: what the run shall do; None if it counts `max_steps`. is_shuffled: the order of samples is random."""

    def __init__(
        self,
        loader: ODBLoader,
        config: ODBConfig,
        epochs: float | None,
        max_steps: int | None,
        accumulation: int,
        is_shuffled: bool,
    ):
        self.loader, self.config, self.epochs, self.max_steps = loader, config, epochs, max_steps
        self.accumulation, self.is_shuffled = accumulation, is_shuffled
        self.clock: ScheduleClock | None = None
        self._lr_factor: float | None = None
        self._expected = 0

    @property
    def most_steps_an_epoch(self) -> int | None:
        """A micro-step emits a sample on some rank, and all optimizer steps but the last have `accumulation`."""
        if self.max_steps is not None or self.loader.num_samples is None:
            return None
        return -(-self.loader.num_samples // self.accumulation)

    def estimated_steps(self) -> int:
        """Optimizer steps of the run, estimated from the first plan (waits for it)."""
        if self.max_steps is not None:
            return self.max_steps
        if self._expected:
            return self._expected
        assert self.epochs is not None
        return math.ceil(self.epochs * self.loader.estimate_optimizer_steps())

    def epoch(self, step: OptimizerStep) -> float:
        """Epochs done behind `step`, by samples; whole ones where nobody knows how many."""
        if self.loader.num_samples is None:
            return float(step.epoch + step.last)
        return step.epoch + step.done / self.loader.num_samples

    def share(self, epoch: float) -> float:
        """Share of the samples of `epochs` done."""
        assert self.epochs is not None
        return min(epoch / self.epochs, 1.0)

    def expected_steps(self, epoch: float, optimizer_steps: int) -> int:
        """Optimizer steps of the whole run as it looks now; equals those taken when and only when it is done."""
        if self.max_steps is not None:
            return self.max_steps
        share = self.share(epoch)
        if share >= 1.0:
            return optimizer_steps
        return max(round(optimizer_steps / share), optimizer_steps + 1) if share else optimizer_steps + 1

    def learning_rate_factor(self) -> float:
        """What `lr_scale` makes of the samples of an optimizer step, estimated from the first plan."""
        if self._lr_factor is None and self.config.lr_scale == "none":
            return 1.0
        if self._lr_factor is None:
            self._lr_factor = learning_rate_factor(
                self.config,
                num_samples=self.loader.num_samples,
                window=self.config.buffer_size * self.loader.world_size,
                is_shuffled=self.is_shuffled,
                optimizer_steps_an_epoch=self.loader.estimate_optimizer_steps(),
            )
        return self._lr_factor

    def steps_of_schedule(self, warmup_steps: float) -> int:
        """The optimizer steps that a schedule is drawn over. warmup_steps: of the training arguments."""
        if self.max_steps is None and self.clock is None:
            self.clock = ScheduleClock(self.estimated_steps(), int(warmup_steps) if warmup_steps >= 1 else 0)
        return self.estimated_steps() if self.clock is None else self.clock.total_steps

    def follow(self, scheduler: Any) -> None:
        """Let the scheduler go by the samples done, if the run counts epochs."""
        if self.clock is None or self.max_steps is not None:
            return
        if not follow_clock(scheduler, self.clock) and not isinstance(scheduler, ReduceLROnPlateau):
            name, steps = type(scheduler).__name__, self.clock.total_steps
            logger.warning("%s counts optimizer steps, which are estimated as %d", name, steps)

    def advance(self, optimizer_step: int, epoch: float) -> None:
        """Optimizer step `optimizer_step` (from 1) is about to be taken, and `epoch` epochs will be done."""
        if self.clock is not None:
            self.clock.advance(optimizer_step, self.share(epoch))

    def take_over(self, other: FillSchedule, optimizer: Any, scheduler: Any) -> None:
        """Go on in the place of `other`, before the first optimizer step: these were made by its estimates.

        The scheduler keeps following its clock, which goes by the share of samples done.
        """
        self.clock = other.clock
        rescale_learning_rate(optimizer, scheduler, self.learning_rate_factor() / other.learning_rate_factor())

    def state_dict(self, epoch: float, optimizer_steps: int) -> dict[str, Any]:
        return {
            "expected_steps": self.expected_steps(epoch, optimizer_steps),
            "lr_factor": self._lr_factor,
            "clock": None if self.clock is None else vars(self.clock),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._expected, self._lr_factor = state["expected_steps"], state["lr_factor"]
        if state["clock"] is not None:
            self.clock = ScheduleClock.of(state["clock"])
