"""The weight of each micro-batch's mean loss within its optimizer step (I8)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from odb_factory.data.samples import Measured, MicroBatch
from odb_factory.errors import DataError


def loss_weights(steps: Sequence[MicroBatch], loss_scaling: str, world_size: int) -> list[float]:
    """The factor on this rank's mean loss in each of the `steps` of one optimizer step.

    world_size: ranks that the engine averages gradients over, the data-parallel ranks that planned together.
    The engine sums the gradients of an optimizer step over micro-batches and averages them over
    ranks. With n the supervised tokens of this rank's micro-batch and N those of the whole
    optimizer step on all ranks, the factor n x world_size / N makes that the gradient of the mean
    over all N tokens: sum over ranks and steps of (n / N) x (its mean over n tokens).
    `approx` counts input tokens instead, `none` counts every micro-batch as one (mean of means).
    Idle steps weigh 0. N comes from the plan, so no communication is needed.
    """
    if loss_scaling == "exact":
        mine = [step.supervised_tokens for step in steps]
        total = sum(step.totals.supervised_tokens for step in steps)
    elif loss_scaling == "approx":
        mine = [step.tokens for step in steps]
        total = sum(step.totals.tokens for step in steps)
    else:
        mine = [0 if step.idle else 1 for step in steps]
        total = sum(step.totals.active_ranks for step in steps)
    if total == 0:
        return [0.0] * len(mine)
    return [count * world_size / total for count in mine]


@contextlib.contextmanager
def without_average_tokens(args: Any) -> Iterator[None]:
    """Within it the Trainer does not multiply a loss by the number of processes, which the weights above do already."""
    before = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = before


def check_supervised(step: MicroBatch, measured: Measured) -> None:
    """Raise `DataError` where a collated step does not hold the supervised tokens that the plan counted."""
    if not step.idle and measured.supervised_tokens != step.supervised_tokens:
        raise DataError(
            f"rows {list(step.ids)}: the collator left {measured.supervised_tokens} supervised tokens of "
            f"{step.supervised_tokens} observed, so the loss cannot be weighed exactly; use a collator that keeps "
            "labels as they are (and `ignore_pad_token_for_loss: true`), or set `loss_scaling: approx`."
        )
