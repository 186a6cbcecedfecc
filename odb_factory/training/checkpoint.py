"""Checkpoints: their files and hashes, what a folder is, which one to resume, how a run loads one and saves one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from odb_factory.data.agreement import name_ranks
from odb_factory.data.progress import DataState, read_state
from odb_factory.data.ranks import ring_of
from odb_factory.data.saved import (
    Positive,
    check_figures,
    load_fields,
    read_checked,
    read_json,
    require,
    write_checked,
)
from odb_factory.errors import CollectiveError, ConfigError, DataError, ODBError, one_line
from odb_factory.log import get_logger
from odb_factory.random_numbers import kept_random_numbers, random_states
from odb_factory.training.arguments import replaced
from odb_factory.training.run import ODBRun

# ----------------------------------------------------------------------------------------------------------------------
# Our files of a checkpoint: written whole or not at all, and read strictly.
# Every rank writes `odb_state_rank{r}.json`; when all have, `odb_state.json`, the marker, says so. Both hold a
# checksum of their content, so that a file that was cut off or edited is recognized.

logger = get_logger(__name__)

MARKER = "odb_state.json"
RANK_FILE = "odb_state_rank{rank}.json"
TRAINER_STATE = "trainer_state.json"
MARK = "CheckpointMark"
"""The entry of `stateful_callbacks` in `trainer_state.json` with the optimizer step at which odb wrote the file."""
INCOMPLETE = "checkpoint-is-incomplete.txt"
"""In a checkpoint of transformers' `enable_jit_checkpoint` until it is complete."""
WAY_OUT = "name an older checkpoint, or set `resume: ignore_data` to take its model alone and restart the epoch"
NOT_RESUMABLE = "name an older checkpoint, or restart from its weights, if it has any, as model_name_or_path"


@dataclass(frozen=True)
class RankState:
    """One rank's file. optimizer_steps: done by then. data: its state; run: the figures of the run (JSON types)."""

    optimizer_steps: int
    data: DataState
    run: dict[str, Any]


@dataclass(frozen=True)
class TrainerRecord:
    """The Trainer's record of a checkpoint: optimizer steps and epochs done, and the step of our mark (-1: none)."""

    optimizer_steps: int = 0
    epochs: float = 0.0
    marked_steps: int = -1


def by_rank(folder: Path, name: str) -> dict[int, Path]:
    """The files of a folder of which each rank has one. name: with `{rank}` in it."""
    start, end = name.split("{rank}")
    found = {path.name.removeprefix(start).removesuffix(end): path for path in folder.glob(f"{start}*{end}")}
    return {int(rank): path for rank, path in sorted(found.items()) if rank.isascii() and rank.isdigit()}


def write_rank_state(folder: Path, state: RankState) -> None:
    content = {"optimizer_steps": state.optimizer_steps, "data": state.data.to_dict(), "run": state.run}
    write_checked(folder / RANK_FILE.format(rank=state.data.rank), content)


def write_marker(folder: Path, world_size: int, optimizer_steps: int) -> None:
    """Write the marker: all ranks have written their files. Several nodes may do so at once."""
    write_checked(folder / MARKER, {"world_size": world_size, "optimizer_steps": optimizer_steps})


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors about the content of a file begin with its path (no full stop)."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def read_rank_state(folder: Path, rank: int) -> RankState:
    path = folder / RANK_FILE.format(rank=rank)
    with _naming(path):
        file = read_checked(path, optimizer_steps=int, data=dict[str, Any], run=dict[str, Any])
        check_figures(file["run"], "run")
        data = read_state(file["data"])
        require(data.rank == rank, "data.rank", data.rank, "but the file is of another rank")
        return RankState(file["optimizer_steps"], data, file["run"])


def read_marker(folder: Path) -> tuple[int, int]:
    """(world size, optimizer steps) of the marker."""
    with _naming(folder / MARKER):
        marker = read_checked(folder / MARKER, world_size=Positive, optimizer_steps=int)
        return marker["world_size"], marker["optimizer_steps"]


def read_trainer_state(folder: Path) -> TrainerRecord:
    path = folder / TRAINER_STATE
    with _naming(path):
        saved = read_json(path)
        state = load_fields(saved, global_step=int, epoch=float | None)
        callbacks = load_fields({"stateful_callbacks": None} | saved, stateful_callbacks=dict[str, Any] | None)
        mark, marked = (callbacks["stateful_callbacks"] or {}).get(MARK), -1
        if mark is not None:
            name = f"stateful_callbacks.{MARK}"
            arguments = load_fields(mark, name, args=dict[str, Any])["args"]
            marked = load_fields(arguments, f"{name}.args", optimizer_steps=int)["optimizer_steps"]
        return TrainerRecord(state["global_step"], state["epoch"] or 0.0, marked)


