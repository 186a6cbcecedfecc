"""Errors of known cause end a run in one line that says what, where and what to do."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from odb_factory.ending import ending
from odb_factory.errors import ODBError

NO_ROOM = "unable to write to file </torch_12_34_0>: No space left on device (28)"
NO_ROOM_IN_A_CHECKPOINT = "[enforce fail at inline_container.cc:672] . unexpected pos 1732864 vs 1732752"
CASES: dict[str, tuple[BaseException, tuple[str, ...]]] = {
    "no memory": (MemoryError(), ("this process ran out of memory", "num_workers")),
    "shared memory": (RuntimeError(NO_ROOM), ("/dev/shm", "is full", "--shm-size")),
    "disk full in a checkpoint": (RuntimeError(NO_ROOM_IN_A_CHECKPOINT), ("the disk of", "is full")),
    "quota": (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), ("the disk of", "is full")),
    "disk of a file": (OSError(errno.ENOSPC, "No space left on device", "/proc/state.json"), ("the disk of /proc",)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_message_names_the_cause(name: str, tmp_path: Path) -> None:
    error, words = CASES[name]
    reported = ending(error, tmp_path)
    assert isinstance(reported, ODBError) and all(word in str(reported) for word in words), str(reported)
    assert "\n" not in str(reported)


def test_other_errors_are_not_replaced() -> None:
    others = (ValueError("no"), RuntimeError("no"), OSError(errno.EACCES, "no"), KeyboardInterrupt(), ODBError("x"))
    assert all(ending(error) is error for error in others)


LOCKS = """
import multiprocessing
from odb_factory.ending import ending
try:
    locks = [multiprocessing.Lock() for _ in range(9)]
except OSError as error:
    print(ending(error, "/"))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a small /dev/shm is mounted by root")
def test_no_room_for_a_lock_names_shared_memory() -> None:
    """A full /dev/shm, with which no worker process can start."""
    small = "mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "
    command = ["unshare", "--mount", "sh", "-c", f'{small} "$0" -c "$1"', sys.executable, LOCKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    assert done.stdout.startswith("/dev/shm (0 MiB), through which") and "the disk of" not in done.stdout, done.stdout
