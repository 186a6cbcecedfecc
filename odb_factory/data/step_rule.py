"""What makes an optimizer step, and the `Progress` that follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from odb_factory.config import ODBConfig
from odb_factory.data.resume.fill_progress import FillProgress
from odb_factory.data.resume.keep_progress import KeepProgress
from odb_factory.data.resume.progress import Progress
from odb_factory.data.samples import Rejection, Sample
from odb_factory.data.stock_steps import OF_STEP, StockMean, StockSteps
from odb_factory.errors import ConfigError
from odb_factory.planning import Budget

Layout = Literal["padded", "flat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStepRule:
    """The optimizer steps of the training as it would be without odb.

    batch_size: rows of a micro-batch; accumulation: micro-batches of an optimizer step (with `fill`, ours too).
    drop_last: samples that do not fill a micro-batch on every rank are left out.
    stock_mean: what the loss is made of.
    equal_weights: samples that stock weighs differently must not share a micro-batch.
    """

    batch_size: int = 1
    accumulation: int = 1
    drop_last: bool = False
    stock_mean: StockMean = OF_STEP
    equal_weights: bool = False

    @property
    def settings(self) -> dict[str, object]:
        """What ranks compare."""
        return {
            "per_device_train_batch_size": self.batch_size,
            "gradient_accumulation_steps": self.accumulation,
            "drop_last": self.drop_last,
            "what stock's loss is the mean of": self.stock_mean.over,
        }


def progress_for(
    config: ODBConfig,
    rule: OptimizerStepRule,
    *,
    budget: Budget,
    rank: int,
    world_size: int,
    data: dict[str, Any],
    read_row: Callable[[int], Sample | Rejection] | None,
) -> Progress:
    """data: what must be as it was for a state to mean anything; read_row: see `Progress`."""
    if config.keeps:
        stock = _stock_steps(config, rule, world_size, data["samples"], is_split=data["split"])
        return KeepProgress(rank, stock, data, read_row)
    if rule.drop_last:
        raise ConfigError(
            "drop_last: True (dataloader_drop_last) would leave out the samples of a last, smaller batch, and "
            "`global_batch_size: fill` trains on every sample; set it to False, or keep the optimizer steps."
        )
    settings = {"buffer_size": config.buffer_size, "accumulation": rule.accumulation, "join": config.join}
    plan = {
        "token_budget": config.token_budget,
        "max_patches": config.max_patches,
        "balance": config.balance,
        "cost_model": config.cost_model,
        "overlong": config.overlong,
        "on_error": config.on_error,
        "collation": [str(value) for value in dataclasses.astuple(budget.collation)],  # of tuples JSON makes lists
        "layout": budget.layout,
        "pad_to_multiple_of": budget.sizes.multiple,
        "length_buckets": list(budget.sizes.buckets),
        "row_multiple": budget.row_multiple,
    }
    return FillProgress(rank, world_size, settings, data, plan, read_row)


def _stock_steps(
    config: ODBConfig, rule: OptimizerStepRule, world_size: int, num_samples: int | None, *, is_split: bool
) -> StockSteps:
    of_all_ranks = rule.batch_size * world_size
    size = of_all_ranks * rule.accumulation
    if isinstance(config.global_batch_size, int):
        size = config.global_batch_size
    if is_split and size % of_all_ranks:
        raise ConfigError(
            f"odb.global_batch_size: {size} is no multiple of {rule.batch_size} rows x {world_size} ranks, and each "
            "rank has a stream of its own to take them from; choose a multiple."
        )
    not_trained = num_samples % of_all_ranks if rule.drop_last and num_samples is not None else 0
    return StockSteps(
        global_batch_size=size,
        batch_size=rule.batch_size,
        world_size=world_size,
        num_samples=None if num_samples is None else num_samples - not_trained,
        not_trained=not_trained,
        mean=rule.stock_mean,
        equal_weights=rule.equal_weights and config.loss_scaling == "stock",
        is_split=is_split,
    )
