"""The engine of a model is asked of the model: wrapped by whatever, or sharded when it was loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed.ranks import run_ranks
from model.engine_ranks import make


def test_engines_are_told_apart_and_reduce_once(tmp_path: Path) -> None:
    first, second = (outcome.value for outcome in run_ranks("model.engine_ranks:report", tmp_path, limit_s=120))
    names = {"plain": "none", "ddp": "ddp", "fsdp": "sharded", "fsdp2": "sharded", "fsdp2, inside": "sharded"}
    assert {name: values[0] for name, values in first.items()} == names
    # Means over the ranks of the sums of both backwards: (1 + 2) * (1 + 2) / 2 times the gradient of ones.
    model = make()
    model(torch.ones(1, 4)).sum().backward()
    ones = next(model.parameters()).grad
    assert ones is not None
    expected = float((4.5 * ones).double().pow(2).sum())
    for name in ("ddp", "fsdp2", "fsdp2, inside"):
        assert first[name][1] == pytest.approx(expected, rel=1e-5) == pytest.approx(second[name][1]), name
    assert 2 * first["ddp"][2] == pytest.approx(second["ddp"][2]), "each rank has its own until the last backward"
