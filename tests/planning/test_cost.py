"""I4: budgets are measured on what the collator really makes of a group."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from planning_strategies import budgets, collated, costs, within

from odb_factory.planning import Budget, Collation, Cost

NO_LIMIT = 1 << 40


USED_UP = [Cost(7, 2, has_media=True), Cost(8, 4, has_media=True), Cost(3)]


@given(st.lists(costs(), min_size=1, max_size=5), budgets)
@example(USED_UP, Budget(24, max_patches=6))
@example(USED_UP, Budget(23))
@example(USED_UP, Budget(24, max_patches=5))
def test_fits_means_that_the_collated_rows_are_within_both_budgets(group: list[Cost], budget: Budget) -> None:
    """Also the shape itself, and `overlong`: a sample breaks a budget alone."""
    assert budget.shape(group) == collated(group, budget.collation)
    assert budget.fits(group) is within(group, budget)
    assert budget.overlong(group[0]) is not within(group[:1], budget)


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
