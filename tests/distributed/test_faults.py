"""What can go wrong in one of two ranks: both end within a minute, and say why.

Each rank has a launcher of its own, as on two nodes: under a single one torchrun ends the other ranks
itself as soon as one has failed, and nothing would be learned of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
from distributed.launch import Ended, Node, Run, parent
from distributed.rows import row
from support import noise, proc_words, read_log, shimmed, training_config, write_dataset

LIMIT_S = 60
"""From the fault to the end of the last launcher."""
ENDS_S = 20
"""From the end of a rank to that of the other."""
NODES = (Node(), Node())
BAD_ROW = 37
"""Odd, so that rank 1 draws it."""


@pytest.fixture
def config(tiny_text, tmp_path) -> dict[str, Any]:
    """A training of many small rounds in one epoch, as long as a fault takes to come."""
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


@pytest.fixture
def with_an_unreadable_picture(config, tiny_vl, tmp_path) -> dict[str, Any]:
    noise((90, 60)).convert("RGB").save(tmp_path / "good.png")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut_off.png").write_bytes(whole[: len(whole) // 2])
    pictures = {k: ["cut_off.png" if k == BAD_ROW else "good.png"] for k in range(1, 60, 4)}
    write_dataset(tmp_path, {"rows": [row(3 + (k * 11) % 38, pictures.get(k)) for k in range(60)]})
    return config | {"model_name_or_path": str(tiny_vl), "template": "qwen3_vl"}


def under_way(run: Run) -> None:
    """Return once rank 1 has taken some steps."""
    audit = run.output_dir / "odb_audit_rank1.jsonl"
    run.wait_until(lambda: audit.exists() and audit.read_text().count("\n") > 8, "no step was taken")


def both_fail(run: Run, limit_s: float = LIMIT_S) -> Ended:
    ended = run.end(limit_s)
    assert all(ended.returncodes), str(ended)
    left = run.left_behind()
    assert not left, f"{left}\n{ended}"
    return ended


def said_by(ended: Ended, rank: int, *texts: str) -> str:
    """The one line of a rank that has all the texts."""
    lines = [line for line in ended.ranks[rank].splitlines() if all(text in line for text in texts)]
    assert lines, f"rank {rank} did not say {texts}\n{ended}"
    return lines[0]


def last_line_says(ended: Ended, rank: int, *texts: str) -> None:
    """What torch writes when a process ends does not count; before a last line stand the rank or a progress bar."""
    written = (line[max(line.find("[odb]"), 0) :] for line in ended.ranks[rank].splitlines())
    lines = [line for line in written if line.startswith(("[odb]", "Traceback", "odb_factory."))]
    assert lines and all(text in lines[-1] for text in ("[odb]", *texts)), f"{lines[-1:]}: not {texts}\n{ended}"


@pytest.mark.nightly
def test_unreadable_picture_ends_the_run(with_an_unreadable_picture) -> None:
    with Run(with_an_unreadable_picture, nodes=NODES) as run:
        run.wait_for("Running training")
        ended = both_fail(run)
    cause = (f"row {BAD_ROW} of rows.json", "cut_off.png", "truncated", "on_error: skip")
    # Either may be given the row: one says so itself, the other what the first one said.
    told = [f"rank {1 - rank}" in said_by(ended, rank, *cause) for rank in range(2)]
    assert sorted(told) == [False, True]


@pytest.mark.nightly
def test_data_worker_killed(config) -> None:
    with Run(config, nodes=NODES) as run:
        under_way(run)
        os.kill(run.workers(1)[0], signal.SIGKILL)
        ended = both_fail(run)
    last_line_says(ended, 1, "data worker", "was killed", "out-of-memory killer")
    last_line_says(ended, 0, "rank 1 left the training", "data worker", "out-of-memory killer")


def arguments_are_read(run: Run) -> None:
    """Return while the ranks load their data, long before the first step."""
    for rank in range(2):
        run.wait_for(f"Process rank: {rank}", rank=rank)
    time.sleep(1)


def saves(run: Run) -> None:
    """Return while a checkpoint is written."""
    run.wait_until(lambda: any(run.output_dir.glob("checkpoint-*")), "nothing was saved")


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        (1, arguments_are_read),
        *(
            pytest.param(victim, moment, marks=pytest.mark.nightly)
            for victim, moment in ((0, arguments_are_read), (0, under_way), (1, under_way), (0, saves), (1, saves))
        ),
    ],
)
def test_rank_killed(config, victim: int, moment: Callable[[Run], None]) -> None:
    """With default settings; rank 0 serves the process group's store, so its end is another case."""
    config |= {"save_strategy": "steps", "save_steps": 3}
    with Run(config, nodes=NODES) as run:
        moment(run)
        killed = time.monotonic()
        os.kill(run.rank_pid(victim), signal.SIGKILL)
        survivor = run.rank_pid(1 - victim)
        run.wait_until(lambda: not proc_words(survivor, "cmdline"), "the other rank lives on", ENDS_S)
        assert time.monotonic() - killed < ENDS_S
        ended = both_fail(run)
    last_line_says(ended, 1 - victim, f"rank {victim} has ended without a word", "out-of-memory killer")
    assert "SIGKILL" in ended.launchers[victim]


def test_launcher_killed(config) -> None:
    """The ranks go on and still watch each other: the store that their launcher served is not needed."""
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
        last_line_says(run.so_far(), 1, "rank 0 has ended without a word")


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted by root")
@pytest.mark.nightly
def test_disk_full(config, tmp_path) -> None:
    """While a checkpoint is written: the last line names the folder and what to do."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        config |= {"save_strategy": "steps", "save_steps": 2, "output_dir": str(small / "out")}
        with Run(config | {"logging_dir": str(tmp_path)}, nodes=NODES, logs=tmp_path / "logs") as run:
            run.wait_for("Running training")
            ended = both_fail(run)
        last_line_says(ended, 0, f"the disk of {small}", "is full", "free some space")
        last_line_says(ended, 1, "rank 0 left the training", f"the disk of {small}", "is full")
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.mark.nightly
def test_a_pause_at_a_step_border(config, tmp_path) -> None:
    """Rank 1 pauses for longer than exchange_timeout_s between two steps: the losses are those without the pause."""
    config["odb"]["exchange_timeout_s"] = 15
    config["max_steps"] = 12
    losses = []
    for name, env in (("plain", {}), ("pause", shimmed("pause_at_a_step_border") | {"ODB_TEST_PAUSE_S": "40"})):
        with Run(config | {"output_dir": str(tmp_path / name)}, nodes=NODES, env=env) as run:
            ended = run.end()
            assert ended.returncodes == [0, 0], str(ended)
        losses.append([line["loss"] for line in read_log(tmp_path / name) if "loss" in line])
    assert losses[0] == losses[1] and len(losses[0]) == 12
