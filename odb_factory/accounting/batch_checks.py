"""`BatchChecks`: compare every collated micro-batch with what was planned, before it is trained on."""

from __future__ import annotations

from typing import Any

import torch

from odb_factory.accounting.loss_weights import token_weights
from odb_factory.config import ResolvedConfig
from odb_factory.data.measure import IGNORE_INDEX
from odb_factory.data.samples import Measured, MicroBatch
from odb_factory.errors import DataError
from odb_factory.log import get_logger

logger = get_logger(__name__)


class BatchChecks:
    """Call it with each micro-batch, the shape of its collated tensors and, where there are any, its labels.

    Raises `DataError` where the collator has left out samples, where it has left out or moved labels that the loss is
    weighed by, or where the samples' weights differ and their rows (in a flat micro-batch: segments) cannot be told.
    Returns whether a micro-batch of several samples is beyond a budget. Warns once of each kind: a sample beyond a
    budget, a micro-batch that grew beyond one in the collator, samples that share one row though they are not flat,
    rows in another order than their ids. Labels are looked at where they are, so they are given before they go to an
    accelerator. counts_labels: units are counted from labels; else a `cost_fn` tells them.
    """

    def __init__(self, config: ResolvedConfig, *, counts_labels: bool = True):
        self._config, self._counts_labels = config, counts_labels
        self._said: set[str] = set()

    def __call__(self, micro_batch: MicroBatch, measured: Measured, labels: Any = None) -> None:
        if micro_batch.idle:
            return
        _check_samples(micro_batch, measured)
        if self._config.loss_scaling not in ("approx", "none"):
            _check_units(micro_batch, measured)
        self._check_rows(micro_batch, measured, labels if self._counts_labels else None)
        self._check_budget(micro_batch, measured)

    def _check_rows(self, micro_batch: MicroBatch, measured: Measured, labels: Any) -> None:
        """One row a sample, in their order, is what weights that differ, and the ids of the step info, rely on.

        So are segments: the first ones are the samples.
        """
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
        if not torch.is_tensor(labels) or rows != len(ids):
            return
        found = _units_of(labels, measured.segments)
        if found == [*micro_batch.units, *[0] * (len(found) - len(ids))]:
            return
        told = f"rows {ids}: the collator returns them with {found} units and they have "
        told += f"{list(micro_batch.units)}, so it has changed their order or their labels"
        if differ:
            raise DataError(
                f"{told}, and loss_scaling {scaling!r} gives them different weights; use a collator that keeps both, "
                "or set `loss_scaling: exact`."
            )
        self._warn_once("order", f"{told}; `ids` of the step info and of the audit are not in the order of the rows")

    def _check_budget(self, micro_batch: MicroBatch, measured: Measured) -> None:
        tokens, max_patches = measured.rows * measured.length, self._config.max_patches
        if measured.is_within(self._config.token_budget, max_patches):
            return
        shape, budget = f"{tokens} tokens", f"{self._config.token_budget} tokens"
        if max_patches is not None:
            shape, budget = f"{shape} and {measured.patches} patches", f"{budget} and {max_patches} patches"
        if len(micro_batch.ids) == 1:
            self._warn_once(
                "overlong",
                f"overlong samples travel alone: row {micro_batch.ids[0]} has {shape}, the budget is {budget}",
            )
            return
        self._warn_once(
            "over budget",
            f"rows {list(micro_batch.ids)} were collated to {shape}, above the budget of {budget}: the collator adds "
            "more than the plan knows of, or cost_fn says less than there is; tell what it adds (collation=) or lower "
            "the budget if memory is short",
        )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s", message)


def _units_of(labels: torch.Tensor, segments: tuple[int, ...]) -> list[int]:
    """Labels that carry loss in each row of `labels` [rows, length], or in each segment of its only row."""
    if not segments:
        return (labels[:, 1:] != IGNORE_INDEX).sum(1).tolist()
    carries = labels[0] != IGNORE_INDEX
    return [int(one[1:].sum()) for one in carries.split(segments)]


def _check_samples(micro_batch: MicroBatch, measured: Measured) -> None:
    """One row a sample, or all in one row; a collator of pairs may make more rows."""
    if measured.segments:
        return  # it was laid flat by its samples
    shares_one_row = measured.rows == 1 and measured.length >= micro_batch.tokens
    if measured.rows < len(micro_batch.ids) and not shares_one_row:
        raise DataError(
            f"rows {list(micro_batch.ids)}: the collator made {measured.rows} rows of {measured.length} tokens of "
            f"these {len(micro_batch.ids)} samples, so some were left out; keep every sample, or leave such rows out "
            "of the dataset (a row without supervised tokens is left out and counted)."
        )


def _check_units(micro_batch: MicroBatch, measured: Measured) -> None:
    if measured.units != micro_batch.num_units:
        raise DataError(
            f"rows {list(micro_batch.ids)}: the collator left {measured.units} units of "
            f"{micro_batch.num_units} observed, so the loss cannot be weighed exactly; use a collator that "
            "keeps labels as they are (and `ignore_pad_token_for_loss: true`), or set `loss_scaling: approx`."
        )
