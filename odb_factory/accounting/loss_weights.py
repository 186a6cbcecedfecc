"""The weight of every unit within its optimizer step, and the loss that is made of them (I8, I9).

With `loss_scaling` one of these, a unit of sample s, which has n units, weighs

    stock     1 / (num_stock_means x stock_units of s)     what it weighs in stock training
    exact     1 / (units of the step)                       the mean over the units of the step
    sample    1 / (samples of the step x n)                 every sample weighs the same
    square    1 / (sum of the roots x sqrt(n))              a sample weighs the root of its units
    approx    as exact, with the micro-batch's share of the step's input tokens in place of its units
    none      1 / (micro-batches of all ranks x units of this one)      the mean of micro-batch means

All that is summed up is known from the plan, so no communication is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from odb_factory.data.samples import MicroBatch

IN_BATCH = (
    "compares the samples of a micro-batch with each other (in-batch negatives), and odb decides anew in each "
    "optimizer step which samples share one; train without odb"
)
_IN_BATCH_LOSSES = (
    "MultipleNegativesRankingLoss", "MultipleNegativesSymmetricRankingLoss", "CachedMultipleNegativesRankingLoss",
    "CachedMultipleNegativesSymmetricRankingLoss", "GISTEmbedLoss", "CachedGISTEmbedLoss", "MegaBatchMarginLoss",
    "BatchAllTripletLoss", "BatchHardTripletLoss", "BatchSemiHardTripletLoss", "BatchHardSoftMarginTripletLoss",
    "CoSENTLoss", "AnglELoss", "ContrastiveTensionLossInBatchNegatives",
)  # fmt: skip
"""Classes of sentence-transformers."""


def in_batch_loss(modules: Iterable[object]) -> str | None:
    """The first of these whose loss is known to depend on which samples share a micro-batch."""
    names = (type(module).__name__ for module in modules)
    return next((name for name in names if name in _IN_BATCH_LOSSES), None)


@dataclass(frozen=True, slots=True)
class MicroBatchLoss:
    """How the loss of a micro-batch is made: `scale` times the model's loss.

    scale: the micro-batch's share of the loss of its optimizer step, times the ranks that gradients are averaged over;
        0 on an idle micro-batch.
    row_weights: None: the model's loss is its own mean over the units of the micro-batch. Else one number a
        sample, which is a row or a segment of a flat one: in place of that mean goes the weighted one, the sum of
        row weight x token loss (see `TokenLoss`). Rows without a sample (`row_multiple`) weigh 0.

    Losses that a model adds to the one of its tokens (of the routers of a mixture of experts) are multiplied by `scale`
    too: over an optimizer step their mean by the micro-batches' shares. Stock takes their plain mean over its own
    micro-batches where its loss is a mean of means, and their sum where it is a mean over tokens; as they depend on
    which samples meet in a micro-batch, no other cut of the same samples gives the very same.
    """

    scale: float
    row_weights: tuple[float, ...] | None


def token_weights(micro_batch: MicroBatch, loss_scaling: str, world_size: int) -> tuple[float, ...]:
    """Of each sample of the micro-batch the weight of each of its units, times `world_size`; () if idle.

    world_size: the data-parallel ranks, over which the engine averages gradients; it sums them over micro-batches.
    """
    if micro_batch.whole is not None:
        planned = token_weights(micro_batch.whole, loss_scaling, world_size)
        return tuple(planned[i] for i in micro_batch.numbers)
    step, units = micro_batch.step, micro_batch.units
    divisors: list[float]
    match loss_scaling:
        case "stock":
            divisors = [step.num_stock_means * n for n in micro_batch.stock_units]
        case "exact":
            divisors = [step.units for _ in units]
        case "sample":
            divisors = [step.samples * n for n in units]
        case "square":
            divisors = [step.root_units * math.sqrt(n) for n in units]
        case "approx":
            divisors = [step.tokens * micro_batch.num_units / micro_batch.tokens for _ in units]
        case _:
            divisors = [step.num_active * micro_batch.num_units for _ in units]
    return tuple(world_size / divisor for divisor in divisors)


def micro_batch_loss(
    micro_batch: MicroBatch, loss_scaling: str, world_size: int, filler_rows: int = 0
) -> MicroBatchLoss:
    """What the weights of `token_weights` make of the model's loss; its own mean wherever they are all equal."""
    return loss_of(token_weights(micro_batch, loss_scaling, world_size), micro_batch.units, filler_rows)


def loss_of(weights: Sequence[float], units: Sequence[int], filler_rows: int = 0) -> MicroBatchLoss:
    """weights: of each sample that of each of its units (none: an idle micro-batch); units: how many it has.

    filler_rows: of `Measured`; they weigh nothing.
    """
    if len(set(weights)) <= 1:
        return MicroBatchLoss(weights[0] * sum(units) if weights else 0.0, None)
    scale = sum(weight * n for weight, n in zip(weights, units))
    return MicroBatchLoss(scale, (*(weight / scale for weight in weights), *[0.0] * filler_rows))
