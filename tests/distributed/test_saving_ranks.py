"""Ranks save checkpoints of the same optimizer step, and a resumed run has the losses of an unbroken run."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from distributed.ranks import run_ranks
from training.test_resume import KEEP, Signalled, terminate, train
from training.toy_training import history

from odb_factory import ODBError

EPOCH = {"num_train_epochs": 2, "disable_tqdm": True, "ddp_backend": "gloo"}


def as_rank(rank: int) -> list[str]:
    """Set up this process as a rank; returns the list that collects its log lines."""
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # torch cannot load an optimizer of cpu:0
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("odb_factory").addHandler(handler)
    return lines


class SignalledTwice(Signalled):
    """Sends SIGTERM once more while it saves."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_training_stop:
            terminate()
        super()._save_checkpoint(*args, **kwargs)


def preempted(rank: int, *, model: str, out_dir: str, cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """For each cell the steps, checkpoints and log of the stopped run, and the history of the resumed run.

    cells: `at`: for each rank the event and the optimizer steps done at SIGTERM (None: no signal); `twice`: a second
    SIGTERM during the save; the rest are training arguments.
    """
    lines = as_rank(rank)
    results: dict[str, Any] = {"": history(train(Path(model), Path(out_dir, "whole"), block=KEEP, **EPOCH))}
    for name, cell in cells.items():
        out = Path(out_dir, name)
        changes = EPOCH | {"enable_jit_checkpoint": True, "save_steps": 100} | cell
        at, twice = changes.pop("at")[rank], changes.pop("twice", False)
        event, steps = at or ("on_step_end", -1)
        kind = type("Stopped", (SignalledTwice if twice else Signalled,), {"event": event, "steps": steps})
        lines.clear()
        stopped = train(Path(model), out, block=KEEP, trainer_class=kind, **changes)
        dist.barrier()
        left = sorted(path.name for path in out.glob("checkpoint-*"))
        logged = [line for line in lines if "SIGTERM" in line]
        again = train(Path(model), out, block=KEEP, resume=True, **changes)
        results[name] = {"steps": stopped.state.global_step, "left": left, "logged": logged, "history": history(again)}
        dist.barrier()
    return results


def resumed_with_other_rows(rank: int, *, model: str, out_dir: str) -> str:
    """The error that ends the resumed run."""
    as_rank(rank)
    train(Path(model), Path(out_dir), block=KEEP, stop=2, **EPOCH)
    dist.barrier()
    try:
        train(Path(model), Path(out_dir), block=KEEP, resume=True, num_rows=50, **EPOCH)
    except ODBError as error:
        return str(error)
    return "trained"


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
"""The cell, the optimizer step that all ranks save, the ranks that get SIGTERM."""


@pytest.mark.timeout(600)
def test_sigterm_with_jit_checkpoint(tiny_text: Path, tmp_path: Path) -> None:
    """`enable_jit_checkpoint: true` on two ranks: one checkpoint, from which a run resumes as if unbroken."""
    cells = {name: cell for name, (cell, _, _) in PREEMPTIONS.items()}
    options = {"model": str(tiny_text), "out_dir": str(tmp_path), "cells": cells}
    outcomes = run_ranks("distributed.test_saving_ranks:preempted", tmp_path, limit_s=500, **options)
    for rank, outcome in enumerate(outcomes):
        for name, (_, step, ranks) in PREEMPTIONS.items():
            result = outcome.value[name]
            assert (result["steps"], result["left"]) == (step, [f"checkpoint-{step}"]), (rank, name)
            assert [line.split(":")[0] for line in result["logged"]] == [f"SIGTERM on rank {ranks[0]}"], (rank, name)
            assert result["history"] == outcome.value[""], (rank, name)


def test_ranks_that_resume_with_other_rows_end_for_one_reason(tiny_text: Path, tmp_path: Path) -> None:
    options = {"model": str(tiny_text), "out_dir": str(tmp_path / "out")}
    outcomes = run_ranks("distributed.test_saving_ranks:resumed_with_other_rows", tmp_path, limit_s=150, **options)
    reasons = {re.sub(r"^rank \d left the training: ", "", outcome.value) for outcome in outcomes}
    (reason,) = reasons  # a rank may report the error of the other rank
    assert "samples was 60, is 50" in reason and "\n" not in reason
    assert not any("sign of life" in outcome.output for outcome in outcomes)
