"""`ODBStepInfo`, and the loss that a custom loop computes with it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from odb_factory.accounting.losses import (
    IN_BATCH,
    TokenLoss,
    in_batch_loss,
    in_float32,
    loss_of,
    token_weights,
    weighted_token_loss,
)
from odb_factory.config import LOSS_SCALINGS
from odb_factory.data.observe import count_supervised
from odb_factory.data.samples import Measured, MicroBatch, Sample
from odb_factory.errors import ConfigError, DataError
from odb_factory.model.flat_row import FlatRow, begin_row, row_in_progress

STEP_INFO_KEY = "odb_step_info"
LOOP_LOSS_SCALINGS = tuple(scaling for scaling in LOSS_SCALINGS if scaling != "stock")
"""Without `stock`: what the loss of a loop would be without odb, only its author knows."""


class Receipt:
    """Whether a step info has been taken out of its batch, and the flat row that has begun then; known also when both
    are gone."""

    taken = False
    row: FlatRow | None = None


@dataclass(frozen=True, kw_only=True)
class ODBStepInfo:
    """A micro-batch of this rank, and the optimizer step that it is a part of.

    loss_scaling: by what tokens are weighed. token_weights: of each sample, in the order of `ids`, the weight of each
        of its units; made as `loss_scale` is. () if idle.
    is_idle: this rank has no sample left for this micro-batch, others have. It holds a sample that is trained on
        elsewhere, and is run all the same, with loss_scale 0: every rank takes part in every exchange of gradients.
    ids: samples of this micro-batch in the order of its rows (flat: in the row), as indices of the dataset; () if idle.
    segments: of a flat micro-batch the lengths (tokens) of what follows each other in its row: the samples, in the
        order of `ids`, then what fills up (dummy media, `pad_to_multiple_of`); () where it is padded.
    samples, tokens, units: of this micro-batch on this rank, without padding; 0 if idle.
    samples_all_ranks: samples of this micro-batch on all ranks.
    optimizer_step: number of the optimizer step in the run, from 1, as in the audit. optimizer_step_samples: samples of
        all its micro-batches on all ranks.
    micro_batch, micro_batches: number of this one within its optimizer step, from 0, and how many that has.
    ends_optimizer_step: whether it is the last of them: call `optimizer.step()` after its backward.
    epoch: from 0. progress: share of the epoch's samples that all ranks have done once this optimizer step is, 0 to 1;
        None if the dataset has no length.

    Example::

        for batch in loader:
            info = pop_step_info(batch)
            (model(**batch).loss * info.loss_scale).backward()
            if info.ends_optimizer_step:
                optimizer.step()
                optimizer.zero_grad()
    """

    loss_scaling: str
    token_weights: tuple[float, ...]
    is_idle: bool
    ids: tuple[int, ...]
    segments: tuple[int, ...]
    samples: int
    tokens: int
    units: int
    samples_all_ranks: int
    optimizer_step: int
    optimizer_step_samples: int
    micro_batch: int
    micro_batches: int
    ends_optimizer_step: bool
    epoch: int
    progress: float | None
    _micro_batch: MicroBatch = field(repr=False, compare=False)
    _world_size: int = field(repr=False, compare=False)
    _num_supervised: int | None = field(default=None, repr=False, compare=False)
    receipt: Receipt = field(default_factory=Receipt, repr=False, compare=False)

    @property
    def loss_scale(self) -> float:
        """Multiply the mean loss of this micro-batch by it before `backward()`; 0 on an idle micro-batch.

        It is made for gradients that are averaged over ranks (as DDP, ZeRO and FSDP do) and summed over the
        micro-batches of an optimizer step: do not divide by their number (where `accelerator.backward` does, multiply
        by it). Raises `ConfigError` where the samples' tokens weigh differently, as with `loss_scaling: sample`.
        """
        loss = loss_of(self.token_weights, self._micro_batch.units)
        if loss.row_weights is not None:
            raise ConfigError(
                f"loss_scale: loss_scaling {self.loss_scaling!r} gives the samples of a micro-batch different weights, "
                "so their mean loss cannot be scaled; use weighted_loss(logits, labels, info), or choose 'exact'."
            )
        return loss.scale

    def to(self, *args: Any, **kwargs: Any) -> ODBStepInfo:
        """Itself: what moves all of a batch to a device leaves it as it is."""
        return self


def make_step_info(
    micro_batch: MicroBatch,
    loss_scaling: str,
    world_size: int,
    measured: Measured,
    num_samples: int | None,
    optimizer_step: int,
) -> ODBStepInfo:
    """num_samples: of an epoch; None if not known. optimizer_step: of the run, from 1."""
    step = micro_batch.step
    progress = None
    if num_samples is not None:
        progress = 1.0 if step.last else min(step.done / max(num_samples, 1), 1.0)
    return ODBStepInfo(
        loss_scaling=loss_scaling,
        token_weights=token_weights(micro_batch, loss_scaling, world_size),
        is_idle=micro_batch.idle,
        ids=micro_batch.ids,
        segments=measured.segments,
        samples=len(micro_batch.ids),
        tokens=micro_batch.tokens,
        units=micro_batch.num_units,
        samples_all_ranks=micro_batch.totals.samples,
        optimizer_step=optimizer_step,
        optimizer_step_samples=step.samples,
        micro_batch=micro_batch.index,
        micro_batches=step.num_micro_batches,
        ends_optimizer_step=micro_batch.ends_optimizer_step,
        epoch=step.epoch,
        progress=progress,
        _micro_batch=micro_batch,
        _world_size=world_size,
        _num_supervised=measured.num_supervised,
    )


def put_step_info(batch: Any, info: ODBStepInfo) -> Any:
    """The batch with the step info in it: under a key of a mapping, otherwise as an attribute.

    A tuple or list becomes one of a subclass that can have attributes. Raises `DataError` for a batch that can hold
    neither.
    """
    if not isinstance(batch, Mapping):
        if isinstance(batch, tuple | list):
            kind = _subclass(type(batch))
            # A named tuple keeps its names.
            batch = tuple.__new__(kind, batch) if isinstance(batch, tuple) else kind(batch)
        try:
            setattr(batch, STEP_INFO_KEY, info)
        except AttributeError:
            raise DataError(
                f"collate_fn returned a {type(batch).__name__}, which takes no further attribute; odb adds the step "
                "info to each batch, so return a dict, a tuple, a list, a tensor or a custom object."
            ) from None
        return batch
    if STEP_INFO_KEY in batch:
        raise DataError(
            f"collate_fn returned a batch with the key {STEP_INFO_KEY!r}, under which odb adds the step info; rename "
            "it in the collator."
        )
    if not isinstance(batch, MutableMapping):
        raise DataError(
            f"collate_fn returned a {type(batch).__name__}, which takes no further key; odb adds the step info to each "
            "batch, so return a dict or a BatchEncoding."
        )
    batch[STEP_INFO_KEY] = info
    return batch


@functools.cache
def _subclass(kind: Any) -> Any:
    """Its objects can have attributes."""
    return type(kind.__name__, (kind,), {"__module__": kind.__module__})


def pop_step_info(batch: object, loss_scaling: str | None = None) -> ODBStepInfo:
    """Take the step info out of a batch of an `ODBDataLoader`; do so right before `model(**batch)`.

    A model that `unpad` has set up takes the lengths of a flat row from the info that was taken out last.

    batch: as the loader yields it: a mapping, or another type that `collate_fn` returns (a tuple, a tensor, an object).
    loss_scaling: exact, sample, square, approx or none; default: that of the loader. Raises `DataError` if the batch
    has no info, and `ValueError` for another word.
    """
    held = batch if isinstance(batch, MutableMapping) else getattr(batch, "__dict__", {})
    info: ODBStepInfo | None = held.pop(STEP_INFO_KEY, None)
    if info is None:
        raise DataError(
            f"this batch has no {STEP_INFO_KEY!r}: it does not come from an ODBDataLoader, or the info was taken out "
            "before; call pop_step_info once for each batch, before anything else drops the key."
        )
    begin_row(info.segments)
    info.receipt.taken, info.receipt.row = True, row_in_progress()
    if loss_scaling is None or loss_scaling == info.loss_scaling:
        return info
    if loss_scaling not in LOOP_LOSS_SCALINGS:
        raise ValueError(f"loss_scaling: {loss_scaling!r} is not one of {', '.join(LOOP_LOSS_SCALINGS)}.")
    weights = token_weights(info._micro_batch, loss_scaling, info._world_size)
    return dataclasses.replace(info, loss_scaling=loss_scaling, token_weights=weights)


def weighted_loss(logits: Tensor, labels: Tensor, info: ODBStepInfo) -> Tensor:
    """A micro-batch's part of the loss of its optimizer step, with any `loss_scaling`; call `backward()` on it.

    logits: [rows, length, vocabulary]; labels: [rows, length], -100 where no loss is wanted; padded or flat, as the
    micro-batch is. Shifted and in float32 as in transformers' causal models; what a model adds to its own loss (for the
    routers of a mixture of experts) is not in it. Raises `DataError` if the rows (flat: segments) are not the
    samples of the micro-batch.

    Example::

        info = pop_step_info(batch)
        weighted_loss(model(**batch).logits, batch["labels"], info).backward()
    """
    weights = info.token_weights or (0.0,)
    if len(set(weights)) == 1:  # so it does not matter which row is which
        return weighted_token_loss(logits, labels, weights[:1] * len(logits))
    return weighted_token_loss(logits, labels, weights, segments=info.segments)


def without_logits(model: nn.Module) -> Callable[[Mapping[str, Any], ODBStepInfo], Tensor]:
    """The same loss, computed in the forward of a transformers model without a matrix of logits, if possible.

    model: as trained, also wrapped by PEFT, DDP, FSDP or DeepSpeed. Losses that it adds (for the routers of a mixture
    of experts) are included, by the micro-batch's share. If the model needs its logits, the log says why, and the loss
    is computed from them.
    Returns a function of the model's inputs, with the labels that the loader has collated, and of the step info.

    Example::

        loss_of = without_logits(model)
        for batch in loader:
            info = pop_step_info(batch)
            loss_of(batch, info).backward()
    """
    token_loss: TokenLoss | None = None

    def compute(batch: Mapping[str, Any], info: ODBStepInfo) -> Tensor:
        nonlocal token_loss
        if token_loss is None:  # by now engines have wrapped the model
            token_loss = TokenLoss(model, info.loss_scaling)
        loss, labels = loss_of(info.token_weights, info._micro_batch.units), batch.get("labels")
        # On an accelerator they are not counted once more: the host would wait for it.
        on_host = isinstance(labels, Tensor) and labels.device.type == "cpu"
        num_supervised = count_supervised(labels) if on_host else info._num_supervised
        with token_loss.weighing(loss.row_weights, info.segments, max(info.units, 1), num_supervised):
            output = model(**batch)
        return in_float32(output["loss"] if isinstance(output, dict) else output[0]) * loss.scale

    return compute


# ----------------------------------------------------------------------------------------------------------------------
# `check_loss`: make sure that the loss of a loop does not depend on which samples share a micro-batch (I8).

SAMPLES = 4
TOLERANCE = 0.01
"""Relative difference that counts as rounding, in bfloat16 too; in-batch negatives differ by far more."""


def check_loss(dataloader: Any, loss_fn: Callable[[Any], Tensor]) -> None:
    """Check on four samples that the mean loss of a batch is the mean of the losses of its halves.

    dataloader: an `ODBDataLoader` (or what `apply_odb` returns), not yet iterated. It begins the epoch. With several
    ranks, all call it.
    loss_fn: batch, as the loader yields it (on the CPU, without step info) -> mean loss, a scalar. It runs without
    gradients; put a model with dropout into eval mode, because its losses are random otherwise.
    Raises `ConfigError` if the loss compares samples with each other, as in-batch negatives do.

    Example::

        check_loss(loader, lambda batch: functional.cross_entropy(model(batch["x"]), batch["y"]))
    """
    name = in_batch_loss(loss_fn.modules()) if isinstance(loss_fn, nn.Module) else None
    if name is not None:
        raise ConfigError(f"check_loss: {name} {IN_BATCH}.")
    iteration = getattr(dataloader, "_odb", None)
    if iteration is None or not iteration.loader.has_rows:
        raise ConfigError("check_loss: give the ODBDataLoader that the loop iterates, of a dataset with an index.")
    loader = iteration.loader
    loader.begin()
    samples = list(itertools.islice(loader.first_samples(), SAMPLES))
    samples = [sample for sample in samples if sample.cost.modality == samples[0].cost.modality]
    if len(samples) < 2:
        raise ConfigError(f"check_loss: the first {SAMPLES} rows have no two samples that could share a micro-batch.")

    def mean_loss(samples: Sequence[Sample]) -> float:
        with torch.no_grad():
            return float(loss_fn(loader.groups.collate(list(samples))[1]))

    half = len(samples) // 2
    whole, again = mean_loss(samples), mean_loss(samples)
    if not math.isclose(whole, again, rel_tol=TOLERANCE, abs_tol=1e-6):
        raise ConfigError(
            f"check_loss: the loss of the same batch is {whole:.4g}, and {again:.4g} the second time; put the model "
            "into eval mode for the check, or draw no random numbers in loss_fn."
        )
    halves = [(mean_loss(part), sum(one.cost.units for one in part)) for part in (samples[:half], samples[half:])]
    mean = sum(loss * units for loss, units in halves) / sum(units for _, units in halves)
    if not math.isclose(whole, mean, rel_tol=TOLERANCE, abs_tol=1e-6):
        raise ConfigError(
            f"check_loss: the mean loss of {len(samples)} samples is {whole:.4g}, and that of their halves, weighed by "
            f"units, {mean:.4g}: it {IN_BATCH}; or it is no mean over the units of `Cost`; or the model depends on "
            "padding or on batch statistics."
        )
