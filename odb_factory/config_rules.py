"""Check what keys of the `odb:` block say together. Standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from odb_factory.errors import ConfigError

if TYPE_CHECKING:
    from odb_factory.config import ODBConfig


def check_together(config: ODBConfig) -> None:
    """Raise a one-line `ConfigError` for keys that speak against each other. Each of them alone has been checked."""
    _check_sizes(config)
    if config.oom == "split" and config.row_multiple > 1:
        raise ConfigError(
            f"odb.oom: 'split' cuts micro-batches to save memory, and `row_multiple: {config.row_multiple}` would fill "
            "up the rows of their parts; leave one of both out."
        )
    if config.keeps:
        _check_kept(config)
    elif config.loss_scaling == "stock":
        raise ConfigError(
            "odb.loss_scaling: 'stock' weighs tokens as in the optimizer steps of stock training, which "
            "`global_batch_size: fill` does not keep; choose exact, or keep them."
        )
    if config.balance and not config.join:
        raise ConfigError(
            "odb.balance: with `join: false` the epoch ends when one rank runs short, and balanced ranks run short "
            "together; set `join: true`, or leave balance out."
        )
    if config.lr_scale != "none" and config.lr_reference_samples is None:
        raise ConfigError(
            f"odb.lr_scale: {config.lr_scale!r} needs a batch to scale from; set `lr_reference_samples` to the "
            "samples of an optimizer step for which learning_rate was chosen, or leave lr_scale out."
        )


def _check_sizes(config: ODBConfig) -> None:
    """The sizes that micro-batches are filled up to fit the budget, the layout and each other."""
    if config.layout == "padded" and config.pad_to_multiple_of is not None:
        raise ConfigError(
            f"odb.pad_to_multiple_of: {config.pad_to_multiple_of} has no effect with `layout: padded`, whose rows "
            "are padded as the data collator says; leave it out, or set `layout: flat`."
        )
    if isinstance(config.token_budget, int) and (config.pad_to_multiple_of or 1) > config.token_budget:
        raise ConfigError(
            f"odb.pad_to_multiple_of: {config.pad_to_multiple_of} is more than token_budget ({config.token_budget}), "
            "which every flat micro-batch would break; choose a smaller multiple, or raise token_budget."
        )
    if config.row_multiple > 1 and config.layout == "flat":
        raise ConfigError(
            f"odb.row_multiple: {config.row_multiple} has no effect with `layout: flat`, whose micro-batches are one "
            "row; leave it out, or set length_buckets."
        )
    if config.length_buckets is None:
        return
    multiple, largest = config.pad_to_multiple_of or 1, config.length_buckets[-1]
    if isinstance(config.token_budget, int) and largest > config.token_budget:
        raise ConfigError(
            f"odb.length_buckets: {largest} is more than token_budget ({config.token_budget}), which nothing that is "
            "filled up to it would keep; leave it out, or raise token_budget."
        )
    if wrong := [size for size in config.length_buckets if size % multiple]:
        raise ConfigError(
            f"odb.length_buckets: {wrong[0]} is no multiple of pad_to_multiple_of ({multiple}); choose multiples, "
            "or leave one of the keys out."
        )


def _check_kept(config: ODBConfig) -> None:
    """What has a meaning with `fill` only."""
    if not config.join:
        raise ConfigError(
            "odb.join: false ends an epoch when one rank runs short, and kept optimizer steps have all samples; "
            "leave it out, or set `global_batch_size: fill`."
        )
    if config.lr_scale != "none":
        raise ConfigError(
            f"odb.lr_scale: {config.lr_scale!r} has no effect on kept optimizer steps, which have the samples that "
            "learning_rate was chosen for; leave it out, or set `global_batch_size: fill`."
        )
