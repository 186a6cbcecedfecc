"""Learning-rate schedules when the number of optimizer steps is not known ahead.

A schedule is a curve over optimizer steps. Here the curve is drawn over an estimated number of
steps, and read at a position that follows the share of samples done: after half the samples the
learning rate is that of half the run, however many steps that took.
"""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR


class ScheduleClock:
    """Where the run stands on the curve, in estimated optimizer steps.

    total_steps: length of the curve. warmup_steps: a warm-up given in optimizer steps, which is
    then taken in real steps; 0 if it is a share of the run.
    """

    def __init__(self, total_steps: int, warmup_steps: int = 0):
        self.total_steps = max(total_steps, warmup_steps)
        self.warmup_steps = warmup_steps
        self.position = 0.0
        self._share_warm = 0.0

    @classmethod
    def of(cls, saved: dict[str, Any]) -> ScheduleClock:
        """A clock as `vars` of one was saved."""
        clock = cls(saved["total_steps"], saved["warmup_steps"])
        vars(clock).update(saved)
        return clock

    def advance(self, step: int, share: float) -> None:
        """Move to optimizer step `step` (real, from 1), with `share` (0 to 1) of all samples done."""
        if step <= self.warmup_steps:
            self.position, self._share_warm = float(step), share
        else:
            rest = (share - self._share_warm) / max(1.0 - self._share_warm, 1e-12)
            self.position = self.warmup_steps + rest * (self.total_steps - self.warmup_steps)


def scale_learning_rate(optimizer: Any, factor: float) -> None:
    """Multiply the learning rate of every parameter group, before a scheduler is made for them; once each."""
    for group in optimizer.param_groups:
        if "odb_lr_factor" not in group:
            group["lr"] *= factor
            group["odb_lr_factor"] = factor


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
