"""The loss of a micro-batch: weights of units in their optimizer step, and weighted token losses (I8, I9)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from odb_factory.data.observe import IGNORE_INDEX
from odb_factory.errors import ConfigError, DataError
from odb_factory.model.chunked import AfterHead, without_autocast
from odb_factory.model.flat_row import copy_to, forward_replaced
from odb_factory.model.head import WithoutLogits, has_routers, model_with_labels, own_loss

OTHER_LOSS = (
    "train without odb (with `loss_scaling: exact` all tokens of an optimizer step weigh the same, another loss than "
    "stock's)"
)


def loss_of(weights: Sequence[float], units: Sequence[int]) -> tuple[float, tuple[float, ...] | None]:
    """`scale` and `row_weights` of a micro-batch (see `Computing`).

    weights: the weight of each unit of each sample (none: an idle micro-batch). units: number of units of each sample.
    """
    if len(set(weights)) <= 1:
        return weights[0] * sum(units) if weights else 0.0, None
    scale = sum(weight * n for weight, n in zip(weights, units))
    return scale, tuple(weight / scale for weight in weights)


def weighted_token_loss(
    logits: Tensor,
    labels: Tensor | None,
    row_weights: Sequence[float],
    *,
    segments: Sequence[int] = (),
    shift_labels: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Sum over rows of row weight x the sum of token losses of the row, in float32 also in autocast (float64 stays).

    logits: [rows, length, vocabulary]; labels: [rows, length], `ignore_index` where a token has no loss. The token at t
    predicts label t + 1, as in transformers' `ForCausalLMLoss`; shift_labels: labels that are already shifted.
    row_weights: one for each row, or one for each sample of a flat micro-batch. segments: token counts of the samples
    of a flat micro-batch, as in `Measured`; segments after the samples have weight 0.
    The memory peak is that of the mean plus one number for each token. Nothing waits for the device.
    Raises `DataError` if the logits do not belong to these rows or segments.
    """
    rows, length = logits.shape[:2]
    expected = (1, sum(segments)) if segments else (len(row_weights), length)
    if (rows, length) != expected:
        raise DataError(
            f"the model computes its loss over logits of {rows} rows of {length} tokens and the micro-batch has "
            f"{expected[0]} rows of {expected[1]}, so its samples cannot be weighed; {OTHER_LOSS}."
        )
    if shift_labels is None:
        assert labels is not None
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    with without_autocast(logits.device.type):
        logits = in_float32(logits)
        targets = shift_labels.to(logits.device).reshape(-1)
        losses = functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), targets, ignore_index=ignore_index, reduction="none"
        )
        weights = copy_to(torch.as_tensor(by_position(row_weights, segments), dtype=losses.dtype), losses.device)
        return (losses.view(rows, -1) * weights).sum()


def by_position(row_weights: Sequence[float], segments: Sequence[int]) -> np.ndarray:
    """The weights as [rows, 1], or as [1, length] for a flat row."""
    if not segments:
        return np.asarray(row_weights, dtype=np.float64)[:, None]
    return np.repeat([*row_weights, *[0.0] * (len(segments) - len(row_weights))], segments)[None]


def in_float32(values: Tensor) -> Tensor:
    """The values in float32, so that sums and products of losses do not round to bfloat16 or half; float64 stays."""
    return values if values.dtype == torch.float64 else values.float()


def sum_of_losses(losses: Sequence[Tensor], *, skip_non_finite: bool) -> Tensor:
    """The loss of an optimizer step: the sum of the weighted losses of its micro-batches, in float32 (float64 stays).

    losses: one scalar for each micro-batch. skip_non_finite: leave out NaN and infinite losses, unless all are, like
    the Trainer's `logging_nan_inf_filter`, which sees one loss for each optimizer step. Does not wait for the device.
    """
    stacked = in_float32(torch.stack(tuple(losses)))
    total = stacked.sum()
    if skip_non_finite:
        finite = stacked.isfinite()
        total = torch.where(finite.any(), stacked.where(finite, 0.0).sum(), total)
    return total


