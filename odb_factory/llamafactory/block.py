"""The `odb:` block and what it cannot be combined with, checked before a model is loaded.

`check_block` sees the arguments as they stand in the YAML, before LLaMA-Factory reads them and where possible before
processes are started; `check_combination` sees what LLaMA-Factory has made of them. Both are called by the plugin's
hooks and by patched forks (`patches/` in the repository). Nothing heavy is imported for the first of them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from odb_factory.config import AUTO, ODBConfig
from odb_factory.errors import ConfigError, quoted
from odb_factory.llamafactory import uncaught
from odb_factory.llamafactory.stages import STAGES
from odb_factory.log import get_logger

# ----------------------------------------------------------------------------------------------------------------------
# Values in the YAML that would end in an error of another library's which does not name the key.
# Nothing heavy is imported: the YAML is looked at before processes are started, and once more where it is read.

ARGUMENTS = ("ModelArguments", "DataArguments", "TrainingArguments", "FinetuningArguments", "GeneratingArguments")
KINDS: Mapping[type, str] = {int: "a whole number", float: "a number", bool: "true or false"}
"""Types that a value in quotes, or a list, cannot be given for; the first that a key takes is named."""


def check_values(args: Mapping[str, Any]) -> None:
    """Raise a one-line `ConfigError` for a value of a wrong type, or a model or checkpoint that is not there."""
    workers = args.get("dataloader_num_workers", 0)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ConfigError(
            f"dataloader_num_workers: {quoted(workers)} is not a whole number of at least 0, without quotes."
        )
    _check_types(args)
    _check_model(args)
    _check_checkpoint(args)


def _check_types(args: Mapping[str, Any]) -> None:
    """By the types that LLaMA-Factory declares, once it has been imported, as it is where its arguments are read."""
    declared = declared_arguments()
    for key, value in args.items():
        kinds = set(get_args(declared.get(key)) or (declared.get(key),)) - {type(None)}
        if isinstance(value, str | list | dict) and kinds and kinds <= KINDS.keys():
            kind = next(words for kind, words in KINDS.items() if kind in kinds)
            raise ConfigError(f"{key}: {quoted(value)} is not {kind}; write {kind}, without quotes.")


def declared_arguments() -> dict[str, Any]:
    """The types of all arguments by their names; empty before LLaMA-Factory's have been imported."""
    hparams = sys.modules.get("llamafactory.hparams")
    declared: dict[str, Any] = {}
    for name in ARGUMENTS if hparams is not None else ():
        declared |= get_type_hints(getattr(hparams, name))
    return declared


def _check_model(args: Mapping[str, Any]) -> None:
    """A path that is not there would be looked up on the hub, and not found to be a name there."""
    name = args.get("model_name_or_path")
    if isinstance(name, str) and (name.startswith(("/", ".", "~")) or name.count("/") > 1) and not os.path.exists(name):
        raise ConfigError(
            f"model_name_or_path: there is no {name!r} on this machine, seen from {os.getcwd()}; give the model's "
            "folder, or its name on the hub (ORGANIZATION/MODEL)."
        )


def _check_checkpoint(args: Mapping[str, Any]) -> None:
    """What `resume_from_checkpoint` names must be there before the model is loaded; the trainer looks into it later."""
    asked = args.get("resume_from_checkpoint")
    if not isinstance(asked, str | bool | None):
        raise ConfigError(f"resume_from_checkpoint: {asked!r} is not the path of a checkpoint folder.")
    if not asked or os.environ.get("NNODES", "1") != "1":  # nodes that see other disks settle it together
        return
    output_dir = Path(str(args.get("output_dir")))
    found = sorted((folder.name for folder in output_dir.glob("checkpoint-*")), key=lambda name: (len(name), name))
    if asked is True and not found:
        raise ConfigError(
            f"resume_from_checkpoint: True, but there is no checkpoint in output_dir {output_dir}; remove the key to "
            "begin anew."
        )
    if isinstance(asked, str) and not os.path.isdir(asked):
        there = f"output_dir {output_dir} has {', '.join(found[-3:])}" if found else f"{output_dir} has none"
        raise ConfigError(
            f"resume_from_checkpoint: {asked!r} is no folder on this machine; name a checkpoint folder ({there}), or "
            "remove the key to begin anew."
        )


