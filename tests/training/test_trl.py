"""TRL's `SFTTrainer` under `enable_odb`: `padding_free=True` and its padded collator are the same training, flat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import llamafactory.extras.packages  # noqa: F401  (trl's trainers import nothing that is missing once it has been)
import pytest
from support import read_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from odb_factory import enable_odb

trl = pytest.importorskip("trl")

BLOCK = {"token_budget": 512, "audit": True}


def train(model: Path, folder: Path, *, odb: bool, padding_free: bool) -> list[float]:
    """The losses of a training on questions and answers of 1 to 29 words."""
    rows = [{"prompt": f"What is {k}? ", "completion": " ".join(["cats", "sing"] * k)[: 5 * k]} for k in range(1, 30)]
    trainer: Any = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=trl.SFTConfig(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=4,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            bf16=False,
            padding_free=padding_free,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    if odb:
        enable_odb(trainer, **BLOCK)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_padding_free_is_the_flat_layout(tiny_text: Path, tmp_path: Path) -> None:
    stock = train(tiny_text, tmp_path / "stock", odb=False, padding_free=False)
    for padding_free in (True, False):
        folder = tmp_path / str(padding_free)
        assert train(tiny_text, folder, odb=True, padding_free=padding_free) == pytest.approx(stock, rel=1e-5)
        lines = read_jsonl(folder / "odb_audit_rank0.jsonl")
        assert all(line["rows"] == 1 and len(line["segments"]) == len(line["ids"]) for line in lines)
        assert any(len(line["ids"]) > 2 for line in lines)
