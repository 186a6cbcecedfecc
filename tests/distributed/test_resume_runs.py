"""Real `llamafactory-cli train`, killed in the middle and started again with the same command."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from distributed.invariants import Audits, losses, read_audits
from distributed.launch import Run
from distributed.rows import row
from distributed.test_engines import ENGINES, deepspeed_config
from safetensors.torch import load_file
from same_training import launch
from support import training_config, without_clock, write_dataset

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
