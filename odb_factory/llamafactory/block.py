"""Settings of LLaMA-Factory that do not work with an `odb:` block, refused before a model is loaded.

`checked` checks the arguments of the YAML before LLaMA-Factory reads them, if possible before processes start;
`check_combination` checks LLaMA-Factory's parsed arguments. The plugin's hooks and patched forks (`patches/` in the
repository) call both. `checked` imports nothing heavy. The rules of the block itself are in `odb_factory.config`, those
of every Trainer in `odb_factory.training.checks`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from odb_factory.config import ODBConfig, refusals_of_auto
from odb_factory.errors import ConfigError, quoted
from odb_factory.llamafactory import uncaught
from odb_factory.llamafactory.stages import STAGES
from odb_factory.log import get_logger
from odb_factory.refusals import Refusal, Settings, refuse

logger = get_logger(__name__)

FLAT_KEYS = r"odb|odb[._]\w+|enable_odb|use_odb|token_budget"
"""Keys that mean the block: misspellings, and the keys of forks of LLaMA-Factory."""


def is_meant_for_block(key: Any, value: Any) -> bool:
    """Whether a key is `odb:` or means it: `--odb`, `ODB`, `odb.token_budget`, `enable_odb`, or any mapping with a
    `token_budget`."""
    is_flat = re.fullmatch(FLAT_KEYS, str(key).strip("-"), re.IGNORECASE)
    return is_flat is not None or (isinstance(value, Mapping) and "token_budget" in value)


WITHOUT = "odb=null"
"""The override that trains a YAML without its block."""


def without_null(args: dict[Any, Any]) -> dict[Any, Any]:
    """Delete `odb` from the arguments if the override `odb=null` has emptied it; an `odb:` without keys stays."""
    if WITHOUT in sys.argv and args.get("odb", "") is None:
        del args["odb"]  # in place: LLaMA-Factory hands the same arguments on
    return args


def is_given(args: Mapping[Any, Any]) -> bool:
    """Whether arguments have a block, or a key that means one."""
    return any(is_meant_for_block(key, value) for key, value in args.items())


def check_keys(args: Mapping[Any, Any], *, is_v1: bool = False) -> None:
    """Refuse keys of the block that stand outside it, and a block with another name.

    is_v1: the arguments are those of LLaMA-Factory's next trainer.
    """
    for key, value in args.items():
        if key != "odb" and is_meant_for_block(key, value):
            raise ConfigError(
                f"{key}: there is no such key; write a block `odb:` in the YAML, with `token_budget: 8192` indented "
                "below it, or `odb.KEY=VALUE` as an override."
            )
    if "odb" in args:
        ours = {field.name for field in dataclasses.fields(ODBConfig)}
        if is_v1:  # which has a key of this name
            ours -= {"global_batch_size"}
        if args.get("streaming"):  # for which LLaMA-Factory has a key of this name
            ours -= {"buffer_size"}
        for key in args:
            if key in ours:
                raise ConfigError(f"{key}: {quoted(args[key])} stands beside odb:, not in it; indent it by two spaces.")


def checked(args: Mapping[str, Any]) -> dict[str, Any]:
    """Check arguments that have an `odb:` block, before LLaMA-Factory reads them; returns them with `packing: false`
    for stage pt, where LLaMA-Factory would cut documents into blocks.

    Raises a one-line `ConfigError`; from now on an uncaught one ends the process in that line.
    """
    uncaught.install()
    check_keys(args)
    config = ODBConfig.from_block(args["odb"])
    refuse(BACKENDS, os.environ)
    rows = (*_wrong_types(args), *YAML, *(OPTIONS if args.get("do_train") else ()))
    refuse(rows, {"odb": config}, args, DEFAULTS)
    keeps_documents = args.get("stage") == "pt" and args.get("packing") is None
    return {**args, "packing": False} if keeps_documents else dict(args)


def is_enabled(name: str) -> bool:
    """Whether an environment variable is true, as LLaMA-Factory reads it."""
    return os.environ.get(name, "").lower() in ("true", "y", "1")


ARGUMENTS = ("ModelArguments", "DataArguments", "TrainingArguments", "FinetuningArguments", "GeneratingArguments")
KINDS: Mapping[type, str] = {int: "a whole number", float: "a number", bool: "true or false"}
"""Types of keys that take no text, list or mapping; a message names the first that a key takes."""


def _wrong_types(args: Mapping[str, Any]) -> Iterator[Refusal]:
    """Refuse values of a wrong type, for which another library would raise an error that does not name the key.

    The types are LLaMA-Factory's, if it has been imported: always when its arguments are read.
    """
    hparams = sys.modules.get("llamafactory.hparams")
    declared: dict[str, Any] = {}
    for name in ARGUMENTS if hparams is not None else ():
        declared |= get_type_hints(getattr(hparams, name))
    for key, value in args.items():
        kinds = set(get_args(declared.get(key)) or (declared.get(key),)) - {type(None)}
        if isinstance(value, str | list | dict) and kinds and kinds <= KINDS.keys():
            kind = next(words for kind, words in KINDS.items() if kind in kinds)
            yield Refusal(key, lambda _: True, f"is not {kind}", f"write {kind}, without quotes")


def _missing_model(s: Settings) -> str | None:
    """The current folder if the model's path does not exist: transformers would look for the name on the hub."""
    name = s.model_name_or_path
    is_path = isinstance(name, str) and (name.startswith(("/", ".", "~")) or name.count("/") > 1)
    return os.getcwd() if is_path and not os.path.exists(name) else None


