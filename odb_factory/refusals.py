"""Settings that cannot work, as tables with one row for each; standard library only.

The tables: of the block in `odb_factory.config`, of a loop in `odb_factory.loop.dataloader`, of LLaMA-Factory's YAML in
`odb_factory.llamafactory.block`, of every Trainer in `odb_factory.training.checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from odb_factory.errors import ConfigError, quoted


class Settings:
    """What the rows of a table read: a name is the attribute or key of the first owner that has it, else None."""

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
        """The value of a dotted key, such as `accelerator_config.split_batches`; None if there is none."""
        value: Any = self
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        return value


@dataclass(frozen=True, slots=True)
class Refusal:
    """One setting that cannot work: `{key}: {its value} {why}; {way_out}.`

    key: as the user writes it, dotted if it lies in another. applies: settings -> whether they are refused. What it
    returns stands as `{found}` in `why` and `way_out`, and a setting as `{s.NAME}`.
    """

    key: str
    applies: Callable[[Any], Any]
    why: str
    way_out: str


def refuse(rows: Iterable[Refusal], *owners: Any) -> None:
    """Raise one `ConfigError` that names every row that applies to the settings of these owners."""
    settings = Settings(*owners)
    refused = [(row, found) for row in rows if (found := row.applies(settings))]
    if refused:
        raise ConfigError(
            " ".join(
                f"{row.key}: {quoted(settings.at(row.key))} "
                + f"{row.why}; {row.way_out}.".format(s=settings, found=found)
                for row, found in refused
            )
        )