def read_states(folder: Path, rank: int, world_size: int) -> list[RankState]:
    """This rank's state if as many ranks wrote the checkpoint; otherwise the states of all ranks.

    With kept optimizer steps the state of any rank is enough. Raises `DataError` that names the file.
    """
    written = by_rank(folder, RANK_FILE)
    own = rank if rank in written else min(written, default=rank)
    state = read_rank_state(folder, own)
    if state.data.mode == "keep":
        return [state]
    written_by = state.data.world_size
    if written_by == world_size:
        return [state if own == rank else read_rank_state(folder, rank)]
    return [state if other == own else read_rank_state(folder, other) for other in range(written_by)]


# ----------------------------------------------------------------------------------------------------------------------
# The files that a training loads, and whether it can.
# The Trainer continues with a fresh optimizer if `optimizer.pt` or `scheduler.pt` is missing, and a damaged file ends
# it inside safetensors or pickle, long after the model has been loaded. So every file is checked before: its structure
# by its size, head and end, and its content if it was hashed when it was written.

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
FSDP_WEIGHTS, FSDP_OPTIMIZER = "pytorch_model_fsdp*", "optimizer_*"
DEEPSPEED = "global_step*"
DEEPSPEED_STATES = f"{DEEPSPEED}/*model_states.pt"
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
SCHEDULER = "scheduler.pt"
TENSORS, ARCHIVES = ".safetensors", (".pt", ".pth", ".bin")
NOT_LOADED = ("training_args.bin",)
OF_A_RANK = re.compile(r"rng_state_(\d+)\.pth|.*_pp_rank_(\d+)_.*|__(\d+)_\d+\.distcp", re.ASCII)
"""Names of files of one rank: random numbers, DeepSpeed's `zero_pp_rank_3_mp_rank_00_model_states.pt`, FSDP's."""
ZIP, PICKLE = b"PK\3\4", b"\x80"


def files_of(folder: Path) -> list[Path]:
    """Every file of a checkpoint that a training loads tensors or numbers from, of all ranks."""
    found = [path for path in folder.iterdir() if path.suffix in (TENSORS, *ARCHIVES) and path.name not in NOT_LOADED]
    found += [path for path in folder.glob("*/adapter_model.*") if path.suffix in (TENSORS, *ARCHIVES)]
    for pattern in (FSDP_WEIGHTS, FSDP_OPTIMIZER, DEEPSPEED):
        found += [path for part in folder.glob(pattern) if part.is_dir() for path in part.iterdir()]
    return sorted({path for path in found if path.is_file()})


def rank_of(path: Path) -> int | None:
    """The rank that wrote a file for itself; None for a file of all ranks."""
    named = OF_A_RANK.fullmatch(path.name)
    return None if named is None else int(next(group for group in named.groups() if group))


def check_weights(folder: Path) -> None:
    """Raise `DataError` if weights are missing."""
    shards = [shard for name in INDICES if (folder / name).is_file() for shard in _shards(folder / name)]
    for shard in shards:
        if not shard.is_file():
            raise DataError(f"{shard}: it is missing")
    is_alone = any((folder / name).is_file() for name in WEIGHTS) or any(folder.glob("*/adapter_model.*"))
    if not (shards or is_alone or any(folder.glob(FSDP_WEIGHTS)) or any(folder.glob(DEEPSPEED))):
        raise DataError(f"{folder}: it holds no weights ({WEIGHTS[0]} or what another engine writes)")


def _shards(index: Path) -> list[Path]:
    try:
        names = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{index}: it cannot be read ({type(error).__name__})") from None
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise DataError(f"{index}: it names {name[:80]!r}, which is not a file beside it")
    return [index.with_name(name) for name in sorted(names)]


def check_optimizer(folder: Path, *, by_deepspeed: bool | None = None) -> None:
    """Raise `DataError` if the state of optimizer or schedule is missing.

    DeepSpeed's own files are complete or not loaded by it: without ZeRO its optimizer is in that of the model, and so
    is a schedule of its configuration. by_deepspeed: whether it loads the checkpoint; None: not known.
    """
    if any(folder.glob(DEEPSPEED_STATES)):
        if by_deepspeed is False:
            raise DataError(
                f"{folder}: the states of its optimizer and schedule are DeepSpeed's, which this training does not "
                "use, so they would restart"
            )
        return
    is_alone = any((folder / name).is_file() for name in OPTIMIZERS)
    if not (is_alone or any(folder.glob(FSDP_OPTIMIZER))):
        raise DataError(
            f"{folder / OPTIMIZERS[0]}: it is missing, so the optimizer would restart (`save_only_model: true` leaves "
            "it out)"
        )
    if not (folder / SCHEDULER).is_file():
        raise DataError(f"{folder / SCHEDULER}: it is missing, so the schedule would restart")


