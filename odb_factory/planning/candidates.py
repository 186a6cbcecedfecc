"""The order in which groups are cut out of the samples that a plan may choose from."""

from __future__ import annotations

import numpy as np

from odb_factory.planning.cost import Budget, CostModel

MAX_WAIT_ROUNDS = 32
"""A sample that was held back in so many rounds is overdue: it goes before all others."""
AGING_DENOMINATOR = 256
"""Until then each round raises the priority of a sample by one part in so many."""


class Rows:
    """Samples in the order in which groups are cut out of them: each modality by itself, from long to short.

    A group is a stretch [start, end) of this order: neighbours differ little in length, so little is padded.

    table: array of `ROW`. index: the samples to take, as positions in `table` [n]. pool: of each of them the pool it
    belongs to [n]; groups never mix pools, and one pool follows the other (default: all in one).

    index, length (padded row length in tokens) and the like follow the sorted order [n]. Those named `_before` are
    sums over all samples before each position, and over all at the end [n + 1]. max_end: where a group that starts
    here must end at the latest, for its pool, modality and patches. most_overdue: the position of the sample that is
    overdue the longest, if one is.
    """

    def __init__(self, table: np.ndarray, index: np.ndarray, budget: Budget, pool: np.ndarray | None = None):
        self.budget = budget
        rows = table[index]
        kind = rows["modality"].astype(np.int64)
        if pool is not None:
            kind += pool.astype(np.int64) << 8
        order = np.lexsort((-rows["patches"], -rows["row_tokens"], kind))
        self.index, rows, kind = index[order], rows[order], kind[order]
        tokens, waited = rows["row_tokens"].astype(np.int64), rows["age"].astype(np.int64)
        multiple = budget.collation.pad_to_multiple_of
        length = budget.sizes.up(np.maximum(-(-tokens // multiple) * multiple, 1))
        priority = tokens * (AGING_DENOMINATOR + np.minimum(waited, MAX_WAIT_ROUNDS))
        summed = [priority, rows["patches"], rows["has_media"], rows["has_audio"], waited >= MAX_WAIT_ROUNDS]
        self._columns = np.array([tokens, length, kind, waited, *summed], dtype=np.int64)
        self._measure()

    def __len__(self) -> int:
        return len(self.index)

    def _measure(self) -> None:
        self.tokens, self.length, kind, waited = self._columns[:4]
        sums = np.zeros((len(self._columns) - 4, len(self) + 1), dtype=np.int64)
        np.cumsum(self._columns[4:], axis=1, out=sums[:, 1:])
        self.priority_before, self.patches_before, self.media_before, self.audio_before, self.overdue_before = sums
        self.most_overdue = int(np.lexsort((self.index, -waited))[0]) if self.overdue_before[-1] else None
        self.max_end = self._max_end(kind)

    def _max_end(self, kind: np.ndarray) -> np.ndarray:
        ends = np.searchsorted(kind, kind, side="right")
        if self.budget.max_patches is not None:
            most = self.patches_before[:-1] + self.budget.max_patches
            within = np.searchsorted(self.patches_before, most, side="right") - 1
            ends = np.minimum(ends, np.maximum(within, np.arange(len(kind)) + 1))
        return ends

    def without(self, start: int, end: int) -> None:
        """Take a group out."""
        gone = np.s_[start:end]
        self.index, self._columns = np.delete(self.index, gone), np.delete(self._columns, gone, axis=1)
        self._measure()

    def group(self, start: int, end: int) -> np.ndarray:
        """Its samples, the shortest first: dummy media added to the first row then rarely make it the longest."""
        return self.index[start:end][::-1]

    def shape(self, start: int, end: int) -> tuple[int, int, int]:
        """(rows, padded row length in tokens, patches) of a group as collated."""
        media = int(self.media_before[end] - self.media_before[start])
        audio = int(self.audio_before[end] - self.audio_before[start])
        collation = self.budget.collation
        dummy_tokens, dummy_patches = collation.dummies(media, audio)
        length = collation.length(int(self.tokens[start]), int(self.tokens[end - 1]), dummy_tokens)
        length = self.budget.sizes.up(length)
        patches = int(self.patches_before[end] - self.patches_before[start]) + dummy_patches
        return self.budget.rows_of(end - start, length), length, patches

    def shapes(self, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`shape` of many groups, none of them empty."""
        collation, lengths = self.budget.collation, self.length[starts]
        patches = self.patches_before[ends] - self.patches_before[starts]
        if collation.has_dummies:
            media = self.media_before[ends] - self.media_before[starts]
            audio = self.audio_before[ends] - self.audio_before[starts]
            dummy_tokens, dummy_patches = collation.dummies(media, audio)
            first = self.tokens[ends - 1] + dummy_tokens
            first = -(-first // collation.pad_to_multiple_of) * collation.pad_to_multiple_of
            lengths, patches = np.maximum(lengths, self.budget.sizes.up(first)), patches + dummy_patches
        return self.budget.rows_of(ends - starts, lengths), lengths, patches

    def cost(self, start: int, end: int, model: CostModel) -> int:
        """Of a group, in the unit of the model."""
        rows, length, patches = self.shape(start, end)
        return model.of(rows * length, patches, rows * length * length)

    def costs(self, starts: np.ndarray, ends: np.ndarray, model: CostModel) -> np.ndarray:
        """`cost` of many groups, none of them empty."""
        rows, lengths, patches = self.shapes(starts, ends)
        padded = rows * lengths
        return model.of(padded, patches, padded * lengths)

    def largest_fitting_end(self, start: int, end: int, token_cap: int) -> int:
        """The end that a group of at most `token_cap` padded tokens can have, at most `end`, with one sample at least.

        Both budgets are kept (I4): a group without media is made larger by what the collator adds to it.
        """
        while end - start > 1:
            rows, length, patches = self.shape(start, end)
            if rows * length <= token_cap and self.budget.holds(rows, length, patches):
                break
            # Fewer rows are never shorter, so this many is the most that can fit.
            end = max(start + 1, min(end - 1, start + token_cap // max(length, 1)))
        return end

    def next_fit(self, token_cap: int) -> list[tuple[int, int]]:
        """All of them in groups of at most `token_cap` padded tokens, each as large as it can be.

        Next-fit decreasing (Johnson 1973), with the padded size of a bin instead of the sum.
        """
        ends = np.minimum(np.arange(len(self)) + np.maximum(token_cap // self.length, 1), self.max_end).tolist()
        groups, start = [], 0
        while start < len(ends):
            end = self.largest_fitting_end(start, ends[start], token_cap)
            groups.append((start, end))
            start = end
        return groups
