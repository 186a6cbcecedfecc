"""One training run under online dynamic batching: its loader, its weights, its progress, its counts."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from odb_factory.comm.coordinator import CollectiveError
from odb_factory.config import ODBConfig
from odb_factory.data.loader import ODBLoader
from odb_factory.data.samples import Measured, Step
from odb_factory.errors import ConfigError, one_line
from odb_factory.log import get_logger
from odb_factory.training.batch_checks import BatchChecks
from odb_factory.training.loss import loss_weights
from odb_factory.training.metrics import Audit, Tally, summary_line, write_summary
from odb_factory.training.schedule import ScheduleClock

logger = get_logger(__name__)


class ODBRun:
    """Accounting of one call of `train()`. Optimizer steps count from 1, micro-steps from 0.

    target_epochs: what the run shall do; None if it counts `max_steps`.
    """

    def __init__(
        self,
        loader: ODBLoader,
        config: ODBConfig,
        *,
        accumulation: int,
        target_epochs: float | None,
        max_steps: int | None,
        output_dir: str | Path,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.loader, self.config = loader, config
        self.accumulation, self.target_epochs, self.max_steps = accumulation, target_epochs, max_steps
        self.output_dir, self.rank, self.world_size = Path(output_dir), rank, world_size
        self.clock: ScheduleClock | None = None
        self.lr_factor: float | None = None
        self.total, self.interval = Tally(), Tally()
        self.checks = BatchChecks(config)
        self.optimizer_steps = 0
        self._expected = 0
        self._epochs_before = 0.0
        self._samples_before = 0
        self.weight: float | None = None
        self._pending: deque[tuple[Step, Measured, float]] = deque()
        self._step: Step | None = None
        self._dropped: Counter[str] = Counter()
        self._left_out = self._overlong = 0
        self._audit = Audit(self.output_dir, rank) if config.audit else None

    @property
    def finished(self) -> bool:
        """Whether a resumed run has nothing left to do."""
        if self.max_steps is not None:
            return self.optimizer_steps >= self.max_steps
        return self._epochs_before >= self.target_epochs

    def estimated_optimizer_steps(self) -> int:
        """Optimizer steps of the run, estimated from the first round (waits for it)."""
        if self.max_steps is not None:
            return self.max_steps
        if self._expected:
            return self._expected
        return math.ceil(self.target_epochs * self.loader.start() / self.accumulation)

    def learning_rate_factor(self) -> float:
        """What `lr_scale` makes of the samples of an optimizer step, estimated from the first round."""
        if self.lr_factor is not None:
            return self.lr_factor
        if self.config.lr_scale == "none":
            return 1.0
        if self.loader.num_samples is None:
            raise ConfigError(
                f"odb.lr_scale: {self.config.lr_scale!r} needs to know how many samples an epoch has, and this dataset "
                "has no length; leave lr_scale out and set learning_rate itself."
            )
        samples = self.loader.num_samples * self.accumulation / self.loader.start()
        ratio = samples / self.config.lr_reference_samples
        factor = ratio if self.config.lr_scale == "linear" else math.sqrt(ratio)
        logger.info(
            "learning rate x %.4g (lr_scale %s: about %.1f samples an optimizer step, lr_reference_samples %d)",
            factor,
            self.config.lr_scale,
            samples,
            self.config.lr_reference_samples,
        )
        self.lr_factor = factor
        return factor

    def take(self, steps: Iterator[Any], count: int) -> list[Any]:
        """The batches of the next optimizer step, [] at the end of an epoch."""
        if self.finished:
            return []
        asked = time.perf_counter()
        if self._step is None:
            self.total.started = self.interval.started = asked
        items = list(islice(steps, count))
        waited = time.perf_counter() - asked
        self.total.data_wait_s += waited
        self.interval.data_wait_s += waited
        if not items:
            return []
        weights = loss_weights([step for step, _, _ in items], self.config.loss_scaling, self.world_size)
        self._pending = deque((step, measured, weight) for (step, measured, _), weight in zip(items, weights))
        self._step = items[-1][0]
        if self.clock is not None:
            self.clock.advance(self.optimizer_steps + 1, self.share)
        return [batch for _, _, batch in items]

    def begin_step(self) -> float:
        """The loss weight of the next micro-batch."""
        step, measured, self.weight = self._pending[0]
        self.loader.times.begin(step.totals)
        self.checks(step, measured)
        return self.weight

    def end_step(self) -> None:
        """Count the micro-batch whose backward is done."""
        step, measured, weight = self._pending.popleft()
        self.weight = None
        self.loader.consume(step)
        if self._audit is not None:
            self._audit.write(step, measured, weight, self.total.steps, self.optimizer_steps + 1)
        self.total.add(step, self.world_size)
        self.interval.add(step, self.world_size)

    def end_optimizer_step(self) -> None:
        self.optimizer_steps += 1
        if self._audit is not None:
            self._audit.flush()
        if self._step.last:
            self._dropped += self._step.rejected
            self._left_out += self._step.left_out
            self._overlong += self._step.overlong

    @property
    def epoch(self) -> float:
        """Epochs done once the current optimizer step is taken, by samples; whole ones where nobody knows how many."""
        if self._step is None:
            return self._epochs_before
        if self.loader.num_samples is None:
            return float(self._step.epoch + self._step.last)
        return self._step.epoch + self._step.done / self.loader.num_samples

    @property
    def share(self) -> float:
        """Share of the samples of `target_epochs` done once the current optimizer step is taken."""
        return min(self.epoch / self.target_epochs, 1.0)

    @property
    def epoch_ended(self) -> bool:
        return self._step.last

    def expected_optimizer_steps(self) -> int:
        """Optimizer steps of the whole run as it looks now; equals those taken when and only when it is done."""
        if self.max_steps is not None:
            return self.max_steps
        if self.share >= 1.0:
            return self.optimizer_steps
        return max(round(self.optimizer_steps / self.share), self.optimizer_steps + 1)

    def interval_metrics(self) -> dict[str, float]:
        """The `odb/...` entries since the last call."""
        metrics = self.interval.metrics(self.config.token_budget, self.world_size)
        self.interval = Tally()
        if self.loader.times.r2 is not None:
            metrics["odb/cost_model_r2"] = round(self.loader.times.r2, 4)
        return metrics

    @property
    def samples_since_resume(self) -> int:
        return self.total.samples - self._samples_before

    def run_metrics(self) -> dict[str, float]:
        return self.total.metrics(self.config.token_budget, self.world_size)

    def state_dict(self) -> dict[str, Any]:
        """JSON types: what the figures, the schedule and the summary go on from."""
        return {
            "optimizer_steps": self.optimizer_steps,
            "expected_optimizer_steps": self.expected_optimizer_steps(),
            "epochs": self.epoch,
            "lr_factor": self.lr_factor,
            "clock": None if self.clock is None else vars(self.clock),
            "total": self.total.state_dict(),
            "over_budget": self.checks.num_over_budget,
            "dropped": dict(self._dropped),
            "left_out": self._left_out,
            "overlong": self._overlong,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin_at(state["optimizer_steps"], state["epochs"])
        self._expected, self.lr_factor = state["expected_optimizer_steps"], state["lr_factor"]
        if state["clock"] is not None:
            self.clock = ScheduleClock.of(state["clock"])
        self.total = Tally(**state["total"])
        self._samples_before = self.total.samples
        self.checks.num_over_budget = state["over_budget"]
        self._dropped = Counter(state["dropped"])
        self._left_out, self._overlong = state["left_out"], state["overlong"]

    def begin_at(self, optimizer_steps: int, epochs: float) -> None:
        """Go on behind that many optimizer steps and epochs."""
        self.optimizer_steps, self._epochs_before = optimizer_steps, epochs
        if self._audit is not None:
            self._audit.goes_on = True

    def finish(self) -> None:
        """Write the summary, say the one line."""
        if self.rank != 0 or self._step is None:
            return
        summary = {
            "samples": self.loader.num_samples,
            "epochs": round(self.epoch, 4),
            "emitted": self.total.samples,
            "dropped": dict(self._dropped if self._step.last else self._dropped + self._step.rejected),
            "left_out": self._left_out,
            "overlong": self._overlong + (0 if self._step.last else self._step.overlong),
            "steps": self.total.steps,
            "idle_steps": self.total.idle,
            "optimizer_steps": self.optimizer_steps,
            "tokens": self.total.tokens,
            "padded_tokens": self.total.padded_tokens,
            "supervised_tokens": self.total.supervised_tokens,
            "padding_ratio": self.total.padding_ratio,
            "balance": self.total.balance,
            "patch_balance": self.total.patch_balance,
            "moved": self.total.moved,
            "moved_bytes": self.total.moved_bytes,
            "over_budget": self.checks.num_over_budget,
            "data_wait_s": self.total.data_wait_s,
            "seconds": self.total.seconds,
            "world_size": self.world_size,
            "config": self.config.to_dict(),
        }
        write_summary(self.output_dir, summary)
        logger.info(summary_line(summary))
        if self.config.cost_model == "time":
            logger.info(self.loader.times)

    def abort(self, error: BaseException) -> None:
        """The training has failed on this rank: tell the others, unless they know, and end everything here."""
        if not isinstance(error, CollectiveError):
            self.loader.abort(one_line(error))
        self.close()

    def close(self) -> None:
        """End worker processes and files; safe to call twice."""
        self.loader.close()
        if self._audit is not None:
            self._audit.close()