def check_deepspeed(folder: Path, rank: int, world_size: int) -> None:
    """Raise `DataError` for a checkpoint that DeepSpeed would not load on these ranks, once it has made its engine."""
    if not any(folder.glob(DEEPSPEED_STATES)):
        raise DataError(f"{folder}: it holds no state of DeepSpeed, which this training uses and which loads no other")
    if not any(folder.glob(f"{DEEPSPEED}/*zero_pp_rank_*")) or (folder / "latest_universal").exists():
        return
    written_by = world_size
    with contextlib.suppress(DataError):  # our files need not be whole to take the model alone
        written_by = read_states(folder, rank, world_size)[0].data.world_size
    if written_by != world_size:
        raise DataError(
            f"{folder}: ZeRO has split its optimizer among {written_by} ranks, and DeepSpeed does not load it on "
            f"{world_size} (its ds_to_universal.py makes a checkpoint for any number)"
        )


def check_file(path: Path, expected: Mapping[str, Any] | None) -> None:
    """Raise `DataError` for a file that is missing, empty, cut off, or does not begin as its kind does; or whose
    content is not what was hashed. expected: its hash entry, if it has one."""
    try:
        with path.open("rb") as file:
            size, head = path.stat().st_size, file.read(8)
        if size == 0:
            raise DataError(f"{path}: it is empty")
        if not any(head):
            raise DataError(f"{path}: it is damaged (it begins with zeros)")
        if path.suffix == TENSORS:
            with safe_open(path, "pt"):  # compares the size with the header
                pass
        elif path.suffix in ARCHIVES and not head.startswith(PICKLE):  # older releases of torch write bare pickles
            _check_archive(path, head)
        if expected is None:
            return
        if size != expected["bytes"]:
            raise DataError(f"{path}: it is damaged ({size} bytes, and {expected['bytes']} when it was saved)")
        if entry_of(path) != expected:
            raise DataError(f"{path}: it is damaged (its content is not what was saved)")
    except FileNotFoundError:
        raise DataError(f"{path}: it is missing") from None
    except SafetensorError as error:
        raise DataError(f"{path}: it was cut off or damaged ({one_line(error)})") from None
    except DataError:
        raise
    except Exception as error:  # OSError, and whatever zipfile raises for a damaged header
        raise DataError(f"{path}: it cannot be read ({one_line(error)})") from None


def _check_archive(path: Path, head: bytes) -> None:
    """The zip archive with a pickle in it that torch.save writes."""
    if not head.startswith(ZIP):
        raise DataError(f"{path}: it is damaged (it does not begin as a file of torch.save)")
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path}: it was cut off (the end of the archive is missing)")
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith("data.pkl") and archive.open(name).read(1) != PICKLE:
                raise DataError(f"{path}: it is damaged ({name} in it is not a pickle)")


# ----------------------------------------------------------------------------------------------------------------------
# Hashes of these files: written in the background after a checkpoint, compared before one is loaded.
# Each rank hashes the files that it has written. Of a file above 1 GiB the size, the first and last MiB and 64 blocks
# of 1 MiB between them are hashed. The marker does not wait for the hashes: of a checkpoint without them only the
# structure is checked.

HASHES = "odb_hashes_rank{rank}.json"
BLOCK = 1 << 20
WHOLE_UP_TO = 1 << 30
"""Larger files are sampled."""
NUM_BLOCKS = 66
NICENESS = 10


def write_hashes(folder: Path, rank: int, *, writes_common: bool, stopped: threading.Event) -> None:
    """Hash the files that this rank has written; nothing is written if `stopped` is set before the end. Runs in a
    thread, with low priority. writes_common: this rank hashes the files of all ranks too."""
    with contextlib.suppress(AttributeError, OSError):  # of this thread alone, on Linux
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    try:
        files = {}
        for path in files_of(folder):
            if rank_of(path) == rank or (rank_of(path) is None and writes_common):
                files[path.relative_to(folder).as_posix()] = entry_of(path, stopped)
        if not stopped.is_set():
            write_checked(folder / HASHES.format(rank=rank), {"files": files})
    except OSError as error:
        if folder.is_dir():  # else the Trainer has deleted it
            logger.warning("%s: its hashes cannot be written (%s); training continues", folder, one_line(error))


