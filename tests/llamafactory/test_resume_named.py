"""A resume with other settings: one line names what has changed since the checkpoint, and what to do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from llamafactory.train.tuner import run_exp
from support import read_jsonl, training_config

from odb_factory.errors import DataError

BLOCK = {"token_budget": 512, "audit": True}
STEPS = 3
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "template": ({"template": "llama3"}, "template was qwen, is llama3"),
    "cutoff_len": ({"cutoff_len": 12}, "cutoff_len was 2048, is 12"),
    "train_on_prompt": ({"train_on_prompt": True}, "train_on_prompt was False, is True"),
    "overlong": ({"odb": BLOCK | {"token_budget": 16, "overlong": "drop"}}, "overlong was singleton, is drop"),
    "max_samples": ({"max_samples": 40}, "max_samples was None, is 40"),
    "dataset": ({"dataset": "texts,pictures"}, "dataset was ['texts'], is ['texts', 'pictures']"),
    "seed": ({"seed": 4}, "seed was 3, is 4"),
}
DEFAULT = {"template", "overlong", "max_samples"}
CONTINUED: dict[str, tuple[dict[str, Any], str | None]] = {
    "loss_scaling": (
        {"odb": BLOCK | {"loss_scaling": "exact"}},
        "loss_scaling was stock, is exact since the checkpoint; the losses to come are weighed with what is set now",
    ),
    "overlong, no row is": ({"odb": BLOCK | {"token_budget": 4096, "overlong": "drop"}}, "overlong was singleton"),
    "budgets": ({"odb": BLOCK | {"token_budget": 1024, "max_patches": 64}}, None),
}


@pytest.fixture(scope="module")
def stopped(tiny_text: Path, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The YAML of a run that was stopped after a few optimizer steps of its epoch, and has a checkpoint of the last."""
    folder = tmp_path_factory.mktemp("stopped") / "out"
    steps = {
        "gradient_accumulation_steps": 4,
        "save_strategy": "steps",
        "save_steps": STEPS,
        "dataloader_num_workers": 0,
    }
    config = training_config(tiny_text, data_dir, folder, odb=BLOCK, **steps)
    run_exp(config | {"max_steps": STEPS})
    return config


def resumed(stopped: dict[str, Any], folder: Path, changes: dict[str, Any]) -> Path:
    out = folder / "out"
    shutil.copytree(stopped["output_dir"], out)
    run_exp(
        stopped
        | {"output_dir": str(out), "resume_from_checkpoint": str(out / f"checkpoint-{STEPS}"), "max_steps": STEPS + 1}
        | changes
    )
    return out


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in DEFAULT)) for name in REFUSED]
)
def test_what_has_changed_since_the_checkpoint_is_named(stopped: dict[str, Any], tmp_path: Path, name: str) -> None:
    changes, said = REFUSED[name]
    with pytest.raises(DataError) as caught:
        resumed(stopped, tmp_path, changes)
    message = str(caught.value)
    assert said in message and "resume: ignore_data" in message and "\n" not in message, message
    assert ".;" not in message and not any(word.isdigit() and len(word) > 6 for word in message.split()), message


@pytest.mark.parametrize("name", CONTINUED)
def test_what_does_not_change_the_rows_is_told_and_the_run_goes_on(
    stopped: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    changes, said = CONTINUED[name]
    out = resumed(stopped, tmp_path, changes)
    assert read_jsonl(out / "odb_audit_rank0.jsonl")[-1]["optimizer_step"] == STEPS + 1
    told = [message for message in caplog.messages if "since the checkpoint" in message]
    assert len(told) == (said is not None) and all(said in message for message in told), told
    without_media = [message for message in caplog.messages if message.startswith("odb.max_patches: 64 has no effect")]
    assert len(without_media) == (name == "budgets"), "a text model has no patches"
