"""`enable_odb(trainer)`: the single integration point. The plugin, patches and scripts all call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import torch.distributed as dist
from torch.utils.data import IterableDataset, RandomSampler
from transformers import Trainer

from odb_factory.comm.data_parallel import check_process_group, world_size_of
from odb_factory.comm.exchange import Exchange
from odb_factory.comm.lifeline import lifeline_of
from odb_factory.config import ODBConfig, ResolvedConfig
from odb_factory.data.components import dismantle
from odb_factory.data.make_loader import make_config, make_loader
from odb_factory.data.measure import DEFAULT_PATCH_SIZE, Measure, measure_batch
from odb_factory.data.observe import Observer
from odb_factory.errors import ConfigError
from odb_factory.memory.meters import PeakMeter
from odb_factory.planning import Collation
from odb_factory.training import agreement, columns
from odb_factory.training.checks import check_arguments, check_dummy_media, check_methods, check_stream
from odb_factory.training.layout_check import LayoutCheck
from odb_factory.training.layout_choice import Layout
from odb_factory.training.loss_rule import TrainerLoss, stock_mean
from odb_factory.training.mixin import ODBTrainerMixin
from odb_factory.training.oom import MemoryWatch, why_not_split
from odb_factory.training.oom_split import SplitSteps
from odb_factory.training.run import ODBRun, RunLength

if TYPE_CHECKING:
    from odb_factory.loop.keys import TrainerKeys


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

    def make_run(
        self, trainer: Any, source: Any, stock: Any, layout: Layout, config: ResolvedConfig
    ) -> tuple[ODBRun, LayoutCheck | None]:
        """A run, and the check of its layout where that is flat.

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
            parts = columns.with_columns_of(parts, stock)
        loader = make_loader(
            parts,
            config,
            observer=self.observer,
            collation=self.collation or Collation(pad_to_multiple_of=pads_to),
            layout=layout.name,
            with_boundaries=layout.with_boundaries,
            process_group=self.process_group,
            agree_on={**agreement.of_trainer(trainer), **self.agree_on},
            rows_from=self.rows_from,
            patch_size=self.patch_size,
            measure=self.measure,
            cost_fn=self.cost_fn,
            accumulation=args.gradient_accumulation_steps,
            stock_mean=stock_mean(trainer, loss, equal_weights=self.equal_weights),
            equal_weights=self.equal_weights,
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
        return run, LayoutCheck(loader) if layout.name == "flat" else None


def enable_odb(
    trainer: Any,
    config: ODBConfig | None = None,
    *,
    observer: Observer | None = None,
    collation: Collation | None = None,
    patch_size: int = DEFAULT_PATCH_SIZE,
    measure: Measure = measure_batch,
    equal_weights: bool = False,
    cost_fn: Callable[..., Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    agree_on: Mapping[str, object] | None = None,
    rows_from: Mapping[str, object] | None = None,
    not_flat: str | None = None,
    memory_meter: PeakMeter | None = None,
    about: Mapping[str, object] | None = None,
    **block: Unpack[TrainerKeys],
) -> Any:
    """Make `trainer.train()` form its batches online. Changes this one object; returns it.

    trainer: a `transformers.Trainer` (or of a subclass) that has not begun. Its dataset yields processed samples
    (see `odb_factory.data.items.ItemObserver`), unless an observer is given.
    config, or its keys one by one: `enable_odb(trainer, token_budget=8192, max_patches=16384)`.
    cost_fn: item -> `Cost` or tokens, where items tell their cost in their own way.
    observer: reads a row of the dataset as light features and a cost. collation: what the data collator adds to
    a group (default: its `pad_to_multiple_of`). patch_size: side of a vision patch (pixels), to count patches
    where the model takes no patch grid.
    measure: counts what a collated batch has, its units above all (`measure_batch`, whose units are labels that carry
    loss): what the loss is a mean over. equal_weights: the loss of a micro-batch is one mean, whose units cannot be
    weighed one by one, so that samples of different weight must not share one.
    process_group: the data-parallel ranks, those that the engine averages gradients over (None: all ranks, as with
    DDP, ZeRO, FSDP and HSDP); samples are shared among them and the loss weight goes by their number.
    agree_on: settings of your own that all ranks must have in common; where they differ, no step is taken.
    rows_from: settings that rows are made with (a template, a maximal length): a resume names those that have changed.
    not_flat: why flat micro-batches would be wrong, where the caller knows a reason (see the key `layout`).
    memory_meter: what budgets of `auto` are chosen by (default: what the accelerator counts); with a
    `odb_factory.memory.meters.CPUMeter` they can be chosen on a CPU, for tests.
    about: what `odb-factory report` shall say of the run beside its training arguments (JSON types).
    A `compute_loss_func` of the trainer is called once for the samples of each weight in a micro-batch, with their
    units as `num_items_in_batch`, and the mean that it returns is weighed as a model's own; one that returns a sum
    without dividing is not supported.
    Outside of `train()` the trainer stays as it was: its dataset, its collator, its dataloaders.
    Raises `ConfigError` where a training argument cannot work with it. A second call is an error.
    """
    if getattr(trainer, "odb_settings", None) is not None:
        raise ConfigError("enable_odb: this trainer has it already; call it once.")
    config = make_config(config, block)
    check_process_group(process_group)
    check_arguments(trainer.args, config, memory_meter)
    if isinstance(trainer.train_dataset, IterableDataset):
        check_stream(config)
    check_dummy_media(config, collation or Collation())
    check_methods(trainer)
    if not isinstance(trainer, ODBTrainerMixin):
        stock = type(trainer)
        trainer.__class__ = type(stock.__name__, (ODBTrainerMixin, stock), {"__module__": stock.__module__})
    if world_size_of(process_group) > 1:
        lifeline_of(process_group, config.exchange_timeout_s)  # a rank that dies from here on ends the others
    trainer.odb_settings = ODBSettings(
        config=config,
        observer=observer,
        collation=collation,
        patch_size=patch_size,
        measure=measure,
        equal_weights=equal_weights,
        cost_fn=cost_fn,
        process_group=process_group,
        agree_on=agree_on or {},
        rows_from=rows_from or {},
        not_flat=not_flat,
        memory_meter=memory_meter,
        about=about or {},
    )
    return trainer


class ODBTrainer(ODBTrainerMixin, Trainer):
    """A `transformers.Trainer` with online dynamic batching: `ODBTrainer(..., odb={"token_budget": 8192})`."""

    def __init__(self, *args: Any, odb: ODBConfig | Mapping[str, Any], **kwargs: Any):
        super().__init__(*args, **kwargs)
        enable_odb(self, odb if isinstance(odb, ODBConfig) else ODBConfig.from_block(odb))