# ----------------------------------------------------------------------------------------------------------------------
# Losses that cannot give the samples of a micro-batch different weights, refused before a model is loaded.
# `odb_factory.accounting.losses` finds them too, in a training; this knows the arguments only, and answers
# minutes earlier.

FUSED_LOSS = ("enable_liger_kernel", "use_liger_kernel")
"""The kernel computes the loss from the hidden states and returns no logits to take token losses from."""
TAKE_LABELS_AWAY = ("use_dft_loss", "use_eaft_loss", "label_smoothing_factor")
"""The model gets no labels with them, and returns logits then."""
NEED_LOGITS = ("use_asft_loss", "torch_compile")
"""With them the loss without logits is not used, which replaces that of the kernel (`odb_factory.model.head`)."""


def check_losses(config: ODBConfig, model_args: Any, training_args: Any, value_of: Callable[..., Any]) -> None:
    """Raise a one-line `ConfigError` for a kernel whose samples weigh differently.

    value_of(key): an argument of LLaMA-Factory's as it has been read.
    """
    if STAGES[value_of("stage", "sft")].equal_weights:
        return  # samples of different weight never meet there
    key, needs = (next((key for key in keys if value_of(key)), None) for keys in (FUSED_LOSS, NEED_LOGITS))
    if key is None or needs is None or any(map(value_of, TAKE_LABELS_AWAY)):
        return
    if _weights_differ(config, model_args, training_args, value_of):
        raise ConfigError(
            f"{key}: {value_of(key)} computes the loss without logits, {needs}: {value_of(needs)} keeps odb from doing "
            f"so, and `loss_scaling: {config.loss_scaling}` gives the samples of a micro-batch different weights here; "
            f"set `loss_scaling: exact` in the odb: block, {needs}: false, or {key}: false."
        )


def _weights_differ(config: ODBConfig, model_args: Any, training_args: Any, value_of: Callable[..., Any]) -> bool:
    if config.loss_scaling != "stock":
        return config.loss_scaling in ("sample", "square")
    if not value_of("use_asft_loss") and not _has_processor(model_args):
        return training_args.world_size > 1 and not training_args.average_tokens_across_devices
    rows = int(training_args.per_device_train_batch_size)
    samples = config.global_batch_size
    if not isinstance(samples, int):
        samples = training_args.world_size * training_args.gradient_accumulation_steps * rows
    return samples > rows


def _has_processor(model_args: Any) -> bool:
    """Whether LLaMA-Factory takes the mean of means, as it does for every model with a processor."""
    from llamafactory.model import load_tokenizer

    return load_tokenizer(model_args)["processor"] is not None


# ----------------------------------------------------------------------------------------------------------------------
# What LLaMA-Factory's arguments say about the layout of micro-batches. Nothing heavy is imported.

logger = get_logger(__name__)

NOT_FLAT = {
    "shift_attn": "it shifts attention along the whole row, across samples",
    "neftune_noise_alpha": "it scales its noise by the length of the row",
}
"""Arguments with which flat micro-batches would be wrong, and why."""


def with_neat_packing_as_layout(args: Mapping[str, Any], *, tell: bool = True) -> dict[str, Any]:
    """`args` for LLaMA-Factory: `neat_packing: true` beside `odb:` is the wish for flat micro-batches.

    LLaMA-Factory itself must not see it: it would pack rows before training (or refuse to). Raises `ConfigError` where
    the block says `layout: padded`. tell: say so in the log.
    """
    args, block = dict(args), args["odb"]
    if args.get("neat_packing") is not True or not isinstance(block, Mapping):
        return args
    if block.get("layout") == "padded":
        raise ConfigError(
            "neat_packing: True asks for samples that share a row, and odb.layout 'padded' for rows of one sample; "
            "remove one of them."
        )
    for key in ("neat_packing", "packing"):
        args.pop(key, None)
    if tell:
        logger.info(
            "neat_packing: true is taken as odb.layout: flat; nothing is packed before training, so batch sizes "
            "count samples, not packs, and optimizer steps are smaller and more than stock's (see global_batch_size)"
        )
    return args | {"odb": {**block, "layout": "flat"}}


