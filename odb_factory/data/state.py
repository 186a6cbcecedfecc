"""The saved state of an epoch: its file, its fields, and what kept and filled optimizer steps need to go on."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import math
import os
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from odb_factory.errors import DataError, one_line
from odb_factory.planning import CostModel, Limits

# ----------------------------------------------------------------------------------------------------------------------
# Files of what was saved: JSON with a checksum, written whole or not at all, and read strictly.


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


# ----------------------------------------------------------------------------------------------------------------------
# Strict reading of what was saved: typed access to the fields of a JSON object, with errors that name the field.

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


# ----------------------------------------------------------------------------------------------------------------------
# What a stopped epoch of kept optimizer steps needs to go on: a cursor.


@dataclass(frozen=True, kw_only=True)
class KeepState:
    """Where all ranks stand in an epoch, as one of them says it; only `rank` and `probes` are its own.

    data: what must be as it was for the state to mean anything. optimizer_steps: of the epoch that are done.
    trained, rejected, overlong: samples of these steps, of all ranks.
    probes: (row of the dataset, checksum) of a few samples that were trained on last.
    rows_from: what the rows were made with, as text by name.
    """

    rank: int
    world_size: int
    data: Mapping[str, Any]
    epoch: int
    optimizer_steps: int
    trained: int
    rejected: Mapping[str, int]
    overlong: int
    probes: tuple[tuple[int, int], ...] = ()
    rows_from: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON types; one or two kilobytes."""
        return {
            "version": VERSION,
            "mode": "keep",
            "rank": self.rank,
            "world_size": self.world_size,
            "data": dict(self.data),
            "epoch": self.epoch,
            "optimizer_steps": self.optimizer_steps,
            "trained": self.trained,
            "rejected": dict(self.rejected),
            "overlong": self.overlong,
            "probes": pack_probes(self.probes),
            "rows_from": dict(self.rows_from),
        }

    @classmethod
    def from_dict(cls, saved: Any) -> KeepState:
        """Undo `to_dict`. Raises `DataError`, a clause without a way out, where it is damaged."""
        fields = Fields(saved)
        world_size = fields.whole("world_size", 1)
        data = fields.part("data")
        num_samples = None if data.value("samples") is None else data.whole("samples")
        global_batch_size = data.whole("global_batch_size", 1)
        state = cls(
            rank=fields.whole("rank", 0, world_size - 1),
            world_size=world_size,
            data=fields.mapping("data"),
            epoch=fields.whole("epoch"),
            optimizer_steps=fields.whole("optimizer_steps"),
            trained=fields.whole("trained"),
            rejected=fields.counts("rejected"),
            overlong=fields.whole("overlong"),
            probes=fields.probes("probes"),
            rows_from=fields.mapping("rows_from"),
        )
        most = state.optimizer_steps * global_batch_size
        fields.require(state.trained + sum(state.rejected.values()) <= most, "trained", f"{most} samples were drawn")
        fields.require(
            num_samples is None or most == 0 or most < num_samples,  # behind the last stands the next epoch
            "optimizer_steps",
            f"an epoch has {num_samples} samples",
        )
        return state


# ----------------------------------------------------------------------------------------------------------------------
# What a rank's buffer holds before it plans a round, and how far its epoch is: from it the round is planned again.


