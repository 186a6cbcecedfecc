"""Losses that cannot give the samples of a micro-batch different weights, refused before a model is loaded.

`odb_factory.accounting.token_loss` finds them too, in a training; this knows the arguments only, and answers minutes
earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from odb_factory.config import ODBConfig
from odb_factory.errors import ConfigError
from odb_factory.llamafactory.stages import STAGES

FUSED_LOSS = ("enable_liger_kernel", "use_liger_kernel")
"""The kernel computes the loss from the hidden states and returns no logits to take token losses from."""
TAKE_LABELS_AWAY = ("use_dft_loss", "use_eaft_loss", "label_smoothing_factor")
"""The model gets no labels with them, and returns logits then."""
NEED_LOGITS = ("use_asft_loss", "torch_compile")
"""With them the loss without logits is not used, which replaces that of the kernel (`odb_factory.model.head`)."""


def check_losses(config: ODBConfig, model_args: Any, training_args: Any, value_of: Callable[..., Any]) -> None:
    """Raise a one-line `ConfigError` for a kernel whose samples weigh differently.

    value_of(key): an argument of LLaMA-Factory's as it has been read.
    """
    if STAGES[value_of("stage", "sft")].equal_weights:
        return  # samples of different weight never meet there
    key, needs = (next((key for key in keys if value_of(key)), None) for keys in (FUSED_LOSS, NEED_LOGITS))
    if key is None or needs is None or any(map(value_of, TAKE_LABELS_AWAY)):
        return
    if _weights_differ(config, model_args, training_args, value_of):
        raise ConfigError(
            f"{key}: {value_of(key)} computes the loss without logits, {needs}: {value_of(needs)} keeps odb from doing "
            f"so, and `loss_scaling: {config.loss_scaling}` gives the samples of a micro-batch different weights here; "
            f"set `loss_scaling: exact` in the odb: block, {needs}: false, or {key}: false."
        )


def _weights_differ(config: ODBConfig, model_args: Any, training_args: Any, value_of: Callable[..., Any]) -> bool:
    if config.loss_scaling != "stock":
        return config.loss_scaling in ("sample", "square")
    if not value_of("use_asft_loss") and not _has_processor(model_args):
        return training_args.world_size > 1 and not training_args.average_tokens_across_devices
    rows = int(training_args.per_device_train_batch_size)
    samples = config.global_batch_size
    if not isinstance(samples, int):
        samples = training_args.world_size * training_args.gradient_accumulation_steps * rows
    return samples > rows


def _has_processor(model_args: Any) -> bool:
    """Whether LLaMA-Factory takes the mean of means, as it does for every model with a processor."""
    from llamafactory.model import load_tokenizer

    return load_tokenizer(model_args)["processor"] is not None
