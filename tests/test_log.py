"""Every line reaches the user once, whatever their logging configuration; information comes from one rank only."""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing
from tqdm import tqdm

from odb_factory.log import get_logger

logger = get_logger("odb_factory.test")


def printed(code: str) -> list[str]:
    """The lines that a new process with this code prints to stderr."""
    code = f"import logging, sys\nfrom odb_factory.log import get_logger\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stderr.splitlines()


LOG = "get_logger('odb_factory.x').warning('a line')"
QUIET = "logging.getLogger('odb_factory').setLevel(logging.ERROR)"


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (LOG, ["[odb] a line"]),
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
    assert printed(code) == lines


def test_a_handler_for_a_file_does_not_take_the_lines_off_the_console(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = printed(f"logging.basicConfig(filename={str(log)!r}); get_logger('odb_factory.x').warning('a line')")
    assert lines == ["[odb] a line"]
    assert log.read_text() == "WARNING:odb_factory.x:a line\n"


def test_other_ranks_of_torchrun_do_not_inform(monkeypatch, caplog) -> None:
    monkeypatch.setenv("RANK", "1")
    logger.info("a line")
    logger.warning("a warning")
    assert caplog.messages == ["a warning"]


def test_a_line_stands_above_a_progress_bar(capsys: pytest.CaptureFixture) -> None:
    with tqdm(total=2) as bar:
        bar.update()
        logger.info("a line")
    lines = [line.rpartition("\r")[2] for line in capsys.readouterr().err.splitlines()]
    assert "[odb] a line" in lines


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


def test_lines_go_to_the_current_stderr(capsys: pytest.CaptureFixture) -> None:
    with io.StringIO() as before, contextlib.redirect_stderr(before):
        logger.info("a line")
    logger.info("another")
    assert capsys.readouterr().err == "[odb] another\n"
    assert logging.getLogger("odb_factory").propagate
