"""`weighted_loss`: the loss of a micro-batch whose tokens weigh differently."""

from __future__ import annotations

from torch import Tensor

from odb_factory.accounting.token_loss import weighted_token_loss
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
