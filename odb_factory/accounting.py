"""Account for micro-batches: the weighted loss of each (I8, I9), checks, figures of the log, audit and summary."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from odb_factory.data.collate import Collated
from odb_factory.data.loader import ODBLoader
from odb_factory.data.observe import IGNORE_INDEX
from odb_factory.data.samples import COLLATION, Measured, MicroBatch, OptimizerStep, SampleInfo
from odb_factory.errors import ConfigError, DataError, one_line
from odb_factory.log import get_logger
from odb_factory.model.chunked import AfterHead, without_autocast
from odb_factory.model.flat_row import copy_to, forward_replaced
from odb_factory.model.head import LOG_PROBS, WithoutLogits, has_routers, model_with_labels, own_loss
from odb_factory.planner import EncoderPlan

OTHER_LOSS = (
    "train without odb (with `loss_scaling: exact` all tokens of an optimizer step weigh the same, another loss than "
    "stock's)"
)


def loss_of(weights: Sequence[float], units: Sequence[int]) -> tuple[float, tuple[float, ...] | None]:
    """`scale` and `row_weights` of a micro-batch (see `Computing`).

    weights: the weight of each unit of each sample (none: an idle micro-batch). units: number of units of each sample.
    """
    if len(set(weights)) <= 1:
        return weights[0] * sum(units) if weights else 0.0, None
    scale = sum(weight * n for weight, n in zip(weights, units))
    return scale, tuple(weight / scale for weight in weights)


def weighted_token_loss(
    logits: Tensor,
    labels: Tensor | None,
    row_weights: Sequence[float],
    *,
    segments: Sequence[int] = (),
    shift_labels: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Sum over rows of row weight x the sum of token losses of the row, in float32 also in autocast (float64 stays).

    logits: [rows, length, vocabulary]; labels: [rows, length], `ignore_index` where a token has no loss. The token at t
    predicts label t + 1, as in transformers' `ForCausalLMLoss`; shift_labels: labels that are already shifted.
    row_weights: one for each row, or one for each sample of a flat micro-batch. segments: token counts of the samples
    of a flat micro-batch, as in `Measured`; segments after the samples have weight 0.
    The memory peak is that of the mean plus one number for each token. Nothing waits for the device.
    Raises `DataError` if the logits do not belong to these rows or segments.
    """
    rows, length = logits.shape[:2]
    expected = (1, sum(segments)) if segments else (len(row_weights), length)
    if (rows, length) != expected:
        raise DataError(
            f"the model computes its loss over logits of {rows} rows of {length} tokens and the micro-batch has "
            f"{expected[0]} rows of {expected[1]}, so its samples cannot be weighed; {OTHER_LOSS}."
        )
    if shift_labels is None:
        assert labels is not None
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    with without_autocast(logits.device.type):
        logits = in_float32(logits)
        targets = shift_labels.to(logits.device).reshape(-1)
        losses = functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), targets, ignore_index=ignore_index, reduction="none"
        )
        weights = copy_to(torch.as_tensor(by_position(row_weights, segments), dtype=losses.dtype), losses.device)
        return (losses.view(rows, -1) * weights).sum()


def by_position(row_weights: Sequence[float], segments: Sequence[int]) -> np.ndarray:
    """The weights as [rows, 1], or as [1, length] for a flat row."""
    if not segments:
        return np.asarray(row_weights, dtype=np.float64)[:, None]
    return np.repeat([*row_weights, *[0.0] * (len(segments) - len(row_weights))], segments)[None]


def in_float32(values: Tensor) -> Tensor:
    """The values in float32, so that sums and products of losses do not round to bfloat16 or half; float64 stays."""
    return values if values.dtype == torch.float64 else values.float()


def sum_of_losses(losses: Sequence[Tensor], *, skip_non_finite: bool) -> Tensor:
    """The loss of an optimizer step: the sum of the weighted losses of its micro-batches, in float32 (float64 stays).

    losses: one scalar for each micro-batch. skip_non_finite: leave out NaN and infinite losses, unless all are, like
    the Trainer's `logging_nan_inf_filter`, which sees one loss for each optimizer step. Does not wait for the device.
    """
    stacked = in_float32(torch.stack(tuple(losses)))
    total = stacked.sum()
    if skip_non_finite:
        finite = stacked.isfinite()
        total = torch.where(finite.any(), stacked.where(finite, 0.0).sum(), total)
    return total


