"""Which row's answer LLaMA-Factory pairs a row's prompt with, to estimate the KL divergence of KTO.

Its preprocessing goes through the training data in batches, `datasets.map` of `preprocessing_batch_size` rows within
each of `preprocessing_num_workers` shards, and gives every prompt the answer of the row before it in its batch, the
first one that of the last. Loading, mixing and splitting come before that pass and shuffling behind it, and a row that
the pass drops has lent its answer first: so the number of a row says which row its partner is, without a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Partners:
    """The partner of each row: `partners[row]`, a number of the same dataset.

    num_rows: of the training dataset as it would be preprocessed. batch_size, num_shards: of the pass.

    Example::

        partners = Partners(num_rows=5, batch_size=2, num_shards=1)
        [partners[row] for row in range(5)]  # [1, 0, 3, 2, 4]
    """

    num_rows: int
    batch_size: int
    num_shards: int

    @classmethod
    def of_pass(cls, num_rows: int, data_args: Any) -> Partners:
        """data_args: LLaMA-Factory's. `datasets` uses no more shards than there are rows, and for no batch size one
        batch a shard."""
        num_shards = min(data_args.preprocessing_num_workers or 1, max(num_rows, 1))
        batch_size = data_args.preprocessing_batch_size or 0
        return cls(num_rows, batch_size if batch_size > 0 else max(num_rows, 1), num_shards)

    def __getitem__(self, row: int) -> int:
        first, end = self._shard(row)
        first += (row - first) // self.batch_size * self.batch_size
        return row - 1 if row > first else min(first + self.batch_size, end) - 1

    def _shard(self, row: int) -> tuple[int, int]:
        """[first, end) of the shard of a row: contiguous, as even as they can be, the longer ones first."""
        size, num_longer = divmod(self.num_rows, self.num_shards)
        in_longer = num_longer * (size + 1)
        if row < in_longer:
            first = row - row % (size + 1)
            return first, first + size + 1
        first = row - (row - in_longer) % size
        return first, first + size
