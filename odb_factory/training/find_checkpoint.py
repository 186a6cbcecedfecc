"""Which checkpoint to go on from: the one asked for, or an older one if that is damaged, and the same on all ranks.

Every rank looks at what it can see (nodes may have disks of their own), in three steps:
1. each takes the newest checkpoint that it finds whole, from the one asked for backwards;
2. all tell each other their choice; if it is one and the same, that is it;
3. otherwise all look again, from the oldest of these choices backwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from odb_factory.errors import ConfigError, DataError, ODBError
from odb_factory.log import get_logger
from odb_factory.training.state_files import (
    MARKER,
    RANK_FILE,
    RankState,
    TrainerRecord,
    read_marker,
    read_rank_state,
    read_trainer_state,
)

logger = get_logger(__name__)

WAY_OUT = "name an older checkpoint, or set `resume: ignore_data` to take its model alone and begin the epoch anew"
NOT_RESUMABLE = "name an older checkpoint, or begin anew from its weights, if it has any, as model_name_or_path"
NO_CHECKPOINT = -1
Gather = Callable[[list[int]], list[list[int]]]
"""What each rank says (some integers, as many on each), to all ranks, in rank order."""


class Kind(IntEnum):
    """What a folder is to this rank, in ascending order of what can be done with it."""

    UNUSABLE = 0
    CUT_OFF = 1  # its marker is missing or damaged, and all else that this rank needs is whole
    WHOLE = 2
    STOCK = 3  # written by a training without odb


@dataclass(frozen=True)
class Status:
    """kind, why it is not whole, and what to do."""

    kind: Kind
    reason: str = ""
    way_out: str = WAY_OUT


@dataclass
class Candidates:
    """The checkpoints that this rank may go on from. number: of the one asked for, 0 if its name has none."""

    asked: Path
    rank: int
    world_size: int
    ignore_data: bool
    _known: dict[Path, Status] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.number = max(number_of(self.asked), 0)
        self.by_number = {self.number: self.asked}
        for folder in self.asked.parent.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            if 0 <= number_of(folder) < self.number:
                self.by_number[number_of(folder)] = folder

    def newest(self, limit: int) -> tuple[int, Kind]:
        """(number, kind) of the best of those up to number `limit`: whole before cut off, newer before older."""
        cut_off = NO_CHECKPOINT
        for number in sorted((n for n in self.by_number if n <= limit), reverse=True):
            kind = self.status(number).kind
            if kind == Kind.WHOLE or (kind == Kind.STOCK and number == self.number):
                return number, kind
            if kind == Kind.CUT_OFF and cut_off == NO_CHECKPOINT:
                cut_off = number
        return cut_off, Kind.UNUSABLE if cut_off == NO_CHECKPOINT else Kind.CUT_OFF

    def status(self, number: int) -> Status:
        folder = self.by_number[number]
        if folder not in self._known:
            self._known[folder] = status_of(folder, self.rank, self.world_size, ignore_data=self.ignore_data)
        return self._known[folder]


def find_checkpoint(
    asked: Any, *, output_dir: str, rank: int, world_size: int, ignore_data: bool, gather: Gather
) -> Path | None:
    """The folder of the checkpoint to go on from, None to begin anew. Collective: every rank calls it.

    asked: the argument `resume_from_checkpoint`: a folder, True for the newest in `output_dir`, None or False for none.
    Raises `ConfigError` or `DataError` on all ranks, where what is asked for is no checkpoint, or damaged, and there is
    no older one.
    """
    candidates, problem = None, None
    try:
        folder = _asked_folder(asked, output_dir)
        if folder is not None:
            candidates = Candidates(folder, rank, world_size, ignore_data)
    except (ODBError, OSError) as error:
        problem = error if isinstance(error, ODBError) else ConfigError(f"resume_from_checkpoint: {asked!r}: {error}.")
    begins_anew = candidates is None and problem is None
    limit = 0 if candidates is None else candidates.number
    while True:
        number, kind = (NO_CHECKPOINT, Kind.UNUSABLE) if candidates is None else candidates.newest(limit)
        answers = gather([number, kind, begins_anew])
        anew = [other for other, answer in enumerate(answers) if answer[2]]
        if len(anew) == len(answers):
            return None
        if anew:
            raise ConfigError(
                f"resume_from_checkpoint: ranks {anew} find no checkpoint and the others do; give all nodes the same "
                "setting, and the checkpoint on a disk that all can read."
            )
        failed = [other for other, answer in enumerate(answers) if answer[0] == NO_CHECKPOINT]
        if failed:
            raise problem or _nothing_usable(candidates, failed)
        numbers = [answer[0] for answer in answers]
        if min(numbers) == max(numbers):
            break
        limit = min(numbers)
    assert candidates is not None
    kinds = {Kind(answer[1]) for answer in answers}
    if Kind.STOCK in kinds and len(kinds) > 1:
        raise DataError(
            f"{candidates.by_number[number]}: some ranks find the files of odb in it and others do not; copy the "
            "odb_state*.json files of all nodes to where all ranks can read them."
        )
    return _chosen(candidates, number, kinds)


def status_of(folder: Path, rank: int, world_size: int, *, ignore_data: bool = False) -> Status:
    """Whether this rank can go on from `folder`. ignore_data: with its model alone."""
    if not folder.is_dir():
        return Status(Kind.UNUSABLE, f"{str(folder)!r} is no folder", NOT_RESUMABLE)
    try:
        record = read_trainer_state(folder)
    except DataError as error:
        return Status(Kind.UNUSABLE, str(error), NOT_RESUMABLE)
    if ignore_data:
        return Status(Kind.WHOLE)
    if is_stock(folder, record):
        return Status(Kind.STOCK)
    try:
        states = read_states(folder, rank, world_size)
        check_consistent(folder, states, record)
    except DataError as error:
        return Status(Kind.UNUSABLE, str(error))
    try:
        said = read_marker(folder)
    except DataError as error:
        return Status(Kind.CUT_OFF, str(error))
    if said != (states[0].epoch_state.world_size, record.optimizer_steps):
        reason = f"{folder / MARKER}: it says {said[0]} ranks and {said[1]} optimizer steps, the other files do not"
        return Status(Kind.CUT_OFF, reason)
    return Status(Kind.WHOLE)


def is_stock(folder: Path, record: TrainerRecord) -> bool:
    """Whether it was written by a training without odb: nothing of ours is in it.

    A stock training that went on from a checkpoint of ours carries our mark along, with an older optimizer step.
    """
    ours = (folder / MARKER).exists() or any(folder.glob(RANK_FILE.format(rank="*")))
    return not ours and record.marked_steps != record.optimizer_steps


def read_states(folder: Path, rank: int, world_size: int, *, of_all: bool = False) -> list[RankState]:
    """This rank's state, where it was written by as many ranks; otherwise, or `of_all`, those of all ranks.

    Raises `DataError` that names the file.
    """
    own = rank
    if not (folder / RANK_FILE.format(rank=rank)).exists():
        others = [_rank_of(path) for path in folder.glob(RANK_FILE.format(rank="*"))]
        own = min((other for other in others if other >= 0), default=rank)
    state = read_rank_state(folder, own)
    written_by = state.epoch_state.world_size
    if written_by == world_size and not of_all:
        return [state if own == rank else read_rank_state(folder, rank)]
    return [state if other == own else read_rank_state(folder, other) for other in range(written_by)]


def number_of(folder: Path) -> int:
    """Of `checkpoint-N`: N; -1 for a folder of another name."""
    start, _, end = folder.name.rpartition("-")
    return int(end) if start == PREFIX_CHECKPOINT_DIR and end.isdigit() else -1


def _asked_folder(asked: Any, output_dir: str) -> Path | None:
    """Raises `ConfigError` where it is not a checkpoint by its very name or content."""
    if asked is None or asked is False or asked == "":
        return None
    if asked is True:
        newest = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
        if newest is None:
            raise ConfigError(f"resume_from_checkpoint: True, but {output_dir!r} holds no checkpoint; name one.")
        return Path(newest)
    if not isinstance(asked, str | os.PathLike):
        raise ConfigError(f"resume_from_checkpoint: {asked!r} is no folder; name a checkpoint of this training.")
    folder = Path(os.path.abspath(asked))
    if not folder.is_dir():
        raise ConfigError(f"resume_from_checkpoint: {str(asked)!r} is no folder; name a checkpoint of this training.")
    inside = [other for other in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if number_of(other) >= 0]
    if inside and not (folder / MARKER).exists() and not any(folder.glob(RANK_FILE.format(rank="*"))):
        newest = str(Path(asked) / max(inside, key=number_of).name)
        raise ConfigError(
            f"resume_from_checkpoint: {str(asked)!r} holds checkpoints and is none; name one of them, {newest!r} is "
            "the newest."
        )
    return folder


def check_consistent(folder: Path, states: Sequence[RankState], record: TrainerRecord) -> None:
    """Raise `DataError` unless our files and the Trainer's are of the same optimizer step."""
    if record.marked_steps != record.optimizer_steps:
        raise DataError(
            f"{folder}: trainer_state.json (optimizer step {record.optimizer_steps}) was written without odb, and "
            "odb_state*.json files are beside it; if it was, remove these"
        )
    for state in states:
        if state.optimizer_steps != record.optimizer_steps:
            raise DataError(
                f"{folder / RANK_FILE.format(rank=state.epoch_state.rank)}: it is of optimizer step "
                f"{state.optimizer_steps}, and trainer_state.json of {record.optimizer_steps}"
            )


