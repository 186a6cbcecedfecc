"""I4: budgets are measured on what the collator really makes of a group.

`collated` is the yardstick of all tests of this folder: it builds the padded rows of a group one
token at a time, as a collator would, and knows nothing of `Collation`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_factory.batching import Budget, Collation, Cost

collations = st.builds(
    Collation,
    pad_to_multiple_of=st.sampled_from([1, 2, 3, 8]),
    filler_tokens=st.sampled_from([0, 1, 5, 20]),
    filler_patches=st.sampled_from([0, 1, 4]),
)
budgets = st.builds(
    Budget,
    token_budget=st.integers(1, 100),
    max_patches=st.none() | st.integers(1, 12),
    collation=collations,
)


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    """A text sample, or one with media; now and then beyond every budget above."""
    tokens = draw(st.integers(1, 30) | st.sampled_from([1, 50, 99, 100, 101, 300]))
    patches = draw(st.just(0) | st.integers(0, 8) | st.sampled_from([12, 13, 40]))
    has_media = patches > 0 or draw(st.booleans())
    return Cost(tokens, patches, draw(st.integers(1, tokens)), has_media)


def collated(group: Sequence[Cost], collation: Collation) -> tuple[int, int, int]:
    """(rows, padded row length, patches) of a group, built row by row."""
    rows = [["token"] * cost.tokens for cost in group]
    patches = ["patch"] * sum(cost.patches for cost in group)
    if not any(cost.has_media for cost in group):
        rows[0] += ["filler"] * collation.filler_tokens
        patches += ["filler"] * collation.filler_patches
    while len({len(row) for row in rows}) > 1 or len(rows[0]) % collation.pad_to_multiple_of:
        longest = max(len(row) for row in rows)
        whole = all(len(row) == longest for row in rows)
        for row in rows:
            row += ["pad"] * (longest - len(row) + whole)
    return len(rows), len(rows[0]), len(patches)


def within(group: Sequence[Cost], budget: Budget) -> bool:
    rows, length, patches = collated(group, budget.collation)
    return rows * length <= budget.token_budget and (budget.max_patches is None or patches <= budget.max_patches)


@given(st.lists(costs(), min_size=1, max_size=5), collations)
def test_shape_is_that_of_the_collated_rows(group: list[Cost], collation: Collation) -> None:
    assert collation.shape(group) == collated(group, collation)


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
        ([Cost(5), Cost(9)], Collation(filler_tokens=3, filler_patches=4), (2, 9, 4)),
        ([Cost(9), Cost(5)], Collation(filler_tokens=3, filler_patches=4), (2, 12, 4)),
        ([Cost(9), Cost(5, 2, has_media=True)], Collation(filler_tokens=3, filler_patches=4), (2, 9, 2)),
        ([Cost(5), Cost(5)], Collation(pad_to_multiple_of=4, filler_tokens=4), (2, 12, 0)),
    ],
)
def test_shapes_by_hand(group: list[Cost], collation: Collation, shape: tuple[int, int, int]) -> None:
    """The filler goes into the first row, only where no row has media, and before padding."""
    assert collation.shape(group) == collated(group, collation) == shape


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
