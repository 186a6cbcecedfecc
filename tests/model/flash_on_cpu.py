"""torch's variable-length flash kernel without a GPU: a CPU kernel in its place.

The CPU kernel checks what the CUDA kernel checks (dtypes, shapes, strides, ends), and that the ends fill the row. It
computes in float64 and returns the dtype that it is given. The formula of autograd around it is torch's own.
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


def _samples(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int, dropout: float
) -> Any:
    """[(first token, end)] of each sample, once the arguments have passed the checks."""
    assert q.dim() == k.dim() == v.dim() == 3
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[1] % k.shape[1] == 0
    assert q.shape[2] == k.shape[2] <= 256 and q.shape[2] % 8 == 0
    assert cum_q.dtype == cum_k.dtype == torch.int32 and cum_q.dim() == 1 and cum_q.is_contiguous()
    assert cum_q.device == q.device == k.device == v.device and torch.equal(cum_q, cum_k)
    assert type(max_q) is type(max_k) is int and dropout == 0.0
    ends = cum_q.tolist()
    samples = list(itertools.pairwise(ends))
    lengths = [end - start for start, end in samples]
    assert ends[0] == 0 and ends[-1] == len(q) and max(lengths) <= max_q == max_k and min(lengths) > 0
    return samples


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float | None, left: int | None, right: int | None) -> Tensor:
    """[heads, tokens, tokens], -inf outside of the window. left, right: visible neighbours; None or -1: all."""
    scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
    right = 0 if causal else right
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None and left >= 0:
        hidden |= distance > left
    if right is not None and right >= 0:
        hidden |= -distance > right
    return scores.masked_fill(hidden, -torch.inf)


def _wide(x: Tensor, start: int, end: int, heads: int) -> Tensor:
    return x[start:end].double().repeat_interleave(heads // x.shape[1], 1)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_q: Tensor,
    cum_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **unused: Any,
) -> tuple[Tensor, ...]:
    assert not debug and not any(value is not None for value in unused.values())
    outs, sums, heads = [], [], q.shape[1]
    for start, end in _samples(q, k, v, cum_q, cum_k, max_q, max_k, dropout):
        queries, keys, values = (_wide(x, start, end, heads) for x in (q, k, v))
        scores = _scores(queries, keys, causal, scale, window_size_left, window_size_right)
        outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), values).to(q.dtype))
        sums.append(scores.logsumexp(-1).float())
    state = torch.zeros(2, dtype=torch.uint64)
    return torch.cat(outs), torch.cat(sums, 1), state, state.clone(), q.new_empty(0)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_q: Tensor,
    cum_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    *states: Tensor,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    grads, heads, key_heads = [], q.shape[1], k.shape[1]
    for start, end in _samples(q, k, v, cum_q, cum_k, max_q, max_k, dropout):
        queries, keys, values, outs, above = (_wide(x, start, end, heads) for x in (q, k, v, out, grad))
        scores = _scores(queries, keys, causal, scale, window_size_left, window_size_right)
        chances = (scores - lse[:, start:end, None]).exp()
        of_chances = torch.einsum("ihd,jhd->hij", above, values) - (above * outs).sum(-1).T[..., None]
        of_scores = chances * of_chances * (q.shape[-1] ** -0.5 if scale is None else scale)
        of_keys = torch.einsum("hij,ihd->jhd", of_scores, queries).unflatten(1, (key_heads, -1)).sum(2)
        of_values = torch.einsum("hij,ihd->jhd", chances, above).unflatten(1, (key_heads, -1)).sum(2)
        grads.append((torch.einsum("hij,jhd->ihd", of_scores, keys), of_keys, of_values))
    return tuple(torch.cat(parts).to(q.dtype) for parts in zip(*grads))


@contextlib.contextmanager
def flash_on_cpu() -> Iterator[list[str]]:
    """The CPU kernel in the place of torch's, for calls by `odb_varlen`, too; yields a list with each call of it."""
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
