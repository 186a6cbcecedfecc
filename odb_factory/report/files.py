"""The files of a run, read while they may still be written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odb_factory.report.shapes import Check


@dataclass
class FilesRead:
    """What was read. broken: by file, how many lines are no JSON object or not what they must be; see `shapes`.

    broken_files: files of one JSON object of which the same is true. half_written: files whose last line has no end
    yet, as in a run under way; that line is left out.
    """

    names: list[str] = field(default_factory=list)
    broken: dict[str, int] = field(default_factory=dict)
    broken_files: list[str] = field(default_factory=list)
    half_written: list[str] = field(default_factory=list)

    def lines(self, path: Path, is_right: Check) -> Iterator[dict[str, Any]]:
        """The records of a file of JSON lines, one at a time; none where there is no such file."""
        if not path.is_file():
            return
        self.names.append(path.name)
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                record = _object(line)
                if record is None and not line.endswith("\n"):
                    self.half_written.append(path.name)
                elif record is not None and is_right(record):
                    yield record
                elif line.strip():
                    self._count_broken(path.name)

    def whole(self, path: Path, is_right: Check) -> dict[str, Any]:
        """A file of one JSON object; empty where there is none."""
        if not path.is_file():
            return {}
        name = _name(path)
        self.names.append(name)
        record = _object(path.read_text(encoding="utf-8", errors="replace"))
        if record is not None and is_right(record):
            return record
        self.broken_files.append(name)
        return {}

    def those_right(self, path: Path, entries: Iterable[Any], is_right: Check) -> Iterator[dict[str, Any]]:
        """Entries of a list in a file, counted as its lines are."""
        for entry in entries:
            if is_right(entry):
                yield entry
            else:
                self._count_broken(_name(path))

    def _count_broken(self, name: str) -> None:
        self.broken[name] = self.broken.get(name, 0) + 1


def _name(path: Path) -> str:
    return path.name if not path.parent.name.startswith("checkpoint-") else f"{path.parent.name}/{path.name}"


def _object(text: str) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
