"""What is known not to go into a flat row, by name: each rule with the reason in one line (I10).

The check before training (`layout_check`) would find most of it; these are found before a loader is made, and by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from odb_factory.model import mixers
from odb_factory.training.checks import unwrapped
from odb_factory.training.loss_rule import shifts_labels

MASK_POSITIONS = ("biogpt", "bloom", "falcon", "mpt", "opt")
"""Models that take positions from the attention mask or their place in the row."""
CROSS_ATTENTION = ("mllama",)
"""Models whose text attends to the images of its row."""
WHOLE_ROW_KERNELS = ("sdpa", "eager", "flex_attention")
"""They see the ends of samples in a mask that transformers makes of positions."""

Rule = Callable[[Any, Any], str | None]
"""(trainer, model) -> why the model cannot take flat rows, or None."""


def why_not_flat(trainer: Any) -> str | None:
    """The reason of the first rule that speaks against flat micro-batches; None where none does.

    trainer: a `transformers.Trainer`, its model not wrapped yet.
    """
    model = unwrapped(trainer.model)
    return next((reason for rule in RULES if (reason := rule(trainer, model)) is not None), None)


def configs(model: Any) -> list[Any]:
    """The config of `model` and those of its parts."""
    whole = getattr(model, "config", None)
    parts = [getattr(whole, key, None) for key in getattr(whole, "sub_configs", {})]
    return [config for config in (whole, *parts) if config is not None]


def _unknown(trainer: Any, model: Any) -> str | None:
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        return f"{type(model).__name__} is no model of transformers, and nothing is known of its attention"
    return None


def _mixers(trainer: Any, model: Any) -> str | None:
    if is_deepspeed_zero3_enabled() and (found := mixers.describe(model)):
        return f"ZeRO-3 gathers parameters for each call of {found}, and ranks would call them unequally often"
    return mixers.why_unusable(model)


def _chunked(trainer: Any, model: Any) -> str | None:
    for config in configs(model):
        if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
            return f"{config.model_type} attends in chunks counted from the start of the row, not of the sample"
    return None


def _positions(trainer: Any, model: Any) -> str | None:
    for config in configs(model):
        if getattr(config, "model_type", "") in MASK_POSITIONS:
            return f"{config.model_type} takes positions from the attention mask, not from position_ids"
    if "position_ids" not in _parameters(model) and mixers.has_attention(model):
        return f"{type(model).__name__} takes no position_ids, by which it would tell one sample from the next"
    return None


def _cross_attention(trainer: Any, model: Any) -> str | None:
    name = getattr(getattr(model, "config", None), "model_type", "")
    if name in CROSS_ATTENTION:
        return f"{name} attends from every token of a row to all images of that row"
    return None


def _noise(trainer: Any, model: Any) -> str | None:
    alpha = getattr(trainer.args, "neftune_noise_alpha", None)
    if alpha:
        return f"neftune_noise_alpha: {alpha} scales its noise by the length of the row"
    return None


def _first_labels(trainer: Any, model: Any) -> str | None:
    factor = getattr(trainer.args, "label_smoothing_factor", 0)
    if factor and not shifts_labels(model):
        return (
            f"label_smoothing_factor: {factor} counts the first label of a sample for {type(model).__name__}, and a "
            "flat row has none"
        )
    return None


def _masks(trainer: Any, model: Any) -> str | None:
    """transformers 4 looks for packed samples with torch >= 2.6 only."""
    kernel = _kernel(model)
    old = Version(torch.__version__) < Version("2.6") and Version(transformers.__version__) < Version("5")
    if old and kernel in WHOLE_ROW_KERNELS:
        return (
            f"the masks that transformers {transformers.__version__} makes for {kernel} with torch {torch.__version__} "
            "do not tell samples apart (torch >= 2.6 does)"
        )
    return None


def _sinks(trainer: Any, model: Any) -> str | None:
    if any(getattr(config, "model_type", "") == "gpt_oss" for config in configs(model)) and _kernel(model) == "eager":
        return "gpt_oss with eager attention lets one sample see the next; use its flash attention kernel"
    return None


def _kernel(model: Any) -> str:
    return str(getattr(model.config.get_text_config(decoder=True), "_attn_implementation", ""))


def _parameters(model: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(model.forward).parameters)


RULES: tuple[Rule, ...] = (
    _unknown,
    _mixers,
    _chunked,
    _positions,
    _cross_attention,
    _noise,
    _first_labels,
    _masks,
    _sinks,
)
