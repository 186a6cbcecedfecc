"""The learning rate of a run whose number of optimizer steps is not known ahead (`fill` in epochs)."""

from __future__ import annotations

import math
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from odb_factory.config import ODBConfig
from odb_factory.data.loader import ODBLoader
from odb_factory.errors import ConfigError
from odb_factory.log import get_logger

logger = get_logger(__name__)

SAMPLES_TO_JUDGE_BY = 256
"""Lengths often vary as much as their mean, so the mean of 256 random ones is known to about 6 %."""

# ----------------------------------------------------------------------------------------------------------------------
# Learning-rate schedules if the number of optimizer steps is not known ahead.
# A schedule is a curve over optimizer steps. Here the curve is drawn over an estimated number of steps, and read at a
# position that follows the share of samples done: after half the samples the learning rate is that of half the run,
# however many steps that took.


class ScheduleClock:
    """The position of the run on the curve, in estimated optimizer steps.

    warmup_steps: a warm-up given in optimizer steps, which is then taken in real steps; 0 if it is a share of the run.
    total_steps: steps of the curve: warm-up plus the rest (at least 1, so that the learning rate comes down with the
    samples that are left, not at once, if the estimate is too low).
    """

    def __init__(self, estimated_steps: int, warmup_steps: int = 0):
        self.total_steps = warmup_steps + max(estimated_steps - warmup_steps, 1)
        self.warmup_steps = warmup_steps
        self.position = 0.0
        self._share_warm = 0.0

    def advance(self, step: int, share: float) -> None:
        """Move to optimizer step `step` (real, from 1), with `share` (0 to 1) of all samples done."""
        if step <= self.warmup_steps:
            self.position, self._share_warm = float(step), share
        else:
            rest = (share - self._share_warm) / max(1.0 - self._share_warm, 1e-12)
            self.position = self.warmup_steps + rest * (self.total_steps - self.warmup_steps)


def follow_clock(scheduler: Any, clock: ScheduleClock) -> bool:
    """Make a `LambdaLR` (every schedule of transformers but the metric-driven ones) read `clock`.

    Returns False, with nothing changed, for another kind of scheduler.
    """
    if not isinstance(scheduler, LambdaLR):
        return False

    def at_clock(curve: Any) -> Any:
        return lambda _steps_taken: curve(clock.position)

    # Plain functions: LambdaLR saves the attributes of callable objects with the checkpoint.
    scheduler.lr_lambdas = [at_clock(curve) for curve in scheduler.lr_lambdas]
    return True


def scale_learning_rate(optimizer: Any, factor: float) -> None:
    """Multiply the learning rate of every parameter group, before a scheduler is made for them; once each."""
    for group in optimizer.param_groups:
        if "odb_lr_factor" not in group:
            group["lr"] *= factor
            group["odb_lr_factor"] = factor


# ----------------------------------------------------------------------------------------------------------------------


class FillSchedule:
    """Does nothing to a run whose steps are known: then `lr_scale` is none, and there is no clock.

    is_shuffled: the order of samples is random. is_estimated: the number of steps is not known ahead.
    """

    def __init__(self, loader: ODBLoader, config: ODBConfig, *, is_shuffled: bool, is_estimated: bool):
        self.loader, self.config, self.is_shuffled, self._is_estimated = loader, config, is_shuffled, is_estimated
        self.clock: ScheduleClock | None = None
        self._lr_factor: float | None = None

    def learning_rate_factor(self) -> float:
        """The factor of `lr_scale` (linear or sqrt) for the samples of an optimizer step, estimated from the first
        plan.

        Raises `ConfigError` if the first window need not be like the rest: few samples, or an order that is not random.
        """
        if self._lr_factor is None and self.config.lr_scale == "none":
            return 1.0
        if self._lr_factor is not None:
            return self._lr_factor
        config, num_samples = self.config, self.loader.num_samples
        name, window = f"odb.lr_scale: {config.lr_scale!r}", config.buffer_size * self.loader.world_size
        if num_samples is None:
            raise ConfigError(
                f"{name} needs to know how many samples an epoch has, and this dataset has no length; leave lr_scale "
                "out and set learning_rate itself."
            )
        if window < num_samples and (not self.is_shuffled or window < SAMPLES_TO_JUDGE_BY):
            why = "so few need not be" if self.is_shuffled else "the first of an order that is not shuffled need not be"
            raise ConfigError(
                f"{name} goes by the first {window} of {num_samples} samples, and {why} like the rest; raise "
                "buffer_size, or leave lr_scale out and set learning_rate itself."
            )
        assert config.lr_reference_samples is not None  # checked with the block
        samples = num_samples / self.loader.estimate_optimizer_steps()
        ratio = samples / config.lr_reference_samples
        self._lr_factor = ratio if config.lr_scale == "linear" else math.sqrt(ratio)
        logger.info(
            "learning rate x %.4g (lr_scale %s: about %.1f samples an optimizer step, lr_reference_samples %d)",
            self._lr_factor,
            config.lr_scale,
            samples,
            config.lr_reference_samples,
        )
        return self._lr_factor

    def steps_of_schedule(self, expected: int, warmup_steps: float) -> int:
        """The optimizer steps that a schedule is drawn over. warmup_steps: of the training arguments."""
        if not self._is_estimated:
            return expected
        self.clock = self.clock or ScheduleClock(expected, int(warmup_steps) if warmup_steps >= 1 else 0)
        return self.clock.total_steps

    def follow(self, scheduler: Any) -> None:
        """Let the scheduler follow the samples done, if the run counts epochs."""
        if self.clock is None:
            return
        if not follow_clock(scheduler, self.clock) and not isinstance(scheduler, ReduceLROnPlateau):
            name, steps = type(scheduler).__name__, self.clock.total_steps
            logger.warning("%s counts optimizer steps, which are estimated as %d", name, steps)

    def take_over(self, other: FillSchedule, optimizer: Any, scheduler: Any) -> None:
        """Replace `other` before the first optimizer step: optimizer and scheduler were made by its estimates.

        The scheduler keeps following its clock, which goes by the share of samples done.
        """
        self.clock = other.clock
        ratio = self.learning_rate_factor() / other.learning_rate_factor()
        if ratio == 1.0:
            return
        for group in optimizer.param_groups:
            for name in ("lr", "initial_lr", "odb_lr_factor"):
                if name in group:
                    group[name] *= ratio
        scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate's
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [rate * ratio for rate in scheduler.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"lr_factor": self._lr_factor, "clock": None if self.clock is None else vars(self.clock)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._lr_factor = state["lr_factor"]
        if state["clock"] is not None and self._is_estimated:
            self.clock = ScheduleClock(0)
            vars(self.clock).update(state["clock"])