def check_layout(config: ODBConfig, value_of: Callable[..., Any]) -> None:
    """Refuse `layout: flat` beside arguments that speak against it, before a model is loaded.

    value_of(key): an argument of LLaMA-Factory's.
    """
    stage = STAGES.get(value_of("stage", "sft"))
    sizes = {"length_buckets": config.length_buckets, "row_multiple": config.row_multiple}
    for key, value in sizes.items():
        if stage is not None and stage.batches and value not in (None, 1):
            raise ConfigError(
                f"odb.{key}: {value} rounds up batches of single texts, and stage {stage.name!r} reads its batches by "
                f"{stage.unit}s; leave it out."
            )
    for key, why in NOT_FLAT.items():
        if config.layout == "flat" and value_of(key):
            raise ConfigError(
                f"{key}: {value_of(key)!r} does not go with odb.layout 'flat': {why}; remove it, or set `layout: "
                "padded`, or auto."
            )


def why_not_flat(trainer: Any) -> str | None:
    """What LLaMA-Factory's trainer was made with that only a padded layout can have; None: nothing."""
    # What LLaMA-Factory sets where it has really changed the attention.
    if getattr(trainer.model.config, "group_size_ratio", None) is not None:
        return f"shift_attn: {NOT_FLAT['shift_attn']}"
    if not STAGES[trainer.finetuning_args.stage].batches:
        return None
    # What a trainer reads of its rows comes from the door at the output embedding.
    from odb_factory.model.check import models_of
    from odb_factory.model.unpad import UnpadDoor

    reasons = (UnpadDoor(model).reason for model in models_of(trainer))
    return next((reason for reason in reasons if reason is not None), None)


# ----------------------------------------------------------------------------------------------------------------------
# `streaming: true` beside an `odb:` block: local files are read by index all the same.
# LLaMA-Factory loads a local file whole and makes a stream of it, to do without the preprocessing pass; with a block
# there is no such pass. What is left of streaming is for data sets that can only be iterated (`online_stream.py`).


BY_INDEX = ("file", "cloud_file")
"""What a data set is loaded from that LLaMA-Factory has whole in its hands, whether it makes a stream of it or not."""


def with_local_files_by_index(args: Mapping[str, Any]) -> dict[str, Any]:
    """`args` for LLaMA-Factory: without `streaming` where all rows can be read by index.

    Its parser then asks for none of what a stream needs (`max_steps`), and refuses none of what a stream cannot have
    (`max_samples`, a share as `val_size`).
    """
    args = dict(args)
    if not args.get("do_train") or args.get("streaming") is not True or not _all_rows_have_an_index(args):
        return args
    logger.info(
        "streaming: true is taken as false, for all data sets are local: rows are read by index and preprocessed when "
        "they are needed; samples, order and optimizer steps are those of `streaming: false` (stock's stream shuffles "
        "within its buffer), and max_steps is not needed"
    )
    return args | {"streaming": False}


def _all_rows_have_an_index(args: Mapping[str, Any]) -> bool:
    tokenized = args.get("tokenized_path")
    if tokenized is not None and os.path.isdir(str(tokenized)):
        return True
    found = data_sets(args, "dataset", "eval_dataset")
    return bool(found) and all(attr.load_from in BY_INDEX for attr in found)


def data_sets(args: Mapping[str, Any], *keys: str) -> list[Any]:
    """LLaMA-Factory's attributes of the data sets that these keys name; none if it cannot find them."""
    from llamafactory.data.parser import get_dataset_list

    try:
        found: list[Any] = get_dataset_list(
            [name for key in keys for name in _names(args.get(key))], args.get("dataset_dir") or "data"
        )
    except Exception:  # LLaMA-Factory will say so
        return []
    return found


