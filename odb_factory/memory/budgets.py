"""The largest budgets whose heaviest micro-batch fits, from the peaks of a few that were tried. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from odb_factory.memory.fit import LinearBytes, fit

HEADROOM = 1.25
"""Patches that a budget of auto leaves room for, as a multiple of what the data bring on average with its tokens."""
GRAIN = 64
"""Tokens; budgets beyond a thousand are multiples of it."""


@dataclass(frozen=True, slots=True)
class TriedShape:
    """rows x row_length tokens as collated; patches of its media."""

    rows: int
    row_length: int
    patches: int

    @property
    def tokens(self) -> int:
        return self.rows * self.row_length


@dataclass(frozen=True, slots=True)
class DataShape:
    """What the samples that were looked at say of the heaviest micro-batches.

    longest: tokens of the longest sample. most_patches: of any sample. densest: patches of a token at the most, and
    mean: on average, of samples with media and without. is_flat: all samples in one row.
    """

    longest: int
    most_patches: int
    densest: float
    mean: float
    is_flat: bool

    def heaviest(self, tokens: int, max_patches: int | None) -> TriedShape:
        """Of the micro-batches within these budgets."""
        patches = math.ceil(self.densest * tokens)
        patches = patches if max_patches is None else min(patches, max_patches)
        if self.is_flat:
            return TriedShape(1, tokens, patches)
        length = min(self.longest, tokens)
        return TriedShape(tokens // length, length, patches)

    def patches_for(self, tokens: int) -> int | None:
        """A cap for micro-batches of so many tokens; None for data without media."""
        if not self.most_patches:
            return None
        return max(self.most_patches, math.ceil(HEADROOM * self.mean * tokens))


@dataclass(slots=True)
class Tried:
    """Micro-batches that have been run, and the bytes that each rank needed at the most (None: more than it had).

    limits: bytes that each rank may use.
    """

    limits: tuple[int, ...]
    shapes: list[TriedShape] = field(default_factory=list)
    peaks: list[tuple[int | None, ...]] = field(default_factory=list)

    def add(self, shape: TriedShape, peaks: Sequence[int | None]) -> bool:
        """Returns whether it is within the limits of all ranks."""
        self.shapes.append(shape)
        self.peaks.append(tuple(peaks))
        return all(peak is not None and peak <= limit for peak, limit in zip(peaks, self.limits))

    def models(self) -> list[LinearBytes]:
        """Of each rank, by what has run there."""
        fits = []
        for rank in range(len(self.limits)):
            ran = [(shape, peaks[rank]) for shape, peaks in zip(self.shapes, self.peaks)]
            known = [(shape, peak) for shape, peak in ran if peak is not None]
            fits.append(fit([shape for shape, _ in known], [peak for _, peak in known]))
        return fits

    def holds(self, shape: TriedShape, models: Sequence[LinearBytes]) -> bool:
        """Whether `shape` should fit, and is no larger than what did not."""
        for failed, peaks in zip(self.shapes, self.peaks):
            is_too_much = any(peak is None or peak > limit for peak, limit in zip(peaks, self.limits))
            if is_too_much and shape.tokens >= failed.tokens and shape.patches >= failed.patches:
                return False
        return all(model.of(shape) <= limit for model, limit in zip(models, self.limits))


def largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest whole number of [low, high] that `holds`; low if none does. It holds for all below one that does."""
    if holds(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def rounded(tokens: int, least: int) -> int:
    """Down to the grain, but not below `least`."""
    return max(tokens - tokens % GRAIN if tokens > 1024 else tokens, least)
