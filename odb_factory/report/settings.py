"""What a run was asked to do by one set of names, whoever wrote it down, and two runs side by side.

The names are those of LLaMA-Factory's YAML and of pip; the Trainer's model card has others for the same settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

BLOCK = "odb."
RENAMED = {
    "num_devices": "ranks",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "training_steps": "max_steps",
    "lr_scheduler_warmup_steps": "warmup_steps",
    "lr_scheduler_warmup_ratio": "warmup_ratio",
}
"""Of the model card."""
PACKAGES = {"pytorch": "torch"}
_OPTIMIZER = re.compile(r"Use (\S+)(?: with (.*))?")


def settings(asked: Mapping[str, Any]) -> dict[str, str]:
    """asked: see `asked`. Those that are known, as text."""
    found: dict[str, str] = {}
    if asked.get("ranks"):
        found["ranks"] = str(asked["ranks"])
    if asked.get("layout"):
        found["layout taken"] = f"{asked['layout']['name']} ({asked['layout']['reason']})"
    found |= _texts(asked.get("about"))
    for name, value in _texts(asked.get("arguments")).items():
        if name == "optimizer" and (match := _OPTIMIZER.fullmatch(value)):
            found["optim"] = _member(match[1])
            found |= {"optimizer arguments": match[2]} if match[2] else {}
        else:
            found[RENAMED.get(name, name)] = _member(value)
    found |= {BLOCK + name: value for name, value in _texts(asked.get("block")).items()}
    for name, value in _texts(asked.get("versions")).items():
        found[f"version of {PACKAGES.get(name.lower(), name.lower())}"] = value
    return found


def side_by_side(asked: Mapping[str, Any], other: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line for each setting that either tells: `name`, `value`, `other_value`, and whether they are the `same`, None
    where one does not tell. Those that both tell come first."""
    mine, theirs = settings(asked), settings(other)
    lines = []
    for name in dict.fromkeys((*mine, *theirs)):
        values = mine.get(name), theirs.get(name)
        same = None if values[0] is None or values[1] is None else _same(name, values[0], values[1])
        lines.append({"name": name, "value": values[0], "other_value": values[1], "same": same})
    return sorted(lines, key=lambda line: (line["same"] is None, line["name"].startswith(BLOCK)))


def _texts(values: Mapping[str, Any] | None) -> dict[str, str]:
    return {
        name: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in (values or {}).items()
        if value is not None
    }


def _member(value: str) -> str:
    """ "OptimizerNames.ADAMW_TORCH", a member of an enumeration as some releases print it, as its value."""
    match = re.fullmatch(r"[A-Z]\w*\.([A-Z][A-Z0-9_]*)", value)
    return match[1].lower() if match else value


def _same(name: str, mine: str, theirs: str) -> bool:
    if name.startswith("version of ") and "+" not in (mine if "+" in theirs else theirs):
        mine, theirs = mine.split("+")[0], theirs.split("+")[0]  # of a build, which pip leaves out: 2.12.1+cu130
    try:
        return mine == theirs or float(mine) == float(theirs)
    except ValueError:
        return False