@dataclass(frozen=True, slots=True)
class BufferedSample:
    """A drawn sample that is not done.

    draw: its number in this rank's draws; age: rounds it was kept back; content: a checksum of the row, 0 if unknown.
    """

    draw: int
    age: int
    tokens: int
    content: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank before it fills its buffer and plans a round. steps, emitted, tokens_emitted: of the epoch, on all ranks.

    drawn, rejected, overlong: of this rank. next: drawn beyond the buffer; dummy: what idle steps are run with.
    model, limits: the cost model it proposes, and to what it has lowered its budgets. filled: checksums of the samples
    that were drawn for this round, in order.
    """

    round_index: int
    steps: int
    emitted: int
    tokens_emitted: int
    drawn: int
    rejected: dict[str, int]
    overlong: int
    held: tuple[BufferedSample, ...]
    next: BufferedSample | None
    dummy: BufferedSample | None
    model: CostModel
    limits: Limits | None = None
    filled: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON types; about 20 characters a sample."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {
            "rejected": dict(self.rejected),
            "held": _columns(self.held),
            "next": _columns(() if self.next is None else (self.next,)),
            "dummy": _columns(() if self.dummy is None else (self.dummy,)),
            "model": dataclasses.asdict(self.model),
            "limits": None if self.limits is None else dataclasses.asdict(self.limits),
            "filled": pack_checksums(self.filled),
        }

    @classmethod
    def from_dict(cls, fields: Fields) -> Snapshot:
        """Undo `to_dict`. Raises `DataError` with what contradicts itself."""
        model = fields.part("model")
        snapshot = cls(
            round_index=fields.whole("round_index"),
            steps=fields.whole("steps"),
            emitted=fields.whole("emitted"),
            tokens_emitted=fields.whole("tokens_emitted"),
            drawn=fields.whole("drawn"),
            rejected=fields.counts("rejected"),
            overlong=fields.whole("overlong"),
            held=_samples(fields.part("held")),
            next=_one(fields, "next"),
            dummy=_one(fields, "dummy"),
            model=CostModel(*(model.whole(field.name) for field in dataclasses.fields(CostModel))),
            limits=None if fields.value("limits") is None else _limits(fields.part("limits")),
            filled=fields.checksums("filled"),
        )
        draws = [one.draw for one in snapshot.undone]
        fields.require(len(set(draws)) == len(draws), "held", "a sample is in it twice")
        fields.require(
            all(one.draw < snapshot.drawn for one in snapshot.waiting), "drawn", "samples of later draws are held"
        )
        fields.require(
            len(draws) + sum(snapshot.rejected.values()) <= snapshot.drawn, "drawn", "more samples are held or rejected"
        )
        # Steps without a sample only fill up the last optimizer step of an epoch, behind which no state is taken.
        fields.require(snapshot.steps <= snapshot.emitted, "steps", f"only {snapshot.emitted} samples were emitted")
        return snapshot

    @property
    def undone(self) -> list[BufferedSample]:
        """What was drawn and waits to be trained on."""
        return [*self.held, *([] if self.next is None else [self.next])]

    @property
    def waiting(self) -> list[BufferedSample]:
        """All that was drawn and is to be observed again, in the order of the draws, each once."""
        by_draw = {} if self.dummy is None else {self.dummy.draw: self.dummy}
        by_draw |= {one.draw: one for one in self.undone}  # the buffer's ages
        return [by_draw[draw] for draw in sorted(by_draw)]

    def without_contents(self) -> Snapshot:
        """Itself, for rows that are not the same each time they are read."""

        def blank(one: BufferedSample | None) -> BufferedSample | None:
            return None if one is None else dataclasses.replace(one, content=0)

        return dataclasses.replace(
            self,
            held=tuple(dataclasses.replace(one, content=0) for one in self.held),
            next=blank(self.next),
            dummy=blank(self.dummy),
            filled=(0,) * len(self.filled),
        )


def _limits(fields: Fields) -> Limits:
    unlimited = fields.value("max_patches") is None
    return Limits(fields.whole("token_budget", 1), None if unlimited else fields.whole("max_patches", 1))


def _columns(samples: Sequence[BufferedSample]) -> dict[str, Any]:
    return {
        "draw": [one.draw for one in samples],
        "age": [one.age for one in samples],
        "tokens": [one.tokens for one in samples],
        "content": pack_checksums([one.content for one in samples]),
    }


def _samples(columns: Fields) -> tuple[BufferedSample, ...]:
    draws, ages, tokens = columns.wholes("draw"), columns.wholes("age"), columns.wholes("tokens")
    contents = columns.checksums("content")
    columns.require(len(draws) == len(ages) == len(tokens) == len(contents), "draw", "its columns differ in length")
    return tuple(BufferedSample(*values) for values in zip(draws, ages, tokens, contents))


def _one(fields: Fields, key: str) -> BufferedSample | None:
    samples = _samples(fields.part(key))
    fields.require(len(samples) <= 1, key, "there is one at most")
    return samples[0] if samples else None


# ----------------------------------------------------------------------------------------------------------------------
# Which positions of an epoch's order are done, as a bitmap: what states of other ranks or settings are turned into.


def mark_done(states: Sequence[FillState], num_samples: int | None) -> np.ndarray:
    """bool[num_samples]: the positions of the epoch's order that are done by these states, one a rank.

    num_samples: of the epoch; None for a stream, of which as many positions are marked as were looked at.
    Raises `DataError` where the states speak of positions that the order does not have.
    """
    num_positions = _num_looked_at(states) if num_samples is None else num_samples
    done = np.zeros(num_positions, dtype=bool)
    before = states[0].done
    if before is not None:
        done[: len(before)] = before[:num_positions]
    left = np.flatnonzero(~done)
    for state in states:
        snapshot = state.snapshot
        if snapshot is None:
            continue
        mine = left[state.rank :: len(states)]
        if max([snapshot.drawn - 1, *state.emitted]) >= len(mine):
            raise DataError(f"the state of rank {state.rank} speaks of more samples than its share of the order has")
        done[mine[: snapshot.drawn]] = True
        done[mine[[one.draw for one in snapshot.undone]]] = False
        done[mine[list(state.emitted)]] = True
    return done


def _num_looked_at(states: Sequence[FillState]) -> int:
    drawn = [max([-1, *state.emitted, state.snapshot.drawn if state.snapshot else 0]) + 1 for state in states]
    before = max(0 if state.done is None else len(state.done) for state in states)
    return before + max(drawn) * len(states)


def pack_done(done: np.ndarray) -> str:
    """A bitmap as text of JSON; at most a sixth of a byte a sample."""
    return packed(zlib.compress(np.packbits(done).tobytes(), 9))


def unpack_done(raw: bytes, num_samples: int | None) -> np.ndarray:
    """bool[num_samples rounded up to 8]: undo `pack_done`, of which `raw` are the bytes.

    num_samples: of the epoch; None if nobody knows. Raises `DataError` where it is damaged or has another length.
    """
    try:
        bits = np.unpackbits(np.frombuffer(zlib.decompress(raw), dtype=np.uint8)).astype(bool)
    except zlib.error as error:
        raise DataError(f"`done` cannot be unpacked ({error})") from None
    if num_samples is not None and (len(bits) != -(-num_samples // 8) * 8 or bits[num_samples:].any()):
        raise DataError(f"`done` marks {len(bits)} positions of an order of {num_samples}")
    return bits


# ----------------------------------------------------------------------------------------------------------------------
# What a stopped epoch of filled optimizer steps needs to go on: what is done, what is buffered, what was planned.
# A state belongs to what the training has consumed, not to what was fetched or planned ahead. It does not list the
# samples that are done: every rank draws its share in order, so the number of draws and the few that were drawn and
# are not done tell them all. Continued with the same ranks and settings, the round under way is planned again from
# what the buffer held before it, and its consumed steps are passed over: the same groups in the same order. Otherwise
# what is done is marked in a bitmap over the order, and the rest is dealt out anew.
# Checksums of what the rows said make sure that they say the same when they are read again.


@dataclass(frozen=True)
class FillState:
    """Where one rank stands in an epoch.

    data: what must be as it was for the state to mean anything; plan: what must be for the same groups to come.
    done: bool a position of the epoch's order (None: nothing is done), rounded up to whole bytes.
    snapshot: of the round under way, of which `consumed` steps are done and have emitted the draws `emitted`.
    probes: (row of the dataset, checksum) of a few samples that were consumed.
    rows_from: what the rows were made with, as text by name.
    """

    rank: int
    world_size: int
    data: dict[str, Any]
    plan: dict[str, Any]
    epoch: int
    done: np.ndarray | None
    snapshot: Snapshot | None
    consumed: int
    emitted: tuple[int, ...]
    probes: tuple[tuple[int, int], ...] = ()
    rows_from: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON types; some kilobytes, whatever the dataset, unless it was dealt out anew."""
        return {
            "version": VERSION,
            "mode": "fill",
            "rank": self.rank,
            "world_size": self.world_size,
            "data": self.data,
            "plan": self.plan,
            "epoch": self.epoch,
            "done": None if self.done is None else pack_done(self.done),
            "snapshot": None if self.snapshot is None else self.snapshot.to_dict(),
            "consumed": self.consumed,
            "emitted": list(self.emitted),
            "probes": pack_probes(self.probes),
            "rows_from": dict(self.rows_from),
        }

    @classmethod
    def from_dict(cls, saved: Any) -> FillState:
        """Undo `to_dict`. Raises `DataError`, a clause without a way out, where it is damaged or of another version."""
        fields = Fields(saved)
        world_size = fields.whole("world_size", 1)
        data = fields.part("data")
        num_samples = None if data.value("samples") is None else data.whole("samples")
        data.whole("seed", None)
        data.whole("order")
        data.flag("split")
        state = cls(
            rank=fields.whole("rank", 0, world_size - 1),
            world_size=world_size,
            data=fields.mapping("data"),
            plan=fields.mapping("plan"),
            epoch=fields.whole("epoch"),
            done=None if fields.value("done") is None else unpack_done(fields.bytes("done"), num_samples),
            snapshot=None if fields.value("snapshot") is None else Snapshot.from_dict(fields.part("snapshot")),
            consumed=fields.whole("consumed"),
            emitted=tuple(fields.wholes("emitted")),
            probes=fields.probes("probes"),
            rows_from=fields.mapping("rows_from"),
        )
        state._check(fields, num_samples)
        return state

    def _check(self, fields: Fields, num_samples: int | None) -> None:
        emitted, snapshot = set(self.emitted), self.snapshot
        fields.require(len(emitted) == len(self.emitted), "emitted", "a sample is in it twice")
        if snapshot is None:
            fields.require(not self.consumed and not emitted, "consumed", "no round is under way")
            return
        fields.require(self.consumed > 0, "consumed", "a round is under way")
        held = {one.draw for one in snapshot.undone}
        fields.require(
            all(draw in held or draw >= snapshot.drawn for draw in emitted),
            "emitted",
            "these samples were not in the buffer",
        )
        fields.require(
            sum(draw >= snapshot.drawn for draw in emitted) <= len(snapshot.filled),
            "emitted",
            f"{len(snapshot.filled)} samples were drawn for the round",
        )
        if num_samples is not None:
            before = 0 if self.done is None else int(self.done.sum())
            total = before + snapshot.emitted + sum(snapshot.rejected.values()) + len(held)
            fields.require(
                total <= num_samples and snapshot.drawn + before <= num_samples,
                "snapshot",
                f"an epoch has {num_samples} samples, and these are more",
            )