def _names(datasets: Any) -> list[str]:
    """As LLaMA-Factory reads a list of names."""
    if isinstance(datasets, str):
        return [name.strip() for name in datasets.split(",")]
    return list(datasets or ())


# ----------------------------------------------------------------------------------------------------------------------


SHARED_KEYS = ("seed",)
"""Keys that both the block and LLaMA-Factory's arguments have."""
STREAMING_KEYS = ("buffer_size",)
"""Those that mean something in LLaMA-Factory with `streaming: true` alone; elsewhere they are meant for the block."""

BACKENDS = {
    "USE_MCA": "use_mca (Megatron), which has a trainer of its own that odb cannot drive",
    "USE_MEGATRON_BRIDGE": "the Megatron bridge, which has a trainer of its own that odb cannot drive",
    "USE_RAY": "Ray, whose workers odb has not been tried in (FORCE_TORCHRUN=1 starts several processes without it)",
}
"""What an environment variable of LLaMA-Factory's selects that does not go with odb."""

REFUSED = {
    "use_mca": "the Megatron trainer has a data path of its own; remove the key",
    "use_kt": "the KTransformers trainer has a data path of its own; remove the key",
    "use_hyper_parallel": "that trainer has a data path of its own; remove the key",
    "use_unsloth": "Unsloth puts its own code in place of the Trainer's that odb builds on; remove the key",
    "packing": (
        "odb forms micro-batches of whole samples instead of cutting them into packs; remove the key (with `layout: "
        "flat` whole samples share a row, without padding)"
    ),
}
"""Keys of the YAML that must not be true, and why."""

AT_A_BACKWARD = {
    "use_galore": ("galore_layerwise", True, "set galore_layerwise: false"),
    "use_apollo": ("apollo_layerwise", True, "set apollo_layerwise: false"),
    "use_badam": ("badam_mode", "ratio", "set badam_mode: layer"),
}
"""Of optimizers the key and value with which they change weights or gradients in every backward, and the way out."""


FLAT_KEYS = r"odb|odb[._]\w+|enable_odb|use_odb"
"""Keys of a YAML that stand for the block: as people misspell it, and as patched forks of LLaMA-Factory have them."""


def is_meant_for_block(key: Any, value: Any) -> bool:
    """Whether it is `odb:`, or in its place: `--odb`, `ODB`, `odb.token_budget`, `enable_odb`, or a mapping under
    another name with our budget in it."""
    if re.fullmatch(FLAT_KEYS, str(key).strip("-"), re.IGNORECASE):
        return key == "odb" or key not in declared_arguments()  # a fork may have such a key
    return isinstance(value, Mapping) and "token_budget" in value


def check_keys(args: Mapping[Any, Any]) -> None:
    """Refuse keys that are meant for the block and are not in it, and blocks that have another name."""
    for key, value in args.items():
        if key != "odb" and is_meant_for_block(key, value):
            raise ConfigError(
                f"{key}: there is no such key; write a block `odb:` in the YAML, with `token_budget: 8192` indented "
                "below it, or `odb.KEY=VALUE` as an override."
            )
    if "odb" in args:
        shared = (*SHARED_KEYS, *(STREAMING_KEYS if args.get("streaming") else ()))
        ours = {item.name for item in dataclasses.fields(ODBConfig)}.difference(shared)
        for key in args:
            if key in ours:
                raise ConfigError(f"{key}: {quoted(args[key])} stands beside odb:, not in it; indent it by two spaces.")


def check_block(args: Mapping[str, Any]) -> ODBConfig:
    """Check arguments that hold an `odb:` block before LLaMA-Factory reads them; returns what the block says.

    Raises a one-line `ConfigError`; from now on such errors, if uncaught, end the process in that line.
    """
    uncaught.install()
    config = ODBConfig.from_block(args["odb"])
    check_keys(args)
    check_backend()
    check_values(args)
    if args.get("do_train"):
        _check_arguments(args.get)
    return config


