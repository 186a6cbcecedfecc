"""The order in which groups are cut out of the samples that a plan may choose from."""

from __future__ import annotations

import numpy as np

from odb_factory.planning.cost import Budget, CostModel

MAX_WAIT_ROUNDS = 32
"""A sample that was kept back in so many rounds is overdue: it goes before all others."""
PATIENCE = 256
"""Until then each round adds one part in so many to what it is worth to send it out."""


class Rows:
    """Samples in the order in which groups are cut out of them: each modality by itself, from long to short.

    A group is a stretch [start, end) of this order: neighbours differ little in length, so little is padded.
    index: the samples, as positions in the table they are taken from; the other arrays follow the same order. Those
    named `_before` are sums over all samples before each position, and over all at the end. oldest: the place of the
    sample that is overdue the longest, if one is.
    """

    def __init__(self, table: np.ndarray, index: np.ndarray, budget: Budget):
        self.budget = budget
        rows = table[index]
        order = np.lexsort((-rows["patches"], -rows["tokens"], rows["modality"]))
        self.index, rows = index[order], rows[order]
        tokens, waited = rows["tokens"].astype(np.int64), rows["age"].astype(np.int64)
        multiple = budget.collation.pad_to_multiple_of
        length = np.maximum(-(-tokens // multiple) * multiple, 1)
        worth = tokens * (PATIENCE + np.minimum(waited, MAX_WAIT_ROUNDS))
        summed = [worth, rows["patches"], rows["has_media"], waited >= MAX_WAIT_ROUNDS]
        self._columns = np.array([tokens, length, rows["modality"], waited, *summed], dtype=np.int64)
        self._measure()

    def __len__(self) -> int:
        return len(self.index)

    def _measure(self) -> None:
        self.tokens, self.length, modality, waited = self._columns[:4]
        sums = np.zeros((len(self._columns) - 4, len(self) + 1), dtype=np.int64)
        np.cumsum(self._columns[4:], axis=1, out=sums[:, 1:])
        self.worth_before, self.patches_before, self.media_before, self.overdue_before = sums
        self.oldest = int(np.lexsort((self.index, -waited))[0]) if self.overdue_before[-1] else None
        self.furthest = self._furthest(modality)

    def _furthest(self, modality: np.ndarray) -> np.ndarray:
        """Where a group that starts here must end at the latest, for its modality or its patches."""
        ends = np.searchsorted(modality, modality, side="right")
        if self.budget.max_patches is not None:
            most = self.patches_before[:-1] + self.budget.max_patches
            within = np.searchsorted(self.patches_before, most, side="right") - 1
            ends = np.minimum(ends, np.maximum(within, np.arange(len(modality)) + 1))
        return ends

    def without(self, start: int, end: int) -> None:
        """Take a group out."""
        gone = np.s_[start:end]
        self.index, self._columns = np.delete(self.index, gone), np.delete(self._columns, gone, axis=1)
        self._measure()

    def group(self, start: int, end: int) -> np.ndarray:
        """Its samples, the shortest first: a filler added to the first row then rarely makes it the longest."""
        return self.index[start:end][::-1]

    def shape(self, start: int, end: int) -> tuple[int, int, int]:
        """(rows, padded row length, patches) as collated."""
        has_media = bool(self.media_before[end] - self.media_before[start])
        collation = self.budget.collation
        length = collation.length(int(self.tokens[start]), int(self.tokens[end - 1]), has_media)
        patches = int(self.patches_before[end] - self.patches_before[start])
        return end - start, length, patches if has_media else patches + collation.dummy_media_patches

    def cost(self, start: int, end: int, model: CostModel) -> int:
        rows, length, patches = self.shape(start, end)
        return model.of(rows * length, patches, rows * length * length)

    def fitted(self, start: int, end: int, level: int) -> int:
        """The end that a group of at most `level` padded tokens can have, at most `end`; at least one sample is in it.

        Both budgets are kept (I4): a group without media is made larger by what the collator adds to it.
        """
        while end - start > 1:
            rows, length, patches = self.shape(start, end)
            if rows * length <= level and self.budget.holds(rows, length, patches):
                break
            # Fewer rows are never shorter, so this many is the most that can fit.
            end = max(start + 1, min(end - 1, start + level // max(length, 1)))
        return end

    def cut(self, level: int) -> list[tuple[int, int]]:
        """All of them in groups of at most `level` padded tokens, each as large as it can be (next-fit decreasing)."""
        ends = np.minimum(np.arange(len(self)) + np.maximum(level // self.length, 1), self.furthest).tolist()
        groups, start = [], 0
        while start < len(ends):
            end = self.fitted(start, ends[start], level)
            groups.append((start, end))
            start = end
        return groups