def entry_of(path: Path, stopped: threading.Event | None = None) -> dict[str, Any]:
    """Size and SHA-256 of a file, or of the blocks of a sampled one. stopped: set by another thread to give it up."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    starts: Sequence[int] = range(0, size, BLOCK)
    if size > WHOLE_UP_TO:
        starts = [(size - BLOCK) * k // (NUM_BLOCKS - 1) for k in range(NUM_BLOCKS)]
    with path.open("rb") as file:
        for start in starts:
            if stopped is not None and stopped.is_set():
                break
            file.seek(start)
            digest.update(file.read(BLOCK))
    return {"bytes": size, "sampled": size > WHOLE_UP_TO, "sha256": digest.hexdigest()}


def check_content(folder: Path, rank: int, world_size: int) -> None:
    """Raise `DataError` that names the first damaged file of those that this rank loads."""
    hash_files = by_rank(folder, HASHES)
    # Files of all ranks were hashed by one rank: rank 0, or the first rank of the node that has this disk.
    writers = {min(hash_files, default=0), *(other for other in hash_files if other % world_size == rank)}
    entries: dict[str, dict[str, Any]] = {}
    for other in sorted(writers & hash_files.keys()):
        with contextlib.suppress(DataError):  # a damaged hash file counts as missing
            entries |= read_checked(hash_files[other], files=dict[str, Any])["files"]
    may_be_missing = (*OPTIMIZERS, SCHEDULER)  # `check_optimizer` checks for them, unless data are ignored
    for path in sorted({*files_of(folder), *(folder / name for name in entries if name not in may_be_missing)}):
        owner = rank_of(path)
        if owner is not None and path.suffix == ".distcp":  # FSDP's, of any number of ranks, are shared out
            owner %= world_size
        if owner in (None, rank):
            check_file(path, entries.get(path.relative_to(folder).as_posix()))


# ----------------------------------------------------------------------------------------------------------------------
# Read a checkpoint folder: what this rank can resume from it.


@dataclass(frozen=True)
class Checkpoint:
    """A folder as this rank finds it.

    problem: why it is incomplete; "" if it is complete. advice: what to do then. is_usable: everything that this rank
    loads is complete, only the end of the save is missing. is_stock: written without odb. states: of this rank, or of
    all ranks that wrote it (see `read_states`); none of a stock checkpoint. restarted: with `ignore_data`, what is
    missing and therefore restarts.
    """

    folder: Path
    problem: str = ""
    advice: str = WAY_OUT
    is_usable: bool = False
    is_stock: bool = False
    record: TrainerRecord = field(default_factory=TrainerRecord)
    states: Sequence[RankState] = ()
    restarted: Sequence[str] = ()


def read_checkpoint(folder: Path, trainer: Any) -> Checkpoint:
    """Read and check every file of a checkpoint that this rank loads; with `ignore_data` only the model has to be
    complete.

    Raises nothing: the other ranks wait for the answer.
    """
    rank, world_size, advice = trainer.args.process_index, trainer.args.world_size, NOT_RESUMABLE
    try:
        if not folder.is_dir():
            raise DataError(f"{str(folder)!r} is no folder")
        record = read_trainer_state(folder)
        check_weights(folder)
        check_content(folder, rank, world_size)
        if trainer.is_deepspeed_enabled:
            check_deepspeed(folder, rank, world_size)
        if trainer.odb.config.resume == "ignore_data":
            return _with_model_alone(folder, record, trainer)
        advice = WAY_OUT
        check_optimizer(folder, by_deepspeed=trainer.is_deepspeed_enabled)
        if _is_stock(folder, record):
            problem = f"{folder / INCOMPLETE}: its saving did not end" if (folder / INCOMPLETE).exists() else ""
            return Checkpoint(folder, problem, is_usable=True, is_stock=True, record=record)
        states = _read_ours(folder, record, rank, world_size)
    except DataError as error:
        return Checkpoint(folder, str(error), advice)
    except Exception as error:  # whatever is in the folder
        return Checkpoint(folder, f"{folder}: it cannot be read ({one_line(error)})", NOT_RESUMABLE)
    problem = ""
    try:
        ranks, steps = read_marker(folder)
        if (ranks, steps) != (states[0].data.world_size, record.optimizer_steps):
            problem = f"{folder / MARKER}: it names {ranks} ranks and {steps} optimizer steps, the other files do not"
    except DataError as error:
        problem = str(error)
    return Checkpoint(folder, problem, is_usable=True, record=record, states=states)


def _with_model_alone(folder: Path, record: TrainerRecord, trainer: Any) -> Checkpoint:
    states: Sequence[RankState] = ()
    restarted = []
    try:
        if _is_stock(folder, record):
            raise DataError("it was written without odb")
        states = _read_ours(folder, record, trainer.args.process_index, trainer.args.world_size)
    except DataError as error:
        restarted.append(f"the figures of the run restart as well ({error})")
    try:
        check_optimizer(folder, by_deepspeed=trainer.is_deepspeed_enabled)
    except DataError as error:
        restarted.append(str(error))
    return Checkpoint(folder, is_usable=True, record=record, states=states, restarted=restarted)


def _read_ours(folder: Path, record: TrainerRecord, rank: int, world_size: int) -> list[RankState]:
    """`read_states`; raises `DataError` unless they and the Trainer's files are of the same optimizer step."""
    states = read_states(folder, rank, world_size)
    if record.marked_steps != record.optimizer_steps:
        raise DataError(
            f"{folder}: trainer_state.json (optimizer step {record.optimizer_steps}) was written without odb, and "
            "odb_state*.json files are beside it; if it was, remove these"
        )
    for state in states:
        if state.optimizer_steps != record.optimizer_steps:
            raise DataError(
                f"{folder / RANK_FILE.format(rank=state.data.rank)}: it is of optimizer step "
                f"{state.optimizer_steps}, and trainer_state.json of {record.optimizer_steps}"
            )
    return states


