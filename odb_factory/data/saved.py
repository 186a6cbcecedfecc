"""Saved states: dataclasses as JSON with version and checksum, written whole and read strictly."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import math
import os
import secrets
import types
import typing
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from odb_factory.errors import DataError, one_line

VERSION = 9
"""Of everything that is saved; another version is refused."""

# ----------------------------------------------------------------------------------------------------------------------
# Dataclasses as JSON types, and back.

Positive = Annotated[int, 1]
"""`Annotated[int, n]`: an int of at least n (None: any int); a plain int: at least 0."""
AnyInt = Annotated[int, None]
_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))
_EXPECTED = {
    bool: "true or false", int: "a whole number", float: "a number of at least 0", str: "text", dict: "an object",
    tuple: "a list",
}  # fmt: skip


def dump(value: Any) -> Any:
    """JSON types of a dataclass, or of what it holds. An array of bool becomes text, at most 1/6 byte an entry."""
    if dataclasses.is_dataclass(value):
        return {one.name: dump(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return base64.b64encode(zlib.compress(np.packbits(value).tobytes(), 9)).decode()
    if isinstance(value, Mapping):
        return {key: dump(one) for key, one in value.items()}
    return [dump(one) for one in value] if isinstance(value, list | tuple) else value


def load(kind: Any, saved: Any, name: str = "") -> Any:
    """Undo `dump`. kind: a dataclass, which may check itself in `check()`, or the type of a field.

    Raises `DataError`, one clause that names the field, where it is missing, of another type or out of range. Arrays
    come back rounded up to whole bytes.
    """
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    least: int | None = 0
    if origin is Annotated:
        origin, least = arguments
    if kind is Any:
        return saved
    if origin in (types.UnionType, typing.Union):
        return None if saved is None else load(arguments[0], saved, name)
    if origin is Literal:
        require(saved in arguments, name, saved, f"not {' or '.join(map(str, arguments))}")
        return saved
    if origin is np.ndarray:
        return _load_bits(saved, name)
    if dataclasses.is_dataclass(origin):
        value = kind(**load_fields(saved, name, **_hints(kind)))
        if hasattr(value, "check"):
            value.check()
        return value
    allowed: Any = {float: (int, float), dict: Mapping, tuple: (list, tuple)}.get(origin, origin)
    right = isinstance(saved, allowed) and (origin is bool or not isinstance(saved, bool))  # a bool is an int too
    if origin is float and right:
        right = math.isfinite(saved) and saved >= 0
    require(right, name, saved, f"not {_EXPECTED[origin]}")
    if origin is int:
        require(least is None or saved >= least, name, saved, f"not at least {least}")
    if origin is dict:
        return {str(key): load(arguments[1], one, _path(name, key)) for key, one in saved.items()}
    if origin is tuple:
        kinds = arguments[:1] * len(saved) if arguments[-1] is ... else arguments
        require(len(saved) == len(kinds), name, saved, f"not {len(kinds)} values")
        return tuple(load(one, value, f"{name}[{i}]") for i, (one, value) in enumerate(zip(kinds, saved)))
    return saved


def require(holds: bool, name: str, value: Any, rule: str) -> None:
    """Raise `DataError` unless it holds: "`name` is `value`, `rule`"."""
    if not holds:
        text = repr(value)
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise DataError(f"{f'`{name}`' if name else 'its content'} is {shown}, {rule}")


def load_fields(saved: Any, name: str = "", **kinds: Any) -> dict[str, Any]:
    """These fields of a saved object, each as its kind (see `load`).

    load_fields(json.loads(text), version=int, content=dict[str, Any])["version"]
    """
    saved = load(dict[str, Any], saved, name)
    for key in kinds:
        if key not in saved:
            raise DataError(f"`{_path(name, key)}` is missing")
    return {key: load(kind, saved[key], _path(name, key)) for key, kind in kinds.items()}


def _load_bits(saved: Any, name: str) -> np.ndarray:
    try:
        raw = zlib.decompress(base64.b64decode(saved, validate=True))
    except zlib.error as error:
        raise DataError(f"`{name}` cannot be unpacked ({error})") from None
    except (TypeError, ValueError):
        require(False, name, saved, "not text in base64")
        raise
    return np.unpackbits(np.frombuffer(raw, dtype=np.uint8)).astype(bool)


def _path(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def check_figures(saved: Any, name: str) -> None:
    """Raise `DataError` unless `saved` holds only finite numbers of at least 0, None, bools, and lists and objects."""
    if isinstance(saved, Mapping):
        for key, value in saved.items():
            check_figures(value, f"{name}.{key}")
    elif isinstance(saved, list | tuple):
        for i, value in enumerate(saved):
            check_figures(value, f"{name}[{i}]")
    elif saved is not None and not isinstance(saved, bool):
        load(float, saved, name)


# ----------------------------------------------------------------------------------------------------------------------
# Files: JSON with version and checksum, written whole or not at all.


def write_checked(path: Path, content: dict[str, Any]) -> None:
    """Write `content` (JSON types): under a name of its own first, then in its place.

    The first name is beside the folder where that can be: others may copy the folder meanwhile, as the ranks of Ray
    Train do, and a name that is gone again would end them.
    """
    text = json.dumps({"version": VERSION, "checksum": _checksum(content), "content": content})
    try:
        _write_by_way_of(path.parent.resolve().parent, path, text)
    except OSError:  # it may not be written, or no file be moved from there (another mount or quota)
        _write_by_way_of(path.parent, path, text)


def _write_by_way_of(folder: Path, path: Path, text: str) -> None:
    fresh = folder / f"_{path.name}.{secrets.token_hex(8)}"  # the Trainer uploads no `_*` of `output_dir`
    try:
        with fresh.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove what processes killed in `write_checked` have left in a folder."""
    for path in folder.glob("_odb_*.json.*"):
        path.unlink(missing_ok=True)


def read_checked(path: Path, **kinds: Any) -> dict[str, Any]:
    """Fields of what `write_checked` has written (see `load_fields`). Raises `DataError`, a clause without the path."""
    saved = read_json(path)
    check_version(saved)
    file = load_fields(saved, checksum=str, content=dict[str, Any])
    if file["checksum"] != _checksum(file["content"]):
        raise DataError("its checksum is not that of its content: it was edited or damaged")
    return load_fields(file["content"], **kinds)


def read_json(path: Path) -> Any:
    """Raises `DataError`, a clause without the path, where the file is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError("it is missing") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: of JSON and of UTF-8 too
        raise DataError(f"it cannot be read ({one_line(error)})") from None


def check_version(saved: Any) -> None:
    """Raise `DataError` where it was written by another version."""
    version = load_fields(saved, version=Any)["version"]
    if version != VERSION:
        raise DataError(f"it has version {version!r} of the data state, and this odb_factory reads {VERSION}")


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