def check_states(states: Sequence[FillState]) -> None:
    """Raise `DataError` unless these are the states of all ranks at one moment of one run."""
    world_size = states[0].world_size
    ranks = [state.rank for state in states]
    if ranks != list(range(world_size)):
        raise DataError(
            f"the data state was written by {world_size} ranks, and of these {ranks} were found; all are needed to go "
            "on with other ranks or settings (are the checkpoint's files of all nodes in one place?)"
        )
    if len({_moment(state) for state in states}) > 1:
        raise DataError("the data states of the ranks are of different moments")


def _moment(state: FillState) -> tuple[Any, ...]:
    round_index = None if state.snapshot is None else state.snapshot.round_index
    data = sorted((key, value) for key, value in state.data.items())
    return state.epoch, round_index, state.consumed, state.world_size, str(data)


# ----------------------------------------------------------------------------------------------------------------------
# What a loader saves of one rank: read back whatever the mode it was written in.

DataState = FillState | KeepState


def read_state(saved: Any) -> DataState:
    """What `to_dict` of a state has made. Raises `DataError`, a clause without a way out, where it is damaged."""
    fields = Fields(saved)
    version = fields.value("version")
    if version != VERSION:
        raise DataError(f"it has version {version!r} of the data state, and this odb_factory reads {VERSION}")
    mode = fields.value("mode")
    if mode == "keep":
        return KeepState.from_dict(saved)
    if mode == "fill":
        return FillState.from_dict(saved)
    raise DataError(f"`mode` is {mode!r}, not keep or fill")