def _is_stock(folder: Path, record: TrainerRecord) -> bool:
    """Whether it was written by a training without odb: it holds none of our files.

    A stock training that resumed from a checkpoint of ours carries our mark along, with an older optimizer step.
    """
    return not _has_our_files(folder) and record.marked_steps != record.optimizer_steps


def _has_our_files(folder: Path) -> bool:
    return (folder / MARKER).exists() or bool(by_rank(folder, RANK_FILE))


# ----------------------------------------------------------------------------------------------------------------------
# Choose the checkpoint to resume: the requested one, or an older one if that is damaged; the same on all ranks.
# Every rank reads the folders that it can see (nodes may have disks of their own). From the requested checkpoint
# backwards the ranks gather what they find in each, and take the first that is complete on all of them; if there is
# none, the newest that only lacks the end of its save. Reasons travel with the answers, so that all ranks end with the
# same line.

NONE_LEFT = -1
Gather = Callable[[Any], list[Any]]
"""A message of each rank (JSON types) -> those of all ranks, in rank order."""


def number_of(folder: Path) -> int:
    """N of `checkpoint-N`; -1 for a folder of another name."""
    start, _, end = folder.name.rpartition("-")
    return int(end) if start == PREFIX_CHECKPOINT_DIR and end.isascii() and end.isdigit() else -1


def find_checkpoint(trainer: Any, asked: Any) -> Checkpoint | None:
    """The checkpoint to resume, None to start from the beginning. Collective: every rank calls it.

    trainer: with odb. asked: the argument `resume_from_checkpoint`: a folder, True for the newest in `output_dir`, None
    or False for none.
    Raises `ConfigError` or `DataError` on all ranks if what is asked for is not a checkpoint, or is damaged and there
    is no older one.
    """
    folders, problem = _candidates(asked, str(trainer.args.output_dir))
    gather: Gather = trainer.odb.gather
    requests = gather([problem, max(folders, default=NONE_LEFT)])
    if problem := next((problem for problem, _ in requests if problem is not None), None):
        raise ConfigError(problem)
    without = [other for other, (_, number) in enumerate(requests) if number == NONE_LEFT]
    if len(without) == len(requests):
        return None
    if without:
        raise ConfigError(
            f"resume_from_checkpoint: ranks {without} find no checkpoint and the others do; give all nodes the same "
            "setting, and the checkpoint on a disk that all can read."
        )
    number = requested = max(number for _, number in requests)
    asked_folder = folders[max(folders)]
    why, advice = "", WAY_OUT
    cut_off: Checkpoint | None = None
    while number != NONE_LEFT:
        path = folders.get(number, asked_folder.with_name(f"{PREFIX_CHECKPOINT_DIR}-{number}"))
        found = read_checkpoint(path, trainer)
        older = max((other for other in folders if other < number), default=NONE_LEFT)
        answers = gather([found.problem, found.advice, found.is_usable, found.is_stock, older])
        problems, advices, usable, stock, olders = zip(*answers)
        if number == requested and any(problems):
            named = [(f"rank {other}: {one}", advices[other]) for other, one in enumerate(problems) if one]
            why, advice = named[0] if len(set(problems)) > 1 else (problems[0], advices[0])
        is_candidate = all(usable) and (not any(stock) or (all(stock) and number == requested))
        if is_candidate and not any(problems):
            if number != requested:
                logger.warning("%s is incomplete (%s); resuming %s", asked_folder, why, path.name)
            return found
        if number == requested and any(stock) and not any(problems):
            raise DataError(
                f"{path}: some ranks find the files of odb in it and others do not; copy the odb_state*.json files of "
                "all nodes to where all ranks can read them."
            )
        if is_candidate:
            cut_off = cut_off or found
        number = max(olders)
    if cut_off is None:
        raise DataError(f"resume_from_checkpoint: {why}; {advice}.")
    logger.warning(
        "%s: its saving was cut off (%s), and there is no older checkpoint that is complete; everything this training "
        "loads from it is complete, so it is resumed, and no row is lost or trained on twice",
        cut_off.folder,
        why,
    )
    return cut_off


