"""The saved state of an epoch: dataclasses as JSON with version and checksum, written whole and read strictly."""

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np

from odb_factory.errors import DataError, one_line

VERSION = 7
"""Of everything that is saved; another version is refused."""

# ----------------------------------------------------------------------------------------------------------------------
# Dataclasses as JSON types, and back.

T = TypeVar("T")
Positive = Annotated[int, 1]
"""`Annotated[int, n]`: an int of at least n (None: any int); a plain int: at least 0."""
AnyInt = Annotated[int, None]
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
        kinds = arguments
        if arguments[-1] is ...:
            kinds = arguments[:1] * len(saved)
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


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _load_bits(saved: Any, name: str) -> np.ndarray:
    try:
        raw = base64.b64decode(saved, validate=True)
    except (TypeError, ValueError):
        raw = None
    require(raw is not None, name, saved, "not text in base64")
    assert raw is not None
    try:
        return np.unpackbits(np.frombuffer(zlib.decompress(raw), dtype=np.uint8)).astype(bool)
    except zlib.error as error:
        raise DataError(f"`{name}` cannot be unpacked ({error})") from None


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
    """Write `content` (JSON types): under a name of its own first, then in its place."""
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
    """Remove what a process killed in `write_checked` has left in a folder."""
    for path in folder.glob(".odb_*.json.*"):
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


# ----------------------------------------------------------------------------------------------------------------------
# What a stopped epoch needs to go on. It belongs to what the training has consumed, not to what was planned ahead.


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What must be as it was for a state to mean anything.

    samples: of an epoch, on all ranks; None where nobody knows. split: a stream that gives each rank its own part.
    order: a checksum of the order of the epoch. global_batch_size, left_out_by_drop_last: where steps are kept.
    """

    samples: int | None
    seed: AnyInt
    split: bool
    order: int = 0
    global_batch_size: Positive | None = None
    left_out_by_drop_last: int = 0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where all ranks stand in an epoch.

    optimizer_steps: done. trained, rejected (by reason), overlong: samples of these steps, on all ranks.
    """

    epoch: int = 0
    optimizer_steps: int = 0
    trained: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    overlong: int = 0

    @property
    def done(self) -> int:
        """Samples trained on or rejected."""
        return self.trained + sum(self.rejected.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """What a rank has done of its share of the order, with `fill`: its first `drawn` rows, without `waiting`.

    done_before: bool a position of the order, done before the rest was dealt out to the ranks (None: none).
    """

    done_before: np.ndarray | None = None
    drawn: int = 0
    waiting: tuple[int, ...] = ()

    @property
    def is_untouched(self) -> bool:
        return self.done_before is None and not self.drawn


@dataclass(frozen=True, kw_only=True, eq=False)
class DataState(Place):
    """Where one rank stands in an epoch. `rank`, `share` and `probes` are its own; the rest is alike on all ranks.

    share: None with kept optimizer steps, where the place says all. probes: (row of the dataset, checksum) of some rows
    that were trained on last. rows_from: what rows were made with, as text by name.
    """

    mode: Literal["keep", "fill"]
    rank: int
    world_size: Positive
    data: TrainingData
    share: Share | None
    probes: tuple[tuple[int, int], ...]
    rows_from: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """JSON types; one or two kilobytes, with `fill` after a change of ranks also a bit a row."""
        return {"version": VERSION, **dump(self)}

    def check(self) -> None:
        """Raise `DataError`, a clause that names the field, where it contradicts itself."""
        require(self.rank < self.world_size, "rank", self.rank, f"not 0 to {self.world_size - 1}")
        require((self.mode == "fill") == (self.share is not None), "share", self.share, f"but `mode` is {self.mode}")
        samples = self.data.samples
        if self.share is None:
            drawn = self.optimizer_steps * (self.data.global_batch_size or 0)
            require(self.done <= drawn, "trained", self.trained, f"but {drawn} samples were drawn")
            require(
                samples is None or drawn == 0 or drawn < samples,  # after the last step the next epoch begins
                "optimizer_steps",
                self.optimizer_steps,
                f"but an epoch has {samples} samples",
            )
            return
        before, drawn, waiting = self.share.done_before, self.share.drawn, self.share.waiting
        rule = f"but these must be of the {drawn} rows that were drawn, ascending"
        require(sorted({one for one in waiting if one < drawn}) == list(waiting), "share.waiting", waiting, rule)
        if samples is None:
            return
        if before is not None and (len(before) != -(-samples // 8) * 8 or before[samples:].any()):
            raise DataError(f"`share.done_before` marks {len(before)} positions of an order of {samples}")
        left = samples - (0 if before is None else int(before.sum()))
        require(drawn <= left, "share.drawn", drawn, f"but {left} samples were to be drawn")
        require(self.done <= samples, "trained", self.trained, f"but an epoch has {samples} samples")


def read_state(saved: Any) -> DataState:
    """Undo `DataState.to_dict`. Raises `DataError`, a clause without a way out, where it is damaged."""
    check_version(saved)
    state: DataState = load(DataState, saved)
    return state


def done_positions(states: Sequence[DataState]) -> np.ndarray:
    """bool a position of the epoch's order: done by these states, one a rank, of one moment of one run.

    Of an order of unknown length as many positions are marked as were looked at. Raises `DataError` where these are not
    the states of all ranks, or do not belong together.
    """
    first, world_size = states[0], states[0].world_size
    ranks = [state.rank for state in states]
    if ranks != list(range(world_size)):
        raise DataError(
            f"the data state was written by {world_size} ranks, and of these {ranks} were found; all are needed to go "
            "on with other ranks (are the checkpoint's files of all nodes in one place?)"
        )
    if len({(state.epoch, state.optimizer_steps, state.done, str(state.data)) for state in states}) > 1:
        raise DataError("the data states of the ranks are of different moments")
    shares = [state.share for state in states if state.share is not None]
    before = shares[0].done_before
    looked_at = (0 if before is None else len(before)) + max(share.drawn for share in shares) * world_size
    done = np.zeros(looked_at if first.data.samples is None else first.data.samples, dtype=bool)
    if before is not None:
        done[: len(before)] = before[: len(done)]
    left = np.flatnonzero(~done)
    for rank, share in enumerate(shares):
        mine = left[rank::world_size]
        if share.drawn > len(mine):
            raise DataError(f"the state of rank {rank} has drawn more samples than its share of the order has")
        done[mine[: share.drawn]] = True
        done[mine[list(share.waiting)]] = False
    return done
