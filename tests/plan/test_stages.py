"""What is planned of each stage is what its run does: real trainings of a tiny model, one after the other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from llamafactory.hparams import TrainingArguments
from llamafactory.train.tuner import run_exp
from same_training import NUM_EVAL, NUM_TRAINED, write_rows
from support import training_config
from transformers.integrations import is_deepspeed_zero3_enabled

from odb_factory.plan.arguments import parsed
from odb_factory.plan.look import Look, look

pytestmark = pytest.mark.timeout(600)

IN_ORDER = {"train_sampling_strategy": "sequential"}
"""Of transformers 5."""
BATCHES = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "val_size": NUM_EVAL}
DATA = {"pt": "documents", "dpo": "pairs", "kto": "judged"}


@pytest.fixture(scope="module")
def rows_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "data")


def look_at(
    config: dict[str, Any], folder: Path, *overrides: str, ranks: int | None = None, samples: int = 100
) -> Look:
    path = folder / "asked.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    with parsed(path, overrides, ranks) as asked:
        return look(asked, samples)


@pytest.mark.parametrize("stage", list(DATA))
def test_each_stage_as_in_its_run(stage, tiny_text, rows_dir, tmp_path) -> None:
    config = training_config(
        tiny_text,
        rows_dir,
        tmp_path / "out",
        stage=stage,
        dataset=DATA[stage],
        disable_gradient_checkpointing=True,
        odb={"token_budget": 300, "layout": "padded"},
        **BATCHES,
    )
    if stage == "pt" and IN_ORDER.keys() <= TrainingArguments.__dataclass_fields__.keys():
        config |= IN_ORDER
    found = look_at(config, tmp_path)
    run_exp(config)
    summary = json.loads((tmp_path / "out" / "odb_summary.json").read_text(encoding="utf-8"))
    own = found.own
    assert len(found.sample.seen) == NUM_TRAINED == summary["samples"], "rows that are held out are not trained on"
    assert (own.optimizer_steps, own.micro_steps) == (summary["optimizer_steps"], summary["micro_steps"])
    assert own.micro_steps > own.optimizer_steps
    assert own.padding_ratio == pytest.approx(summary["padding_ratio"])


def test_another_machine(tiny_text, rows_dir, tmp_path, monkeypatch) -> None:
    """DeepSpeed, bf16 and eight ranks are planned in one process on a CPU, which stays as it was."""
    deepspeed = tmp_path / "zero3.json"
    zero3 = {"stage": 3}
    content = {"zero_optimization": zero3, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    deepspeed.write_text(json.dumps(content | {"gradient_accumulation_steps": "auto"}), encoding="utf-8")
    config = training_config(
        tiny_text,
        rows_dir,
        tmp_path / "out",
        stage="pt",
        dataset="documents",
        deepspeed=str(deepspeed),
        bf16=True,
        tf32=True,
        use_cpu=False,
        odb={"token_budget": 300},
        **BATCHES,
    )
    del config["use_cpu"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = look_at(config, tmp_path, "odb.token_budget=200", ranks=8)
    assert (found.asked.ranks, found.step_size, found.config.token_budget) == (8, 48, 200)
    assert found.layout == "flat", found.layout_reason
    assert look_at(config, tmp_path).asked.ranks == 4, "what the environment says"
    assert not dist.is_initialized() and not is_deepspeed_zero3_enabled()
    assert os.environ["WORLD_SIZE"] == "4" and "RANK" not in os.environ


def test_a_stream_is_read_as_far_as_asked(tiny_text, tmp_path) -> None:
    (tmp_path / "shards").mkdir()
    for shard in range(2):
        lines = [json.dumps({"text": "the model reads a long line of words " * (1 + k % 5)}) for k in range(40)]
        (tmp_path / "shards" / f"{shard}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    info = {"shards": {"script_url": "shards", "columns": {"prompt": "text"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    config = training_config(
        tiny_text,
        tmp_path,
        tmp_path / "out",
        stage="pt",
        dataset="shards",
        streaming=True,
        max_steps=4,
        odb={"token_budget": 300},
        gradient_accumulation_steps=4,
        dataloader_num_workers=1,
    )
    found = look_at(config, tmp_path, samples=30)
    assert (len(found.sample.seen), found.sample.population) == (30, None)
    assert found.layout == "padded" and "stream" in found.layout_reason
    assert found.own.optimizer_steps == 7, "whole ones: the stream goes on"
