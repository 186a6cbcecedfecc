"""I4: budgets are measured on what the collator really makes of a group."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from planner_strategies import budgets, costs, shape_of, within

from odb_factory.planner import Budget, Cost

USED_UP = [Cost(7, 2, has_media=True), Cost(8, 4, has_media=True), Cost(3)]


@given(st.lists(costs(), min_size=1, max_size=5), budgets)
@example(USED_UP, Budget(24, max_patches=6))
@example(USED_UP, Budget(23))
@example(USED_UP, Budget(24, max_patches=5))
def test_fits_means_that_the_collated_rows_are_within_both_budgets(group: list[Cost], budget: Budget) -> None:
    """Also the shape itself, and `overlong`: a sample breaks a budget alone."""
    assert budget.shape(group) == shape_of(group, budget)
    assert budget.fits(group) is within(group, budget)
    assert budget.overlong(group[0]) is not within(group[:1], budget)
