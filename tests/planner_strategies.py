"""Strategies for costs and budgets, and `shape_of`: the collated shape of a group, independent of `Budget.collated`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from odb_factory.planner import VIDEO, Budget, Collation, Cost, Media

collations = st.builds(
    Collation,
    pad_to_multiple_of=st.sampled_from([1, 2, 3, 8]),
    dummy_media_tokens=st.sampled_from([0, 1, 5, 20]),
    dummy_media_patches=st.sampled_from([0, 1, 4]),
    dummy_audio_tokens=st.sampled_from([0, 0, 2, 7]),
    dummy_audio_patches=st.sampled_from([0, 0, 3]),
)
limits: Any = {
    "token_budget": st.integers(1, 100),
    "max_patches": st.none() | st.integers(1, 12),
    "collation": collations,
}
budgets = st.builds(Budget, row_multiple=st.sampled_from([1, 1, 1, 2, 4]), **limits)
flat_budgets = st.builds(Budget, layout=st.just("flat"), pad_to_multiple_of=st.sampled_from([1, 1, 4, 16]), **limits)


@st.composite
def costs(draw: st.DrawFn, num_modalities: int = 1) -> Cost:
    """A sample with or without media and audio; sometimes beyond every budget above."""
    tokens = draw(st.integers(1, 30) | st.sampled_from([1, 50, 99, 100, 101, 300]))
    patches = draw(st.just(0) | st.integers(0, 8) | st.sampled_from([12, 13, 40]))
    video, audio = draw(st.just((0, 0)) | st.tuples(st.integers(0, patches), st.integers(0, patches)))
    video = min(video, patches - audio)
    has_media = patches > audio or draw(st.booleans())
    modality = draw(st.integers(0, num_modalities - 1)) if has_media and num_modalities > 1 else 0
    media: Media | None = Media(patches - video - audio, video, 2 * audio)
    if video == audio == 0 and modality != VIDEO:
        media = None
    units, has_audio = draw(st.integers(1, tokens)), audio > 0 or draw(st.booleans())
    return Cost(tokens, patches, units, has_media, modality, has_audio=has_audio, media=media)


def shape_of(group: Sequence[Cost], budget: Budget) -> tuple[int, int, int]:
    """(rows, row length, patches) of a group in the layout of the budget, built one token at a time."""
    rows, multiple = [["token"] * cost.tokens for cost in group], budget.collation.pad_to_multiple_of
    patches = ["patch"] * sum(cost.patches for cost in group)
    if not any(cost.has_media for cost in group):
        rows[0] += ["filler"] * budget.collation.dummy_media_tokens
        patches += ["filler"] * budget.collation.dummy_media_patches
    if not any(cost.has_audio for cost in group):
        rows[0] += ["silence"] * budget.collation.dummy_audio_tokens
        patches += ["silence"] * budget.collation.dummy_audio_patches
    if budget.layout == "flat":
        rows, multiple = [list(itertools.chain(*rows))], budget.pad_to_multiple_of
    while len({len(row) for row in rows}) > 1 or len(rows[0]) % multiple:
        longest = max(len(row) for row in rows)
        whole = all(len(row) == longest for row in rows)
        for row in rows:
            row += ["pad"] * (longest - len(row) + whole)
    return len(rows), len(rows[0]), len(patches)


def within(group: Sequence[Cost], budget: Budget) -> bool:
    rows, length, patches = shape_of(group, budget)
    return rows * length <= budget.token_budget and (budget.max_patches is None or patches <= budget.max_patches)
