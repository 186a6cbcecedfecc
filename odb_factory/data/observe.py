"""Observe: turn dataset rows into light samples with a known cost, in worker processes."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
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
            return self._reject(
                index,
                "overlong",
                str(error),
                "such a sample cannot travel as a singleton either: "
                "raise cutoff_len, shrink the media (image_max_pixels, video_maxlen), or set `overlong: drop`",
                fatal=self.config.overlong != "drop",
            )
        except Exception as error:
            return self._reject(
                index,
                "unreadable",
                one_line(error),
                "mend or remove the row, or set `on_error: skip` to go on without such rows",
                fatal=self.config.on_error == "raise",
            )
        if cost.supervised_tokens == 0:
            return self._reject(index, "unsupervised", "no label carries loss (truncation may have cut them off)")
        if self.config.overlong != "singleton" and self.budget.overlong(cost):
            return self._reject(
                index,
                "overlong",
                f"{cost.tokens} tokens and {cost.patches} patches break the budget of "
                f"{self.budget.token_budget} tokens and {self.budget.max_patches} patches alone",
                "raise the budget, or set `overlong: singleton` or `drop`",
                fatal=self.config.overlong == "error",
            )
        return sample

    def _reject(self, index: int, reason: str, what: str, way_out: str = "", fatal: bool = False) -> Rejection:
        """way_out: said where the policy is to stop; elsewhere what it advises has been done."""
        message = f"{self._where(index)}: {what.rstrip('.')}"
        return Rejection(index, reason, f"{message}; {way_out}." if fatal else f"{message}.", fatal)

    def _where(self, index: int) -> str:
        return where(self.observer, self.dataset, index)


class Share:
    """The share of one rank in an order of all ranks: every `world_size`-th of what is left to do.

    done: bool a position of the order, what is left out (None: nothing). again: draws of this share that come once
    more, in ascending order, before it goes on with number `begin`. All three hold for one iteration.
    """

    def __init__(self, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size
        self.begin_anew()

    def begin_anew(self) -> None:
        self.done: np.ndarray | None = None
        self.again: list[int] = []
        self.begin = 0

    def of(self, order: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """(position in the order, item) of every item to draw."""
        done, again, begin = self.done, set(self.again), self.begin
        self.begin_anew()
        left: Iterator[tuple[int, Any]] = enumerate(order)
        if done is not None:
            left = ((i, item) for i, item in left if i >= len(done) or not done[i])
        mine = itertools.islice(left, self.rank, None, self.world_size)
        if begin == 0:
            yield from mine
        for draw, pair in enumerate(mine):
            if draw >= begin or draw in again:
                yield pair


def is_split_by_node(stream: Any) -> bool:
    """Whether `datasets.distributed.split_dataset_by_node` has given each rank a part of it."""
    return getattr(stream, "_distributed", None) is not None


class ObservedStream(IterableDataset):
    """The share of a rank of a dataset that is iterated, observed.

    The id of a sample is its position in the stream. All ranks iterate the same stream, unless it is known to have
    been split between them (`is_split_by_node`). A resumed stream is read
    from its beginning, what is done passed over unobserved: a state of its own, where it has one, may forget what
    waits in it (that of `datasets` loses its shuffle buffer).
    """

    fingerprint = 0

    def __init__(self, dataset: Any, observer: Observer, config: ODBConfig, budget: Budget, rank: int, world_size: int):
        self.dataset = dataset
        self._observed = ObservedDataset(self, observer, config, budget)
        self._current: Any = None
        self.rank, self.world_size = rank, world_size
        self.is_split = is_split_by_node(dataset)
        self.share = Share(0, 1) if self.is_split else Share(rank, world_size)

    def __getitem__(self, index: int) -> Any:
        return self._current

    def __iter__(self) -> Iterator[Sample | Rejection]:
        for position, item in self.share.of(self.dataset):
            self._current = item
            yield self._observed[position * self.world_size + self.rank if self.is_split else position]

    def peek(self) -> int:
        return self.fingerprint

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


class ShardSampler(Sampler[int]):
    """The share of a rank in `sampler`: no padding, no index twice (I2).

    fingerprint: a checksum of the first indices of the order that was begun last, to compare between ranks and runs.
    """

    def __init__(self, sampler: Any, rank: int, world_size: int):
        self.sampler, self.share = sampler, Share(rank, world_size)
        self.fingerprint = 0

    def peek(self) -> int:
        """The fingerprint of the order that comes next, which stays the next."""
        generator = getattr(self.sampler, "generator", None)
        before = generator.get_state() if generator is not None else None
        with torch.random.fork_rng(devices=[]):
            iter(self)
        if before is not None:
            generator.set_state(before)
        return self.fingerprint

    def __iter__(self) -> Iterator[int]:
        order = iter(self.sampler)
        first = [int(index) for index in itertools.islice(order, FINGERPRINTED)]
        self.fingerprint = zlib.crc32(repr((len(self.sampler), first)).encode())
        return (int(index) for _, index in self.share.of(itertools.chain(first, order)))

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
