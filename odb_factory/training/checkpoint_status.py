"""What a folder is to a rank that is to go on from it: a whole checkpoint, one that was cut off, stock's, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from odb_factory.data.resume.keep_state import KeepState
from odb_factory.errors import DataError
from odb_factory.training.checkpoint_files import check_optimizer, check_weights
from odb_factory.training.checkpoint_hashes import check_content
from odb_factory.training.state_files import (
    MARKER,
    RANK_FILE,
    RankState,
    TrainerRecord,
    by_rank,
    rank_file,
    read_marker,
    read_rank_state,
    read_trainer_state,
)

WAY_OUT = "name an older checkpoint, or set `resume: ignore_data` to take its model alone and begin the epoch anew"
INCOMPLETE = "checkpoint-is-incomplete.txt"
"""Stands in a checkpoint of transformers' `enable_jit_checkpoint` until it is written."""
NOT_RESUMABLE = "name an older checkpoint, or begin anew from its weights, if it has any, as model_name_or_path"


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

    @property
    def said(self) -> tuple[str, str]:
        return self.reason, self.way_out


def status_of(folder: Path, rank: int, world_size: int, *, ignore_data: bool = False) -> Status:
    """Whether this rank can go on from `folder`. ignore_data: with its model alone."""
    if not folder.is_dir():
        return Status(Kind.UNUSABLE, f"{str(folder)!r} is no folder", NOT_RESUMABLE)
    try:
        record = read_trainer_state(folder)
        check_weights(folder)
        check_content(folder, rank, world_size)
    except DataError as error:
        return Status(Kind.UNUSABLE, str(error), NOT_RESUMABLE)
    if ignore_data:
        return Status(Kind.WHOLE)
    try:
        check_optimizer(folder)
    except DataError as error:
        return Status(Kind.UNUSABLE, str(error))
    if is_stock(folder, record):
        if (folder / INCOMPLETE).exists():
            return Status(Kind.CUT_OFF, f"{folder / INCOMPLETE}: its saving did not end")
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
    if said != (states[0].data.world_size, record.optimizer_steps):
        reason = f"{folder / MARKER}: it says {said[0]} ranks and {said[1]} optimizer steps, the other files do not"
        return Status(Kind.CUT_OFF, reason)
    return Status(Kind.WHOLE)


def is_stock(folder: Path, record: TrainerRecord) -> bool:
    """Whether it was written by a training without odb: nothing of ours is in it.

    A stock training that went on from a checkpoint of ours carries our mark along, with an older optimizer step.
    """
    return not has_our_files(folder) and record.marked_steps != record.optimizer_steps


def has_our_files(folder: Path) -> bool:
    return (folder / MARKER).exists() or bool(by_rank(folder, RANK_FILE))


def read_states(folder: Path, rank: int, world_size: int, *, of_all: bool = False) -> list[RankState]:
    """This rank's state, where it was written by as many ranks; otherwise, or `of_all`, those of all ranks.

    With kept optimizer steps any rank's tells all. Raises `DataError` that names the file.
    """
    own = rank
    if not rank_file(folder, rank).exists():
        own = min(by_rank(folder, RANK_FILE), default=rank)
    state = read_rank_state(folder, own)
    if isinstance(state.data, KeepState):
        return [state]
    written_by = state.data.world_size
    if written_by == world_size and not of_all:
        return [state if own == rank else read_rank_state(folder, rank)]
    return [state if other == own else read_rank_state(folder, other) for other in range(written_by)]


def number_of(folder: Path) -> int:
    """Of `checkpoint-N`: N; -1 for a folder of another name."""
    start, _, end = folder.name.rpartition("-")
    return int(end) if start == PREFIX_CHECKPOINT_DIR and end.isascii() and end.isdigit() else -1


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
                f"{rank_file(folder, state.data.rank)}: it is of optimizer step "
                f"{state.optimizer_steps}, and trainer_state.json of {record.optimizer_steps}"
            )
