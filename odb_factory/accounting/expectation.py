"""What is said once at the start: how large optimizer steps are, how they are cut, how full the budgets get."""

from __future__ import annotations

from odb_factory.config import ResolvedConfig
from odb_factory.data.loader import ODBLoader
from odb_factory.data.samples import OptimizerStep
from odb_factory.log import get_logger
from odb_factory.planning import Limits

logger = get_logger(__name__)

MOSTLY_EMPTY = 0.5
"""Budgets that are filled by less than this get a line of advice."""


def say_what_to_expect(
    loader: ODBLoader, config: ResolvedConfig, first: OptimizerStep | None, *, in_loop: bool = False
) -> None:
    """first: the optimizer step that comes first, if it is planned. in_loop: of a loop, where no line tells layout."""
    if first is None:
        return
    limits = Limits(config.token_budget, config.max_patches).least(loader.lowered)
    filled = first.padded_tokens / (first.num_micro_batches * loader.world_size * limits.token_budget)
    cut = f"{_count(first.num_micro_batches, 'micro-batch', 'es')} on {_ranks(loader.world_size)}"
    budgets = (
        f"fills {filled:.0%} of their budgets (token_budget {limits.token_budget}, max_patches {limits.max_patches}"
        f"{', lowered by oom: split' if loader.lowered else ''}); "
        f"loss_scaling {config.loss_scaling}"
    )
    if in_loop:
        unit = "supervised token" if loader.counts_labels else "sample, or what cost_fn says"
        budgets += f", layout {loader.layout}, a unit is a {unit}"
    samples = "a stream of unknown length" if loader.num_samples is None else f"{loader.num_samples} samples"
    an_epoch, size = loader.num_optimizer_steps, loader.global_batch_size
    if size is None:
        if loader.num_samples is not None:
            samples += f" in about {loader.estimate_optimizer_steps()} optimizer steps an epoch"
        if not in_loop:
            samples += " (figures of the Trainer above are bounds)"
        logger.info("%s; the first has %s and %s", samples, cut, budgets)
        return
    if an_epoch is not None:
        samples += f", {_count(an_epoch, 'optimizer step')} an epoch"
    each = f"each of {_count(min(size, loader.num_samples or size), 'sample')}"
    if config.global_batch_size == "keep":
        each += " as without odb" if in_loop else " as in stock training"
    logger.info("%s, %s; the first is cut into %s and %s", samples, each, cut, budgets)
    if filled > 1:
        logger.warning(
            "token_budget %d is less than most samples of the first optimizer step have, so each of them is trained on "
            "alone; raise token_budget, or lower cutoff_len",
            config.token_budget,
        )
    if size <= loader.world_size and (loader.num_samples is None or loader.num_samples > size):
        logger.warning(
            "an optimizer step has %s, one on a rank, so nothing can be batched: %s",
            _count(size, "sample"),
            'give global_batch_size="fill" (optimizer steps as large as the budget), or the batch_size and '
            "gradient_accumulation_steps that the loop would have without odb"
            if in_loop
            else "raise per_device_train_batch_size or gradient_accumulation_steps, or set `global_batch_size`",
        )
    elif filled < MOSTLY_EMPTY and first.num_micro_batches == 1:
        logger.warning(
            "an optimizer step of %d samples fills %.0f %% of token_budget %d on %s: token_budget could be smaller, or "
            "global_batch_size larger",
            size,
            100 * filled,
            config.token_budget,
            _ranks(loader.world_size),
        )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _ranks(world_size: int) -> str:
    return "one rank" if world_size == 1 else f"each of {world_size} ranks"
