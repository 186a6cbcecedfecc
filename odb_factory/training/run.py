"""One training run under online dynamic batching: its loader, its length, its figures."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from odb_factory.accounting.statistics import Computing, StepAccounting
from odb_factory.config import ODBConfig
from odb_factory.data.loader import ODBLoader
from odb_factory.data.samples import Measured, MicroBatch, OptimizerStep
from odb_factory.errors import CollectiveError, ConfigError, one_line
from odb_factory.log import get_logger

logger = get_logger(__name__)


# ----------------------------------------------------------------------------------------------------------------------
# The learning rate of a run whose number of optimizer steps is not known ahead (`fill` in epochs).
# A schedule is a curve over optimizer steps. Here the curve is drawn over an estimated number of steps, and read at a
# position that follows the share of samples done: after half the samples the learning rate is that of half the run,
# however many steps that took.

SAMPLES_TO_JUDGE_BY = 256
"""Lengths often vary as much as their mean, so the mean of 256 random ones is known to about 6 %."""


class FillSchedule:
    """Does nothing to a run whose steps are known: then `lr_scale` is none, and its scheduler counts steps itself.

    is_shuffled: the order of samples is random. is_estimated: the number of steps is not known ahead.
    position: of the run on the curve, in estimated optimizer steps. warmup_steps: a warm-up given in optimizer steps,
    which is then taken in real steps; 0 if it is a share of the run. total_steps: steps of the curve: warm-up plus the
    rest (at least 1, so that the learning rate comes down with the samples that are left, not at once, if the estimate
    is too low); 0 before the scheduler is made.
    """

    def __init__(self, loader: ODBLoader, config: ODBConfig, *, is_shuffled: bool, is_estimated: bool):
        self.loader, self.config, self.is_shuffled, self._is_estimated = loader, config, is_shuffled, is_estimated
        self.total_steps = self.warmup_steps = 0
        self.position = self._share_warm = 0.0
        self._lr_factor: float | None = None

    def advance(self, step: int, share: float) -> None:
        """Move to optimizer step `step` (real, from 1), with `share` (0 to 1) of all samples done."""
        if step <= self.warmup_steps:
            self.position, self._share_warm = float(step), share
        else:
            rest = (share - self._share_warm) / max(1.0 - self._share_warm, 1e-12)
            self.position = self.warmup_steps + rest * (self.total_steps - self.warmup_steps)

    def scale(self, optimizer: Any, scheduler: Any) -> None:
        """Multiply the learning rates by the factor of `lr_scale`: the samples of an optimizer step, estimated from the
        first plan, as a multiple of those of stock (rows of a batch x accumulation x ranks), linear or sqrt.

        Before the first optimizer step; a checkpoint has rates that are multiplied already. Raises `ConfigError` if the
        first window need not be like the rest: few samples, or an order that is not random.
        """
        if self._lr_factor is not None or self.config.lr_scale == "none":
            return
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
        samples = num_samples / self.loader.estimate_optimizer_steps()
        rule = self.loader.rule
        of_stock = rule.batch_size * rule.accumulation * self.loader.world_size
        ratio = samples / of_stock
        self._lr_factor = factor = ratio if config.lr_scale == "linear" else math.sqrt(ratio)
        for group in optimizer.param_groups:
            group.update({name: group[name] * factor for name in ("lr", "initial_lr") if name in group})
        scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate's
        for name in ("base_lrs", "_last_lr"):  # the second is what it says of its last step
            if hasattr(scheduler, name):
                setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])
        logger.info(
            "learning rate x %.4g (lr_scale %s: about %.1f samples an optimizer step, %d by the training arguments)",
            factor,
            config.lr_scale,
            samples,
            of_stock,
        )

    def steps_of_schedule(self, expected: int, warmup_steps: float) -> int:
        """The optimizer steps that a schedule is drawn over. warmup_steps: of the training arguments."""
        if not self._is_estimated:
            return expected
        if not self.total_steps:
            self.warmup_steps = int(warmup_steps) if warmup_steps >= 1 else 0
            self.total_steps = self.warmup_steps + max(expected - self.warmup_steps, 1)
        return self.total_steps

    def follow(self, scheduler: Any) -> None:
        """Let the scheduler follow the samples done, if the run counts epochs."""
        if not self._is_estimated:
            return
        if isinstance(scheduler, LambdaLR):  # every schedule of transformers but those that go by metrics
            # Plain functions: LambdaLR saves the attributes of callable objects with the checkpoint.
            at_position: list[Any] = [lambda _, curve=curve: curve(self.position) for curve in scheduler.lr_lambdas]
            scheduler.lr_lambdas = at_position
        elif "metrics" not in inspect.signature(scheduler.step).parameters:
            name, steps = type(scheduler).__name__, self.total_steps
            logger.warning("%s counts optimizer steps, which are estimated as %d", name, steps)

    STATE = ("_lr_factor", "total_steps", "warmup_steps", "position", "_share_warm")

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


# ----------------------------------------------------------------------------------------------------------------------


class ODBRun:
    """The loader of a training, its length and its figures; replaced if layout or budgets change before the first
    optimizer step. `accounting` counts its optimizer steps, those before a resume included.

    args: of the training. epochs, max_steps: of these; epochs are infinite if `max_steps` counts, which else is None.
    schedule: of its learning rate. budgets: those chosen for `auto`. step: the optimizer step taken last.
    """

    def __init__(self, loader: ODBLoader, args: Any, *, is_shuffled: bool):
        self.loader, self.output_dir = loader, Path(args.output_dir)
        self.config = config = loader.config
        self.max_steps: int | None = args.max_steps if args.max_steps > 0 else None
        self.epochs: float = args.num_train_epochs if self.max_steps is None else math.inf
        audit_dir = self.output_dir if config.audit else None
        self.accounting = StepAccounting(loader, audit_dir)
        is_estimated = not config.keeps and self.max_steps is None
        self.schedule = FillSchedule(loader, config, is_shuffled=is_shuffled, is_estimated=is_estimated)
        self.budgets: dict[str, int | None] = {}
        self.step: OptimizerStep | None = None
        self._epochs_before = 0.0
        self._least_length = 0

    # How long it is

    @property
    def optimizer_steps(self) -> int:
        return self.accounting.optimizer_steps

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run; None if they are not known ahead (`fill` in epochs)."""
        if self.max_steps is not None:
            return self.max_steps
        an_epoch = self.loader.num_optimizer_steps
        if an_epoch is None:
            return None
        return max(math.ceil(self.epochs * an_epoch), self.optimizer_steps)

    def expected_steps(self) -> int:
        """The same, or an estimate, which equals the steps taken if and only if the run is done."""
        if (total := self.total_steps) is not None:
            return total
        steps, share = self.optimizer_steps, self._share
        if not share:
            return steps + math.ceil(self.epochs * self.loader.estimate_optimizer_steps())  # waits for the first plan
        return steps if share >= 1.0 else max(round(steps / share), steps + 1)

    @property
    def _share(self) -> float:
        """Of the samples of the run, those done; of a run in epochs."""
        return min(self.epoch / self.epochs, 1.0)

    @property
    def epoch_length(self) -> int | None:
        """At least the optimizer steps of any epoch; None if not known."""
        loader = self.loader
        if not self.config.keeps:
            # A micro-step has at least one sample, and all optimizer steps but the last have `accumulation` of them.
            is_known = self.max_steps is None and loader.num_samples is not None
            return -(-(loader.num_samples or 0) // loader.rule.accumulation) if is_known else None
        an_epoch = loader.num_optimizer_steps
        return an_epoch and max(an_epoch, self._least_length)

    @property
    def finished(self) -> bool:
        """Whether a resumed run has nothing left to do."""
        if (total := self.total_steps) is not None:
            return self.optimizer_steps >= total
        return max(self._epochs_before, self.loader.epoch) >= self.epochs

    @property
    def epoch(self) -> float:
        """Epochs done once the current optimizer step is taken, as in stock."""
        step = self.step
        if step is None:
            return self._epochs_before
        if step.progress is not None:
            return step.epoch + step.progress
        if not self.config.keeps:
            return float(step.epoch + step.last)
        assert self.max_steps is not None
        return step.epoch + (step.index + 1) / self.max_steps

    # Its steps

    def begin_micro_batch(self, micro_batch: MicroBatch, measured: Measured) -> Computing:
        """Its forward comes next; until `accounting.end` its loss is made as `accounting.computing` says."""
        self.step = micro_batch.step
        if micro_batch.index == 0 and self.schedule.total_steps:
            self.schedule.advance(self.optimizer_steps + 1, self._share)
        return self.accounting.begin(micro_batch, measured)

    # Its state and its end

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands after the optimizer step taken last: JSON types, the same on all ranks."""
        return {
            "optimizer_steps": self.optimizer_steps,
            "data": self.loader.state_dict(),
            "budgets": self.budgets,
            "schedule": self.schedule.state_dict(),
        }

    def begin_at(self, optimizer_steps: int, epochs: float, saved: Mapping[str, Any] | None) -> None:
        """Continue after that many optimizer steps and epochs. saved: by `state_dict`; None: by a training without odb.

        The loader stands there already.
        """
        self.accounting.resume_at(optimizer_steps)
        self._epochs_before = epochs
        an_epoch = self.loader.num_optimizer_steps
        if an_epoch and optimizer_steps // an_epoch > self.loader.epoch:
            # An epoch was restarted. The Trainer divides the steps taken by the length of an epoch, and must not find
            # more epochs in them than were done.
            self._least_length = optimizer_steps // (self.loader.epoch + 1) + 1
        if saved is not None:
            self.schedule.load_state_dict(saved["schedule"])

    def finish(self) -> None:
        """Write the summary and log its line. Collective."""
        self.loader.leave()
        self.accounting.finish(self.output_dir, round(self.epoch, 4))

    def abort(self, error: BaseException) -> None:
        """The training has failed on this rank: report it to the others, unless they know, and end everything here."""
        if not isinstance(error, CollectiveError):
            self.loader.abort(one_line(error))
        self.close()

    def close(self) -> None:
        """End worker processes and files; safe to call twice."""
        self.loader.close()
        self.accounting.close()
