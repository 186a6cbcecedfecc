"""Pure planning: cost, grouping under budgets, alignment over ranks, order. No I/O, no torch."""

from odb_factory.batching.cost import VIDEO, Budget, Collation, Cost, CostModel
from odb_factory.batching.planning import MAX_BALANCED_BYTES, Plan, StepTotals, plan_round
from odb_factory.batching.window import ROW, Window, make_window

__all__ = [
    "MAX_BALANCED_BYTES",
    "ROW",
    "VIDEO",
    "Budget",
    "Collation",
    "Cost",
    "CostModel",
    "Plan",
    "StepTotals",
    "Window",
    "make_window",
    "plan_round",
]
