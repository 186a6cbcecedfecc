"""Losses and log-probabilities of labels from hidden states, with the logits of some hundred tokens at a time.

`weighted_loss_of` computes its gradients with the loss, for the weights are known then; `log_probs_of` computes logits
once more in backward, for what the log-probabilities are weighed by is not.

Names of shapes: rows, length: of the labels; N = rows x length; S: supervised tokens; H: hidden size; V: vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from odb_factory.errors import DataError

IGNORE_INDEX = -100
CHUNK_ELEMENTS = {"cpu": 2**24}
OTHER_CHUNK_ELEMENTS = 2**27
"""Logits that exist at a time, by device type. An accelerator needs more tokens at a time to be busy."""
HEAD_PARTS = 4
"""Where the head is trained, the logits that exist at a time may have this part of its elements, whatever
`CHUNK_ELEMENTS` says."""
WEIGHT_SLICE = 2**24
"""Elements of the head's gradient that one product of lower precision adds to the float32 sum."""


@dataclass(frozen=True)
class AfterHead:
    """What a model does to its logits: `cap * tanh(scale * logits / cap)`; cap None: `scale * logits`."""

    scale: float = 1.0
    cap: float | None = None


def weighted_loss_of(
    linear: nn.Linear,
    hidden: Tensor,
    labels: Tensor,
    weights: float | Tensor,
    num_supervised: int | None = None,
    after: AfterHead = AfterHead(),
    chunk_tokens: int | None = None,
) -> Tensor:
    """Sum of weight x token loss over the supervised positions, a scalar in float32 (float64 of float64 weights).

    hidden: [rows, length, H]; labels: [rows, length]; position t predicts label t + 1. weights, num_supervised: of
    `WithoutLogits.weighing`. chunk_tokens: whose logits exist at a time. Products are those of the linear layer, in the
    dtype of autocast where that is on; everything else is in float32.
    Raises `DataError` where the weights are not those of these rows.
    """
    device = hidden.device
    targets, places = _supervised(labels.to(device, non_blocking=True), num_supervised)
    if isinstance(weights, Tensor):
        if weights.dim() != 2 or weights.shape[0] != labels.shape[0] or weights.shape[1] not in (1, labels.shape[1]):
            raise DataError(
                f"the weights of tokens are {list(weights.shape)} and the labels {list(labels.shape)}; give one weight "
                "for each row or for each position."
            )
        if device.type == "cuda" and weights.device.type == "cpu":
            weights = weights.pin_memory()
        everywhere = weights.to(device, _accurate(linear), non_blocking=True).expand(labels.shape).reshape(-1)
        weighed = everywhere[places] * (targets[places] != IGNORE_INDEX)
    else:
        weighed = (targets[places] != IGNORE_INDEX).to(_accurate(linear)) * weights
    loss: Tensor = _apply(linear, hidden, targets, places, weighed, after, chunk_tokens)[0]
    return loss


