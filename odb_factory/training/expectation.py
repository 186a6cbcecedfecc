"""What is said once at the start: how large optimizer steps are, how they are cut, how full the budgets get."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from odb_factory.config import ResolvedConfig
from odb_factory.data.loader import ODBLoader
from odb_factory.log import get_logger
from odb_factory.planning import Limits
from odb_factory.training.checks import unwrapped
from odb_factory.training.loss_rule import TrainerLoss

logger = get_logger(__name__)

DROPOUT_OF_ATTENTION = ("attention_dropout", "dropout")
MOSTLY_EMPTY = 0.5
"""Budgets that are filled by less than this get a line of advice."""


def say_what_to_expect(loader: ODBLoader, config: ResolvedConfig) -> None:
    """From the first plan, which `loader` has made (see `ODBLoader.begin`)."""
    first = loader.first_planned
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
    samples = "a stream of unknown length" if loader.num_samples is None else f"{loader.num_samples} samples"
    an_epoch, size = loader.num_optimizer_steps, loader.global_batch_size
    if size is None:
        if loader.num_samples is not None:
            samples += f" in about {loader.estimate_optimizer_steps()} optimizer steps an epoch"
        logger.info("%s (figures of the Trainer above are bounds); the first has %s and %s", samples, cut, budgets)
        return
    if an_epoch is not None:
        samples += f", {_count(an_epoch, 'optimizer step')} an epoch"
    each = f"each of {_count(min(size, loader.num_samples or size), 'sample')}"
    if config.global_batch_size == "keep":
        each += " as in stock training"
    logger.info("%s, %s; the first is cut into %s and %s", samples, each, cut, budgets)
    if filled > 1:
        logger.warning(
            "token_budget %d is less than most samples of the first optimizer step have, so each of them is trained on "
            "alone; raise token_budget, or lower cutoff_len",
            config.token_budget,
        )
    if filled < MOSTLY_EMPTY and first.num_micro_batches == 1:
        logger.warning(
            "an optimizer step of %d samples fills %.0f %% of %s x %d tokens: token_budget could be smaller, or "
            "global_batch_size larger",
            size,
            100 * filled,
            _count(loader.world_size, "rank"),
            config.token_budget,
        )


def say_what_differs(trainer: Any, *, counts_tokens: bool) -> None:
    """Of the model and its loss what a user would not expect. counts_tokens: the loss is a mean over tokens."""
    random = list(_dropouts(trainer.model))
    if random:
        name, rate = random[0]
        more = f" and {len(random) - 1} more" if len(random) > 1 else ""
        logger.info(
            "dropout is active in the model (%s: %g%s): its random masks are drawn for each micro-batch, so losses "
            "differ from stock's as with another seed",
            name,
            rate,
            more,
        )
    loss = TrainerLoss.of(trainer) if counts_tokens else None
    if loss is not None and not loss.shifts:
        logger.warning(
            "label_smoothing_factor: %g: transformers compares each token of a %s with its own label in place of the "
            "next one, in stock training too; set it to 0",
            trainer.args.label_smoothing_factor,
            type(unwrapped(trainer.model)).__name__,
        )


def _dropouts(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Name and rate of all that draws random masks in training; attention modules keep theirs as a number."""
    for name, module in model.named_modules():
        keys = ("p",) if isinstance(module, _DropoutNd) else DROPOUT_OF_ATTENTION
        rates = [vars(module).get(key) for key in keys]
        yield from [(name, rate) for rate in rates if isinstance(rate, float) and rate > 0][:1]


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _ranks(world_size: int) -> str:
    return "one rank" if world_size == 1 else f"each of {world_size} ranks"
