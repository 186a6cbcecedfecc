"""`BatchChecks`: compare every collated micro-batch with what was planned, before it is trained on."""

from __future__ import annotations

from odb_factory.accounting.loss_weights import check_supervised
from odb_factory.config import ODBConfig
from odb_factory.data.samples import Measured, MicroBatch
from odb_factory.errors import DataError
from odb_factory.log import get_logger

logger = get_logger(__name__)


class BatchChecks:
    """Call it with each micro-batch and the shape of its collated tensors.

    Raises `DataError` where the collator has left out samples or, with `loss_scaling: exact`, labels. Warns once of
    each kind: a sample beyond a budget, a micro-batch that grew beyond one in the collator (num_over_budget counts
    these), samples that share one row.
    """

    def __init__(self, config: ODBConfig):
        self._config = config
        self.num_over_budget = 0
        self._said: set[str] = set()

    def __call__(self, step: MicroBatch, measured: Measured) -> None:
        if step.idle:
            return
        _check_samples(step, measured)
        if self._config.loss_scaling == "exact":
            check_supervised(step, measured)
        if measured.rows < len(step.ids):
            self._warn_once(
                "one row",
                f"the collator lays the {len(step.ids)} samples of rows {list(step.ids)} into one row of "
                f"{measured.length} tokens, but they were planned as padded rows: the budget is not filled, and "
                "padding figures are those of the plan; the audit has the shape that was collated.",
            )
        self._check_budgets(step, measured)

    def _check_budgets(self, step: MicroBatch, measured: Measured) -> None:
        tokens, max_patches = measured.rows * measured.length, self._config.max_patches
        if tokens <= self._config.token_budget and (max_patches is None or measured.patches <= max_patches):
            return
        shape, budget = f"{tokens} tokens", f"{self._config.token_budget} tokens"
        if max_patches is not None:
            shape, budget = f"{shape} and {measured.patches} patches", f"{budget} and {max_patches} patches"
        if len(step.ids) == 1:
            self._warn_once(
                "overlong", f"overlong samples travel alone: row {step.ids[0]} has {shape}, the budget is {budget}"
            )
            return
        self.num_over_budget += 1
        self._warn_once(
            "over budget",
            f"rows {list(step.ids)} were collated to {shape}, above the budget of {budget}: the collator pads beyond "
            "the longest sample, or cost_fn says less than there is; tell what it pads (collation=) or lower the "
            "budget if memory is short",
        )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s", message)


def _check_samples(step: MicroBatch, measured: Measured) -> None:
    """One row a sample, or all in one row; a collator of pairs may make more rows."""
    shares_one_row = measured.rows == 1 and measured.length >= step.tokens
    if measured.rows < len(step.ids) and not shares_one_row:
        raise DataError(
            f"rows {list(step.ids)}: the collator made {measured.rows} rows of {measured.length} tokens of these "
            f"{len(step.ids)} samples, so some were left out; keep every sample, or leave such rows out of the dataset "
            "(a row without supervised tokens is left out and counted)."
        )
