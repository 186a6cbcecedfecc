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
    dtype of autocast where that is on; all else is in float32.
    Raises `DataError` where the weights are not those of these rows.
    """
    device, accurate = hidden.device, _accurate(linear)
    targets, supervised, places = _supervised(labels.to(device, non_blocking=True), num_supervised)
    weighed = supervised[places].to(accurate)
    if isinstance(weights, Tensor):
        if weights.dim() != 2 or weights.shape[0] != labels.shape[0] or weights.shape[1] not in (1, labels.shape[1]):
            raise DataError(
                f"the weights of tokens are {list(weights.shape)} and the labels {list(labels.shape)}; give one weight "
                "for each row or for each position."
            )
        if device.type == "cuda" and weights.device.type == "cpu":
            weights = weights.pin_memory()
        everywhere = weights.to(device, accurate, non_blocking=True).expand(labels.shape).reshape(-1)
        weighed = weighed * everywhere[places]
    else:
        weighed = weighed * weights
    loss: Tensor = _ChunkedLoss.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        linear.weight,
        linear.bias,
        _Tokens(places, targets[places].clamp_min(0), weighed),
        _How(
            _product_dtype(linear, device),
            accurate,
            chunk_tokens or _chunk_tokens(linear, device),
            after,
            torch.is_grad_enabled(),
        ),
    )
    return loss


def token_losses_of(linear: nn.Linear, hidden: Tensor, targets: Tensor, after: AfterHead) -> Tensor:
    """The loss at each position, without gradients: [rows, length]; 0 where the target is -100."""
    device, dtype = hidden.device, _product_dtype(linear, hidden.device)
    accurate = _accurate(linear)
    flat = targets.to(device).reshape(-1)
    losses = torch.zeros(flat.shape, device=device, dtype=accurate)
    w, b = linear.weight.to(dtype), None if linear.bias is None else linear.bias.to(dtype)
    with _without_autocast(device.type):
        for places in (flat != IGNORE_INDEX).nonzero()[:, 0].split(_chunk_tokens(linear, device)):
            h = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places).to(dtype)
            logits = torch.nn.functional.linear(h, w, b).to(accurate)
            losses[places] = _losses(logits, flat[places], None, after)[0]
    return losses.view(targets.shape)


def log_probs_of(
    linear: nn.Linear, hidden: Tensor, labels: Tensor, num_supervised: int, after: AfterHead = AfterHead()
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the supervised positions: their places int64[S] in [N], the log-probabilities of their labels [S], and the
    means of their logits [S], which have no gradient.

    hidden, labels, after: of `weighted_loss_of`. num_supervised: S, counted on the host.
    """
    targets, _, places = _supervised(labels.to(hidden.device, non_blocking=True), num_supervised)
    log_probs, means = _LogProbs.apply(
        hidden.reshape(-1, hidden.shape[-1]).index_select(0, places),
        linear.weight,
        linear.bias,
        targets[places].clamp_min(0),
        _How(
            _product_dtype(linear, hidden.device),
            _accurate(linear),
            _chunk_tokens(linear, hidden.device),
            after,
            torch.is_grad_enabled(),
        ),
    )
    return places, log_probs, means


def _supervised(labels: Tensor, num_supervised: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """The target of each position, whether it is supervised, [N] each; the places of those that are, [S]."""
    targets = torch.nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].reshape(-1)
    supervised = targets != IGNORE_INDEX
    if num_supervised is None:
        return targets, supervised, supervised.nonzero()[:, 0]
    # Supervised ones first, in their order: nothing has to be read back.
    return targets, supervised, supervised.to(torch.int8).argsort(descending=True, stable=True)[:num_supervised]


def _accurate(linear: nn.Linear) -> torch.dtype:
    """Of everything but the products with the head."""
    return torch.float64 if linear.weight.dtype == torch.float64 else torch.float32


def _product_dtype(linear: nn.Linear, device: torch.device) -> torch.dtype:
    dtype = linear.weight.dtype
    if dtype != torch.float64 and torch.amp.is_autocast_available(device.type):
        return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype
    return dtype


