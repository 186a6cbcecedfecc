"""I12 in loops of two ranks: the living are waited for, the dead end all waits, and the last line says why."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import GROUP_TIMEOUT, Outcome, run_ranks
from toy import Rows, pad

from odb_factory import ODBDataLoader

STEP = 4
BORDER = 0.5
NOTICED_S = 10.0
"""A rank that is gone ends the waits of the others within this time."""
THAW_S = 20


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    subprocess.Popen(["sh", "-c", f"sleep {THAW_S}; kill -CONT {os.getpid()}"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.1)


FAULTS: dict[str, Callable[[], None]] = {
    "is killed": kill,
    "is frozen": freeze,
    "sleeps": lambda: time.sleep(8),
    "sleeps for ever": lambda: time.sleep(3600),
    "leaves at once": lambda: os._exit(0),
}


def train(
    rank: int, *, victim: int, fault: str, step: float, started: str, exchange_timeout_s: int | None = None
) -> int:
    """Steps that end in a collective of all ranks, as those of a training do; rank `victim` has the fault at `step`, or
    before its first batch (-1), or between two steps (+ BORDER). `started`: a file whose time is that of the fault."""
    limit: dict[str, Any] = {} if exchange_timeout_s is None else {"exchange_timeout_s": exchange_timeout_s}

    def act(number: float) -> None:
        if rank == victim and number == step:
            Path(started).touch()
            FAULTS[fault]()

    number = -1
    if rank == victim and fault == "trains without odb":
        Path(started).touch()
        time.sleep(THAW_S)
        return 0
    with ODBDataLoader(
        Rows(), token_budget=64, batch_size=4, buffer_size=4, collate_fn=pad, num_workers=1, **limit
    ) as loader:
        time.sleep(3)  # as a training does that loads its model; meanwhile the ranks connect
        if rank == victim and fault == "ends its program":
            Path(started).touch()
            return 0
        act(number)
        for number, _ in enumerate(loader):
            act(number)
            dist.all_reduce(torch.ones(1))
            act(number + BORDER)
    return number + 1


@dataclass(frozen=True)
class Cell:
    """fault: of rank `victim`. said, other: what the last lines of the other rank and of `victim` have. ends_s: the
    latest end of the other rank, after the fault."""

    fault: str
    step: float
    said: tuple[str, ...]
    ends_s: float = NOTICED_S
    exchange_timeout_s: int | None = None
    group_timeout_s: float = 300
    other: tuple[str, ...] = ()
    victim: int = 1


GONE = ("rank 1 has ended without a word", "out-of-memory killer")
FROZEN = ("rank 1 gave no sign of life for 10 s", "exchange_timeout_s")
CELLS = {
    "killed in a step": Cell("is killed", STEP, GONE),
    "left without a word": Cell("leaves at once", STEP, GONE),
    # Its own threads, or a collective of the training, may reach their timeout first, so the last line differs.
    "asleep for ever": Cell("sleeps for ever", STEP, (), ends_s=45, exchange_timeout_s=3, group_timeout_s=15),
    "asleep for ever before": Cell("sleeps for ever", -1, (), ends_s=45, exchange_timeout_s=3, group_timeout_s=15),
    "rank 0 frozen": Cell(
        "is frozen",
        STEP,
        ("rank 0 gave no sign of life for 10 s",),
        ends_s=25,
        exchange_timeout_s=3,
        other=("CollectiveError",),
        victim=0,
    ),
    "frozen": Cell("is frozen", STEP, FROZEN, ends_s=25, exchange_timeout_s=3, other=("CollectiveError",)),
    "trains without odb": Cell(
        "trains without odb",
        -1,
        ("rank 1, which has not come", "`odb:` block"),
        ends_s=15,
        exchange_timeout_s=3,
    ),
    "ends its program": Cell("ends its program", -1, ("rank 1 has ended its program",)),
}
SLOW = {"frozen", "killed in a step", "asleep for ever before", "left without a word"}


def last_line(outcome: Outcome) -> str:
    return outcome.said.rstrip().rpartition("\n")[2]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell) -> tuple[Outcome, Outcome, float]:
    """How the rank without the fault and the other one ended, and how long after the fault the former did."""
    monkeypatch.setenv(GROUP_TIMEOUT, str(cell.group_timeout_s))
    started = folder / "started"
    ended = run_ranks(
        "distributed.test_patience:train",
        folder,
        limit_s=120,
        may_fail=True,
        ends_with=1 - cell.victim if cell.fault == "sleeps for ever" else None,
        victim=cell.victim,
        fault=cell.fault,
        step=cell.step,
        started=str(started),
        exchange_timeout_s=cell.exchange_timeout_s,
    )
    log = folder / f"rank{1 - cell.victim}.log"
    return ended[1 - cell.victim], ended[cell.victim], log.stat().st_mtime - started.stat().st_mtime


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in SLOW)) for name in CELLS])
def test_the_last_line_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cell = CELLS[name]
    first, second, seconds = run(tmp_path, monkeypatch, cell)
    assert first.returncode == 1, first
    assert all(text in last_line(first) for text in cell.said), (last_line(first), first)
    assert all(text in last_line(second) for text in cell.other), (last_line(second), second)
    assert seconds <= cell.ends_s, first


def test_a_rank_that_sleeps_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than exchange_timeout_s, which is for ranks that give no sign of life."""
    first, second, _ = run(tmp_path, monkeypatch, Cell("sleeps", STEP + BORDER, (), exchange_timeout_s=3))
    assert (first.returncode, second.returncode) == (0, 0), (first, second)
    assert first.value == second.value > 2 * STEP