def checked(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with an `odb:` block, as a patched fork goes on with them; raises as `check_block` does."""
    args = with_whole_documents(with_neat_packing_as_layout(args))
    check_block(args)
    return with_local_files_by_index(args)


def with_whole_documents(args: Mapping[str, Any]) -> dict[str, Any]:
    """`args` for LLaMA-Factory, which packs the documents of pre-training unless it is told not to."""
    if args.get("stage") != "pt" or args.get("packing") is not None:
        return dict(args)
    logger.info(
        "stage pt: documents stay whole (`packing: false`); without odb LLaMA-Factory would cut them into blocks of "
        "cutoff_len tokens, and what is longer than that is cut off now"
    )
    return {**args, "packing": False}


def check_backend() -> None:
    """Refuse what LLaMA-Factory's environment variables select."""
    for name, what in BACKENDS.items():
        if os.environ.get(name, "").lower() in ("true", "y", "1"):
            raise ConfigError(
                f"{name}: {quoted(os.environ[name])} selects {what}; unset {name} or remove the odb: block."
            )


def check_combination(
    model_args: Any, data_args: Any, training_args: Any, finetuning_args: Any, config: ODBConfig | None = None
) -> None:
    """Raise a one-line `ConfigError` naming key, value and way out for what cannot work with odb. Collective: where one
    rank is refused, or the arguments of the ranks differ, all ranks end for the same reason.

    config: the block, where `data_args` do not hold it as a patched fork's do.
    """
    from odb_factory.llamafactory import dataset
    from odb_factory.llamafactory.dataset import compare_arguments
    from odb_factory.training.checks import check_arguments, check_stream

    dataset.forget()
    config = config or ODBConfig.from_block(data_args.odb)
    owners = (finetuning_args, model_args, data_args)

    def value_of(key: str, default: Any = None) -> Any:
        return next((getattr(owner, key) for owner in (*owners, training_args) if hasattr(owner, key)), default)

    problem = None
    if not training_args.do_train:
        logger.info("the odb: block has no effect: do_train is false")
    else:
        try:
            _check_arguments(value_of)
            _check_auto(config, value_of)
            check_arguments(training_args, config)
            if value_of("streaming"):
                check_stream(config)
            check_layout(config, value_of)
            check_losses(config, model_args, training_args, value_of)
        except ConfigError as error:
            problem = error
    compare_arguments(owners, training_args, config, problem)


def _check_auto(config: ODBConfig, value_of: Callable[..., Any]) -> None:
    stage = value_of("stage", "sft")
    if config.has_auto and STAGES[stage].prepares_steps:
        _refuse(
            f"odb.{config.auto_keys[0]}",
            AUTO,
            f"{AUTO} tries micro-batches one by one, and stage {stage} prepares whole optimizer steps; set a number",
        )


def _check_arguments(value_of: Callable[..., Any]) -> None:
    """value_of(key, default): an argument of LLaMA-Factory's, as it stands in the YAML or as it has been read."""
    stage = value_of("stage", "sft")
    if stage == "ppo":
        _refuse("stage", stage, "PPO generates its own batches while training; remove the odb: block")
    if stage not in STAGES:
        _refuse("stage", stage, f"odb trains stage {', '.join(STAGES)}; remove the odb: block")
    why = STAGES[stage].refuse(value_of)
    if why is not None:
        raise ConfigError(why)
    for key, why in REFUSED.items():
        if value_of(key):
            _refuse(key, value_of(key), why)
    for optimizer, (key, value, way_out) in AT_A_BACKWARD.items():
        if value_of(optimizer) and value_of(key) == value:
            _refuse(key, value, f"it acts in every backward, of which odb makes several an optimizer step; {way_out}")
    if not value_of("ignore_pad_token_for_loss", True):
        _refuse(
            "ignore_pad_token_for_loss",
            False,
            "padding would carry loss and its amount depends on which samples share a micro-batch; set it to true",
        )


def _refuse(key: str, value: Any, why: str) -> None:
    raise ConfigError(f"{key}: {quoted(value)} does not go with odb: {why}.")
