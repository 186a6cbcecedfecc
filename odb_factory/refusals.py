"""Settings that cannot work, as tables with a row for each.

The tables: for the block in `odb_factory.config`, for a loop in `odb_factory.loader`, for LLaMA-Factory's YAML
in `odb_factory.llamafactory.block`, for every Trainer in `odb_factory.training.checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.version import Version

from odb_factory.errors import ConfigError, quoted

__version__ = "0.2.0"


def installed_version(package: str) -> str | None:
    """The version of a package; None if not installed. odb_factory itself may run without being installed."""
    if package == "odb_factory":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Settings:
    """Attributes for the rows of a table: the attribute or key of the first owner that has the name, else None."""

    def __init__(self, *owners: Any):
        self._owners = owners

    def __getattr__(self, name: str) -> Any:
        for owner in self._owners:
            if isinstance(owner, Mapping):
                if name in owner:
                    return owner[name]
            elif hasattr(owner, name):
                return getattr(owner, name)
        return None

    def at(self, key: str) -> Any:
        """The value of a dotted key, such as `accelerator_config.split_batches`; None if the key is missing."""
        value: Any = self
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        return value


@dataclass(frozen=True, slots=True)
class Refusal:
    """A setting that cannot work. Message: `{key}: {its value} {why}; {way_out}.`

    key: as the user writes it, dotted if it is nested. applies: settings -> whether they are refused. In `why` and
    `way_out`, `{found}` is the value that `applies` returns and `{s.NAME}` is a setting.
    """

    key: str
    applies: Callable[[Any], Any]
    why: str
    way_out: str


def refuse(rows: Iterable[Refusal], *owners: Any) -> None:
    """Raise one `ConfigError` for all rows that apply to the settings of these owners."""
    settings = Settings(*owners)
    refused = [(row, value) for row in rows if (value := row.applies(settings))]
    if refused:
        raise ConfigError(
            " ".join(
                f"{row.key}: {quoted(settings.at(row.key))} "
                + f"{row.why}; {row.way_out}.".format(s=settings, found=value)
                for row, value in refused
            )
        )


# ----------------------------------------------------------------------------------------------------------------------
# For a loop and for a Trainer.

SUMS_OFFLOADED_GRADIENTS = "0.19.0"
"""The first DeepSpeed that adds up the gradients of all micro-batches with ZeRO-2 and an optimizer on the CPU. Earlier
releases keep the first and the last (pull request 7967), or only the last if the accumulation is 1 (7981)."""


def offloads_optimizer(zero: Mapping[str, Any]) -> bool:
    """zero: the section `zero_optimization` of a DeepSpeed configuration."""
    return bool((zero.get("offload_optimizer") or {}).get("device", "none") != "none")


def _loses_gradients(deepspeed: Mapping[str, Any]) -> str | None:
    """The installed release of DeepSpeed, if it does not add up the gradients of all micro-batches."""
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