def log_probs_of(
    linear: nn.Linear,
    hidden: Tensor,
    labels: Tensor,
    num_supervised: int | None = None,
    after: AfterHead = AfterHead(),
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the supervised positions: their places int64[S] in [N], the log-probabilities of their labels [S], and the
    means of their logits [S], which have no gradient.

    hidden, labels, num_supervised, after: of `weighted_loss_of`.
    """
    targets, places = _supervised(labels.to(hidden.device, non_blocking=True), num_supervised)
    return places, *_apply(linear, hidden, targets, places, None, after)


def _supervised(labels: Tensor, num_supervised: int | None) -> tuple[Tensor, Tensor]:
    """The target of each position, [N]; the places of those that have one, [S]."""
    targets = torch.nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].reshape(-1)
    supervised = targets != IGNORE_INDEX
    if num_supervised is None:
        return targets, supervised.nonzero()[:, 0]
    # Supervised ones first, in their order: nothing has to be read back.
    return targets, supervised.to(torch.int8).argsort(descending=True, stable=True)[:num_supervised]


def _accurate(linear: nn.Linear) -> torch.dtype:
    """The dtype of everything but the products with the head."""
    return torch.float64 if linear.weight.dtype == torch.float64 else torch.float32


def _apply(
    linear: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    places: Tensor,
    weights: Tensor | None,
    after: AfterHead,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    device, dtype = hidden.device.type, linear.weight.dtype
    if dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    # Each chunk adds to the whole gradient of the head, which takes as long as its logits.
    least = max(linear.in_features // HEAD_PARTS, 1) if linear.weight.requires_grad else 1
    at_a_time = chunk_tokens or max(CHUNK_ELEMENTS.get(device, OTHER_CHUNK_ELEMENTS) // linear.out_features, least)
    values, means = _Head.apply(
        hidden.reshape(-1, hidden.shape[-1]).index_select(0, places),
        linear.weight,
        linear.bias,
        targets[places].clamp_min(0),
        weights,
        _How(dtype, _accurate(linear), at_a_time, after, torch.is_grad_enabled()),
    )
    return values, means


@dataclass(frozen=True)
class _How:
    """dtype: of the products with the head. accurate: of everything else."""

    dtype: torch.dtype
    accurate: torch.dtype
    chunk_tokens: int
    after: AfterHead
    with_gradient: bool

    def chunks(self, hidden: Tensor, w: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Of some tokens at a time: their places in [S], their hidden states and logits [some, V]. w: in `dtype`."""
        b = None if bias is None else bias.to(self.dtype)
        for start in range(0, len(hidden), self.chunk_tokens):
            places = slice(start, start + self.chunk_tokens)
            h = hidden[places].to(self.dtype)
            yield places, h, torch.nn.functional.linear(h, w, b).to(self.accurate)


class _Gradients:
    """Those of hidden states, weight and bias of the head (None: not needed), added up chunk by chunk."""

    def __init__(self, needed: Sequence[bool], hidden: Tensor, weight: Tensor, bias: Tensor | None, how: _How):
        self.dtypes = [None if one is None else one.dtype for one in (hidden, weight, bias)]
        self.of_hidden = torch.empty_like(hidden) if needed[0] else None
        self.of_weight = torch.zeros_like(weight, dtype=how.accurate) if needed[1] else None
        self.of_bias = torch.zeros_like(bias, dtype=how.accurate) if bias is not None and needed[2] else None

    def add(self, places: slice, hidden: Tensor, w: Tensor, of_logits: Tensor) -> None:
        if self.of_bias is not None:
            self.of_bias += of_logits.sum(0)
        of_logits = of_logits.to(w.dtype)
        if self.of_hidden is not None:
            self.of_hidden[places] = (of_logits @ w).to(self.of_hidden.dtype)
        if self.of_weight is not None:
            _add_product(self.of_weight, of_logits.T, hidden)

    def times(self, factor: Tensor | None = None) -> list[Tensor | None]:
        """Each in the dtype of what it is of. A product of bfloat16 with a scalar tensor would round the scalar."""
        found: list[Tensor | None] = []
        for one, dtype in zip((self.of_hidden, self.of_weight, self.of_bias), self.dtypes):
            if one is not None and factor is not None:
                one = (one if one.dtype == factor.dtype else one.to(factor.dtype)).mul_(factor)
            found.append(None if one is None else one.to(dtype))
        return found


class _Head(torch.autograd.Function):
    """hidden: [S, H]; targets: [S]. Returns log-probabilities [S], and means of logits [S]; with weights [S] the
    weighted loss, and nothing else of use.

    With weights gradients are computed with the loss, for weights that are divided by the largest of them, so that
    they do not vanish in float16; backward multiplies them by it and by the gradient of the loss. Without weights
    backward computes logits once more, and what is saved for it works with engines that shard weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor | None,
        how: _How,
    ) -> tuple[Tensor, Tensor]:
        losses, means = hidden.new_zeros(2, len(hidden), dtype=how.accurate)
        needed = ctx.needs_input_grad[:3]
        ctx.how, ctx.is_weighed, ctx.gradients, now = how, weights is not None, None, None
        with _without_autocast(hidden.device.type):
            if weights is not None and how.with_gradient and any(needed):
                tiny = losses.new_full((1,), torch.finfo(how.accurate).tiny)
                ctx.largest = torch.cat([weights.abs(), tiny]).amax()
                now, ctx.gradients = weights / ctx.largest, _Gradients(needed, hidden, weight, bias, how)
            w = weight.to(how.dtype)
            for places, h, logits in how.chunks(hidden, w, bias):
                slope = _change(logits, how.after)
                if weights is None:
                    means[places] = logits.mean(1)
                scaled = None if now is None else now[places] * how.after.scale
                losses[places], of_logits = _losses(logits, targets[places], scaled, slope)
                del logits  # the gradient is in its place; no two chunks exist at a time
                if of_logits is not None:
                    ctx.gradients.add(places, h, w, of_logits)
                    del of_logits
        ctx.mark_non_differentiable(means)
        if weights is not None:
            return (losses * weights).sum(), means
        ctx.save_for_backward(hidden, weight, bias, targets)
        return -losses, means

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        if ctx.is_weighed:
            if ctx.gradients is None:
                raise RuntimeError("the loss without logits keeps its gradients for one backward only")
            gradients, ctx.gradients = ctx.gradients, None
            return *gradients.times(gradient * ctx.largest), None, None, None
        hidden, weight, bias, targets = ctx.saved_tensors
        how: _How = ctx.how
        with _without_autocast(hidden.device.type):
            gradients = _Gradients(ctx.needs_input_grad[:3], hidden, weight, bias, how)
            w = weight.to(how.dtype)
            for places, h, logits in how.chunks(hidden, w, bias):
                slope = _change(logits, how.after)
                weights = -gradient[places].to(how.accurate) * how.after.scale
                of_logits = _losses(logits, targets[places], weights, slope)[1]
                assert of_logits is not None
                gradients.add(places, h, w, of_logits)
        return *gradients.times(), None, None, None


def _losses(
    logits: Tensor, targets: Tensor, weights: Tensor | None, slope: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Token losses [S] and, in the place of the logits [S, V], the gradients of their weighted sum by what the logits
    were before `_change`, whose derivative is `slope`."""
    of_target = logits.gather(1, targets[:, None])[:, 0]
    largest = logits.amax(1)
    sums = logits.sub_(largest[:, None]).exp_().sum(1)
    losses = sums.log() + largest - of_target
    if weights is None:
        return losses, None
    gradient = logits.mul_((weights / sums)[:, None])
    gradient.scatter_add_(1, targets[:, None], -weights[:, None])
    return losses, gradient if slope is None else gradient.mul_(slope)


def _change(logits: Tensor, after: AfterHead) -> Tensor | None:
    """Do what the model does to its logits, in place. Returns the derivative but for the scale; None: it is 1."""
    slope: Tensor | None = None
    if after.cap is not None:
        logits.mul_(after.scale / after.cap).tanh_()
        slope = 1 - logits.square()
        logits.mul_(after.cap)
    elif after.scale != 1.0:
        logits.mul_(after.scale)
    return slope


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left [V, S] @ right [S, H] to total [V, H], which may be of a higher precision than they are."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    rows = max(WEIGHT_SLICE // right.shape[1], 1)
    for part, some in zip(total.split(rows), left.split(rows)):
        part += some @ right


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    if not torch.amp.is_autocast_available(device_type):  # the device "meta"
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
