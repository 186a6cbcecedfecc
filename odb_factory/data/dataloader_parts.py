"""Take a DataLoader apart that somebody else has built, and make an `ODBLoader` of its parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import IterableDatasetShard, SeedableRandomSampler
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from odb_factory.comm.gloo import world_size_of
from odb_factory.comm.process_group import make_coordinator
from odb_factory.config import ODBConfig, ResolvedConfig
from odb_factory.data.loader import ODBLoader
from odb_factory.data.measure import DEFAULT_PATCH_SIZE, Measure, measure_batch
from odb_factory.data.observe import ItemObserver, Observer
from odb_factory.data.order import OF_STEP, StockMean, is_split_by_node
from odb_factory.data.progress import Layout, OptimizerStepRule
from odb_factory.data.serialize import of_rows
from odb_factory.data.worker import Picklable
from odb_factory.errors import ConfigError
from odb_factory.planning import Collation

# ----------------------------------------------------------------------------------------------------------------------
# Take a DataLoader apart that somebody else has built: what it reads, in which order, and with how many workers.

ORDER_BLOCK = 4096
"""Indices of an order that are Python numbers at a time."""


@dataclass(frozen=True, kw_only=True)
class DataLoaderParts:
    """What a DataLoader is made of, as far as an online loader takes it over; each name as in torch.

    sampler: indices of the whole epoch, the same on all ranks; None for a dataset that is iterated.
    batch_size: rows of its batches (of this rank).
    """

    dataset: Any
    sampler: Any
    batch_size: int
    drop_last: bool
    collate_fn: Callable[[list[Any]], Any]
    num_workers: int
    prefetch_factor: int
    persistent_workers: bool
    timeout: float
    pin_memory: bool
    pin_memory_device: str
    multiprocessing_context: Any
    worker_init_fn: Callable[[int], None] | None
    generator: torch.Generator | None


class RandomOrder(SeedableRandomSampler):
    """The order of accelerate's sampler, without a list of it: 8 bytes a row, which forked workers share."""

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


def unwrap(dataloader: Any) -> DataLoader:
    """The torch DataLoader inside what accelerate has prepared, or `dataloader` itself."""
    while not isinstance(dataloader, DataLoader) or hasattr(dataloader, "base_dataloader"):
        inner = getattr(dataloader, "base_dataloader", None)
        if inner is None:
            raise ConfigError(f"odb: expected a torch DataLoader, found {type(dataloader).__name__}.")
        dataloader = inner
    return dataloader


