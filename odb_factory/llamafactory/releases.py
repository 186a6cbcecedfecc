"""Releases of LLaMA-Factory: which are known, and where they differ in what odb_factory uses."""

from __future__ import annotations

import ast
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from odb_factory.log import get_logger

SUPPORTED = ">=0.9.4,<1"
"""As in pyproject.toml."""
NEWEST_TESTED = "0.9.6.dev0"
"""LLaMA-Factory's main branch of 2026-08-18."""
HOMES_OF_READ_ARGS = ("llamafactory.hparams.parser", "llamafactory.hparams", "llamafactory.extras.arguments")
"""Where releases have the function that reads a command line and its YAML: the parser has defined or imported it so
far, and the main branch is about to move it."""
DEEPSPEED = "deepspeed>=0.10.0,<=0.18.4"
"""requirements/deepspeed.txt of 0.9.5, which is not installed; the metadata of earlier releases have theirs."""

logger = get_logger(__name__)


def is_newer(version: str | None) -> bool:
    """Whether a release came after all that odb_factory has been tested with; False for what is no version."""
    try:
        return version is not None and Version(version) > Version(NEWEST_TESTED)
    except InvalidVersion:
        return False


@functools.cache
def log_if_newer() -> None:
    """Log once, on rank 0, that nobody has tried this release; what it lacks is named where it is missing."""
    try:
        version = metadata.version("llamafactory")
    except metadata.PackageNotFoundError:  # a source tree on the path
        return
    if is_newer(version) and int(os.environ.get("RANK") or 0) == 0:
        logger.warning(
            "LLaMA-Factory %s is newer than what odb_factory was tested with (%s); it has all that odb_factory needs, "
            "so the training continues",
            version,
            NEWEST_TESTED,
        )


def find_read_args() -> Callable[[Any], Any] | None:
    """LLaMA-Factory's `read_args`, wherever this release has it; None if nowhere."""
    for home in HOMES_OF_READ_ARGS:
        try:
            found = getattr(importlib.import_module(home), "read_args", None)
        except ImportError:
            continue
        if found is not None:
            return found
    return None


def pins() -> dict[str, SpecifierSet]:
    """The versions of other packages that the installed LLaMA-Factory asks for, by package.

    From its metadata (with the extra `deepspeed`) and from what it checks when it starts.
    """
    asked = [Requirement(text) for text in metadata.requires("llamafactory") or ()]
    asked = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": "deepspeed"})]
    asked += map(Requirement, _checked_at_start())
    if not any(one.name == "deepspeed" for one in asked):
        asked.append(Requirement(DEEPSPEED))
    found: dict[str, SpecifierSet] = {}
    for one in asked:
        if one.specifier:
            found[one.name] = found.get(one.name, SpecifierSet()) & one.specifier
    return found


def _checked_at_start() -> Iterator[str]:
    """The requirements in the source of LLaMA-Factory's `check_dependencies`, without importing it."""
    package = find_spec("llamafactory")
    if package is None or not package.submodule_search_locations:
        return
    path = Path(package.submodule_search_locations[0], "extras", "misc.py")
    if not path.exists():
        return
    for function in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(function, ast.FunctionDef) and function.name == "check_dependencies":
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "check_version":
                    yield ast.literal_eval(node.args[0])
