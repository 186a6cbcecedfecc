"""A refused training changes no file of its output folder, and is refused before a model is loaded if possible."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from llamafactory.hparams import FinetuningArguments
from llamafactory.train.tuner import run_exp
from support import training_config

from odb_factory.errors import ODBError
from odb_factory.llamafactory import hooks

FILL = {"token_budget": 256, "global_batch_size": "fill"}
FLAT = {"token_budget": 256, "layout": "flat"}
BEFORE_A_MODEL: list[tuple[dict[str, Any], str]] = [
    ({"odb": {"token_budget": "auto"}}, "odb.token_budget: 'auto'"),
    ({"odb": {"token_budget": "auto"}, "stage": "kto"}, "odb.token_budget: 'auto'"),
    ({"odb": {"token_bugdet": 256}}, "odb.token_bugdet: 256"),
    ({"packing": True}, "packing: True"),
    ({"neat_packing": True}, "neat_packing: True"),
    ({"streaming": True, "stage": "kto", "max_steps": 1}, "streaming: True"),
    ({"streaming": True, "tokenized_path": "tokens", "max_steps": 1}, "streaming: True"),
    ({"shift_attn": True, "odb": FLAT}, "shift_attn: True"),
    ({"use_mca": True}, "use_mca: True"),
    ({"use_unsloth": True}, "use_unsloth: True"),
    ({"use_kt": True}, "use_kt: True"),
    ({"use_hyper_parallel": True}, "use_hyper_parallel: True"),
    ({"use_galore": True, "galore_layerwise": True}, "galore_layerwise: True"),
    ({"use_apollo": True, "apollo_layerwise": True}, "apollo_layerwise: True"),
    ({"use_badam": True, "badam_mode": "ratio"}, "badam_mode: 'ratio'"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size: True"),
    ({"ignore_pad_token_for_loss": False}, "ignore_pad_token_for_loss: False"),
    ({"stage": "ppo", "reward_model": "x", "reward_model_type": "full"}, "stage: 'ppo'"),
    ({"stage": "dpo", "pref_bco_weight": 0.5}, "pref_bco_weight: 0.5"),
    ({"mixture_of_depths": "convert"}, "mixture_of_depths: 'convert'"),
    ({"dataloader_num_workers": "2"}, "dataloader_num_workers: '2'"),
    ({"odb": None}, "odb: None"),
    # Values of a wrong type
    ({"cutoff_len": "abc"}, "cutoff_len: 'abc'"),
    ({"learning_rate": "abc"}, "learning_rate: 'abc'"),
    ({"gradient_accumulation_steps": [2]}, r"gradient_accumulation_steps: \[2\]"),
    ({"bf16": "no"}, "bf16: 'no'"),
    ({"resume_from_checkpoint": "no/such"}, "resume_from_checkpoint: 'no/such'"),
]
"""Changes to a YAML, and a pattern of the start of the message."""
WITH_A_MODEL: list[tuple[dict[str, Any], str]] = [
    ({"odb": {"token_budget": 16, "overlong": "error"}}, ".*overlong"),
    ({"odb": FILL | {"lr_scale": "sqrt", "buffer_size": 8}, "disable_shuffling": True}, "odb.lr_scale: 'sqrt'"),
    (
        # The patches of the fake image in a micro-batch without images
        {"template": "qwen3_vl", "dataset": "pictures", "odb": {"token_budget": 256, "max_patches": 1}},
        r"odb.max_patches: 1 is less than the \d+ patches",
    ),
    # In stock the loss of these optimizer steps is 0.
    ({"cutoff_len": 1}, ".*48 unsupervised"),
    ({"resume_from_checkpoint": "OUT/checkpoint-3"}, ".*checkpoint-3"),
]


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    """The output folder of an earlier training."""
    folder = tmp_path / "out"
    (folder / "checkpoint-3").mkdir(parents=True)
    names = ("odb_audit_rank0.jsonl", "odb_summary.json", "trainer_state.json")
    for name in (*names, "model.safetensors", "checkpoint-3/trainer_state.json"):
        (folder / name).write_text(f"{name} of the run before\n")
        os.utime(folder / name, (1_000_000_000, 1_000_000_000))
    return folder


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def refused(model: Path, data_dir: Path, output_dir: Path, changes: dict[str, Any], start: str) -> None:
    if "use_hyper_parallel" in changes and not hasattr(FinetuningArguments, "use_hyper_parallel"):
        pytest.skip("this release has no use_hyper_parallel")
    config = training_config(model, data_dir, output_dir, template="qwen", odb={"token_budget": 256, "audit": True})
    if "resume_from_checkpoint" in changes:
        changes = {"resume_from_checkpoint": changes["resume_from_checkpoint"].replace("OUT", str(output_dir))}
    before = files_of(output_dir)
    with pytest.raises(ODBError) as caught:
        run_exp(config | changes)
    message = str(caught.value)
    assert re.match(start, message) and "\n" not in message, message
    assert files_of(output_dir) == before


def ids(value: Any) -> str:
    return "-".join(value) if isinstance(value, dict) else value


@pytest.mark.parametrize(("changes", "start"), BEFORE_A_MODEL, ids=ids)
def test_before_a_model_is_loaded(tiny_text: Path, data_dir, output_dir, tmp_path, changes, start) -> None:
    """The model has no weights: loading it would be another error."""
    model = tmp_path / "model"
    shutil.copytree(tiny_text, model, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    refused(model, data_dir, output_dir, changes, start)
    assert hooks._active is None


@pytest.mark.parametrize(("changes", "start"), WITH_A_MODEL, ids=ids)
def test_with_a_model(tiny_text: Path, tiny_vl: Path, data_dir, output_dir, changes, start) -> None:
    refused(tiny_vl if "template" in changes else tiny_text, data_dir, output_dir, changes, start)
