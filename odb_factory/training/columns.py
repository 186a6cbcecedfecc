"""Columns that the Trainer removes before odb would see them, though a cost is counted from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets

from odb_factory.data.components import DataLoaderParts, unwrap
from odb_factory.data.items import PATCHES_KEY


class KeepColumns:
    """A collator that is given the columns which the Trainer would have left."""

    def __init__(self, collate_fn: Callable, columns: Sequence[str]):
        self.collate_fn, self.columns = collate_fn, tuple(columns)

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> Any:
        return self.collate_fn([{key: item[key] for key in self.columns if key in item} for item in items])


def are_needed(stock: Any, train_dataset: Any, cost_fn: Callable | None) -> bool:
    """Whether `stock`, the Trainer's DataLoader, lacks columns of `train_dataset` that costs are counted from."""
    found = unwrap(stock).dataset
    if not isinstance(found, datasets.Dataset) or not isinstance(train_dataset, datasets.Dataset):
        return False
    removed = set(train_dataset.column_names) - set(found.column_names)
    return PATCHES_KEY in removed or (cost_fn is not None and bool(removed))


def with_columns_of(whole: DataLoaderParts, stock: Any) -> DataLoaderParts:
    """`whole`, which has all columns, with a collator that gets those of `stock` alone."""
    kept: Any = unwrap(stock).dataset
    return dataclasses.replace(whole, collate_fn=KeepColumns(whole.collate_fn, kept.column_names))
