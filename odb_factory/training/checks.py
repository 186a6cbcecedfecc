"""What cannot work with online batches, refused in one line before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from importlib import metadata
from typing import Any

from packaging.version import Version
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from odb_factory.accounting.loss_weights import IN_BATCH, in_batch_loss
from odb_factory.config import ODBConfig
from odb_factory.errors import ConfigError, DataError
from odb_factory.log import get_logger
from odb_factory.memory import meters
from odb_factory.memory.meters import PeakMeter
from odb_factory.planning import Collation
from odb_factory.training.oom import deepspeed_config, why_not_split

logger = get_logger(__name__)

HEADS_WITHOUT_A_SHIFT = ("ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining")
"""Heads that transformers' table of losses does not have."""
SHARED_REPLICA = ("tp_size", "cp_size", "sp_size")
OVERRIDDEN = ("train", "get_train_dataloader", "training_step", "compute_loss", "create_scheduler")
BELOW = ("get_batch_samples",)
"""Not overridden, and relied on."""
STEP_IN_BACKWARD = ("lomo", "adalomo")
ENGINES = ("torch", "accelerate", "deepspeed")
"""Packages whose hooks on gradients add up and synchronise gradients only."""
SUMS_OFFLOADED_GRADIENTS = Version("0.19.0")
"""The first DeepSpeed that adds up the gradients of all micro-batches with ZeRO-2 and an optimizer on the CPU. Earlier
ones keep the first and the last (its pull request 7967), or the last only where the accumulation is 1 (7981)."""


