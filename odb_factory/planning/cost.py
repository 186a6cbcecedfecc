"""What a sample costs, what a group costs once collated, and the budgets that bound it (I4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Amount = TypeVar("Amount", int, np.ndarray)
"""A whole number, or an array of them."""

VIDEO = 1
"""The modality of samples with videos (see `Cost`)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one sample, known after template, tokenizer and multimodal plugin have run.

    tokens: length after expansion and truncation.
    patches: vision-tower input patches.
    units: what the loss is a mean over: supervised tokens (labels that carry loss, after the causal shift); 1 for a
        pair or an example.
    has_media: the sample brings media of its own, so the collator injects none beside it.
    leading_label: the first label is one too, though nothing predicts it: stock counts it when it takes a mean.
    modality: only samples of one modality share a group. Videos are one: a model runs its vision tower once for
        the images of a batch and once for its videos, and engines that shard parameters hang unless every
        rank runs it equally often.
    """

    tokens: int
    patches: int = 0
    units: int = 0
    has_media: bool = False
    modality: int = 0
    leading_label: bool = False


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a group costs: fixed + token x padded tokens + patch x patches + square x rows x padded row length squared.

    Whole numbers, so that all ranks compute the same, in a unit of their own: one is what a padded token costs, as
    long as nothing better is known, and a step costs 500 of these beside its tokens.
    """

    fixed: int = 500
    token: int = 1
    patch: int = 0
    square: int = 0

    def of(self, padded: Amount, patches: Amount, squares: Amount) -> Amount:
        """Of one group, or of arrays of them."""
        total: Amount = self.fixed + self.token * padded + self.patch * patches + self.square * squares
        return total


@dataclass(frozen=True, slots=True)
class Collation:
    """What the framework's collator adds to the samples of a group.

    pad_to_multiple_of: the row length is rounded up to a multiple of this.
    dummy_media_tokens, dummy_media_patches: fake media that the collator injects into the first row of a
        group without media (so that every rank runs the vision tower).
    """

    pad_to_multiple_of: int = 1
    dummy_media_tokens: int = 0
    dummy_media_patches: int = 0

    def length(self, longest: int, first: int, has_media: bool) -> int:
        """Padded row length of a group (tokens); `first` is the length of its first row."""
        if not has_media:
            longest = max(longest, first + self.dummy_media_tokens)
        return -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def shape(self, group: Sequence[Cost]) -> tuple[int, int, int]:
        """(rows, padded row length in tokens, patches) of a group, its rows in the given order."""
        has_media = any(cost.has_media for cost in group)
        length = self.length(max(cost.tokens for cost in group), group[0].tokens, has_media)
        patches = sum(cost.patches for cost in group) + (0 if has_media else self.dummy_media_patches)
        return len(group), length, patches


@dataclass(frozen=True, slots=True)
class Budget:
    """Both budgets of a group, measured as collated. `max_patches` None: not limited.

    layout: `padded`, one row a sample; `flat`, all samples of a group in one row, behind each other.
    round_to: tokens of a flat micro-batch are filled up to a multiple of this.
    """

    token_budget: int
    max_patches: int | None = None
    collation: Collation = Collation()
    layout: str = "padded"
    round_to: int = 1

    def holds(self, rows: int, length: int, patches: int) -> bool:
        return rows * length <= self.token_budget and (self.max_patches is None or patches <= self.max_patches)

    def fits(self, group: Sequence[Cost]) -> bool:
        return self.holds(*self.shape(group))

    def shape(self, group: Sequence[Cost]) -> tuple[int, int, int]:
        """(rows, row length in tokens, patches) of a group as collated, its samples in the given order."""
        rows, length, patches = self.collation.shape(group)
        if self.layout == "padded":
            return rows, length, patches
        has_media = any(cost.has_media for cost in group)
        return 1, self.flat_tokens(sum(cost.tokens for cost in group), has_media), patches

    def flat_tokens(self, tokens: int, has_media: bool) -> int:
        """Of a flat micro-batch, given the sum of its samples' tokens; dummy media are a segment of their own."""
        if not has_media:
            tokens += self.collation.dummy_media_tokens
        return -(-tokens // self.round_to) * self.round_to

    def flat_shapes(
        self, tokens: np.ndarray, patches: np.ndarray, squares: np.ndarray, media: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, patches and attention of flat micro-batches, given sums over the samples of each.

        squares: of lengths squared. media: samples with media. Attention is the sum of squared lengths of all
        segments, those of dummy media and of what the total is rounded up by included.
        """
        dummy_tokens = np.where(media > 0, 0, self.collation.dummy_media_tokens)
        rounded_up = -(tokens + dummy_tokens) % self.round_to
        patches = patches + np.where(media > 0, 0, self.collation.dummy_media_patches)
        return tokens + dummy_tokens + rounded_up, patches, squares + dummy_tokens**2 + rounded_up**2

    def holds_flat(self, tokens: np.ndarray, patches: np.ndarray, media: np.ndarray) -> np.ndarray:
        """Whether flat micro-batches are within both budgets, given sums over the samples of each."""
        tokens, patches, _ = self.flat_shapes(tokens, patches, tokens, media)
        holds: np.ndarray = tokens <= self.token_budget
        return holds if self.max_patches is None else holds & (patches <= self.max_patches)

    def overlong(self, cost: Cost) -> bool:
        """Whether this sample breaks a budget even when it travels alone."""
        return not self.fits((cost,))
