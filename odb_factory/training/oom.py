"""Out of memory in a micro-batch: how it is told from other errors, what is said of it, and what is lowered for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import DistributedType

from odb_factory.config import ODBConfig
from odb_factory.data.samples import Measured, MicroBatch
from odb_factory.errors import ODBError, OutOfMemoryError
from odb_factory.planning import Budget, Limits

SIGNS = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
"""In the messages of accelerators without an error class of their own, of the CPU's allocator and of libraries that
allocate beside torch's."""
MAX_IDS_NAMED = 16
GIB = 2**30


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short; not where an error of ours tells of it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return (
        isinstance(error, RuntimeError)
        and not isinstance(error, ODBError)
        and any(sign in str(error) for sign in SIGNS)
    )


def why_not_split(args: Any) -> str | None:
    """Why one rank cannot take its micro-batches once more without the others; None: it can.

    args: training arguments, which know the engine before there is a model.
    """
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
        return "FSDP gathers parameters inside forward and backward, where the other ranks would wait for one for ever"
    if getattr(args, "deepspeed_plugin", None) is not None:
        return _why_not_split_zero(deepspeed_config(args))
    engine = args.distributed_state.distributed_type
    if engine != DistributedType.NO and not engine.name.startswith("MULTI_"):
        return f"what {engine.name} does between the ranks inside forward and backward is not known here"
    if args.torch_compile and args.world_size > 1:
        return "torch_compile compiles DDP as a whole, with the reduction of gradients inside backward"
    return None


def deepspeed_config(args: Any) -> dict[str, Any]:
    """The configuration of DeepSpeed in the training arguments, or given to `accelerate launch`; empty without it."""
    if (given := getattr(args, "hf_deepspeed_config", None)) is not None:
        return given.config
    plugin = getattr(args, "deepspeed_plugin", None)
    return {} if plugin is None else plugin.deepspeed_config


def _why_not_split_zero(deepspeed: dict[str, Any]) -> str | None:
    zero = deepspeed.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage == 1:
        if zero.get("overlap_comm"):
            return "DeepSpeed with `overlap_comm` reduces gradients inside backward (without it ZeRO-1 does not)"
        if zero.get("cpu_offload") or (zero.get("offload_optimizer") or {}).get("device", "none") != "none":
            return "gradients that DeepSpeed has offloaded cannot be dropped"
        return None
    if stage == 0:
        return "with stage 0 DeepSpeed keeps sums of gradients that cannot be dropped (DDP trains the same)"
    return (
        f"DeepSpeed with ZeRO stage {stage} reduces gradients over the ranks inside each backward, and what it has "
        "reduced of one that failed cannot be taken back (with stage 1 it could)"
    )


class MemoryWatch:
    """Which micro-batches memory held, and what to lower where it does not hold one.

    budget: as configured. can_split: `oom: split` would work here and is not set.
    """

    def __init__(self, config: ODBConfig, budget: Budget, device: torch.device, *, can_split: bool):
        self.config, self.budget, self.device, self.can_split = config, budget, device, can_split
        self._most_tokens = self._most_patches = 0

    def held(self, measured: Measured) -> None:
        """Forward and backward of a micro-batch went through."""
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
        """What ends the training."""
        return OutOfMemoryError(
            f"{self.what(micro_batch, measured, optimizer_step)}; {self._advice(micro_batch, measured)}."
        )

    def what(self, micro_batch: MicroBatch, measured: Measured, optimizer_step: int) -> str:
        """The micro-batch that memory does not hold, and the peak. optimizer_step: of the run, from 1."""
        tokens, patches = measured.rows * measured.length, self.config.max_patches
        ids = ", ".join(map(str, micro_batch.ids[:MAX_IDS_NAMED]))
        more = f", ... ({len(micro_batch.ids)} in all)" if len(micro_batch.ids) > MAX_IDS_NAMED else ""
        shape = f"{measured.rows} x {measured.length} = {tokens} tokens (token_budget {self.config.token_budget})"
        if measured.patches:
            shape += f", {measured.patches} patches (max_patches {'none' if patches is None else patches})"
        peak = peak_memory(self.device)
        return (
            f"out of memory in micro-batch {micro_batch.index + 1} of {micro_batch.step.num_micro_batches} of "
            f"optimizer step {optimizer_step}: {shape}, samples {ids or 'none (idle)'}{more}"
            f"{f'; peak {peak}' if peak else ''}"
        )

    def lower(self, measured: Measured) -> Limits:
        """To three quarters of what memory does not hold: of its patches where these are more than it held before, or
        further beyond that than its tokens are; else of its tokens."""
        tokens = measured.rows * measured.length
        least = self.budget.collation.dummies(0, 0)[1]
        if self._is_for_patches(measured) and (patches := measured.patches * 3 // 4) >= max(least, 1):
            return Limits(self.budget.token_budget, patches)
        return Limits(max(tokens * 3 // 4, self.budget.sizes.up(1)), self.budget.max_patches)

    def _is_for_patches(self, measured: Measured) -> bool:
        tokens, patches = measured.rows * measured.length, measured.patches
        if tokens <= self._most_tokens and patches > self._most_patches:
            return True
        most = self._most_patches or self.budget.max_patches or 0
        return bool(most) and patches / most > tokens / (self._most_tokens or self.budget.token_budget)

    def _advice(self, micro_batch: MicroBatch, measured: Measured) -> str:
        limits = self.lower(measured)
        is_for_patches = limits.max_patches != self.budget.max_patches
        key, value = ("max_patches", limits.max_patches) if is_for_patches else ("token_budget", limits.token_budget)
        if len(micro_batch.ids) > 1:
            other = ", or `oom: split`" if self.can_split else ""
            return f"set `{key}: {value}` or less{other}"
        shorten = "lower image_max_pixels or video_max_pixels by a quarter"
        if not is_for_patches:
            shorten = f"lower cutoff_len to {limits.token_budget // measured.rows}"  # a pair has two rows
        drop = f"`{key}: {value}`" if self.config.overlong == "drop" else f"`overlong: drop` with `{key}: {value}`"
        return f"a sample alone cannot be cut: {shorten}, or set {drop} to leave out such samples"


def peak_memory(device: torch.device) -> str | None:
    """Most memory that torch has held on the device, and what the device has; None where it does not tell."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    try:
        peak = module.max_memory_allocated(device)
        total = module.get_device_properties(device).total_memory
    except (AttributeError, RuntimeError):
        return None
    return f"{peak / GIB:.2f} of {total / GIB:.2f} GiB on {device}"
