"""The files of a checkpoint: those that are ours, those that a training loads, and their hashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import struct
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from odb_factory.data.state import DataState, Fields, check_figures, read_checked, read_json, read_state, write_checked
from odb_factory.errors import DataError, one_line
from odb_factory.log import get_logger

# ----------------------------------------------------------------------------------------------------------------------
# The files of a checkpoint that are ours: written whole or not at all, and read strictly.
# Every rank writes `odb_state_rank{r}.json`; when all have, `odb_state.json`, the marker, says so. Both hold a
# checksum over their content, so that a file that was cut off or edited is known as such.

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


# ----------------------------------------------------------------------------------------------------------------------
# The files of a checkpoint that a training loads, and whether they can be.
# The Trainer goes on with a fresh optimizer where `optimizer.pt` or `scheduler.pt` is missing, and a damaged file
# ends it inside safetensors or pickle, long after the model has been loaded. So every file is looked at before: its
# structure from its size, its head and its end, and its content where a hash was written with it.

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
FSDP_WEIGHTS, FSDP_OPTIMIZER = "pytorch_model_fsdp*", "optimizer_*"
DEEPSPEED = "global_step*"
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


def is_loaded_by(path: Path, rank: int, world_size: int) -> bool:
    """Whether this rank loads it: a file of all ranks, or its own. FSDP's, of any number of ranks, are shared out."""
    owner = rank_of(path)
    return owner is None or (owner % world_size if path.suffix == ".distcp" else owner) == rank


def rank_of(path: Path) -> int | None:
    """The rank that wrote a file for itself; None for a file of all ranks."""
    named = OF_A_RANK.fullmatch(path.name)
    return None if named is None else int(next(group for group in named.groups() if group))


def check_weights(folder: Path) -> None:
    """Raise `DataError` where weights are missing."""
    shards = [shard for name in INDICES if (folder / name).is_file() for shard in _shards(folder / name)]
    for shard in shards:
        if not shard.is_file():
            raise DataError(f"{shard}: it is missing")
    is_alone = any((folder / name).is_file() for name in WEIGHTS) or any(folder.glob("*/adapter_model.*"))
    if not (shards or is_alone or any(folder.glob(FSDP_WEIGHTS)) or any(folder.glob(DEEPSPEED))):
        raise DataError(f"{folder}: it holds no weights ({WEIGHTS[0]} or what another engine writes)")


def check_optimizer(folder: Path) -> None:
    """Raise `DataError` where the state of optimizer or schedule is missing."""
    is_alone = any((folder / name).is_file() for name in OPTIMIZERS)
    if not (is_alone or any(folder.glob(FSDP_OPTIMIZER)) or any(folder.glob(f"{DEEPSPEED}/*optim_states.pt"))):
        raise DataError(
            f"{folder / OPTIMIZERS[0]}: it is missing, so the optimizer would begin anew (`save_only_model: true` "
            "leaves it out)"
        )
    if not (folder / SCHEDULER).is_file():
        raise DataError(f"{folder / SCHEDULER}: it is missing, so the schedule would begin anew")


def _shards(index: Path) -> list[Path]:
    try:
        names = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{index}: it cannot be read ({type(error).__name__})") from None
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise DataError(f"{index}: it names {name[:80]!r}, which is no file beside it")
    return [index.with_name(name) for name in sorted(names)]


def check_structure(path: Path) -> None:
    """Raise `DataError` for a file that is missing, empty, cut off, or does not begin as its kind does."""
    try:
        with path.open("rb") as file:
            size, head = path.stat().st_size, file.read(8)
            if size == 0:
                raise DataError(f"{path}: it is empty")
            if not any(head):
                raise DataError(f"{path}: it is damaged (it begins with zeros)")
            if path.suffix == TENSORS:
                length = int.from_bytes(head, "little")
                if len(head) < 8 or size != _end_of_tensors(length, file.read(min(length, size))):
                    raise DataError(f"{path}: it was cut off ({size} bytes are not what its header says)")
            elif path.suffix in ARCHIVES:
                _check_archive(path, file, head)
    except FileNotFoundError:
        raise DataError(f"{path}: it is missing") from None
    except DataError:
        raise
    except Exception as error:  # of whatever a damaged header makes json and zipfile stumble over
        raise DataError(f"{path}: it cannot be read ({one_line(error)})") from None


