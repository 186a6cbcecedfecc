"""Groups cut from one window: within both budgets (I4), nothing lost, nothing twice, none needlessly small (I7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from planning_strategies import budgets, collated, costs, within

from odb_factory.planning import Budget, Collation, Cost, make_metadata
from odb_factory.planning.padded import Rows

windows = st.lists(costs(), max_size=30)


def rows_of(window: Sequence[Cost], budget: Budget) -> Rows:
    table = make_metadata(window, [0] * len(window), exhausted=True).rows
    return Rows(table, np.arange(len(window)), budget)


def cut(window: Sequence[Cost], budget: Budget, level: int | None = None) -> list[list[int]]:
    rows = rows_of(window, budget)
    level = budget.token_budget if level is None else level
    return [rows.group(*group).tolist() for group in rows.next_fit(level)]


@given(windows, budgets)
def test_every_index_stands_in_exactly_one_group(window: list[Cost], budget: Budget) -> None:
    """I2 within a window."""
    groups = cut(window, budget)
    assert Counter(i for group in groups for i in group) == Counter(range(len(window)))
    assert all(groups), "no group is empty"


@given(windows, budgets, st.floats(0, 1))
@example([Cost(10), Cost(9), Cost(1)], Budget(33, collation=Collation(dummy_media_tokens=10)), 1.0)
@example([Cost(8)] * 3, Budget(24, collation=Collation(pad_to_multiple_of=8, dummy_media_tokens=1)), 1.0)
@example([Cost(3), Cost(3)], Budget(9, 3, Collation(dummy_media_patches=4)), 1.0)
@example(
    [Cost(3, 1, has_media=True), Cost(3), Cost(2)],
    Budget(9, 3, Collation(dummy_media_tokens=2, dummy_media_patches=3)),
    1.0,
)
def test_every_group_of_two_or_more_is_within_both_budgets(window: list[Cost], budget: Budget, part: float) -> None:
    """I4, measured on rows built one token at a time; and within the level that was asked for."""
    level = int(part * budget.token_budget)
    for group in cut(window, budget, level):
        if len(group) >= 2:
            chosen = [window[i] for i in group]
            assert within(chosen, budget)
            rows, length, _ = collated(chosen, budget.collation)
            assert rows * length <= level


@given(windows, budgets)
def test_a_group_is_full_when_the_next_sample_does_not_fit(window: list[Cost], budget: Budget) -> None:
    """I7: only the last group can be part-filled, for want of samples; all others are closed by the sample after."""
    groups = cut(window, budget)
    for group, after in pairwise(groups):
        assert not within([window[i] for i in (after[-1], *group)], budget)


@given(windows, st.integers(1, 100), st.none() | st.integers(1, 12), st.sampled_from([1, 3, 8]))
def test_a_sample_that_breaks_a_budget_alone_travels_alone(
    window: list[Cost], token_budget: int, max_patches: int | None, multiple: int
) -> None:
    """Where the collator injects nothing; a filler that breaks a budget is no burden once a media sample joins."""
    budget = Budget(token_budget, max_patches, Collation(pad_to_multiple_of=multiple))
    groups = cut(window, budget)
    for i, cost in enumerate(window):
        if not within([cost], budget):
            assert [i] in groups


@given(windows, budgets)
def test_like_lengths_go_together_and_the_shortest_row_comes_first(window: list[Cost], budget: Budget) -> None:
    """Rows fall in length from group to group; the first row takes the filler, so it is the shortest."""
    order = [window[i].tokens for group in cut(window, budget) for i in reversed(group)]
    assert order == sorted(order, reverse=True)


@given(st.lists(costs(), max_size=12), budgets, st.randoms(use_true_random=False))
def test_the_order_of_the_window_does_not_change_the_groups(window: list[Cost], budget: Budget, random: object) -> None:
    """Groups depend on what is held, not on who came first; equal samples may change places."""

    def contents(costs: list[Cost]) -> list[list[tuple[int, int]]]:
        return [[(costs[i].tokens, costs[i].patches) for i in group] for group in cut(costs, budget)]

    # Patches tell media from text here, so that samples of equal rank are equal.
    window = [Cost(cost.tokens, cost.patches, 1, cost.patches > 0) for cost in window]
    shuffled = window.copy()
    random.shuffle(shuffled)
    assert contents(shuffled) == contents(window)


@given(windows.filter(bool), budgets, st.data())
def test_what_is_left_when_a_group_is_taken_out_is_as_if_it_had_never_been(
    window: list[Cost], budget: Budget, data: st.DataObject
) -> None:
    """The sums are made anew: the groups cut from the rest are those of the rest alone."""
    rows = rows_of(window, budget)
    start = data.draw(st.integers(0, len(window) - 1))
    end = data.draw(st.integers(start + 1, len(window)))
    gone = set(rows.group(start, end).tolist())
    rows.without(start, end)
    left = [i for i in range(len(window)) if i not in gone]
    alone = cut([window[i] for i in left], budget)
    cost_of = [[window[left[i]] for i in group] for group in alone]
    assert [[window[i] for i in rows.group(*group)] for group in rows.next_fit(budget.token_budget)] == cost_of


def test_an_empty_window_has_no_groups() -> None:
    assert cut([], Budget(8)) == []


def test_a_window_by_hand() -> None:
    """8 + 7 in rows of 8, 4 + 3 + 3 + 2 in rows of 4, 1 is left over."""
    window = [Cost(tokens) for tokens in (3, 8, 1, 4, 7, 2, 3)]
    assert [[window[i].tokens for i in group] for group in cut(window, Budget(16))] == [[7, 8], [2, 3, 3, 4], [1]]


def test_a_filler_that_would_break_the_budget_closes_the_group() -> None:
    """Three rows of 8 would fit in 24; with 4 filler tokens in the first row they are rows of 12."""
    budget = Budget(24, collation=Collation(dummy_media_tokens=4))
    assert [len(group) for group in cut([Cost(8)] * 3, budget)] == [2, 1]


def test_modalities_never_share_a_group() -> None:
    window = [Cost(4, modality=k % 2) for k in range(8)]
    assert [sorted(i % 2 for i in group) for group in cut(window, Budget(12))] == [[0] * 3, [0], [1] * 3, [1]]
