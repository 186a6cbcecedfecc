"""Ranks that save a checkpoint: all of the same optimizer step or none, and a restart goes on with stock's losses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from distributed.ranks import run_ranks

MIDDLE, END = "on_pre_optimizer_step", "on_step_end"
PREEMPTIONS: dict[str, tuple[dict[str, Any], int, list[int]]] = {
    "all": ({"at": [(MIDDLE, 3), (MIDDLE, 3)]}, 4, [0, 1]),
    "rank 1 alone": ({"at": [None, (MIDDLE, 2)]}, 3, [1]),
    "rank 0 a step before rank 1": ({"at": [(END, 2), (END, 3)]}, 2, [0]),
    "twice, save_total_limit 1": (
        {"at": [None, (MIDDLE, 4)], "twice": True, "save_steps": 2, "save_total_limit": 1},
        5,
        [1],
    ),
}
"""The cell, the optimizer step that all ranks save, the ranks that SIGTERM reaches."""


@pytest.mark.timeout(600)
def test_sigterm_with_jit_checkpoint(tiny_text: Path, tmp_path: Path) -> None:
    """`enable_jit_checkpoint: true` on two ranks: one checkpoint, and the rest of an unbroken run after it."""
    outcomes = run_ranks(
        "distributed.saving_ranks:preempted",
        tmp_path,
        limit_s=500,
        model=str(tiny_text),
        out_dir=str(tmp_path),
        cells={name: cell for name, (cell, _, _) in PREEMPTIONS.items()},
    )
    for rank, outcome in enumerate(outcomes):
        for name, (_, step, asking) in PREEMPTIONS.items():
            found = outcome.value[name]
            assert (found["steps"], found["left"]) == (step, [f"checkpoint-{step}"]), (rank, name)
            ranks = f"rank {asking[0]}" if len(asking) == 1 else "ranks 0, 1"
            said = f"SIGTERM on {ranks}: all ranks save optimizer step {step}, and the training ends"
            assert found["said"] == [said], (rank, name)
            assert found["history"] == outcome.value[""], (rank, name)


def test_ranks_that_resume_with_other_rows_end_for_one_reason(tiny_text: Path, tmp_path: Path) -> None:
    outcomes = run_ranks(
        "distributed.saving_ranks:resumed_with_other_rows",
        tmp_path,
        limit_s=150,
        model=str(tiny_text),
        out_dir=str(tmp_path / "out"),
    )
    reasons = {re.sub(r"^rank \d left the training: ", "", outcome.value) for outcome in outcomes}
    (reason,) = reasons  # one of the ranks may learn it from the other
    assert "samples was 60, is 50" in reason and "\n" not in reason
    assert not any("sign of life" in outcome.said for outcome in outcomes)
