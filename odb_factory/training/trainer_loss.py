"""What a training's loss needs beside its measurement: losses of routers, logits, and what a user may not expect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from odb_factory.data.order import OptimizerStepRule
from odb_factory.data.samples import OptimizerStep
from odb_factory.log import get_logger

logger = get_logger(__name__)

LOOK_AT_THE_LOSS_ONLY = ("odb_factory.", "transformers.", "llamafactory.")
"""Packages whose trainers, in training, read only the loss of a model's output."""


def routers_weigh(rule: OptimizerStepRule, step: OptimizerStep, world_size: int) -> float:
    """How often stock adds the loss of a model's routers in an optimizer step.

    Where the loss of tokens is divided by the tokens of all micro-batches, nothing divides that of routers: it is added
    once a micro-batch and, where tokens are counted on all ranks, multiplied by these as the rest is.
    """
    if rule.stock_mean.over not in ("step", "rank"):
        return 1.0
    micro_batches = math.ceil(step.samples / rule.batch_size)
    return micro_batches / (world_size if rule.stock_mean.over == "rank" else 1)


def overriding_compute_loss(trainer: Any) -> list[type]:
    """Classes with a `compute_loss` that may read the outputs of a model or change its loss, the first called first."""
    kinds = [kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind)]
    return [kind for kind in kinds if not kind.__module__.startswith(LOOK_AT_THE_LOSS_ONLY)]


def why_logits(trainer: Any) -> str | None:
    """Why the logits of a micro-batch are needed beside the model's own loss; None if only the loss is."""
    for kind in overriding_compute_loss(trainer):
        return f"compute_loss of {kind.__module__}.{kind.__qualname__} may read its outputs"
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Logged once at the start: what a user may not expect of the model and its loss.

DROPOUT_OF_ATTENTION = ("attention_dropout", "dropout")


def log_what_differs(trainer: Any) -> None:
    random = list(_dropouts(trainer.model))
    if random:
        name, rate = random[0]
        suffix = f" and {len(random) - 1} more" if len(random) > 1 else ""
        logger.info(
            "dropout is active in the model (%s: %g%s): its random masks are drawn for each micro-batch, so losses "
            "differ from stock's as with another seed",
            name,
            rate,
            suffix,
        )
    if trainer.args.neftune_noise_alpha is not None:
        logger.info(
            "neftune_noise_alpha: %g: the noise of a sample goes by its own length (padded micro-batches: by that of "
            "its row), in stock by that of its row, padded to the longest of its micro-batch; so shorter samples have "
            "more noise than in stock, but for per_device_train_batch_size: 1",
            trainer.args.neftune_noise_alpha,
        )


def _dropouts(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Name and rate of the modules that draw random masks in training; attention modules keep theirs as a number."""
    for name, module in model.named_modules():
        keys = ("p",) if isinstance(module, _DropoutNd) else DROPOUT_OF_ATTENTION
        rates = [vars(module).get(key) for key in keys]
        yield from [(name, rate) for rate in rates if isinstance(rate, float) and rate > 0][:1]
