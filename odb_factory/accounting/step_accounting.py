"""`StepAccounting`: everything that is counted, checked and written while optimizer steps are taken."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from odb_factory.accounting.losses import OTHER_LOSS, loss_of
from odb_factory.accounting.statistics import Audit, Computing, StepStatistics, audit_line
from odb_factory.config import ResolvedConfig
from odb_factory.data.collate import Collated
from odb_factory.data.loader import ODBLoader
from odb_factory.data.samples import COLLATION, Measured, MicroBatch, OptimizerStep, SampleInfo
from odb_factory.errors import DataError
from odb_factory.log import get_logger
from odb_factory.planner import Budget

logger = get_logger(__name__)

OVER_BUDGET, EMPTIED = "over_budget", "emptied"
"""Micro-batches that the collator made larger than the budget; of which every row has been left out after the plan."""

# ----------------------------------------------------------------------------------------------------------------------
# Logged once at the start: what one optimizer step is, and how it is cut.

FEW_SAMPLES = 1.5
"""Samples of a micro-batch, in the mean, up to which most have one sample."""


def log_first_step(
    loader: ODBLoader, config: ResolvedConfig, first: OptimizerStep | None, *, in_loop: bool = False
) -> None:
    """first: the first optimizer step, if it is planned. in_loop: of a custom loop."""
    if first is None:
        return
    limits = loader.budget.limits.least(loader.lowered)
    fill = first.padded_tokens / (first.num_micro_batches * loader.world_size * limits.token_budget)
    size, patches = loader.global_batch_size, limits.max_patches
    ranks = "one rank" if loader.world_size == 1 else f"each of {loader.world_size} ranks"
    source = "without odb" if in_loop else "in stock training"
    of_stock = loader.rule.batch_size * loader.rule.accumulation * loader.world_size
    samples = f"as many samples as fill its micro-batches (the first: {first.samples})"
    if size is not None:
        as_stock = f", as {source}" if size == of_stock else f" ({of_stock} {source})"
        samples = f"{min(size, loader.num_samples or size)} samples{as_stock}"
    logger.info(
        "one optimizer step: %s; the first is cut into %s on %s, of at most %d tokens%s each (%.0f %% full)",
        samples,
        "1 micro-batch" if first.num_micro_batches == 1 else f"{first.num_micro_batches} micro-batches",
        ranks,
        limits.token_budget,
        "" if patches is None else f" and {patches} patches",
        100 * fill,
    )
    if fill > 1 and first.samples < FEW_SAMPLES * first.num_micro_batches * loader.world_size:
        logger.warning(
            "token_budget %d is smaller than most samples of the first optimizer step: most micro-batches hold "
            "one sample; raise token_budget, or lower cutoff_len",
            config.token_budget,
        )
    if size is not None and size <= loader.world_size and (loader.num_samples is None or loader.num_samples > size):
        logger.warning(
            "an optimizer step has %d samples for %d ranks, so nothing can be batched: %s",
            size,
            loader.world_size,
            'give global_batch_size="fill" (optimizer steps as large as the budget), or the batch_size and '
            "gradient_accumulation_steps that the loop would have without odb"
            if in_loop
            else "raise per_device_train_batch_size or gradient_accumulation_steps, or set `global_batch_size`",
        )


# ----------------------------------------------------------------------------------------------------------------------
# `BatchChecks`: compare every collated micro-batch with its plan, before it is trained on.

WARNINGS = {
    "one row": "the collator lays the samples of rows {ids} into one row of {measured.length} tokens, but they were "
    "planned as padded rows: the budget is not filled, and padding figures are those of the plan; the audit has the "
    "shape that was collated. With `layout: flat` they are planned as they are laid.",
    "order": "rows {ids}: the collator returns them with {units} units and they have {planned}, so it has changed "
    "their order or their labels; `ids` of the step info and of the audit are not in the order of the rows",
    "padded": "layout: padded ({measured}) for a micro-batch that was planned flat; {measured.why_padded}. Others are "
    "not logged; set `layout: padded` if memory is short, then padding counts towards the budget",
    "overlong": "overlong samples travel alone: row {ids[0]} has {measured}, the budget is {budget}",
    "over budget": "rows {ids} were collated to {measured}, above the budget of {budget}: the collator adds more than "
    "the plan knows of, or cost_fn returns less than there is; give what it adds (collation=) or lower the budget if "
    "memory is short",
}
"""Each is logged once."""


class BatchChecks:
    """Call it with each micro-batch and what its collated tensors measure.

    Raises `DataError` if the collator has left out samples, has left out or moved labels that the loss is weighed by,
    or if the samples' weights differ and it does not make one row (flat: segment) of each. Logs `WARNINGS`.
    """

    def __init__(self, config: ResolvedConfig, budget: Budget):
        self._config, self._budget = config, budget
        self._logged: set[str] = set()

    def __call__(self, micro_batch: MicroBatch, measured: Measured) -> None:
        if micro_batch.idle:
            return
        ids, planned = list(micro_batch.ids), list(micro_batch.units)
        rows = len(ids) if measured.segments else measured.rows
        units = None if measured.units_by_row is None or rows != len(ids) else list(measured.units_by_row)
        is_reordered = units is not None and units != planned + [0] * (len(units) - len(ids))
        self._check_loss(micro_batch, measured, rows, is_reordered)
        exceeds = not measured.why_padded and not measured.is_within(self._budget)
        holds = {
            "one row": rows < len(ids),
            "order": is_reordered,
            "padded": bool(measured.why_padded),
            "overlong": exceeds and len(ids) == 1,
            "over budget": exceeds and len(ids) > 1,
        }
        for kind in [kind for kind, applies in holds.items() if applies and kind not in self._logged]:
            self._logged.add(kind)
            values = {"ids": ids, "units": units, "planned": planned, "measured": measured, "budget": self._budget}
            logger.warning("%s", WARNINGS[kind].format(**values))

    def _check_loss(self, micro_batch: MicroBatch, measured: Measured, rows: int, is_reordered: bool) -> None:
        """rows: those that samples stand in, or segments of a flat row."""
        ids, scaling = list(micro_batch.ids), self._config.loss_scaling
        # One row a sample, or all in one row; a collator of pairs may make more rows.
        shares_one_row = measured.rows == 1 and measured.length >= micro_batch.tokens
        if not measured.segments and measured.rows < len(ids) and not shares_one_row:
            raise DataError(
                f"rows {ids}: the collator made {measured.rows} rows of {measured.length} tokens of "
                f"these {len(ids)} samples, so some were left out; keep every sample, or leave such rows out "
                "of the dataset (a row without supervised tokens is left out and counted)."
            )
        if scaling not in ("approx", "none") and measured.units != micro_batch.num_units:
            raise DataError(
                f"rows {ids}: the collator left {measured.units} units of "
                f"{micro_batch.num_units} observed, so the loss cannot be weighed exactly; use a collator that "
                "keeps labels as they are (and `ignore_pad_token_for_loss: true`), or leave `labels` out of the rows "
                "if it makes them."
            )
        if (rows != len(ids) or is_reordered) and len(set(micro_batch.weights)) > 1:
            actual = f"{rows} rows of these {len(ids)} samples" if rows != len(ids) else "their labels in another order"
            raise DataError(
                f"rows {ids}: the collator made {actual}, and loss_scaling {scaling!r} gives the samples different "
                f"weights; use a collator that makes one row of each, in their order, or {OTHER_LOSS}."
            )


# ----------------------------------------------------------------------------------------------------------------------


class StepAccounting:
    """The accounting of one run of a loader, in a trainer or in a custom loop.

    audit_dir: folder of `odb_audit_rank{r}.jsonl`; None: not written.
    encoder_patches: encoded by each rank since the run began or was resumed; empty if they do not share this work.
    optimizer_steps: taken in the run, those before a resume included. num_over_budget: micro-batches of two or more
        samples that the collator made larger than the budget, on all ranks.
    computing: the micro-batch between `begin` and `end`. total: the sums since the run began or was resumed.

    Example::

        for micro_batch, measured, batch in loader:
            loss = accounting.begin(micro_batch, measured).loss
            (model(**batch).loss * loss.scale).backward()  # if loss.row_weights is None
            accounting.end()
            if micro_batch.ends_optimizer_step: ...
    """

    def __init__(self, loader: ODBLoader, config: ResolvedConfig, audit_dir: str | Path | None = None):
        self.loader, self.config = loader, config
        self.total = StepStatistics()
        self.optimizer_steps = self.num_over_budget = self._emptied = 0
        self.computing: Computing | None = None
        self.encoder_patches: list[int] = []
        self._checks = BatchChecks(config, loader.budget)
        self._audit = None if audit_dir is None else Audit(Path(audit_dir), loader.rank)
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
            self._has_logged, self._at_log["seconds"] = False, self.total["seconds"]
        before = self.total["seconds"]
        item = next(collated, None)
        self._tick()
        self._waited += self.total["seconds"] - before
        self.total["data_wait_s"] += self.total["seconds"] - before
        if item is not None:
            micro_batch, measured, _ = item
            self.num_over_budget += len(micro_batch.ids) > 1 and not measured.is_within(self.loader.budget)
            lost = self.leave_out(micro_batch.failed, COLLATION)
            self._left_out[COLLATION] += len(lost)
            self.total["lost_weight"] += sum(lost)
        return item

    def _tick(self) -> None:
        """Bring `seconds` and `skipped` up to date; seconds count from the first call on."""
        now, self.total["skipped"] = time.perf_counter(), self.left_out.total()
        self.total["seconds"] += 0.0 if self._clock is None else now - self._clock
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
        self.computing = Computing(micro_batch, measured, loss_of(micro_batch.weights, micro_batch.units))
        return self.computing

    def end(self) -> None:
        """Count the micro-batch whose backward is done and, with the last one of an optimizer step, that step."""
        computed, self.computing = self.computing, None
        assert computed is not None, "begin comes first"
        self.count([computed])

    def count(self, parts: Sequence[Computing]) -> None:
        """Count a micro-batch as `end` does, which was trained on in these parts."""
        micro_batch = parts[0].micro_batch
        for part, computed in enumerate(parts):
            if self._audit is not None:
                step = self.optimizer_steps + 1
                self._audit.add(audit_line(computed, self.loader.rank, step, self._waited, part, len(parts)))
                self._waited = 0.0
        self.total.add(micro_batch.totals, self.loader.world_size)
        self._emptied += micro_batch.idle and bool(micro_batch.failed)
        for plan in (plan for computed in parts for plan in computed.encoded):
            self.encoder_patches = (plan.patches + (self.encoder_patches or 0)).tolist()
        if micro_batch.ends_optimizer_step:
            self._end_optimizer_step(micro_batch.step)

    def interval_metrics(self) -> dict[str, float]:
        """The `odb/...` entries since the last call."""
        self._tick()
        interval = self.total.since(self._at_log)
        self._at_log, self._has_logged = StepStatistics(self.total), True
        return interval.metrics(self.config.token_budget, self.loader.world_size)

    def metrics(self) -> dict[str, float]:
        """The `odb/...` entries of the whole run."""
        self._tick()
        return self.total.metrics(self.config.token_budget, self.loader.world_size)

    def leave_out(self, failed: Iterable[tuple[SampleInfo, str]], reason: str) -> list[float]:
        """Log that late rows are left out, and why.

        Returns the share of each in the loss of its optimizer step, which is lost: the others keep their weights.
        """
        lost = []
        for sample, cause in failed:
            lost.append(share := sample.weight * sample.units / self.loader.world_size)
            description = self.loader.describe(sample.id)
            message = f"{description}: {cause}; {share:.2%} of the loss of its optimizer step is lost"
            self.loader.left_out.leave_out(reason, message)
        return lost

    def lose(self, shares: Sequence[float], reason: str) -> None:
        """Count rows that were left out after their optimizer step had begun. shares: of the loss of that step."""
        self._left_out[reason] += len(shares)
        self.total["samples"] -= len(shares)
        self.total["lost_weight"] += sum(shares)

    @property
    def left_out(self) -> Counter[str]:
        """Rows left out on all ranks, by reason; in the current epoch as of its last plan."""
        return self._left_out if self._uncounted is None else self._left_out + self._uncounted.rejected

    def summary(self) -> dict[str, Any]:
        """The content of `odb_summary.json`; the names are public."""
        self._tick()
        return {
            "dataset_samples": self.loader.num_samples,
            **self.total.summary(),
            "optimizer_steps": self.optimizer_steps,
            "encoder_patches": self.encoder_patches,
            "lowered_to": None if self.loader.lowered is None else dataclasses.asdict(self.loader.lowered),
            "left_out": dict(+self.left_out),  # without reasons that no row had
            "remainder": self._remainder,
            "overlong": self._overlong + (0 if self._uncounted is None else self._uncounted.overlong),
            "over_budget": self.num_over_budget,
            "ranks": self.loader.world_size,
            "config": self.config.to_dict(),
        }

    def resume_at(self, optimizer_steps: int) -> None:
        """Continue after that many optimizer steps of the run; the audit is appended to."""
        self.optimizer_steps = optimizer_steps
        if self._audit is not None:
            self._audit.append = True

    def sum_over_ranks(self) -> None:
        """Add up what each rank has counted for itself. Collective; at the end of a run."""
        own_counts = Counter(
            {COLLATION: self._left_out[COLLATION], OVER_BUDGET: self.num_over_budget, EMPTIED: self._emptied}
        )
        counts = self.loader.over_all_ranks(own_counts)
        self._left_out[COLLATION], self.num_over_budget = counts[COLLATION], counts[OVER_BUDGET]
        self.total["samples"] -= counts[COLLATION]
        self.total["idle_micro_batches"] += counts[EMPTIED]

    def close(self) -> None:
        """Close the audit; safe to call twice."""
        if self._audit is not None:
            self._audit.close()

    def _end_optimizer_step(self, step: OptimizerStep) -> None:
        self.optimizer_steps += 1
        self.loader.consume(step)
        if self._audit is not None:
            self._audit.flush()
        self.total["optimizer_steps"] += 1
        if step.last:
            self._end_epoch(step)

    def _end_epoch(self, step: OptimizerStep) -> None:
        """step: the last one of the epoch that was trained on."""
        self._left_out += step.rejected
        self._remainder += step.remainder
        self._overlong += step.overlong
        self._uncounted = None
