"""Files of what was saved: JSON with a checksum, written whole or not at all, and read strictly."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from odb_factory.data.resume.fields import VERSION, Fields
from odb_factory.errors import DataError, one_line


def write_checked(path: Path, content: dict[str, Any]) -> None:
    """Write `content` (JSON types): under another name first, which no other process can have, then in its place."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with fresh.open("x", encoding="utf-8") as file:
            json.dump({"version": VERSION, "checksum": _checksum(content), "content": content}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove what a process that was killed in `write_checked` has left in a folder."""
    for path in folder.glob(".odb_*.json.*"):
        path.unlink(missing_ok=True)


def read_checked(path: Path) -> Fields:
    """What `write_checked` has written. Raises `DataError`, a clause without the path, where it is something else."""
    file = Fields(read_json(path))
    version = file.value("version")
    if version != VERSION:
        raise DataError(f"it has version {version!r} of the data state, and this odb_factory reads {VERSION}")
    content = file.mapping("content")
    if file.value("checksum") != _checksum(content):
        raise DataError("its checksum is not that of its content: it was edited or damaged")
    return file.part("content")


def read_json(path: Path) -> Any:
    """Raises `DataError`, a clause without the path, where the file is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError("it is missing") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: of JSON and of UTF-8 too
        raise DataError(f"it cannot be read ({one_line(error)})") from None


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
