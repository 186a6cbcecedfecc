"""The mean of gradients over the ranks, taken once an optimizer step when all of them have been computed.

DDP itself reduces them inside the last backward: a rank that fails in it leaves the others waiting and its own buckets
half done. Here the model inside DDP is trained on each rank by itself, and what DDP would have done follows. ZeRO-1 of
DeepSpeed reduces gradients where an accumulation ends: no backward is the last one here, and its own reduction follows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from odb_factory.errors import ConfigError

BUCKET_BYTES = 25 * 2**20


class Synchronizer(Protocol):
    """local: the model to train, in the place of the Trainer's."""

    local: nn.Module

    def alone(self) -> AbstractContextManager[object]:
        """Around forward and backward of each micro-batch."""

    def zero_grad(self) -> None:
        """Drop the gradients of this rank."""

    def has_gradient(self) -> str:
        """Of each parameter whether it has a gradient on this rank: a text of 0 and 1."""

    def synchronize(self, have_gradients: Sequence[str]) -> None:
        """Take the mean of gradients. Collective. have_gradients: `has_gradient` of all ranks."""


class ZeRO1:
    """engine: DeepSpeed's, in ZeRO-1. accelerator: the Trainer's."""

    def __init__(self, engine: Any, accelerator: Any):
        self.local: nn.Module = engine
        self._engine, self._accelerator = engine, accelerator

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(False)
        self._accelerator.sync_gradients = False
        try:
            yield
        finally:
            self._accelerator.sync_gradients = True

    def zero_grad(self) -> None:
        self._engine.optimizer.zero_grad()

    def has_gradient(self) -> str:
        return ""

    def synchronize(self, have_gradients: Sequence[str]) -> None:
        """The optimizer's step too, which accelerate has the engine take with the last backward."""
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.allreduce_gradients()
        self._engine.step()


class DDP:
    """model: what the Trainer trains, on several ranks in DDP.

    Raises `ConfigError` where several ranks train something else, or DDP with a communication hook.
    """

    def __init__(self, model: Any, world_size: int):
        self.ddp = model if isinstance(model, DistributedDataParallel) else None
        self.local: nn.Module = model if self.ddp is None else self.ddp.module
        if self.ddp is None and world_size > 1:
            raise ConfigError(
                f"odb.oom: 'split' takes the mean of gradients in the place of DDP, and {world_size} ranks train a "
                f"{type(model).__name__}; leave it out (raise)."
            )
        if getattr(self.ddp, "_comm_hooks", None):
            raise ConfigError(
                "odb.oom: 'split' takes the mean of gradients in the place of DDP, whose communication hook would not "
                "be called; leave one of both out."
            )
        ignored: set[str] = getattr(self.ddp, "parameters_to_ignore", set())
        self._parameters = [
            parameter
            for name, parameter in self.local.named_parameters()
            if parameter.requires_grad and name not in ignored
        ]
        self._buffers = [buffer for name, buffer in self.local.named_buffers() if name not in ignored]

    def alone(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def zero_grad(self) -> None:
        self.local.zero_grad()

    def has_gradient(self) -> str:
        return "".join("01"[parameter.grad is not None] for parameter in self._parameters)

    def synchronize(self, have_gradients: Sequence[str]) -> None:
        """A parameter that some rank has used has a gradient on all of them then."""
        if self.ddp is None or len(have_gradients) == 1:
            return
        gradients = []
        for parameter, has in zip(self._parameters, zip(*have_gradients)):
            if "1" in has:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            self._average(bucket)
        if self.ddp.broadcast_buffers:
            for buffer in self._buffers:
                dist.broadcast(buffer, dist.get_global_rank(self._group, 0), group=self._group)

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self.ddp is not None
        return self.ddp.process_group

    def _average(self, bucket: list[Tensor]) -> None:
        parts = [gradient.reshape(-1) for gradient in bucket]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        flat.div_(self._group.size())
        dist.all_reduce(flat, group=self._group)
        for gradient, mean in zip(bucket, flat.split([len(part) for part in parts])):
            if mean.data_ptr() != gradient.data_ptr():
                gradient.copy_(mean.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one type and device that follow each other, of so many bytes together."""
    bucket: list[Tensor] = []
    num_bytes = 0
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        fits = bucket and (gradient.dtype, gradient.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and not (fits and num_bytes + size <= BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(gradient)
        num_bytes += size
    if bucket:
        yield bucket
