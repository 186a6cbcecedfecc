"""What a run was asked to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from odb_factory.report.files import FilesRead
from odb_factory.report.history import History

MODEL_CARD = "README.md"
_SECTION = re.compile(r"^### (Training hyperparameters|Framework versions)$(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"^- ([^:\n]{1,60}): (.{1,300})$|^- (\w+) (\S{1,40})$", re.MULTILINE)


def read_model_card(folder: Path, files: FilesRead) -> dict[str, dict[str, str]]:
    """The settings that the Trainer writes into the model card at the end of a training, by section."""
    path = folder / MODEL_CARD
    if not path.is_file():
        return {}
    found = {}
    for title, text in _SECTION.findall(path.read_text(encoding="utf-8", errors="replace")):
        found[title] = {key or package: value or version for key, value, package, version in _ITEM.findall(text)}
    if found:
        files.names.append(MODEL_CARD)
    return found


def asked(history: History, card: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """block, arguments, about, versions and layout of the last process with odb; else what the model card says."""
    if not history.processes:
        return {
            "from": MODEL_CARD if card else None,
            "arguments": dict(card.get("Training hyperparameters", {})),
            "versions": dict(card.get("Framework versions", {})),
        }
    begin = history.processes[-1].begin
    about = {name: value for name, value in (begin.get("about") or {}).items() if name != "rows_of"}
    found: dict[str, Any] = {
        "from": "odb_log.jsonl",
        "ranks": begin.get("ranks"),
        "block": begin.get("config"),
    }
    return (
        found
        | {name: begin.get(name) for name in ("layout", "arguments")}
        | {
            "about": about,
            "versions": begin.get("versions"),
        }
    )
