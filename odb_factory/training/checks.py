"""Requirements of a trainer, checked before the first optimizer step, and the settings that ranks compare."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import json
import math
import operator
import os
from collections.abc import Iterator, Mapping, Sized
from enum import Enum
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch.nn.modules.dropout import _DropoutNd
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from odb_factory import memory
from odb_factory.config import ODBConfig, refusals_of_auto
from odb_factory.data.order import DataLoaderParts
from odb_factory.data.pool import look
from odb_factory.errors import ConfigError, DataError, one_line
from odb_factory.log import get_logger
from odb_factory.memory import MemoryMeter
from odb_factory.model.check import models_of, unwrapped
from odb_factory.model.unpad import UnpadDoor
from odb_factory.planner import Collation
from odb_factory.random_numbers import kept_random_numbers
from odb_factory.refusals import GRADIENTS_LOST, Refusal, Settings, offloads_optimizer, refuse
from odb_factory.training.arguments import replaced

logger = get_logger(__name__)

# Settings that cannot work with online batches, refused in one line before the first step.

HEADS_WITHOUT_A_SHIFT = ("ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining")
"""Heads that are missing in transformers' table of losses."""
SHARED_REPLICA = ("tp_size", "cp_size", "sp_size")
DEEPSPEED_REPLICA = (
    "tensor_parallel.autotp_size", "tensor_parallel.tp_size", "sequence_parallel.size", "sequence_parallel_size",
)  # fmt: skip
METHODS = ("train", "get_train_dataloader", "training_step", "compute_loss", "create_scheduler", "get_batch_samples")
"""Methods of the Trainer that odb overrides, and `get_batch_samples`, which it calls."""
STEP_IN_BACKWARD = ("_layerwise", "lomo")
"""Ends of the names of optimizers that change weights in a backward."""
TRIES = 20
"""Batches with which a trainer is tried: TRL's GKDTrainer draws for each batch whether it generates rows."""
PAIRS = (
    "use enable_odb_dpo (odb_factory.integrations.trl) with TRL's DPOTrainer, or LLaMA-Factory's stages dpo, rm, kto"
)
"""How to train on pairs with odb."""
READ_LOSS_ONLY = ("odb_factory.", "transformers.", "llamafactory.")
"""Packages whose trainers, in training, read only the loss of a model's output."""
ENGINES = ("torch", "accelerate", "deepspeed", "transformers")
"""Packages whose hooks on gradients add up and synchronise gradients only."""


def _replica(key: str) -> Refusal:
    """Refuses ranks that are not all data-parallel. key: of the number of ranks that share a replica of the model."""
    why = "their lengths would be cut after samples were grouped by them"
    if "tp_size" in key or "tensor" in key:
        why = "a Trainer's figures, checkpoints and evaluation take every rank for a data-parallel one"
    return Refusal(
        key,
        lambda s: isinstance(size := s.at(key), int) and size > 1,
        f"ranks would share one replica of the model, which odb does not support here ({why})",
        "set it to 1 (ZeRO, FSDP and HSDP are supported; tensor parallelism in a loop with ODBDataLoader)",
    )


