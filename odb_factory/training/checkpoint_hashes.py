"""Hashes of the files of a checkpoint: written in the background after it, compared before it is loaded.

Each rank hashes the files that it has written. Of a file above 1 GiB its size, its first and its last MiB and 64 blocks
of 1 MiB between them are hashed. The marker does not wait for the hashes: a checkpoint without them is looked at by its
structure alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from odb_factory.data.resume.checked_file import read_checked, write_checked
from odb_factory.errors import DataError, one_line
from odb_factory.log import get_logger
from odb_factory.training.checkpoint_files import (
    OPTIMIZERS,
    SCHEDULER,
    check_structure,
    files_of,
    is_loaded_by,
    rank_of,
)
from odb_factory.training.state_files import by_rank

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
