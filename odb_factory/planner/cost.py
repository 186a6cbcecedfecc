"""The cost of a sample, the size of a collated group of samples, and the budgets that bound it (I4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

MEASURES = ("tokens", "patches", "has_media", "has_audio")
"""Fields of `Cost` whose sums over a group, with the lengths of padded rows, give the collated size of the group."""


def by_number(numbers: np.ndarray, values: np.ndarray, count: int, operation: np.ufunc = np.add) -> np.ndarray:
    """int64[count, ...]: the sum (or `operation`, starting at 0) of the values of each number. bincount adds floats."""
    result = np.zeros((count, *values.shape[1:]), dtype=np.int64)
    operation.at(result, numbers, values)
    return result


STEP_COST = 500
"""Cost of a micro-step in addition to its tokens, in collated tokens."""
FRAMES_PER_PATCH = 2
"""Spectrogram frames that count as one patch. Audio encoders make a position of at least as many."""


class Media(NamedTuple):
    """Encoder inputs of a sample or a micro-batch, by modality.

    image_patches, video_patches: input patches of the vision tower. audio_frames: spectrogram frames (10 ms each), an
    even number for each clip.
    """

    image_patches: int = 0
    video_patches: int = 0
    audio_frames: int = 0

    @property
    def patches(self) -> int:
        """The sum that `max_patches` bounds."""
        return self.image_patches + self.video_patches + self.audio_frames // FRAMES_PER_PATCH

    def times(self, number: int) -> Media:
        return Media(*(number * size for size in self))

    def __str__(self) -> str:
        """The sizes that are not 0, for messages."""
        return ", ".join(f"{size} {name.replace('_', ' ')}" for name, size in self._asdict().items() if size)


VIDEO = 1
"""The modality of samples with videos, if videos are a modality (see `Cost`)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one sample, known after template, tokenizer and multimodal plugin have run.

    tokens: length after expansion and truncation, summed over the rows if the collator makes several of a sample.
    row_tokens: number of these rows x the longest, as they are padded together (0: equal to `tokens`).
    patches: sum over the modalities (see `Media`). media: by modality; None: all patches are of images, or of videos if
        videos are a separate modality.
    units: number of terms in the mean of the loss: supervised tokens (labels with a loss, after the causal shift); 1
        for a pair or an example.
    has_media, has_audio: the sample has images or videos, or audio, so the collator injects no dummy.
    leading_label: the first label is not ignored. Nothing predicts it, but stock counts it in the mean.
    modality: only samples of one modality share a group. Videos are a separate modality if a model cannot take them
        together with images, or runs its vision tower once for each: engines that shard parameters hang unless every
        rank runs it equally often.
    """

    tokens: int
    patches: int = 0
    units: int = 0
    has_media: bool = False
    modality: int = 0
    leading_label: bool = False
    has_audio: bool = False
    row_tokens: int = 0
    media: Media | None = None

    @property
    def by_modality(self) -> Media:
        if self.media is not None:
            return self.media
        return Media(video_patches=self.patches) if self.modality == VIDEO else Media(self.patches)

    @property
    def padded(self) -> int:
        """Tokens of the row that the sample is planned as in a padded micro-batch."""
        return self.row_tokens or self.tokens


def larger(a: Any, b: Any) -> Any:
    """The larger of two numbers, or of each pair of two arrays. `np.maximum` is ten times slower for numbers."""
    return np.maximum(a, b) if isinstance(a, np.ndarray) else max(a, b)


@dataclass(frozen=True, slots=True)
class Collation:
    """Padding and dummy media that the framework's collator adds to a group.

    pad_to_multiple_of: the row length is rounded up to a multiple of this.
    dummy_media_tokens, dummy_media_patches: a fake image that the collator injects into the first row of a
        group without images and videos, so that every rank runs the vision tower.
    dummy_audio_tokens, dummy_audio_patches: fake audio, injected after the fake image.
    rows: number of rows that the collator makes of a sample. batches: prefixes of the keys of each batch of rows that
        the trainer reads while the model computes them; empty if only the model reads the batch.
    """

    pad_to_multiple_of: int = 1
    dummy_media_tokens: int = 0
    dummy_media_patches: int = 0
    dummy_audio_tokens: int = 0
    dummy_audio_patches: int = 0
    rows: int = 1
    batches: tuple[str, ...] = ()

    def in_one_row(self) -> Collation:
        """For padded micro-batches, which plan all rows of a sample as one row: additions count once for each row."""
        return replace(
            self,
            pad_to_multiple_of=self.rows * self.pad_to_multiple_of,
            dummy_media_tokens=self.rows * self.dummy_media_tokens,
            dummy_audio_tokens=self.rows * self.dummy_audio_tokens,
            rows=1,
        )

    @property
    def has_dummies(self) -> bool:
        return self.dummies(0, 0) != (0, 0)

    def dummies(self, media: Any, audio: Any) -> tuple[Any, Any]:
        """Dummy tokens and patches of a group. media, audio: number of its samples that have some (int or array)."""
        tokens = (media == 0) * self.dummy_media_tokens + (audio == 0) * self.dummy_audio_tokens
        return tokens, (media == 0) * self.dummy_media_patches + (audio == 0) * self.dummy_audio_patches

    def length(self, longest: Any, first: Any, dummy_tokens: Any) -> Any:
        """Padded row length of a group (tokens). first: length of its first row without `dummy_tokens`."""
        return -(-larger(longest, first + dummy_tokens) // self.pad_to_multiple_of) * self.pad_to_multiple_of


@dataclass(frozen=True, slots=True)
class Limits:
    """The two budgets without the collation. `oom: split` and `skip` lower them during training."""

    token_budget: int
    max_patches: int | None = None

    def least(self, limits: Limits | None) -> Limits:
        """The lower value of each budget."""
        if limits is None:
            return self
        patches = [limit for limit in (self.max_patches, limits.max_patches) if limit is not None]
        return Limits(min(self.token_budget, limits.token_budget), min(patches, default=None))


@dataclass(frozen=True, slots=True)
class Budget:
    """The budgets of a collated group. max_patches None: no limit.

    layout: `padded`, one row for each sample; `flat`, all samples of a group in one row.
    pad_to_multiple_of: the length of a flat row is rounded up to a multiple of this (tokens).
    row_multiple: the number of rows of a padded micro-batch above this number is a multiple of it, as far as samples
        and `max_patches` allow.
    """

    token_budget: int
    max_patches: int | None = None
    collation: Collation = Collation()
    layout: str = "padded"
    pad_to_multiple_of: int = 1
    row_multiple: int = 1

    def __str__(self) -> str:
        """For messages."""
        sums = [] if self.max_patches is None else [f"{self.max_patches} patches"]
        return ", ".join([f"{self.token_budget} tokens", *sums])

    @property
    def limits(self) -> Limits:
        return Limits(self.token_budget, self.max_patches)

    def within(self, limits: Limits | None) -> Budget:
        """This budget, lowered to `limits`."""
        lowest = self.limits.least(limits)
        return replace(self, token_budget=lowest.token_budget, max_patches=lowest.max_patches)

    def collated(self, sums: Any, count: Any = 1, longest: Any = 0, first: Any = 0) -> tuple[Any, Any, Any]:
        """(rows, row length in tokens, patches) of collated groups, each int64[...], or integers for a single group.

        sums: sums of the `MEASURES` of their samples, int64[..., 4] or a list of four integers. count: samples.
        longest, first: tokens of the longest and of the first row. The flat layout ignores count, longest and first;
        the padded layout ignores the sum of tokens.
        """
        tokens, patches, media, audio = sums if isinstance(sums, list) else np.moveaxis(sums, -1, 0)
        dummy_tokens, dummy_patches = self.collation.dummies(media, audio)
        if self.layout == "flat":
            multiple = self.pad_to_multiple_of
            return 0 * tokens + 1, -(-(tokens + dummy_tokens) // multiple) * multiple, patches + dummy_patches
        return count, self.collation.length(longest, first, dummy_tokens), patches + dummy_patches

    def excess(self, padded: Any, patches: Any) -> Any:
        """Tokens and patches above the budgets; 0: within both. padded: rows x row length of a collated group."""
        over = larger(padded - self.token_budget, 0)
        return over if self.max_patches is None else over + larger(patches - self.max_patches, 0)

    def shape(self, group: Sequence[Cost]) -> tuple[int, int, int]:
        """(rows, row length in tokens, patches) of the collated group, its samples in this order."""
        sums = [sum(getattr(cost, name) for cost in group) for name in MEASURES]
        return self.collated(sums, len(group), max(cost.padded for cost in group), group[0].padded)

    def fits(self, group: Sequence[Cost]) -> bool:
        rows, length, patches = self.shape(group)
        return not self.excess(rows * length, patches)

    def tokens_of(self, cost: Cost) -> int:
        """Tokens of the sample in a group, without padding to the longest."""
        return cost.tokens if self.layout == "flat" else cost.padded

    def overlong(self, cost: Cost) -> bool:
        """Whether this sample breaks a budget alone."""
        return not self.fits((cost,))
