"""The engine that trains a model on several ranks, asked of the model alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

Engine = Literal["deepspeed", "sharded", "ddp", "none"]


def engine_of(model: Any) -> Engine:
    """The engine of a model as it is wrapped.

    `sharded`: ranks gather parameters in each run of a module (FSDP 1 and 2, also of a model that was sharded when it
    was loaded). `deepspeed`: any stage of ZeRO. `none`: one rank, or a model that is not wrapped yet.

        engine_of(DistributedDataParallel(model))  # "ddp"
    """
    if hasattr(model, "set_gradient_accumulation_boundary"):
        return "deepspeed"
    if isinstance(model, FullyShardedDataParallel) or _of_fsdp2(model):
        return "sharded"
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return "sharded"
    return "ddp" if hasattr(model, "no_sync") else "none"


@contextlib.contextmanager
def gradients_deferred(model: Any) -> Iterator[None]:
    """Within it a backward adds up gradients on its rank; they are reduced with those of the next backward outside.

    DeepSpeed is told so by its accumulation boundary instead.
    """
    modules = [] if hasattr(model, "no_sync") else _of_fsdp2(model)
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        with getattr(model, "no_sync", contextlib.nullcontext)():
            yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


def _of_fsdp2(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` has been applied to; other modules may be around them, of PEFT for example."""
    return [module for module in model.modules() if hasattr(type(module), "set_requires_gradient_sync")]