class TokenLoss:
    """Lets the forward of a model compute the weighted loss, so that auxiliary losses (of routers) are included.

    model: a transformers model, also wrapped by PEFT, DDP, FSDP, DeepSpeed or torch.compile. The loss is computed
    without logits (`odb_factory.model.head`) if the model allows it. Otherwise causal models call
    `self.loss_function(logits, labels, ...)`, which is replaced within `weighing`. One object serves a whole run.
    loss_scaling: for error messages. needs_logits: the reason if logits are needed. is_measured: the loss of the
    model is known to be the cross entropy of its logits, whatever code computes it.

    Example::

        token_loss = TokenLoss(model, "stock")
        with token_loss.weighing(row_weights, measured.segments, num_units):
            output = model(**batch)
        (output.loss * scale).backward()
    """

    def __init__(
        self, model: nn.Module, loss_scaling: str, needs_logits: str | None = None, *, is_measured: bool = False
    ):
        from transformers.loss.loss_utils import LOSS_MAPPING  # heavy, and the model of a custom loop may need none

        self._loss_scaling = loss_scaling
        models: list[Any] = [module for module in model.modules() if _has_loss_function(module)]
        self._name = type(models[0] if models else model).__name__
        self._models = [module for module in models if module.loss_function is LOSS_MAPPING["ForCausalLM"]]
        self.without_logits = WithoutLogits(model, needs_logits)
        self._inner = inner = model_with_labels(model)
        self._computes_itself = (
            is_measured
            and inner is not None
            and not (inner in self._models and (isinstance(own_loss(inner), AfterHead) or has_routers(inner)))
        )
        # Liger's kernel
        self._skips_logits = inner is not None and "skip_logits" in signature(inner.forward).parameters

    @contextlib.contextmanager
    def weighing(
        self,
        row_weights: Sequence[float] | None,
        segments: Sequence[int] = (),
        num_units: int = 1,
        num_supervised: int | None = None,
        routers_weigh: float = 1.0,
    ) -> Iterator[None]:
        """Weight the loss of one forward with labels.

        row_weights: one for each row of the micro-batch, or one for each sample of a flat micro-batch with these
        segments (`Measured.segments`); None: all tokens weigh 1 / num_units, as in the model's own mean.
        num_supervised: tokens with a loss, if known. routers_weigh: factor of the model's coefficient of router losses.
        Raises `ConfigError` at the end if the weights differ and the model has computed its loss in another way.
        """
        door = self.without_logits
        if row_weights is None:
            with door.weighing(1 / num_units, num_supervised), door.router_losses_times(routers_weigh):
                yield
            return
        # What replaces the model's loss, its forward, or Liger's choice to make no logits.
        num_calls = 0

        def loss_function(
            logits: Tensor,
            labels: Tensor | None,
            vocab_size: int | None = None,
            num_items_in_batch: Any = None,
            ignore_index: int = IGNORE_INDEX,
            shift_labels: Tensor | None = None,
            **_: Any,
        ) -> Tensor:
            """Replaces `ForCausalLMLoss`."""
            nonlocal num_calls
            num_calls += 1
            options: dict[str, Any] = {"shift_labels": shift_labels, "ignore_index": ignore_index}
            return weighted_token_loss(logits, labels, row_weights, segments=segments, **options)

        def from_logits(own: Callable[..., Any], *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
            """Replaces a forward that computes another loss."""
            output = own(*args, **kwargs)
            if labels is None:
                return output
            return type(output)(**{**output, "loss": loss_function(output["logits"], labels)})

        def with_logits(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs, skip_logits=False)

        def log_probs_weighed(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            """Replaces a forward that may return log-probabilities, whose sum / `num_units` is the loss."""
            nonlocal num_calls
            output = own(*args, **kwargs)
            if (log_probs := getattr(output, LOG_PROBS, None)) is not None:
                num_calls += 1
                of_labels = (weights[:, : log_probs.shape[1]] * num_units).float()
                output[LOG_PROBS] = in_float32(log_probs) * copy_to(of_labels, log_probs.device)
            return output

        # In place for one forward. A forward that reached none of them has not weighed its samples.
        weights = torch.from_numpy(by_position(row_weights, segments))
        with contextlib.ExitStack() as stack:
            stack.enter_context(door.weighing(weights, num_supervised))
            stack.enter_context(door.router_losses_times(routers_weigh))
            if door.reason is not None and self._inner is not None:
                forward = with_logits if self._skips_logits else log_probs_weighed
                forward = from_logits if self._computes_itself else forward
                stack.enter_context(forward_replaced(self._inner, forward))
            for module in self._models:
                stack.callback(setattr, module, "loss_function", module.loss_function)
                module.loss_function = loss_function
            yield
        if not num_calls and not door.acted:
            raise ConfigError(
                f"odb.loss_scaling: {self._loss_scaling!r} gives the samples of a micro-batch different weights, and "
                f"{self._name} computes its loss without transformers' ForCausalLMLoss (by a fused kernel such as "
                "Liger's, or by custom code), which odb does not replace: "
                f"{door.reason or 'its forward was not reached'}; turn the kernel off, or {OTHER_LOSS}."
            )


def _has_loss_function(module: nn.Module) -> bool:
    """Whether the module is a transformers model that takes labels (a vision tower takes none)."""
    kind = type(module)  # the class has the signature, even if the module's own forward is wrapped
    function = getattr(kind, "loss_function", None)
    return (
        isinstance(function, property) and function.fset is not None and "labels" in signature(kind.forward).parameters
    )


logger = get_logger(__name__)


@dataclass(slots=True)
class Computing:
    """A micro-batch, or a part of a micro-batch, in forward and backward.

    scale: factor of the model's loss: the share of the micro-batch in the loss of its optimizer step x the number of
        ranks that gradients are averaged over; 0 for an idle micro-batch.
    row_weights: None: the model's loss is its own mean over the units of the micro-batch. Else one number for each
        sample (a row, or a segment of a flat row): the sum of row weight x token loss replaces the mean (see
        `TokenLoss`).
    is_weighed: the loss has been computed with its weights. encoded: runs of the vision tower whose work the ranks have
    shared. pads_left: for each row, whether padding precedes its tokens; empty if unknown.

    Auxiliary losses (MoE routers) are multiplied by `scale` too, and `TokenLoss.weighing` weights them as in stock.
    They depend on the samples of a micro-batch, so they cannot equal stock's exactly.
    """

    micro_batch: MicroBatch
    measured: Measured
    scale: float
    row_weights: tuple[float, ...] | None = None
    is_weighed: bool = False
    encoded: Sequence[EncoderPlan] = ()
    pads_left: Sequence[bool] = ()

    @property
    def num_items(self) -> int:
        """Units that the loss is a mean over (>= 1)."""
        return max(self.measured.units, 1)


# ----------------------------------------------------------------------------------------------------------------------
# Before the training of a micro-batch.

FEW_SAMPLES = 1.5
"""If micro-batches have fewer samples than this on average, most have a single sample."""


def log_first_step(loader: ODBLoader, first: OptimizerStep, *, in_loop: bool = False) -> None:
    """Log the size of an optimizer step and how the first one is cut. in_loop: the training is a custom loop."""
    limits = loader.budget.limits.least(loader.lowered)
    fill = first.padded_tokens / (first.num_micro_batches * loader.world_size * limits.token_budget)
    size, patches = loader.global_batch_size, limits.max_patches
    samples = f"as many samples as fill its micro-batches (the first: {first.samples})"
    if size is not None:
        source = "without odb" if in_loop else "in stock training"
        of_stock = loader.rule.batch_size * loader.rule.accumulation * loader.world_size
        as_stock = f", as {source}" if size == of_stock else f" ({of_stock} {source})"
        samples = f"{min(size, loader.num_samples or size)} samples{as_stock}"
    logger.info(
        "one optimizer step: %s; the first is cut into %s on %s, of at most %d tokens%s each (%.0f %% full)",
        samples,
        "1 micro-batch" if first.num_micro_batches == 1 else f"{first.num_micro_batches} micro-batches",
        "one rank" if loader.world_size == 1 else f"each of {loader.world_size} ranks",
        limits.token_budget,
        "" if patches is None else f" and {patches} patches",
        100 * fill,
    )
    # Two settings under which odb has nothing to do.
    if fill > 1 and first.samples < FEW_SAMPLES * first.num_micro_batches * loader.world_size:
        logger.warning(
            "token_budget %d is smaller than most samples of the first optimizer step: most micro-batches hold "
            "one sample; raise token_budget, or lower cutoff_len",
            loader.config.token_budget,
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
"""Each is logged once for a run."""


def warnings_of(micro_batch: MicroBatch, measured: Measured, loader: ODBLoader) -> dict[str, dict[str, Any]]:
    """The `WARNINGS` that apply to a collated micro-batch, and the values in their texts.

    Raises `DataError` if the collator has left out samples, if it has left out or moved labels that the loss weights
    depend on, or if the samples have different weights and not one row (flat: segment) each.
    """
    if micro_batch.idle:
        return {}
    ids, planned, scaling = list(micro_batch.ids), list(micro_batch.units), loader.config.loss_scaling
    rows = len(ids) if measured.segments else measured.rows
    units = None if measured.units_by_row is None or rows != len(ids) else list(measured.units_by_row)
    is_reordered = units is not None and units != planned + [0] * (len(units) - len(ids))
    # One row for each sample, or one row for all; a collator of pairs may make more rows.
    if rows < len(ids) and not (rows == 1 and measured.length >= micro_batch.tokens):
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
    exceeds = not measured.why_padded and not measured.is_within(loader.budget)
    applies = {
        "one row": rows < len(ids),
        "order": is_reordered,
        "padded": bool(measured.why_padded),
        "overlong": exceeds and len(ids) == 1,
        "over budget": exceeds and len(ids) > 1,
    }
    values = {"ids": ids, "units": units, "planned": planned, "measured": measured, "budget": loader.budget}
    return {kind: values for kind in WARNINGS if applies[kind]}


# ----------------------------------------------------------------------------------------------------------------------
# Public names: figures of the log, lines of the audit, entries of the summary.

Totals = defaultdict[str, float]
"""Totals over all ranks by name: those of `SUMMARY`, skipped (rows left out), and awaited_tokens (padded_tokens if
every rank had as many as the fullest rank of each micro-step)."""
FROM_TOTALS = ("samples", "tokens", "padded_tokens", "units", "moved")
"""Totals of these fields of `MicroStepTotals`."""
SUMMARY = (
    "optimizer_steps", "micro_steps", "idle_micro_batches", "samples", "tokens", "padded_tokens", "units", "moved",
    "oom_cuts", "lost_weight", "data_wait_s", "seconds",
)  # fmt: skip
"""Totals that are entries of `odb_summary.json`. tokens are real, padded_tokens are collated.
oom_cuts: how often a micro-batch, or a part of one, was cut in two because it did not fit into memory. lost_weight: the
loss of rows left out after their plan, as a share of the loss of an optimizer step."""
AUDIT_FILE, SUMMARY_FILE = "odb_audit_rank{rank}.jsonl", "odb_summary.json"


def ratios_of(sums: Totals) -> dict[str, float]:
    """padding_ratio: share of padding and dummy media in the collated tokens, 0 to 1. balance: padded_tokens /
    awaited_tokens, 0 to 1; 1 if no rank waits for another."""
    padded, awaited = sums["padded_tokens"], sums["awaited_tokens"]
    return {
        "padding_ratio": 1 - sums["tokens"] / padded if padded else 0.0,
        "balance": padded / awaited if awaited else 1.0,
    }


def metrics_of(sums: Totals, token_budget: int, world_size: int) -> dict[str, float]:
    """The `odb/...` entries of a log line.

    odb/micro_batches: mean number of micro-batches of an optimizer step on each rank. odb/idle: idle micro-batches.
    odb/skipped: rows left out. odb/peak_memory_gib: peak of this process on its GPU since its start.
    """
    seconds, ratios = sums["seconds"] or math.inf, ratios_of(sums)
    budgets = max(sums["micro_steps"], 1) * world_size * token_budget
    metrics = {
        "odb/tokens_per_second": round(sums["tokens"] / seconds, 1),
        "odb/samples_per_second": round(sums["samples"] / seconds, 3),
        "odb/padding_ratio": round(ratios["padding_ratio"], 4),
        "odb/budget_use": round(sums["padded_tokens"] / budgets, 4),
        "odb/micro_batches": round(sums["micro_steps"] / max(sums["optimizer_steps"], 1), 2),
        "odb/balance": round(ratios["balance"], 4),
        "odb/data_wait_share": round(sums["data_wait_s"] / seconds, 4),
        "odb/skipped": sums["skipped"],
        "odb/idle": sums["idle_micro_batches"],
    }
    if torch.cuda.is_initialized():
        metrics["odb/peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return metrics


def audit_line(
    computed: Computing, rank: int, optimizer_step: int, data_wait_s: float = 0.0, part: int = 0, parts: int = 1
) -> dict[str, Any]:
    """The audit line of a micro-batch that this rank has trained on.

    optimizer_step: number in the run, from 1. data_wait_s: wait for data since the previous line. part, parts: number
    of the part, from 0, and of all parts of a micro-batch that `oom: split` has cut.
    """
    micro_batch, measured, weights = computed.micro_batch, computed.measured, computed.row_weights
    encoded = [int(plan.patches[rank]) for plan in computed.encoded]  # images of any rank
    return {
        "epoch": micro_batch.step.epoch,
        "optimizer_step": optimizer_step,
        "micro_batch": micro_batch.index,
        "micro_batches": micro_batch.step.num_micro_batches,
        "part": part,
        "parts": parts,
        "ids": list(micro_batch.ids),
        "lengths": list(micro_batch.lengths),
        "rows": measured.rows,
        "length": measured.length,
        "segments": list(measured.segments),
        "patches": measured.patches,
        "encoder_patches": sum(encoded) if encoded else measured.patches,
        **measured.media._asdict(),
        "units": micro_batch.num_units,
        # The weight of the mean loss of the micro-batch, or of each token loss of each sample.
        "weight": computed.scale if weights is None else [computed.scale * weight for weight in weights],
        "idle": micro_batch.idle,
        "data_wait_s": round(data_wait_s, 4),
        "time": round(time.time(), 3),
    }


def summary_line(summary: Mapping[str, Any], steps: int) -> str:
    """summary: of `StepAccounting.summary`. steps: optimizer steps since the run began or was resumed."""
    before = summary["optimizer_steps"] - steps
    resumed = f" after {before} of a run before" if before else ""
    parts = [
        f"done: {summary['samples']} samples in {steps} optimizer steps{resumed}",
        f"{summary['micro_steps']} micro-batches on each rank, {summary['idle_micro_batches']} idle on all ranks",
        f"padding {summary['padding_ratio']:.1%}, balance {summary['balance']:.3f}",
    ]
    left_out = ", ".join(f"{count} {reason}" for reason, count in summary["left_out"].items())
    counts = {
        f"left out: {left_out}": left_out,
        f"rows that epochs ended without: {summary['remainder']}": summary["remainder"],
        f"overlong samples, each alone: {summary['overlong']}": summary["overlong"],
        f"micro-batches cut because memory was short: {summary['oom_cuts']}": summary["oom_cuts"],
        f"budgets lowered to: {summary['lowered_to']}": summary["lowered_to"],
    }
    return "; ".join(parts + [text for text, count in counts.items() if count])


class StepAccounting:
    """Checks, counts and writes the micro-batches of one run of a loader, in a trainer or in a custom loop.

    audit_dir: folder of `odb_audit_rank{r}.jsonl`; None: no audit.
    encoder_patches: patches that each rank has encoded since the start or resume; empty if ranks do not share images.
    optimizer_steps: optimizer steps of the run, those before a resume included.
    computing: the micro-batch between `begin` and `end`. total: the sums since the start or resume.
    For each micro-batch call `next`, then `begin`, compute its loss with the returned weights, then call `end`.
    """

    def __init__(self, loader: ODBLoader, audit_dir: str | Path | None = None):
        self.loader = loader
        self.total: Totals = defaultdict(int)
        self.optimizer_steps = 0
        self.computing: Computing | None = None
        self.encoder_patches: list[int] = []
        self._audit_path = None if audit_dir is None else Path(audit_dir, AUDIT_FILE.format(rank=loader.rank))
        self._audit_mode = "wb"
        self._audit: IO[bytes] | None = None  # opened with its first line
        self._warned: set[str] = set()
        self._at_log: Totals = defaultdict(int)
        self._clock: float | None = None
        self._has_logged = True
        self._waited = 0.0  # since the last line of the audit
        self._begun: list[OptimizerStep] = []  # the last step of each pass over an epoch
        self._left_out: Counter[str] = Counter()  # rows left out after their plan, by reason; `COLLATION`: of this rank
        # Micro-batches of this rank: those of two or more samples that the collator made larger than the budget, and
        # those whose rows were all left out after the plan.
        self._over_budget = self._emptied = 0

    def next(self, collated: Iterator[Collated]) -> Collated | None:
        """The next micro-batch of the loader, None after the last. Counts the wait for it."""
        self._tick()
        if self._has_logged:  # no interval includes an evaluation or a save between two optimizer steps
            self._has_logged, self._at_log["seconds"] = False, self.total["seconds"]
        before = self.total["seconds"]
        item = next(collated, None)
        self._tick()
        self._waited += self.total["seconds"] - before
        self.total["data_wait_s"] += self.total["seconds"] - before
        if item is not None:
            micro_batch, measured, _ = item
            self._over_budget += len(micro_batch.ids) > 1 and not measured.is_within(self.loader.budget)
            lost = self.leave_out(micro_batch.failed, COLLATION)
            self._left_out[COLLATION] += len(lost)
            self.total["lost_weight"] += sum(lost)
        return item

    def _tick(self) -> None:
        """Update `seconds`, which count from the first call."""
        now = time.perf_counter()
        self.total["seconds"] += 0.0 if self._clock is None else now - self._clock
        self._clock = now

    def begin(self, micro_batch: MicroBatch, measured: Measured) -> Computing:
        """Check the micro-batch whose forward comes next, and return its loss weights.

        Raises `DataError` if the collator has changed what was planned.
        """
        for kind, values in warnings_of(micro_batch, measured, self.loader).items():
            if kind not in self._warned:
                self._warned.add(kind)
                logger.warning("%s", WARNINGS[kind].format(**values))
        step, before = micro_batch.step, self._begun[-1] if self._begun else None
        if before and before.epoch == step.epoch and (before is step or before.index < step.index):  # the same pass
            self._begun.pop()
        self._begun.append(step)
        self.computing = Computing(micro_batch, measured, *loss_of(micro_batch.weights, micro_batch.units))
        return self.computing

    def end(self) -> None:
        """Count the micro-batch whose backward is done, and its optimizer step after the last micro-batch."""
        computed, self.computing = self.computing, None
        assert computed is not None, "begin comes first"
        self.count([computed])

    def count(self, parts: Sequence[Computing]) -> None:
        """Count a micro-batch that was trained on in these parts, like `end`.

        Raises `ConfigError` if the audit cannot be written.
        """
        micro_batch, loader, world_size = parts[0].micro_batch, self.loader, self.loader.world_size
        for part, computed in enumerate(parts):
            for plan in computed.encoded:
                self.encoder_patches = (plan.patches + (self.encoder_patches or 0)).tolist()
            if self._audit_path is not None:
                line = audit_line(computed, loader.rank, self.optimizer_steps + 1, self._waited, part, len(parts))
                self._write(self._audit_path, line)
                self._waited = 0.0
        for name in FROM_TOTALS:
            self.total[name] += getattr(micro_batch.totals, name)
        self.total["micro_steps"] += 1
        self.total["idle_micro_batches"] += world_size - micro_batch.totals.active_ranks
        self.total["awaited_tokens"] += world_size * micro_batch.totals.max_rank_tokens
        self._emptied += micro_batch.idle and bool(micro_batch.failed)
        if micro_batch.ends_optimizer_step:
            self.optimizer_steps += 1
            self.total["optimizer_steps"] += 1
            loader.consume(micro_batch.step)

    def _write(self, path: Path, line: Mapping[str, Any]) -> None:
        if self._audit is None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._audit = path.open(self._audit_mode, buffering=0)  # whole lines: a kill cuts off none
            except OSError as error:
                raise ConfigError(
                    f"{path}: the audit cannot be written ({one_line(error)}); give another folder."
                ) from error
        self._audit.write(json.dumps(line).encode() + b"\n")

    def metrics(self, before: Totals | None = None) -> dict[str, float]:
        """The `odb/...` entries of the whole run. before: sums to subtract."""
        self._tick()
        self.total["skipped"], before = self.left_out.total(), before or defaultdict(int)
        sums = defaultdict(int, {name: value - before[name] for name, value in self.total.items()})
        return metrics_of(sums, self.loader.config.token_budget, self.loader.world_size)

    def interval_metrics(self) -> dict[str, float]:
        """The `odb/...` entries since the last call."""
        metrics = self.metrics(self._at_log)
        self._at_log, self._has_logged = self.total.copy(), True
        return metrics

    def leave_out(self, failed: Iterable[tuple[SampleInfo, str]], reason: str) -> list[float]:
        """Log rows that are left out after their plan, and why.

        Returns the share of each in the loss of its optimizer step. It is lost: the other rows keep their weights.
        """
        lost = []
        for sample, cause in failed:
            lost.append(share := sample.weight * sample.units / self.loader.world_size)
            description = self.loader.describe(sample.id)
            message = f"{description}: {cause}; {share:.2%} of the loss of its optimizer step is lost"
            self.loader.left_out.leave_out(reason, message)
        return lost

    def lose(self, shares: Sequence[float], reason: str) -> None:
        """Count rows that were left out after their step began. shares: their shares in the loss of that step."""
        self._left_out[reason] += len(shares)
        self.total["samples"] -= len(shares)
        self.total["lost_weight"] += sum(shares)

    @property
    def left_out(self) -> Counter[str]:
        """Rows left out on all ranks, by reason; for the current epoch until its last plan."""
        return sum((step.rejected for step in self._begun), self._left_out)

    def summary(self) -> dict[str, Any]:
        """The content of `odb_summary.json`."""
        self._tick()
        return {
            "dataset_samples": self.loader.num_samples,
            **{name: self.total[name] for name in SUMMARY},
            **ratios_of(self.total),
            "optimizer_steps": self.optimizer_steps,
            "encoder_patches": self.encoder_patches,
            "lowered_to": None if self.loader.lowered is None else dataclasses.asdict(self.loader.lowered),
            "left_out": dict(+self.left_out),  # without reasons that no row had
            "remainder": sum(step.remainder for step in self._begun),
            "overlong": sum(step.overlong for step in self._begun),
            "over_budget": self._over_budget,
            "ranks": self.loader.world_size,
            "config": self.loader.config.to_dict(),
        }

    def resume_at(self, optimizer_steps: int) -> None:
        """Continue after this number of optimizer steps of the run.

        Appends to the audit: lines written after the last checkpoint are then in the file twice.
        """
        self.optimizer_steps, self._audit_mode = optimizer_steps, "ab"

    def finish(self, folder: Path, epochs: float) -> None:
        """Write `odb_summary.json` and log its line at the end of a run. epochs: of the run. Collective."""
        own = Counter(collation=self._left_out[COLLATION], over_budget=self._over_budget, emptied=self._emptied)
        counts = self.loader.over_all_ranks(own)
        self._left_out[COLLATION], self._over_budget = counts["collation"], counts["over_budget"]
        self.total["samples"] -= counts["collation"]
        self.total["idle_micro_batches"] += counts["emptied"]
        if self.loader.rank == 0:
            summary = {"epochs": epochs, **self.summary()}
            folder.mkdir(parents=True, exist_ok=True)
            (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
            logger.info(summary_line(summary, int(self.total["optimizer_steps"])))

    def close(self) -> None:
        """Close the audit; safe to call twice."""
        if self._audit is not None:
            self._audit.close()
