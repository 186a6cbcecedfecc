"""One rank of the tests of engines: a tiny model in each of them, and when its gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from odb_factory.model.engine import engine_of, gradients_deferred


class Around(nn.Module):
    """As PEFT's: a module around one that was sharded when it was loaded."""

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


ENGINES: dict[str, Callable[[], nn.Module]] = {
    "plain": make,
    "ddp": lambda: DistributedDataParallel(make()),
    "fsdp": lambda: FullyShardedDataParallel(make(), device_id=torch.device("cpu"), use_orig_params=True),
    "fsdp2": fsdp2,
    "fsdp2, inside": lambda: Around(fsdp2()),
}


def report(rank: int) -> dict[str, list]:
    """By engine: its name, the first gradient after two backwards of which the last is reduced, and how many ranks
    have the gradient of their own after the first."""
    found: dict[str, list] = {}
    for name, build in ENGINES.items():
        model = build()
        first = torch.full((1, 4), float(rank + 1))
        with gradients_deferred(model):
            model(first).sum().backward()
        is_own = None
        if name == "ddp":
            (gradient, *_) = [parameter.grad for parameter in model.parameters()]
            is_own = bool(torch.allclose(gradient[0] / gradient[0, 0], torch.ones(4))) and float(gradient[0, 0])
        model(2 * first).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in gradients if one is not None]
        found[name] = [engine_of(model), float(whole[0].double().pow(2).sum()) if name != "fsdp" else None, is_own]
    return found
