"""Out of memory in a micro-batch. `oom: raise` ends the training with the key to lower, `split` cuts the micro-batch in
two, `skip` leaves its samples out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from odb_factory.accounting import Computing, sum_of_losses
from odb_factory.config import ODBConfig
from odb_factory.data.collate import Collated
from odb_factory.data.ranks import ring_of
from odb_factory.data.samples import OUT_OF_MEMORY, Measured, MicroBatch, name_rows
from odb_factory.errors import ConfigError, OutOfMemoryError
from odb_factory.log import get_logger
from odb_factory.memory import is_out_of_memory
from odb_factory.model.engine import engine_of
from odb_factory.planner import Budget, Limits
from odb_factory.training.arguments import replaced
from odb_factory.training.budgets import Recompute
from odb_factory.training.checks import why_not_split

logger = get_logger(__name__)

GIB = 2**30


class MemoryWatch:
    """Records the largest micro-batches that memory held, and tells what to lower if memory does not hold one.

    budget: as configured. args: training arguments. recompute: of the training.
    """

    def __init__(self, config: ODBConfig, budget: Budget, args: Any):
        self.config, self.budget, self._args = config, budget, args
        self._most_tokens = self._most_patches = 0
        self.recompute: Recompute | None = None

    def held(self, measured: Measured) -> None:
        """Memory held forward and backward of a micro-batch."""
        self._most_tokens = max(self._most_tokens, measured.rows * measured.length)
        self._most_patches = max(self._most_patches, measured.patches)

    @contextlib.contextmanager
    def named(self, micro_batch: MicroBatch, measured: Measured, optimizer_step: int) -> Iterator[None]:
        """Raise `OutOfMemoryError` in place of the framework's error, which is its cause."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise self.error(micro_batch, measured, optimizer_step) from error

    def error(self, micro_batch: MicroBatch, measured: Measured, optimizer_step: int) -> OutOfMemoryError:
        """The error that ends the training."""
        description = self.describe(micro_batch, measured, optimizer_step)
        return OutOfMemoryError(f"{description}; {self.advice(len(micro_batch.ids), measured)}.")

    def describe(self, micro_batch: MicroBatch, measured: Measured, optimizer_step: int) -> str:
        """The micro-batch that memory does not hold, and the peak. optimizer_step: of the run, from 1."""
        peak, device = "", self._args.device
        if device.type == "cuda":
            most, total = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)[1]
            peak = f"; peak {most / GIB:.2f} of {total / GIB:.2f} GiB on {device}"
        return (
            f"out of memory in micro-batch {micro_batch.index + 1} of {micro_batch.step.num_micro_batches} of "
            f"optimizer step {optimizer_step}: {measured.rows} x {measured.length} = {measured} (budget: "
            f"{self.budget}), {name_rows(micro_batch.ids) if micro_batch.ids else 'idle'}{peak}"
        )

    def lower(self, measured: Measured) -> Limits:
        """The budgets after memory did not hold a micro-batch: one is lowered to three quarters of its tokens or of its
        patches, whichever is the larger multiple of what memory held before (at first: of the budget)."""
        tokens, patches = measured.rows * measured.length, measured.patches
        if most_patches := self._most_patches or self.budget.max_patches:
            is_for_patches = patches / most_patches > tokens / (self._most_tokens or self.budget.token_budget)
        else:
            is_for_patches = tokens <= self._most_tokens  # memory held as many tokens without patches
        if is_for_patches and patches * 3 // 4 >= max(self.budget.collation.dummies(0, 0)[1], 1):
            return Limits(self.budget.token_budget, patches * 3 // 4)
        return Limits(max(tokens * 3 // 4, self.budget.pad_to_multiple_of), self.budget.max_patches)

    def advice(self, num_samples: int, measured: Measured) -> str:
        """The key to set after memory did not hold a micro-batch of this number of samples."""
        if self.recompute is not None and self.recompute.is_off:
            return "it ran without gradient checkpointing: set `recompute: always`"
        if num_samples > 1 and measured.why_padded:
            return "set `layout: padded`: its samples were planned as one flat row, without padding"
        limits = self.lower(measured)
        is_for_patches = limits.max_patches != self.budget.max_patches
        key = f"`max_patches: {limits.max_patches}`" if is_for_patches else f"`token_budget: {limits.token_budget}`"
        others = ""
        if self.config.balance_encoder:
            others = ", or `balance_encoder: false` (a rank may encode images of other ranks)"
        elif num_samples > 1 and self.config.oom == "raise" and why_not_split(self._args) is None:
            others = ", or `oom: split`"
        if num_samples > 1:
            return f"set {key} or less{others}"
        shorten = "image_max_pixels or video_max_pixels" if is_for_patches else "cutoff_len"
        return f"a sample alone cannot be cut: lower {shorten}, or leave it out with `overlong: drop` and {key}{others}"


# `oom: split` and `skip`: if memory does not hold a micro-batch, it is cut in two, or its samples are left out. With
# `recompute: auto`, a micro-batch that ran without gradient checkpointing runs again with it.
# A backward that fails has added a part of its gradients. So the optimizer step is restarted: gradients are dropped,
# and all its micro-batches so far are collated and computed again, the failing one in two parts, or replaced by a small
# sample of weight 0. A rank does so by itself, because no collective runs inside forward and backward: gradients are
# synchronised once every rank has reported that its part of the optimizer step went through. DDP would synchronise
# inside the last backward: a rank that fails in it leaves the others waiting and its own buckets half done. So the
# model inside DDP is trained on each rank by itself, and the same reduction follows. ZeRO-1 of DeepSpeed reduces
# gradients when an accumulation ends: no backward is the last one here, and its own reduction follows.


def cut(micro_batch: MicroBatch, budget: Budget) -> tuple[MicroBatch, MicroBatch]:
    """Two parts of a micro-batch of two samples or more, the larger part as small as possible.

    Its size is its share of the tokens or of the patches, as collated, whichever is larger. budget: of the plan, which
    knows what the collator adds.
    """
    costs = [sample.cost for sample in micro_batch.light]
    rows, length, patches = budget.shape(costs)

    def share(part: tuple[int, int, int]) -> float:
        return max(part[0] * part[1] / (rows * length), part[2] / max(patches, 1))

    at = min(range(1, len(costs)), key=lambda at: max(share(budget.shape(part)) for part in (costs[:at], costs[at:])))
    return micro_batch.cut(at)


COLLECTIVES = ("gather", "gather_for_metrics", "pad_across_processes", "reduce")
"""Methods of accelerate's `Accelerator` in which each rank waits for all others."""
MOST_LOST = 0.5
"""`oom: skip`: the largest share of the loss of an optimizer step that may be left out."""


@dataclass(slots=True)
class _Attempt:
    """An optimizer step on this rank. parts: its micro-batches so far, as cut. done: the parts computed since the step
    was restarted, with their losses. Since the first attempt: cuts, lost (the share of each row left out in the loss of
    the step), lowered."""

    parts: list[MicroBatch] = field(default_factory=list)
    done: list[tuple[Computing, Tensor]] = field(default_factory=list)
    cuts: int = 0
    lost: list[float] = field(default_factory=list)
    lowered: Limits | None = None


class RestartedSteps:
    """Takes the optimizer steps of a `Training` whose model is wrapped. The ranks end each step together.

    Raises `ConfigError` for DDP with a communication hook.
    """

    def __init__(self, training: Any):
        self.training, self.trainer = training, training.trainer
        self.watch: MemoryWatch = training.memory
        model, config = self.trainer.model_wrapped, self.training.config
        self._zero1 = model if engine_of(model) == "deepspeed" else None
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._local: Any = model if self._ddp is None else self._ddp.module
        self._parameters: list[Tensor] = []
        self._buffers: list[Tensor] = []
        if self._ddp is not None:
            if getattr(self._ddp, "_comm_hooks", None):
                raise ConfigError(
                    f"odb.oom: {config.oom!r} averages gradients in place of DDP, whose communication hook would not "
                    "be called; remove the hook or the key."
                )
            ignored = self._ddp.parameters_to_ignore
            self._parameters = [weight for name, weight in self._local.named_parameters() if name not in ignored]
            self._buffers = [buffer for name, buffer in self._local.named_buffers() if name not in ignored]
        self._exchange = ring_of(training.odb.process_group, config.exchange_timeout_s).main

    def take(self, micro_batches: Iterator[Collated]) -> Tensor:
        """Compute the synchronised gradients of an optimizer step; returns the sum of the losses of this rank.

        Raises `OutOfMemoryError` if memory does not hold a sample alone, `CollectiveError` if another rank ended.
        """
        step, loader, trainer = _Attempt(), self.training.loader, self.trainer
        for collated in micro_batches:
            box = [collated]
            del collated  # the box holds the only reference
            micro_batch = box[0][0]
            step.parts.append(micro_batch)
            is_done = self._runs(step, box)
            while not is_done:
                (self._local if self._zero1 is None else self._zero1.optimizer).zero_grad()
                step.done = []
                is_done = all(self._runs(step, [loader.collate(part)]) for part in list(step.parts))
            if not micro_batch.ends_optimizer_step:
                trainer.control = trainer.callback_handler.on_substep_end(trainer.args, trainer.state, trainer.control)
        self._agree(step)
        for _, parts in itertools.groupby([part for part, _ in step.done], lambda part: part.micro_batch.index):
            self.training.accounting.count(list(parts))
        return sum_of_losses([loss for _, loss in step.done], skip_non_finite=trainer.args.logging_nan_inf_filter)

    def _runs(self, step: _Attempt, box: list[Collated]) -> bool:
        """Forward and backward of a part; False if memory did not hold the part, and it was cut in two, left out, or
        has to run again with recomputation. Memory is freed after the `except`: the error holds the frames that raised
        it, and these hold tensors."""
        run, (micro_batch, measured, batch) = self.training, box.pop()
        recompute, oom = self.training.recompute, self.watch.config.oom
        skips = oom == "skip"
        # Compute. An error is judged while its frames live, and what it needs of them is kept as text.
        try:
            computing, local = run.begin_micro_batch(micro_batch, measured), self._local
            with self._no_gathering(), self.training.gradients_summed(local, is_last=False):
                loss = self.trainer.odb_forward_backward(self.training, local, computing, [batch])
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            repeats = recompute is not None and recompute.lower(measured)
            if not repeats and (oom == "raise" or micro_batch.idle or (len(micro_batch.light) == 1 and not skips)):
                raise self.watch.error(micro_batch, measured, run.optimizer_steps + 1) from error
            description = self.watch.describe(micro_batch, measured, run.optimizer_steps + 1)
            forget(error)
        else:
            step.done.append((computing, loss))
            run.accounting.computing = None
            self.watch.held(measured)
            return True
        del batch
        run.accounting.computing = None
        clear_device_cache(garbage_collection=True)
        if repeats:
            logger.warning("%s; it runs again with gradient checkpointing, as do later ones of its size", description)
            return False
        # Lower the budgets of later plans, and replace the part in this step.
        step.lowered = self.watch.lower(measured).least(step.lowered)
        at = step.parts.index(micro_batch)
        if skips:
            failed = tuple((sample, description) for sample in micro_batch.samples)
            step.lost += run.accounting.leave_out(failed, OUT_OF_MEMORY)
            step.parts[at] = replace(micro_batch.only((), failed), light=[run.loader.stand_in(micro_batch.light)])
        else:
            step.cuts += 1
            step.parts[at : at + 1] = cut(micro_batch, run.loader.budget)
        done = "skip: it is left out" if skips else "split: it is cut in two"
        logger.warning("%s; oom: %s, and the optimizer step is restarted on this rank", description, done)
        return False

    def _no_gathering(self) -> contextlib.AbstractContextManager[None]:
        """Let accelerate's collectives raise `ConfigError`: a rank that restarts a step would wait in them alone."""
        if self.training.loader.world_size == 1:
            return contextlib.nullcontext()

        def refuse(name: str, *args: Any, **kwargs: Any) -> None:
            raise ConfigError(
                f"odb.oom: {self.watch.config.oom!r} repeats forwards on one rank, and the loss of "
                f"{type(self.trainer).__name__} calls accelerator.{name}, which waits for all ranks; remove the key "
                "and lower token_budget, or move the call out of the loss."
            )

        return replaced(self.trainer.accelerator, **{name: functools.partial(refuse, name) for name in COLLECTIVES})

    def _agree(self, step: _Attempt) -> None:
        """All ranks have gone through the optimizer step: lower budgets alike, synchronise gradients. Collective.

        All ranks raise `OutOfMemoryError` if the step has lost most of its loss.
        """
        loader, accounting = self.training.loader, self.training.accounting
        about = f"optimizer step {self.training.optimizer_steps + 1}"
        have_gradients = [parameter.grad is not None for parameter in self._parameters]
        message = pickle.dumps((step.cuts, step.lost, step.lowered, have_gradients))
        cuts, shares, all_lowered, gradients = zip(*map(pickle.loads, self._exchange.gather(message, about)))
        lost, before = list(itertools.chain(*shares)), loader.lowered
        for limits in filter(None, all_lowered):
            loader.lower(limits)
        lowered = loader.budget.within(loader.lowered)
        if sum(lost) > MOST_LOST:  # the rest would be another training
            patches = "" if lowered.max_patches is None else f" and `max_patches: {lowered.max_patches}`"
            raise OutOfMemoryError(
                f"oom: skip has left out {len(lost)} samples with {sum(lost):.0%} of the loss of {about}, and at most "
                f"{MOST_LOST:.0%} may be lost; set `token_budget: {lowered.token_budget}`{patches} or less, or lower "
                "cutoff_len or image_max_pixels."
            )
        if loader.lowered != before and loader.rank == 0:
            logger.warning("oom: %s: later plans have budgets of %s", self.watch.config.oom, lowered)
        accounting.total["oom_cuts"] += sum(cuts)
        accounting.lose(lost, OUT_OF_MEMORY)
        self._synchronize(list(map(any, zip(*gradients))))

    def _synchronize(self, have_gradients: Sequence[bool]) -> None:
        """Average gradients over the ranks. have_gradients: whether any rank has used each parameter. Collective."""
        if self._zero1 is not None:  # accelerate has the engine take the optimizer's step in the backward, so here too
            self._zero1.set_gradient_accumulation_boundary(True)
            self._zero1.allreduce_gradients()
            self._zero1.step()
        if self._ddp is None:
            return
        group = self._ddp.process_group
        for parameter in itertools.compress(self._parameters, have_gradients):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(group.size())
            dist.all_reduce(parameter.grad, group=group)
        for buffer in self._buffers if self._ddp.broadcast_buffers else ():
            dist.broadcast(buffer, dist.get_global_rank(group, 0), group=group)


def forget(error: BaseException | None) -> None:
    """Release the local variables of all frames of an error and its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
