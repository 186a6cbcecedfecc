"""Pure planning: cost, grouping under budgets, alignment over ranks, order. No I/O, no torch."""

from odb_factory.batching.cost import Budget, Collation, Cost
from odb_factory.batching.planning import Plan, StepTotals, Window, plan_round

__all__ = ["Budget", "Collation", "Cost", "Plan", "StepTotals", "Window", "plan_round"]
