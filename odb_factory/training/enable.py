"""`enable_odb(trainer)`: the single integration point. The plugin, patches and scripts all call it."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import RandomSampler

from odb_factory.batching import Collation
from odb_factory.config import ODBConfig
from odb_factory.data.exchange import GroupExchange
from odb_factory.data.loader import ODBLoader
from odb_factory.data.measure import DEFAULT_PATCH_SIZE
from odb_factory.data.observe import Observer
from odb_factory.errors import ConfigError
from odb_factory.log import get_logger
from odb_factory.training.mixin import ODBTrainerMixin
from odb_factory.training.run import ODBRun

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class ODBSettings:
    """What a run is made from, apart from the trainer."""

    config: ODBConfig
    observer: Observer
    collation: Collation
    patch_size: int

    def make_run(self, trainer: Any) -> ODBRun:
        args = trainer.args
        seed = next(seed for seed in (self.config.seed, args.data_seed, args.seed) if seed is not None)
        loader = ODBLoader(
            trainer.train_dataset,
            sampler=_seeded(trainer._get_train_sampler(), seed),
            observer=self.observer,
            collate_fn=trainer.data_collator,
            config=self.config,
            collation=self.collation,
            patch_size=self.patch_size,
            accumulation=args.gradient_accumulation_steps,
            seed=seed,
            rank=args.process_index,
            world_size=args.world_size,
            exchange=self._exchange(args),
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor or 2,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            # The collator may hold the model, which other start methods would pickle.
            multiprocessing_context="fork" if "fork" in multiprocessing.get_all_start_methods() else None,
        )
        return ODBRun(
            loader,
            self.config,
            accumulation=args.gradient_accumulation_steps,
            target_epochs=None if args.max_steps > 0 else args.num_train_epochs,
            max_steps=args.max_steps if args.max_steps > 0 else None,
            output_dir=args.output_dir,
            rank=args.process_index,
            world_size=args.world_size,
        )

    def _exchange(self, args: Any) -> GroupExchange | None:
        """None for one rank alone. All ranks make theirs at the same place of the program."""
        if args.world_size == 1:
            return None
        return GroupExchange(self.config.exchange_timeout_s or args.ddp_timeout)


def enable_odb(
    trainer: Any,
    config: ODBConfig,
    *,
    observer: Observer,
    collation: Collation = Collation(),
    patch_size: int = DEFAULT_PATCH_SIZE,
) -> Any:
    """Make `trainer.train()` form its batches online. Changes this one object; returns it.

    trainer: a `transformers.Trainer` that has not begun. observer: reads a row of its train dataset
    as light features and a cost. collation: what its data collator adds to a group. patch_size: side
    of a vision patch (pixels), to count patches where the model takes no patch grid.
    Raises `ConfigError` where a training argument cannot work with it. A second call is an error.
    """
    if isinstance(trainer, ODBTrainerMixin):
        raise ConfigError("enable_odb: this trainer has it already; call it once.")
    check_training_arguments(trainer.args)
    if config.max_patches is not None and config.max_patches < collation.filler_patches:
        raise ConfigError(
            f"odb.max_patches: {config.max_patches} is less than the {collation.filler_patches} patches of the fake "
            "image that the collator adds to every group without media; raise it."
        )
    stock = type(trainer)
    trainer.__class__ = type(stock.__name__, (ODBTrainerMixin, stock), {"__module__": stock.__module__})
    trainer.odb_settings = ODBSettings(config=config, observer=observer, collation=collation, patch_size=patch_size)
    return trainer


def check_training_arguments(args: Any) -> None:
    """Refuse what cannot work together, naming key, value and way out."""
    if args.n_gpu > 1:
        raise ConfigError(
            f"n_gpu: {args.n_gpu} devices in one process (DataParallel) would cut every batch apart; start one "
            "process a device with torchrun (FORCE_TORCHRUN=1), or show it one device."
        )
    if args.per_device_train_batch_size != 1:
        raise ConfigError(
            f"per_device_train_batch_size: {args.per_device_train_batch_size} does not go with odb, which sizes "
            "batches by tokens; set `per_device_train_batch_size: 1` and choose `token_budget` in the odb: block."
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


def _seeded(sampler: Any, seed: int) -> Any:
    """The trainer's own sampler; a random one gets its order from the seed and the epoch, as under accelerate."""
    if not isinstance(sampler, RandomSampler):
        return sampler
    return SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler.num_samples,
        generator=torch.Generator(),
        data_seed=seed,
    )
