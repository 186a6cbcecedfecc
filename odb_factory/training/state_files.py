"""The files of a checkpoint that are ours: written whole or not at all, and read strictly.

Every rank writes `odb_state_rank{r}.json`; when all have, `odb_state.json`, the marker, says so. Both hold a checksum
over their content, so that a file that was cut off or edited is known as such.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odb_factory.data.resume.checked_file import read_checked, read_json, write_checked
from odb_factory.data.resume.fields import Fields, check_figures
from odb_factory.data.resume.state import DataState, read_state
from odb_factory.errors import DataError

MARKER = "odb_state.json"
RANK_FILE = "odb_state_rank{rank}.json"
TRAINER_STATE = "trainer_state.json"
MARK = "CheckpointMark"
"""The entry of `stateful_callbacks` in `trainer_state.json` that says at which optimizer step odb wrote it."""


@dataclass(frozen=True)
class RankState:
    """One rank's file. data: its data state, and `saved` as it is to be loaded; run: the figures of the run."""

    optimizer_steps: int
    data: DataState
    saved: dict[str, Any]
    run: dict[str, Any]


@dataclass(frozen=True)
class TrainerRecord:
    """What the Trainer knows of a checkpoint: optimizer steps and epochs done, and the step of our mark (-1: none)."""

    optimizer_steps: int
    epochs: float
    marked_steps: int


def rank_file(folder: Path, rank: int) -> Path:
    return folder / RANK_FILE.format(rank=rank)


def by_rank(folder: Path, name: str) -> dict[int, Path]:
    """The files in a folder that each rank has one of. name: with `{rank}` in it."""
    start, end = name.split("{rank}")
    found = {path.name.removeprefix(start).removesuffix(end): path for path in folder.glob(f"{start}*{end}")}
    return {int(rank): path for rank, path in sorted(found.items()) if rank.isascii() and rank.isdigit()}


def write_rank_state(folder: Path, rank: int, optimizer_steps: int, data: dict[str, Any], run: dict[str, Any]) -> None:
    """Write this rank's file. data, run: their state dicts (JSON types)."""
    write_checked(rank_file(folder, rank), {"optimizer_steps": optimizer_steps, "data": data, "run": run})


def write_marker(folder: Path, world_size: int, optimizer_steps: int) -> None:
    """Write the marker: all ranks have written theirs. Several nodes may do so at once."""
    write_checked(folder / MARKER, {"world_size": world_size, "optimizer_steps": optimizer_steps})


def read_rank_state(folder: Path, rank: int) -> RankState:
    """The state of a rank. Raises `DataError` that names the file and what is wrong with it (no full stop)."""
    path = rank_file(folder, rank)
    try:
        fields = read_checked(path)
        saved, run = fields.mapping("data"), fields.mapping("run")
        check_figures(run, "run")
        state = RankState(fields.whole("optimizer_steps"), read_state(saved), saved, run)
        fields.require(state.data.rank == rank, "data", "it is of another rank")
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    return state


def read_marker(folder: Path) -> tuple[int, int]:
    """(world size, optimizer steps) of the marker. Raises `DataError` as `read_rank_state` does."""
    path = folder / MARKER
    try:
        fields = read_checked(path)
        return fields.whole("world_size", 1), fields.whole("optimizer_steps")
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def read_trainer_state(folder: Path) -> TrainerRecord:
    """Raises `DataError` as `read_rank_state` does."""
    path = folder / TRAINER_STATE
    try:
        saved = read_json(path)
        fields = Fields(saved)
        epochs = 0.0 if fields.value("epoch") is None else fields.number("epoch")
        callbacks = Fields(saved.get("stateful_callbacks") or {}, "stateful_callbacks")
        marked = callbacks.part(MARK).part("args").whole("optimizer_steps") if callbacks.has(MARK) else -1
        return TrainerRecord(fields.whole("global_step"), epochs, marked)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
