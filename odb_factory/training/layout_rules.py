"""What is known not to go into a flat row, by name: each rule with the reason in one line (I10).

Only what the check of a tiny copy (`model/check.py`) does not compute: images, arguments of the training, releases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version

from odb_factory.model import mixers
from odb_factory.training.checks import unwrapped
from odb_factory.training.loss_rule import shifts_labels

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
    return mixers.why_unusable(model)


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


def _kernel(model: Any) -> str:
    return str(getattr(model.config.get_text_config(decoder=True), "_attn_implementation", ""))


RULES: tuple[Rule, ...] = (
    _unknown,
    _mixers,
    _cross_attention,
    _noise,
    _first_labels,
    _masks,
)
