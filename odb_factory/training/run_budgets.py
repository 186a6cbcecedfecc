"""The budgets of a run where the config says `auto`: from its checkpoint, or to be chosen when the model is wrapped."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from odb_factory.config import ODBConfig, ResolvedConfig
from odb_factory.log import get_logger
from odb_factory.training.checkpoint_status import read_states
from odb_factory.training.state_files import RANK_FILE, by_rank

logger = get_logger(__name__)


def first_config(config: ODBConfig, folder: str | None, rank: int, ranks: int) -> tuple[ResolvedConfig, bool]:
    """The config to begin with, and whether its budgets are those to train with.

    folder: the checkpoint that is gone on from, whose budgets are kept. Else they stand for ones that are not known
    yet: each sample is a micro-batch of its own, so that little is read before there are better ones.
    """
    if not config.has_auto:
        return config.resolved(), True
    asked = config.auto_keys
    kept = {} if folder is None else _kept(Path(folder), rank, ranks)
    if set(asked) <= kept.keys():
        chosen = {key: kept[key] for key in asked}
        logger.info(
            "%s, as chosen when this training began; a number in the YAML takes its place",
            ", ".join(f"{key}: auto is {'none' if value is None else value}" for key, value in chosen.items()),
        )
        return config.resolved(**chosen), True
    least = max(config.pad_to_multiple_of or 1, *(config.length_buckets or ()), 1)
    stand_in: dict[str, int | None] = {"token_budget": least, "max_patches": None}
    return dataclasses.replace(
        config.resolved(**{key: stand_in[key] for key in asked}), overlong="singleton", buffer_size=1
    ), False


def _kept(folder: Path, rank: int, ranks: int) -> dict[str, int | None]:
    """What a checkpoint says; nothing where it was written without odb. What is damaged is told when it is loaded."""
    if not by_rank(folder, RANK_FILE):
        return {}
    kept: dict[str, int | None] = read_states(folder, rank, ranks)[0].run.get("budgets", {})
    return kept
