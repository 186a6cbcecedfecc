"""`StepAccounting`: everything that is counted, checked and written while optimizer steps are taken."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from odb_factory.accounting.audit import LEFT_OUT_FILE, Audit, Lines
from odb_factory.accounting.batch_checks import BatchChecks
from odb_factory.accounting.loss_weights import MicroBatchLoss, loss_of, token_weights
from odb_factory.accounting.statistics import StepStatistics
from odb_factory.config import ResolvedConfig
from odb_factory.data.collate import Collated
from odb_factory.data.left_out import COLLATION
from odb_factory.data.loader import ODBLoader
from odb_factory.data.samples import Measured, MicroBatch, OptimizerStep


class Trained(NamedTuple):
    """What all ranks have trained on; padded_tokens as collated."""

    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0


class Begun(NamedTuple):
    """A micro-batch, or a part of one, that has been handed to the model."""

    micro_batch: MicroBatch
    measured: Measured
    loss: MicroBatchLoss


class StepAccounting:
    """The accounting of one run of a loader, for a trainer as for a loop of one's own.

    audit_dir: where `odb_audit_rank{r}.jsonl` is written, left_out_dir: `odb_left_out_rank{r}.jsonl`; None: nowhere.
    is_fetched_ahead: a framework asks for a micro-batch before it hands over the one before, so what `end` closes is
        trained on only then.
    optimizer_steps: taken in the run, those before a resume included. num_over_budget: micro-batches of two or more
        samples that the collator made larger than the budget, on all ranks.
    interval_before: what `interval_metrics` was last asked for.

    Example::

        for micro_batch, measured, batch in loader:
            loss = accounting.begin(micro_batch, measured, batch.get("labels"))
            (model(**batch).loss * loss.scale).backward()  # where loss.row_weights is None
            accounting.end()
            if micro_batch.ends_optimizer_step: ...
    """

    def __init__(
        self,
        loader: ODBLoader,
        config: ResolvedConfig,
        audit_dir: str | Path | None = None,
        *,
        left_out_dir: str | Path | None = None,
        is_fetched_ahead: bool = False,
    ):
        self.loader, self.config = loader, config
        self.total, self.interval, self.interval_before = StepStatistics(), StepStatistics(), StepStatistics()
        self.optimizer_steps = self.num_over_budget = 0
        self._is_fetched_ahead = is_fetched_ahead
        self._checks = BatchChecks(config, counts_labels=loader.counts_labels)
        self._audit = None if audit_dir is None else Audit(audit_dir, loader.rank)
        self._left_out_file: Lines | None = None
        if left_out_dir is not None:
            self._left_out_file = Lines(Path(left_out_dir) / LEFT_OUT_FILE.format(rank=loader.rank))
            loader.left_out.path = self._left_out_file.path
        loader.weigh_by(self._shares)
        self._before = Trained()
        self._step: OptimizerStep | None = None
        self._under_way: Begun | None = None
        self._left_out: Counter[str] = Counter()
        self._not_trained = self._overlong = 0
        self._waited = 0.0  # since the audit's last line

    def next(self, collated: Iterator[Collated]) -> Collated | None:
        """What the loader hands on next, None behind the last; counts the time spent waiting for it."""
        asked = time.perf_counter()
        item = next(collated, None)
        waited = time.perf_counter() - asked
        self._waited += waited
        self.total.wait(waited)
        self.interval.wait(waited)
        return item

    def begin(
        self,
        micro_batch: MicroBatch,
        measured: Measured,
        labels: Any = None,
        *,
        weights: Sequence[float] | None = None,
    ) -> MicroBatchLoss:
        """Check a micro-batch; its forward comes next, and its loss is made as the answer says.

        labels: as collated ([rows, length]) and not yet moved to an accelerator, where there are any. weights: of a
        part of a micro-batch what `token_weights` gives its samples in the whole. Raises `DataError` where the
        collator has changed what was planned.
        """
        self._checks(micro_batch, measured, labels)
        step, before = micro_batch.step, self._step
        if before is not None and before.epoch != step.epoch:  # left before its end
            self._end_epoch(before)
        self._step = step
        if weights is None:
            weights = token_weights(micro_batch, self.config.loss_scaling, self.loader.world_size)
        loss = loss_of(weights, micro_batch.units, measured.filler_rows)
        self._under_way = Begun(micro_batch, measured, loss)
        if not self._is_fetched_ahead:
            self.loader.times.begin(micro_batch.totals)
        return loss

    def end(self) -> None:
        """Count the micro-batch whose backward is done and, with the last one of an optimizer step, that step."""
        begun = self.set_aside()
        if self._is_fetched_ahead:
            self.loader.times.begin(begun.micro_batch.totals)
        self.count(begun.micro_batch, [begun])

    def set_aside(self) -> Begun:
        """What `begin` was given last, for `count`: its backward is done, and may have to be done again."""
        assert self._under_way is not None, "begin comes first"
        begun, self._under_way = self._under_way, None
        return begun

    def count(self, micro_batch: MicroBatch, parts: Sequence[Begun]) -> None:
        """Count a micro-batch as `end` does, which was trained on in these parts."""
        for part, (trained, measured, loss) in enumerate(parts):
            if self._audit is not None:
                place = {"part": part, "parts": len(parts)}
                self._audit.write(trained, measured, loss, self.optimizer_steps + 1, self._waited, **place)
                self._waited = 0.0
        for statistics in (self.total, self.interval):
            statistics.add(micro_batch.totals, self.loader.world_size)
        if micro_batch.ends_optimizer_step:
            self._end_optimizer_step(micro_batch.step)

    def interval_metrics(self) -> dict[str, float]:
        """The `odb/...` entries since the last call."""
        metrics = self._metrics(self.interval)
        self.interval_before, self.interval = self.interval, StepStatistics()
        if self.loader.times.r2 is not None:
            metrics["odb/cost_model_r2"] = round(self.loader.times.r2, 4)
        return metrics

    def metrics(self) -> dict[str, float]:
        """The `odb/...` entries of the whole run."""
        return self._metrics(self.total)

    def _metrics(self, statistics: StepStatistics) -> dict[str, float]:
        metrics = statistics.metrics(self.config.token_budget, self.loader.world_size)
        if self.config.on_error == "skip":
            metrics["odb/lost_weight"] = round(statistics.lost_weight, 6)
        if self.config.oom == "split":
            metrics["odb/oom_cuts"] = statistics.oom_cuts
        return metrics

    def cut(self, times: int) -> None:
        """So many micro-batches, or parts of them, have been cut in two in an optimizer step, on all ranks."""
        self.total.oom_cuts += times
        self.interval.oom_cuts += times

    def stats(self) -> dict[str, float]:
        """`metrics`, and odb/left_out: rows left out on all ranks; odb/over_budget: micro-batches of all ranks that the
        collator made larger than the budget."""
        self._take_lost()
        return self.metrics() | {
            "odb/left_out": self.left_out.total(),
            "odb/over_budget": self.num_over_budget,
        }

    @property
    def left_out(self) -> Counter[str]:
        """Rows left out on all ranks, by reason; of the epoch under way as of its last plan."""
        return self._left_out if self._step is None else self._left_out + self._step.rejected

    @property
    def since_resume(self) -> Trained:
        """Since this process began."""
        return Trained(*(now - before for now, before in zip(self._trained(), self._before)))

    def summary(self) -> dict[str, Any]:
        """What `odb_summary.json` says; the names are public."""
        self._take_lost()
        return {
            "dataset_samples": self.loader.num_samples,
            "optimizer_steps": self.optimizer_steps,
            **self.total.summary(),
            "lowered_to": None if self.loader.lowered is None else dataclasses.asdict(self.loader.lowered),
            **self.rows_apart(),
            "ranks": self.loader.world_size,
            "config": self.config.to_dict(),
        }

    def rows_apart(self) -> dict[str, Any]:
        """Of the summary what was not trained on, or broke a budget; of the epoch under way as of its last plan."""
        return {
            "left_out": dict(self.left_out),
            "not_trained": self._not_trained,
            "overlong": self._overlong + (0 if self._step is None else self._step.overlong),
            "over_budget": self.num_over_budget,
        }

    def state_dict(self) -> dict[str, Any]:
        """JSON types: what the figures go on from. Of the epoch under way the loader knows what was rejected."""
        return {
            "optimizer_steps": self.optimizer_steps,
            "total": self.total.state_dict(),
            "over_budget": self.num_over_budget,
            "left_out": dict(self._left_out),
            "not_trained": self._not_trained,
            "overlong": self._overlong,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.resume_at(state["optimizer_steps"])
        self.total = StepStatistics(**state["total"])
        self._before = self._trained()
        self.num_over_budget = state["over_budget"]
        self._left_out = Counter(state["left_out"])
        self._not_trained, self._overlong = state["not_trained"], state["overlong"]

    def resume_at(self, optimizer_steps: int) -> None:
        """Go on behind that many optimizer steps of the run, with the audit behind what it holds."""
        self.optimizer_steps = optimizer_steps
        for file in self._files:
            file.append = True

    def close(self) -> None:
        """Close the files; safe to call twice."""
        for file in self._files:
            file.close()

    @property
    def _files(self) -> list[Lines]:
        return [file for file in (self._audit, self._left_out_file) if file is not None]

    def _shares(self, micro_batch: MicroBatch) -> list[float]:
        """Of each sample the share of the loss of its optimizer step."""
        weights = token_weights(micro_batch, self.config.loss_scaling, self.loader.world_size)
        return [weight * units / self.loader.world_size for weight, units in zip(weights, micro_batch.units)]

    def _take_lost(self) -> None:
        """Count the rows that could not be collated and the micro-batches over budget, on all ranks."""
        lost = self.loader.take_lost()
        self.num_over_budget += lost.over_budget
        if lost.rows:
            self._left_out[COLLATION] += lost.rows
        for statistics in (self.total, self.interval):
            statistics.lose(lost.late)

    def _trained(self) -> Trained:
        return Trained(self.total.samples, self.total.tokens, self.total.padded_tokens)

    def _end_optimizer_step(self, step: OptimizerStep) -> None:
        self.optimizer_steps += 1
        self.loader.consume(step)
        self._take_lost()
        for row in self.loader.left_out.through(step.index):
            if self._left_out_file is not None:
                self._left_out_file.add({**row, "optimizer_step": self.optimizer_steps})
        for file in self._files:
            file.flush()
        for statistics in (self.total, self.interval):
            statistics.add_optimizer_step(step)
        if step.last:
            self._end_epoch(step)

    def _end_epoch(self, step: OptimizerStep) -> None:
        """step: the last one of the epoch that was trained on."""
        self._left_out += step.rejected
        self._not_trained += step.not_trained
        self._overlong += step.overlong
        self._step = None
