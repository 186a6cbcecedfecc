"""Pure planning: cost, grouping under budgets, alignment over ranks, order. No I/O, no torch."""

from odb_factory.batching.cost import VIDEO, Budget, Collation, Cost
from odb_factory.batching.planning import GroupCost, Offer, Plan, StepTotals, align, make_offer

__all__ = ["VIDEO", "Budget", "Collation", "Cost", "GroupCost", "Offer", "Plan", "StepTotals", "align", "make_offer"]
