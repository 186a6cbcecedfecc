"""Losses that cannot give the samples of a micro-batch different weights, refused before a model is loaded.

What the Trainer makes of them is `odb_factory.training.loss_rule`, which looks at the trainer itself; this knows its
arguments only, and answers minutes earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from odb_factory.config import ODBConfig
from odb_factory.errors import ConfigError
from odb_factory.llamafactory.stages import STAGES

WITHOUT_LOGITS = ("enable_liger_kernel", "use_liger_kernel")
"""The kernel computes the loss from the hidden states and returns no logits to take token losses from."""
LOSS_FUNCTIONS = ("use_dft_loss", "use_eaft_loss", "use_asft_loss")
"""The Trainer counts tokens for a loss function, whatever the model does with their number."""
LABEL_SMOOTHING = "label_smoothing_factor"


def check_losses(config: ODBConfig, model_args: Any, training_args: Any, value_of: Callable[..., Any]) -> None:
    """Raise a one-line `ConfigError` for a loss over a whole micro-batch whose samples weigh differently.

    value_of(key): an argument of LLaMA-Factory's as it has been read.
    """
    if STAGES[value_of("stage", "sft")].equal_weights:
        return  # samples of different weight never meet there
    key = next((key for key in (*WITHOUT_LOGITS, *LOSS_FUNCTIONS, LABEL_SMOOTHING) if value_of(key)), None)
    if key is None or not _weights_differ(config, model_args, training_args, value_of):
        return
    how = "computes the loss without logits" if key in WITHOUT_LOGITS else "is a loss over a whole micro-batch"
    off = 0 if key == LABEL_SMOOTHING else "false"
    raise ConfigError(
        f"{key}: {value_of(key)} {how}, and `loss_scaling: {config.loss_scaling}` gives the samples of a micro-batch "
        f"different weights here; set `loss_scaling: exact` in the odb: block, or {key}: {off}."
    )


def _weights_differ(config: ODBConfig, model_args: Any, training_args: Any, value_of: Callable[..., Any]) -> bool:
    if config.loss_scaling != "stock":
        return config.loss_scaling in ("sample", "square")
    if any(map(value_of, LOSS_FUNCTIONS)) or not _has_processor(model_args):
        return training_args.world_size > 1 and not training_args.average_tokens_across_devices
    samples = config.global_batch_size
    if not isinstance(samples, int):
        samples = training_args.world_size * training_args.gradient_accumulation_steps * _rows(training_args)
    return samples > _rows(training_args)


def _rows(training_args: Any) -> int:
    return int(training_args.per_device_train_batch_size)


def _has_processor(model_args: Any) -> bool:
    """Whether LLaMA-Factory takes the mean of means, as it does for every model with a processor."""
    from llamafactory.model import load_tokenizer

    return load_tokenizer(model_args)["processor"] is not None