ARGUMENTS = (
    Refusal("gradient_accumulation_steps", lambda s: s.gradient_accumulation_steps < 1,
        "is not the number of micro-batches of an optimizer step", "choose 1 or more"),
    Refusal("num_train_epochs", lambda s: s.max_steps <= 0 and s.num_train_epochs <= 0, "leaves nothing to train on",
        "choose more than 0, or set max_steps"),
    *(_replica(f"parallelism_config.{name}") for name in SHARED_REPLICA),
    *(_replica(f"deepspeed.{name}") for name in DEEPSPEED_REPLICA),
    GRADIENTS_LOST,
    Refusal("deepspeed.scheduler.type", lambda s: s.deepspeed.get("scheduler") and not s.odb.keeps,
        "counts optimizer steps, whose number is unknown with `global_batch_size: fill`",
        "remove `scheduler` there and use lr_scheduler_type, or keep the optimizer steps"),
    Refusal("n_gpu", lambda s: s.n_gpu > 1, "devices in one process (DataParallel) would cut every batch apart",
        "start one process a device with torchrun (FORCE_TORCHRUN=1), or show it one device"),
    Refusal("optim", lambda s: str(getattr(s.optim, "value", s.optim)).endswith(STEP_IN_BACKWARD),
        "changes weights in every backward, of which odb makes several an optimizer step",
        "choose another optimizer, or train without odb"),
    Refusal("auto_find_batch_size", lambda s: s.auto_find_batch_size,
        "does not go with odb, which sizes batches by tokens",
        "remove the key, and lower `token_budget` if memory is short"),
    Refusal("accelerator_config.split_batches",
        lambda s: s.at("accelerator_config.split_batches") and s.world_size > 1,
        "does not go with odb: stock would cut each batch apart among the ranks",
        "remove it and divide per_device_train_batch_size by {s.world_size}"),
    Refusal("accelerator_config.dispatch_batches", lambda s: s.at("accelerator_config.dispatch_batches"),
        "does not go with odb, where every rank forms its own batches", "remove the key or set it to false"),
    Refusal("accelerator_config.use_seedable_sampler",
        lambda s: s.at("accelerator_config.use_seedable_sampler") is False,
        "draws an order that no seed repeats, and odb draws the order of data_seed or seed", "remove the key"),
    Refusal("ddp_static_graph", lambda s: s.ddp_static_graph and s.world_size > 1,
        "does not go with odb: torch expects every backward to be like the first, and the number of micro-batches "
        "of an optimizer step changes", "remove the key"),
    *refusals_of_auto(lambda s: s.memory_meter is None,
        "tries micro-batches on an accelerator whose memory torch counts, and this training runs on {s.device.type}",
        "set a number (`odb-factory plan` says what it does with the data)"),
    *refusals_of_auto(lambda s: s.is_stream,
        "tries rows of the dataset before training, and rows of a stream have no number to read them by",
        "set a number"),
    Refusal("odb.oom", lambda s: s.odb.oom != "raise" and why_not_split(s),
        "works in one process, with DDP and ZeRO-1, and {found}",
        "leave it out (raise), and lower token_budget if memory is short"),
)  # fmt: skip
"""Training arguments that odb cannot work with, or not with these keys of the block."""


def check_arguments(
    args: Any, config: ODBConfig, memory_meter: MemoryMeter | None = None, *, is_stream: bool = False
) -> None:
    """Raise `ConfigError` for training arguments and block keys that cannot work; needs no model.

    memory_meter: of `enable_odb`, with which `auto` can choose budgets on a CPU. is_stream: the rows of the dataset
    cannot be read by their number.
    """
    meter = memory_meter or (memory.find_meter(args.device) if config.auto_keys else None)
    own = {"odb": config, "deepspeed": deepspeed_config(args), "memory_meter": meter, "is_stream": is_stream}
    refuse(ARGUMENTS, own, args)


def check_dummy_media(config: ODBConfig, collation: Collation) -> None:
    """Raise `ConfigError` if no micro-batch without media can be within `max_patches`."""
    _, least = collation.dummies(0, 0)
    media = "fake image and audio" if collation.dummy_audio_patches else "fake image"
    row = Refusal(
        "odb.max_patches",
        lambda s: isinstance(s.odb.max_patches, int) and s.odb.max_patches < least,
        f"is less than the {least} patches of the {media} that the collator adds to every group without media",
        "raise it",
    )
    refuse([row], {"odb": config})


TRAINER = (
    # TRL 1.x sets a text with transformers before 5.19, which checks only whether the attribute is set.
    Refusal("compute_loss_func", lambda s: s.compute_loss_func is not None and not callable(s.compute_loss_func),
        "is not a function", "install a newer transformers if the trainer has set it, or train without odb"),
    # Supervised tokens are counted after the causal shift, so weights for other heads would be wrong.
    Refusal("model.__class__.__name__", lambda s: not _is_causal(s.model),
        "is not a causal language model (text or vision-language), which has a label for each next token",
        "use the Trainer without odb"),
    *(_replica(f"model.{name}") for name in ("_tp_size", "tp_size")),
    *(_replica(f"accelerator.parallelism_config.{name}") for name in SHARED_REPLICA),
    Refusal("accelerator.parallelism_config.dp_shard_size",
        lambda s: s.process_group is None and _replicas(s) not in (1, s.accelerator.num_processes),
        "and dp_replicate_size do not make the {s.accelerator.num_processes} ranks of this training, so its "
        "data-parallel ranks are unknown", "name them with enable_odb(process_group=...)"),
)  # fmt: skip
"""Settings of a trainer, its model as loaded, and accelerate as started, also by environment variables."""


