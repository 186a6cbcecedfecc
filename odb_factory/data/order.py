"""What is read and in which order: the parts of a DataLoader, the share of a rank, a stream, the steps of stock."""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
)
from torch.utils.data.distributed import DistributedSampler

from odb_factory.config import ODBConfig
from odb_factory.data.observe import RawItem
from odb_factory.data.ranks import first_unlike, world_size_of
from odb_factory.data.samples import Rejection, Remaining, fingerprint
from odb_factory.errors import ConfigError, DataError, one_line
from odb_factory.planner import BufferMetadata, Collation
from odb_factory.planner.plan import pool
from odb_factory.random_numbers import kept_random_numbers, random_states

# A DataLoader taken apart: what it reads, in which order, and with how many workers.

IN_ORDER = (
    "in_order: False would let the timing of workers decide the order of batches; leave it at True, odb needs the same "
    "order in every run."
)


@dataclass(frozen=True, kw_only=True)
class DataLoaderParts:
    """The parts of a DataLoader, named as in torch.

    sampler: indices of the whole epoch, the same on all ranks, with `set_epoch` if the order changes; None for an
        iterable dataset.
    batch_size: rows of a batch of this rank.
    already_split: an iterable dataset gives every rank a separate part.
    """

    dataset: Any
    sampler: Any
    collate_fn: Callable[[list[Any]], Any]
    batch_size: int = 1
    drop_last: bool = False
    num_workers: int = 0
    prefetch_factor: int = 2
    persistent_workers: bool = False
    timeout: float = 0
    pin_memory: bool = False
    multiprocessing_context: Any = None
    worker_init_fn: Callable[[int], None] | None = None
    generator: torch.Generator | None = None
    already_split: bool = False


MAX_DRAWN = 100_000_000
"""Rows that a sampler may yield beyond its `__len__`; a longer epoch probably never ends."""


class DrawnOrder(Sampler[int]):
    """The orders of a custom sampler, as a DataLoader draws them; the order of the current epoch is drawn once.

    An order may depend on the number of orders drawn before, and on the global random number generators. So the orders
    of epochs that are passed over are drawn, too. The first draw finds the generators in their present state, as in
    stock when training begins; each later draw finds them as the draw before has left them. A DataLoader draws a seed
    for its workers before it iterates its sampler.
    """

    def __init__(self, sampler: Any):
        self.sampler, self.epoch = sampler, 0
        self._states = random_states()
        self._drawn_epoch, self._order = -1, np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.epoch != self._drawn_epoch:
            with kept_random_numbers(states=self._states):
                first = min(self._drawn_epoch + 1, self.epoch)  # an earlier epoch gets a new order
                for epoch in range(first, self.epoch + 1):
                    if hasattr(self.sampler, "set_epoch"):
                        self.sampler.set_epoch(epoch)
                    torch.empty((), dtype=torch.int64).random_()
                    self._order = self._draw()
                self._states = random_states()
            self._drawn_epoch = self.epoch
        return iter(self._order)

    def _draw(self) -> np.ndarray:
        end = MAX_DRAWN + (length_of(self.sampler) or 0)
        order = np.fromiter(map(_whole_number, itertools.islice(self.sampler, end)), np.int64)
        if len(order) == end:
            raise ConfigError(
                f"sampler: an epoch of it has {end:,} rows or more, or never ends; let it end, or take its rows from "
                "a torch.utils.data.IterableDataset."
            )
        return order


def _whole_number(row: Any) -> int:
    try:
        return int(row)
    except (TypeError, ValueError):
        raise ConfigError(
            f"sampler: it yields {row!r}, and rows are known by whole numbers; number the rows, and let the dataset "
            "take the numbers."
        ) from None


def length_of(source: Any) -> int | None:
    """None if the length is unknown."""
    try:
        return len(source)
    except TypeError:
        return None


def check_source(dataset: Any, sampler: Any = None) -> None:
    """Raise `ConfigError` if a DataLoader could not read `dataset`, or could iterate `sampler` only once."""
    if isinstance(sampler, Iterator):
        raise ConfigError(
            f"sampler: a {type(sampler).__name__} can be iterated only once, and every epoch iterates it again; give a "
            "list, or a torch.utils.data.Sampler."
        )
    if isinstance(dataset, IterableDataset):
        return
    kind = type(dataset)
    if getattr(kind, "__getitem__", Dataset.__getitem__) is Dataset.__getitem__:
        raise ConfigError(
            f"dataset: a {kind.__name__} can be iterated only once or has no `__getitem__`; wrap it in a "
            "torch.utils.data.IterableDataset whose `__iter__` starts from the beginning, or give a dataset with "
            "`__getitem__` and `__len__`."
        )
    if sampler is None and not hasattr(kind, "__len__"):
        raise ConfigError(f"dataset: a {kind.__name__} has no `__len__`; add one, or give sampler=.")


