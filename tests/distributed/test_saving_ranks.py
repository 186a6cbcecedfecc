"""Ranks save checkpoints of the same optimizer step; a run resumed after SIGTERM or SIGKILL equals an unbroken run."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from distributed.launch import Run
from distributed.ranks import run_ranks
from distributed.rows import Audits, losses, read_audits, row
from distributed.test_engines import ENGINES, deepspeed_config
from safetensors.torch import load_file
from same_training import launch
from support import training_config, without_clock, write_dataset
from training.test_resume import KEEP, Signalled, terminate, train
from training.toy_training import history

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


NUM_ROWS = 200
SAVE_STEPS = 3
ENV = {"ACCELERATE_TORCH_DEVICE": "cpu"}
"""torch cannot load an optimizer that was saved on cpu:0."""


def configuration(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    folder.mkdir()
    write_dataset(folder, {"rows": [row(3 + (k * 11) % 38) for k in range(NUM_ROWS)]})
    odb = {"token_budget": 256, "buffer_size": 32, "audit": True}
    defaults = {"dataset": "rows", "ddp_backend": "gloo", "gradient_accumulation_steps": 2, "odb": odb}
    defaults |= {"save_strategy": "steps", "save_steps": SAVE_STEPS, "overwrite_output_dir": False}
    return training_config(model, folder, folder / "out", **defaults | changes)


def kill_after_checkpoints(config: dict[str, Any], num_ranks: int) -> tuple[int, Audits]:
    """Train, and kill all processes at once. Returns the optimizer step of the last checkpoint, and the audits."""
    out = Path(config["output_dir"])
    with Run(config, num_ranks=num_ranks, env=ENV) as run:
        run.wait_until(lambda: checkpoint_of(out) >= 3 * SAVE_STEPS, "no checkpoint came")
        for pid in run.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.end(60)
    # A truncated checkpoint would be refused.
    for folder in out.glob("checkpoint-*"):
        state = folder / "trainer_state.json"
        if not (state.exists() and state.read_text().endswith("}\n")):
            shutil.rmtree(folder)
    run.folder.rename(run.folder.with_name("first_logs"))  # the second run writes to this folder
    audits = []
    for rank in range(num_ranks):
        whole, _, _ = (out / f"odb_audit_rank{rank}.jsonl").read_text().rpartition("\n")
        audits.append([without_clock(json.loads(line)) for line in whole.splitlines()])
    return checkpoint_of(out), audits


def checkpoint_of(out: Path) -> int:
    """The optimizer step of the last complete checkpoint, 0 if there is none."""
    whole = [path.parent.name for path in out.glob("checkpoint-*/trainer_state.json")]
    return max((int(name.rpartition("-")[2]) for name in whole), default=0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "num_ranks"),
    [("ddp", 2), *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in (("none", 1), ("zero2", 2)))],
)
def test_killed_and_started_again(tiny_text, tmp_path, engine: str, num_ranks: int) -> None:
    """Every row once; only steps after the last checkpoint are repeated, unchanged; equal weights at the end."""
    changes = {"deepspeed": deepspeed_config(2, tmp_path), "use_cpu": False} if engine == "zero2" else {}
    whole = configuration(tiny_text, tmp_path / "whole", save_strategy="no", **changes)
    launch([whole], tmp_path / "whole", num_ranks, env=ENV)
    config = configuration(tiny_text, tmp_path / "killed", **changes)
    checkpoint, first = kill_after_checkpoints(config, num_ranks)
    with Run(config, num_ranks=num_ranks, env=ENV) as run:
        ended = run.end()
        assert ended.returncodes == [0], str(ended)
        assert not run.left_behind()

    out = Path(config["output_dir"])
    audits = read_audits(out, num_ranks)
    second = [audit[len(before) :] for audit, before in zip(audits, first)]
    kept = [[line for line in audit if line["optimizer_step"] <= checkpoint] for audit in first]
    together = [before + rest for before, rest in zip(kept, second)]
    emitted = sorted(id for audit in together for line in audit for id in line["ids"])
    assert emitted == list(range(NUM_ROWS)), "I2"
    for before, rest in zip(first, second):
        lost = [line for line in before if line["optimizer_step"] > checkpoint]
        assert lost == rest[: len(lost)], "repeated unchanged"
    assert together == read_audits(Path(whole["output_dir"]), num_ranks)
    resumed, expected = (load_file(Path(folder) / "model.safetensors") for folder in (out, whole["output_dir"]))
    assert all((resumed[name] == expected[name]).all() for name in expected)


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("fsdp", marks=pytest.mark.nightly)])
def test_sharded_moments_are_resumed(tiny_text, tmp_path, engine: str) -> None:
    """The moments of an optimizer under FSDP, which restart in stock. (accelerate fails on a path with the word
    optimizer, so the name of this test avoids the word.)"""
    changes = dict(ENGINES[engine].changes)
    changes["fsdp_config"] = changes["fsdp_config"] | {"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}
    changes |= {"max_steps": SAVE_STEPS + 2, "learning_rate": 1e-2}
    whole = configuration(tiny_text, tmp_path / "whole", **changes)
    again = whole | {"resume_from_checkpoint": f"{whole['output_dir']}/checkpoint-{SAVE_STEPS}"}
    again["output_dir"] = str(tmp_path / "again")
    launch([whole, again], tmp_path, env=ENGINES[engine].env | ENV)
    first, second = (losses(Path(config["output_dir"])) for config in (whole, again))
    assert len(first) == SAVE_STEPS + 2 and second == first
