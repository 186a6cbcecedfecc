"""I12 in loops of several ranks: ranks wait for a living rank, a dead rank ends all waits, and the last line of every
rank has the first cause."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import GROUP_TIMEOUT, Outcome, run_ranks
from toy import Rows, pad

from odb_factory import ODBDataLoader
from odb_factory.data.ranks import BEAT_S, Channel

STEP = 4
BORDER = 0.5
NOTICED_S = 10.0
"""Longest time (s) from the end of a rank to the end of the waits of the others."""
THAW_S = 20
NUM_ROWS = 400


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    subprocess.Popen(["sh", "-c", f"sleep {THAW_S}; kill -CONT {os.getpid()}"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.1)


def fail() -> None:
    raise ValueError("it cannot go on")


def fail_later() -> None:
    """Fail when the planner already waits for another rank."""
    time.sleep(3)
    fail()


FAULTS: dict[str, Callable[[], None]] = {
    "is killed": kill,
    "is frozen": freeze,
    "sleeps": lambda: time.sleep(8),
    "sleeps for ever": lambda: time.sleep(3600),
    "raises": fail,
    "raises late": fail_later,
}


class Hanging(Rows):
    """Reading row `hangs` never ends, and row `bad` cannot be collated."""

    def __init__(self, hangs: int | None, bad: int | None):
        super().__init__(num_rows=NUM_ROWS)
        self.hangs, self.bad = hangs, bad

    def __getitem__(self, k: int) -> Any:
        if k == self.hangs:
            time.sleep(3600)
        return super().__getitem__(k)

    def collate(self, items: list[dict[str, Any]]) -> Any:
        if any(item["input_ids"][0] - 1 == self.bad for item in items):
            raise OSError("image file is truncated")
        return pad(items)


def no_room(*_: Any, **__: Any) -> Any:
    raise MemoryError("no room")


def train(
    rank: int,
    *,
    victims: list[int],
    fault: str,
    step: float,
    started: str,
    hangs: int | None = None,
    bad: int | None = None,
    **options: Any,
) -> int:
    """Optimizer steps that end in a collective of all ranks. The `victims` have the fault at `step`, before their first
    batch (-1), or between two steps (+ BORDER). started: a file that is touched at the fault. hangs, bad: as in
    `Hanging`."""

    def act(number: float) -> None:
        if rank in victims and number == step:
            Path(started).touch()
            FAULTS.get(fault, lambda: None)()

    if rank in victims and fault == "trains without odb":
        Path(started).touch()
        time.sleep(THAW_S)
        return 0
    if rank in victims and fault == "cannot send":
        Channel.exchange = no_room
    number, rows = -1, Hanging(hangs, bad)
    with ODBDataLoader(
        rows, collate_fn=rows.collate, num_workers=1, **{"token_budget": 64, "batch_size": 4} | options
    ) as loader:
        time.sleep(3)  # the time to load a model, during which the ranks connect
        if rank in victims and fault == "ends its program":
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
    """fault: of the `victims`. words, victim_words: in the last line of the other ranks, and of the victims. ends_s:
    latest end of the other ranks (s after the fault). options: of `train`."""

    fault: str = ""
    step: float = STEP
    words: tuple[str, ...] = ()
    victim_words: tuple[str, ...] = ()
    victims: tuple[int, ...] = (1,)
    world_size: int = 2
    ends_s: float = NOTICED_S
    group_timeout_s: float = 300
    options: Mapping[str, Any] = field(default_factory=dict)


GONE = ("rank 1 has ended without a word", "out-of-memory killer")
FROZEN = {"ends_s": 25, "options": {"exchange_timeout_s": 3}, "victim_words": ("CollectiveError",)}
PATIENT = {"ends_s": 45, "options": {"exchange_timeout_s": 3}, "group_timeout_s": 15}
"""A hanging rank is alive: the others wait until the timeout of the process group."""
FIVE = {"world_size": 5, "options": {"balance": True, "layout": "flat"}}
RANK_1_FAILS = ("rank 1 left the training: ValueError: it cannot go on",)
CELLS = {
    "killed in a step": Cell("is killed", STEP, GONE),
    # The timeout of the threads or of a collective of the training may come first, so the last line varies.
    "asleep for ever": Cell("sleeps for ever", STEP, **PATIENT),
    "a row never comes": Cell(**PATIENT | {"options": {"exchange_timeout_s": 3, "hangs": 61}}),
    "rank 0 frozen": Cell("is frozen", STEP, ("rank 0 gave no sign of life for 10 s",), victims=(0,), **FROZEN),
    "frozen": Cell("is frozen", STEP, ("rank 1 gave no sign of life for 10 s", "exchange_timeout_s"), **FROZEN),
    "trains without odb": Cell(
        "trains without odb",
        -1,
        ("rank 1, which has not come", "`odb:` block"),
        ends_s=15,
        options={"exchange_timeout_s": 3},
    ),
    "ends its program": Cell("ends its program", -1, ("rank 1 has ended its program",)),
    # The other rank waits in a collective of the training, and its planner has nothing to plan.
    "a row cannot be collated": Cell(words=("row 61",), victim_words=("row 61",), options={"bad": 61}),
    # In any state of the planners at that step.
    **{f"step {k} raises": Cell("raises", k, RANK_1_FAILS) for k in range(3, 9)},
    # Every rank reports the cause, not the errors that followed from it.
    **{
        f"rank {k} of three raises": Cell(
            "raises", words=(f"rank {k} left the training: ",), victims=(k,), world_size=3
        )
        for k in range(3)
    },
    # Ranks that are no neighbours receive the cause too: in the training, in collation, while samples travel.
    "one of five raises": Cell("raises", words=("it cannot go on",), victims=(3,), **FIVE),
    "one of five cannot collate": Cell(words=("row 61",), **FIVE | {"options": {"bad": 61, **FIVE["options"]}}),
    "one of five cannot send": Cell("cannot send", words=("no room",), victim_words=("no room",), victims=(2,), **FIVE),
    # The other rank is already in the exchange, in which it receives no metadata.
    "one of two cannot send": Cell("cannot send", words=("redistributing samples: MemoryError: no room",)),
    # No rank listens any more; no rank waits long.
    "all raise": Cell("raises", victim_words=("it cannot go on",), victims=(0, 1)),
    # The collective of rank 0's planner never ends, because rank 1 hangs in its data; the process of rank 0 still ends,
    # which frees rank 1 from a collective of the training.
    "one raises while its planner waits": Cell(
        "raises late", 1, ("rank 0 left the training: ValueError",), victims=(0,), ends_s=20, options={"hangs": 161}
    ),
}
EACH_CHANGE = {"rank 0 frozen", "asleep for ever", "trains without odb", "ends its program", "a row cannot be collated"}
EACH_CHANGE |= {"step 4 raises", "rank 1 of three raises", "one of five raises", "one of five cannot collate"}
EACH_CHANGE |= {"one of five cannot send", "one of two cannot send", "all raise", "one raises while its planner waits"}


def last_line(outcome: Outcome) -> str:
    return outcome.output.rstrip().rpartition("\n")[2]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell) -> tuple[list[Outcome], float]:
    """How the ranks ended, and the seconds from the fault to the last end of a rank without fault."""
    monkeypatch.setenv(GROUP_TIMEOUT, str(cell.group_timeout_s))
    started, others = folder / "started", sorted({*range(cell.world_size)} - {*cell.victims})
    ended = run_ranks(
        "distributed.test_patience:train",
        folder,
        world_size=cell.world_size,
        limit_s=120,
        may_fail=True,
        ends_with=others[0] if cell.fault == "sleeps for ever" else None,
        victims=cell.victims,
        fault=cell.fault,
        step=cell.step,
        started=str(started),
        **cell.options,
    )
    ends = [(folder / f"rank{rank}.log").stat().st_mtime for rank in others]
    return ended, max(ends, default=0) - (started.stat().st_mtime if started.exists() else max(ends, default=0))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in EACH_CHANGE)) for name in CELLS]
)
def test_the_last_line_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cell = CELLS[name]
    ended, seconds = run(tmp_path, monkeypatch, cell)
    for rank, outcome in enumerate(ended):
        words = cell.victim_words if rank in cell.victims else cell.words
        assert rank in cell.victims or outcome.returncode == 1, outcome
        assert all(text in last_line(outcome) for text in words), (rank, last_line(outcome), outcome)
    assert seconds <= cell.ends_s, ended


def test_ranks_wait_for_a_sleeping_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than exchange_timeout_s, which applies to ranks without a sign of life."""
    (first, second), _ = run(tmp_path, monkeypatch, Cell("sleeps", STEP + BORDER, options={"exchange_timeout_s": 3}))
    assert (first.returncode, second.returncode) == (0, 0), (first, second)
    assert first.value == second.value > 2 * STEP


