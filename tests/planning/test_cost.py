"""I4: budgets are measured on what the collator really makes of a group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_strategies import budgets, collated, collations, costs, within

from odb_factory.planning import Budget, Collation, Cost

NO_LIMIT = 1 << 40


@given(st.lists(costs(), min_size=1, max_size=5), collations)
def test_shape_is_that_of_the_collated_rows(group: list[Cost], collation: Collation) -> None:
    assert Budget(NO_LIMIT, collation=collation).shape(group) == collated(group, collation)


@given(st.lists(costs(), min_size=1, max_size=5), budgets)
def test_fits_means_that_the_collated_rows_are_within_both_budgets(group: list[Cost], budget: Budget) -> None:
    assert budget.fits(group) is within(group, budget)


@given(costs(), budgets)
def test_overlong_means_that_a_sample_breaks_a_budget_alone(cost: Cost, budget: Budget) -> None:
    assert budget.overlong(cost) is not within([cost], budget)


@pytest.mark.parametrize(
    ("group", "collation", "shape"),
    [
        ([Cost(5)], Collation(), (1, 5, 0)),
        ([Cost(5), Cost(9)], Collation(pad_to_multiple_of=8), (2, 16, 0)),
        ([Cost(8), Cost(8)], Collation(pad_to_multiple_of=8), (2, 8, 0)),
        ([Cost(5), Cost(9)], Collation(dummy_media_tokens=3, dummy_media_patches=4), (2, 9, 4)),
        ([Cost(9), Cost(5)], Collation(dummy_media_tokens=3, dummy_media_patches=4), (2, 12, 4)),
        ([Cost(9), Cost(5, 2, has_media=True)], Collation(dummy_media_tokens=3, dummy_media_patches=4), (2, 9, 2)),
        ([Cost(5), Cost(5)], Collation(pad_to_multiple_of=4, dummy_media_tokens=4), (2, 12, 0)),
    ],
)
def test_shapes_by_hand(group: list[Cost], collation: Collation, shape: tuple[int, int, int]) -> None:
    """The filler goes into the first row, only where no row has media, and before padding."""
    assert Budget(NO_LIMIT, collation=collation).shape(group) == collated(group, collation) == shape


@pytest.mark.parametrize(
    ("budget", "holds"),
    [
        (Budget(24), True),
        (Budget(23), False),
        (Budget(24, max_patches=6), True),
        (Budget(24, max_patches=5), False),
        (Budget(10**9, max_patches=5), False),
    ],
)
def test_a_budget_may_be_used_up_but_not_exceeded(budget: Budget, holds: bool) -> None:
    assert budget.fits([Cost(7, 2, has_media=True), Cost(8, 4, has_media=True), Cost(3)]) is holds
