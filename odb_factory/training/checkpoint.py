"""Checkpoints: what a folder is, which to go on from, how a run gets there, how every save becomes one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from odb_factory.comm.agreement import name_ranks
from odb_factory.comm.gloo import Exchange
from odb_factory.data.state import KeepState, read_checked
from odb_factory.errors import CollectiveError, ConfigError, DataError, ODBError, one_line
from odb_factory.log import get_logger
from odb_factory.random_numbers import kept_random_numbers, random_states
from odb_factory.training.checkpoint_files import (
    HASHES,
    MARKER,
    NUM_BLOCKS,
    RANK_FILE,
    TRAINER_STATE,
    Hashing,
    RankState,
    TrainerRecord,
    by_rank,
    check_content,
    check_optimizer,
    check_structure,
    check_weights,
    compare,
    files_of,
    hash_file,
    rank_file,
    read_marker,
    read_rank_state,
    read_trainer_state,
    write_marker,
    write_rank_state,
)
from odb_factory.training.run import ODBRun

if TYPE_CHECKING:
    from odb_factory.data.state import DataState


# ----------------------------------------------------------------------------------------------------------------------
# What a folder is to a rank that is to go on from it: a whole checkpoint, one that was cut off, stock's, or none.

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


# ----------------------------------------------------------------------------------------------------------------------
# Which checkpoint to go on from: the one asked for, or an older one if that is damaged, and the same on all ranks.
# Every rank looks at what it can see (nodes may have disks of their own), in three steps: 1. each takes the newest
# checkpoint that it finds whole, from the one asked for backwards; 2. all tell each other their choice; if it is one
# and the same, that is it; 3. otherwise all look again, from the oldest of these choices backwards. What is wrong on
# one rank travels with its choice, so that all ranks end with the same line.

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


# ----------------------------------------------------------------------------------------------------------------------
# What `odb-factory doctor CHECKPOINT` looks at: every file of a checkpoint, those of all ranks.


class Line(NamedTuple):
    text: str
    is_problem: bool = False


def examine(folder: Path) -> Iterator[Line]:
    """A line for each part: what is wrong with it, or how far it was compared."""
    if not folder.is_dir():
        yield Line(f"{folder}: it is no folder", is_problem=True)
        return
    entries: dict[str, dict[str, Any]] = {}
    yield from _try("trainer_state.json is readable", lambda: read_trainer_state(folder))
    if by_rank(folder, RANK_FILE):
        yield from _try("odb_state.json is readable: all ranks have saved", lambda: read_marker(folder))
    for rank in by_rank(folder, RANK_FILE):
        yield from _try(f"the state of rank {rank} is readable", partial(read_rank_state, folder, rank))
    for rank, path in by_rank(folder, HASHES).items():
        yield from _try(
            f"the hashes of rank {rank} are readable",
            partial(_read_hashes, path, entries),
            path,
        )
    yield from _try("weights are there", lambda: check_weights(folder))
    yield from _try("optimizer and schedule are there", lambda: check_optimizer(folder))
    for path in sorted({*files_of(folder), *(folder / name for name in entries)}):
        name = path.relative_to(folder).as_posix()
        entry = entries.get(name)
        yield from _try(f"{name}: {_depth(entry)}", partial(_check, path, entry))


def _read_hashes(path: Path, entries: dict[str, dict[str, Any]]) -> None:
    entries |= read_checked(path).mapping("files")


def _check(path: Path, entry: dict[str, Any] | None) -> None:
    check_structure(path)
    if entry is not None:
        compare(path, entry)


def _depth(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "no hash was written; its head and its end are those of a whole file"
    if entry["sampled"]:
        return f"{NUM_BLOCKS} blocks are as they were saved, of {entry['bytes']:,} bytes; the rest has no hash"
    return f"all {entry['bytes']:,} bytes are as it was saved"


def _try(what: str, look: Callable[[], object], path: Path | None = None) -> Iterator[Line]:
    try:
        look()
    except DataError as error:
        yield Line(f"{path}: {error}" if path else str(error), is_problem=True)
    else:
        yield Line(what)


# ----------------------------------------------------------------------------------------------------------------------
# Set a run to where a checkpoint left it.


EPOCHS_ROUNDING = 1e-6


def load(run: ODBRun, folder: Path, gather: Callable[[Any], list[Any]]) -> None:
    """Load a checkpoint on all ranks, or raise on all of them what the first one cannot load. Collective.

    gather: what each rank says (JSON types), to all ranks, in rank order.
    """
    problem: Exception | None = None
    try:
        _load(run, folder)
    except Exception as error:
        problem = error
    said = gather(None if problem is None else one_line(problem))
    if problem is not None and len(said) == 1:
        raise problem
    for rank, reason in enumerate(said):
        if reason is not None:
            raise CollectiveError(reason if len(set(said)) == 1 else f"rank {rank}: {reason}") from problem


def _load(run: ODBRun, folder: Path) -> None:
    """Set `run` and its loader to where the checkpoint left them; warns where it is one of stock training.

    Reads this rank's file alone, unless what is left of the epoch has to be dealt out anew. Raises `DataError` that
    says what is damaged or differs.
    """
    record = read_trainer_state(folder)
    if run.config.resume == "ignore_data":
        _load_without_data(run, folder, record)
    elif is_stock(folder, record):
        _load_stock(run, folder, record)
    else:
        _load_ours(run, folder)


def _load_ours(run: ODBRun, folder: Path) -> None:
    try:
        states = read_states(folder, run.loader.rank, run.loader.world_size)
        if len(states) == 1 and run.loader.needs_all(states[0].data):
            states = read_states(folder, run.loader.rank, run.loader.world_size, of_all=True)
    except DataError as error:
        raise DataError(f"{error}; {WAY_OUT}.") from None
    try:
        run.loader.load_state_dict([state.saved for state in states])
    except DataError as error:
        raise DataError(f"{folder}: {error}.") from None
    _load_figures(run, folder, next((one for one in states if one.data.rank == run.loader.rank), states[0]))


def _load_figures(run: ODBRun, folder: Path, state: RankState) -> None:
    try:
        run.load_state_dict(state.run)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder}: the figures of the run in the state of rank {state.data.rank} are not those this "
            f"odb_factory writes ({type(error).__name__}: {error}); {WAY_OUT}."
        ) from None


def _load_without_data(run: ODBRun, folder: Path, record: TrainerRecord) -> None:
    """The model alone, and of our files the figures of the run, if they can be read."""
    try:
        if is_stock(folder, record):
            raise DataError("it was written without odb")
        states = read_states(folder, run.loader.rank, run.loader.world_size)
        check_consistent(folder, states, record)
        _load_figures(run, folder, states[0])
    except DataError as error:
        logger.warning("resume: ignore_data: the figures of the run begin anew as well (%s)", error)
        run.begin_at(record.optimizer_steps, record.epochs)
    try:
        check_optimizer(folder)
    except DataError as error:
        logger.warning("resume: ignore_data: %s", error)
    epoch = int(record.epochs)
    run.begin_epoch_anew(epoch)
    logger.warning("resume: ignore_data: epoch %d begins anew, whatever was done of it", epoch)


def _load_stock(run: ODBRun, folder: Path, record: TrainerRecord) -> None:
    """Of a checkpoint of stock training: exactly, where its optimizer steps are kept; else by its share of an epoch."""
    if run.config.keeps:
        _check_stock_steps(run, folder, record)
    done = run.loader.skip(optimizer_steps=record.optimizer_steps, epochs=record.epochs)
    run.begin_at(record.optimizer_steps, record.epochs)
    if done is None:
        logger.info("%s was written without odb, whose optimizer steps are the same: the training goes on", folder.name)
        return
    logger.warning(
        "%s was written without odb, so nobody knows which rows were trained on: the first %d samples of epoch %d are "
        "taken for done; as the order may be another, some rows may come twice in this epoch and some not at all",
        folder.name,
        done,
        int(record.epochs),
    )


def _check_stock_steps(run: ODBRun, folder: Path, record: TrainerRecord) -> None:
    """Raise `DataError` where the epochs of a checkpoint say that its optimizer steps had another number of samples."""
    an_epoch, num_samples, size = run.loader.num_optimizer_steps, run.loader.num_samples, run.loader.global_batch_size
    if an_epoch is None or num_samples is None or size is None:
        return
    epoch, done = divmod(record.optimizer_steps, max(an_epoch, 1))
    expected = done * size / num_samples
    # Stock says epochs in micro-steps of its own, of which the last may have fewer samples.
    if abs(record.epochs - epoch - expected) > expected * size / max(num_samples - size, 1) + EPOCHS_ROUNDING:
        raise DataError(
            f"{folder}: it was written without odb, and says {record.epochs:.4g} epochs in {record.optimizer_steps} "
            f"optimizer steps, which with {size} samples each are {epoch + expected:.4g}: set global_batch_size to the "
            "samples that an optimizer step had, or `resume: ignore_data` to begin the epoch anew."
        )


# ----------------------------------------------------------------------------------------------------------------------
# transformers' `enable_jit_checkpoint`: after SIGTERM all ranks save the same optimizer step, and the training ends.
# Stock saves at the event that comes next in each process. A signal reaches the processes at different moments, or
# one node only, so ranks would save different steps and wait for each other. Here a signal is a wish that each rank
# tells the others at the end of an optimizer step. There the Trainer saves as always, with the weights of
# `global_step` under every engine (DeepSpeed updates them before `on_pre_optimizer_step`, where stock saves).


class Preemption(TrainerCallback):
    """What SIGTERM asks of one `train()`; does nothing without `enable_jit_checkpoint`. It comes after callbacks that
    want to evaluate.

    exchange: of all processes of the training.
    """

    def __init__(self, trainer: Any, exchange: Exchange):
        self._trainer, self._exchange = trainer, exchange
        callbacks = trainer.callback_handler.callbacks
        self._stock: Any = next((one for one in callbacks if getattr(one, "jit_manager", None) is not None), None)
        self._manager: Any = getattr(self._stock, "jit_manager", None)
        self._is_over = False

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it stock's callback notes signals and acts on none."""
        if self._manager is None:
            yield
            return
        self._stock.jit_manager = None
        try:
            yield
        finally:
            self._stock.jit_manager = self._manager
            self._stock.on_train_end(self._trainer.args, self._trainer.state, self._trainer.control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Collective."""
        if self._manager is None:
            return
        is_asked = bool(self._manager.is_checkpoint_requested)
        answers = self._exchange.gather(b"1" if is_asked else b"0", f"the end of optimizer step {state.global_step}")
        asking = [rank for rank, answer in enumerate(answers) if answer == b"1"]
        if asking:
            self._is_over = control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # whoever sends SIGTERM does not wait for long
            logger.warning(
                "SIGTERM on %s: all ranks save optimizer step %d, and the training ends",
                name_ranks(asking),
                state.global_step,
            )

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_over:
            control.should_evaluate = control.should_save = False


# ----------------------------------------------------------------------------------------------------------------------
# Every save of the Trainer, whoever asks for it and at whatever moment, becomes a checkpoint that can be resumed.
# `Trainer._save_checkpoint` writes weights and the number of optimizer steps that are done (`state.global_step`).
# What a run knows of the data is ahead of that number from the last backward of an optimizer step to its end. So a
# run is noted down at the begin of each optimizer step, with the state of its random numbers, and a save in the
# middle of a step writes what was noted.
# The order in which a checkpoint is written: the states of all ranks, the Trainer's files, of which
# `trainer_state.json` is the last (then the Trainer deletes older checkpoints), our marker. So a checkpoint that was
# cut off after the Trainer's last file is complete but for the marker, also where it is the only one
# (`save_total_limit: 1`).


class CheckpointMark(TrainerCallback, ExportableState):
    """An entry of `trainer_state.json`: the checkpoint of this optimizer step was written with odb.

    It knows no trainer, so that the Trainer can make it anew (`restore_callback_states_from_checkpoint`).
    """

    def __init__(self, optimizer_steps: int = 0):
        self.optimizer_steps = optimizer_steps

    def state(self) -> dict[str, Any]:
        return {"args": {"optimizer_steps": self.optimizer_steps}, "attributes": {}}

    def mark(self, state: Any) -> None:
        self.optimizer_steps = state.global_step
        state.stateful_callbacks[type(self).__name__] = self.state()


class _StepBegin(NamedTuple):
    """A run at the begin of an optimizer step. optimizer_steps: done by then."""

    optimizer_steps: int
    data: DataState
    run: dict[str, Any]
    random: tuple[Any, ...]


class CheckpointSaver:
    """Saves the run of one `train()`. Made by all ranks at the same place: it opens an exchange.

    trainer: an `ODBTrainerMixin`. silence_s: how long a rank may give no sign of life.
    """

    def __init__(self, trainer: Any, silence_s: float):
        self._trainer = trainer
        self.exchange = Exchange(None, silence_s)
        self._step: _StepBegin | None = None
        self._hashing = Hashing(trainer.args.process_index, writes_common=trainer.args.should_save)

    def begin_hashing(self) -> None:
        """Callbacks have seen the checkpoint that was saved last."""
        self._hashing.begin()

    def step_is_asked_for(self) -> None:
        """This rank leaves the end of the optimizer step before; it may wait for the others from here on."""
        self.exchange.step(f"the begin of optimizer step {self._trainer.odb_run.optimizer_steps + 1}")

    def step_begins(self) -> None:
        """Note the run as it is now. The Trainer's `global_step` stays until `step_ends`."""
        run = self._trainer.odb_run
        self.exchange.step(f"optimizer step {run.optimizer_steps + 1}")
        self._step = _StepBegin(
            run.optimizer_steps, run.loader.state(), run.state_dict(), random_states(self._trainer.args.device)
        )

    def step_ends(self) -> None:
        self._step = None

    @contextlib.contextmanager
    def saving(self, folder: Path) -> Iterator[None]:
        """Within it the Trainer writes its files to `folder`. Collective."""
        trainer, step = self._trainer, self._step
        self._hashing.stop()
        self._begin(folder)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, CheckpointMark):
                callback.mark(trainer.state)
        self.exchange.gather(b"1", f"the begin of saving {folder.name}")
        with kept_random_numbers(trainer.args.device, states=None if step is None else step.random):
            yield
        self.exchange.gather(b"1", f"the end of saving {folder.name}")
        if not folder.is_dir():
            # Folders of an older run with higher numbers can make the Trainer take the new one for the oldest.
            if self._marks:
                logger.warning("%s has been deleted by the Trainer after it was written (save_total_limit)", folder)
            return
        if self._marks:
            write_marker(folder, trainer.odb_run.loader.world_size, trainer.state.global_step)
        self._hashing.after(folder)

    def close(self, *, failed: bool = False) -> None:
        """failed: the training ends by an error, so other ranks may wait."""
        if failed:
            self._hashing.stop()
        else:
            self._hashing.wait()
        self.exchange.close(failed=failed)

    def _begin(self, folder: Path) -> None:
        """Write this rank's state."""
        run = self._trainer.odb_run
        folder.mkdir(parents=True, exist_ok=True)
        hash_file(folder, self._trainer.args.process_index).unlink(missing_ok=True)
        if self._marks:  # a checkpoint of this step that is written again is not whole until all is there
            (folder / MARKER).unlink(missing_ok=True)
            (folder / TRAINER_STATE).unlink(missing_ok=True)
            for name, ranks in ((RANK_FILE, run.loader.world_size), (HASHES, self._trainer.args.world_size)):
                for rank, path in by_rank(folder, name).items():
                    if rank >= ranks:  # of a run with more of them
                        path.unlink(missing_ok=True)
        now = self._step or _StepBegin(run.optimizer_steps, run.loader.state(), run.state_dict(), ())
        write_rank_state(folder, run.loader.rank, now.optimizer_steps, now.data.to_dict(), now.run)

    @property
    def _marks(self) -> bool:
        """Whether this rank writes the marker: one of each node does."""
        return bool(self._trainer.args.local_process_index == 0)
