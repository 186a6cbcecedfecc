"""What a training loop must know of a step: how its loss weighs. Travels beside the model inputs of a batch."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from odb_factory.config import LOSS_SCALINGS
from odb_factory.data.samples import Step
from odb_factory.errors import DataError
from odb_factory.training.loss import loss_weights

STEP_INFO_KEY = "odb_step_info"


@dataclass(frozen=True)
class ODBStepInfo:
    """all_samples_this_step: samples in this step on all ranks together.

    loss_scale: multiply the mean loss of this micro-batch by it before `backward()`. It is made for gradients that
    are averaged over ranks (as DDP, ZeRO and FSDP do) and summed over the micro-batches of an optimizer step (do not
    divide by their number; where `accelerator.backward` does, multiply by it). 0 on an idle step, which must be run
    all the same.
    """

    all_samples_this_step: int
    loss_scale: float


class StepRecord:
    """The step info of a batch under every scaling. Moves to no device: `batch.to(...)` leaves it as it is."""

    def __init__(self, samples: int, scales: dict[str, float], loss_scaling: str):
        self.samples, self.scales, self.loss_scaling = samples, scales, loss_scaling

    def to(self, *args: Any, **kwargs: Any) -> StepRecord:
        return self


def make_records(steps: Sequence[Step], loss_scaling: str, world_size: int) -> list[StepRecord]:
    """One for each micro-batch of an optimizer step."""
    scales = {scaling: loss_weights(steps, scaling, world_size) for scaling in LOSS_SCALINGS}
    return [
        StepRecord(step.totals.samples, {name: weights[k] for name, weights in scales.items()}, loss_scaling)
        for k, step in enumerate(steps)
    ]


def pop_step_info(batch: MutableMapping[str, Any], loss_scaling: str | None = None) -> ODBStepInfo:
    """Take the step info out of a batch of an `ODBDataLoader`; do so before `model(**batch)`.

    loss_scaling: exact, approx or none; default: that of the loader. Raises `DataError` where the batch has no info,
    and `ValueError` for another word.
    """
    record = batch.pop(STEP_INFO_KEY, None)
    if record is None:
        raise DataError(
            f"this batch has no {STEP_INFO_KEY!r}: it does not come from an ODBDataLoader, or the info was taken out "
            "before; call pop_step_info once for each batch, before anything else drops the key."
        )
    scaling = record.loss_scaling if loss_scaling is None else loss_scaling
    if scaling not in LOSS_SCALINGS:
        raise ValueError(f"loss_scaling: {scaling!r} is not one of {', '.join(LOSS_SCALINGS)}.")
    return ODBStepInfo(record.samples, record.scales[scaling])
