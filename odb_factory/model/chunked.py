"""Losses and log-probabilities of labels from hidden states, with logits of some tokens and some entries at a time.

The vocabulary is passed block by block, in forward and again in backward. So the largest logit, the sum of exponentials
and the expected row of the head are kept up to date as in flash attention (Dao et al., 2022), with the head's weight in
the place of keys and values: forward has the gradient of hidden states at its end. Backward needs the logits once more
for the gradient of a trained head, whose rows are complete after one product over all tokens: it is rounded once.
Where all logits are few, they are computed and kept as by the model itself.

Names of shapes: rows, length: of the labels; N = rows x length; S: supervised tokens; H: hidden size; V: vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from odb_factory.errors import DataError

IGNORE_INDEX = -100
TILE_ELEMENTS = {"cpu": 2**20}
OTHER_TILE_ELEMENTS = 2**26
"""Logits that exist at a time, by device type. On a CPU they fit its cache; an accelerator needs more to be busy."""
BLOCK = 1024
"""Entries of the vocabulary in a block of forward, and at least 2 H: each block changes sums of [S, H]."""
LEAST_BLOCK = 512
"""Entries of the vocabulary in a block of backward, at least. Such a block has the logits of all tokens."""
FEW_ELEMENTS = 2**24
"""Logits of a micro-batch that are computed at once, at most: 64 MiB, and four times that in backward."""


Watch = Callable[[Tensor, Tensor | None, torch.Size], None]
"""Is shown token losses without gradient [S], their places in [N] (None: all N in order), the shape of the labels."""


@dataclass(frozen=True)
class AfterHead:
    """What a model does to its logits: `cap * tanh(scale * logits / cap)`; cap None: `scale * logits`."""

    scale: float = 1.0
    cap: float | None = None

    def changed(self, logits: Tensor) -> Tensor:
        """With its derivative, for autograd."""
        if self.cap is not None:
            return self.cap * (logits * (self.scale / self.cap)).tanh()
        return logits if self.scale == 1.0 else logits * self.scale

    def change(self, logits: Tensor) -> Tensor | None:
        """Change `logits` in place. Returns the derivative without the factor `scale`; None: it is 1."""
        slope: Tensor | None = None
        if self.cap is not None:
            logits.mul_(self.scale / self.cap).tanh_()
            slope = 1 - logits.square()
            logits.mul_(self.cap)
        elif self.scale != 1.0:
            logits.mul_(self.scale)
        return slope


def weighted_loss_of(
    linear: nn.Linear,
    hidden: Tensor,
    labels: Tensor,
    weights: float | Tensor,
    num_supervised: int | None = None,
    after: AfterHead = AfterHead(),
    watch: Watch | None = None,
) -> Tensor:
    """Sum of weight x token loss over the supervised positions, a scalar in float32 (float64 of float64 weights).

    hidden: [rows, length, H]; labels: [rows, length]; position t predicts label t + 1. weights, num_supervised, watch:
    of `WithoutLogits.weighing`. Products are those of the linear layer, in the dtype of autocast where that is on;
    everything else is in float32.
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
    values, _ = _apply(linear, hidden, targets, places, after)
    if watch is not None:
        watch(-values.detach() * (targets[places] != IGNORE_INDEX), places, labels.shape)
    return -(values * weighed).sum()


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
    return places, *_apply(linear, hidden, targets, places, after, with_means=True)


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
    linear: nn.Linear, hidden: Tensor, targets: Tensor, places: Tensor, after: AfterHead, with_means: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and, on request, means of logits at `places`."""
    states, targets = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places), targets[places].clamp_min(0)
    device, dtype = hidden.device.type, linear.weight.dtype
    if dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    # A head that autocast would copy is passed block by block.
    if len(places) * len(linear.weight) <= FEW_ELEMENTS and dtype == linear.weight.dtype:
        logits = nn.functional.linear(states.to(dtype), linear.weight, linear.bias)
        logits = after.changed(logits.to(_accurate(linear)))
        values = logits.log_softmax(1).gather(1, targets[:, None])[:, 0]
        return values, logits.detach().mean(1) if with_means else torch.zeros_like(values)
    values, means = _LogProbs.apply(
        states,
        linear.weight,
        linear.bias,
        targets,
        _How(dtype, _accurate(linear), after, TILE_ELEMENTS.get(device, OTHER_TILE_ELEMENTS)),
        with_means,
        torch.is_grad_enabled(),
    )
    return values, means


@dataclass(frozen=True)
class _How:
    """dtype: of the products with the head. accurate: of everything else. tile: logits that exist at a time."""

    dtype: torch.dtype
    accurate: torch.dtype
    after: AfterHead
    tile: int

    def blocks(self, weight: Tensor, bias: Tensor | None, size: int) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Of `size` entries of the vocabulary at a time: their places, their rows of the head and their biases."""
        for start in range(0, len(weight), size):
            some = slice(start, start + size)
            yield some, weight[some].to(self.dtype), None if bias is None else bias[some].to(self.dtype)


