"""Errors that end a run: replace an error of known cause by one line that names cause, place and remedy."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from odb_factory.data.ranks import known_failure
from odb_factory.errors import CollectiveError, DataError, ODBError, one_line

SIGNS_OF_A_COLLECTIVE = (
    "gloo",
    "NCCL",
    "Connection closed by peer",
    "Connection reset by peer",
    "c10d",
    "ProcessGroup",
)
SIGNS_OF_A_FULL_DISK = ("No space left on device", "unexpected pos", "PytorchStreamWriter failed writing", "Disk quota")
SHARED_MEMORY = Path("/dev/shm")
MIB = 2**20
LESS_MEMORY = (
    "look for the system's out-of-memory killer (dmesg) or a memory limit of the job; lower num_workers "
    "(dataloader_num_workers) or buffer_size, or ask for more memory."
)


def ending(error: BaseException, output_dir: str | Path | None = None) -> BaseException:
    """The error to raise instead of `error`, which ends the run: an `ODBError` if the cause is known, else `error`.

    If a collective failed, waits briefly for another rank's report of the cause. output_dir: output folder of the run.
    """
    if isinstance(error, ODBError) or not isinstance(error, Exception):
        return error
    if (lost := lost_rank(error)) is not None:
        return lost
    for cause in _chain(error):
        if isinstance(cause, MemoryError):
            return DataError(f"this process ran out of memory: {LESS_MEMORY}")
        if (why := why_no_space(cause, output_dir)) is not None:
            return DataError(why)
    return error


def lost_rank(error: BaseException) -> CollectiveError | None:
    """The cause of a failed collective in training or in the framework's setup; None if unknown."""
    for cause in _chain(error):
        has_sign = isinstance(cause, RuntimeError) and any(sign in str(cause) for sign in SIGNS_OF_A_COLLECTIVE)
        if has_sign or type(cause).__name__.startswith("Dist"):
            failure = known_failure()
            return None if failure is None else CollectiveError(failure)
    return None


def why_worker_died(pid: int, code: int | None, place: str) -> str:
    """Why a data worker died, and the remedy. code: exit code, or -signal. place: the row that the worker processed."""
    who = f"a data worker (pid {pid}), {place},"
    if code == -signal.SIGBUS:
        return f"{who} crashed: {_full_shared_memory()}"
    if code is not None and code < 0 and code not in (-signal.SIGKILL, -signal.SIGTERM):
        name = signal.strsignal(-code) or f"signal {-code}"
        return f"{who} crashed ({name}) in a library that reads or collates rows; set num_workers to 0 to see where."
    if code is not None and code > 0:
        return (
            f"{who} ended itself (exit code {code}); look for what calls exit in dataset, collator or a library, for a "
            'program without `if __name__ == "__main__":` that spawns workers, or set num_workers to 0 to see where.'
        )
    return f"{who} was killed: {LESS_MEMORY}"


def why_no_space(error: BaseException, output_dir: str | Path | None = None) -> str | None:
    """The message for a full disk or full shared memory; None for any other error."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if not is_full and not any(sign in str(error) for sign in SIGNS_OF_A_FULL_DISK):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = Path(frames[-1].f_code.co_filename).parts if frames else ()
    if "shared memory" in str(error) or "/torch_" in str(error) or "multiprocessing" in raised_in:
        return f"{_full_shared_memory()} ({one_line(error)})"
    named = Path(os.fsdecode(error.filename)).parent if isinstance(error, OSError) and error.filename else None
    folders = [folder for folder in (named, output_dir, tempfile.gettempdir()) if folder and Path(folder).is_dir()]
    folder = folders[0] if named in folders else min(folders, key=lambda path: shutil.disk_usage(path).free)
    free = shutil.disk_usage(folder).free / MIB
    return (
        f"the disk of {folder} is full, or a quota on it ({free:.0f} MiB are free): free some space or set another "
        f"output_dir, then start again; a checkpoint that was cut off is passed over ({one_line(error)})."
    )


def _full_shared_memory() -> str:
    size = f" ({shutil.disk_usage(SHARED_MEMORY).total / MIB:.0f} MiB)" if SHARED_MEMORY.is_dir() else ""
    return (
        f"{SHARED_MEMORY}{size}, through which worker processes hand over batches, is full; make it larger "
        "(docker run --shm-size=16g), or lower num_workers (dataloader_num_workers)."
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
