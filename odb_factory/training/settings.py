"""What `enable_odb` was given, on the trainer, and the run that is made from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch.distributed as dist
from torch.utils.data import RandomSampler

from odb_factory.comm.gloo import Exchange
from odb_factory.comm.process_group import make_coordinator
from odb_factory.config import ODBConfig, ResolvedConfig
from odb_factory.data.dataloader_parts import DataLoaderParts, dismantle, unwrap
from odb_factory.data.loader import ODBLoader
from odb_factory.data.measure import Measure
from odb_factory.data.observe import PATCHES_KEY, ItemObserver, Observer
from odb_factory.data.progress import OptimizerStepRule
from odb_factory.data.worker import Picklable
from odb_factory.memory import PeakMeter
from odb_factory.model.check import Layout
from odb_factory.planning import Collation
from odb_factory.training import checks
from odb_factory.training.checks import TrainerLoss, stock_mean
from odb_factory.training.oom import MemoryWatch, why_not_split
from odb_factory.training.oom_split import SplitSteps
from odb_factory.training.run import ODBRun, RunLength

# ----------------------------------------------------------------------------------------------------------------------
# Columns that the Trainer removes before odb would see them, though a cost is counted from them.


class KeepColumns:
    """A collator that is given the columns which the Trainer would have left."""

    def __init__(self, collate_fn: Callable, columns: Sequence[str]):
        self.collate_fn, self.columns = collate_fn, tuple(columns)

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> Any:
        return self.collate_fn([{key: item[key] for key in self.columns if key in item} for item in items])


def are_needed(stock: Any, train_dataset: Any, cost_fn: Callable | None) -> bool:
    """Whether `stock`, the Trainer's DataLoader, lacks columns of `train_dataset` that costs are counted from."""
    found = unwrap(stock).dataset
    if not isinstance(found, datasets.Dataset) or not isinstance(train_dataset, datasets.Dataset):
        return False
    removed = set(train_dataset.column_names) - set(found.column_names)
    return PATCHES_KEY in removed or (cost_fn is not None and bool(removed))


def with_columns_of(whole: DataLoaderParts, stock: Any) -> DataLoaderParts:
    """`whole`, which has all columns, with a collator that gets those of `stock` alone."""
    kept: Any = unwrap(stock).dataset
    return dataclasses.replace(whole, collate_fn=KeepColumns(whole.collate_fn, kept.column_names))


# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ODBSettings:
    """What a run is made from, apart from the trainer."""

    config: ODBConfig
    observer: Observer | None
    collation: Collation | None
    patch_size: int
    measure: Measure
    equal_weights: bool
    cost_fn: Callable[..., Any] | None
    process_group: dist.ProcessGroup | None
    agree_on: Mapping[str, object]
    rows_from: Mapping[str, object]
    not_flat: str | None
    memory_meter: PeakMeter | None
    about: Mapping[str, object]

    def make_run(self, trainer: Any, source: Any, stock: Any, layout: Layout, config: ResolvedConfig) -> ODBRun:
        """A run.

        stock: the train dataloader that the trainer would use; source: the same, perhaps with all its columns. config:
        with the budgets that were chosen.
        """
        args, loss = trainer.args, None if self.equal_weights else TrainerLoss.of(trainer)
        seed = next(seed for seed in (self.config.seed, args.data_seed, args.seed) if seed is not None)
        parts = dismantle(source, seed, stream=trainer.train_dataset)
        # The Trainer wraps its collator to remove columns from items.
        collator = getattr(parts.collate_fn, "data_collator", parts.collate_fn)
        pads_to = getattr(collator, "pad_to_multiple_of", None) or 1
        if source is not stock:
            parts = with_columns_of(parts, stock)
        loader = ODBLoader(
            parts,
            config,
            observer=self.observer
            or ItemObserver(
                Picklable(parts.collate_fn, "collate_fn"),
                cost_fn=self.cost_fn,
                patch_size=self.patch_size,
                loss_scaling=config.loss_scaling,
            ),
            rule=OptimizerStepRule(
                batch_size=parts.batch_size,
                accumulation=args.gradient_accumulation_steps,
                drop_last=parts.drop_last,
                stock_mean=stock_mean(trainer, loss, equal_weights=self.equal_weights),
                equal_weights=self.equal_weights,
            ),
            collation=self.collation or Collation(pad_to_multiple_of=pads_to),
            layout=layout.name,
            with_boundaries=layout.with_boundaries,
            coordinator=make_coordinator(self.process_group, config.exchange_timeout_s),
            agree_on={**checks.of_trainer(trainer), **self.agree_on},
            rows_from=self.rows_from,
            patch_size=self.patch_size,
            measure=self.measure,
            seed=seed,
        )
        counts_steps = args.max_steps > 0
        is_split, rounds_up = self.config.oom == "split", self.config.row_multiple > 1
        can_split = not (is_split or rounds_up) and why_not_split(args) is None
        run = ODBRun(
            loader,
            config,
            RunLength(None if counts_steps else args.num_train_epochs, args.max_steps if counts_steps else None),
            args.output_dir,
            memory=MemoryWatch(config, loader.budget, args.device, can_split=can_split),
            accumulation=args.gradient_accumulation_steps,
            looks_at_labels=not self.equal_weights,
            trainer_loss=loss,
            is_shuffled=getattr(parts.sampler, "shuffle", isinstance(parts.sampler, RandomSampler)),
        )
        if is_split:
            exchange = Exchange(self.process_group, self.config.exchange_timeout_s)
            run.split = SplitSteps(run, exchange, run.memory)
        return run
