"""The `odb:` block and what it cannot be combined with, checked before a model is loaded.

`check_block` and `check_combination` are called by the plugin's hooks and by patched forks (`odb_factory/patches`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from odb_factory.config import ODBConfig
from odb_factory.errors import ConfigError
from odb_factory.llamafactory import sources
from odb_factory.training.enable import check_training_arguments

STAGES = ("sft",)


def check_block(args: Mapping[str, Any]) -> ODBConfig:
    """Check arguments that hold an `odb:` block before LLaMA-Factory reads them; returns what the block says."""
    config = ODBConfig.from_block(args["odb"])
    _check_backend(args)
    sources.forget()
    return config


def _check_backend(args: Mapping[str, Any]) -> None:
    """Refuse trainers other than LLaMA-Factory's own before it reads its arguments, where they are chosen so early."""
    if args.get("use_mca"):
        _refuse("use_mca", args["use_mca"], "the Megatron trainer has a data path of its own; remove the key")
    for name, what in (("USE_MCA", "use_mca (Megatron)"), ("USE_MEGATRON_BRIDGE", "the Megatron bridge")):
        if os.environ.get(name, "").lower() in ("true", "y", "1"):
            raise ConfigError(
                f"{name}: {os.environ[name]!r} selects {what}, which has a trainer of its own that odb cannot drive; "
                f"unset {name} or remove the odb: block."
            )


def check_combination(model_args: Any, data_args: Any, training_args: Any, finetuning_args: Any) -> None:
    """Raise a one-line `ConfigError` naming key, value and way out for what cannot work with odb."""
    if not training_args.do_train:
        return
    if finetuning_args.stage not in STAGES:
        _refuse("stage", finetuning_args.stage, f"odb trains stage {', '.join(STAGES)}; remove the odb: block")
    for owner, key, why in (
        (data_args, "neat_packing", "odb groups whole samples instead of packing them; remove the key"),
        (data_args, "packing", "odb groups whole samples instead of cutting them into packs; remove the key"),
        (data_args, "streaming", "odb reads rows by index, and preprocesses them online anyway; set it to false"),
        (training_args, "predict_with_generate", "it cannot be used while training; evaluate in a run of its own"),
        (model_args, "use_kt", "the KTransformers trainer has a data path of its own; remove the key"),
        (finetuning_args, "use_hyper_parallel", "that trainer has a data path of its own; remove the key"),
        (
            finetuning_args,
            "include_effective_tokens_per_second",
            "it would preprocess the whole dataset once more; read odb/tokens_per_step instead and remove the key",
        ),
    ):
        if getattr(owner, key, None):
            _refuse(key, getattr(owner, key), why)
    if not data_args.ignore_pad_token_for_loss:
        _refuse(
            "ignore_pad_token_for_loss",
            False,
            "padding would carry loss and its amount depends on the grouping; set it to true",
        )
    if training_args.per_device_train_batch_size != 1:
        _refuse(
            "per_device_train_batch_size",
            training_args.per_device_train_batch_size,
            "it sizes batches by tokens; set it to 1 and choose `token_budget` in the odb: block",
        )
    check_training_arguments(training_args)


def _refuse(key: str, value: Any, why: str) -> None:
    raise ConfigError(f"{key}: {value!r} does not go with odb: {why}.")
