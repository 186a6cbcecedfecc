"""Make an `ODBLoader` for a DataLoader's parts: what a trainer's and a user's own loop have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from odb_factory.comm.data_parallel import world_size_of
from odb_factory.comm.process_group import make_coordinator
from odb_factory.config import ODBConfig, ResolvedConfig
from odb_factory.data.components import DataLoaderParts
from odb_factory.data.fingerprint import of_rows
from odb_factory.data.items import ItemObserver
from odb_factory.data.loader import ODBLoader
from odb_factory.data.measure import DEFAULT_PATCH_SIZE, Measure, measure_batch
from odb_factory.data.observe import Observer
from odb_factory.data.pickling import Picklable
from odb_factory.data.step_rule import Layout, OptimizerStepRule
from odb_factory.data.stock_steps import OF_STEP, StockMean
from odb_factory.errors import ConfigError
from odb_factory.planning import Collation


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
