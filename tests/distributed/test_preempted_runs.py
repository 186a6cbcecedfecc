"""LLaMA-Factory runs that SIGTERM ends (`enable_jit_checkpoint`): started again, the rest of an unbroken run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from distributed.launch import Run
from distributed.test_engines import deepspeed_config
from distributed.test_resume_runs import ENV, checkpoint_of, configuration, remove_cut_off, to_the_end, unbroken
from support import read_jsonl

TOLERANCE = 2e-6
AFTER_STEPS = 6


def losses(out: Path) -> dict[int, float]:
    """By optimizer step, as logged last."""
    return {line["current_steps"]: line["loss"] for line in read_jsonl(out / "trainer_log.jsonl") if "loss" in line}


def preempted(config: dict[str, Any], num_ranks: int, ranks: list[int], kill: bool) -> None:
    """SIGTERM to these ranks; `kill`: SIGKILL to all as soon as they save."""
    out = Path(config["output_dir"])
    with Run(config, num_ranks=num_ranks, env=ENV) as run:
        log = out / "trainer_log.jsonl"
        run.wait_until(lambda: log.exists() and log.read_text().count("\n") >= AFTER_STEPS, "no step was taken")
        pids = [run.rank_pid(rank) for rank in range(num_ranks)]
        before = set(out.glob("checkpoint-*"))
        for rank in ranks:
            os.kill(pids[rank], signal.SIGTERM)
        if kill:
            run.wait_until(lambda: bool(set(out.glob("checkpoint-*")) - before), "nothing was saved", 60)
            for pid in run.processes():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        ended = run.end(120)
        if not kill:
            assert ended.returncodes == [0], str(ended)
            for said in ended.ranks:
                assert "all ranks save optimizer step" in said, str(ended)
        assert not run.left_behind()
    remove_cut_off(out)
    run.folder.rename(run.folder.with_name("first_logs"))


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "num_ranks", "ranks", "kill"),
    [
        ("none", 1, [0], False),
        ("ddp", 2, [0, 1], False),
        ("ddp", 2, [1], False),
        ("ddp", 2, [0, 1], True),
        ("zero3", 2, [0], False),
    ],
)
def test_a_preempted_run_goes_on(
    tiny_text: Path, tmp_path: Path, engine: str, num_ranks: int, ranks: list[int], kill: bool
) -> None:
    changes: dict[str, Any] = {"enable_jit_checkpoint": True, "num_train_epochs": 2, "save_total_limit": 1}
    changes |= {"save_steps": 5 if kill else 1000, "gradient_accumulation_steps": 8 // num_ranks}
    if engine == "zero3":
        changes |= {"deepspeed": deepspeed_config(3, tmp_path), "use_cpu": False}
    whole = configuration(tiny_text, tmp_path / "whole", **changes | {"save_strategy": "no"})
    unbroken(whole, num_ranks)
    config = configuration(tiny_text, tmp_path / "preempted", **changes)
    out = Path(config["output_dir"])
    preempted(config, num_ranks, ranks, kill)
    if not kill:
        assert checkpoint_of(out) > AFTER_STEPS
    to_the_end(config, num_ranks)
    expected, found = losses(Path(whole["output_dir"])), losses(out)
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - expected[step]) for step in expected) < TOLERANCE