def _end_of_tensors(length: int, header: bytes) -> int:
    """Bytes of a whole safetensors file: length of the header, the header, and the tensors that it describes."""
    if length != len(header):
        return -1
    tensors = (entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__")
    return struct.calcsize("<Q") + length + max(tensors, default=0)


def _check_archive(path: Path, file: BinaryIO, head: bytes) -> None:
    """What torch.save writes: a zip archive with a pickle in it or, in older releases, a row of pickles."""
    if head.startswith(PICKLE):
        return
    if not head.startswith(ZIP):
        raise DataError(f"{path}: it is damaged (it does not begin as a file of torch.save)")
    if not zipfile.is_zipfile(file):
        raise DataError(f"{path}: it was cut off (the end of the archive is missing)")
    with zipfile.ZipFile(file) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
        for name in pickles:
            with archive.open(name) as content:
                if content.read(1) != PICKLE:
                    raise DataError(f"{path}: it is damaged ({name} in it is no pickle)")


# ----------------------------------------------------------------------------------------------------------------------
# Hashes of the files of a checkpoint: written in the background after it, compared before it is loaded.
# Each rank hashes the files that it has written. Of a file above 1 GiB its size, its first and its last MiB and 64
# blocks of 1 MiB between them are hashed. The marker does not wait for the hashes: a checkpoint without them is
# looked at by its structure alone.

logger = get_logger(__name__)

HASHES = "odb_hashes_rank{rank}.json"
BLOCK = 1 << 20
WHOLE_UP_TO = 1 << 30
"""Larger files are sampled."""
NUM_BLOCKS = 66
NICENESS = 10
MAY_BE_MISSING = (*OPTIMIZERS, SCHEDULER)
"""`check_optimizer` asks for them, where data are not ignored."""


class Hashing:
    """Hashes checkpoints one after the other, in a thread that gives way to the training.

    `after` names a checkpoint that is written. It is hashed from `begin` on, which comes when callbacks have seen it
    (some rewrite its files).
    """

    def __init__(self, rank: int, *, writes_common: bool):
        self._rank, self._writes_common = rank, writes_common
        self._next: Path | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def after(self, folder: Path) -> None:
        self._next = folder

    def begin(self) -> None:
        if self._next is None:
            return
        folder, self._next = self._next, None
        self._stopped.clear()
        self._thread = threading.Thread(target=self._run, args=(folder,), name="odb-checkpoint-hashes", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Give up what is not done: its folder may be deleted or written again."""
        self._next = None
        self._stopped.set()
        self.wait()

    def wait(self) -> None:
        """Return when all is hashed."""
        self.begin()
        if self._thread is not None:
            self._thread.join()

    def _run(self, folder: Path) -> None:
        with contextlib.suppress(AttributeError, OSError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            files = {}
            for path in files_of(folder):
                if rank_of(path) == self._rank or (rank_of(path) is None and self._writes_common):
                    files[path.relative_to(folder).as_posix()] = entry_of(path, self._stopped)
            if not self._stopped.is_set():
                write_checked(hash_file(folder, self._rank), {"files": files})
        except OSError as error:
            if folder.is_dir():  # else the Trainer has deleted it
                logger.warning("%s: its hashes cannot be written (%s); training goes on", folder, one_line(error))


def hash_file(folder: Path, rank: int) -> Path:
    return folder / HASHES.format(rank=rank)


def entry_of(path: Path, stopped: threading.Event | None = None) -> dict[str, Any]:
    """Size and SHA-256 of a file, of a sampled one that of its blocks. stopped: set by another thread to give it up."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    is_sampled = size > WHOLE_UP_TO
    with path.open("rb") as file:
        for start in _blocks(size, is_sampled):
            if stopped is not None and stopped.is_set():
                break
            file.seek(start)
            digest.update(file.read(BLOCK))
    return {"bytes": size, "sampled": is_sampled, "sha256": digest.hexdigest()}


def _blocks(size: int, is_sampled: bool) -> Iterator[int]:
    if is_sampled:
        yield from ((size - BLOCK) * k // (NUM_BLOCKS - 1) for k in range(NUM_BLOCKS))
    else:
        yield from range(0, size, BLOCK)


def expected_entries(folder: Path, rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """What was hashed of the files that this rank loads; by path inside the folder. Empty without hash files."""
    found = by_rank(folder, HASHES)
    # Files of all ranks were hashed by one rank: rank 0, or the first of the node whose disk this is.
    readers = {min(found, default=0), *(other for other in found if other % world_size == rank)}
    entries: dict[str, dict[str, Any]] = {}
    for other in sorted(readers & found.keys()):
        with contextlib.suppress(DataError):  # a damaged hash file is none
            entries |= read_checked(found[other]).mapping("files")
    return {name: entry for name, entry in entries.items() if is_loaded_by(folder / name, rank, world_size)}


def check_content(folder: Path, rank: int, world_size: int) -> None:
    """Raise `DataError` that names the first file that this rank loads and that is damaged."""
    entries = expected_entries(folder, rank, world_size)
    files = {path for path in files_of(folder) if is_loaded_by(path, rank, world_size)}
    hashed = {folder / name for name in entries if name not in MAY_BE_MISSING}
    for path in sorted(files | hashed):
        check_structure(path)
        expected = entries.get(path.relative_to(folder).as_posix())
        if expected is not None:
            compare(path, expected)


def compare(path: Path, expected: dict[str, Any]) -> None:
    """Raise `DataError` where the content of a file is not what was hashed."""
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise DataError(f"{path}: it is damaged ({size} bytes, and {expected['bytes']} when it was saved)")
        if entry_of(path) != expected:
            raise DataError(f"{path}: it is damaged (its content is not what was saved)")
    except OSError as error:
        raise DataError(f"{path}: it cannot be read ({one_line(error)})") from None