def check_arguments(args: Any, config: ODBConfig, memory_meter: PeakMeter | None = None) -> None:
    """Raise `ConfigError` for what training arguments and block say that cannot work; needs no model.

    memory_meter: of `enable_odb`, by which budgets of `auto` can be chosen on a CPU.
    """
    _check_counts(args)
    _check_parallel_arguments(args)
    _check_offload(args)
    if args.n_gpu > 1:
        raise ConfigError(
            f"n_gpu: {args.n_gpu} devices in one process (DataParallel) would cut every batch apart; start one "
            "process a device with torchrun (FORCE_TORCHRUN=1), or show it one device."
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer.endswith("_layerwise") or optimizer in STEP_IN_BACKWARD:
        raise ConfigError(
            f"optim: {optimizer!r} changes weights in every backward, of which odb makes several an optimizer step; "
            "choose another optimizer, or train without odb."
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
    if getattr(args.accelerator_config, "split_batches", False):
        logger.warning("accelerator_config.split_batches: True has no effect with odb, where no batch is cut apart")
    if getattr(args, "group_by_length", False) or getattr(args, "train_sampling_strategy", None) == "group_by_length":
        logger.warning(
            "group_by_length (train_sampling_strategy) has no effect: samples of like length meet in a micro-batch "
            "anyway, and optimizer steps are those of a training without it, in random order"
        )
    _check_fill(args, config)
    _check_auto(args, config, memory_meter)
    _check_split(args, config)


def _check_fill(args: Any, config: ODBConfig) -> None:
    """Refuse what counts optimizer steps that are not known ahead."""
    scheduler = deepspeed_config(args).get("scheduler")
    if scheduler and not config.keeps:
        raise ConfigError(
            f"deepspeed: the scheduler {scheduler.get('type')!r} in its config counts optimizer steps, which "
            "`global_batch_size: fill` does not know ahead; remove `scheduler` there and use lr_scheduler_type, or "
            "keep the optimizer steps."
        )


def _check_auto(args: Any, config: ODBConfig, memory_meter: PeakMeter | None) -> None:
    if config.has_auto and memory_meter is None and meters.find_meter(args.device) is None:
        raise ConfigError(
            f"odb.{config.auto_keys[0]}: 'auto' tries micro-batches on an accelerator, and this training runs on the "
            "CPU; set a number (`odb-factory plan` says what it does with the data)."
        )


def _check_split(args: Any, config: ODBConfig) -> None:
    """Refuse `oom: split` where a collective runs inside forward or backward."""
    why = why_not_split(args) if config.oom == "split" else None
    if why is not None:
        raise ConfigError(
            f"odb.oom: 'split' works in one process, with DDP and ZeRO-1, and {why}; leave it out (raise), and lower "
            "token_budget if memory is short."
        )


def check_stream(config: ODBConfig) -> None:
    """Raise `ConfigError` for what needs a dataset whose rows have numbers, where the dataset is a stream."""
    if config.has_auto:
        raise ConfigError(
            f"odb.{config.auto_keys[0]}: 'auto' tries rows of the dataset before training, and those of a stream "
            "cannot be read by their number; set a number."
        )


def check_dummy_media(config: ODBConfig, collation: Collation) -> None:
    """Raise `ConfigError` where no micro-batch without media can be within `max_patches`."""
    _, patches = collation.dummies(0, 0)
    if isinstance(config.max_patches, int) and config.max_patches < patches:
        what = "fake image and audio" if collation.dummy_audio_patches else "fake image"
        raise ConfigError(
            f"odb.max_patches: {config.max_patches} is less than the {patches} patches of the {what} that the collator "
            "adds to every group without media; raise it."
        )


def check_trainer(trainer: Any) -> None:
    """Raise `ConfigError` for a trainer whose dataset, model, parallelism or methods cannot work with odb."""
    _check_dataset(trainer.train_dataset)
    _check_loss(trainer)
    _check_labels(trainer.model)
    _check_model_parallelism(trainer)
    check_methods(trainer)


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise DataError("train_dataset: it has no row, so there is nothing to train on; look at what filters it.")


def _check_counts(args: Any) -> None:
    if args.gradient_accumulation_steps < 1:
        raise ConfigError(
            f"gradient_accumulation_steps: {args.gradient_accumulation_steps} is not the number of micro-batches of an "
            "optimizer step; choose 1 or more."
        )
    if args.max_steps <= 0 and args.num_train_epochs <= 0:
        raise ConfigError(
            f"num_train_epochs: {args.num_train_epochs} leaves nothing to train on; choose more than 0, or set "
            "max_steps."
        )


def check_hooks(trainer: Any) -> None:
    """Raise `ConfigError` where something changes weights or gradients in every backward: an optimizer step has several
    of them, and not as many as in stock training. The optimizer has been made."""
    for name, parameter in trainer.model.named_parameters():
        hooks = list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())
        origins = [_origin(getattr(hook, "func", hook)) for hook in hooks]
        found = [origin for origin in origins if origin.split(".")[0] not in ENGINES]
        if hasattr(parameter, "_in_backward_optimizers"):
            found.append("torch's optimizer in the backward")
        if found:
            raise ConfigError(
                f"{found[0]} acts on the gradient of {name} in every backward, of which odb makes several an optimizer "
                "step; act once an optimizer step (a callback's on_pre_optimizer_step), or train without odb."
            )
    if getattr(trainer.accelerator, "has_lomo_optimizer", False):
        raise ConfigError(
            f"optimizer: {type(trainer.optimizer).__name__} of LOMO changes weights in every backward, of which odb "
            "makes several an optimizer step; choose another optimizer, or train without odb."
        )


# Parallelism


def _check_parallel_arguments(args: Any) -> None:
    """All ranks must be data-parallel ranks: what the launcher and the configs say before a model is loaded."""
    for name in SHARED_REPLICA:
        _check_size(f"parallelism_config.{name}", getattr(getattr(args, "parallelism_config", None), name, None))
    config = deepspeed_config(args)
    for key, name in (
        ("tensor_parallel", "autotp_size"),
        ("tensor_parallel", "tp_size"),
        ("sequence_parallel", "size"),
    ):
        section = config.get(key)
        _check_size(f"deepspeed {key}.{name}", section.get(name) if isinstance(section, dict) else None)
    _check_size("deepspeed sequence_parallel_size", config.get("sequence_parallel_size"))


def _check_model_parallelism(trainer: Any) -> None:
    """The same of the model as loaded and of accelerate as started (also from its environment variables)."""
    model = unwrapped(trainer.model)
    for name in ("_tp_size", "tp_size"):
        _check_size("the model's tensor parallel size (tp_plan)", getattr(model, name, None))
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    for name in SHARED_REPLICA:
        _check_size(f"accelerate's {name}", getattr(parallelism, name, None))
    if parallelism is None:
        return
    # HSDP: replicas of shards. The data-parallel ranks are all ranks, so the default group is theirs.
    replicas, shards = (getattr(parallelism, name, None) or 1 for name in ("dp_replicate_size", "dp_shard_size"))
    ranks = trainer.accelerator.num_processes
    if replicas * shards not in (1, ranks) and trainer.odb_settings.process_group is None:
        raise ConfigError(
            f"parallelism_config: dp_replicate_size {replicas} x dp_shard_size {shards} is not the {ranks} ranks of "
            "this training, so its data-parallel ranks cannot be told; give them as enable_odb(process_group=...)."
        )


def _check_size(what: str, size: Any) -> None:
    if isinstance(size, int) and size > 1:
        raise ConfigError(
            f"{what}: {size} ranks would share one replica of the model and have to see the same batches, which odb "
            "does not support; set it to 1 (ZeRO, FSDP and HSDP are supported)."
        )


def _check_offload(args: Any) -> None:
    zero = deepspeed_config(args).get("zero_optimization", {})
    device = (zero.get("offload_optimizer") or {}).get("device", "none")
    if zero.get("stage") != 2 or device == "none":
        return
    installed = metadata.version("deepspeed")
    if Version(installed) < SUMS_OFFLOADED_GRADIENTS:
        raise ConfigError(
            f"deepspeed: release {installed} loses the gradients of micro-batches with ZeRO-2 and offload_optimizer "
            "(without odb too, from gradient_accumulation_steps: 3 on); install "
            f"deepspeed>={SUMS_OFFLOADED_GRADIENTS}, use ZeRO-3, or remove offload_optimizer."
        )


# Labels


def _check_loss(trainer: Any) -> None:
    """sentence-transformers' trainer has its losses as `loss`: one module, or one for each data set."""
    losses = getattr(trainer, "loss", None)
    found = in_batch_loss(losses.values() if isinstance(losses, Mapping) else (losses, *trainer.model.modules()))
    if found is not None:
        raise ConfigError(f"loss: {found} {IN_BATCH}.")


def _check_labels(model: Any) -> None:
    """Supervised tokens are counted after the causal shift, so every other head would be weighed wrongly."""
    model = unwrapped(model)
    name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ConfigError(
            f"model: {name} is an encoder-decoder model, whose labels are those of its decoder; odb trains causal "
            "language models (text and vision-language). Use the Trainer without odb."
        )
    loss = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "", ForCausalLMLoss)
    if loss is not ForCausalLMLoss or name.endswith(HEADS_WITHOUT_A_SHIFT):
        raise ConfigError(
            f"model: the labels of {name} are not those of a causal language model, one for each next token, so odb "
            "cannot weigh its loss; use the Trainer without odb."
        )


def unwrapped(model: Any) -> Any:
    """The model inside an adapter or an engine's wrapper, as far as they tell."""
    while True:
        if hasattr(model, "module"):
            model = model.module
        elif hasattr(model, "v_head"):  # TRL's model with a reward head
            model = model.pretrained_model
        elif hasattr(model, "get_base_model"):  # PEFT's
            return model.get_base_model()
        else:
            return model


# Methods


def check_methods(trainer: Any) -> None:
    """Refuse a trainer whose methods somebody has replaced, so that those of odb would not be reached or not hold."""
    for name in (*OVERRIDDEN, *BELOW):
        if name in vars(trainer):
            found = vars(trainer)[name]
            raise ConfigError(
                f"enable_odb: {name} of this trainer has been replaced by {_origin(found)}, which hides odb's own; "
                "override it in a subclass of the Trainer that calls super(), or train without odb."
            )
        for owner in type(trainer).__mro__:
            found = vars(owner).get(name)
            if found is not None and _origin(found).startswith("unsloth"):
                raise ConfigError(
                    f"enable_odb: {_origin(found)} has taken the place of {owner.__name__}.{name}, and odb drives "
                    "transformers' own; do not import unsloth in this process (`use_unsloth: false`)."
                )


def _origin(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
