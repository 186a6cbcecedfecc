"""Round a padded micro-batch up to the sizes that were planned: longer rows, and rows without labels behind them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from odb_factory.data.layout import is_per_token, text_token
from odb_factory.data.measure import IGNORE_INDEX, batch_shape
from odb_factory.data.segments import LayoutError
from odb_factory.planning import Budget


@dataclass(frozen=True, slots=True)
class PaddedLayout:
    """budget: whose sizes rows and row lengths are rounded up to."""

    budget: Budget


def pad_to_sizes(batch: Mapping[str, Any], layout: PaddedLayout) -> tuple[Mapping[str, Any], int]:
    """The batch [rows, length] with rows and row length as its budget has them, and how many rows were added.

    What is added is text without labels: the attention mask is 0 there, but for the first token of an added row, for
    attention over nothing is not a number. Position ids go on counting, so that no row looks like several.
    Raises `LayoutError` where the batch has what cannot be made longer. Where nothing is missing it stays as it is.

        longer, added = pad_to_sizes(collator(items), PaddedLayout(Budget(64, sizes=Sizes(buckets=(32, 64), limit=64))))
    """
    rows, length = batch_shape(batch)
    to_length = layout.budget.sizes.up(length)
    more_rows, more = layout.budget.rows_of(rows, to_length) - rows, to_length - length
    if not more_rows and not more:
        return batch, 0
    padded: MutableMapping[str, Any] = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
    for key, value in batch.items():
        if key == "position_ids" and isinstance(value, Tensor) and value.dim() > 1:
            padded[key] = _positions(value, more_rows if value.shape[-2] == rows else 0, more)
        elif key == "attention_mask" and _shape_of(value) != (rows, length):
            raise LayoutError(
                f"odb.length_buckets: the collator's `attention_mask` has the shape {list(_shape_of(value))}, which is "
                "not that of `input_ids`, so rows cannot be made longer; leave length_buckets and row_multiple out."
            )
        elif is_per_token(key, value, rows, length):
            fill = {"input_ids": text_token(batch), "labels": IGNORE_INDEX}.get(key, 0)
            padded[key] = functional.pad(value, (0, 0) * (value.dim() - 2) + (0, more, 0, more_rows), value=fill)
    if more_rows and "attention_mask" in padded:
        padded["attention_mask"][rows:, 0] = 1
    return padded, more_rows


def _positions(ids: Tensor, more_rows: int, more: int) -> Tensor:
    """[..., rows, length] -> [..., rows + more_rows, length + more]"""
    counting = torch.arange(1, more + 1, dtype=ids.dtype, device=ids.device)
    ids = torch.cat([ids, ids[..., -1:] + counting], -1)
    restarting = torch.arange(ids.shape[-1], dtype=ids.dtype, device=ids.device)
    return torch.cat([ids, restarting.expand(*ids.shape[:-2], more_rows, -1)], -2)


def _shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()
