"""Losses and log-probabilities of labels from hidden states, with the logits of one chunk of tokens at a time.

For each chunk, one product computes the logits, their gradient overwrites them, and two products add it to the
gradients of hidden states and of the head, in float32. If the weights of the tokens are known, forward does all three;
otherwise (preferences) forward does the first product, and backward all. Between the products a Triton kernel runs
(`odb_factory.model.kernel`), or plain operations.

Rows of logits have an aligned length, and on an accelerator the number of tokens is padded: products of odd sizes are
several times slower there.

Names of shapes: rows, length: of the labels; N = rows x length; S: supervised tokens; H: hidden size; V: vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from odb_factory.errors import DataError, one_line
from odb_factory.log import get_logger
from odb_factory.model.flat_row import copy_to

logger = get_logger(__name__)

IGNORE_INDEX = -100
ALIGNED = 64
"""Rows of logits begin at multiples of this number of elements."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the parts of a computation.

    chunk: bytes of the logits of a chunk; a chunk has at least H / 4 tokens, because each chunk reads and writes the
    head's gradient once. tile: logits that plain operations change at a time. rows: the number of tokens is padded to a
    multiple of it.
    """

    chunk: int
    tile: int
    rows: int


ON_CPU = Sizes(chunk=2**25, tile=2**19, rows=1)
"""A tile fits the cache of a CPU."""
ELSEWHERE = Sizes(chunk=3 * 2**28, tile=2**26, rows=ALIGNED)


@dataclass(frozen=True)
class AfterHead:
    """How a model changes its logits: `cap * tanh(scale * logits / cap)`; cap None: `scale * logits`."""

    scale: float = 1.0
    cap: float | None = None


def weighted_loss_of(
    linear: nn.Linear,
    hidden: Tensor,
    labels: Tensor,
    weights: float | Tensor,
    num_supervised: int | None = None,
    after: AfterHead = AfterHead(),
) -> Tensor:
    """Sum of weight x token loss over the supervised positions, a scalar in float32 (float64 of float64 weights).

    hidden: [rows, length, H]; labels: [rows, length]; position t predicts label t + 1. weights, num_supervised: see
    `WithoutLogits.weighing`. Products have the dtype of the linear layer, or of autocast if that is on; everything else
    is in float32.
    Raises `DataError` if the weights have another shape.
    """
    targets, places = _supervised(labels.to(hidden.device, non_blocking=True), num_supervised)
    if isinstance(weights, Tensor):
        if weights.dim() != 2 or weights.shape[0] != labels.shape[0] or weights.shape[1] not in (1, labels.shape[1]):
            raise DataError(
                f"the weights of tokens are {list(weights.shape)} and the labels {list(labels.shape)}; give one weight "
                "for each row or for each position."
            )
        weights = copy_to(weights.to(_accurate(linear)), hidden.device).expand(labels.shape).reshape(-1)[places]
    weighed = (targets[places] != IGNORE_INDEX).to(_accurate(linear)) * weights
    # In the products the largest weight is 1: float16 would round small weights to 0.
    largest = nn.functional.pad(weighed.abs(), (0, 1)).amax().clamp_min(torch.finfo(weighed.dtype).tiny)
    loss, _, _ = _apply(linear, hidden, targets, places, after, weighed / largest)
    return loss * largest


def log_probs_of(
    linear: nn.Linear,
    hidden: Tensor,
    labels: Tensor,
    num_supervised: int | None = None,
    after: AfterHead = AfterHead(),
) -> tuple[Tensor, Tensor, Tensor]:
    """Places of the supervised positions int64[S] in [N], log-probabilities of their labels [S], and means of their
    logits [S], without gradient.

    Arguments: see `weighted_loss_of`.
    """
    targets, places = _supervised(labels.to(hidden.device, non_blocking=True), num_supervised)
    _, values, means = _apply(linear, hidden, targets, places, after)
    return places, values, means


def _supervised(labels: Tensor, num_supervised: int | None) -> tuple[Tensor, Tensor]:
    """The target of each position [N], and the places of positions that have one [S]."""
    targets = nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].reshape(-1)
    supervised = targets != IGNORE_INDEX
    if num_supervised is None:
        return targets, supervised.nonzero()[:, 0]
    # Supervised positions first, in their order: nothing is read back from the device.
    return targets, supervised.to(torch.int8).argsort(descending=True, stable=True)[:num_supervised]


def _accurate(linear: nn.Linear) -> torch.dtype:
    """The dtype of everything but the products with the head."""
    return torch.float64 if linear.weight.dtype == torch.float64 else torch.float32


def _apply(
    linear: nn.Linear, hidden: Tensor, targets: Tensor, places: Tensor, after: AfterHead, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of `_Head` at `places`."""
    device, dtype, tokens = hidden.device.type, linear.weight.dtype, len(places)
    if dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    sizes = ON_CPU if device == "cpu" else ELSEWHERE
    if padding := -tokens % sizes.rows:
        places = nn.functional.pad(places, (0, padding))
        weights = None if weights is None else nn.functional.pad(weights, (0, padding))
    rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places)
    how = _Pass(targets[places].clamp_min(0), weights, torch.is_grad_enabled(), dtype, _accurate(linear), after, sizes)
    loss, values, means = _Head.apply(rows, linear.weight, linear.bias, how)
    return loss, values[:tokens], means[:tokens]