def _chunk_tokens(linear: nn.Linear, device: torch.device) -> int:
    return max(CHUNK_ELEMENTS.get(device.type, OTHER_CHUNK_ELEMENTS) // linear.out_features, 1)


@dataclass(frozen=True)
class _Tokens:
    """The supervised tokens, [S] each: their places in [N], their targets, their weights."""

    places: Tensor
    targets: Tensor
    weights: Tensor

    def chunks(self, size: int) -> Iterator[Sequence[Tensor]]:
        return zip(self.places.split(size), self.targets.split(size), self.weights.split(size))


@dataclass(frozen=True)
class _How:
    """dtype: of the products with the head. accurate: of everything else."""

    dtype: torch.dtype
    accurate: torch.dtype
    chunk_tokens: int
    after: AfterHead
    with_gradient: bool


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are computed with the loss, for weights that are divided by the largest of them, so that they do not
    vanish in float16; backward multiplies them by it and by what comes from behind."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: _Tokens, how: _How) -> Tensor:
        of_hidden, of_weight, of_bias = (how.with_gradient and needed for needed in ctx.needs_input_grad[:3])
        with_gradient = of_hidden or of_weight or of_bias
        with _without_autocast(hidden.device.type):
            total = hidden.new_zeros((), dtype=how.accurate)
            largest = torch.cat([tokens.weights.abs(), total.new_full((1,), torch.finfo(how.accurate).tiny)]).amax()
            w, b = weight.to(how.dtype), None if bias is None else bias.to(how.dtype)
            grad_hidden = torch.zeros_like(hidden) if of_hidden else None
            grad_weight = torch.zeros_like(weight, dtype=how.accurate) if of_weight else None
            grad_bias = None if bias is None or not of_bias else torch.zeros_like(bias, dtype=how.accurate)
            for places, targets, weights in tokens.chunks(how.chunk_tokens):
                h = hidden.index_select(0, places).to(how.dtype)
                logits = torch.nn.functional.linear(h, w, b).to(how.accurate)
                losses, gradient = _losses(logits, targets, weights / largest if with_gradient else None, how.after)
                del logits  # the gradient is in its place; no two chunks exist at a time
                total += (losses * weights).sum()
                if gradient is None:
                    continue
                if grad_bias is not None:
                    grad_bias += gradient.sum(0)
                gradient = gradient.to(how.dtype)
                if grad_hidden is not None:
                    grad_hidden.index_copy_(0, places, (gradient @ w).to(hidden.dtype))
                if grad_weight is not None:
                    _add_product(grad_weight, gradient.T, h)
                del gradient
        ctx.gradients = (grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = tuple(None if one is None else one.dtype for one in (hidden, weight, bias))
        ctx.largest = largest
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("the loss without logits keeps its gradients for one backward only")
        gradients, ctx.gradients = ctx.gradients, None
        factor = gradient * ctx.largest
        # A product of a tensor in bfloat16 with a scalar tensor would round the scalar first.
        return *(
            None if one is None else (one if one.dtype == factor.dtype else one.to(factor.dtype)).mul_(factor).to(dtype)
            for one, dtype in zip(gradients, ctx.dtypes)
        ), None, None  # fmt: skip


class _LogProbs(torch.autograd.Function):
    """hidden: [S, H]; targets: [S]. Saves what a linear layer does, and so works with engines that shard weights."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _How
    ) -> tuple[Tensor, Tensor]:
        log_probs, means = hidden.new_empty(2, len(hidden), dtype=how.accurate)
        with _without_autocast(hidden.device.type):
            w, b = weight.to(how.dtype), None if bias is None else bias.to(how.dtype)
            for h, of_targets, places in _split(how.chunk_tokens, hidden, targets):
                logits = torch.nn.functional.linear(h.to(how.dtype), w, b).to(how.accurate)
                _change(logits, how.after)
                means[places] = logits.mean(1)
                log_probs[places] = -_losses(logits, of_targets, None, AfterHead())[0]
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.how = how
        ctx.mark_non_differentiable(means)
        return log_probs, means

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        hidden, weight, bias, targets = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        how: _How = ctx.how
        with _without_autocast(hidden.device.type):
            w, b = weight.to(how.dtype), None if bias is None else bias.to(how.dtype)
            grad_hidden = torch.empty_like(hidden) if of_hidden else None
            grad_weight = torch.zeros_like(weight, dtype=how.accurate) if of_weight else None
            grad_bias = torch.zeros_like(bias, dtype=how.accurate) if of_bias else None
            for h, of_targets, places in _split(how.chunk_tokens, hidden, targets):
                h = h.to(how.dtype)
                logits = torch.nn.functional.linear(h, w, b).to(how.accurate)
                of_logits = _losses(logits, of_targets, -gradient[places].to(how.accurate), how.after)[1]
                assert of_logits is not None
                if grad_bias is not None:
                    grad_bias += of_logits.sum(0)
                of_logits = of_logits.to(how.dtype)
                if grad_hidden is not None:
                    grad_hidden[places] = (of_logits @ w).to(hidden.dtype)
                if grad_weight is not None:
                    _add_product(grad_weight, of_logits.T, h)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _split(size: int, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """So many rows of each at a time, and where they are."""
    for start in range(0, len(tensors[0]), size):
        places = slice(start, start + size)
        yield (*(one[places] for one in tensors), places)


def _losses(logits: Tensor, targets: Tensor, weights: Tensor | None, after: AfterHead) -> tuple[Tensor, Tensor | None]:
    """Token losses [S] and, in the place of the logits [S, V], the gradients of their weighted sum by these logits."""
    slope = _change(logits, after)
    of_target = logits.gather(1, targets[:, None])[:, 0]
    largest = logits.amax(1)
    sums = logits.sub_(largest[:, None]).exp_().sum(1)
    losses = sums.log() + largest - of_target
    if weights is None:
        return losses, None
    weights = weights * after.scale
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
