"""What LLaMA-Factory's arguments say about the layout of micro-batches. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from odb_factory.config import ODBConfig
from odb_factory.errors import ConfigError
from odb_factory.llamafactory.stages import STAGES
from odb_factory.log import get_logger

logger = get_logger(__name__)

NOT_FLAT = {
    "shift_attn": "it shifts attention along the whole row, across samples",
    "neftune_noise_alpha": "it scales its noise by the length of the row",
}
"""Arguments with which flat micro-batches would be wrong, and why."""


def with_neat_packing_as_layout(args: Mapping[str, Any], *, tell: bool = True) -> dict[str, Any]:
    """`args` for LLaMA-Factory: `neat_packing: true` beside `odb:` is the wish for flat micro-batches.

    LLaMA-Factory itself must not see it: it would pack rows before training (or refuse to). Raises `ConfigError` where
    the block says `layout: padded`. tell: say so in the log.
    """
    args, block = dict(args), args["odb"]
    if args.get("neat_packing") is not True or not isinstance(block, Mapping):
        return args
    if block.get("layout") == "padded":
        raise ConfigError(
            "neat_packing: True asks for samples that share a row, and odb.layout 'padded' for rows of one sample; "
            "remove one of them."
        )
    for key in ("neat_packing", "packing"):
        args.pop(key, None)
    if tell:
        logger.info(
            "neat_packing: true is taken as odb.layout: flat; nothing is packed before training, so batch sizes "
            "count samples, not packs, and optimizer steps are smaller and more than stock's (see global_batch_size)"
        )
    return args | {"odb": {**block, "layout": "flat"}}


def check_layout(config: ODBConfig, value_of: Callable[..., Any]) -> None:
    """Refuse `layout: flat` beside arguments that speak against it, before a model is loaded.

    value_of(key): an argument of LLaMA-Factory's.
    """
    stage = STAGES.get(value_of("stage", "sft"))
    sizes = {"length_buckets": config.length_buckets, "row_multiple": config.row_multiple}
    for key, value in sizes.items():
        if stage is not None and stage.batches and value not in (None, 1):
            raise ConfigError(
                f"odb.{key}: {value} rounds up batches of single texts, and stage {stage.name!r} reads its batches by "
                f"{stage.unit}s; leave it out."
            )
    for key, why in NOT_FLAT.items():
        if config.layout == "flat" and value_of(key):
            raise ConfigError(
                f"{key}: {value_of(key)!r} does not go with odb.layout 'flat': {why}; remove it, or set `layout: "
                "padded`, or auto."
            )


def why_not_flat(trainer: Any) -> str | None:
    """What LLaMA-Factory's trainer was made with that only a padded layout can have; None: nothing."""
    # What LLaMA-Factory sets where it has really changed the attention.
    if getattr(trainer.model.config, "group_size_ratio", None) is not None:
        return f"shift_attn: {NOT_FLAT['shift_attn']}"
    if not STAGES[trainer.finetuning_args.stage].batches:
        return None
    # What a trainer reads of its rows comes from the door at the output embedding.
    from odb_factory.model.unpad import UnpadDoor
    from odb_factory.training.layout_choice import models_of

    reasons = (UnpadDoor(model).reason for model in models_of(trainer))
    return next((reason for reason in reasons if reason is not None), None)