def _candidates(asked: Any, output_dir: str) -> tuple[dict[int, Path], str | None]:
    """The requested checkpoint and the older ones beside it, by number; why there are none although one is requested.

    The number of a folder of another name is 0.
    """
    try:
        folder = _asked_folder(asked, output_dir)
    except ODBError as error:
        return {}, str(error)
    except Exception as error:
        return {}, f"resume_from_checkpoint: {asked!r}: {one_line(error)}."
    if folder is None:
        return {}, None
    number = max(number_of(folder), 0)
    beside = {number_of(one): one for one in folder.parent.glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    return {other: path for other, path in beside.items() if 0 <= other < number} | {number: folder}, None


def _asked_folder(asked: Any, output_dir: str) -> Path | None:
    """Raises `ConfigError` if it is not a checkpoint by its name or content."""
    if asked is None or asked is False or asked == "":
        return None
    if asked is True:
        newest = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
        if newest is None:
            raise ConfigError(f"resume_from_checkpoint: True, but {output_dir!r} holds no checkpoint; name one.")
        return Path(newest)
    folder = Path(os.path.abspath(asked)) if isinstance(asked, str | os.PathLike) else None
    if folder is None or not folder.is_dir():
        name = asked if folder is None else str(asked)
        raise ConfigError(f"resume_from_checkpoint: {name!r} is no folder; name a checkpoint of this training.")
    inside = [other for other in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if number_of(other) >= 0]
    if inside and not _has_our_files(folder):
        newest = str(Path(asked) / max(inside, key=number_of).name)
        raise ConfigError(
            f"resume_from_checkpoint: {str(asked)!r} holds checkpoints and is none; name one of them, {newest!r} is "
            "the newest."
        )
    return folder


# ----------------------------------------------------------------------------------------------------------------------
# Set a run to where a checkpoint left it.

EPOCHS_ROUNDING = 1e-6


def load(run: ODBRun, checkpoint: Checkpoint, gather: Gather) -> None:
    """Load a checkpoint on all ranks, or raise on all of them what the first one cannot load. Collective."""
    problem: Exception | None = None
    try:
        if run.config.resume == "ignore_data":
            _load_without_data(run, checkpoint)
        elif checkpoint.is_stock:
            _load_stock(run, checkpoint)
        else:
            try:
                run.loader.load_state_dict([state.data.to_dict() for state in checkpoint.states])
            except DataError as error:
                raise DataError(f"{checkpoint.folder}: {error}.") from None
            _load_figures(run, checkpoint)
    except Exception as error:
        problem = error
    answers = gather(None if problem is None else one_line(problem))
    if problem is not None and len(answers) == 1:
        raise problem
    for rank, reason in enumerate(answers):
        if reason is not None:
            raise CollectiveError(reason if len(set(answers)) == 1 else f"rank {rank}: {reason}") from problem


def _load_figures(run: ODBRun, checkpoint: Checkpoint) -> None:
    states = checkpoint.states
    state = next((state for state in states if state.data.rank == run.loader.rank), states[0])
    try:
        run.load_state_dict(state.run)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{checkpoint.folder}: the figures of the run in the state of rank {state.data.rank} are not those this "
            f"odb_factory writes ({type(error).__name__}: {error}); {WAY_OUT}."
        ) from None


def _load_without_data(run: ODBRun, checkpoint: Checkpoint) -> None:
    """The model alone, and of our files the figures of the run, if they can be read."""
    restarted, epoch = list(checkpoint.restarted), int(checkpoint.record.epochs)
    if checkpoint.states:
        try:
            _load_figures(run, checkpoint)
        except DataError as error:
            restarted.append(f"the figures of the run restart as well ({error})")
            run.begin_at(checkpoint.record.optimizer_steps, checkpoint.record.epochs)
    else:
        run.begin_at(checkpoint.record.optimizer_steps, checkpoint.record.epochs)
    for reason in restarted:
        logger.warning("resume: ignore_data: %s", reason)
    run.loader.restart(epoch)
    run.restart_epoch(epoch)


