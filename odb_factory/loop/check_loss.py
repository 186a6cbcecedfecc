"""`check_loss`: make sure that the loss of a loop does not depend on which samples share a micro-batch (I8)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from odb_factory.accounting.loss_weights import IN_BATCH, in_batch_loss
from odb_factory.data.samples import Sample
from odb_factory.errors import ConfigError

SAMPLES = 4
TOLERANCE = 0.01
"""Relative difference that is taken for rounding, in bfloat16 too; in-batch negatives differ by far more."""


def check_loss(dataloader: Any, loss_fn: Callable[[Any], Tensor]) -> None:
    """Check on four samples that the mean loss of a batch is the mean of the losses of its halves.

    dataloader: an `ODBDataLoader` (or what `apply_odb` returns), not yet iterated. It begins the epoch. With several
    ranks, all call it.
    loss_fn: batch, as the loader yields it (on the CPU, without step info) -> mean loss, a scalar. It runs without
    gradients; put a model with dropout into eval mode, for its losses are random numbers else.
    Raises `ConfigError` where the loss compares samples with each other, as in-batch negatives do.

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

    def loss_of(samples: Sequence[Sample]) -> float:
        with torch.no_grad():
            return float(loss_fn(loader.groups.collate(list(samples))[1]))

    half = len(samples) // 2
    whole, again = loss_of(samples), loss_of(samples)
    if not math.isclose(whole, again, rel_tol=TOLERANCE, abs_tol=1e-6):
        raise ConfigError(
            f"check_loss: the loss of the same batch is {whole:.4g}, and {again:.4g} the second time; put the model "
            "into eval mode for the check, or draw no random numbers in loss_fn."
        )
    halves = [(loss_of(part), sum(one.cost.units for one in part)) for part in (samples[:half], samples[half:])]
    mean = sum(loss * units for loss, units in halves) / sum(units for _, units in halves)
    if not math.isclose(whole, mean, rel_tol=TOLERANCE, abs_tol=1e-6):
        raise ConfigError(
            f"check_loss: the mean loss of {len(samples)} samples is {whole:.4g}, and that of their halves, weighed by "
            f"units, {mean:.4g}: it {IN_BATCH}; or it is no mean over the units of `Cost`; or the model depends on "
            "padding or on batch statistics."
        )
