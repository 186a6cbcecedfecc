"""A fault of one of two ranks ends both within a minute, and both log the cause.

Each rank has its own launcher, as on two nodes: a single torchrun would end the other ranks itself as soon as a rank
has failed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from distributed.launch import Ended, Node, Run, parent
from distributed.rows import row
from support import proc_words, training_config, write_dataset

LIMIT_S = 60
"""Seconds from the fault to the end of the last launcher."""
ENDS_S = 20
"""Seconds from the end of one rank to the end of the other."""
NODES = (Node(), Node())


@pytest.fixture
def config(tiny_text, tmp_path) -> dict[str, Any]:
    """A training of many small rounds in one epoch, which lasts until the fault."""
    write_dataset(tmp_path, {"rows": [row(3 + (k * 11) % 38) for k in range(6000)]})
    return training_config(
        tiny_text,
        tmp_path,
        tmp_path / "out",
        dataset="rows",
        ddp_backend="gloo",
        disable_shuffling=True,
        gradient_accumulation_steps=2,
        odb={"token_budget": 128, "buffer_size": 8, "audit": True},
    )


def under_way(run: Run) -> None:
    """Return once rank 1 has computed some steps."""
    audit = run.output_dir / "odb_audit_rank1.jsonl"
    run.wait_until(lambda: audit.exists() and audit.read_text().count("\n") > 8, "no step was taken")


def both_fail(run: Run, limit_s: float = LIMIT_S) -> Ended:
    ended = run.end(limit_s)
    assert all(ended.returncodes), str(ended)
    left = run.left_behind()
    assert not left, f"{left}\n{ended}"
    return ended


def check_last_line(ended: Ended, rank: int, *texts: str) -> None:
    """Ignores the lines that torch writes when a process ends, and the rank or progress bar before a line."""
    written = (line[max(line.find("[odb]"), 0) :] for line in ended.ranks[rank].splitlines())
    lines = [line for line in written if line.startswith(("[odb]", "Traceback", "odb_factory."))]
    assert lines and all(text in lines[-1] for text in ("[odb]", *texts)), f"{lines[-1:]}: not {texts}\n{ended}"


def arguments_are_read(run: Run) -> None:
    """Return while the ranks load their data, long before the first step."""
    for rank in range(2):
        run.wait_until(lambda rank=rank: "Process rank: " in run.output(rank), f"rank {rank} read no arguments")
    time.sleep(1)


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        (1, arguments_are_read),
        *(
            pytest.param(victim, moment, marks=pytest.mark.nightly)
            for victim, moment in ((0, arguments_are_read), (0, under_way), (1, under_way))
        ),
    ],
)
def test_rank_killed(config, victim: int, moment: Callable[[Run], None]) -> None:
    """With default settings. Rank 0 serves the store of the process group, so its end is another case."""
    with Run(config, nodes=NODES) as run:
        moment(run)
        killed = time.monotonic()
        os.kill(run.rank_pid(victim), signal.SIGKILL)
        survivor = run.rank_pid(1 - victim)
        run.wait_until(lambda: not proc_words(survivor, "cmdline"), "the other rank lives on", ENDS_S)
        assert time.monotonic() - killed < ENDS_S
        ended = both_fail(run)
    check_last_line(ended, 1 - victim, f"rank {victim} has ended without a word", "out-of-memory killer")
    assert "SIGKILL" in ended.launchers[victim]


def test_launcher_killed(config) -> None:
    """The ranks continue and watch each other without the store of their launcher."""
    with Run(config) as run:
        under_way(run)
        (agent,) = {parent(run.rank_pid(rank)) for rank in range(2)}
        os.kill(agent, signal.SIGKILL)
        time.sleep(3)
        assert len([rank for rank in range(2) if run.rank_pid(rank)]) == 2, run.so_far()
        os.kill(run.rank_pid(0), signal.SIGKILL)
        until = time.monotonic() + ENDS_S
        while (left := run.processes()) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left, f"{left}\n{run.so_far()}"
        check_last_line(run.so_far(), 1, "rank 0 has ended without a word")
