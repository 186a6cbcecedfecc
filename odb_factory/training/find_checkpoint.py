"""Which checkpoint to go on from: the one asked for, or an older one if that is damaged, and the same on all ranks.

Every rank looks at what it can see (nodes may have disks of their own), in three steps:
1. each takes the newest checkpoint that it finds whole, from the one asked for backwards;
2. all tell each other their choice; if it is one and the same, that is it;
3. otherwise all look again, from the oldest of these choices backwards.
What is wrong on one rank travels with its choice, so that all ranks end with the same line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from odb_factory.errors import ConfigError, DataError, ODBError, one_line
from odb_factory.log import get_logger
from odb_factory.training.checkpoint_status import (
    NOT_RESUMABLE,
    Kind,
    Status,
    has_our_files,
    number_of,
    status_of,
)

logger = get_logger(__name__)

NO_CHECKPOINT = -1
Gather = Callable[[Any], list[Any]]
"""What each rank says (JSON types), to all ranks, in rank order."""


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
            except Exception as error:  # whatever is in it must not keep this rank from telling the others
                status = Status(Kind.UNUSABLE, f"{folder}: it cannot be read ({one_line(error)})", NOT_RESUMABLE)
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
    except ODBError as error:
        problem = str(error)
    except Exception as error:
        problem = f"resume_from_checkpoint: {asked!r}: {one_line(error)}."
    begins_anew = candidates is None and problem is None
    limit = 0 if candidates is None else candidates.number
    while True:
        number, kind = (NO_CHECKPOINT, Kind.UNUSABLE) if candidates is None else candidates.newest(limit)
        status = Status(Kind.WHOLE) if candidates is None else candidates.status(candidates.number)
        answers = [_Answer(*one) for one in gather(_Answer(number, kind, begins_anew, problem, *status.said))]
        anew = [other for other, answer in enumerate(answers) if answer.begins_anew]
        if len(anew) == len(answers):
            return None
        if anew:
            raise ConfigError(
                f"resume_from_checkpoint: ranks {anew} find no checkpoint and the others do; give all nodes the same "
                "setting, and the checkpoint on a disk that all can read."
            )
        for answer in answers:
            if answer.problem is not None:
                raise ConfigError(answer.problem)
        reasons = [(_of_rank(other, answers), answer) for other, answer in enumerate(answers) if answer.reason]
        if any(answer.number == NO_CHECKPOINT for answer in answers):
            where, answer = reasons[0]
            raise DataError(f"resume_from_checkpoint: {where}{answer.reason}; {answer.way_out}.")
        numbers = [answer.number for answer in answers]
        if min(numbers) == max(numbers):
            break
        limit = min(numbers)
    assert candidates is not None
    kinds = {Kind(answer.kind) for answer in answers}
    if Kind.STOCK in kinds and len(kinds) > 1:
        raise DataError(
            f"{candidates.by_number[number]}: some ranks find the files of odb in it and others do not; copy the "
            "odb_state*.json files of all nodes to where all ranks can read them."
        )
    chosen = candidates.by_number[number]
    if number != candidates.number:
        where, answer = reasons[0]
        logger.warning("%s is not whole (%s%s); going on from %s", candidates.asked, where, answer.reason, chosen.name)
    elif Kind.CUT_OFF in kinds:
        where, answer = reasons[0]
        logger.warning(
            "%s: its saving was cut off (%s%s), and there is no older one; what this training needs of it is whole, so "
            "it goes on from there, and no row is lost or comes twice",
            chosen,
            where,
            answer.reason,
        )
    return chosen


class _Answer(NamedTuple):
    """What a rank says of its choice. problem: why it has none to choose from. reason, way_out: of the checkpoint that
    was asked for, if it is not whole."""

    number: int
    kind: int
    begins_anew: bool
    problem: str | None
    reason: str
    way_out: str


def _of_rank(rank: int, answers: Sequence[_Answer]) -> str:
    """Who gives a reason, where not all ranks give the same one."""
    return "" if len({answer.reason for answer in answers}) == 1 else f"rank {rank}: "


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