class _LogProbs(torch.autograd.Function):
    """hidden: [S, H]; targets: [S]. Returns log-probabilities of the targets [S] and means of logits [S]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        how: _How,
        with_means: bool,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        (tokens, width), after = hidden.shape, how.after
        others, of_targets, means = hidden.new_zeros(3, tokens, dtype=how.accurate)
        largest = torch.full_like(others, -torch.inf)
        needs_hidden = with_gradient and ctx.needs_input_grad[0]
        expected = hidden.new_zeros(tokens, width, dtype=how.accurate) if needs_hidden else None
        size = max(BLOCK, 2 * width)
        with without_autocast(hidden.device.type):
            all_h = hidden.to(how.dtype)
            for block, w, b in how.blocks(weight, bias, size):
                at_a_time = max(how.tile // len(w), 1)
                for start in range(0, tokens, at_a_time):
                    some = slice(start, start + at_a_time)
                    logits = nn.functional.linear(all_h[some], w, b).to(how.accurate)
                    slope = after.change(logits)
                    is_here, places = _within(targets[some], block.start, len(w))
                    of_targets[some] += logits.gather(1, places[:, None])[:, 0] * is_here
                    if with_means:
                        means[some] += logits.sum(1)
                    before, largest[some] = largest[some].clone(), torch.maximum(largest[some], logits.amax(1))
                    shrunk = (before - largest[some]).exp_()
                    exps = logits.sub_(largest[some, None]).exp_()
                    # Without the label's own: of a confident token it cancels the label's row, beyond bfloat16.
                    exps.scatter_(1, places[:, None], exps.gather(1, places[:, None]) * ~is_here[:, None])
                    others[some] = others[some] * shrunk + exps.sum(1)
                    if expected is not None:
                        exps = exps if slope is None else exps.mul_(slope)
                        expected[some] *= shrunk[:, None]
                        expected[some] += exps.to(how.dtype) @ w
            of_targets -= largest
            sums = others + of_targets.exp()
            log_sums, values = largest + sums.log(), of_targets - sums.log()
            if expected is not None:
                own = others / sums  # 1 - probability of the label
                if after.cap is not None:
                    own *= 1 - ((of_targets + largest) / after.cap).square()
                expected /= sums[:, None]
                expected -= weight[targets].to(how.dtype) * own[:, None]
                expected *= -after.scale
        ctx.how = how
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, expected)
        ctx.mark_non_differentiable(means)
        return values, means.div_(len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        hidden, weight, bias, targets, log_sums, of_hidden = ctx.saved_tensors
        how: _How = ctx.how
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if of_hidden is not None:
            of_hidden = (of_hidden * gradient[:, None]).to(hidden.dtype)
        of_weight = torch.empty_like(weight) if needs_weight else None
        of_bias = torch.empty_like(bias) if needs_bias else None
        if needs_weight or needs_bias:
            # The gradient of logits is (probability - is target) x -gradient: its size is part of the exponent, its
            # sign of the hidden state.
            sizes, signs = gradient.abs() * how.after.scale, -gradient.sign()
            shift, tokens = log_sums - sizes.log(), torch.arange(len(targets), device=targets.device)
            all_h = hidden.to(how.dtype)
            signed = all_h * signs[:, None].to(how.dtype)
            size = max(how.tile // max(len(hidden), 1), LEAST_BLOCK)
            with without_autocast(hidden.device.type):
                for block, w, b in how.blocks(weight, bias, size):
                    logits = w @ all_h.T if b is None else torch.addmm(b[:, None], w, all_h.T)  # [block, S]
                    logits = logits.to(how.accurate)
                    slope = how.after.change(logits)
                    of_logits = logits.sub_(shift).exp_()
                    is_here, places = _within(targets, block.start, len(w))
                    of_logits.index_put_((places, tokens), -sizes * is_here, accumulate=True)
                    if slope is not None:
                        of_logits.mul_(slope)
                    if of_bias is not None:
                        of_bias[block] = of_logits @ signs
                    if of_weight is not None:
                        of_weight[block] = of_logits.to(how.dtype) @ signed
        return of_hidden, of_weight, of_bias, None, None, None, None


def _within(targets: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Which targets are in a block of the vocabulary, and their places in it (any place where they are not)."""
    places = targets - start
    return (places >= 0) & (places < size), places.clamp(0, size - 1)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Autocast rounds products to bfloat16 or half; which ones depends on the device."""
    if not torch.amp.is_autocast_available(device_type):  # the device "meta"
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
