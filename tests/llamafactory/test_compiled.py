"""`torch_compile` beside an `odb:` block: at most as many graphs as sizes of micro-batches, and the losses of stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llamafactory.train.tuner import run_exp
from same_training import RELATIVE, configurations, write_rows
from support import read_audit, read_log
from tiny_models import TinyModels
from torch._dynamo.backends import registry
from transformers import TrainerCallback

BUCKETS = [96, 192, 288]


class Graphs(TrainerCallback):
    """Those that are compiled once the training has begun, and so not for the checks before it."""

    def __init__(self) -> None:
        self.compiled: list[list[Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.compiled = []

    def compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.compiled.append([tuple(one.shape) for one in inputs if isinstance(one, torch.Tensor)])
        return graph.forward


def test_graphs_are_as_many_as_buckets(
    tiny_text: Path, tiny_vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    torch._dynamo.list_backends()  # fills the registry
    graphs = Graphs()
    monkeypatch.setitem(registry._COMPILER_FNS, "eager", graphs.compile)
    config_of = configurations(TinyModels(tiny_text, tiny_vl, tmp_path), write_rows(tmp_path / "rows"))
    common = {"disable_gradient_checkpointing": True, "eval_strategy": "no"}
    compiled = common | {"torch_compile": True, "torch_compile_backend": "eager"}
    block = {"token_budget": 288, "length_buckets": BUCKETS, "audit": True, "layout": "flat"}
    run_exp(config_of("sft", tmp_path / "odb", odb=block, **compiled), callbacks=[graphs])
    lengths = {line["length"] for line in read_audit(tmp_path / "odb")}
    assert lengths <= set(BUCKETS) and len(lengths) > 1
    assert 0 < len(graphs.compiled) <= len(lengths), graphs.compiled
    run_exp(config_of("sft", tmp_path / "stock", **common))
    ours, stock = (
        [entry["loss"] for entry in read_log(tmp_path / name) if "loss" in entry] for name in ("odb", "stock")
    )
    assert ours == pytest.approx(stock, rel=RELATIVE)