def _is_causal(model: Any) -> bool:
    loss = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "", ForCausalLMLoss)
    has_other_head = type(model).__name__.endswith(HEADS_WITHOUT_A_SHIFT)
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return loss is ForCausalLMLoss and not has_other_head and not is_encoder_decoder


def _replicas(s: Settings) -> int:
    """The data-parallel ranks of HSDP: replicas x shards."""
    names = ("dp_replicate_size", "dp_shard_size")
    return math.prod(s.at(f"accelerator.parallelism_config.{name}") or 1 for name in names)


def check_trainer(trainer: Any) -> None:
    """Raise `ConfigError` for a trainer whose dataset, model, parallelism or methods cannot work with odb."""
    if isinstance(trainer.train_dataset, Sized) and len(trainer.train_dataset) == 0:
        raise DataError("train_dataset: it has no row, so there is nothing to train on; look at what filters it.")
    refuse(TRAINER, {"model": unwrapped(trainer.model), "process_group": trainer.odb.process_group}, trainer)
    check_methods(trainer)


class _Stopped(Exception):
    """Ends the trial of a trainer. The message says what it does with its rows; "": it leaves them unchanged."""


def check_own_rows(trainer: Any, parts: DataLoaderParts) -> None:
    """Raise `ConfigError` for a trainer that trains on other rows than its dataloader yields, for example on answers
    that it generates, or that compares the rows of a sample, such as pairs. Transformers' methods do neither.

    The trainer's own `training_step` runs on the batch of the first row up to its loss, or to the model's `generate`:
    nothing is computed. If a custom `_prepare_inputs` fails there, the trainer is refused as well: the method may need
    something that exists only in a training (a server for generation, a whole group of rows) to make its rows.
    """
    methods = ("compute_loss", "training_step", "_prepare_inputs")
    own = [name for name in methods if not _is_of_transformers(trainer, name)]
    if not own:
        return
    # The rows that the collator makes of one sample.
    try:
        with kept_random_numbers():
            batch: Any = parts.collate_fn([look(parts, operator.itemgetter(0))])
    except Exception:  # reported when the row is read for training
        return
    kind, collation = type(trainer).__name__, trainer.odb.collation
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    num_rows = len(ids) if isinstance(ids, torch.Tensor) and (collation is None or collation.rows == 1) else 1
    if num_rows != 1 and "compute_loss" in own:
        raise ConfigError(
            f"trainer: a {kind} makes {num_rows} rows of a sample and compares them in its own compute_loss, which odb "
            f"does not support; {PAIRS}, or train without odb."
        )

    # The rows that reach the loss, by a step that stops there.
    if own == ["compute_loss"] or not isinstance(batch, Mapping):
        return

    def generate(*args: Any, **kwargs: Any) -> None:
        raise _Stopped("generates answers while it trains")

    def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> None:
        raise _Stopped("" if _has_rows_of(inputs, batch) else "trains on other rows than its dataloader yields")

    with contextlib.ExitStack() as probe:
        probe.enter_context(kept_random_numbers(trainer.args.device))
        probe.enter_context(replaced(trainer, compute_loss=compute_loss))
        for model in {trainer.model, unwrapped(trainer.model)}:
            probe.enter_context(replaced(model, generate=generate))
        for _ in range(TRIES):
            why = ""
            try:
                trainer.training_step(trainer.model, copy.deepcopy(batch), None)
            except _Stopped as stopped:
                why = str(stopped)
            except Exception as error:
                if "_prepare_inputs" in own:
                    why = f"makes its rows in its _prepare_inputs, which fails before training ({one_line(error)})"
            if why:
                raise ConfigError(
                    f"trainer: a {kind} {why}, so the lengths of its rows are unknown when micro-batches are "
                    "planned; train without odb, or cut its batches by odb_factory.plan_micro_batches."
                )


def _is_of_transformers(trainer: Any, name: str) -> bool:
    """Whether all definitions of a method are transformers' and odb's."""
    owners = {kind.__module__.split(".")[0] for kind in type(trainer).__mro__ if name in vars(kind)}
    return owners <= {"transformers", "odb_factory"}


