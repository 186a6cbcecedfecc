"""`auto` budgets in LLaMA-Factory's training of a vision-language model; refused on a CPU in one line."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from cpu_meter import CPUMeter
from distributed.rows import write_uneven_rows
from llamafactory.train.tuner import run_exp
from support import read_jsonl, read_log, training_config

from odb_factory import ConfigError, memory
from odb_factory.training import budgets

CAPACITY = 60 * 2**20


def test_tokens_and_patches_of_images(tiny_vl, tmp_path, monkeypatch, caplog) -> None:
    """The training equals that with the two numbers; the patches of all images are within the budget."""
    caplog.set_level(logging.INFO, "odb_factory")
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = write_uneven_rows(folder, {"mixed": 24})

    def run(name: str, **block: Any) -> list[float]:
        block |= {"layout": "padded", "audit": True, "eval_token_budget": 1024}
        changes = {"dataset": "mixed", "max_steps": 3, "gradient_accumulation_steps": 24, "freeze_vision_tower": False}
        changes |= {"val_size": 4, "do_eval": True, "per_device_eval_batch_size": 2}
        run_exp(training_config(tiny_vl, rows, tmp_path / name, odb=block, **changes))
        return [line["loss"] for line in read_log(tmp_path / name) if "loss" in line]

    with pytest.raises(ConfigError, match=r"odb\.token_budget: 'auto' tries micro-batches on an accelerator"):
        run("refused", token_budget="auto")
    with monkeypatch.context() as context:
        context.setattr(budgets, "LIMIT_S", 600)  # on a busy machine
        context.setattr(memory, "find_meter", lambda device: CPUMeter(CAPACITY))
        auto = run("auto", token_budget="auto", max_patches="auto")
    (line,) = [message for message in caplog.messages if "token_budget: auto is" in message]
    tokens, patches = map(int, re.findall(r"auto is (\d+)", line))
    assert "as much as memory_fraction allows" in line
    evaluated = [message for message in caplog.messages if "evaluat" in message]
    assert len(evaluated) == 1 and evaluated[0].startswith("evaluated 4 rows"), "after the training that has chosen"
    assert auto == run("numbers", token_budget=tokens, max_patches=patches)
    lines = read_jsonl(tmp_path / "auto" / "odb_audit_rank0.jsonl")
    several = [line for line in lines if line["rows"] > 1]
    assert all(line["rows"] * line["length"] <= tokens and line["patches"] <= patches for line in several)
    assert any(line["patches"] > 16 for line in several)