def unwrap(dataloader: Any) -> DataLoader:
    """The torch DataLoader inside what accelerate has prepared, or `dataloader` itself."""
    while not isinstance(dataloader, DataLoader) or hasattr(dataloader, "base_dataloader"):
        inner = getattr(dataloader, "base_dataloader", None)
        if inner is None:
            raise ConfigError(f"odb: expected a torch DataLoader, found {type(dataloader).__name__}.")
        dataloader = inner
    return dataloader


def dismantle(dataloader: Any, seed: int, stream: Any = None) -> DataLoaderParts:
    """The parts of `dataloader` (torch's, or prepared by accelerate).

    seed: with the epoch, determines the order of a random sampler. stream: the iterable dataset itself, if known;
    accelerate may have cut the dataset of `dataloader` into shards.

    Shards of `DistributedSampler` and accelerate are joined again: odb makes shards without padding later. Raises
    `ConfigError` if the order cannot be found out, and for options that have no meaning here.
    """
    loader = unwrap(dataloader)
    if not getattr(loader, "in_order", True):  # torchdata's may have none
        raise ConfigError(IN_ORDER)
    if loader.timeout and not loader.num_workers:
        raise ConfigError(f"timeout: {loader.timeout} bounds the wait for workers, and there are none; leave it at 0.")
    dataset = stream if isinstance(stream, IterableDataset) else loader.dataset
    is_prepared_stream = loader is not dataloader and stream is None and isinstance(dataset, IterableDataset)
    may_be_cut = is_prepared_stream and type(dataset) is not IterableDatasetShard and world_size_of(None) > 1
    if may_be_cut and not is_split_by_node(dataset):
        raise ConfigError(
            "odb: accelerate has prepared this DataLoader over a stream, and the part of this rank is unknown; apply "
            "odb to the DataLoader before `prepare`, or give the dataset to ODBDataLoader."
        )
    while isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    batches: Any = loader.batch_sampler  # None if the dataset yields batches
    while isinstance(batches, BatchSamplerShard):  # accelerate's share of a rank
        if batches.split_batches and batches.num_processes > 1:
            raise ConfigError(
                "split_batches: True would cut each batch apart among the ranks, and odb makes separate batches for "
                f"every rank; set it to False and divide batch_size by {batches.num_processes}."
            )
        batches = batches.batch_sampler
    size, sampler = loader.batch_size or getattr(batches, "batch_size", None), None
    if not isinstance(dataset, IterableDataset):
        if batches is None:
            raise ConfigError(
                "odb: a DataLoader with batch_size=None yields batches that its dataset has made; give a DataLoader "
                "whose dataset yields single samples."
            )
        kind, sampler = type(batches), getattr(batches, "sampler", None)
        is_plain = getattr(kind, "__iter__", None) is BatchSampler.__iter__ or kind.__module__.startswith("torchdata.")
        if sampler is None or not is_plain:
            raise ConfigError(
                f"odb: a {kind.__name__} decides which samples share a batch, as odb does; give the order alone: build "
                "the DataLoader with `sampler=` or `shuffle=`."
            )
        sampler = _whole(sampler, seed)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return DataLoaderParts(
        dataset=dataset,
        sampler=sampler,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        persistent_workers=loader.persistent_workers,
        timeout=loader.timeout,
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        batch_size=size if isinstance(size, int) else 1,
        drop_last=loader.drop_last or bool(getattr(batches, "drop_last", False)),
        prefetch_factor=loader.prefetch_factor or 2,
        pin_memory=loader.pin_memory and device is not None and device.type != "mps",  # elsewhere torch only warns
    )


def _whole(sampler: Any, seed: int) -> Any:
    """A sampler of the order of all ranks together, the same on each rank."""
    kind = type(sampler)
    is_torchdata = kind.__module__.startswith("torchdata.")
    if kind is DistributedSampler or (is_torchdata and isinstance(sampler, DistributedSampler)):
        return DistributedSampler(sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed)
    if kind in (RandomSampler, SeedableRandomSampler) or (is_torchdata and kind.__name__ == "RandomSampler"):
        return SeedableRandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler.num_samples,
            generator=torch.Generator(),
            data_seed=seed,
        )
    return DrawnOrder(sampler)


