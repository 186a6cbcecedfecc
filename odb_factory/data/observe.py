"""Observe: turn dataset rows into light samples with a known cost, in worker processes."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch.utils.data import Dataset, IterableDataset, Sampler

from odb_factory.batching import Budget, Cost
from odb_factory.config import ODBConfig
from odb_factory.data.samples import Rejection, Sample, pack
from odb_factory.errors import one_line

FINGERPRINTED = 64


class RowDropped(Exception):
    """The framework itself would drop this row; `reason` is the word it is counted under."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class MediaCut(Exception):
    """Truncation cut visual placeholders, so the sample cannot be trained on in any group."""


class Observer(Protocol):
    """Runs the framework's template, tokenizer and multimodal plugin on one row."""

    def __call__(self, dataset: Any, index: int) -> tuple[dict[str, Any], Cost]:
        """The light features of a row and its cost. May raise `RowDropped`, `MediaCut` or anything else."""

    def describe(self, dataset: Any, index: int) -> str:
        """Where the row comes from, for messages: dataset, row, files."""


def where(observer: Observer, dataset: Any, index: int) -> str:
    """Where a row comes from; its number alone if even that cannot be read."""
    try:
        return observer.describe(dataset, index)
    except Exception:
        return f"row {index} of the training dataset"


class ObservedDataset(Dataset):
    """`dataset[i]` as `Sample`, or as `Rejection` where the row cannot be used. Never raises for a row."""

    def __init__(self, dataset: Any, observer: Observer, config: ODBConfig, budget: Budget):
        self.dataset, self.observer, self.config, self.budget = dataset, observer, config, budget

    def __getitem__(self, index: int) -> Sample | Rejection:
        try:
            features, cost = self.observer(self.dataset, index)
            sample = Sample(index, cost, pack(features))
        except RowDropped as error:
            return Rejection(index, error.reason, f"{self._where(index)}: {error}")
        except MediaCut as error:
            return Rejection(
                index,
                "overlong",
                f"{self._where(index)}: {error} Such a sample cannot travel as a singleton either: "
                "raise cutoff_len, shrink the media (image_max_pixels, video_maxlen), or set `overlong: drop`.",
                fatal=self.config.overlong != "drop",
            )
        except Exception as error:
            return Rejection(
                index,
                "unreadable",
                f"{self._where(index)}: {one_line(error)}; "
                "mend or remove the row, or set `on_error: skip` to go on without such rows.",
                fatal=self.config.on_error == "raise",
            )
        if cost.supervised_tokens == 0:
            return Rejection(index, "unsupervised", f"{self._where(index)}: no label carries loss.")
        if self.config.overlong != "singleton" and self.budget.overlong(cost):
            return Rejection(
                index,
                "overlong",
                f"{self._where(index)}: {cost.tokens} tokens and {cost.patches} patches break the budget of "
                f"{self.budget.token_budget} tokens and {self.budget.max_patches} patches alone; "
                "raise the budget, or set `overlong: singleton` or `drop`.",
                fatal=self.config.overlong == "error",
            )
        return sample

    def _where(self, index: int) -> str:
        return where(self.observer, self.dataset, index)


class ObservedStream(IterableDataset):
    """The share of a rank of a dataset that is iterated: every `world_size`-th item, observed.

    The id of a sample is its position in the stream. All ranks iterate the same stream, unless the dataset
    is known to have been split between them (`datasets.distributed.split_dataset_by_node`).
    """

    def __init__(
        self, dataset: Any, observer: Observer, config: ODBConfig, budget: Budget, rank: int, world_size: int
    ):
        self.dataset = dataset
        self._observed = ObservedDataset(self, observer, config, budget)
        self._current: Any = None
        self.rank, self.world_size = rank, world_size
        self.is_split = getattr(dataset, "_distributed", None) is not None

    def __getitem__(self, index: int) -> Any:
        return self._current

    def __iter__(self) -> Iterator[Sample | Rejection]:
        for position, item in enumerate(self.dataset):
            self._current = item
            if self.is_split:
                yield self._observed[position * self.world_size + self.rank]
            elif position % self.world_size == self.rank:
                yield self._observed[position]

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class ShardSampler(Sampler[int]):
    """Every `world_size`-th index of `sampler`, from `rank` on: no padding, no index twice (I2).

    fingerprint: a checksum of the first indices of the order that was begun last, to compare between ranks.
    """

    def __init__(self, sampler: Any, rank: int, world_size: int):
        self.sampler, self.rank, self.world_size = sampler, rank, world_size
        self.fingerprint = 0

    def __iter__(self) -> Iterator[int]:
        order = iter(self.sampler)
        first = [int(index) for index in itertools.islice(order, FINGERPRINTED)]
        self.fingerprint = zlib.crc32(repr((len(self.sampler), first)).encode())
        return self._mine(itertools.chain(first, order))

    def _mine(self, order: Iterable[int]) -> Iterator[int]:
        for position, index in enumerate(order):
            if position % self.world_size == self.rank:
                yield int(index)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
