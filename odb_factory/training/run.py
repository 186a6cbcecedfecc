"""One training run under online dynamic batching: its loader, its weights, its progress, its counts."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from odb_factory.accounting.batch_checks import BatchChecks
from odb_factory.accounting.loss_weights import loss_weights
from odb_factory.accounting.statistics import Audit, StepStatistics, summary_line, write_summary
from odb_factory.comm.coordinator import CollectiveError
from odb_factory.config import ODBConfig
from odb_factory.data.loader import ODBLoader
from odb_factory.data.samples import Measured, MicroBatch
from odb_factory.errors import ConfigError, one_line
from odb_factory.log import get_logger
from odb_factory.training.schedule import ScheduleClock, learning_rate_factor

logger = get_logger(__name__)


class ODBRun:
    """Accounting of one call of `train()`. Optimizer steps count from 1, micro-steps from 0.

    target_epochs: what the run shall do; None if it counts `max_steps`. is_shuffled: the order of samples is random.
    rank, world_size: of the data-parallel ranks.
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
        is_shuffled: bool = False,
    ):
        self.loader, self.config = loader, config
        self.accumulation, self.target_epochs, self.max_steps = accumulation, target_epochs, max_steps
        self.output_dir, self.rank, self.world_size = Path(output_dir), rank, world_size
        self.is_shuffled = is_shuffled
        self.clock: ScheduleClock | None = None
        self.lr_factor: float | None = None
        self.total, self.interval = StepStatistics(), StepStatistics()
        self.checks = BatchChecks(config)
        self.optimizer_steps = 0
        self._expected = 0
        self._epochs_before = 0.0
        self._samples_before = 0
        self.weight: float | None = None
        self.is_weighed = False
        self._idle_warned = False
        self._pending: deque[tuple[MicroBatch, Measured, float]] = deque()
        self._step: MicroBatch | None = None
        self._dropped: Counter[str] = Counter()
        self._left_out = self._overlong = 0
        self._audit = Audit(self.output_dir, rank) if config.audit else None

    @property
    def finished(self) -> bool:
        """Whether a resumed run has nothing left to do."""
        if self.target_epochs is None:
            return self.max_steps is not None and self.optimizer_steps >= self.max_steps
        return self._epochs_before >= self.target_epochs

    def estimated_optimizer_steps(self) -> int:
        """Optimizer steps of the run, estimated from the first round (waits for it)."""
        if self.max_steps is not None:
            return self.max_steps
        if self._expected:
            return self._expected
        assert self.target_epochs is not None
        return math.ceil(self.target_epochs * self.loader.start() / self.accumulation)

    def learning_rate_factor(self) -> float:
        """What `lr_scale` makes of the samples of an optimizer step, estimated from the first round."""
        if self.lr_factor is None and self.config.lr_scale == "none":
            return 1.0
        if self.lr_factor is None:
            self.lr_factor = learning_rate_factor(
                self.config,
                num_samples=self.loader.num_samples,
                window=self.config.buffer_size * self.world_size,
                is_shuffled=self.is_shuffled,
                optimizer_steps_an_epoch=self.loader.start() / self.accumulation,
            )
        return self.lr_factor

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
        self._warn_of_idle([step for step, _, _ in items])
        weights = loss_weights([step for step, _, _ in items], self.config.loss_scaling, self.world_size)
        self._pending = deque((step, measured, weight) for (step, measured, _), weight in zip(items, weights))
        self._step = items[-1][0]
        if self.clock is not None:
            self.clock.advance(self.optimizer_steps + 1, self.share)
        return [batch for _, _, batch in items]

    @property
    def has_batch(self) -> bool:
        """Whether a micro-batch is left of what `take` gave last."""
        return bool(self._pending)

    def begin_step(self) -> None:
        """Go on to the next micro-batch; until `end_step` its loss weight is `weight`."""
        step, measured, self.weight = self._pending[0]
        self.is_weighed = False
        self.loader.times.begin(step.totals)
        self.checks(step, measured)

    @property
    def num_items(self) -> int:
        """Supervised tokens of the micro-batch under way on this rank; at least 1, for losses are divided by it."""
        return max(self._pending[0][1].supervised_tokens, 1)

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
        """Raises `ConfigError` where micro-batches were trained on without `begin_step`, so with no weight."""
        if self._pending or self._step is None:
            raise ConfigError(
                "training_step: an override of it does not come to the one of odb, so the loss would not be weighed; "
                "let it call super(), or train without odb."
            )
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
        assert self.target_epochs is not None
        return min(self.epoch / self.target_epochs, 1.0)

    @property
    def epoch_ended(self) -> bool:
        return self._step is not None and self._step.last

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
        self.interval = StepStatistics()
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
        self.total = StepStatistics(**state["total"])
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
        if self.rank != 0:
            return
        # Of the epoch under way, which ended before its last step. None, if all was done before this run.
        step = self._step if self._step is not None and not self._step.last else None
        summary = {
            "samples": self.loader.num_samples,
            "epochs": round(self.epoch, 4),
            **self.total.summary(),
            "dropped": dict(self._dropped if step is None else self._dropped + step.rejected),
            "left_out": self._left_out,
            "overlong": self._overlong + (0 if step is None else step.overlong),
            "optimizer_steps": self.optimizer_steps,
            "over_budget": self.checks.num_over_budget,
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

    def _warn_of_idle(self, steps: list[MicroBatch]) -> None:
        """Once, where one optimizer step holds a whole epoch and more than half of its micro-batches are idle."""
        filled, slots = sum(step.totals.active_ranks for step in steps), len(steps) * self.world_size
        if self._idle_warned or steps[0].index > 0 or not steps[-1].last or filled > slots / 2:
            return
        self._idle_warned = True
        if self.accumulation > 1:
            logger.warning(
                "gradient_accumulation_steps: %d of the %d micro-batches of an optimizer step hold all samples of an "
                "epoch, the others are idle and only cost time; set it to %d",
                filled,
                slots,
                -(-filled // self.world_size),
            )
