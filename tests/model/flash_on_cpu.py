"""A CPU kernel that replaces torch's variable-length flash kernel, for tests without a GPU.

The CPU kernel repeats the checks of the CUDA kernel (dtypes, shapes, strides, ends), and checks that the ends fill the
row. It computes in float64 and returns the dtype of its inputs. The autograd formula around the kernel is torch's own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from odb_factory.model import attention

_OUTSIDE = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
"""The dispatch keys that torch includes and excludes outside of a kernel, where autograd is active."""


def _check(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int, dropout: float
) -> Any:
    """Check the arguments; returns (first token, end) of each sample."""
    assert q.dim() == k.dim() == v.dim() == 3
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[1] % k.shape[1] == 0
    assert q.shape[2] == k.shape[2] <= 256 and q.shape[2] % 8 == 0
    assert cum_q.dtype == cum_k.dtype == torch.int32 and cum_q.dim() == 1 and cum_q.is_contiguous()
    assert cum_q.device == q.device == k.device == v.device and torch.equal(cum_q, cum_k)
    assert type(max_q) is type(max_k) is int and dropout == 0.0
    samples = list(itertools.pairwise(cum_q.tolist()))
    lengths = [end - start for start, end in samples]
    assert sum(lengths) == len(q) == cum_q[-1] and max(lengths) <= max_q == max_k and min(lengths) > 0
    return samples


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *ends_and_causal: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **unused: Any,
) -> Tensor:
    """window_size: visible neighbours on a side; None or -1: all."""
    *ends, causal = ends_and_causal
    assert not any(value is not None for value in unused.values())
    parts = []
    for start, end in _check(q, k, v, *ends):
        query, key, value = (
            x[start:end].double().repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (q, k, v)
        )
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        left, right = (end if n is None or n < 0 else n for n in (window_size_left, window_size_right))
        visible = (distance <= left) & (-distance <= (0 if causal else right))
        scores = query @ key.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        parts.append((scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value).transpose(0, 1).to(q.dtype))
    return torch.cat(parts)


def _forward(q: Tensor, k: Tensor, v: Tensor, *more: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    *ends, causal, debug = more
    assert not debug
    state = torch.zeros(2, dtype=torch.uint64)
    sums = q.new_zeros(q.shape[1], len(q), dtype=torch.float)  # of exponentials; unused by the backward here
    return _attended(q, k, v, *ends, causal, **kwargs), sums, state, state.clone(), q.new_empty(0)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *more: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    *ends, causal, _, _ = more
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch._C._ForceDispatchKeyGuard(*_OUTSIDE), torch.enable_grad():
        return torch.autograd.grad(_attended(*leaves, *ends, causal, **kwargs), leaves, grad)


@contextlib.contextmanager
def flash_on_cpu() -> Iterator[list[str]]:
    """Replace torch's kernel with the CPU kernel, also for calls by `odb_varlen`; yields the list of its calls."""
    calls: list[str] = []

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        calls.append("forward")
        return _forward(*args, **kwargs)

    def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        calls.append("backward")
        return _backward(*args, **kwargs)

    with torch.library._scoped_library("aten", "IMPL") as library, pytest.MonkeyPatch.context() as patch:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        patch.setattr(attention, "device_lacks", lambda device: None)
        yield calls
