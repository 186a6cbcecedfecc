"""Take a DataLoader apart: what it reads, in which order, and with how many workers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard, SeedableRandomSampler
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from odb_factory.comm.gloo import world_size_of
from odb_factory.config import ODBConfig
from odb_factory.data.observe import ItemError, ItemObserver
from odb_factory.data.order import is_split_by_node
from odb_factory.errors import ConfigError
from odb_factory.random_numbers import kept_random_numbers

IN_ORDER = (
    "in_order: False would let the timing of workers decide the order of batches; leave it at True, odb needs the same "
    "order in every run."
)
ORDER_BLOCK = 4096
"""Indices of an order that are Python numbers at a time."""


@dataclass(frozen=True, kw_only=True)
class DataLoaderParts:
    """What a DataLoader is made of; each name as in torch.

    sampler: indices of the whole epoch, the same on all ranks, with `set_epoch` if the order changes; None for a
        dataset that is iterated.
    batch_size: rows of its batches (of this rank).
    already_split: a dataset that is iterated gives every rank a part of its own.
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
    pin_memory_device: str = ""
    multiprocessing_context: Any = None
    worker_init_fn: Callable[[int], None] | None = None
    generator: torch.Generator | None = None
    already_split: bool = False


class RandomOrder(SeedableRandomSampler):
    """The order of accelerate's sampler as a tensor, not a list: 8 bytes a row, which forked workers share."""

    def __iter__(self) -> Iterator[int]:
        if self.replacement:
            yield from super().__iter__()
            return
        self.generator.manual_seed(self.epoch + self.initial_seed)
        for left in range(self.num_samples, 0, -len(self.data_source)):
            permutation = torch.randperm(len(self.data_source), generator=self.generator)[:left]
            for block in permutation.split(ORDER_BLOCK):
                yield from block.tolist()
        self.set_epoch(self.epoch + 1)


def check_source(dataset: Any, sampler: Any = None) -> None:
    """Raise `ConfigError` if a DataLoader could not read `dataset`, or if its order could be read only once."""
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


class _FirstItem(Dataset[tuple[str, bool | None]]):
    """`self[0]`: observe the first item of a dataset; what is wrong with the kind of its items, or ""."""

    def __init__(self, dataset: Any, observer: ItemObserver):
        self.dataset, self.observer = dataset, observer

    def __getitem__(self, index: int) -> tuple[str, bool | None]:
        try:
            self.observer(self.dataset[index])
        except ItemError as error:
            return str(error), None
        except Exception:  # a row that cannot be read; the loader reports it, by its policy
            return "", None
        return "", self.observer.counts_labels


def check_first_item(parts: DataLoaderParts, observer: ItemObserver) -> None:
    """Observe the first item of a dataset with an index, and note what units of its items are counted from.

    It is read where items will be, in a worker process if there are any: workers do not inherit what a dataset opens
    for it. Random numbers are drawn as without it.
    Raises `ConfigError` if items of this kind need a `cost_fn` or labels, or if `cost_fn` returns no cost.
    """
    first = _FirstItem(parts.dataset, observer)
    if parts.num_workers == 0:
        with kept_random_numbers():
            message, counts_labels = first[0]
    else:
        ((message, counts_labels),) = DataLoader(
            first,
            sampler=[0],
            batch_size=None,
            num_workers=1,
            generator=torch.Generator(),
            worker_init_fn=parts.worker_init_fn,
            timeout=parts.timeout,
            multiprocessing_context=parts.multiprocessing_context,
        )
    if message:
        raise ConfigError(f"dataset: {observer.describe(parts.dataset, 0)}: {message}.")
    observer.counts_labels = counts_labels


