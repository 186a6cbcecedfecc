"""What is said once at the start of a training about the model and its loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from odb_factory.log import get_logger
from odb_factory.training.checks import unwrapped
from odb_factory.training.loss_rule import TrainerLoss

logger = get_logger(__name__)

DROPOUT_OF_ATTENTION = ("attention_dropout", "dropout")


def say_what_differs(trainer: Any, *, counts_tokens: bool) -> None:
    """Of the model and its loss what a user would not expect. counts_tokens: the loss is a mean over tokens."""
    random = list(_dropouts(trainer.model))
    if random:
        name, rate = random[0]
        more = f" and {len(random) - 1} more" if len(random) > 1 else ""
        logger.info(
            "dropout is active in the model (%s: %g%s): its random masks are drawn for each micro-batch, so losses "
            "differ from stock's as with another seed",
            name,
            rate,
            more,
        )
    loss = TrainerLoss.of(trainer) if counts_tokens else None
    if loss is not None and not loss.shifts:
        logger.warning(
            "label_smoothing_factor: %g: transformers compares each token of a %s with its own label in place of the "
            "next one, in stock training too; set it to 0",
            trainer.args.label_smoothing_factor,
            type(unwrapped(trainer.model)).__name__,
        )


def _dropouts(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Name and rate of all that draws random masks in training; attention modules keep theirs as a number."""
    for name, module in model.named_modules():
        keys = ("p",) if isinstance(module, _DropoutNd) else DROPOUT_OF_ATTENTION
        rates = [vars(module).get(key) for key in keys]
        yield from [(name, rate) for rate in rates if isinstance(rate, float) and rate > 0][:1]