class _Head(torch.autograd.Function):
    """hidden: [S, H]. Returns the loss -(weights x values).sum(); values, the log-probabilities of the targets [S];
    means of logits [S], zeros if a gradient is computed. The loss has a gradient; without weights, `values` has."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, how: _Pass
    ) -> tuple[Tensor, Tensor, Tensor]:
        is_known = how.weights is not None
        needed = ctx.needs_input_grad[:3] if is_known and how.with_gradient else (False,) * 3
        values, means, ctx.gradients = how.run(hidden, weight, bias, how.weights, needed)
        loss = values.new_zeros(()) if how.weights is None else -(values * how.weights).sum()
        ctx.how = how
        ctx.save_for_backward(hidden, weight, bias)
        ctx.mark_non_differentiable(means, values if is_known else loss)
        return loss, values, means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: Tensor, of_values: Tensor, _: Any) -> Any:
        operands, weights = ctx.saved_tensors, ctx.how.weights
        gradients, ctx.gradients = ctx.gradients, ()  # changed in place below: a second backward computes new gradients
        if not gradients:
            known = -of_values if weights is None else weights
            _, _, gradients = ctx.how.run(*operands, known, ctx.needs_input_grad[:3])
        factor = 1.0 if weights is None else of_loss
        scaled = (
            None if total is None else total.mul_(factor).to(operand.dtype)
            for total, operand in zip(gradients, operands)
        )
        return *scaled, None


@dataclass(frozen=True)
class _Pass:
    """A pass over all tokens. targets: int64[S]. weights: [S], if known in forward. with_gradient: a backward may
    follow. dtype: of the products with the head. accurate: dtype of everything else."""

    targets: Tensor
    weights: Tensor | None
    with_gradient: bool
    dtype: torch.dtype
    accurate: torch.dtype
    after: AfterHead
    sizes: Sizes

    def run(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor | None, needed: tuple[bool, ...]
    ) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        """Log-probabilities of the targets [S]; means of logits [S]; the gradients of -(weights x log-probabilities)
        .sum() by hidden, weight and bias: None for each that is not needed, () if none is."""
        (tokens, width), vocabulary, sizes = hidden.shape, len(weight), self.sizes
        weights = weights if any(needed) else None
        values, means = hidden.new_zeros(2, tokens, dtype=self.accurate)
        of_hidden, of_weight, of_bias = gradients = tuple(
            hidden.new_zeros(operand.shape, dtype=self.accurate) if operand is not None and is_needed else None
            for operand, is_needed in zip((hidden, weight, bias), needed)
        )
        weight = weight.to(self.dtype)
        # Chunks are of equal size, rounded up to `sizes.rows` tokens.
        bytes_of_row = vocabulary * self.dtype.itemsize
        most = max(sizes.chunk // bytes_of_row, width // 4) // sizes.rows * sizes.rows or sizes.rows
        size = math.ceil(tokens / max(math.ceil(tokens / most), 1) / sizes.rows) * sizes.rows
        memory = hidden.new_empty(size, math.ceil(vocabulary / ALIGNED) * ALIGNED, dtype=self.dtype)
        memory[:, vocabulary:] = 0  # bfloat16 products on a CPU read it, and a NaN would spread to their results
        with without_autocast(hidden.device.type):
            for some in _parts(tokens, size):
                x = hidden[some].to(self.dtype)
                logits = memory[: len(x), :vocabulary]
                if bias is None:
                    torch.mm(x, weight.T, out=logits)
                else:
                    torch.addmm(bias.to(self.dtype), x, weight.T, out=logits)
                weighed = None if weights is None else weights[some]
                self._replace(logits, self.targets[some], weighed, values[some], means[some])
                if of_hidden is not None:
                    _add(of_hidden[some], logits, weight)
                if of_weight is not None:
                    _add(of_weight, logits.T, x)
                if of_bias is not None:
                    of_bias += logits.sum(0, dtype=self.accurate)
        return values, means, gradients if any(needed) else ()

    def _replace(self, logits: Tensor, targets: Tensor, weights: Tensor | None, values: Tensor, means: Tensor) -> None:
        """Write log-probabilities to `values`; with weights the gradient of -(weights x values).sum() to `logits`,
        without weights the means of logits to `means`."""
        scale, cap = self.after.scale, self.after.cap
        if _may_use_kernel(logits, values):
            kernel = _kernel(logits.device, logits.dtype, cap is not None, weights is not None)
            if kernel is not None:
                kernel(logits, targets, weights, scale, cap, values, means)
                return
        for some in _parts(len(logits), self.sizes.tile // logits.shape[1]):
            x, target = logits[some].to(self.accurate), targets[some, None]
            slope: Tensor | None = None  # of the cap
            if cap is not None:
                x.mul_(scale / cap).tanh_()
                slope = 1 - x.square()
                x.mul_(cap)
            elif scale != 1.0:
                x.mul_(scale)
            if weights is None:
                means[some] = x.mean(1)
            x.sub_(x.amax(1, keepdim=True))
            own = x.gather(1, target)
            # The sum leaves out the label: 1 - probability would cancel if the model is confident.
            rest_sum = x.exp_().scatter_(1, target, 0.0).sum(1, keepdim=True)
            total = rest_sum + own.exp()
            values[some] = (own - total.log())[:, 0]
            if weights is not None:
                x.scatter_(1, target, -rest_sum)
                if slope is not None:
                    x.mul_(slope)
                torch.mul(x, weights[some, None] * scale / total, out=logits[some])


def _parts(length: int, size: int) -> list[slice]:
    """Slices of `size` (at least 1) of `length` items."""
    size = max(size, 1)
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _add(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a @ b` to `total`."""
    if total.dtype == b.dtype:
        torch.addmm(total, a, b, out=total)
    elif _adds_unrounded(b.device, b.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


@functools.cache
def _adds_unrounded(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of `dtype` can be added to float32 without rounding: on CUDA."""
    total, factor = torch.zeros(8, 8, device=device), torch.zeros(8, 8, device=device, dtype=dtype)
    try:
        torch.addmm(total, factor, factor, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


def _may_use_kernel(logits: Tensor, values: Tensor) -> bool:
    """Not for tensors without memory, nor in float64."""
    return logits.is_cuda and type(logits) is Tensor and values.dtype == torch.float32


@functools.cache
def _kernel(device: torch.device, dtype: torch.dtype, has_cap: bool, with_gradient: bool) -> Callable[..., None] | None:
    """The Triton kernel; None if Triton is missing, too old, or cannot compile it for these arguments."""
    try:
        from odb_factory.model.kernel import BLOCK, replace_rows

        row = torch.zeros(1, device=device)
        logits = torch.zeros(1, BLOCK, device=device, dtype=dtype)
        replace_rows(logits, row.long(), row if with_gradient else None, 1.0, 1.0 if has_cap else None, row, row)
    except Exception as error:  # compilers of all versions run here
        logger.info("loss: plain operations in place of a Triton kernel: %s", one_line(error))
        return None
    return replace_rows


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Switch off autocast, which rounds products to bfloat16 or half; which products depends on the device."""
    if not torch.amp.is_autocast_available(device_type):  # the device "meta"
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
