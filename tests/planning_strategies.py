"""Costs, budgets and the yardstick of the batching tests.

`collated` builds the padded rows of a group one token at a time, as a collator would, and knows
nothing of `Collation`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from odb_factory.planning import Budget, Collation, Cost

collations = st.builds(
    Collation,
    pad_to_multiple_of=st.sampled_from([1, 2, 3, 8]),
    dummy_media_tokens=st.sampled_from([0, 1, 5, 20]),
    dummy_media_patches=st.sampled_from([0, 1, 4]),
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
        rows[0] += ["filler"] * collation.dummy_media_tokens
        patches += ["filler"] * collation.dummy_media_patches
    while len({len(row) for row in rows}) > 1 or len(rows[0]) % collation.pad_to_multiple_of:
        longest = max(len(row) for row in rows)
        whole = all(len(row) == longest for row in rows)
        for row in rows:
            row += ["pad"] * (longest - len(row) + whole)
    return len(rows), len(rows[0]), len(patches)


def within(group: Sequence[Cost], budget: Budget) -> bool:
    rows, length, patches = collated(group, budget.collation)
    return rows * length <= budget.token_budget and (budget.max_patches is None or patches <= budget.max_patches)