def loader_of_loop(**options: Any) -> ODBDataLoader:
    return ODBDataLoader(Rows(num_rows=NUM_ROWS), 4, token_budget=64, collate_fn=pad, **options)


def lives_on(rank: int) -> float:
    """Rank 1 fails and stays alive; returns the seconds until the loop of this rank has ended."""
    started = time.monotonic()
    with suppress(Exception), loader_of_loop(exchange_timeout_s=50) as loader:
        for number, _ in enumerate(loader):
            if number == 20 and rank == 1:
                fail()
    ended = time.monotonic() - started
    dist.barrier()
    return ended


def test_no_rank_waits_for_a_failed_rank_that_lives_on(tmp_path: Path) -> None:
    """After a rank has sent the reason of its end, no rank waits for its answer."""
    first, _ = run_ranks("distributed.test_patience:lives_on", tmp_path, may_fail=True)
    assert first.value < 40, first


def ends_after_a_pause(rank: int, fails: bool) -> None:
    with suppress(ValueError), loader_of_loop(num_workers=1) as loader:
        list(loader)
        if rank == 1:
            time.sleep(3 * BEAT_S)
            if fails:
                fail()


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_may_end_before_the_other(fails: bool, tmp_path: Path) -> None:
    """Rank 0 serves a store that the other rank reads now and then."""
    for outcome in run_ranks("distributed.test_patience:ends_after_a_pause", tmp_path, fails=fails):
        lines = [line for line in outcome.output.splitlines() if not line.startswith("[odb] one optimizer step: ")]
        assert not any("Exception" in line or "[odb]" in line for line in lines), lines
