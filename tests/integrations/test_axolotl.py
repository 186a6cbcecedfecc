"""axolotl's own plugin manager and configuration accept `ODBPlugin`, and its trainer forms batches online."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from distributed.rows import row
from safetensors.torch import load_file
from support import read_jsonl
from toy import Rows, pad
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from odb_factory import ConfigError

base = pytest.importorskip("axolotl.integrations.base", reason="axolotl is not installed: it needs its own environment")
from axolotl.integrations.config import merge_input_args  # noqa: E402
from axolotl.utils.dict import DictDefault  # noqa: E402

NAME = "odb_factory.integrations.axolotl.ODBPlugin"


@pytest.fixture(scope="module")
def manager() -> Any:
    manager = base.PluginManager.get_instance()
    manager.register(NAME)
    return manager


def test_the_block_is_part_of_the_configuration(manager: Any) -> None:
    _, configuration = merge_input_args()
    assert "odb" in configuration.model_fields
    arguments = importlib.import_module(NAME.rsplit(".", 1)[0]).ODBArgs
    assert arguments(odb={"token_budget": 64}).odb == {"token_budget": 64}
    with pytest.raises(ValueError, match="token_budgt"):
        arguments(odb={"token_budgt": 64})


def test_settings_that_do_not_go_with_odb_are_refused(manager: Any, tiny_text: Path, tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = Trainer(AutoModelForCausalLM.from_pretrained(tiny_text), arguments, pad, Rows())
    for key in ("sample_packing", "pad_to_sequence_len", "rl"):
        with pytest.raises(ConfigError, match=f"{key}: True does not go with odb"):
            manager.post_trainer_create(DictDefault({"odb": {"token_budget": 96}, key: True}), trainer)
    manager.post_trainer_create(DictDefault({}), trainer)
    assert getattr(trainer, "odb", None) is None, "without a block nothing happens"


def test_the_command_line_trains_the_same_with_and_without_odb(tiny_text: Path, tmp_path: Path) -> None:
    """In one process: with several, axolotl requires a CUDA device, whatever `device` is."""
    rows = [row(3 + (k * 23) % 97) for k in range(32)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    weights = {}
    for name, block in (("stock", {}), ("odb", {"plugins": [NAME], "odb": {"token_budget": 256, "audit": True}})):
        config = {
            "base_model": str(tiny_text),
            "datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "chat_template", "field_messages": "messages"}],
            "chat_template": "chatml",
            "dataset_prepared_path": str(tmp_path / "prepared"),
            "output_dir": str(tmp_path / name),
            "sequence_len": 512,
            "micro_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_epochs": 2,
            "learning_rate": 1e-3,
            "optimizer": "adamw_torch",
            "lr_scheduler": "cosine",
            "attn_implementation": "sdpa",
            "bf16": False,
            "device": "cpu",
            "save_strategy": "no",
            "dataloader_num_workers": 0,
        }
        path = tmp_path / f"{name}.yml"
        path.write_text(yaml.safe_dump(config | block), encoding="utf-8")
        subprocess.run(
            [sys.executable, "-m", "axolotl.cli.main", "train", str(path), "--launcher", "python"],
            env=os.environ | {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
            timeout=300,
            check=True,
        )
        weights[name] = load_file(tmp_path / name / "model.safetensors")
    lines = read_jsonl(tmp_path / "odb" / "odb_audit_rank0.jsonl")
    assert Counter(row for line in lines for row in line["ids"]) == dict.fromkeys(range(len(rows)), 2)
    assert {line["optimizer_step"] for line in lines} == set(range(1, 9))
    before = load_file(tiny_text / "model.safetensors")
    assert weights["odb"].keys() == weights["stock"].keys() == before.keys()
    assert distance(weights["odb"], weights["stock"]) < 1e-5 < 1e-3 < distance(before, weights["stock"])


def distance(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference of any value."""
    return max(float((weights[name] - tensor).abs().max()) for name, tensor in others.items())
