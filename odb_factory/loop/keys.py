"""The keys of `ODBConfig` as typed keyword arguments, for type checkers and completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


class CommonKeys(TypedDict, total=False):
    """Keys that mean the same everywhere."""

    global_batch_size: int | Literal["keep", "fill"]
    layout: Literal["auto", "flat", "padded"]
    pad_to_multiple_of: int | None
    length_buckets: Sequence[int] | None
    row_multiple: int
    buffer_size: int
    collate_workers: int | None
    join: bool
    balance: bool | None
    balance_group_size: int
    cost_model: Literal["tokens", "time"]
    overlong: Literal["singleton", "drop", "error"]
    on_error: Literal["raise", "skip"]
    resume: Literal["strict", "ignore_data"]
    exchange_timeout_s: int
    seed: int | None


class LoopKeys(CommonKeys, total=False):
    """Keys with an effect in a training loop of one's own; there loss_scaling is `exact` unless given."""

    token_budget: int
    max_patches: int | None
    loss_scaling: Literal["exact", "sample", "square", "approx", "none"]


class TrainerKeys(CommonKeys, total=False):
    """All keys: those of a loop, and those that only a trainer can honour."""

    token_budget: int | Literal["auto"]
    max_patches: int | Literal["auto"] | None
    memory_fraction: float
    loss_scaling: Literal["stock", "exact", "sample", "square", "approx", "none"]
    lr_scale: Literal["none", "sqrt", "linear"]
    oom: Literal["raise", "split"]
    lr_reference_samples: int | None
    audit: bool
