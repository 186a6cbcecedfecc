"""The `odb:` block and what it cannot be combined with, checked before a model is loaded.

`check_block` sees the arguments as they stand in the YAML, before LLaMA-Factory reads them and where possible before
processes are started; `check_combination` sees what LLaMA-Factory has made of them. Both are called by the plugin's
hooks and by patched forks (`patches/` in the repository). Nothing heavy is imported for the first of them.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from odb_factory.config import ODBConfig
from odb_factory.config_values import AUTO
from odb_factory.errors import ConfigError, quoted
from odb_factory.llamafactory import layout, streaming, uncaught
from odb_factory.llamafactory.stages import STAGES
from odb_factory.llamafactory.values import check_values, declared_arguments
from odb_factory.log import get_logger

logger = get_logger(__name__)

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
    args = with_whole_documents(layout.with_neat_packing_as_layout(args))
    check_block(args)
    return streaming.with_local_files_by_index(args)


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
    from odb_factory.llamafactory import losses, sources
    from odb_factory.llamafactory.agreement import compare_arguments
    from odb_factory.training.checks import check_arguments, check_stream

    sources.forget()
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
            layout.check_layout(config, value_of)
            losses.check_losses(config, model_args, training_args, value_of)
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