def _load_stock(run: ODBRun, checkpoint: Checkpoint) -> None:
    """A checkpoint of stock training: exactly with kept optimizer steps; else by its share of an epoch."""
    name, record = checkpoint.folder.name, checkpoint.record
    if run.config.keeps:
        _check_stock_steps(run, checkpoint)
    done = run.loader.skip(optimizer_steps=record.optimizer_steps, epochs=record.epochs)
    run.begin_at(record.optimizer_steps, record.epochs)
    if done is None:
        logger.info("%s was written without odb, whose optimizer steps are the same: the training continues", name)
        return
    logger.warning(
        "%s was written without odb, which does not record the rows trained on: the first %d samples of epoch %d count "
        "as done; if the order differs, some rows are trained on twice in this epoch and some not at all",
        name,
        done,
        int(record.epochs),
    )


def _check_stock_steps(run: ODBRun, checkpoint: Checkpoint) -> None:
    """Raise `DataError` if the epochs of a checkpoint imply another number of samples in its optimizer steps."""
    an_epoch, num_samples, size = run.loader.num_optimizer_steps, run.loader.num_samples, run.loader.global_batch_size
    if an_epoch is None or num_samples is None or size is None:
        return
    steps, epochs = checkpoint.record.optimizer_steps, checkpoint.record.epochs
    epoch, done = divmod(steps, max(an_epoch, 1))
    expected = done * size / num_samples
    # Stock counts epochs in micro-steps, of which the last may have fewer samples.
    if abs(epochs - epoch - expected) > expected * size / max(num_samples - size, 1) + EPOCHS_ROUNDING:
        raise DataError(
            f"{checkpoint.folder}: it was written without odb, and says {epochs:.4g} epochs in {steps} "
            f"optimizer steps, which with {size} samples each are {epoch + expected:.4g}: set global_batch_size to the "
            "samples that an optimizer step had, or `resume: ignore_data` to restart the epoch."
        )


def load_sharded_optimizer(trainer: Any, folder: Path) -> None:
    """Load the state of the optimizer from shards of FSDP, if nothing is loaded yet. Collective.

    accelerate (1.11) asks an optimizer that has taken no step what to load, and such a one has no state, so that its
    moments would restart without a word.
    """
    from torch.distributed import checkpoint  # heavy
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate's wrapper
    shards = next((path for path in folder.glob(FSDP_OPTIMIZER) if path.is_dir()), None)
    if shards is None or any(optimizer.state.values()):
        return
    state = {"optimizer": get_optimizer_state_dict(trainer.model, optimizer)}
    checkpoint.load(state, checkpoint_id=shards)
    set_optimizer_state_dict(trainer.model, optimizer, state["optimizer"])


# ----------------------------------------------------------------------------------------------------------------------
# transformers' `enable_jit_checkpoint`: after SIGTERM all ranks save the same optimizer step, and the training ends.
# Stock saves at the next event in each process. A signal reaches the processes at different moments, or one node only,
# so ranks would save different steps and wait for each other. Here a signal is a request that each rank sends to the
# others at the end of an optimizer step. There the Trainer saves as always, with the weights of `global_step` under
# every engine (DeepSpeed updates them before `on_pre_optimizer_step`, where stock saves).


class Preemption(TrainerCallback):
    """Handles SIGTERM during one `train()`; does nothing without `enable_jit_checkpoint`. Runs after callbacks that
    request an evaluation.
    """

    def __init__(self, training: Any):
        self._trainer, self._exchange = training.trainer, training.saver.exchange
        callbacks = self._trainer.callback_handler.callbacks
        self._stock: Any = next((one for one in callbacks if getattr(one, "jit_manager", None) is not None), None)
        self._manager: Any = getattr(self._stock, "jit_manager", None)
        self._is_over = False

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it stock's callback records signals and acts on none."""
        if self._manager is None:
            yield
            return
        try:
            with replaced(self._stock, jit_manager=None):
                yield
        finally:
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
            control.should_evaluate = False  # the sender of SIGTERM does not wait for long
            logger.warning(
                "SIGTERM on %s: all ranks save optimizer step %d, and the training ends",
                name_ranks(asking),
                state.global_step,
            )

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_over:
            control.should_evaluate = control.should_save = False


# ----------------------------------------------------------------------------------------------------------------------
# Every save of the Trainer, whoever requests it and at whatever moment, becomes a checkpoint that can be resumed.
# `Trainer._save_checkpoint` writes weights and the number of optimizer steps that are done (`state.global_step`).
# The data state of a run is ahead of that number from the last backward of an optimizer step to its end. So the state
# is recorded at the start of each optimizer step, with the random numbers, and a save in the middle of a step writes
# this record.
# The order in which a checkpoint is written: the states of all ranks, the Trainer's files, of which
# `trainer_state.json` is the last (then the Trainer deletes older checkpoints), our marker. So a checkpoint that was
# cut off after the Trainer's last file is complete but for the marker, also where it is the only one
# (`save_total_limit: 1`).


