"""Lengths and rows are rounded up to a few sizes, in the plan as one counts them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from planning_strategies import flat_budgets, next_size

from odb_factory.planning import Budget, Cost, Sizes, make_metadata, plan_optimizer_step


@given(st.lists(st.integers(0, 400), min_size=1), flat_budgets)
def test_a_size_is_the_next_that_there_is(lengths: list[int], budget: Budget) -> None:
    """Of one length and of an array; none is smaller for a larger length, and what fits the budget still does."""
    sizes, counted = budget.sizes, [length and next_size(length, budget.sizes) for length in sorted(lengths)]
    assert [sizes.up(length) for length in sorted(lengths)] == counted == sorted(counted)
    assert sizes.up(np.array(sorted(lengths))).tolist() == counted
    most = budget.token_budget // sizes.multiple * sizes.multiple
    assert all(size <= budget.token_budget for length, size in zip(sorted(lengths), counted) if length <= most)


def test_rows_are_a_multiple_where_the_budget_has_room() -> None:
    budget = Budget(100, row_multiple=4)
    assert [budget.rows_of(count, 10) for count in (1, 4, 5, 9, 10)] == [4, 4, 8, 10, 10]
    assert budget.rows_of(np.array([1, 2, 3]), np.array([60, 40, 20])).tolist() == [1, 2, 4]


def test_a_plan_of_one_rank_fills_its_sizes() -> None:
    """Sixteen rows of 30 tokens are two micro-batches of eight as they are, and four of four where a row is 60."""
    buffers = [make_metadata([Cost(30)] * 16, [0] * 16, exhausted=True)]
    plain = plan_optimizer_step(buffers, Budget(256), balance=True)
    longer = plan_optimizer_step(buffers, Budget(256, sizes=Sizes(buckets=(60,), limit=256)), balance=True)
    assert [[len(group) for group in plan.groups[0]] for plan in (plain, longer)] == [[8, 8], [4, 4, 4, 4]]
    assert [totals.padded_tokens for totals in longer.totals] == [240] * 4
