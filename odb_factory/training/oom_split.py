"""`oom: split`: an optimizer step whose micro-batches are cut in two where memory does not hold them."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from odb_factory.accounting.losses import sum_of_losses
from odb_factory.accounting.step_accounting import Computing
from odb_factory.comm.gloo import Exchange
from odb_factory.data.collate import Collated
from odb_factory.data.samples import Part
from odb_factory.errors import ConfigError
from odb_factory.log import get_logger
from odb_factory.planning import Limits
from odb_factory.training.oom import MemoryWatch, is_out_of_memory
from odb_factory.training.run import ODBRun

# ----------------------------------------------------------------------------------------------------------------------
# The mean of gradients over the ranks, taken once an optimizer step when all of them have been computed.
# DDP itself reduces them inside the last backward: a rank that fails in it leaves the others waiting and its own
# buckets half done. Here the model inside DDP is trained on each rank by itself, and what DDP would have done
# follows. ZeRO-1 of DeepSpeed reduces gradients where an accumulation ends: no backward is the last one here, and its
# own reduction follows.

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


# ----------------------------------------------------------------------------------------------------------------------
# `oom: split`: an optimizer step whose micro-batches are cut in two where memory does not hold them.
# A backward that fails has added a part of its gradients. So the optimizer step is begun anew: gradients are dropped,
# and all its micro-batches so far are collated and computed once more, the failing one in two parts. A rank does so
# by itself, for no collective runs inside forward and backward: gradients are synchronised when every rank has said
# that its part of the optimizer step went through.

logger = get_logger(__name__)


@dataclass(slots=True)
class _Attempt:
    """An optimizer step on this rank. parts: of each of its micro-batches so far; done: those that went through since
    it was begun anew, with their losses. cuts, lowered: since its beginning."""

    parts: list[list[Part]] = field(default_factory=list)
    done: list[list[Computing]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    cuts: int = 0
    lowered: Limits | None = None

    def begin_anew(self) -> None:
        self.done, self.losses = [[] for _ in self.parts], []


class SplitSteps:
    """Takes the optimizer steps of a run. exchange: by which the ranks agree on each."""

    def __init__(self, run: ODBRun, exchange: Exchange, watch: MemoryWatch):
        self.run, self.exchange, self.watch = run, exchange, watch
        self._synchronizer: Synchronizer | None = None

    def take(self, trainer: Any, model: Any, micro_batches: Iterator[Collated]) -> Tensor:
        """Gradients of a whole optimizer step, synchronised; returns the sum of the losses of this rank.

        Raises `OutOfMemoryError` where memory does not hold a sample alone, `CollectiveError` where another rank ended.
        """
        if self._synchronizer is None:
            is_zero = trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
            self._synchronizer = ZeRO1(model, trainer.accelerator) if is_zero else DDP(model, self.exchange.world_size)
        step = _Attempt()
        for collated in micro_batches:
            box = [collated]
            del collated  # who takes it out of its box holds the only reference
            micro_batch = box[0][0]
            step.parts.append([Part(micro_batch, self.run.loader.samples_of(micro_batch))])
            step.done.append([])
            if not self._runs(trainer, step, step.parts[-1][0], box):
                self._run_anew(trainer, step)
            if not micro_batch.ends_optimizer_step:
                trainer.control = trainer.callback_handler.on_substep_end(trainer.args, trainer.state, trainer.control)
        self._agree(step)
        for parts, done in zip(step.parts, step.done):
            self.run.accounting.count(parts[0].whole, done)
        return sum_of_losses(step.losses, skip_non_finite=trainer.args.logging_nan_inf_filter)

    def close(self, *, failed: bool = False) -> None:
        """Safe to call twice. failed: the training ends by an error."""
        self.exchange.close(failed=failed)

    def _run_anew(self, trainer: Any, step: _Attempt) -> None:
        """All parts of the micro-batches so far, until each went through."""
        assert self._synchronizer is not None
        while True:
            self._synchronizer.zero_grad()
            step.begin_anew()
            if all(
                self._runs(trainer, step, part, [self._collated(part)]) for parts in step.parts for part in [*parts]
            ):
                return

    def _collated(self, part: Part) -> Collated:
        began = time.perf_counter()
        collated = self.run.loader.collate(part.micro_batch, part.samples)
        self.run.loader.times.wait(time.perf_counter() - began)
        return collated

    def _runs(self, trainer: Any, step: _Attempt, part: Part, box: list[Collated]) -> bool:
        """Forward and backward of a part; False where memory did not hold it, and it was cut in two.

        The error refers to the frames that raised it, and these to what fills the memory: all of it is gone behind the
        `except`.
        """
        assert self._synchronizer is not None
        run, (micro_batch, measured, batch) = self.run, box.pop()
        try:
            run.begin_micro_batch(micro_batch, measured, batch, part)
            with self._synchronizer.alone():
                loss = trainer.odb_forward_backward(self._synchronizer.local, measured, [batch])
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if len(part.samples) == 1:
                raise self.watch.error(micro_batch, measured, run.optimizer_steps + 1) from error
            what = self.watch.what(micro_batch, measured, run.optimizer_steps + 1)
            _forget(error)
        else:
            assert run.computing is not None
            step.done[micro_batch.index].append(run.computing)
            run.accounting.computing = None
            step.losses.append(loss)
            self.watch.held(measured)
            return True
        del batch
        run.accounting.computing = None
        run.loader.times.forget()
        clear_device_cache(garbage_collection=True)
        step.cuts += 1
        step.lowered = self.watch.lower(measured).least(step.lowered)
        parts = step.parts[micro_batch.index]
        at = parts.index(part)
        parts[at : at + 1] = part.cut(run.loader.budget)
        logger.warning("%s; oom: split: it is cut in two, and the optimizer step begun anew on this rank", what)
        return False

    def _agree(self, step: _Attempt) -> None:
        """All ranks have gone through the optimizer step: lower budgets alike, synchronise gradients. Collective."""
        assert self._synchronizer is not None
        loader = self.run.loader
        mine = {
            "cuts": step.cuts,
            "lowered": None if step.lowered is None else asdict(step.lowered),
            "has_gradient": self._synchronizer.has_gradient(),
        }
        phase = f"optimizer step {self.run.optimizer_steps + 1}"
        answers = [json.loads(answer) for answer in self.exchange.gather(json.dumps(mine).encode(), phase)]
        before = loader.lowered
        for answer in answers:
            if answer["lowered"] is not None:
                loader.lower(Limits(**answer["lowered"]))
        if loader.lowered != before and loader.rank == 0:
            logger.warning("oom: split: plans to come are made with budgets of %s", _shown(loader.lowered))
        self.run.accounting.cut(sum(answer["cuts"] for answer in answers))
        self._synchronizer.synchronize([answer["has_gradient"] for answer in answers])


def _forget(error: BaseException | None) -> None:
    """Let go of the local variables of all frames that an error, and those that it came from, went through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _shown(limits: Limits | None) -> str:
    assert limits is not None
    patches = "" if limits.max_patches is None else f" and {limits.max_patches} patches"
    return f"{limits.token_budget} tokens{patches}"
