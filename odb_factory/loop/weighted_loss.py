"""`weighted_loss`, `without_logits`: the loss of a micro-batch whose tokens weigh differently."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from odb_factory.accounting.loss_weights import micro_batch_loss
from odb_factory.accounting.token_loss import TokenLoss, in_float32, weighted_token_loss
from odb_factory.loop.step_info import ODBStepInfo


def weighted_loss(logits: Tensor, labels: Tensor, info: ODBStepInfo) -> Tensor:
    """A micro-batch's part of the loss of its optimizer step, with any `loss_scaling`; `backward()` takes it as it is.

    logits: [rows, length, vocabulary]; labels: [rows, length], -100 where no loss is wanted; padded or flat, as the
    micro-batch is. Shifted and in float32 as in transformers' causal models; what a model adds to its own loss (for the
    routers of a mixture of experts) is not in it. Raises `DataError` where the rows (flat: segments) are not the
    samples of the micro-batch.

    Example::

        info = pop_step_info(batch)
        weighted_loss(model(**batch).logits, batch["labels"], info).backward()
    """
    weights = info.token_weights or (0.0,)
    if len(set(weights)) == 1:  # so it does not matter which row is which
        return weighted_token_loss(logits, labels, weights[:1] * len(logits))
    return weighted_token_loss(logits, labels, (*weights, *[0.0] * info.filler_rows), segments=info.segments)


def without_logits(model: nn.Module) -> Callable[[Mapping[str, Any], ODBStepInfo], Tensor]:
    """The same loss, computed in the forward of a transformers model without a matrix of logits, if that is possible.

    model: as trained, also wrapped by PEFT, DDP, FSDP or DeepSpeed. Losses that it adds (for the routers of a mixture
    of experts) are included, by the micro-batch's share. Where the model needs its logits, one line says why, and the
    loss is made from them.
    Returns a function of the model's inputs with labels, and of the step info.

    Example::

        loss_of = without_logits(model)
        for batch in loader:
            info = pop_step_info(batch)
            loss_of(batch, info).backward()
    """
    token_loss: TokenLoss | None = None

    def loss_of(batch: Mapping[str, Any], info: ODBStepInfo) -> Tensor:
        nonlocal token_loss
        if token_loss is None:  # by now engines have wrapped the model
            token_loss = TokenLoss(model, info.loss_scaling)
        loss = micro_batch_loss(info._micro_batch, info.loss_scaling, info._world_size, info.filler_rows)
        with token_loss.weighing(loss.row_weights, info.segments, max(info.units, 1)):
            output = model(**batch)
        return in_float32(output["loss"] if isinstance(output, dict) else output[0]) * loss.scale

    return loss_of
