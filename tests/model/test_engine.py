"""The engine is read from the model: wrapped by DDP or FSDP, or sharded at loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from odb_factory.model.engine import engine_of, gradients_deferred


class Around(nn.Module):
    """Like PEFT's: a module around a model that was sharded at loading."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.base = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))


def fsdp2() -> nn.Module:
    return fully_shard(make(), mesh=init_device_mesh("cpu", (2,)))


ENGINES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "plain": ("none", make),
    "ddp": ("ddp", lambda: DistributedDataParallel(make())),
    "fsdp": ("sharded", lambda: FullyShardedDataParallel(make(), device_id=torch.device("cpu"), use_orig_params=True)),
    "fsdp2": ("sharded", fsdp2),
    "fsdp2, inside": ("sharded", lambda: Around(fsdp2())),
}


def gradient_of(model: nn.Module) -> float | None:
    """The square sum of the first gradient, over all ranks that hold a part of it; None for FSDP 1."""
    if isinstance(model, FullyShardedDataParallel):
        return None
    (first, *_) = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    whole = first.full_tensor() if hasattr(first, "full_tensor") else first
    return float(whole.double().pow(2).sum())


def report(rank: int) -> dict[str, list]:
    """By engine: its name; the gradient after a deferred backward, after one more that is reduced, and after a single
    backward of both rows."""
    reports: dict[str, list] = {}
    for name, (_, build) in ENGINES.items():
        model = build()
        reports[name] = report = [engine_of(model)]
        row = torch.full((1, 4), float(rank + 1))
        with gradients_deferred(model):
            model(row).sum().backward()
        report.append(gradient_of(model) if name == "ddp" else None)
        model(2 * row).sum().backward()
        report.append(gradient_of(model))
        model.zero_grad()
        model(torch.cat([row, 2 * row])).sum().backward()
        report.append(gradient_of(model))
    return reports


def test_engines_are_recognized_and_reduce_once(tmp_path: Path) -> None:
    """Each rank has its own gradient until the last backward, then the gradient of one backward of all rows."""
    first, second = (outcome.value for outcome in run_ranks("model.test_engine:report", tmp_path, limit_s=120))
    assert {name: report[0] for name, report in first.items()} == {name: kind for name, (kind, _) in ENGINES.items()}
    for name in ("ddp", "fsdp2", "fsdp2, inside"):
        (*_, deferred, at_once), (*_, of_second, _) = first[name], second[name]
        assert deferred == pytest.approx(at_once, rel=1e-5) == of_second, name
    assert 4 * first["ddp"][1] == pytest.approx(second["ddp"][1])
