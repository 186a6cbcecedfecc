"""A few sizes that lengths and rows are rounded up to, so that kernels which are compiled or tuned by shape see few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Amount = TypeVar("Amount", int, np.ndarray)
"""A whole number, or an array of them."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in tokens: of padded rows, or, where the layout is flat, of whole micro-batches.

    multiple: sizes are multiples of this.
    buckets: ascending, each a multiple of `multiple`. What is longer than the last is rounded up to a multiple of the
        last; (): there are none, and every multiple is a size.
    limit: the largest size that a budget allows; one that would be larger is this, unless the length is.

        Sizes(buckets=(512, 2048), limit=5000).up(np.array([3, 600, 4100, 6000]))  # [512, 2048, 5000, 6144]
    """

    multiple: int = 1
    buckets: tuple[int, ...] = ()
    limit: int = 0

    def up(self, length: Amount) -> Amount:
        """The size of a length, or of each of an array of them. A larger length has no smaller size; 0 stays."""
        rounded: Amount = -(-length // self.multiple) * self.multiple
        if not self.buckets:
            return rounded
        last = self.buckets[-1]
        beyond = -(-rounded // last) * last
        if isinstance(rounded, np.ndarray):
            beyond = np.where(rounded <= self.limit, np.minimum(beyond, self.limit), beyond)
            sizes = np.array((0, *self.buckets))
            place = np.searchsorted(sizes, rounded)
            within: np.ndarray = np.where(place < len(sizes), sizes[np.minimum(place, len(sizes) - 1)], beyond)
            return within
        if rounded > last:
            return min(beyond, self.limit) if rounded <= self.limit else beyond
        return next(size for size in (0, *self.buckets) if size >= rounded)


EVERY_SIZE = Sizes()
"""Nothing is rounded up."""
