"""axolotl's own plugin manager and configuration take `ODBPlugin`, and what it does to a trainer trains online."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from support import read_jsonl
from toy import NUM_ROWS, Rows, pad
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


def test_the_trainer_forms_batches_online(manager: Any, tiny_text: Path, tmp_path: Path) -> None:
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_text),
        args=TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True,
            num_train_epochs=1, save_strategy="no", report_to="none", remove_unused_columns=False,
        ),
        train_dataset=Rows(),
        data_collator=pad,
    )  # fmt: skip
    for key in ("sample_packing", "pad_to_sequence_len", "rl"):
        with pytest.raises(ConfigError, match=f"{key}: True does not go with odb"):
            manager.post_trainer_create(DictDefault({"odb": {"token_budget": 96}, key: True}), trainer)
    manager.post_trainer_create(DictDefault({}), trainer)
    assert getattr(trainer, "odb_settings", None) is None, "without a block nothing happens"
    manager.post_trainer_create(DictDefault({"odb": {"token_budget": 96, "audit": True}}), trainer)
    trainer.train()
    lines = read_jsonl(tmp_path / "odb_audit_rank0.jsonl")
    assert sorted(row for line in lines for row in line["ids"]) == list(range(NUM_ROWS))
    assert trainer.state.global_step == -(-NUM_ROWS // 8)
