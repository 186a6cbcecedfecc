"""Compare collated micro-batches with the budgets that they were planned for (I4)."""

from __future__ import annotations

from odb_factory.config import ODBConfig
from odb_factory.data.samples import Measured, Step
from odb_factory.log import get_logger

logger = get_logger(__name__)


class BudgetCheck:
    """Says what goes beyond a budget, once of each kind: a sample alone, or a group that grew in the collator.

    over_budget: groups of the second kind, on this rank.
    """

    def __init__(self, config: ODBConfig):
        self.config = config
        self.over_budget = 0
        self._overlong_said = False

    def check(self, step: Step, measured: Measured) -> None:
        tokens, limit = measured.rows * measured.length, self.config.max_patches
        if tokens <= self.config.token_budget and (limit is None or measured.patches <= limit):
            return
        shape, budget = f"{tokens} tokens", f"{self.config.token_budget} tokens"
        if limit is not None:
            shape, budget = f"{shape} and {measured.patches} patches", f"{budget} and {limit} patches"
        if measured.rows == 1:
            if not self._overlong_said:
                logger.warning("overlong samples travel alone: row %s has %s, the budget %s", step.ids, shape, budget)
            self._overlong_said = True
            return
        self.over_budget += 1
        if self.over_budget == 1:
            logger.warning(
                "rows %s were collated to %s, above the budget of %s: this model's collator pads media beyond their "
                "own size; lower the budget if memory is short",
                list(step.ids),
                shape,
                budget,
            )
