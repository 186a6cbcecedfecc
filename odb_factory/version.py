"""The release of this package, and of others as they are installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

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


def why_gradients_are_lost(deepspeed: Mapping[str, Any]) -> str | None:
    """Why the installed DeepSpeed does not add up those of all micro-batches with this configuration."""
    from packaging.version import Version  # not where torch is imported: every process does, and needs this file

    zero, release = deepspeed.get("zero_optimization", {}), installed_version("deepspeed")
    is_hit = zero.get("stage") == 2 and offloads_optimizer(zero)
    if not is_hit or release is None or Version(release) >= Version(SUMS_OFFLOADED_GRADIENTS):
        return None
    return (
        f"deepspeed: release {release} loses the gradients of micro-batches with ZeRO-2 and offload_optimizer "
        "(without odb too, from gradient_accumulation_steps: 3 on); install "
        f"deepspeed>={SUMS_OFFLOADED_GRADIENTS}, use ZeRO-3, or remove offload_optimizer."
    )