class CheckpointMark(TrainerCallback, ExportableState):
    """An entry of `trainer_state.json`: the checkpoint of this optimizer step was written with odb.

    It holds no trainer, so that the Trainer can recreate it (`restore_callback_states_from_checkpoint`).
    """

    def __init__(self, optimizer_steps: int = 0):
        self.optimizer_steps = optimizer_steps

    def state(self) -> dict[str, Any]:
        return {"args": {"optimizer_steps": self.optimizer_steps}, "attributes": {}}

    def mark(self, state: Any) -> None:
        self.optimizer_steps = state.global_step
        state.stateful_callbacks[type(self).__name__] = self.state()


class CheckpointSaver:
    """Saves the run of a `Training`. All ranks create it at the same place: it opens an exchange."""

    def __init__(self, training: Any):
        self._training, self._trainer = training, training.trainer
        silence_s = training.odb.config.exchange_timeout_s
        self.exchange = ring_of(None, silence_s).main
        self._step: tuple[RankState, tuple[Any, ...]] | None = None
        """The run at the begin of the optimizer step in progress, and the random numbers."""
        self._saved: Path | None = None
        self._hashing: threading.Thread | None = None
        self._stopped = threading.Event()

    def begin_hashing(self) -> None:
        """Hash the checkpoint that was saved last: callbacks have seen it (some rewrite its files)."""
        if self._saved is not None:
            args = self._trainer.args
            hashes = partial(
                write_hashes, self._saved, args.process_index, writes_common=args.should_save, stopped=self._stopped
            )
            self._hashing = threading.Thread(target=hashes, name="odb-checkpoint-hashes", daemon=True)
            self._hashing.start()
            self._saved = None

    def _end_hashing(self, *, is_stopped: bool) -> None:
        """is_stopped: give up unfinished hashes, because the folder may be deleted or written again."""
        if is_stopped:
            self._saved = None
            self._stopped.set()
        self.begin_hashing()
        if self._hashing is not None:
            self._hashing.join()
        self._stopped.clear()

    def step_begins(self) -> None:
        """Note the run as it is now. The Trainer's `global_step` stays until `step_ends`."""
        self._step = self._state(), random_states(self._trainer.args.device)

    def _state(self) -> RankState:
        run = self._training.run
        return RankState(run.optimizer_steps, run.loader.state(), run.state_dict())

    def step_ends(self) -> None:
        self._step = None

    @contextlib.contextmanager
    def saving(self, folder: Path) -> Iterator[None]:
        """Within it the Trainer writes its files to `folder`. Collective."""
        trainer, step = self._trainer, self._step
        self._end_hashing(is_stopped=True)
        self._begin(folder)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, CheckpointMark):
                callback.mark(trainer.state)
        self.exchange.gather(b"1", f"the begin of saving {folder.name}")
        with kept_random_numbers(trainer.args.device, states=None if step is None else step[1]):
            yield
        self.exchange.gather(b"1", f"the end of saving {folder.name}")
        if not folder.is_dir():
            # Folders of an older run with higher numbers can make the Trainer take the new one for the oldest.
            if self._marks:
                logger.warning("%s has been deleted by the Trainer after it was written (save_total_limit)", folder)
            return
        if self._marks:
            write_marker(folder, self._training.run.loader.world_size, trainer.state.global_step)
        self._saved = folder

    def close(self, *, failed: bool = False) -> None:
        """failed: the training ends by an error, so other ranks may wait."""
        self._end_hashing(is_stopped=failed)

    def _begin(self, folder: Path) -> None:
        """Write this rank's state."""
        run, args = self._training.run, self._trainer.args
        folder.mkdir(parents=True, exist_ok=True)
        (folder / HASHES.format(rank=args.process_index)).unlink(missing_ok=True)
        if self._marks:  # a checkpoint of this step that is written again is not whole until all is there
            (folder / MARKER).unlink(missing_ok=True)
            (folder / TRAINER_STATE).unlink(missing_ok=True)
            for name, ranks in ((RANK_FILE, run.loader.world_size), (HASHES, args.world_size)):
                for rank, path in by_rank(folder, name).items():
                    if rank >= ranks:  # of a run with more of them
                        path.unlink(missing_ok=True)
        write_rank_state(folder, self._state() if self._step is None else self._step[0])

    @property
    def _marks(self) -> bool:
        """Whether this rank writes the marker: one of each node does."""
        return bool(self._trainer.args.local_process_index == 0)
