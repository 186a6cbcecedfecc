"""Releases of LLaMA-Factory: which are known, and where they differ in what odb_factory uses."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from importlib import metadata
from typing import Any

from packaging.version import InvalidVersion, Version

from odb_factory.log import get_logger

SUPPORTED = ">=0.9.4,<1"
"""As in setup.cfg."""
NEWEST_TESTED = "0.9.6.dev0"
"""LLaMA-Factory's main branch of 2026-08-18."""
HOMES_OF_READ_ARGS = ("llamafactory.hparams.parser", "llamafactory.hparams", "llamafactory.extras.arguments")
"""Where releases have the function that reads a command line and its YAML: the parser has defined or imported it so
far, and the main branch is about to move it."""

logger = get_logger(__name__)


def is_newer(version: str | None) -> bool:
    """Whether a release came after all that odb_factory has been tested with; False for what is no version."""
    try:
        return version is not None and Version(version) > Version(NEWEST_TESTED)
    except InvalidVersion:
        return False


@functools.cache
def tell_if_newer() -> None:
    """Say once, on rank 0, that nobody has tried this release; what it lacks is named where it is missing."""
    try:
        version = metadata.version("llamafactory")
    except metadata.PackageNotFoundError:  # a source tree on the path
        return
    if is_newer(version) and int(os.environ.get("RANK") or 0) == 0:
        logger.warning(
            "LLaMA-Factory %s is newer than what odb_factory was tested with (%s); it has all that odb_factory needs, "
            "so the training goes on",
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
