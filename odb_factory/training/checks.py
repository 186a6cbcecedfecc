"""What is checked, compared between ranks and said before the first optimizer step."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from enum import Enum
from importlib import metadata
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from odb_factory import memory
from odb_factory.accounting.losses import IN_BATCH, in_batch_loss
from odb_factory.comm.agreement import MayDiffer
from odb_factory.config import ODBConfig
from odb_factory.data.measure import IGNORE_INDEX
from odb_factory.data.order import OF_MICRO_BATCH, OF_STEP, StockMean
from odb_factory.errors import ConfigError, DataError
from odb_factory.log import get_logger
from odb_factory.memory import PeakMeter
from odb_factory.model.check import shifts_labels, unwrapped
from odb_factory.model.own_loss import counts_items
from odb_factory.planning import Collation
from odb_factory.training.oom import deepspeed_config, why_not_split

# ----------------------------------------------------------------------------------------------------------------------
# What cannot work with online batches, refused in one line before the first step.

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
    if config.has_auto and memory_meter is None and memory.find_meter(args.device) is None:
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


# ----------------------------------------------------------------------------------------------------------------------
# What stock makes the loss of an optimizer step of, and how a loss that the trainer computes weighs samples.

LOOK_AT_THE_LOSS_ONLY = ("odb_factory.", "transformers.", "llamafactory.")
"""Packages whose trainers, in training, read nothing but the loss of what a model returns."""


def stock_mean(trainer: Any, loss: TrainerLoss | None, *, equal_weights: bool) -> StockMean:
    """As the Trainer of transformers divides, whose line is named in the comments. loss: in place of the model's own.
    equal_weights: of `enable_odb`; the loss is a mean of the trainer's own.

    Models with a processor take no number of tokens under LLaMA-Factory, which sets `model_accepts_loss_kwargs`.
    """
    args, counts_tokens = trainer.args, trainer.model_accepts_loss_kwargs
    if loss is not None and loss.is_smoother:
        # The mean of a micro-batch. `training_step` divides it by the accumulation where no tokens are counted;
        # `compute_loss` multiplies it by the number of processes where they are counted on all of them.
        sums_up_to = 1 if args.average_tokens_across_devices else args.world_size
        return StockMean("micro_batch", sums_up_to if counts_tokens else None, counts_first=not loss.shifts)
    if loss is not None and not loss.takes_num_items:
        # LLaMA-Factory's asft: its own `compute_loss` returns the mean of a micro-batch, and `training_step` does not
        # divide what a loss function returns.
        return StockMean("micro_batch", args.world_size, counts_first=False)
    if loss is None and not counts_tokens:
        return OF_MICRO_BATCH
    if loss is None and not equal_weights and not counts_items(trainer.model):
        # `training_step` does not divide the mean of a micro-batch by the accumulation: it takes it for a share of the
        # optimizer step. So stock adds these means up.
        sums_up_to = 1 if args.average_tokens_across_devices else args.world_size
        return StockMean("micro_batch", sums_up_to, counts_first=False)
    several_means = args.world_size > 1 and not args.average_tokens_across_devices
    return StockMean("rank") if several_means else OF_STEP


class TrainerLoss:
    """The loss that a trainer computes from outputs and labels, in place of the model's own.

    That is its `compute_loss_func` or, if there is none, its label smoother. Each returns the mean over the tokens of
    what it is given, or their sum divided by `num_items_in_batch`. So that samples of a micro-batch weigh differently,
    it is called once for the samples of each weight, with their part of the outputs and labels.

    is_smoother: it is the label smoother. shifts: it compares each token with the label behind it.
    takes_num_items: it is told by how many tokens to divide.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.is_smoother = trainer.compute_loss_func is None
        self._place = "label_smoother" if self.is_smoother else "compute_loss_func"
        function = getattr(trainer, self._place)
        self.shifts = not self.is_smoother or shifts_labels(unwrapped(trainer.model))
        parameters = inspect.signature(function).parameters.values()
        self.takes_num_items = any(
            one.name == "num_items_in_batch" or one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters
        )
        function = getattr(function, "func", function)  # of a functools.partial
        self._name = f"compute_loss_func ({getattr(function, '__qualname__', type(function).__name__)})"
        if self.is_smoother:
            self._name = f"label_smoothing_factor: {trainer.args.label_smoothing_factor}"

    @classmethod
    def of(cls, trainer: Any) -> TrainerLoss | None:
        """None where the loss is the model's own."""
        return None if trainer.compute_loss_func is None and trainer.label_smoother is None else cls(trainer)

    @contextlib.contextmanager
    def weighing(self, row_weights: Sequence[float] | None, segments: Sequence[int], num_units: int) -> Iterator[None]:
        """While `compute_loss` runs. row_weights, segments: of `MicroBatchLoss` and `Measured`; num_units: of the
        micro-batch.

        Raises `ConfigError` at the end where `compute_loss` has not used this loss.
        """
        function: Callable[..., Tensor] = getattr(self._trainer, self._place)
        calls = 0

        def weighed(outputs: Any, labels: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            given = [(1 / num_units, (outputs, labels, *args))]
            if row_weights is not None:
                self._check_logits(outputs, labels)
                given = _by_weight((outputs, labels, *args), labels, row_weights, segments)
            losses = []
            for weight, part in given:
                predicted = part[1][:, 1:] if self.shifts else part[1]
                num_items = (predicted != IGNORE_INDEX).sum()
                more = {"num_items_in_batch": num_items} if "num_items_in_batch" in kwargs else {}
                losses.append(function(*part, **kwargs | more) * (num_items * weight))
            return sum(losses[1:], losses[0])

        setattr(self._trainer, self._place, weighed)
        try:
            yield
        finally:
            setattr(self._trainer, self._place, function)
        if not calls:
            raise ConfigError(
                f"{self._name}: compute_loss of {type(self._trainer).__name__} does not use it, and odb divides the "
                "loss as the Trainer divides that one; leave it out."
            )

    def _check_logits(self, outputs: Any, labels: Tensor) -> None:
        logits = outputs.get("logits") if isinstance(outputs, dict) else outputs[0]
        if not isinstance(logits, Tensor) or logits.shape[:2] != labels.shape:
            raise ConfigError(
                f"{self._name}: the samples of a micro-batch have different weights here, and "
                f"{type(unwrapped(self._trainer.model)).__name__} returns no logits of its rows (a fused kernel such "
                "as Liger's computes the loss itself); turn the kernel off, or set `loss_scaling: exact`."
            )


def why_logits(trainer: Any) -> str | None:
    """Why a micro-batch's logits are wanted beside the model's own loss; None where only the loss is."""
    for kind in type(trainer).__mro__:
        if "compute_loss" in vars(kind) and not kind.__module__.startswith(LOOK_AT_THE_LOSS_ONLY):
            return f"compute_loss of {kind.__module__}.{kind.__qualname__} may read its outputs"
    return None


def _by_weight(
    given: tuple[Any, ...], labels: Tensor, row_weights: Sequence[float], segments: Sequence[int]
) -> list[tuple[float, tuple[Any, ...]]]:
    """For each weight but 0 what is given of its samples: their rows or, of a flat micro-batch, their segments."""
    weights = sorted(set(row_weights) - {0.0})
    if segments:
        ends = np.cumsum(segments)
        places = [np.arange(end - length, end) for end, length in zip(ends, segments)]
    else:
        places = [np.array([row]) for row in range(len(row_weights))]
    of_weight = [
        np.concatenate([place for place, weight in zip(places, row_weights) if weight == one]) for one in weights
    ]
    order = torch.from_numpy(np.concatenate(of_weight))
    sizes, dim, shape = list(map(len, of_weight)), 1 if segments else 0, labels.shape

    def cut(value: Any) -> Sequence[Any]:
        if isinstance(value, Tensor) and value.shape[:2] == shape:
            return value.index_select(dim, order.to(value.device, non_blocking=True)).split(sizes, dim)
        if isinstance(value, dict) and value:
            return [type(value)(**dict(zip(value, part))) for part in zip(*map(cut, value.values()))]
        if isinstance(value, tuple | list) and value:
            return [type(value)(part) for part in zip(*map(cut, value))]
        return [value] * len(sizes)

    return list(zip(weights, cut(given)))


@contextlib.contextmanager
def without_average_tokens(args: Any) -> Iterator[None]:
    """Within it the Trainer does not multiply a loss by the number of processes, which our weights do already."""
    before = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = before


# ----------------------------------------------------------------------------------------------------------------------
# What is said once at the start of a training about the model and its loss.


DROPOUT_OF_ATTENTION = ("attention_dropout", "dropout")


def say_what_differs(trainer: Any, *, counts_tokens: bool) -> None:
    """Of the model and its loss what a user would not expect. counts_tokens: the loss is a mean over tokens."""
    random = list(_dropouts(trainer.model))
    if random:
        name, rate = random[0]
        more = f" and {len(random) - 1} more" if len(random) > 1 else ""
        logger.info(
            "dropout is active in the model (%s: %g%s): its random masks are drawn for each micro-batch, so losses "
            "differ from stock's as with another seed",
            name,
            rate,
            more,
        )
    loss = TrainerLoss.of(trainer) if counts_tokens else None
    if loss is not None and not loss.shifts:
        logger.warning(
            "label_smoothing_factor: %g: transformers compares each token of a %s with its own label in place of the "
            "next one, in stock training too; set it to 0",
            trainer.args.label_smoothing_factor,
            type(unwrapped(trainer.model)).__name__,
        )


def _dropouts(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Name and rate of all that draws random masks in training; attention modules keep theirs as a number."""
    for name, module in model.named_modules():
        keys = ("p",) if isinstance(module, _DropoutNd) else DROPOUT_OF_ATTENTION
        rates = [vars(module).get(key) for key in keys]
        yield from [(name, rate) for rate in rates if isinstance(rate, float) and rate > 0][:1]


# ----------------------------------------------------------------------------------------------------------------------
# Whether the ranks of a node write to the same folder.


def compare_output_dirs(output_dir: str, gather: Callable[[bytes], list[bytes]]) -> None:
    """Warn, in one line, where ranks of one node have different ones. Collective.

    A checkpoint would then lie in parts in several folders, and none could be gone on from. Nodes may have disks of
    their own. gather: gives what each rank says to all ranks.
    """
    mine = [socket.gethostname(), os.path.abspath(output_dir)]
    first: dict[str, tuple[int, str]] = {}
    for rank, answer in enumerate(gather(json.dumps(mine).encode())):
        node, folder = json.loads(answer)
        other, expected = first.setdefault(node, (rank, folder))
        if folder != expected:
            logger.warning(
                "output_dir: rank %d of this node has %r and rank %d has %r, so a checkpoint would lie in parts "
                "in both and could not be gone on from; give all ranks one folder (no time or process id in its name)",
                other,
                expected,
                rank,
                folder,
            )
            return


# ----------------------------------------------------------------------------------------------------------------------
# What the ranks of a training compare before the first step: arguments, the model's config (I11).

NOT_COMPARED = {
    # Of one process or one node, or compared elsewhere: `compare_output_dirs`, `find_checkpoint`, the odb: block.
    "_name_or_path", "device_map", "local_rank", "logging_dir", "odb", "output_dir", "resume_from_checkpoint",
    "transformers_version",
    # Secret.
    "hf_hub_token", "hub_token", "ms_hub_token", "om_hub_token", "push_to_hub_token", "swanlab_api_key",
    "swanlab_lark_secret", "swanlab_lark_webhook_url",
}  # fmt: skip
MAY_DIFFER = {
    # Where things are on a node.
    "adapter_folder", "adapter_name_or_path", "base_model_name_or_path", "cache_dir", "dataset_dir", "media_dir",
    "model_name_or_path", "new_special_tokens_config", "nvme_path", "offload_folder", "ref_model",
    "ref_model_adapters", "reward_model", "reward_model_adapters", "tokenized_path",
    # How fast data are read.
    "data_shared_file_system", "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory",
    "dataloader_prefetch_factor", "overwrite_cache", "preprocessing_num_workers",
    # What is printed, logged and uploaded.
    "debug", "disable_tqdm", "enable_torch_profiler", "log_level", "log_level_replica", "log_on_each_node",
    "plot_loss", "print_param_status", "profile_modules", "project", "push_to_hub", "report_to", "run_name",
    "skip_memory_metrics", "use_swanlab",
    # How the process runs.
    "ddp_timeout", "low_cpu_mem_usage", "master_addr", "master_port", "overwrite_output_dir", "use_cpu",
}  # fmt: skip
PREFIXES_THAT_MAY_DIFFER = ("export_", "hub_", "profiler_", "ray_", "sglang_", "swanlab_", "trackio_", "vllm_")
"""Of arguments for trackers, profilers, and what comes after the training."""


def of_arguments(*owners: Any) -> dict[str, object]:
    """All fields of argument dataclasses as settings: nested values under dotted keys, such as `fsdp_config.version`.

    Fields of one process, and secrets, are left out; those that change nothing of what is trained may differ.
    """
    found: dict[str, object] = {}
    for owner in owners:
        for item in dataclasses.fields(owner):
            if item.name == "deepspeed":  # the path of a config, or the config
                _add(found, item.name, deepspeed_config(owner))
            elif not item.name.startswith("_"):
                _add(found, item.name, getattr(owner, item.name, None))
    return found


def of_trainer(trainer: Any) -> dict[str, object]:
    """Training arguments, trainer, loss function, model and adapters."""
    loss = trainer.compute_loss_func
    model = unwrapped(trainer.model)
    found: dict[str, object] = {
        **of_arguments(trainer.args),
        "trainer": type(trainer).__name__,
        "compute_loss_func": getattr(loss, "__qualname__", type(loss).__name__),
        "model": type(model).__name__,
    }
    _add(found, "model.config", getattr(model, "config", None))
    _add(found, "peft_config", getattr(trainer.model, "peft_config", None))
    return found


def _add(found: dict[str, object], key: str, value: Any) -> None:
    """Put a value, or what is inside it, under its key."""
    name = key.rpartition(".")[2]
    if name in NOT_COMPARED:
        return
    value = _plain(value)
    if isinstance(value, dict) and value:
        for inner in sorted(value):
            _add(found, f"{key}.{inner}", value[inner])
        return
    may_differ = name in MAY_DIFFER or name.startswith(PREFIXES_THAT_MAY_DIFFER)
    found[key] = MayDiffer(value) if may_differ else value


def _plain(value: Any) -> Any:
    """Numbers, texts, lists and dicts; of other objects what they say of themselves, but not where they are."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value), key=repr)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text
