"""The optimizer steps of stock training: which samples they are made of, and what they weigh there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from odb_factory.errors import DataError
from odb_factory.planning import BufferMetadata, Collation
from odb_factory.planning.plan import pool


@dataclass(frozen=True, slots=True)
class StockMean:
    """What stock makes the loss of an optimizer step of: means over tokens.

    over: each is the mean over the tokens of the whole "step", of a "rank", or of a "micro_batch".
    divisor: the loss is the sum of these means divided by it; None: divided by their number.
    counts_first: the mean counts the first label of a sample too, which no token predicts.
    """

    over: Literal["step", "rank", "micro_batch"] = "step"
    divisor: int | None = None
    counts_first: bool = True


OF_STEP = StockMean()
OF_MICRO_BATCH = StockMean("micro_batch", counts_first=False)
"""Of a model that takes the mean itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StockSteps:
    """The optimizer steps of stock training, which are kept.

    global_batch_size: N, samples of an optimizer step on all ranks. batch_size: rows of a micro-batch of stock's.
    world_size: data-parallel ranks. num_samples: of an epoch that are trained on (without those that `drop_last` leaves
    out), None if nobody knows. not_trained: those that `drop_last` leaves out.
    mean: what stock's loss is made of.
    equal_weights: samples that stock weighs differently do not share a micro-batch.
    is_split: every rank iterates a stream of its own.
    """

    global_batch_size: int
    batch_size: int
    world_size: int
    num_samples: int | None
    not_trained: int = 0
    mean: StockMean = OF_STEP
    equal_weights: bool = False
    is_split: bool = False

    @property
    def steps_an_epoch(self) -> int | None:
        return None if self.num_samples is None else -(-self.num_samples // self.global_batch_size)

    def position(self, rank: int, number: int) -> int:
        """Where the sample that this rank draws with this number stands in the order of all ranks."""
        if not self.is_split:
            return rank + number * self.world_size
        micro_step, row = divmod(number, self.batch_size)
        return (micro_step * self.world_size + rank) * self.batch_size + row

    def first_number(self, rank: int, step: int) -> int:
        """The number of the first sample that this rank draws for an optimizer step, or for one behind it."""
        if self.is_split:
            micro_steps, rest = divmod(step * self.global_batch_size, self.batch_size * self.world_size)
            return micro_steps * self.batch_size + min(max(rest - rank * self.batch_size, 0), self.batch_size)
        return max(0, -(-(step * self.global_batch_size - rank) // self.world_size))

    def progress(self, step: int) -> float | None:
        """Share of the epoch once this optimizer step is taken, as stock says it: in whole micro-steps of its own."""
        if self.num_samples is None:
            return None
        of_all_ranks = self.batch_size * self.world_size
        total = max(-(-self.num_samples // of_all_ranks), 1)
        done, rest = divmod((step + 1) * self.global_batch_size, of_all_ranks)
        return min(done + rest / of_all_ranks, total) / total


class StockMeans(NamedTuple):
    """Of each sample of an optimizer step (int64[len(rows)]): the tokens that stock divides its losses by (`units`),
    how many of them are its own (`counted`), the number of that mean (`means`). num_means: that stock averages."""

    units: np.ndarray
    counted: np.ndarray
    means: np.ndarray
    num_means: int


def stock_means(rows: np.ndarray, stock: StockSteps) -> StockMeans:
    """What stock's loss divides by.

    rows: all samples of an optimizer step, as `ROW`.
    """
    mean = stock.mean
    counted = rows["units"].astype(np.int64)
    if mean.counts_first:
        counted += rows["leading_label"]
    group = np.zeros(len(rows), dtype=np.int64)
    if mean.over != "step":
        group = rows["position"] // stock.batch_size
    if mean.over == "rank":
        group %= stock.world_size
    tokens = np.bincount(group, weights=counted).astype(np.int64)
    num_means = int(np.count_nonzero(tokens)) if mean.divisor is None else mean.divisor
    return StockMeans(tokens[group], counted, group, num_means)


def by_weight(buffers: Sequence[BufferMetadata], stock: StockSteps) -> list[BufferMetadata]:
    """The same samples, of a modality of their own for each weight that stock gives, so that no group mixes them.

    Weights differ where stock's micro-batches have different sizes: at the end of an epoch, and where rows were left
    out.
    """
    rows, starts, _ = pool(buffers)
    if not len(rows):
        return list(buffers)
    divisors = stock_means(rows, stock).units
    kinds, kind = np.unique(np.stack((rows["modality"], divisors)), axis=1, return_inverse=True)
    if kinds.shape[1] > np.iinfo(np.uint8).max:
        raise DataError(f"stock would give the samples of an optimizer step {kinds.shape[1]} different weights")
    rows["modality"] = kind.reshape(-1)
    parts = [rows[start:end] for start, end in itertools.pairwise(starts)]
    return [BufferMetadata(part, buffer.exhausted) for part, buffer in zip(parts, buffers)]


def stock_input_tokens(rows: np.ndarray, stock: StockSteps, rank: int, collation: Collation) -> int:
    """Padded tokens of the batches that stock would have collated on this rank of these samples (as `ROW`)."""
    slots = rows["position"] // stock.batch_size
    mine = np.flatnonzero(slots % stock.world_size == rank)
    mine = mine[np.argsort(rows["position"][mine], kind="stable")]
    total = 0
    for batch in np.split(mine, np.flatnonzero(np.diff(slots[mine])) + 1):
        if len(batch):
            tokens = rows["row_tokens"][batch]
            dummy_tokens, _ = collation.dummies(
                int(rows["has_media"][batch].sum()), int(rows["has_audio"][batch].sum())
            )
            total += len(batch) * collation.length(int(tokens.max()), int(tokens[0]), dummy_tokens)
    return total