def dismantle(dataloader: Any, seed: int, stream: Any = None) -> DataLoaderParts:
    """What an online loader needs of `dataloader` (torch's, or one that accelerate has prepared).

    stream: the dataset itself, where it is iterated and known: accelerate may have cut `dataloader`'s into shards.

    Shares of a rank (`DistributedSampler`, accelerate's shards) are undone: shards without padding are
    made later. A random sampler gets its order from `seed` and the epoch. Raises `ConfigError` where the
    order cannot be told, and for options that have no meaning here.
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
    )


def _can_pin() -> bool:
    """Whether torch can pin memory here; where it cannot, it only warns."""
    if not hasattr(torch, "accelerator"):  # before torch 2.6
        return torch.cuda.is_available()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device is not None and device.type != "mps"


def _refuse_options(loader: DataLoader) -> None:
    """Raise `ConfigError` for what a loader that forms its batches online cannot do as torch does."""
    if not getattr(loader, "in_order", True):  # torch >= 2.6
        raise ConfigError(
            "in_order: False would let the workers' timing decide which samples meet; leave it at True, odb needs the "
            "same order in every run."
        )
    if loader.timeout and not loader.num_workers:
        raise ConfigError(
            f"timeout: {loader.timeout} bounds the wait for workers, of which there are none; leave it at 0."
        )


def _refuse_shards(dataset: Any) -> None:
    """A stream of `datasets` that accelerate has prepared for several ranks may have been cut, and does not tell."""
    if world_size_of(None) > 1 and isinstance(dataset, IterableDataset) and not is_split_by_node(dataset):
        raise ConfigError(
            "odb: accelerate has prepared this DataLoader over a stream, and nobody can tell which part of it this "
            "rank has; apply odb to the DataLoader before `prepare`, or give the dataset to ODBDataLoader."
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
            "odb: a DataLoader with batch_size=None yields batches of its dataset's own making; give one whose dataset "
            "yields single samples."
        )
    batches = _batch_sampler(loader)
    sampler = getattr(batches, "sampler", None)
    if sampler is None:
        raise ConfigError(
            f"odb: {type(batches).__name__} decides which samples meet in a batch, and does not tell its sampler; "
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


# ----------------------------------------------------------------------------------------------------------------------
# Make an `ODBLoader` for a DataLoader's parts: what a trainer's and a user's own loop have in common.


def make_config(config: ODBConfig | None, block: Mapping[str, Any]) -> ODBConfig:
    """The config given whole, or made of its keys."""
    if config is None:
        return ODBConfig.from_block(block)
    if block:
        raise ConfigError(f"odb: give config= or its keys ({', '.join(block)}), not both.")
    return config


def make_loader(
    parts: DataLoaderParts,
    config: ResolvedConfig,
    *,
    observer: Observer | None = None,
    collation: Collation | None = None,
    layout: Layout = "padded",
    with_boundaries: bool = False,
    patch_size: int = DEFAULT_PATCH_SIZE,
    measure: Measure = measure_batch,
    cost_fn: Callable | None = None,
    process_group: dist.ProcessGroup | None = None,
    agree_on: Mapping[str, Any] | None = None,
    rows_from: Mapping[str, Any] | None = None,
    accumulation: int = 1,
    stock_mean: StockMean = OF_STEP,
    equal_weights: bool = False,
    seed: int = 0,
    already_split: bool = False,
) -> ODBLoader:
    """observer None: the items are processed samples. collation None: the collator's `pad_to_multiple_of`.

    layout: in which the micro-batches come, whatever the config asks for. with_boundaries: flat ones carry what
    `varlen_arguments` returns.
    process_group: the data-parallel ranks (None: the default group, if there is one). With several ranks, all make
    theirs at the same place of the program. agree_on: further settings that all ranks must have in common.
    rows_from: what rows are made with.
    accumulation, stock_mean, equal_weights: of `OptimizerStepRule`, the rest of which the DataLoader says.
    already_split: the dataset is a stream that gives each rank a part of its own.
    """
    return ODBLoader(
        parts.dataset,
        sampler=parts.sampler,
        observer=observer
        or ItemObserver(
            Picklable(parts.collate_fn, "collate_fn"),
            cost_fn=cost_fn,
            patch_size=patch_size,
            loss_scaling=config.loss_scaling,
        ),
        collate_fn=parts.collate_fn,
        config=config,
        collation=collation or Collation(pad_to_multiple_of=getattr(parts.collate_fn, "pad_to_multiple_of", None) or 1),
        layout=layout,
        with_boundaries=with_boundaries,
        patch_size=patch_size,
        measure=measure,
        num_workers=parts.num_workers,
        prefetch_factor=parts.prefetch_factor,
        persistent_workers=parts.persistent_workers,
        timeout=parts.timeout,
        pin_memory=parts.pin_memory,
        pin_memory_device=parts.pin_memory_device,
        multiprocessing_context=parts.multiprocessing_context,
        worker_init_fn=parts.worker_init_fn,
        generator=parts.generator,
        coordinator=make_coordinator(process_group, config.exchange_timeout_s),
        agree_on={
            **(_rows(parts, process_group) if observer is None or isinstance(observer, ItemObserver) else {}),
            **(agree_on or {}),
        },
        rows_from=rows_from,
        rule=OptimizerStepRule(
            batch_size=parts.batch_size,
            accumulation=accumulation,
            drop_last=parts.drop_last,
            stock_mean=stock_mean,
            equal_weights=equal_weights,
        ),
        seed=seed,
        already_split=already_split,
    )


def _rows(parts: DataLoaderParts, process_group: dist.ProcessGroup | None) -> dict[str, object]:
    """What ranks compare of processed items: a rank with a part of its own would take a share of that part alone."""
    if parts.sampler is None or world_size_of(process_group) == 1:
        return {}
    return {"what the first and the last row of the dataset say": of_rows(parts.dataset)}