def _missing_checkpoint(s: Settings) -> str | None:
    """The checkpoints of `output_dir`, if the one that `resume_from_checkpoint` names does not exist."""
    checkpoint = s.resume_from_checkpoint
    if not checkpoint or not isinstance(checkpoint, str | bool) or os.environ.get("NNODES", "1") != "1":
        return None  # the disks of nodes may differ; the ranks compare them later
    names = sorted((folder.name for folder in Path(str(s.output_dir)).glob("checkpoint-*")), key=lambda n: (len(n), n))
    is_there = names if checkpoint is True else os.path.isdir(checkpoint)
    return None if is_there else f"{s.output_dir} has {', '.join(names[-3:]) or 'none'}"


DEFAULTS = {"stage": "sft", "ignore_pad_token_for_loss": True, "dataloader_num_workers": 0}
"""LLaMA-Factory's values of keys that the YAML leaves out."""
WHY_NOT_SHIFTED = "it shifts attention along the whole row, across samples"
"""Why `shift_attn` does not work with flat micro-batches."""


def _backend(variable: str, backend: str) -> Refusal:
    return Refusal(
        variable,
        lambda _: is_enabled(variable),
        f"selects {backend}, whose trainer odb cannot drive",
        f"unset {variable} or remove the odb: block",
    )


BACKENDS = (_backend("USE_MCA", "use_mca (Megatron)"), _backend("USE_MEGATRON_BRIDGE", "the Megatron bridge"))
YAML = (
    Refusal("dataloader_num_workers",
        lambda s: isinstance(count := s.dataloader_num_workers, bool) or not isinstance(count, int) or count < 0,
        "is not a whole number of at least 0", "write a number, without quotes"),
    Refusal("model_name_or_path", _missing_model, "is not on this machine, seen from {found}",
        "give the model's folder, or its name on the hub (ORGANIZATION/MODEL)"),
    Refusal("resume_from_checkpoint", lambda s: not isinstance(s.resume_from_checkpoint, str | bool | None),
        "is not the path of a checkpoint folder", "name a folder, or remove the key"),
    Refusal("resume_from_checkpoint", _missing_checkpoint, "names no checkpoint folder on this machine",
        "name a folder (output_dir {found}), or remove the key to start from the beginning"),
)  # fmt: skip
"""Mistakes in the YAML that are refused even if nothing is trained."""


def _set(key: str, why: str, way_out: str = "remove the key") -> Refusal:
    return Refusal(key, lambda s: getattr(s, key), why, way_out)


def _at_a_backward(optimizer: str, key: str, value: object, way_out: str) -> Refusal:
    return Refusal(
        key,
        lambda s: getattr(s, optimizer) and getattr(s, key) == value,
        "changes weights or gradients in every backward, of which odb makes several an optimizer step",
        way_out,
    )


OPTIONS = (
    Refusal("stage", lambda s: s.stage == "ppo", "generates its batches while it trains", "remove the odb: block"),
    Refusal("stage", lambda s: s.stage not in (*STAGES, "ppo"), f"is not a stage that odb trains ({', '.join(STAGES)})",
        "change it, or remove the odb: block"),
    *(
        _set(key, "selects a trainer whose data path odb cannot drive")
        for key in ("use_mca", "use_kt", "use_hyper_parallel")
    ),
    _set("use_unsloth", "puts Unsloth's code in place of the Trainer's that odb builds on"),
    _set("mixture_of_depths", "chooses tokens by the padding of their row, and odb makes other rows"),
    *(
        _set(key, "cuts samples into packs, and odb forms micro-batches of whole samples",
            "remove the key (with `layout: flat` in the block whole samples share a row, without padding)")
        for key in ("packing", "neat_packing")
    ),
    Refusal("streaming", lambda s: s.streaming and s.stage == "kto",
        "does not go with odb and stage kto, where a row is preprocessed with the row before it", "set it to false"),
    Refusal("streaming", lambda s: s.streaming and s.tokenized_path,
        "does not go with tokenized_path and odb", "set it to false: tokenized rows are read by index"),
    Refusal("pref_bco_weight",
        lambda s: s.stage == "dpo" and (s.pref_bco_weight or 0) > 1e-6,  # up to it the trainer leaves the loss out
        "adds a loss whose baseline is a running mean over micro-batches, of which odb makes others", "remove the key"),
    _at_a_backward("use_galore", "galore_layerwise", True, "set galore_layerwise: false"),
    _at_a_backward("use_apollo", "apollo_layerwise", True, "set apollo_layerwise: false"),
    _at_a_backward("use_badam", "badam_mode", "ratio", "set badam_mode: layer"),
    Refusal("ignore_pad_token_for_loss", lambda s: not s.ignore_pad_token_for_loss,
        "lets padding carry loss, and its amount depends on which samples share a micro-batch", "set it to true"),
    # Options that do not work with some keys of the block
    *refusals_of_auto(lambda s: s.stage in STAGES and STAGES[s.stage].prepares_steps,
        "tries micro-batches one by one, and stage {s.stage} prepares whole optimizer steps", "set a number"),
    Refusal("shift_attn", lambda s: s.shift_attn and s.odb.layout == "flat",
        f"does not go with odb.layout 'flat': {WHY_NOT_SHIFTED}", "remove it, or set `layout: padded`, or auto"),
)  # fmt: skip
"""Options of a training that do not work with a block."""


