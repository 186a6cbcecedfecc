"""Which layout a training gets: as configured, or with `auto` flat where nothing speaks against it (I10).

Rules by name, the attention kernel and the check of a tiny copy of the model (`model/check.py`) speak, in this order.

| attention kernel | flat |
|---|---|
| flash attention, flex attention | as it is |
| sdpa | `odb_varlen` takes its place in the language model (`model/attention.py`), where that computes the same |
| sdpa otherwise, eager | exact, but its price grows with the square of the row: an accelerator takes it if asked to |
| no attention (Mamba) | as it is |

Mixers that carry state along the row see padded groups of samples (`model/mixers.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from packaging.version import Version
from torch.utils.data import IterableDataset
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from odb_factory.config import ODBConfig
from odb_factory.errors import ConfigError
from odb_factory.log import get_logger
from odb_factory.model import attention, mixers
from odb_factory.model.check import check
from odb_factory.training.checks import shifts_labels, unwrapped

# ----------------------------------------------------------------------------------------------------------------------
# What is known not to go into a flat row, by name: each rule with the reason in one line (I10).
# Only what the check of a tiny copy (`model/check.py`) does not compute: images, arguments of the training, releases.

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


# ----------------------------------------------------------------------------------------------------------------------

logger = get_logger(__name__)

PRICE = "exact, but its attention costs the square of a whole row"


@dataclass(frozen=True, slots=True)
class Layout:
    """What a run computes with. reason: why, in a few words.

    with_boundaries: the batch says where segments end, for kernels that would else
    read it back from the device. undo: puts the model back as it was.
    """

    name: Literal["padded", "flat"]
    reason: str
    with_boundaries: bool = False
    undo: Callable[[], None] = lambda: None


def resolve_layout(trainer: Any, config: ODBConfig, refused: str | None = None) -> Layout:
    """The layout for `trainer`, whose model is not wrapped yet. With a flat one the model is set up for it.

    refused: why flat micro-batches would be wrong, where the caller knows. Raises `ConfigError` where `layout: flat` is
    refused.
    """
    if config.layout == "padded":
        return Layout("padded", "as configured")
    if config.layout == "auto" and isinstance(trainer.train_dataset, IterableDataset):
        return Layout("padded", "the rows of a stream cannot be looked at before training; `layout: flat` does without")
    why = refused or why_not_flat(trainer)
    if why is not None:
        return _refuse(config, why)
    return _by_kernel(trainer, config)


def fall_back(layout: Layout, config: ODBConfig, why: str) -> Layout:
    """The padded layout in the place of a flat one that was found wrong, with one line; the model is put back.

    Raises `ConfigError` where `layout: flat` is configured.
    """
    if config.layout == "flat":
        raise not_right(why)
    layout.undo()
    logger.warning("layout: padded, for %s", why)
    return Layout("padded", why)


def _by_kernel(trainer: Any, config: ODBConfig) -> Layout:
    models = models_of(trainer)
    model = models[0]
    if not mixers.has_attention(model):
        return _flat(config, models, "")
    kernel = attention.text_config(model)._attn_implementation or "eager"
    if "flash" in kernel:
        takes_more = inspect.Parameter.VAR_KEYWORD in {
            parameter.kind for parameter in inspect.signature(model.forward).parameters.values()
        }
        return _flat(config, models, kernel, with_boundaries=takes_more)
    if kernel == "flex_attention":
        return _flat(config, models, kernel)
    why_not = "" if kernel != "sdpa" else attention.why_unusable(model)
    if why_not is None:
        dtype = torch.bfloat16 if trainer.args.bf16 else torch.float16 if trainer.args.fp16 else model.dtype
        used = attention.expected(model, trainer.args.device, dtype)
        return _flat(config, models, f"{attention.NAME}: {used}", install=True)
    if kernel not in ("sdpa", "eager"):
        if config.layout == "flat":
            return _flat(config, models, kernel)
        return _refuse(config, f"nothing is known of the attention kernel {kernel}")
    price = f"{kernel}: {PRICE}" + (f"; {attention.NAME} does not take its place: {why_not}" if why_not else "")
    if trainer.args.device.type != "cpu" and config.layout != "flat":
        return _refuse(config, f"{price}; `layout: flat` has it all the same")
    return _flat(config, models, kernel, price)


def _flat(
    config: ODBConfig,
    models: Sequence[Any],
    kernel: str,
    price: str = "",
    *,
    with_boundaries: bool = False,
    install: bool = False,
) -> Layout:
    for one in {(type(one), one.config.to_json_string()): one for one in models}.values():
        verdict = check(one, installs=install)
        if verdict.why_wrong is not None:
            return _refuse(config, verdict.why_wrong)
        if verdict.why_unknown is not None:
            logger.info("the layout is checked on real rows alone: %s", verdict.why_unknown)
        if verdict.neighbours is not None:
            logger.info("layout: %s", verdict.neighbours)
    reason = "as configured" if config.layout == "flat" else "model and attention kernel allow it"
    undo = []
    for one in models:
        undo.append(without_cache(one))
        undo.append(mixers.install(one, mixers.EQUAL_GROUPS if is_deepspeed_zero3_enabled() else None))
        if install:
            undo.append(attention.install(one))
    computed = [f"attention by {price or kernel}"] if kernel else []
    if found := mixers.describe(models[0]):
        computed.append(f"{found} by padded groups of samples")

    def undo_all() -> None:
        while undo:
            undo.pop()()

    return Layout("flat", f"{reason}, {'; '.join(computed)}", with_boundaries, undo_all)


def _refuse(config: ODBConfig, why: str) -> Layout:
    if config.layout == "flat":
        raise not_right(why)
    return Layout("padded", why)


def not_right(why: str) -> ConfigError:
    """What a user meets who has set `layout: flat`."""
    return ConfigError(f"odb.layout: 'flat' is not right here: {why}; set `layout: padded`, or auto.")


def models_of(trainer: Any) -> list[Any]:
    """The models that see a micro-batch: the one that is trained and, of some stages, the one it is compared with."""
    models = (trainer.model, getattr(trainer, "ref_model", None))
    return [unwrapped(model) for model in models if model is not None]


def without_cache(model: Any) -> Callable[[], None]:
    """Switch off the cache of keys and values, beside which transformers does not look for samples in a row.

    Training has no use for it; the Trainer itself switches it off, but not in the config of a language model that is a
    part of a larger one.
    """
    before = [
        (config, config.use_cache)
        for config in (model.config, attention.text_config(model))
        if getattr(config, "use_cache", None)
    ]
    for config, _ in before:
        config.use_cache = False

    def undo() -> None:
        for config, value in before:
            config.use_cache = value

    return undo
