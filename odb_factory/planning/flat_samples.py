"""The samples of a plan of flat micro-batches: what each adds to a bin, and what a bin costs.

A flat micro-batch is a bin: its tokens, its patches and its squared lengths are sums over its samples.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from odb_factory.planning.cost import Budget, CostModel

PATCHES_PER_TOKEN = 4
"""Where the model does not say what a patch costs, so many cost as much as a token: vision towers merge 2 x 2."""
LEAST_TOKEN_SHARE = 16
"""Where tokens cost little or nothing they still count one part in so many: the budget is in tokens."""


class Samples:
    """Samples to put into bins. They stay within their class: ranks that share samples, and one modality.

    table: array of `ROW`. index: the samples to take, as positions in `table` [n]. pool: of each of them the ranks it
    may go to: one pool for all ranks that share their samples, or one for each rank [n].
    slots: ranks that share a pool.

    tokens, patches, has_media, has_audio follow `index` [n]. overlong: the sample breaks a budget alone, so it goes
    alone [n].
    sample_class: numbers of the classes, pool by pool [n].
    """

    def __init__(self, table: np.ndarray, index: np.ndarray, pool: np.ndarray, slots: int, budget: Budget):
        rows = table[index]
        self.table, self.index, self.pool, self.slots, self.budget = table, index, pool, slots, budget
        self.tokens = rows["tokens"].astype(np.int64)
        self.patches = rows["patches"].astype(np.int64)
        self.has_media, self.has_audio = rows["has_media"], rows["has_audio"]
        self.age = rows["age"].astype(np.int64)
        modalities, modality = np.unique(rows["modality"], return_inverse=True)
        self.num_modalities = max(len(modalities), 1)
        self.sample_class = pool * self.num_modalities + modality
        self.overlong = ~budget.holds_flat(self.measures)

    def __len__(self) -> int:
        return len(self.index)

    def of(self, chosen: np.ndarray) -> Samples:
        """Some of them, as positions in these."""
        return Samples(self.table, self.index[chosen], self.pool[chosen], self.slots, self.budget)

    @cached_property
    def measures(self) -> np.ndarray:
        """Tokens, patches, squared length, and whether it has media and audio [n, 5]."""
        columns = [self.tokens, self.patches, self.tokens**2, self.has_media, self.has_audio]
        return np.stack(columns, axis=1, dtype=np.int64, casting="unsafe")

    def sums(self, bin_of: np.ndarray, num_bins: int) -> np.ndarray:
        """`measures` of each bin [bins, 5]."""
        sums = np.zeros((num_bins, 5), dtype=np.int64)
        np.add.at(sums, bin_of, self.measures)
        return sums

    def weigh(self, model: CostModel) -> CostModel:
        """The model that bins are balanced by: `model`, with something for tokens and patches where it has nothing."""
        tokens, patches, squares, *_ = (int(total) for total in self.measures.sum(axis=0))
        rest = model.patch * patches + model.square * squares
        token = max(model.token, -(-rest // (LEAST_TOKEN_SHARE * max(tokens, 1))), 1)
        if model.patch or not patches:
            return replace(model, token=token)
        scale = PATCHES_PER_TOKEN
        return CostModel(scale * model.fixed, scale * token, token, scale * model.square)
