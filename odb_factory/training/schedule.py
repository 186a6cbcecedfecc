"""Learning-rate schedules when the number of optimizer steps is not known ahead.

A schedule is a curve over optimizer steps. Here the curve is drawn over an estimated number of
steps, and read at a position that follows the share of samples done: after half the samples the
learning rate is that of half the run, however many steps that took.
"""

from __future__ import annotations

import math
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from odb_factory.config import ODBConfig
from odb_factory.errors import ConfigError
from odb_factory.log import get_logger

SAMPLES_TO_JUDGE_BY = 256
"""Lengths often vary as much as their mean, so the mean of so many drawn at random is known to about 6 %."""

logger = get_logger(__name__)


class ScheduleClock:
    """Where the run stands on the curve, in estimated optimizer steps.

    estimated_steps: optimizer steps of the run, as far as is known. warmup_steps: a warm-up given in optimizer
    steps, which is then taken in real steps; 0 if it is a share of the run.
    total_steps: length of the curve, its warm-up and what is left behind it. That is a step at least: also where the
    estimate is too low the learning rate comes down with the samples that are left, not at once.
    """

    def __init__(self, estimated_steps: int, warmup_steps: int = 0):
        self.total_steps = warmup_steps + max(estimated_steps - warmup_steps, 1)
        self.warmup_steps = warmup_steps
        self.position = 0.0
        self._share_warm = 0.0

    @classmethod
    def of(cls, saved: dict[str, Any]) -> ScheduleClock:
        """A clock as `vars` of one was saved."""
        clock = cls(0)
        vars(clock).update(saved)
        return clock

    def advance(self, step: int, share: float) -> None:
        """Move to optimizer step `step` (real, from 1), with `share` (0 to 1) of all samples done."""
        if step <= self.warmup_steps:
            self.position, self._share_warm = float(step), share
        else:
            rest = (share - self._share_warm) / max(1.0 - self._share_warm, 1e-12)
            self.position = self.warmup_steps + rest * (self.total_steps - self.warmup_steps)


def learning_rate_factor(
    config: ODBConfig, *, num_samples: int | None, window: int, is_shuffled: bool, optimizer_steps_an_epoch: float
) -> float:
    """What `lr_scale` (linear or sqrt) makes of the samples of an optimizer step, estimated from the first window.

    window: samples of the first window on all ranks; optimizer_steps_an_epoch: as estimated from it. Raises
    `ConfigError` where it need not be like the rest: few samples, or the first ones of an order that is not random.
    """
    name = f"odb.lr_scale: {config.lr_scale!r}"
    if num_samples is None:
        raise ConfigError(
            f"{name} needs to know how many samples an epoch has, and this dataset has no length; leave lr_scale out "
            "and set learning_rate itself."
        )
    if window < num_samples and (not is_shuffled or window < SAMPLES_TO_JUDGE_BY):
        why = "so few need not be" if is_shuffled else "the first of an order that is not shuffled need not be"
        raise ConfigError(
            f"{name} goes by the first {window} of {num_samples} samples, and {why} like the rest; raise buffer_size, "
            "or leave lr_scale out and set learning_rate itself."
        )
    assert config.lr_reference_samples is not None  # checked with the block
    samples = num_samples / optimizer_steps_an_epoch
    ratio = samples / config.lr_reference_samples
    factor = ratio if config.lr_scale == "linear" else math.sqrt(ratio)
    logger.info(
        "learning rate x %.4g (lr_scale %s: about %.1f samples an optimizer step, lr_reference_samples %d)",
        factor,
        config.lr_scale,
        samples,
        config.lr_reference_samples,
    )
    return factor


def scale_learning_rate(optimizer: Any, factor: float) -> None:
    """Multiply the learning rate of every parameter group, before a scheduler is made for them; once each."""
    for group in optimizer.param_groups:
        if "odb_lr_factor" not in group:
            group["lr"] *= factor
            group["odb_lr_factor"] = factor


def rescale_learning_rate(optimizer: Any, scheduler: Any, ratio: float) -> None:
    """Multiply the learning rates that a scheduler has been made for."""
    for group in optimizer.param_groups:
        for name in ("lr", "initial_lr", "odb_lr_factor"):
            if name in group:
                group[name] *= ratio
    scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate's
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [rate * ratio for rate in scheduler.base_lrs]


def follow_clock(scheduler: Any, clock: ScheduleClock) -> bool:
    """Make a `LambdaLR` (every schedule of transformers but the metric-driven ones) read `clock`.

    Returns False, with nothing changed, for another kind of scheduler.
    """
    if not isinstance(scheduler, LambdaLR):
        return False
    # Plain functions: LambdaLR saves the attributes of callable objects with the checkpoint.
    scheduler.lr_lambdas = [_at_clock(curve, clock) for curve in scheduler.lr_lambdas]
    return True


def _at_clock(curve: Any, clock: ScheduleClock) -> Any:
    return lambda _steps_taken: curve(clock.position)