# The order of an epoch, and the share of a rank.

DIFFERENT_ORDERS = (
    "the ranks draw their samples in different orders (rank 0 and rank {}), so some would be lost and others trained "
    "on twice; give every rank the same whole sampler with the same seed: odb takes the share of each rank."
)


class ShardSampler(Sampler[int]):
    """The share of a rank of the order of `sampler`: no padding, no index twice (I2).

    start: what the next iteration yields. stop: the position before which it ends, at the latest.
    order: of all ranks, as drawn last. fingerprint: the checksum of this order, compared between ranks and with states.
    """

    def __init__(self, sampler: Any, rank: int, world_size: int):
        self.sampler, self.rank, self.world_size = sampler, rank, world_size
        self.start, self.stop = Remaining(), sys.maxsize
        self.order = np.zeros(0, np.int64)
        self.fingerprint = 0

    def __iter__(self) -> Iterator[int]:
        """Draws the order at once."""
        self.order = np.fromiter(self.sampler, np.int64)
        self.fingerprint = zlib.crc32(self.order.tobytes())
        held, firsts = self.start.of_ranks(self.world_size)
        rest = np.arange(firsts[self.rank], min(len(self.order), self.stop), self.world_size)
        return map(int, self.order[np.append(held[self.rank], rest)])

    def compare(self, fingerprints: Sequence[int]) -> str | None:
        """Why the ranks, with these fingerprints, cannot continue; None if they can."""
        rank = first_unlike(fingerprints)
        return None if rank is None else DIFFERENT_ORDERS.format(rank)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


# An iterable dataset: each rank takes its share.

ITEMS_COMPARED = 16
"""Items of a stream that are read ahead, for the fingerprint."""
DIFFERENT_STREAMS = (
    "the ranks iterate different streams (rank 0 and rank {}), so samples would be lost: each rank takes its share of "
    "one stream; if the dataset gives every rank a separate part, set already_split=True, else let it yield the same "
    "items in the same order on every rank."
)
SAME_STREAMS = (
    "already_split=True (or datasets.distributed.split_dataset_by_node), but ranks iterate the same stream, so "
    "each sample would be trained on several times; leave it out, or give each rank a separate part."
)


def is_split_by_node(stream: Any) -> bool:
    """Whether each rank has a separate part: by `split_dataset_by_node` of `datasets`, or by an `already_split`."""
    return getattr(stream, "already_split", False) or getattr(stream, "_distributed", None) is not None