class TokenLoss:
    """Lets the forward of a model compute the weighted loss, so that auxiliary losses (of routers) are included.

    model: a transformers model, also wrapped by PEFT, DDP, FSDP, DeepSpeed or torch.compile. The loss is computed
    without logits (`odb_factory.model.head`) if the model allows it. Otherwise causal models call
    `self.loss_function(logits, labels, ...)`, which is replaced within `weighing`. One object serves a whole run.
    loss_scaling: for error messages. needs_logits: the reason if logits are needed. is_measured: the loss of the
    model is known to be the cross entropy of its logits, whatever code computes it.

    Example::

        token_loss = TokenLoss(model, "stock")
        with token_loss.weighing(row_weights, measured.segments, num_units):
            output = model(**batch)
        (output.loss * scale).backward()
    """

    def __init__(
        self, model: nn.Module, loss_scaling: str, needs_logits: str | None = None, *, is_measured: bool = False
    ):
        from transformers.loss.loss_utils import LOSS_MAPPING  # heavy, and the model of a custom loop may need none

        self._loss_scaling = loss_scaling
        models: list[Any] = [module for module in model.modules() if _has_loss_function(module)]
        self._name = type(models[0] if models else model).__name__
        self._models = [module for module in models if module.loss_function is LOSS_MAPPING["ForCausalLM"]]
        self.without_logits = WithoutLogits(model, needs_logits)
        self._inner = inner = model_with_labels(model)
        self._computes_itself = (
            is_measured
            and inner is not None
            and not (inner in self._models and (isinstance(own_loss(inner), AfterHead) or has_routers(inner)))
        )
        # Liger's kernel
        self._skips_logits = inner is not None and "skip_logits" in signature(inner.forward).parameters

    @contextlib.contextmanager
    def weighing(
        self,
        row_weights: Sequence[float] | None,
        segments: Sequence[int] = (),
        num_units: int = 1,
        num_supervised: int | None = None,
        routers_weigh: float = 1.0,
    ) -> Iterator[None]:
        """Weight the loss of one forward with labels.

        row_weights: one for each row of the micro-batch, or one for each sample of a flat micro-batch with these
        segments (`Measured.segments`); None: all tokens weigh 1 / num_units, as in the model's own mean.
        num_supervised: tokens with a loss, if known. routers_weigh: factor of the model's coefficient of router losses.
        Raises `ConfigError` at the end if the weights differ and the model has computed its loss in another way.
        """
        door = self.without_logits
        if row_weights is None:
            with door.weighing(1 / num_units, num_supervised), door.router_losses_times(routers_weigh):
                yield
            return
        num_calls = 0

        def loss_function(
            logits: Tensor,
            labels: Tensor | None,
            vocab_size: int | None = None,
            num_items_in_batch: Any = None,
            ignore_index: int = IGNORE_INDEX,
            shift_labels: Tensor | None = None,
            **_: Any,
        ) -> Tensor:
            """Replaces `ForCausalLMLoss`."""
            nonlocal num_calls
            num_calls += 1
            options: dict[str, Any] = {"shift_labels": shift_labels, "ignore_index": ignore_index}
            return weighted_token_loss(logits, labels, row_weights, segments=segments, **options)

        def from_logits(own: Callable[..., Any], *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
            """Replaces a forward that computes another loss."""
            output = own(*args, **kwargs)
            if labels is None:
                return output
            return type(output)(**{**output, "loss": loss_function(output["logits"], labels)})

        def with_logits(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs, skip_logits=False)

        weights = torch.from_numpy(by_position(row_weights, segments))
        with contextlib.ExitStack() as stack:
            stack.enter_context(door.weighing(weights, num_supervised))
            stack.enter_context(door.router_losses_times(routers_weigh))
            if door.reason is not None and (self._computes_itself or self._skips_logits):
                assert self._inner is not None
                forward = from_logits if self._computes_itself else with_logits
                stack.enter_context(forward_replaced(self._inner, forward))
            for module in self._models:
                stack.callback(setattr, module, "loss_function", module.loss_function)
                module.loss_function = loss_function
            yield
        if not num_calls and not door.acted:
            raise ConfigError(
                f"odb.loss_scaling: {self._loss_scaling!r} gives the samples of a micro-batch different weights, and "
                f"{self._name} computes its loss without transformers' ForCausalLMLoss (by a fused kernel such as "
                "Liger's, or by custom code), which odb does not replace: "
                f"{door.reason or 'its forward was not reached'}; turn the kernel off, or {OTHER_LOSS}."
            )


def _has_loss_function(module: nn.Module) -> bool:
    """Whether the module is a transformers model that takes labels (a vision tower takes none)."""
    kind = type(module)  # the class has the signature, even if the module's own forward is wrapped
    function = getattr(kind, "loss_function", None)
    return (
        isinstance(function, property) and function.fset is not None and "labels" in signature(kind.forward).parameters
    )
