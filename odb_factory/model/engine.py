"""The engine that trains a model on several ranks, read from the model alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

Engine = Literal["deepspeed", "sharded", "ddp", "none"]


def engine_of(model: Any) -> Engine:
    """The engine of a wrapped model.

    `sharded`: ranks gather parameters in each run of a module (FSDP 1 and 2, also if the model was sharded at loading).
    `deepspeed`: any stage of ZeRO. `none`: one rank, or the model is not wrapped yet.

        engine_of(DistributedDataParallel(model))  # "ddp"
    """
    if hasattr(model, "set_gradient_accumulation_boundary"):
        return "deepspeed"
    has_shards = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if isinstance(model, FullyShardedDataParallel) or _fsdp2_modules(model) or has_shards:
        return "sharded"
    return "ddp" if hasattr(model, "no_sync") else "none"


@contextlib.contextmanager
def gradients_deferred(model: Any) -> Iterator[None]:
    """Within it a backward adds up gradients on its rank; the next backward outside reduces all of them.

    DeepSpeed has its accumulation boundary instead.
    """
    modules = [] if hasattr(model, "no_sync") else _fsdp2_modules(model)
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        with getattr(model, "no_sync", contextlib.nullcontext)():
            yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


def _fsdp2_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was applied to; other modules, such as PEFT's, may be around them."""
    return [module for module in model.modules() if hasattr(type(module), "set_requires_gradient_sync")]
