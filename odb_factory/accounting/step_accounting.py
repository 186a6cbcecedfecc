"""`StepAccounting`: everything that is counted, checked and written while optimizer steps are taken."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from odb_factory.accounting.losses import loss_of, token_weights
from odb_factory.accounting.statistics import AUDIT_FILE, LEFT_OUT_FILE, Computing, Lines, StepStatistics, audit_line
from odb_factory.config import ResolvedConfig
from odb_factory.data.collate import Collated
from odb_factory.data.loader import ODBLoader
from odb_factory.data.samples import COLLATION, Measured, MicroBatch, OptimizerStep
from odb_factory.data.step_agreement import LateRow
from odb_factory.errors import DataError
from odb_factory.log import get_logger
from odb_factory.planning import Budget

# ----------------------------------------------------------------------------------------------------------------------
# Logged once at the start: how large optimizer steps are, how they are cut, how full the budgets get.

logger = get_logger(__name__)

MOSTLY_EMPTY = 0.5
"""Budgets filled by less get a line of advice."""


def log_first_step(
    loader: ODBLoader, config: ResolvedConfig, first: OptimizerStep | None, *, in_loop: bool = False
) -> None:
    """first: the first optimizer step, if it is planned. in_loop: of a custom loop, where no other line names the
    layout."""
    if first is None:
        return
    limits = loader.budget.limits.least(loader.lowered)
    filled = first.padded_tokens / (first.num_micro_batches * loader.world_size * limits.token_budget)
    ranks = "one rank" if loader.world_size == 1 else f"each of {loader.world_size} ranks"
    cut = f"{_count(first.num_micro_batches, 'micro-batch', 'es')} on {ranks}"
    budgets = (
        f"fills {filled:.0%} of their budgets (token_budget {limits.token_budget}, max_patches {limits.max_patches}"
        f"{''.join(f', max_{name} {most}' for name, most in loader.budget.caps)}"
        f"{', lowered as memory was short' if loader.lowered else ''}); "
        f"loss_scaling {config.loss_scaling}"
    )
    if in_loop:
        unit = "supervised token" if loader.counts_labels else "sample, or what cost_fn says"
        budgets += f", layout {loader.layout}, a unit is a {unit}"
    samples = "a stream of unknown length" if loader.num_samples is None else f"{loader.num_samples} samples"
    size = loader.global_batch_size
    if size is None:
        if loader.num_samples is not None:
            samples += f" in about {loader.estimate_optimizer_steps()} optimizer steps an epoch"
        if not in_loop:
            samples += " (figures of the Trainer above are bounds)"
        logger.info("%s; the first has %s and %s", samples, cut, budgets)
        return
    if loader.num_optimizer_steps is not None:
        samples += f", {_count(loader.num_optimizer_steps, 'optimizer step')} an epoch"
    each = f"each of {_count(min(size, loader.num_samples or size), 'sample')}"
    if config.global_batch_size == "keep":
        each += " as without odb" if in_loop else " as in stock training"
    logger.info("%s, %s; the first is cut into %s and %s", samples, each, cut, budgets)
    if filled > 1:
        logger.warning(
            "token_budget %d is smaller than most samples of the first optimizer step: most micro-batches will hold "
            "one sample; raise token_budget, or lower cutoff_len",
            config.token_budget,
        )
    if size <= loader.world_size and (loader.num_samples is None or loader.num_samples > size):
        logger.warning(
            "an optimizer step has %s, one on a rank, so nothing can be batched: %s",
            _count(size, "sample"),
            'give global_batch_size="fill" (optimizer steps as large as the budget), or the batch_size and '
            "gradient_accumulation_steps that the loop would have without odb"
            if in_loop
            else "raise per_device_train_batch_size or gradient_accumulation_steps, or set `global_batch_size`",
        )
    elif filled < MOSTLY_EMPTY and first.num_micro_batches == 1:
        logger.warning(
            "an optimizer step of %d samples fills %.0f %% of token_budget %d on %s: token_budget could be smaller, or "
            "global_batch_size larger",
            size,
            100 * filled,
            config.token_budget,
            ranks,
        )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


# ----------------------------------------------------------------------------------------------------------------------
# `BatchChecks`: compare every collated micro-batch with its plan, before it is trained on.


class BatchChecks:
    """Call it with each micro-batch and what its collated tensors measure.

    Raises `DataError` if the collator has left out samples, has left out or moved labels that the loss is weighed by,
    or if the samples' weights differ and it does not make one row (flat: segment) of each. Warns once of each kind:
    samples that cannot be laid flat, a sample beyond a budget, a micro-batch that grew beyond one in the collator,
    samples that share one row although they are not flat, rows in another order than their ids.
    """

    def __init__(self, config: ResolvedConfig, budget: Budget):
        self._config, self._budget = config, budget
        self._warned: set[str] = set()

    def __call__(self, micro_batch: MicroBatch, measured: Measured) -> None:
        if micro_batch.idle:
            return
        ids = list(micro_batch.ids)
        # One row a sample, or all in one row; a collator of pairs may make more rows.
        shares_one_row = measured.rows == 1 and measured.length >= micro_batch.tokens
        if not measured.segments and measured.rows < len(ids) and not shares_one_row:
            raise DataError(
                f"rows {ids}: the collator made {measured.rows} rows of {measured.length} tokens of "
                f"these {len(ids)} samples, so some were left out; keep every sample, or leave such rows out "
                "of the dataset (a row without supervised tokens is left out and counted)."
            )
        if self._config.loss_scaling not in ("approx", "none") and measured.units != micro_batch.num_units:
            raise DataError(
                f"rows {ids}: the collator left {measured.units} units of "
                f"{micro_batch.num_units} observed, so the loss cannot be weighed exactly; use a collator that "
                "keeps labels as they are (and `ignore_pad_token_for_loss: true`), leave `labels` out of the rows if "
                "it makes them, or set `loss_scaling: approx`."
            )
        self._check_rows(micro_batch, measured)
        self._check_budget(micro_batch, measured)

    def _check_rows(self, micro_batch: MicroBatch, measured: Measured) -> None:
        """Weights that differ, and the ids of the step info, rely on one row (flat: segment) a sample, in order."""
        ids, rows = list(micro_batch.ids), measured.rows - measured.filler_rows
        if measured.segments:
            rows = len(ids)
        if rows < len(ids):
            self._warn_once(
                "one row",
                f"the collator lays the {len(ids)} samples of rows {ids} into one row of {measured.length} tokens, but "
                "they were planned as padded rows: the budget is not filled, and padding figures are those of the "
                "plan; the audit has the shape that was collated. With `layout: flat` they are planned as they are "
                "laid.",
            )
        scaling = self._config.loss_scaling
        differ = len(set(token_weights(micro_batch, scaling, 1))) > 1
        if differ and rows != len(ids):
            raise DataError(
                f"rows {ids}: the collator made {rows} rows of these {len(ids)} samples, and loss_scaling {scaling!r} "
                "gives them different weights; use a collator that makes one row of each, or set `loss_scaling: exact`."
            )
        if measured.units_by_row is None or rows != len(ids):
            return
        found = list(measured.units_by_row)
        if found == [*micro_batch.units, *[0] * (len(found) - len(ids))]:
            return
        problem = (
            f"rows {ids}: the collator returns them with {found} units and they have {list(micro_batch.units)}, so it "
            "has changed their order or their labels"
        )
        if differ:
            raise DataError(
                f"{problem}, and loss_scaling {scaling!r} gives them different weights; use a collator that keeps "
                "both, or set `loss_scaling: exact`."
            )
        self._warn_once("order", f"{problem}; `ids` of the step info and of the audit are not in the order of the rows")

    def _check_budget(self, micro_batch: MicroBatch, measured: Measured) -> None:
        if measured.why_padded:
            self._warn_once(
                "padded",
                f"layout: padded ({measured}) for a micro-batch that was planned flat; {measured.why_padded}. Others "
                "are not logged; set `layout: padded` if memory is short, then padding counts towards the budget",
            )
            return
        if measured.is_within(self._budget):
            return
        if len(micro_batch.ids) == 1:
            self._warn_once(
                "overlong",
                f"overlong samples travel alone: row {micro_batch.ids[0]} has {measured}, the budget is {self._budget}",
            )
            return
        self._warn_once(
            "over budget",
            f"rows {list(micro_batch.ids)} were collated to {measured}, above the budget of {self._budget}: the "
            "collator adds more than the plan knows of, or cost_fn returns less than there is; give what it adds "
            "(collation=) or lower the budget if memory is short",
        )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", message)


# ----------------------------------------------------------------------------------------------------------------------


class StepAccounting:
    """The accounting of one run of a loader, in a trainer or in a custom loop.

    audit_dir: folder of `odb_audit_rank{r}.jsonl`, left_out_dir: of `odb_left_out_rank{r}.jsonl`; None: not written.
    encoder_patches: encoded by each rank since the run began or was resumed; empty where they do not share this work.
    optimizer_steps: taken in the run, those before a resume included. num_over_budget: micro-batches of two or more
        samples that the collator made larger than the budget, on all ranks.
    computing: the micro-batch between `begin` and `end`. total: the sums since the run began or was resumed; interval:
        those between the last two calls of `interval_metrics`.

    Example::

        for micro_batch, measured, batch in loader:
            loss = accounting.begin(micro_batch, measured).loss
            (model(**batch).loss * loss.scale).backward()  # if loss.row_weights is None
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
    ):
        self.loader, self.config = loader, config
        self.total, self.interval = StepStatistics(), StepStatistics()
        self.optimizer_steps = self.num_over_budget = 0
        self.computing: Computing | None = None
        self.encoder_patches: list[int] = []
        self._checks = BatchChecks(config, loader.budget)
        self._audit: Lines | None = None
        self._left_out_file: Lines | None = None
        if audit_dir is not None:
            self._audit = Lines(Path(audit_dir) / AUDIT_FILE.format(rank=loader.rank), "the audit")
        if left_out_dir is not None:
            path = Path(left_out_dir) / LEFT_OUT_FILE.format(rank=loader.rank)
            self._left_out_file, loader.left_out.path = Lines(path, "the list of rows left out"), path
        loader.weights = self._shares
        self._at_log = StepStatistics()
        self._clock: float | None = None
        self._has_logged = True
        self._uncounted: OptimizerStep | None = None  # begun last in an epoch whose rows are not in these sums yet
        self._left_out: Counter[str] = Counter()
        self._remainder = self._overlong = 0
        self._waited = 0.0  # since the audit's last line

    def next(self, collated: Iterator[Collated]) -> Collated | None:
        """The loader's next micro-batch, None after the last; counts the time spent waiting for it."""
        self._tick()
        if self._has_logged:  # an interval has no seconds of an evaluation or a save between two optimizer steps
            self._has_logged, self._at_log.seconds = False, self.total.seconds
        before = self.total.seconds
        item = next(collated, None)
        self._tick()
        self._waited += self.total.seconds - before
        self.total.data_wait_s += self.total.seconds - before
        return item

    def _tick(self) -> None:
        """Bring `seconds` up to date; they count from the first call on."""
        now = time.perf_counter()
        self.total.seconds += 0.0 if self._clock is None else now - self._clock
        self._clock = now

    def begin(self, micro_batch: MicroBatch, measured: Measured) -> Computing:
        """Check a micro-batch whose forward comes next; its loss is made as the answer's `loss` says.

        Raises `DataError` if the collator has changed what was planned.
        """
        self._checks(micro_batch, measured)
        step, before = micro_batch.step, self._uncounted
        if before is not None and before.epoch != step.epoch:  # left before its end
            self._end_epoch(before)
        self._uncounted = step
        weights = token_weights(micro_batch, self.config.loss_scaling, self.loader.world_size)
        self.computing = Computing(micro_batch, measured, loss_of(weights, micro_batch.units, measured.filler_rows))
        return self.computing

    def end(self) -> None:
        """Count the micro-batch whose backward is done and, with the last one of an optimizer step, that step."""
        done, self.computing = self.computing, None
        assert done is not None, "begin comes first"
        self.count([done])

    def count(self, parts: Sequence[Computing]) -> None:
        """Count a micro-batch as `end` does, which was trained on in these parts."""
        micro_batch = parts[0].micro_batch
        for part, done in enumerate(parts):
            if self._audit is not None:
                step = self.optimizer_steps + 1
                self._audit.add(audit_line(done, self.loader.rank, step, self._waited, part, len(parts)))
                self._waited = 0.0
        total = self.total
        total.add(micro_batch.totals, self.loader.world_size)
        for plan in (plan for done in parts for plan in done.encoded):
            total.encoder_work += int(plan.load.sum())
            total.awaited_encoder_work += len(plan.load) * int(plan.load.max())
            self.encoder_patches = (plan.patches + (self.encoder_patches or 0)).tolist()
        if micro_batch.ends_optimizer_step:
            self._end_optimizer_step(micro_batch.step)

    def interval_metrics(self) -> dict[str, float]:
        """The `odb/...` entries since the last call."""
        self._tick()
        self.interval = self.total.since(self._at_log)
        self._at_log, self._has_logged = dataclasses.replace(self.total), True
        return self._metrics(self.interval)

    def metrics(self) -> dict[str, float]:
        """The `odb/...` entries of the whole run."""
        self._tick()
        return self._metrics(self.total)

    def _metrics(self, statistics: StepStatistics) -> dict[str, float]:
        metrics = statistics.metrics(self.config.token_budget, self.loader.world_size)
        if "skip" in (self.config.on_error, self.config.oom):
            metrics["odb/lost_weight"] = round(statistics.lost_weight, 6)
        if self.config.oom == "split":
            metrics["odb/oom_cuts"] = statistics.oom_cuts
        if self.encoder_patches:
            metrics["odb/encoder_balance"] = round(statistics.encoder_balance, 4)
        return metrics

    def lose(self, rows: Sequence[LateRow], reason: str) -> None:
        """Count rows of all ranks that were left out after their optimizer step had begun."""
        self._left_out[reason] += len(rows)
        self.total.subtract_late(rows)

    def stats(self) -> dict[str, float]:
        """`metrics`, and odb/left_out: rows left out on all ranks; odb/over_budget: micro-batches of all ranks that the
        collator made larger than the budget."""
        self._take_reports()
        return self.metrics() | {"odb/left_out": self.left_out.total(), "odb/over_budget": self.num_over_budget}

    @property
    def left_out(self) -> Counter[str]:
        """Rows left out on all ranks, by reason; in the current epoch as of its last plan."""
        return self._left_out if self._uncounted is None else self._left_out + self._uncounted.rejected

    def summary(self) -> dict[str, Any]:
        """The content of `odb_summary.json`; the names are public."""
        self._take_reports()
        self._tick()
        return {
            "dataset_samples": self.loader.num_samples,
            "optimizer_steps": self.optimizer_steps,
            **self.total.summary(),
            "encoder_patches": self.encoder_patches,
            "lowered_to": None if self.loader.lowered is None else dataclasses.asdict(self.loader.lowered),
            "left_out": dict(self.left_out),
            "remainder": self._remainder,
            "overlong": self._overlong + (0 if self._uncounted is None else self._uncounted.overlong),
            "over_budget": self.num_over_budget,
            "ranks": self.loader.world_size,
            "config": self.config.to_dict(),
        }

    def resume_at(self, optimizer_steps: int) -> None:
        """Continue after that many optimizer steps of the run; files are appended to."""
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
        """The share of each sample in the loss of its optimizer step."""
        weights = token_weights(micro_batch, self.config.loss_scaling, self.loader.world_size)
        return [weight * units / self.loader.world_size for weight, units in zip(weights, micro_batch.units)]

    def _take_reports(self) -> None:
        """Count the rows that failed to be collated and the micro-batches over budget, on all ranks."""
        reports = self.loader.reports.take()
        self.num_over_budget += reports.over_budget
        if reports.failed:
            self._left_out[COLLATION] += reports.failed
        self.total.subtract_late(reports.late)

    def _end_optimizer_step(self, step: OptimizerStep) -> None:
        self.optimizer_steps += 1
        self.loader.consume(step)
        self._take_reports()
        for row in self.loader.left_out.through(step.index):
            if self._left_out_file is not None:
                self._left_out_file.add({**row, "optimizer_step": self.optimizer_steps})
        for file in self._files:
            file.flush()
        self.total.optimizer_steps += 1
        self.total.squared_units += step.units**2
        if step.last:
            self._end_epoch(step)

    def _end_epoch(self, step: OptimizerStep) -> None:
        """step: the last one of the epoch that was trained on."""
        self._left_out += step.rejected
        self._remainder += step.remainder
        self._overlong += step.overlong
        self._uncounted = None
