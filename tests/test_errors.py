"""Lines for the user: each log line once, whatever the logging configuration, information from one rank only; errors of
known cause in one line that says what, where and what to do."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing
from tqdm import tqdm

from odb_factory.ending import ending
from odb_factory.errors import CollectiveError, ConfigError, DataError, ODBError, one_line
from odb_factory.log import get_logger

logger = get_logger("odb_factory.test")
LOG = "get_logger('odb_factory.x').warning('a line')"
QUIET = "logging.getLogger('odb_factory').setLevel(logging.ERROR)"


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (LOG, ["[odb] a line"]),
        (f"logging.basicConfig(filename='/dev/null'); {LOG}", ["[odb] a line"]),
        # A console handler of the user prints each line once in its format, whether it exists before the logger or not.
        (f"logging.basicConfig(format='mine %(name)s %(message)s'); {LOG}", ["mine odb_factory.x a line"]),
        (
            "log = get_logger('odb_factory.x'); logging.basicConfig(format='mine %(message)s'); log.info('a line')",
            ["mine a line"],
        ),
        # The level is the user's.
        (f"{QUIET}; {LOG}", []),
        (f"get_logger('odb_factory.x'); {QUIET}; {LOG}", []),
    ],
)
def test_lines_on_the_console(code: str, lines: list[str]) -> None:
    code = f"import logging, sys\nfrom odb_factory.log import get_logger\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.splitlines() == lines


def test_a_line_stands_above_a_progress_bar(capsys: pytest.CaptureFixture) -> None:
    with tqdm(total=2) as bar:
        bar.update()
        logger.info("a line")
    lines = [line.rpartition("\r")[2] for line in capsys.readouterr().err.splitlines()]
    assert "[odb] a line" in lines


def test_other_ranks_of_torchrun_do_not_inform(monkeypatch, caplog) -> None:
    monkeypatch.setenv("RANK", "1")
    logger.info("a line")
    logger.warning("a warning")
    assert caplog.messages == ["a warning"]


def _log(rank: int, folder: Path) -> None:
    sys.stderr = (folder / str(rank)).open("w", encoding="utf-8", buffering=1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    logger.info("a line")
    logger.warning("a warning")
    dist.barrier()  # the other may still be connecting
    dist.destroy_process_group()


@pytest.mark.integration
def test_ranks_that_are_spawned_know_their_number(tmp_path: Path) -> None:
    """RANK is not set in spawned processes, and the rank is unknown when the logger is made."""
    torch.multiprocessing.spawn(_log, (tmp_path,), nprocs=2)
    lines = [(tmp_path / str(rank)).read_text().splitlines() for rank in range(2)]
    assert lines == [["[odb] a line", "[odb] a warning"], ["[odb] a warning"]]


# Errors

CAUSED = RuntimeError("an error occurred while generating the dataset")
CAUSED.__cause__ = UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
NAME, SHOWN = "img/\x1b]0;title\x07\x1b[31m.png", "img/\\x1b]0;title\\x07\\x1b[31m.png"
"""A file name that commands a terminal."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (CollectiveError("rank 1\nstopped"), "rank 1 stopped"),
        (ValueError("bad\nrow"), "ValueError: bad row"),
        (ValueError("x" * 1000), "ValueError: xxx"),
        (KeyboardInterrupt(), "interrupted from the keyboard"),
        (CAUSED, "RuntimeError: an error occurred while generating the dataset (caused by UnicodeEncodeError: "),
        (FileNotFoundError(NAME), f"FileNotFoundError: {SHOWN}"),
        (DataError(f"row 7: {NAME} é 日本"), f"row 7: {SHOWN} é 日本"),
    ],
)
def test_an_error_in_one_line(error: BaseException, line: str) -> None:
    assert one_line(error).startswith(line)
    assert len(one_line(error)) < 400 and "\n" not in one_line(error)


def test_errors_a_caller_may_catch() -> None:
    """A bad setting is a ValueError, a bad row a RuntimeError, and one name catches both."""
    assert issubclass(ConfigError, ODBError) and issubclass(ConfigError, ValueError)
    assert issubclass(DataError, ODBError) and issubclass(DataError, RuntimeError)


NO_ROOM = "unable to write to file </torch_12_34_0>: No space left on device (28)"
NO_ROOM_IN_A_CHECKPOINT = "[enforce fail at inline_container.cc:672] . unexpected pos 1732864 vs 1732752"
ENDS: list[tuple[BaseException, tuple[str, ...]]] = [
    (MemoryError(), ("this process ran out of memory", "num_workers")),
    (RuntimeError(NO_ROOM), ("/dev/shm", "is full", "--shm-size")),
    (RuntimeError(NO_ROOM_IN_A_CHECKPOINT), ("the disk of", "is full")),
    (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), ("the disk of", "is full")),
    (OSError(errno.ENOSPC, "No space left on device", "/proc/state.json"), ("the disk of /proc",)),
    # Not replaced
    *((error, ()) for error in (ValueError("no"), RuntimeError("no"), OSError(errno.EACCES, "no"), ODBError("x"))),
]


@pytest.mark.parametrize(("error", "words"), ENDS, ids=str)
def test_an_error_that_ends_a_run_names_its_cause(error: BaseException, words: tuple[str, ...], tmp_path: Path) -> None:
    reported = ending(error, tmp_path)
    assert (reported is error) == (not words)
    assert isinstance(reported, ODBError) or not words
    assert all(word in str(reported) for word in words) and "\n" not in str(reported)


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
