"""What stock's loss is the mean of, and which losses of a trainer can have weights that differ within a micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from odb_factory.config import ODBConfig
from odb_factory.data.step_rule import StockMean
from odb_factory.errors import ConfigError
from odb_factory.log import get_logger

logger = get_logger(__name__)


def stock_mean(trainer: Any) -> StockMean:
    """As the Trainer decides it: by the tokens that it counts, where model or loss function take their number.

    Models with a processor do not under LLaMA-Factory, which sets `model_accepts_loss_kwargs` to False.
    """
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        return "micro_batch"
    several = trainer.args.world_size > 1
    return "rank" if several and not trainer.args.average_tokens_across_devices else "step"


def check_loss(trainer: Any, config: ODBConfig, mean: StockMean) -> None:
    """Refuse, by name, a loss that is computed over a whole micro-batch where its samples can have different weights.

    Their weights are those of token losses, which only a model's own loss is known to be the mean of.
    """
    name = _loss_of_the_trainer(trainer)
    if name is None:
        return
    scaling = config.loss_scaling
    if scaling in ("sample", "square") or (scaling == "stock" and _weights_differ(trainer, mean)):
        raise ConfigError(
            f"odb.loss_scaling: {scaling!r} gives the samples of a micro-batch different weights here, and "
            f"{name} is computed over the whole micro-batch; set `loss_scaling: exact`, or leave that loss out."
        )
    if trainer.compute_loss_func is None and scaling == "stock" and mean == "step":
        times = trainer.args.gradient_accumulation_steps * trainer.args.world_size
        if times > 1:
            logger.warning(
                "%s: the Trainer alone adds up the means of its micro-batches without dividing by their number, a loss "
                "and a gradient %d times larger; with odb it is the mean over the tokens of the optimizer step",
                name,
                times,
            )


def _weights_differ(trainer: Any, mean: StockMean) -> bool:
    """Whether stock's loss is a mean of several means."""
    means = {
        "step": 1,
        "rank": trainer.args.world_size,
        "micro_batch": trainer.args.gradient_accumulation_steps * trainer.args.world_size,
    }
    return means[mean] > 1


def _loss_of_the_trainer(trainer: Any) -> str | None:
    """The loss that is used in place of the model's own, as a user knows it; None if there is none."""
    function = trainer.compute_loss_func
    if function is not None:
        function = getattr(function, "func", function)  # of a functools.partial
        return f"compute_loss_func ({getattr(function, '__qualname__', type(function).__name__)})"
    if trainer.label_smoother is not None:
        return f"label_smoothing_factor: {trainer.args.label_smoothing_factor}"
    return None


@contextlib.contextmanager
def without_average_tokens(args: Any) -> Iterator[None]:
    """Within it the Trainer does not multiply a loss by the number of processes, which our weights do already."""
    before = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = before