def _nothing_usable(candidates: Candidates | None, failed: Sequence[int]) -> ODBError:
    status = Status(Kind.WHOLE) if candidates is None else candidates.status(candidates.number)
    if candidates is not None and status.kind == Kind.UNUSABLE:
        return DataError(f"resume_from_checkpoint: {status.reason}; {status.way_out}.")
    return DataError(
        f"resume_from_checkpoint: ranks {list(failed)} cannot go on from it (their own messages say why); {WAY_OUT}."
    )


def _chosen(candidates: Candidates, number: int, kinds: set[Kind]) -> Path:
    """Say what is gone on from, where it is not what was asked for, or not whole."""
    folder = candidates.by_number[number]
    if number != candidates.number:
        status = candidates.status(candidates.number)
        if status.reason or candidates.rank == 0:
            reason = status.reason or "it is damaged on another rank, which says how"
            logger.warning("%s is not whole (%s); going on from %s", candidates.asked, reason, folder.name)
    elif Kind.CUT_OFF in kinds and candidates.rank == 0:
        logger.warning(
            "%s: its saving was cut off (%s), and there is no older one; the states of all ranks are whole, so the "
            "training goes on from it, and no row is lost or comes twice",
            folder,
            candidates.status(number).reason or f"{MARKER} is missing on another node",
        )
    return folder


def _rank_of(path: Path) -> int:
    digits = path.name.removeprefix("odb_state_rank").removesuffix(".json")
    return int(digits) if digits.isdigit() else -1
