"""What the batches of a custom loop carry, and the loss that is made with it."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from odb_factory.accounting.losses import TokenLoss, in_float32, weighted_token_loss
from odb_factory.accounting.statistics import StepAccounting
from odb_factory.config import LOSS_SCALINGS
from odb_factory.data.observe import count_supervised
from odb_factory.data.samples import Measured, MicroBatch
from odb_factory.errors import DataError
from odb_factory.model.flat_row import FlatRow, begin_row, row_in_progress

STEP_INFO_KEY = "odb_step_info"
LOOP_LOSS_SCALINGS = tuple(scaling for scaling in LOSS_SCALINGS if scaling != "stock")
"""Without `stock`: only the author of a loop knows what its loss would be without odb."""


@dataclass(frozen=True, kw_only=True)
class ODBStepInfo:
    """A micro-batch of this rank, and the optimizer step that it is a part of.

    loss_scaling: how tokens are weighed. token_weight: the weight of each unit of this micro-batch, for gradients that
        are averaged over ranks and summed over micro-batches; 0 if idle.
    is_idle: this rank has no sample left for this micro-batch, others have. It holds a sample that is trained on
        elsewhere, and is run all the same, with loss_scale 0: every rank takes part in every exchange of gradients.
    ids: samples of this micro-batch in the order of its rows (flat: in the row), as indices of the dataset; () if idle.
    segments: of a flat micro-batch the lengths (tokens) of what follows each other in its row: the samples, in the
        order of `ids`, then what fills up (dummy media, `pad_to_multiple_of`); () if it is padded.
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
    token_weight: float
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
    planned: MicroBatch = field(repr=False, compare=False)
    num_supervised: int | None = field(default=None, repr=False, compare=False)
    taken: deque[FlatRow | None] = field(default_factory=deque, repr=False, compare=False)
    """The flat row of the info of its iteration that `pop_step_info` has taken out last; empty before."""

    @property
    def loss_scale(self) -> float:
        """Multiply the mean loss of this micro-batch by it before `backward()`; 0 on an idle micro-batch.

        It is made for gradients that are averaged over ranks (as DDP, ZeRO and FSDP do) and summed over the
        micro-batches of an optimizer step: do not divide by their number (if `accelerator.backward` does, multiply by
        it).
        """
        return self.token_weight * self.units

    def to(self, *args: Any, **kwargs: Any) -> ODBStepInfo:
        """Itself: what moves all of a batch to a device leaves it as it is."""
        return self


def step_info(
    micro_batch: MicroBatch, measured: Measured, accounting: StepAccounting, taken: deque[FlatRow | None]
) -> ODBStepInfo:
    """Of the micro-batch that `accounting` has begun."""
    step, num_samples, progress = micro_batch.step, accounting.loader.num_samples, None
    if num_samples is not None:
        progress = 1.0 if step.last else min(step.done / max(num_samples, 1), 1.0)
    return ODBStepInfo(
        loss_scaling=accounting.loader.config.loss_scaling,
        token_weight=next(iter(micro_batch.weights), 0.0),  # all are the same
        is_idle=micro_batch.idle,
        ids=micro_batch.ids,
        segments=measured.segments,
        samples=len(micro_batch.ids),
        tokens=micro_batch.tokens,
        units=micro_batch.num_units,
        samples_all_ranks=micro_batch.totals.samples,
        optimizer_step=accounting.optimizer_steps + 1,
        optimizer_step_samples=step.samples,
        micro_batch=micro_batch.index,
        micro_batches=step.num_micro_batches,
        ends_optimizer_step=micro_batch.ends_optimizer_step,
        epoch=step.epoch,
        progress=progress,
        planned=micro_batch,
        num_supervised=measured.num_supervised,
        taken=taken,
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
    if STEP_INFO_KEY in batch or not isinstance(batch, MutableMapping):
        raise DataError(
            f"collate_fn returned a {type(batch).__name__} that takes no key {STEP_INFO_KEY!r}, under which odb adds "
            "the step info to each batch; return a dict or a BatchEncoding without that key."
        )
    batch[STEP_INFO_KEY] = info
    return batch


@functools.cache
def _subclass(kind: Any) -> Any:
    """Its objects can have attributes."""
    return type(kind.__name__, (kind,), {"__module__": kind.__module__})


def pop_step_info(batch: object) -> ODBStepInfo:
    """Take the step info out of a batch of an `ODBDataLoader`; do so right before `model(**batch)`.

    A model that `unpad` has set up takes the lengths of a flat row from the info that was taken out last.

    batch: as the loader yields it: a mapping, or another type that `collate_fn` returns (a tuple, a tensor, an object).
    Raises `DataError` if the batch has no info.
    """
    holder = batch if isinstance(batch, MutableMapping) else getattr(batch, "__dict__", {})
    info: ODBStepInfo | None = holder.pop(STEP_INFO_KEY, None)
    if info is None:
        raise DataError(
            f"this batch has no {STEP_INFO_KEY!r}: it does not come from an ODBDataLoader, or the info was taken out "
            "before; call pop_step_info once for each batch, before anything else drops the key."
        )
    begin_row(info.segments)
    info.taken.append(row_in_progress())
    return info


def weighted_loss(logits: Tensor, labels: Tensor, info: ODBStepInfo) -> Tensor:
    """A micro-batch's part of the loss of its optimizer step; call `backward()` on it.

    logits: [rows, length, vocabulary]; labels: [rows, length], -100 if no loss is wanted; padded or flat, as the
    micro-batch is. Shifted and in float32 as in transformers' causal models; what a model adds to its own loss (for the
    routers of a mixture of experts) is not in it.

    Example::

        info = pop_step_info(batch)
        weighted_loss(model(**batch).logits, batch["labels"], info).backward()
    """
    return weighted_token_loss(logits, labels, (info.token_weight,) * len(logits))


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
        labels = batch.get("labels")
        # On an accelerator they are not counted once more: the host would wait for it.
        on_host = isinstance(labels, Tensor) and labels.device.type == "cpu"
        num_supervised = count_supervised(labels) if on_host else info.num_supervised
        with token_loss.weighing(None, info.segments, max(info.units, 1), num_supervised):
            output = model(**batch)
        return in_float32(output["loss"] if isinstance(output, dict) else output[0]) * info.loss_scale

    return compute