def _has_rows_of(batch: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether all tensors of a batch have the shapes that they had before, and labels their values."""
    tensors = {key: value for key, value in before.items() if isinstance(value, torch.Tensor)}
    if any(getattr(batch.get(key), "shape", None) != value.shape for key, value in tensors.items()):
        return False
    return "labels" not in tensors or torch.equal(batch["labels"].cpu(), tensors["labels"].cpu())


def check_hooks(trainer: Any) -> None:
    """Raise `ConfigError` if anything changes weights or gradients in every backward: an optimizer step has another
    number of backwards than in stock training. Call after the optimizer has been made."""

    def acting() -> Iterator[str]:
        if getattr(trainer.accelerator, "has_lomo_optimizer", False):
            yield f"optimizer: {type(trainer.optimizer).__name__} of LOMO changes all weights"
        for name, parameter in trainer.model.named_parameters():
            if hasattr(parameter, "_in_backward_optimizers"):
                yield f"optimizer: torch's optimizer in the backward changes {name}"
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
                origin = _origin(getattr(hook, "func", hook))
                if origin.split(".")[0] not in ENGINES:
                    yield f"{origin} acts on the gradient of {name}"

    if (first := next(acting(), None)) is not None:
        raise ConfigError(
            f"{first} in every backward, of which odb makes several an optimizer step; act once an optimizer step (a "
            "callback's on_pre_optimizer_step, another optimizer), or train without odb."
        )


# `oom: split`, `skip`: a rank alone computes its micro-batches again, so no collective may run inside them.


def why_not_split(args: Any) -> str | None:
    """Why `oom: split` and `skip` cannot work; None if they can. args: training arguments, which name the engine."""
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
        return "FSDP gathers parameters inside forward and backward, where the other ranks would wait for ever"
    engine = args.distributed_state.distributed_type
    if getattr(args, "deepspeed_plugin", None) is not None:
        zero = deepspeed_config(args).get("zero_optimization", {})
        keeps_gradients = not (zero.get("overlap_comm") or zero.get("cpu_offload") or offloads_optimizer(zero))
        if zero.get("stage", 0) != 1 or not keeps_gradients:
            return (
                "gradients that DeepSpeed reduces or moves inside a backward cannot be dropped (ZeRO-1 without "
                "`overlap_comm` and offloading does neither)"
            )
    elif engine != DistributedType.NO and not engine.name.startswith("MULTI_"):
        return f"the collectives of {engine.name} inside forward and backward are unknown"
    elif args.torch_compile and args.world_size > 1:
        return "torch_compile compiles DDP as a whole, with the reduction of gradients inside backward"
    return None


def deepspeed_config(args: Any) -> dict[str, Any]:
    """The configuration of DeepSpeed in the training arguments, or given to `accelerate launch`; empty without it."""
    if (engine := getattr(args, "hf_deepspeed_config", None)) is not None:
        return engine.config
    plugin = getattr(args, "deepspeed_plugin", None)
    return {} if plugin is None else plugin.deepspeed_config


def check_methods(trainer: Any) -> None:
    """Raise `ConfigError` for a trainer whose methods have been replaced, so that odb's are not called or are wrong."""
    for name in METHODS:
        if name in vars(trainer):
            method = vars(trainer)[name]
            raise ConfigError(
                f"enable_odb: {name} of this trainer has been replaced by {_origin(method)}, which hides odb's own; "
                "override it in a subclass of the Trainer that calls super(), or train without odb."
            )
        for owner in type(trainer).__mro__:
            method = vars(owner).get(name)
            if method is not None and _origin(method).startswith("unsloth"):
                raise ConfigError(
                    f"enable_odb: {_origin(method)} has taken the place of {owner.__name__}.{name}, and odb drives "
                    "transformers' own; do not import unsloth in this process (`use_unsloth: false`)."
                )

    if not inspect.signature(trainer.train).parameters.keys() & {"resume_from_checkpoint", "args"}:
        raise ConfigError(
            f"enable_odb: train of a {type(trainer).__name__} is not the Trainer's loop, which odb drives; train "
            "without odb, or cut its batches by odb_factory.plan_micro_batches."
        )


def _origin(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


def why_no_door(trainer: Any) -> str | None:
    """Why the door at a model's output embedding cannot give a trainer the values of its rows; None if it can."""
    return next((why for model in models_of(trainer) if (why := UnpadDoor(model).reason) is not None), None)


def overriding_compute_loss(trainer: Any) -> list[type]:
    """Classes with a `compute_loss` that may read the outputs of a model or change its loss, in the order of calls."""
    kinds = [kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind)]
    return [kind for kind in kinds if not kind.__module__.startswith(READ_LOSS_ONLY)]


def why_logits(trainer: Any) -> str | None:
    """Why a trainer needs the logits of a micro-batch in addition to the model's own loss; None if it does not."""
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in overriding_compute_loss(trainer)]
    return f"compute_loss of {names[0]} may read its outputs" if names else None


