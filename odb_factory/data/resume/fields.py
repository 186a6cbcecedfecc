"""Strict reading of what was saved: typed access to the fields of a JSON object, with errors that name the field."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from odb_factory.errors import DataError

VERSION = 6
"""Of what is saved; another is not read."""


class Fields:
    """The fields of a saved object.

    saved: what was read; any type. name: where it stands in the file, for messages ("" for the whole of it).

    Every method raises `DataError` with one short clause (no full stop) where the field is missing, of another type or
    out of range.

        steps = Fields(json.loads(text)).whole("steps")
    """

    def __init__(self, saved: Any, name: str = ""):
        if not isinstance(saved, Mapping):
            raise DataError(f"{f'`{name}`' if name else 'its content'} is {_shown(saved)}, not an object")
        self._saved, self._name = saved, name

    def has(self, key: str) -> bool:
        return key in self._saved

    def value(self, key: str) -> Any:
        if key not in self._saved:
            raise DataError(f"`{self.path(key)}` is missing")
        return self._saved[key]

    def part(self, key: str) -> Fields:
        return Fields(self.value(key), self.path(key))

    def mapping(self, key: str) -> dict[str, Any]:
        return dict(self.part(key)._saved)

    def whole(self, key: str, low: int | None = 0, high: int | None = None) -> int:
        """A whole number of at least `low` and at most `high`."""
        return _whole(self.value(key), self.path(key), low, high)

    def number(self, key: str) -> float:
        """A finite number of at least 0."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise DataError(f"`{self.path(key)}` is {_shown(value)}, not a number of at least 0")
        return value

    def wholes(self, key: str) -> list[int]:
        """A list of whole numbers of at least 0."""
        return [_whole(value, f"{self.path(key)}[{i}]") for i, value in enumerate(self._list(key))]

    def flag(self, key: str) -> bool:
        value = self.value(key)
        if not isinstance(value, bool):
            raise DataError(f"`{self.path(key)}` is {_shown(value)}, not true or false")
        return value

    def counts(self, key: str) -> dict[str, int]:
        """Whole numbers by name."""
        return {str(name): _whole(count, f"{self.path(key)}.{name}") for name, count in self.mapping(key).items()}

    def bytes(self, key: str) -> bytes:
        """What `packed` has made text of."""
        value = self.value(key)
        try:
            return base64.b64decode(value, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise DataError(f"`{self.path(key)}` is {_shown(value)}, not text in base64") from None

    def checksums(self, key: str) -> tuple[int, ...]:
        """What `pack_checksums` has made text of."""
        raw = self.bytes(key)
        if len(raw) % 4:
            raise DataError(f"`{self.path(key)}` has {len(raw)} bytes, not four for each sample")
        return tuple(np.frombuffer(raw, dtype="<u4").tolist())

    def probes(self, key: str) -> tuple[tuple[int, int], ...]:
        """What `pack_probes` has made of (row of the dataset, checksum)."""
        part = self.part(key)
        rows, contents = part.wholes("rows"), part.checksums("content")
        part.require(len(rows) == len(contents), "rows", f"there are {len(contents)} checksums")
        return tuple(zip(rows, contents))

    def require(self, holds: bool, key: str, rule: str) -> None:
        if not holds:
            raise DataError(f"`{self.path(key)}` is {_shown(self._saved.get(key))}, but {rule}")

    def path(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key

    def _list(self, key: str) -> Sequence[Any]:
        value = self.value(key)
        if not isinstance(value, list | tuple):
            raise DataError(f"`{self.path(key)}` is {_shown(value)}, not a list")
        return value


def check_figures(saved: Any, name: str) -> None:
    """Raise `DataError` unless it is made of finite numbers of at least 0, none, flags, and lists and objects of these.

    For figures whose names are the business of whoever saved them.
    """
    if isinstance(saved, Mapping):
        for key, value in saved.items():
            check_figures(value, f"{name}.{key}")
    elif isinstance(saved, list | tuple):
        for i, value in enumerate(saved):
            check_figures(value, f"{name}[{i}]")
    elif saved is not None and not (isinstance(saved, int | float) and math.isfinite(saved) and saved >= 0):
        raise DataError(f"`{name}` is {_shown(saved)}, not a number of at least 0")


def packed(raw: bytes) -> str:
    """Bytes as text of JSON."""
    return base64.b64encode(raw).decode()


def pack_checksums(checksums: Sequence[int]) -> str:
    """Checksums of 32 bits as text of JSON, less than 6 characters each."""
    return packed(np.array(checksums, dtype="<u4").tobytes())


def pack_probes(probes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """(row of the dataset, checksum) as JSON types."""
    return {"rows": [row for row, _ in probes], "content": pack_checksums([content for _, content in probes])}


def _whole(value: Any, name: str, low: int | None = 0, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise DataError(f"`{name}` is {_shown(value)}, not a whole number")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise DataError(f"`{name}` is {value}, not {bounds}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