def check_combination(
    model_args: Any, data_args: Any, training_args: Any, finetuning_args: Any, config: ODBConfig | None = None
) -> None:
    """Raise a one-line `ConfigError` with key, value and way out for options that cannot work with odb. Collective: if
    a rank is refused, or the arguments of the ranks differ, all ranks end for the same reason.

    config: the block; None in a patched fork, whose `data_args` hold it.
    """
    from odb_factory.data.ranks import block_settings, compare, gather_once, releases
    from odb_factory.llamafactory import dataset
    from odb_factory.training.checks import check_arguments, of_arguments

    dataset.forget()
    config = config or ODBConfig.from_block(data_args.odb)
    owners = (finetuning_args, model_args, data_args)

    problem = None
    if not training_args.do_train:
        logger.info("the odb: block has no effect: do_train is false")
    else:
        try:
            if finetuning_args.stage == "pt" and data_args.tokenized_path is None:
                logger.info(
                    "stage pt: documents stay whole (`packing: false`) and are cut off at cutoff_len; without odb "
                    "LLaMA-Factory cuts them into blocks of cutoff_len tokens"
                )
            refuse(OPTIONS, {"odb": config}, *owners)
            check_arguments(training_args, config, is_stream=data_args.streaming)
        except ConfigError as error:
            problem = error
    settings = {**releases(), **of_arguments(*owners), **block_settings(config), **of_arguments(training_args)}
    compare(settings, lambda message: gather_once(message, config.exchange_timeout_s), problem=problem)


# LLaMA-Factory's next trainer (`USE_V1=1`).

V1_COMMANDS = ("sft",)
"""Commands of v1, besides `train`, that odb drives."""
V1_MEANINGLESS = (
    "eval_token_budget", "memory_fraction", "oom", "recompute", "balance_encoder", "lr_scale", "join",
    "global_batch_size", "loss_scaling", "row_multiple",
)  # fmt: skip
"""Keys of the block for optimizer steps, losses and memory, which are v1's own."""


def _meaningless(key: str) -> Refusal:
    default = getattr(ODBConfig(token_budget=1), key)
    return Refusal(
        f"odb.{key}", lambda s: getattr(s.odb, key) != default, "has no meaning under USE_V1", "leave it out"
    )


def _context_parallel(key: str) -> Refusal:
    why = "is the size of context parallelism, which does not go with odb"
    return Refusal(key, lambda s: s.at(key) not in (None, 1), why, "set it to 1")


V1 = (
    *map(_meaningless, V1_MEANINGLESS),
    *refusals_of_auto(lambda _: True, "has no meaning under USE_V1", "set a number"),
    Refusal("batching_strategy", lambda s: s.batching_strategy not in (None, "normal"),
        "cuts optimizer steps, as odb does", "remove the key, or the odb: block"),
    Refusal("dist_config", lambda s: not isinstance(s.dist_config, Mapping) and s.dist_config not in (None, "fsdp2"),
        "does not go with odb under USE_V1, which trains with fsdp2 or DDP", "change it"),
    Refusal("dist_config.name", lambda s: s.at("dist_config.name") not in (None, "fsdp2"),
        "does not go with odb under USE_V1, which trains with fsdp2 or DDP", "change it"),
    _context_parallel("cp_size"),
    _context_parallel("dist_config.cp_size"),
)  # fmt: skip


def check_v1(args: Mapping[str, Any]) -> ODBConfig:
    """Check the arguments of v1 and return the config of their `odb:` block. Raises a one-line `ConfigError`."""
    uncaught.install()
    check_keys(args, is_v1=True)
    config = ODBConfig.from_block(args["odb"])
    refuse(V1, {"odb": config}, args)
    return config