class StreamReader:
    """The raw items that a rank takes from an iterable dataset, known by their position in the stream.

    All ranks iterate the same stream, unless it is split between them beforehand (`is_split`): then each rank takes all
    items of its part, and item n has the position n x ranks + rank. The ranks compare the `fingerprint` of the first
    items (0: not read yet). The thread that plans, in the training process, iterates the stream. A resumed stream is
    read from its beginning, and done items are passed over: the stream's own state, if it has one, may lose items (the
    state of `datasets` loses the shuffle buffer).
    """

    def __init__(self, dataset: Any, rank: int, world_size: int, *, is_split: bool = False, whole_batches_of: int = 0):
        """whole_batches_of: rows of a batch, if batches that are not full on all ranks are dropped (`drop_last`)."""
        self.dataset = dataset
        self.rank, self.world_size = rank, world_size
        self.is_split = is_split or is_split_by_node(dataset)
        self._block = whole_batches_of * (1 if self.is_split else world_size)
        self.start = Remaining()
        self.fingerprint = 0

    def __iter__(self) -> Iterator[RawItem | Rejection]:
        positions = self.start.positions(self.rank, self.world_size)
        position, number = next(positions), -1
        try:
            for number, item in enumerate(_in_blocks(self._read(), self._block) if self._block else self._read()):
                if number == (position // self.world_size if self.is_split else position):
                    yield RawItem(position, item)
                    position = next(positions)
        except Exception as error:
            message = (
                f"the dataset raised an error while it was iterated, after item {number}: {one_line(error)}; "
                "nothing can be read after it, so fix the dataset (`on_error: skip` is for items alone)."
            )
            yield Rejection(position, "unreadable", message, fatal=True)

    def _read(self) -> Iterator[Any]:
        """All items. The first are read at once, for the fingerprint; an error among them is raised in its turn."""
        first: list[Any] = []
        failure: Exception | None = None
        try:
            items = iter(self.dataset)
            first.extend(itertools.islice(items, ITEMS_COMPARED))
        except Exception as error:
            failure = error
        self.fingerprint = fingerprint(first) if first else 0
        yield from first
        if failure is not None:
            raise failure
        yield from items

    def compare(self, fingerprints: Sequence[int]) -> str | None:
        """Why the ranks, with these fingerprints, cannot continue; None if they can."""
        if self.is_split:
            known = [number for number in fingerprints if number]
            return SAME_STREAMS if len(set(known)) < len(known) else None
        rank = first_unlike(fingerprints)
        return None if rank is None else DIFFERENT_STREAMS.format(rank)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


def _in_blocks(rows: Iterator[Any], size: int) -> Iterator[Any]:
    """The rows of full blocks: the rows of a smaller last block are dropped."""
    while len(block := list(itertools.islice(rows, size))) == size:
        yield from block


# The optimizer steps of stock training: their samples, and the weights of these samples.

Counts = Literal["tokens", "labels", "samples", "all labels"]


@dataclass(frozen=True, slots=True)
class StockMean:
    """How stock makes the loss of an optimizer step from means over tokens.

    over: the tokens of a mean: those of the whole "step", of a "rank", of a "round" (the micro-batches of all ranks at
        the same time) or of a "micro_batch".
    divisor: the loss is the sum of the means, divided by this number; None: by the number of means.
    counts: what a mean divides by: "tokens" that are predicted, "labels" (also the first label of a sample, which no
        token predicts), "samples" (a mean of the means of samples) or "all labels" (as labels, and first labels have a
        loss, too).
    factor: the loss is multiplied by this number.
    """

    over: Literal["step", "rank", "round", "micro_batch"] = "step"
    divisor: float | None = None
    counts: Counts = "tokens"
    factor: float = 1.0

    def __str__(self) -> str:
        over, factor = self.over.replace("_", "-"), "" if self.factor == 1 else f", times {self.factor:g}"
        name = f"the mean over the {self.counts} of the {over}"
        if self.over in ("step", "round"):
            return name + factor
        kind = "mean" if self.divisor is None else "sum"
        return f"the {kind} of means over the {self.counts} of each {over}{factor}"


MEAN_OF_STEP = StockMean()
MEAN_OF_MICRO_BATCH = StockMean("micro_batch")
"""The loss of a model that takes the mean itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStepRule:
    """The optimizer steps of the training without odb.

    batch_size: rows of a micro-batch. accumulation: micro-batches of an optimizer step (with `fill`, of odb's too).
    drop_last: samples that do not fill a micro-batch on every rank are the remainder of the epoch: not trained on.
    equal_weights: samples with different weights in stock must not share a micro-batch.
    """

    batch_size: int = 1
    accumulation: int = 1
    drop_last: bool = False
    stock_mean: StockMean = MEAN_OF_STEP
    equal_weights: bool = False

    @property
    def settings(self) -> dict[str, object]:
        """The settings that ranks compare."""
        return {
            "per_device_train_batch_size": self.batch_size,
            "gradient_accumulation_steps": self.accumulation,
            "drop_last": self.drop_last,
            "what stock's loss is the mean of": self.stock_mean.over,
        }

    def stock_steps(
        self, config: ODBConfig, world_size: int, num_samples: int | None, *, is_split: bool
    ) -> StockSteps | None:
        """The kept optimizer steps; None with `fill`. num_samples: of an epoch. Raises `ConfigError`."""
        if not config.keeps:
            if self.drop_last:
                raise ConfigError(
                    "drop_last: True (dataloader_drop_last) would drop the samples of a last, smaller batch, and "
                    "`global_batch_size: fill` trains on every sample; set it to False, or keep the optimizer steps."
                )
            return None
        # Samples of an optimizer step, and those that drop_last drops at the end of an epoch.
        of_all_ranks = self.batch_size * world_size
        size = of_all_ranks * self.accumulation
        if isinstance(config.global_batch_size, int):
            size = config.global_batch_size
        if is_split and size % of_all_ranks:
            raise ConfigError(
                f"odb.global_batch_size: {size} is not a multiple of {self.batch_size} rows x {world_size} ranks, and "
                "each rank takes its samples from a separate stream; choose a multiple."
            )
        remainder = num_samples % of_all_ranks if self.drop_last and num_samples is not None else 0
        return StockSteps(
            rule=self,
            global_batch_size=size,
            world_size=world_size,
            num_samples=None if num_samples is None else num_samples - remainder,
            remainder=remainder,
            is_split=is_split,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StockSteps:
    """The optimizer steps of stock training, which odb keeps.

    global_batch_size: N, samples of an optimizer step on all ranks. world_size: data-parallel ranks.
    num_samples: of an epoch without its remainder; None if unknown. remainder: samples that `drop_last` drops.
    is_split: every rank iterates a separate stream.
    """

    rule: OptimizerStepRule
    global_batch_size: int
    world_size: int
    num_samples: int | None
    remainder: int
    is_split: bool

    @property
    def steps_an_epoch(self) -> int | None:
        return None if self.num_samples is None else -(-self.num_samples // self.global_batch_size)

    def position(self, position: int) -> int:
        """The position in stock's order of a sample in the order of all ranks: from split streams each rank makes
        batches by itself."""
        if not self.is_split:
            return position
        number, rank = divmod(position, self.world_size)
        micro_step, row = divmod(number, self.rule.batch_size)
        return (micro_step * self.world_size + rank) * self.rule.batch_size + row

    def progress(self, step: int) -> float | None:
        """Share of the epoch after this optimizer step, in whole micro-steps of stock, as stock reports it."""
        if self.num_samples is None:
            return None
        of_all_ranks = self.rule.batch_size * self.world_size
        total = max(-(-self.num_samples // of_all_ranks), 1)
        return min((step + 1) * self.global_batch_size / of_all_ranks, total) / total

    def means_of(self, rows: np.ndarray) -> tuple[np.ndarray, int]:
        """The divisors in stock's loss: `stock_units`, `stock_counted` and `stock_batch` of `SampleInfo` (int64[n, 3]),
        and the number of means that have tokens. rows: all samples of the optimizer step, as `ROW` [n].
        """
        mean, counted = self.rule.stock_mean, rows["units"].astype(np.int64)
        if "labels" in mean.counts:
            counted += rows["leading_label"]
        elif mean.counts == "samples":
            counted[:] = 1
        batch, ranks = rows["position"].astype(np.int64) // self.rule.batch_size, self.world_size
        by_kind = {"step": np.zeros_like(batch), "rank": batch % ranks, "round": batch // ranks, "micro_batch": batch}
        means, mean_index = np.unique(by_kind[mean.over], return_inverse=True)
        tokens = np.bincount(mean_index, weights=counted, minlength=len(means)).astype(np.int64)
        divisors = tokens[mean_index] * (np.maximum(rows["units"], 1) if mean.counts == "samples" else 1)
        return np.stack((divisors, counted, batch), axis=1), int(np.count_nonzero(tokens))

    def input_tokens(self, rows: np.ndarray, rank: int, collation: Collation) -> int:
        """Padded tokens of the batches that stock would collate on this rank. rows: as in `means_of`."""
        slots = rows["position"] // self.rule.batch_size
        rows_of_rank = np.flatnonzero(slots % self.world_size == rank)
        rows_of_rank = rows_of_rank[np.argsort(rows["position"][rows_of_rank], kind="stable")]
        total = 0
        for batch in np.split(rows_of_rank, np.flatnonzero(np.diff(slots[rows_of_rank])) + 1):
            if len(batch):
                tokens, media, audio = (rows[name][batch] for name in ("row_tokens", "has_media", "has_audio"))
                dummy_tokens, _ = collation.dummies(int(media.sum()), int(audio.sum()))
                total += len(batch) * collation.length(int(tokens.max()), int(tokens[0]), dummy_tokens)
        return total


def split_by_weight(buffers: Sequence[BufferMetadata], stock: StockSteps) -> list[BufferMetadata]:
    """`buffers`, with a separate modality for each weight in stock, so that no micro-batch mixes weights.

    Weights differ if stock's micro-batches have different sizes: at the end of an epoch, and if rows were left out.
    """
    rows, starts, _ = pool(buffers)
    if not len(rows):
        return list(buffers)
    divisors = stock.means_of(rows)[0][:, 0]
    kinds, kind = np.unique(np.stack((rows["modality"], divisors)), axis=1, return_inverse=True)
    if kinds.shape[1] > np.iinfo(np.uint8).max:
        raise DataError(f"stock would give the samples of an optimizer step {kinds.shape[1]} different weights")
    rows["modality"] = kind.reshape(-1)
    parts = [rows[start:end] for start, end in itertools.pairwise(starts)]
    return [BufferMetadata(part, buffer.exhausted) for part, buffer in zip(parts, buffers)]
