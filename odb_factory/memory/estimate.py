"""Peak memory of training a model on micro-batches of given shapes, without an accelerator and without weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class ParsedArguments(NamedTuple):
    """What LLaMA-Factory's parser gives."""

    model: Any
    data: Any
    training: Any
    finetuning: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchShape:
    """A micro-batch as collated: rows x row_length = tokens (a flat one has 1 row); patches of its media."""

    rows: int
    tokens: int
    row_length: int
    patches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeMemory:
    """Bytes on each rank for micro-batches of one shape, beside those of `MemoryEstimate`.

    activations: at the peak of forward and backward, without logits. logits: the scores of all tokens over the
    vocabulary, their copies and gradients; logits_with_fused_loss: what a fused loss needs in their place.
    peak: all there is at most, with the loss of this YAML; peak_with_fused_loss: with a fused one. Where the two kinds
    of activations have their peaks at different times a peak is less than the sum.
    """

    shape: MicroBatchShape
    activations: int
    logits: int
    logits_with_fused_loss: int
    peak: int
    peak_with_fused_loss: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on each rank. shapes: in the order asked for. notes: what the estimate takes for granted, a line each."""

    parameters: int
    gradients: int
    optimizer_state: int
    shapes: tuple[ShapeMemory, ...]
    notes: tuple[str, ...] = ()


def estimate_peak_memory(
    arguments: ParsedArguments, micro_batches: Sequence[MicroBatchShape], *, ranks: int
) -> MemoryEstimate:
    """Peak memory of each rank (bytes) for micro-batches of these shapes, of the training that `arguments` say.

    Raises `ConfigError` for a model or a way of training that it cannot speak for.

        estimate = estimate_peak_memory(arguments, [MicroBatchShape(rows=1, tokens=8192, row_length=8192)], ranks=8)
        print(estimate.shapes[0].peak / 2**30)
    """
    raise NotImplementedError
