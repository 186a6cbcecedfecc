"""Peak memory of training a model on micro-batches of given shapes, without an accelerator and without weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from odb_factory.memory.fit import fit
from odb_factory.model.chunked import OTHER_CHUNK_ELEMENTS
from odb_factory.model.head import WithoutLogits

if TYPE_CHECKING:
    from odb_factory.dry_run.memory.fake_model import FakeModel
    from odb_factory.dry_run.memory.trace import Phases

LEAST_LENGTH = 512
PARTS = (4, 2, 1)
"""The single rows that the model is run on have these parts of the most tokens asked for: fake tensors cost the same
whatever their size, and what is small beside the weights does not show in small ones."""
ROWS = (2, 4)
LONGEST_ROWS = 2048
"""Tokens of several rows at the most: masks are real, and as large as the square of a row."""
IMAGES = (1, 4)
BY_THE_TRAINER = ("use_dft_loss", "use_eaft_loss", "use_asft_loss")
"""Losses that the trainer computes from logits."""


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
    vocabulary, their copies and gradients; logits_with_fused_loss: what a loss without logits needs in their place.
    peak: all there is at most, with the loss of this YAML; peak_with_fused_loss: without logits. Where the two kinds
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
    from odb_factory.dry_run.memory import fake_model, trace
    from odb_factory.memory import states

    model = fake_model.build(arguments)
    state = states.state_bytes(model.model, arguments.training, ranks)
    _give_gradients(model)
    traced = _traces(model, micro_batches)
    fits = {
        name: fit([shape for shape, _ in traced], [getattr(found, name) for _, found in traced])
        for name in ("saved", "body", "logits")
    }
    held = state.parameters + state.gradients + state.optimizer_state
    fused = _computes_without_logits(model, arguments)
    shapes = []
    for shape in micro_batches:
        phases = trace.Phases(**{name: one.of(shape) for name, one in fits.items()})
        with_fused = dataclasses.replace(phases, logits=_without_logits(model, shape.tokens))
        shapes.append(
            ShapeMemory(
                shape=shape,
                activations=phases.body,
                logits=phases.logits,
                logits_with_fused_loss=with_fused.logits,
                peak=held + (with_fused if fused else phases).peak,
                peak_with_fused_loss=held + with_fused.peak,
            )
        )
    return MemoryEstimate(
        parameters=state.parameters,
        gradients=state.gradients,
        optimizer_state=state.optimizer_state,
        shapes=tuple(shapes),
        notes=tuple(_notes(model, arguments, micro_batches)),
    )


def _give_gradients(model: FakeModel) -> None:
    """All but the first micro-batch of an optimizer step have them; they are accounted for by themselves."""
    with model.fake:
        for parameter in model.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)


def _traces(model: FakeModel, wanted: Sequence[MicroBatchShape]) -> list[tuple[MicroBatchShape, Phases]]:
    """The model run on a few shapes, of which the others follow."""
    from odb_factory.dry_run.memory.trace import trace

    most = max(max(shape.tokens for shape in wanted), LEAST_LENGTH)
    sizes = [(1, most // part, 0) for part in PARTS]
    if longest := max((shape.row_length for shape in wanted if shape.rows > 1), default=0):
        sizes += [(rows, min(longest, LONGEST_ROWS), 0) for rows in ROWS]
    if model.takes_images and any(shape.patches for shape in wanted):
        sizes += [(1, most // 2, number) for number in IMAGES]
    traced = []
    for rows, length, images in sizes:
        batch, measured = model.batch(rows, length, images)
        shape = MicroBatchShape(
            rows=rows, tokens=measured.rows * measured.length, row_length=measured.length, patches=measured.patches
        )
        traced.append((shape, trace(model.model, batch, model.dtype)))
    return traced


def _computes_without_logits(model: FakeModel, arguments: ParsedArguments) -> bool:
    """Whether the run computes its loss without logits: by odb, or by Liger's fused kernel."""
    trainer_computes = [getattr(arguments.finetuning, name, False) for name in BY_THE_TRAINER]
    if any(trainer_computes) or arguments.training.label_smoothing_factor:
        return False
    by_odb = WithoutLogits(model.model).reason is None and not arguments.training.torch_compile
    return by_odb or bool(arguments.model.enable_liger_kernel)


def _without_logits(model: FakeModel, tokens: int) -> int:
    """What the loss without logits takes (`odb_factory.model.chunked`): the logits of a chunk of tokens in the dtype of
    the product and in float32, the gradient of all hidden states, and that of the head in float32."""
    weight = model.model.get_output_embeddings().weight
    vocabulary, hidden = weight.shape
    product = model.dtype or weight.dtype
    chunk = min(tokens, max(OTHER_CHUNK_ELEMENTS // vocabulary, 1)) * vocabulary
    logits = chunk * (4 if product == torch.float32 else 4 + product.itemsize)
    converted = 0 if product == weight.dtype else vocabulary * hidden * product.itemsize
    gradient = vocabulary * hidden * 4 if weight.requires_grad else 0
    return logits + converted + gradient + tokens * hidden * product.itemsize


def _notes(model: FakeModel, arguments: ParsedArguments, wanted: Sequence[MicroBatchShape]) -> list[str]:
    notes = []
    kernel = getattr(model.model.config, "_attn_implementation", None)
    if kernel == "eager":
        notes.append("attention is eager, which holds all pairs of tokens of a row")
    if any(shape.patches for shape in wanted) and not model.takes_images:
        notes.append("the model takes no images, so patches count nothing")
    if arguments.model.adapter_name_or_path:
        notes.append("adapters of adapter_name_or_path are taken for new ones of this YAML's size")
    return notes
