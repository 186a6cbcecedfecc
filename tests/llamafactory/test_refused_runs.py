"""A training that is refused changes no file of its output folder, and where no model is needed, none is loaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from llamafactory.train.tuner import run_exp
from support import training_config

from odb_factory.errors import ODBError

FILL = {"token_budget": 256, "global_batch_size": "fill"}
BEFORE_A_MODEL: dict[str, tuple[dict[str, Any], str]] = {
    "auto on a CPU": ({"odb": {"token_budget": "auto"}}, "odb.token_budget: 'auto' tries micro-batches on an acc"),
    "auto patches": ({"odb": {"token_budget": 256, "max_patches": "auto"}}, "odb.max_patches: 'auto' tries micro-ba"),
    "auto and kto": ({"odb": {"token_budget": "auto"}, "stage": "kto"}, "odb.token_budget: 'auto' does not go with"),
    "typo": ({"odb": {"token_bugdet": 256}}, "odb.token_bugdet"),
    "no block": ({"odb": None}, "odb: None is not a block"),
    "rules": ({"odb": FILL | {"loss_scaling": "stock"}}, "odb.loss_scaling: 'stock'"),
    "packing": ({"packing": True}, "packing: True does not go"),
    "ppo": ({"stage": "ppo", "reward_model": "x", "reward_model_type": "full"}, "stage: 'ppo'"),
    "flat": ({"odb": {"token_budget": 256, "layout": "flat"}, "neftune_noise_alpha": 5}, "neftune_noise_alpha: 5"),
    "sizes kto": ({"odb": {"token_budget": 256, "row_multiple": 2}, "stage": "kto"}, "odb.row_multiple: 2"),
    "loss": (
        {"odb": {"token_budget": 256, "loss_scaling": "square"}, "use_liger_kernel": True, "torch_compile": True},
        "use_liger_kernel: True",
    ),
    "batch size": ({"auto_find_batch_size": True}, "auto_find_batch_size: True"),
    "batches": ({"accelerator_config": {"dispatch_batches": True}}, "accelerator_config.dispatch_batches: True"),
    "epochs": ({"num_train_epochs": 0}, "num_train_epochs: 0"),
    "accumulation": ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: 0"),
    "labels": ({"ignore_pad_token_for_loss": False}, "ignore_pad_token_for_loss: False"),
    "workers": ({"dataloader_num_workers": "2"}, "dataloader_num_workers: '2'"),
    "checkpoint": ({"resume_from_checkpoint": "no/such"}, "resume_from_checkpoint: 'no/such' is not a folder"),
}
WITH_A_MODEL: dict[str, tuple[dict[str, Any], str]] = {
    "overlong": ({"odb": {"token_budget": 16, "overlong": "error"}}, "overlong"),
    "lr_scale": (
        {"odb": FILL | {"lr_scale": "sqrt", "lr_reference_samples": 8, "buffer_size": 8}, "disable_shuffling": True},
        "odb.lr_scale: 'sqrt' goes by the first",
    ),
    "checkpoint": ({"resume_from_checkpoint": "OUT/checkpoint-3"}, "checkpoint-3"),
}


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    """As a training leaves it."""
    folder = tmp_path / "out"
    (folder / "checkpoint-3").mkdir(parents=True)
    names = ("trainer_log.jsonl", "odb_log.jsonl", "odb_audit_rank0.jsonl", "odb_summary.json", "trainer_state.json")
    for name in (*names, "model.safetensors", "checkpoint-3/trainer_state.json", "checkpoint-3/odb_state_rank0.json"):
        (folder / name).write_text(f"{name} of the run before\n")
        os.utime(folder / name, (1_000_000_000, 1_000_000_000))
    return folder


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def refused(model: Path, data_dir: Path, output_dir: Path, changes: dict[str, Any], words: str) -> None:
    config = training_config(model, data_dir, output_dir, template="qwen", odb={"token_budget": 256, "audit": True})
    if "resume_from_checkpoint" in changes:
        changes = {"resume_from_checkpoint": changes["resume_from_checkpoint"].replace("OUT", str(output_dir))}
    before = files_of(output_dir)
    with pytest.raises(ODBError) as caught:
        run_exp(config | changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert files_of(output_dir) == before


@pytest.mark.parametrize(("changes", "words"), BEFORE_A_MODEL.values(), ids=BEFORE_A_MODEL)
def test_before_a_model_is_loaded(tiny_text: Path, data_dir, output_dir, tmp_path, changes, words) -> None:
    """The model has no weights: loading it would be another error."""
    model = tmp_path / "model"
    shutil.copytree(tiny_text, model, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    refused(model, data_dir, output_dir, changes, words)


@pytest.mark.parametrize(("changes", "words"), WITH_A_MODEL.values(), ids=WITH_A_MODEL)
def test_with_a_model(tiny_text: Path, data_dir, output_dir, changes, words) -> None:
    refused(tiny_text, data_dir, output_dir, changes, words)


def test_the_log_of_the_run_before_goes_with_the_first_step(tiny_text: Path, data_dir, output_dir) -> None:
    run_exp(training_config(tiny_text, data_dir, output_dir, odb={"token_budget": 1024}, max_steps=2))
    lines = (output_dir / "trainer_log.jsonl").read_text().splitlines()
    assert len(lines) == 3 and '"current_steps": 1' in lines[0] and "of the run before" not in "".join(lines)
    assert "of the run before" not in (output_dir / "odb_log.jsonl").read_text()