def dismantle(dataloader: Any, seed: int, stream: Any = None, *, already_split: bool = False) -> DataLoaderParts:
    """The parts of `dataloader` (torch's, or one that accelerate has prepared).

    stream: the dataset itself, if it is iterated and known: accelerate may have cut `dataloader`'s into shards.
    already_split: see `DataLoaderParts`.

    Shares of a rank (`DistributedSampler`, accelerate's shards) are undone: shards without padding are made later. A
    random sampler gets its order from `seed` and the epoch. Raises `ConfigError` if the order cannot be found out, and
    for options that have no meaning here.
    """
    loader = unwrap(dataloader)
    _refuse_options(loader)
    dataset = stream if isinstance(stream, IterableDataset) else loader.dataset
    if loader is not dataloader and stream is None and type(dataset) is not IterableDatasetShard:
        _refuse_shards(dataset)
    while isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    return DataLoaderParts(
        dataset=dataset,
        sampler=None if isinstance(dataset, IterableDataset) else _whole(_sampler(loader), seed),
        batch_size=_batch_size(loader),
        drop_last=loader.drop_last or bool(getattr(_batch_sampler(loader), "drop_last", False)),
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor or 2,
        persistent_workers=loader.persistent_workers,
        timeout=loader.timeout,
        pin_memory=loader.pin_memory and _can_pin(),
        pin_memory_device=loader.pin_memory_device,
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        already_split=already_split,
    )


def _can_pin() -> bool:
    """Whether torch can pin memory here; where it cannot, it only warns."""
    if not hasattr(torch, "accelerator"):  # before torch 2.6
        return torch.cuda.is_available()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device is not None and device.type != "mps"


def _refuse_options(loader: DataLoader) -> None:
    """Raise `ConfigError` for options that an online loader cannot honour."""
    if not getattr(loader, "in_order", True):  # torch >= 2.6
        raise ConfigError(IN_ORDER)
    if loader.timeout and not loader.num_workers:
        raise ConfigError(
            f"timeout: {loader.timeout} bounds the wait for workers, of which there are none; leave it at 0."
        )


def _refuse_shards(dataset: Any) -> None:
    """Raise `ConfigError` for a stream of `datasets` that accelerate may have cut for this rank."""
    if world_size_of(None) > 1 and isinstance(dataset, IterableDataset) and not is_split_by_node(dataset):
        raise ConfigError(
            "odb: accelerate has prepared this DataLoader over a stream, and which part of it this rank has is not "
            "known; apply odb to the DataLoader before `prepare`, or give the dataset to ODBDataLoader."
        )


def _batch_sampler(loader: DataLoader) -> Any:
    """The user's own, of all ranks; None if the dataset yields batches."""
    batches: Any = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # accelerate's share of a rank
        batches = batches.batch_sampler
    return batches


def _batch_size(loader: DataLoader) -> int:
    size = loader.batch_size or getattr(_batch_sampler(loader), "batch_size", None)
    return size if isinstance(size, int) else 1


def _sampler(loader: DataLoader) -> Any:
    if loader.batch_sampler is None:
        raise ConfigError(
            "odb: a DataLoader with batch_size=None yields batches that its dataset has made; give one whose dataset "
            "yields single samples."
        )
    batches = _batch_sampler(loader)
    sampler = getattr(batches, "sampler", None)
    if sampler is None:
        raise ConfigError(
            f"odb: {type(batches).__name__} decides which samples share a batch, and has no `sampler`; "
            "build the DataLoader with `sampler=` or `shuffle=`, for odb forms the batches."
        )
    return sampler


def _whole(sampler: Any, seed: int) -> Any:
    """The order of all ranks together, the same on each."""
    if type(sampler) is DistributedSampler:
        return DistributedSampler(sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed)
    if type(sampler) in (RandomSampler, SeedableRandomSampler):
        return RandomOrder(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler.num_samples,
            generator=torch.Generator(),
            data_seed=seed,
        )
    return copy.copy(sampler)


def make_config(config: ODBConfig | None, block: Mapping[str, Any]) -> ODBConfig:
    """The config given whole, or made of its keys."""
    if config is None:
        return ODBConfig.from_block(block)
    if block:
        raise ConfigError(f"odb: give config= or its keys ({', '.join(block)}), not both.")
    return config