# Logged once at the start: properties of the model and its loss that a user may not expect.


def log_what_differs(trainer: Any) -> None:
    random = []
    for name, module in trainer.model.named_modules():
        # Attention modules keep their rate as a number.
        keys = ("p",) if isinstance(module, _DropoutNd) else ("attention_dropout", "dropout")
        rates = [rate for key in keys if isinstance(rate := vars(module).get(key), float) and rate > 0]
        random += [f"{name}: {rate:g}" for rate in rates[:1]]
    if random:
        logger.info(
            "dropout is active in the model (%s%s): its random masks are drawn for each micro-batch, so losses differ "
            "from stock's as with another seed",
            random[0],
            f" and {len(random) - 1} more" if len(random) > 1 else "",
        )


# The settings that the ranks of a training compare before the first step: arguments, the model's config (I11).

NOT_COMPARED = (
    # Of one process or one node, or compared elsewhere: `find_checkpoint`, the odb: block.
    "device_map", "local_rank", "master_addr", "master_port", "odb", "resume_from_checkpoint", "transformers_version",
    # Models and files, which may be paths.
    "new_special_tokens_config", "ref_model", "ref_model_adapters", "reward_model", "reward_model_adapters",
    # How fast data are read.
    "data_shared_file_system", "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory",
    "dataloader_prefetch_factor", "overwrite_cache", "preprocessing_num_workers",
    # What is printed, logged and uploaded, often by rank 0 alone.
    "disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "plot_loss", "push_to_hub", "report_to",
    "run_name", "use_swanlab",
)  # fmt: skip
ENDINGS_NOT_COMPARED = ("_dir", "_folder", "_path", "_key", "_secret", "_token", "_url")
"""Ends of the names of paths on a node, and of secrets."""


def of_arguments(*owners: Any) -> dict[str, object]:
    """The fields of argument dataclasses as settings, nested values under dotted keys such as `fsdp_config.version`.

    Fields of one process, secrets, and fields that do not change the training are left out.
    """
    settings: dict[str, object] = {}
    for owner in owners:
        for item in dataclasses.fields(owner):
            if item.name == "deepspeed":  # the path of a config, or the config
                _add(settings, item.name, deepspeed_config(owner))
            elif not item.name.startswith("_"):
                _add(settings, item.name, getattr(owner, item.name, None))
    return settings


def of_trainer(trainer: Any) -> dict[str, object]:
    """Training arguments, trainer, loss function, model and adapters."""
    loss = trainer.compute_loss_func
    model = unwrapped(trainer.model)
    settings: dict[str, object] = {
        **of_arguments(trainer.args),
        "trainer": type(trainer).__name__,
        "compute_loss_func": getattr(loss, "__qualname__", type(loss).__name__),
        "model": type(model).__name__,
    }
    _add(settings, "model.config", getattr(model, "config", None))
    _add(settings, "peft_config", getattr(trainer.model, "peft_config", None))
    return settings


def _add(settings: dict[str, object], key: str, value: Any) -> None:
    """Add a value, or its inner values, under its key."""
    name = key.rpartition(".")[2]
    if name in NOT_COMPARED or name.endswith(ENDINGS_NOT_COMPARED):
        return
    value = json.loads(json.dumps(value, default=_plain, skipkeys=True))
    if isinstance(value, dict) and value:
        for inner in sorted(value):
            _add(settings, f"{key}.{inner}", value[inner])
        return
    settings[key] = value


def _plain(value: Any) -> Any:
    """A value that JSON has no type for, as numbers, texts, lists and dicts; other objects as their repr or class."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text
