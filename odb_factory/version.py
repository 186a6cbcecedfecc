"""The release of this package, and of others as they are installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from odb_factory.refusals import Refusal

__version__ = "0.2.0"
SUMS_OFFLOADED_GRADIENTS = "0.19.0"
"""The first DeepSpeed that adds up the gradients of all micro-batches with ZeRO-2 and an optimizer on the CPU. Earlier
ones keep the first and the last (its pull request 7967), or the last only if the accumulation is 1 (7981)."""


def installed_version(package: str) -> str | None:
    """Of a distribution; None where it is not installed. This package may run from a folder that is not."""
    if package == "odb_factory":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def offloads_optimizer(zero: Mapping[str, Any]) -> bool:
    """zero: the section `zero_optimization` of a configuration of DeepSpeed."""
    return (zero.get("offload_optimizer") or {}).get("device", "none") != "none"


def _loses_gradients(deepspeed: Mapping[str, Any]) -> str | None:
    """The installed release of DeepSpeed, if it does not add up those of all micro-batches with this configuration."""
    from packaging.version import Version  # not where torch is imported: every process does, and needs this file

    zero, release = deepspeed.get("zero_optimization", {}), installed_version("deepspeed")
    is_hit = zero.get("stage") == 2 and offloads_optimizer(zero)
    return release if is_hit and release and Version(release) < Version(SUMS_OFFLOADED_GRADIENTS) else None


GRADIENTS_LOST = Refusal(
    "deepspeed.zero_optimization.offload_optimizer",
    lambda s: _loses_gradients(s.deepspeed),
    "with ZeRO-2 loses the gradients of micro-batches in DeepSpeed {found} (without odb too, from "
    "gradient_accumulation_steps: 3 on)",
    f"install deepspeed>={SUMS_OFFLOADED_GRADIENTS}, use ZeRO-3, or remove offload_optimizer",
)
