"""`enable_odb(trainer)`: the single integration point. The plugin, patches and scripts all call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import Trainer

from odb_factory.batching import Collation
from odb_factory.config import ODBConfig
from odb_factory.data.make_loader import make_config, make_loader
from odb_factory.data.measure import DEFAULT_PATCH_SIZE
from odb_factory.data.observe import Observer
from odb_factory.data.take_apart import take_apart
from odb_factory.errors import ConfigError
from odb_factory.log import get_logger
from odb_factory.training.mixin import ODBTrainerMixin
from odb_factory.training.run import ODBRun

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class ODBSettings:
    """What a run is made from, apart from the trainer."""

    config: ODBConfig
    observer: Observer | None
    collation: Collation | None
    patch_size: int
    cost_fn: Callable | None

    def make_run(self, trainer: Any, stock: Any) -> ODBRun:
        """stock: the train dataloader that the trainer would use."""
        args = trainer.args
        seed = next(seed for seed in (self.config.seed, args.data_seed, args.seed) if seed is not None)
        loader = make_loader(
            take_apart(stock, seed, stream=trainer.train_dataset),
            self.config,
            observer=self.observer,
            collation=self.collation,
            patch_size=self.patch_size,
            cost_fn=self.cost_fn,
            accumulation=args.gradient_accumulation_steps,
            seed=seed,
        )
        return ODBRun(
            loader,
            self.config,
            accumulation=args.gradient_accumulation_steps,
            target_epochs=None if args.max_steps > 0 else args.num_train_epochs,
            max_steps=args.max_steps if args.max_steps > 0 else None,
            output_dir=args.output_dir,
            rank=loader.rank,
            world_size=loader.world_size,
        )


def enable_odb(
    trainer: Any,
    config: ODBConfig | None = None,
    *,
    observer: Observer | None = None,
    collation: Collation | None = None,
    patch_size: int = DEFAULT_PATCH_SIZE,
    cost_fn: Callable | None = None,
    **block: Any,
) -> Any:
    """Make `trainer.train()` form its batches online. Changes this one object; returns it.

    trainer: a `transformers.Trainer` (or of a subclass) that has not begun. Its dataset yields processed samples
    (see `odb_factory.data.items.ItemObserver`), unless an observer is given.
    config, or its keys one by one: `enable_odb(trainer, token_budget=8192, max_patches=16384)`.
    cost_fn: item -> `Cost` or tokens, where items tell their cost in their own way.
    observer: reads a row of the dataset as light features and a cost. collation: what the data collator adds to
    a group (default: its `pad_to_multiple_of`). patch_size: side of a vision patch (pixels), to count patches
    where the model takes no patch grid.
    Raises `ConfigError` where a training argument cannot work with it. A second call is an error.
    """
    if getattr(trainer, "odb_settings", None) is not None:
        raise ConfigError("enable_odb: this trainer has it already; call it once.")
    config = make_config(config, block)
    check_training_arguments(trainer.args)
    if collation is not None:
        check_filler(config, collation)
    if not isinstance(trainer, ODBTrainerMixin):
        stock = type(trainer)
        trainer.__class__ = type(stock.__name__, (ODBTrainerMixin, stock), {"__module__": stock.__module__})
    trainer.odb_settings = ODBSettings(
        config=config, observer=observer, collation=collation, patch_size=patch_size, cost_fn=cost_fn
    )
    return trainer


def check_filler(config: ODBConfig, collation: Collation) -> None:
    """Refuse a patch cap that no group without media keeps."""
    if config.max_patches is not None and config.max_patches < collation.filler_patches:
        raise ConfigError(
            f"odb.max_patches: {config.max_patches} is less than the {collation.filler_patches} patches of the fake "
            "image that the collator adds to every group without media; raise it."
        )


class ODBTrainer(ODBTrainerMixin, Trainer):
    """A `transformers.Trainer` with online dynamic batching: `ODBTrainer(..., odb={"token_budget": 8192})`."""

    def __init__(self, *args: Any, odb: ODBConfig | Mapping[str, Any], **kwargs: Any):
        super().__init__(*args, **kwargs)
        enable_odb(self, odb if isinstance(odb, ODBConfig) else ODBConfig.from_block(odb))


def check_training_arguments(args: Any) -> None:
    """Refuse what cannot work together, naming key, value and way out."""
    if args.n_gpu > 1:
        raise ConfigError(
            f"n_gpu: {args.n_gpu} devices in one process (DataParallel) would cut every batch apart; start one "
            "process a device with torchrun (FORCE_TORCHRUN=1), or show it one device."
        )
    if args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size: True does not go with odb, which sizes batches by tokens; remove the key and "
            "lower `token_budget` if memory is short."
        )
    if getattr(args.accelerator_config, "dispatch_batches", None):
        raise ConfigError(
            "accelerator_config.dispatch_batches: True does not go with odb, where every rank forms its own batches; "
            "remove the key or set it to false."
        )
    if getattr(args, "include_tokens_per_second", False):
        raise ConfigError(
            "include_tokens_per_second: True would go through the data once more to count tokens; remove the key and "
            "read odb/tokens_per_step."
        )
    deepspeed = getattr(args, "hf_deepspeed_config", None)
    if deepspeed is not None and deepspeed.config.get("scheduler"):
        raise ConfigError(
            f"deepspeed: the scheduler {deepspeed.config['scheduler'].get('type')!r} in its config counts steps that "
            "are not known ahead; remove `scheduler` there and use lr_scheduler_type."
        )
    for key, value in (
        ("dataloader_drop_last", args.dataloader_drop_last),
        ("accelerator_config.split_batches", getattr(args.accelerator_config, "split_batches", False)),
    ):
        if value:
            logger.warning("%s: True has no effect with odb, where no batch is left part-filled or cut apart", key)
    if getattr(args, "group_by_length", False) or getattr(args, "train_sampling_strategy", None) == "group_by_length":
        raise ConfigError(
            "group_by_length (train_sampling_strategy): it needs all lengths before training, and odb groups online; "
            "remove the key."
        )
