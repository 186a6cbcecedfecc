"""The files of a run, read while they may still be written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class FilesRead:
    """What was read. broken: by file, the lines (or whole files) that are no JSON object or lack what they must have.

    half_written: files whose last line has no end yet, as in a run under way; that line is left out.
    """

    names: list[str] = field(default_factory=list)
    broken: dict[str, int] = field(default_factory=dict)
    half_written: list[str] = field(default_factory=list)

    def count_broken(self, path: Path) -> None:
        self.broken[path.name] = self.broken.get(path.name, 0) + 1

    def lines(self, path: Path) -> Iterator[dict[str, Any]]:
        """The records of a file of JSON lines, one at a time; none where there is no such file."""
        if not path.is_file():
            return
        self.names.append(path.name)
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                record = _object(line)
                if record is not None:
                    yield record
                elif not line.endswith("\n"):
                    self.half_written.append(path.name)
                elif line.strip():
                    self.count_broken(path)

    def whole(self, path: Path) -> dict[str, Any]:
        """A file of one JSON object; empty where there is none."""
        if not path.is_file():
            return {}
        name = path.name if not path.parent.name.startswith("checkpoint-") else f"{path.parent.name}/{path.name}"
        self.names.append(name)
        record = _object(path.read_text(encoding="utf-8", errors="replace"))
        if record is None:
            self.broken[name] = self.broken.get(name, 0) + 1
        return record or {}


def _object(text: str) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
