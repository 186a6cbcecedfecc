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
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from odb_factory.errors import ConfigError, DataError, ODBError
from odb_factory.log import get_logger
from odb_factory.training.checkpoint_status import (
    NOT_RESUMABLE,
    WAY_OUT,
    Kind,
    Status,
    has_our_files,
    number_of,
    status_of,
)
from odb_factory.training.state_files import MARKER

logger = get_logger(__name__)

NO_CHECKPOINT = -1
Gather = Callable[[list[int]], list[list[int]]]
"""What each rank says (some integers, as many on each), to all ranks, in rank order."""


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
            try:
                status = status_of(folder, self.rank, self.world_size, ignore_data=self.ignore_data)
            except OSError as error:  # must not keep this rank from telling the others
                status = Status(Kind.UNUSABLE, f"{folder}: {error}", NOT_RESUMABLE)
            self._known[folder] = status
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
    if inside and not has_our_files(folder):
        newest = str(Path(asked) / max(inside, key=number_of).name)
        raise ConfigError(
            f"resume_from_checkpoint: {str(asked)!r} holds checkpoints and is none; name one of them, {newest!r} is "
            "the newest."
        )
    return folder


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
