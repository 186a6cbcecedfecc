"""LLaMA Board: an `odb` key in the extra arguments of its page is a block.

The real page is built without a server, its runner writes the YAML, and the test trains that YAML.
"""

from __future__ import annotations

import json
import sys

import pytest
from llamafactory.train.tuner import run_exp
from llamafactory.webui import interface, runner
from llamafactory.webui.common import save_cmd
from support import read_jsonl

pytest.importorskip("gradio", reason="gradio is not installed: LLaMA-Factory's pin of it excludes the newest releases")

BLOCK = {"token_budget": 2048, "audit": True}


def test_the_odb_key_of_extra_arguments_is_a_block(tiny_text, data_dir, tmp_path, monkeypatch) -> None:
    engines = []

    class Engine(interface.Engine):
        def __init__(self, *args: object, **kwargs: object):
            super().__init__(*args, **kwargs)
            engines.append(self)

    monkeypatch.setattr(interface, "Engine", Engine)
    interface.create_ui()
    (engine,) = engines
    monkeypatch.setattr(runner, "get_save_dir", lambda *names: str(tmp_path / "out"))
    extra = {"odb": BLOCK, "max_steps": 3, "use_cpu": True, "optim": "adamw_torch"}
    entered = {
        "top.model_path": str(tiny_text),
        "top.model_name": "tiny",
        "top.template": "qwen",
        "train.dataset_dir": str(data_dir),
        "train.dataset": ["texts"],
        "train.compute_type": "fp32",
        "train.extra_args": json.dumps(extra),
    }
    manager = engine.manager
    data = {element: getattr(element, "value", None) for element in manager.get_elem_list()}
    data |= {manager.get_elem_by_id(name): value for name, value in entered.items()}
    path = save_cmd(engine.runner._parse_train_args(data))

    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", path])
    monkeypatch.setenv("LLAMABOARD_ENABLED", "1")
    monkeypatch.setenv("LLAMABOARD_WORKDIR", str(tmp_path / "out"))
    run_exp()
    samples = [len(line["ids"]) for line in read_jsonl(tmp_path / "out" / "odb_audit_rank0.jsonl")]
    assert sum(samples) == 3 * 16, "batch size 2 and accumulation 8 are the page's defaults"
    progress = read_jsonl(tmp_path / "out" / "trainer_log.jsonl")
    assert {line["total_steps"] for line in progress} == {3}, "for the progress bar"
