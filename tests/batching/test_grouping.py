"""Groups of one window: within both budgets (I4), nothing lost, nothing twice, none needlessly small (I7)."""

from __future__ import annotations

from collections import Counter

from batching_strategies import budgets, collated, costs, within
from hypothesis import example, given
from hypothesis import strategies as st

from odb_factory.batching import Budget, Collation, Cost
from odb_factory.batching.grouping import form_groups

windows = st.lists(costs(), max_size=30)


@given(windows, budgets)
def test_every_index_stands_in_exactly_one_group(window: list[Cost], budget: Budget) -> None:
    """I2 within a window."""
    full, rest = form_groups(window, budget)
    assert Counter(i for group in [*full, rest] for i in group) == Counter(range(len(window)))
    assert all(full), "no group is empty"


@given(windows, budgets)
@example([Cost(10), Cost(9), Cost(1)], Budget(33, collation=Collation(filler_tokens=10)))
@example([Cost(8)] * 3, Budget(24, collation=Collation(pad_to_multiple_of=8, filler_tokens=1)))
@example([Cost(3), Cost(3)], Budget(9, 3, Collation(filler_patches=4)))
@example([Cost(3, 1, has_media=True), Cost(3), Cost(2)], Budget(9, 3, Collation(filler_tokens=2, filler_patches=3)))
def test_every_group_of_two_or_more_is_within_both_budgets(window: list[Cost], budget: Budget) -> None:
    """I4, measured on rows built one token at a time."""
    full, rest = form_groups(window, budget)
    for group in [*full, rest]:
        if len(group) >= 2:
            assert within([window[i] for i in group], budget)


@given(windows, budgets)
def test_a_group_is_full_when_the_next_sample_does_not_fit(window: list[Cost], budget: Budget) -> None:
    """I7: only the last group can be part-filled, for want of samples; all others are closed by the sample after."""
    full, rest = form_groups(window, budget)
    groups = [*full, rest] if rest else full
    for group, after in zip(groups, groups[1:]):
        assert not within([window[i] for i in (after[-1], *group)], budget)


@given(windows, budgets)
def test_the_rest_is_the_last_group_and_may_wait(window: list[Cost], budget: Budget) -> None:
    """What breaks a budget alone never waits for company that cannot come."""
    full, rest = form_groups(window, budget)
    assert bool(rest) or bool(full) or not window
    if rest:
        assert within([window[rest[-1]]], budget)
        assert all(window[i].tokens >= window[j].tokens for group in full for i in group for j in rest)


@given(windows, st.integers(1, 100), st.none() | st.integers(1, 12), st.sampled_from([1, 3, 8]))
def test_a_sample_that_breaks_a_budget_alone_travels_alone(
    window: list[Cost], token_budget: int, max_patches: int | None, multiple: int
) -> None:
    """Where the collator injects nothing; a filler that breaks a budget is no burden once a media sample joins."""
    budget = Budget(token_budget, max_patches, Collation(pad_to_multiple_of=multiple))
    full, rest = form_groups(window, budget)
    for i, cost in enumerate(window):
        if not within([cost], budget):
            assert [i] in full


@given(windows, budgets)
def test_like_lengths_go_together_and_the_shortest_row_comes_first(window: list[Cost], budget: Budget) -> None:
    """Rows fall in length from group to group; the first row takes the filler, so it is the shortest."""
    full, rest = form_groups(window, budget)
    order = [window[i].tokens for group in [*full, rest] for i in reversed(group)]
    assert order == sorted(order, reverse=True)


@given(st.lists(costs(), max_size=12), budgets, st.randoms(use_true_random=False))
def test_the_order_of_the_window_does_not_change_the_groups(window: list[Cost], budget: Budget, random: object) -> None:
    """Groups depend on what is held, not on who came first; equal samples may change places."""

    def contents(costs: list[Cost]) -> list[list[tuple[int, int]]]:
        full, rest = form_groups(costs, budget)
        return [[(costs[i].tokens, costs[i].patches) for i in group] for group in [*full, rest]]

    # Patches tell media from text here, so that samples of equal rank are equal.
    window = [Cost(cost.tokens, cost.patches, 1, cost.patches > 0) for cost in window]
    shuffled = window.copy()
    random.shuffle(shuffled)
    assert contents(shuffled) == contents(window)


def test_an_empty_window_has_no_groups() -> None:
    assert form_groups([], Budget(8)) == ([], [])


def test_a_window_by_hand() -> None:
    """8 + 7 in rows of 8, 4 + 3 + 3 + 2 in rows of 4, 1 is left over."""
    window = [Cost(tokens) for tokens in (3, 8, 1, 4, 7, 2, 3)]
    full, rest = form_groups(window, Budget(16))
    assert [[window[i].tokens for i in group] for group in full] == [[7, 8], [2, 3, 3, 4]]
    assert rest == [2]


def test_a_filler_that_would_break_the_budget_closes_the_group() -> None:
    """Three rows of 8 would fit in 24; with 4 filler tokens in the first row they are rows of 12."""
    window = [Cost(8)] * 3
    budget = Budget(24, collation=Collation(filler_tokens=4))
    full, rest = form_groups(window, budget)
    assert [len(group) for group in [*full, rest]] == [2, 1]
    assert collated([window[0]] * 2, budget.collation) == (2, 12, 0)
