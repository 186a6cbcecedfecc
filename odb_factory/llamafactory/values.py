"""Values in the YAML that would end in an error of another library's which does not name the key.

Nothing heavy is imported: the YAML is looked at before processes are started, and once more where it is read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from odb_factory.errors import ConfigError, quoted

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
