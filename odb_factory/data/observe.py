"""Observe: turn dataset rows into light samples with a known cost, in worker processes."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Sampler

from odb_factory.comm.agreement import ranks_alike
from odb_factory.config import ODBConfig
from odb_factory.data.content import checksum
from odb_factory.data.samples import Rejection, Sample
from odb_factory.data.serialize import pack
from odb_factory.data.worker import WorkerDataset
from odb_factory.errors import DataError, one_line
from odb_factory.planning import Budget, Cost

FINGERPRINTED = 64
DIFFERENT_ORDERS = (
    "the ranks draw their samples in different orders ({}), so some would be lost and others trained on twice; give "
    "every rank the same whole sampler, seeded alike (each takes its own share of it), not a share of it."
)


class RowDropped(Exception):
    """The framework itself would drop this row; `reason` is the word it is counted under."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class MediaCut(Exception):
    """Truncation cut visual placeholders, so the sample cannot be trained on in any group."""


class ItemError(DataError):
    """An item is not of the kind that the observer reads, as most likely all are; the message says what to do."""


class Observer(Protocol):
    """Runs the framework's template, tokenizer and multimodal plugin on one row."""

    def __call__(self, dataset: Any, index: int) -> tuple[Mapping[str, Any], Cost]:
        """The light features of a row and its cost. May raise `RowDropped`, `MediaCut` or anything else."""

    def describe(self, dataset: Any, index: int) -> str:
        """Where the row comes from, for messages: dataset, row, files."""


def where(observer: Observer, dataset: Any, index: int) -> str:
    """Where a row comes from; its number alone if even that cannot be read."""
    try:
        return observer.describe(dataset, index)
    except Exception:
        return f"row {index} of the training dataset"


class ObservedDataset(WorkerDataset):
    """`dataset[i]` as `Sample`, or as `Rejection` where the row cannot be used. Never raises for a row."""

    def __init__(self, dataset: Any, observer: Observer, config: ODBConfig, budget: Budget):
        self.dataset, self.observer, self.config, self.budget = dataset, observer, config, budget

    def __getitem__(self, index: int) -> Sample | Rejection:
        try:
            features, cost = self.observer(self.dataset, index)
            sample = Sample(index, cost, pack(features), checksum(features, cost))
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
            is_item = isinstance(error, ItemError)
            return self._reject(
                index,
                "unreadable",
                str(error) if is_item else one_line(error),
                "" if is_item else "mend or remove the row, or set `on_error: skip` to go on without such rows",
                fatal=self.config.on_error == "raise",
            )
        if cost.supervised_tokens == 0:
            return self._reject(index, "unsupervised", "no label carries loss (truncation may have cut them off)")
        if self.config.overlong != "singleton" and self.budget.overlong(cost):
            found, budget = f"{cost.tokens} tokens", f"{self.budget.token_budget} tokens"
            if self.budget.max_patches is not None:
                found, budget = f"{found} and {cost.patches} patches", f"{budget} and {self.budget.max_patches} patches"
            return self._reject(
                index,
                "overlong",
                f"{found} break the budget of {budget} alone",
                "raise the budget, or set `overlong: singleton` or `drop`",
                fatal=self.config.overlong == "error",
            )
        return sample

    def _reject(self, index: int, reason: str, what: str, way_out: str = "", fatal: bool = False) -> Rejection:
        """way_out: said where the policy is to stop; elsewhere what it advises has been done."""
        message = f"{self._where(index)}: {what.rstrip('.')}"
        return Rejection(index, reason, f"{message}; {way_out}." if fatal and way_out else f"{message}.", fatal)

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


class ShardSampler(Sampler[int]):
    """The share of a rank in `sampler`: no padding, no index twice (I2).

    fingerprint: a checksum of the first indices of the order that was begun last, to compare between ranks and runs.
    first: those indices, of all ranks.
    """

    def __init__(self, sampler: Any, rank: int, world_size: int):
        self.sampler, self.share = sampler, Share(rank, world_size)
        self.fingerprint = 0
        self.first: list[int] = []

    def peek(self) -> int:
        """The fingerprint of the order that comes next, which stays the next."""
        with self._generators_kept():
            iter(self)
        return self.fingerprint

    def whole(self) -> Iterator[int]:
        """Indices of all ranks: the first of the order that was begun last, then those of an order drawn for this."""
        yield from self.first
        with self._generators_kept():
            order = [int(index) for index in self.sampler]
        yield from order

    @contextmanager
    def _generators_kept(self) -> Iterator[None]:
        """An order that is drawn here leaves those to come as they would have been."""
        generator = getattr(self.sampler, "generator", None)
        before = None if generator is None else generator.get_state()
        with torch.random.fork_rng(devices=[]):
            yield
        if generator is not None:
            generator.set_state(before)

    def __iter__(self) -> Iterator[int]:
        order = iter(self.sampler)
        self.first = [int(index) for index in itertools.islice(order, FINGERPRINTED)]
        self.fingerprint = zlib.crc32(repr((len(self.sampler), self.first)).encode())
        return (int(index) for _, index in self.share.of(itertools.chain(self.first, order)))

    def common(self, place: tuple[int, ...]) -> int:
        """What `compare` compares: a number made of the order and the place in it."""
        return zlib.crc32(repr((self.fingerprint, place)).encode())

    def compare(self, numbers: Sequence[int]) -> str | None:
        """Why the ranks, with these numbers of `common`, cannot go on; None if they can."""
        return DIFFERENT_ORDERS.format(ranks_alike(numbers)) if len(set(numbers)) > 1 else None

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
