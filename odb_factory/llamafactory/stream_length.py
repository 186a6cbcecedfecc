"""`max_steps` of a true stream, where its data sets state how many rows they have.

LLaMA-Factory asks every stream for `max_steps`. The card of a data set (`dataset_info` in its README, which hubs write)
often says how many rows a split has, and so how many optimizer steps `num_train_epochs` are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from odb_factory.config import ODBConfig
from odb_factory.llamafactory.streaming import data_sets
from odb_factory.log import get_logger

logger = get_logger(__name__)

HAS_A_CARD = ("hf_hub", "script")
"""What a data set is loaded from that `datasets` itself reads the card of."""
EPOCHS, BATCH = 3.0, 8
"""What transformers takes where the YAML has no `num_train_epochs` and no `per_device_train_batch_size`."""


def with_max_steps(args: Mapping[str, Any], config: ODBConfig) -> dict[str, Any]:
    """`args` for LLaMA-Factory, with the optimizer steps of a stream whose rows are known and whose steps are not set.

    Rows that preprocessing drops are among those stated; what they leave of the last steps is the beginning of another
    epoch. Where anything is not known, `args` stay as they are and LLaMA-Factory asks for `max_steps`.
    """
    args = dict(args)
    if not args.get("do_train") or args.get("streaming") is not True or args.get("max_steps", -1) != -1:
        return args
    if config.global_batch_size == "fill" or (rows := _num_rows(args)) is None:
        return args
    if isinstance(config.global_batch_size, int):
        samples = config.global_batch_size
    else:
        per_rank = args.get("per_device_train_batch_size", BATCH) * args.get("gradient_accumulation_steps", 1)
        samples = per_rank * int(os.environ.get("WORLD_SIZE", "1"))
    steps = rows // samples if args.get("dataloader_drop_last") else math.ceil(rows / samples)
    epochs = args.get("num_train_epochs", EPOCHS)
    args["max_steps"] = max(math.ceil(epochs * steps), 1)
    logger.info(
        "max_steps: %d, which are %g epochs of the %d rows that the cards of the stream's data sets state, by %d "
        "samples an optimizer step",
        args["max_steps"],
        epochs,
        rows,
        samples,
    )
    return args


def _num_rows(args: Mapping[str, Any]) -> int | None:
    """Training rows of an epoch; None if anybody does not say, or the mix is not all rows of all data sets."""
    found, held_out = data_sets(args, "dataset"), args.get("val_size") or 0
    if not found or (len(found) > 1 and args.get("mix_strategy", "concat") != "concat"):
        return None
    stated = [_stated(attr, args) for attr in found]
    if not isinstance(held_out, int) or any(rows is None for rows in stated):
        return None
    rows = sum(rows for rows in stated if rows is not None) - held_out
    return rows if rows > 0 else None


def _stated(attr: Any, args: Mapping[str, Any]) -> int | None:
    if attr.load_from not in HAS_A_CARD:
        return None
    from datasets import load_dataset_builder

    path = attr.dataset_name
    if attr.load_from == "script":
        path = os.path.join(args.get("dataset_dir") or "data", path)
    try:
        splits = load_dataset_builder(
            path,
            name=attr.subset,
            data_dir=attr.folder,
            cache_dir=args.get("cache_dir"),
            token=args.get("hf_hub_token"),
        ).info.splits
    except Exception:  # LLaMA-Factory will say so, when it loads the data set
        return None
    return splits[attr.split].num_examples if splits and attr.split in splits else None
