"""Log-probabilities of labels, and the gradient of their weighted sum in place of the logits, as one Triton kernel.

Each program passes a row of logits twice. The first pass updates the largest logit and the sum of exponentials online
(Milakov and Gimelshein, 2018), for each lane. The second pass writes the gradient, from the end of the row to its
start, because the cache still holds the end. 6 bytes of memory traffic for each logit in bfloat16.

Importing this module needs Triton, which torch's builds for CUDA bring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""Logits of a row that a program loads at a time."""
NUM_WARPS = 16
NUM_STAGES = 3
"""Blocks in flight, at most."""


@triton.jit
def _after_head(x, scale, cap, HAS_CAP: tl.constexpr):
    """`AfterHead`."""
    x = x * scale
    if HAS_CAP:
        x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)  # tanh
    return x


@triton.jit
def _rows(
    logits,
    stride,
    targets,
    weights,
    values,
    means,
    size,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    own = _after_head(tl.load(logits + target).to(tl.float32), scale, cap, HAS_CAP)
    lanes = tl.arange(0, BLOCK)
    # The sum of exponentials leaves out the label: 1 - probability would cancel if the model is confident.
    largest = tl.zeros([BLOCK], tl.float32) + own
    rest_sums = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    # First pass: the largest logit and the sum of exponentials, each in BLOCK lanes.
    for start in tl.range(0, size, BLOCK, num_stages=STAGES):
        places = start + lanes
        x = tl.load(logits + places, mask=places < size, other=0.0).to(tl.float32)
        x = _after_head(x, scale, cap, HAS_CAP)
        if not GRADIENT:
            total += tl.where(places < size, x, 0.0)
        x = tl.where((places < size) & (places != target), x, -float("inf"))
        new = tl.maximum(largest, x)
        rest_sums = rest_sums * tl.exp(largest - new) + tl.exp(x - new)
        largest = new
    # The lanes together.
    row_largest = tl.max(largest, 0)
    row_rest_sum = tl.sum(rest_sums * tl.exp(largest - row_largest), 0)
    row_total = row_rest_sum + tl.exp(own - row_largest)
    tl.store(values + row, own - row_largest - tl.log(row_total))
    if GRADIENT:
        # Second pass: softmax minus one-hot over the logits, from the end, which the cache still holds.
        factor = tl.load(weights + row) * scale / row_total
        for back in tl.range(0, size, BLOCK, num_stages=STAGES):
            places = (size - 1) // BLOCK * BLOCK - back + lanes
            x = tl.load(logits + places, mask=places < size, other=0.0).to(tl.float32)
            x = _after_head(x, scale, cap, HAS_CAP)
            gradient = tl.where(places == target, -row_rest_sum, tl.exp(x - row_largest)) * factor
            if HAS_CAP:
                gradient *= 1 - (x / cap) * (x / cap)
            tl.store(logits + places, gradient.to(logits.dtype.element_ty), mask=places < size)
    else:
        tl.store(means + row, tl.sum(total, 0) / size)


def replace_rows(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    scale: float,
    cap: float | None,
    values: Tensor,
    means: Tensor,
) -> None:
    """Write log-probabilities float32[n] to `values`, and the gradient of -(weights x values).sum() to `logits`.

    logits: [n, V], rows of contiguous logits. targets: int64[n]. weights: float32[n]; None: no gradient is computed,
    and the means of the logits are written to `means`, float32[n]. scale, cap: see `AfterHead`.
    """
    with torch.cuda.device_of(logits):
        _rows[(len(logits),)](
            logits,
            logits.stride(0),
            targets,
            values if weights is None else weights,
            values,
            means,
            logits.shape[1],
            scale,
            1.0 if cap is None else cap,
            HAS_CAP=cap is not None,
            GRADIENT=weights is not None,
            BLOCK=BLOCK,
            STAGES=NUM_STAGES,
            num_warps=NUM_WARPS,
        )
