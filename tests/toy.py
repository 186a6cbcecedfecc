"""Samples whose token ids identify their row: datasets, a collator and the core's loader, which worker processes of any
start method can import."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import Dataset, IterableDataset

from odb_factory.config import ODBConfig
from odb_factory.data.loader import ODBLoader
from odb_factory.data.observe import MediaCut, RowDropped
from odb_factory.data.order import DataLoaderParts, OptimizerStepRule
from odb_factory.data.samples import MicroBatch, OptimizerStep, SampleInfo
from odb_factory.planner import Cost, MicroStepTotals

NUM_ROWS = 60


def item(k: int) -> dict[str, Any]:
    """Row k: 2 to 40 copies of the id k + 1, which identifies the row in a batch."""
    ids = [k + 1] * (2 + k * 7 % 39)
    return {"input_ids": ids, "labels": ids}


class Rows(Dataset):
    """A dataset whose item k is `make(k)`."""

    def __init__(self, make: Any = item, num_rows: int = NUM_ROWS):
        self.make, self.num_rows = make, num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, k: int) -> Any:
        return self.make(k)


class Opening(Rows):
    """A dataset that only one process may read, like an open file."""

    opened_by: int | None = None

    def __getitem__(self, k: int) -> Any:
        self.opened_by = self.opened_by or os.getpid()
        assert self.opened_by == os.getpid()
        return item(k)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return map(item, range(NUM_ROWS))


def pad(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate `input_ids` and `labels`, and drop all other keys."""
    rows = [np.asarray(item["input_ids"]).reshape(-1) for item in items]
    length = max(map(len, rows))
    padded = np.stack([np.pad(row, (0, length - len(row))) for row in rows])
    ids = torch.from_numpy(padded).long()
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}


# The loader of the core


def cost_of(size: int | Cost) -> Cost:
    """The cost of a row of `size` tokens, all of them supervised."""
    return size if isinstance(size, Cost) else Cost(size, 0, max(size - 1, 1))


class Observer:
    """Observer of rows (number, tokens or cost, fate): every id of row k is k + 1. A row without tokens is dropped."""

    def __call__(self, row: tuple[Any, ...]) -> tuple[dict[str, Any], Cost]:
        number, size, *fate = row
        match fate:
            case ["unreadable"]:
                raise OSError("image file is truncated\nat byte 17")
            case ["cut"]:
                raise MediaCut("cutoff_len 8 cuts its visual placeholders.")
        if not size:
            raise RowDropped("invalid", "it is empty")
        cost = cost_of(size)
        if fate == ["unsupervised"]:
            cost = replace(cost, units=0)
        ids = [number + 1] * cost.tokens
        return {"input_ids": ids, "labels": ids, "patches": cost.patches, "fate": "".join(fate)}, cost

    def describe(self, dataset: Any, index: int) -> str:
        return f"row {index}"


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """`pad`; raises the error that is the fate of a row."""
    fates = {item["fate"] for item in items}
    if "uncollatable" in fates:
        raise OSError("image file is truncated\nat byte 17")
    if "loner" in fates and len(items) > 1:
        raise ValueError("sizes differ")
    return pad(items)


@contextmanager
def core_loader(
    rows: Sequence[Any],
    *,
    stream: Any = None,
    shuffle: bool = False,
    seed: int = 7,
    resolved: str | None = None,
    **options: Any,
) -> Iterator[ODBLoader]:
    """`ODBLoader` over rows (rows of `Observer`, or only lengths), closed at the end.

    stream: an iterable dataset that replaces `rows`. resolved: the resolved `layout`. options: fields of `ODBConfig`
    (default: `fill`), `OptimizerStepRule` and `DataLoaderParts`, and arguments of `ODBLoader`.
    """

    def take(kind: Any) -> dict[str, Any]:
        return {key: options.pop(key) for key in kind.__dataclass_fields__ if key in options}

    config = {"token_budget": 100, "buffer_size": 8, "global_batch_size": "fill", "balance": False} | take(ODBConfig)
    rule = OptimizerStepRule(**take(OptimizerStepRule))
    parts: dict[str, Any] = {
        "dataset": [row if isinstance(row, tuple) else (k, row) for k, row in enumerate(rows)],
        "sampler": range(len(rows)),
        "collate_fn": collate,
    }
    if shuffle:
        parts["sampler"] = SeedableRandomSampler(rows, generator=torch.Generator(), data_seed=seed)  # type: ignore[arg-type]
    if stream is not None:
        parts |= {"dataset": stream, "sampler": None, "already_split": stream.is_split}
    parts |= take(DataLoaderParts)
    if parts.get("num_workers"):
        parts = {"multiprocessing_context": "fork"} | parts
    layout: Any = resolved or config.get("layout", "padded")
    defaults = {"observer": Observer(), "layout": layout, "rule": rule, "seed": seed}
    loader = ODBLoader(DataLoaderParts(**parts), ODBConfig(**config), **defaults | options)
    try:
        yield loader
    finally:
        loader.close()


def a_micro_batch(**changes: Any) -> MicroBatch:
    """A micro-batch of two samples: the only micro-batch of the only optimizer step of its epoch."""
    totals: dict[str, Any] = {"samples": 2, "tokens": 5, "padded_tokens": 6, "units": 3, "active_ranks": 1}
    place: dict[str, Any] = {"epoch": 0, "index": 0, "num_micro_batches": 1, "done": 2, "progress": 1.0, "last": True}
    place |= {"rejected": Counter(), "overlong": 0, "remainder": 0, "epoch_steps": 1}
    step = OptimizerStep(**totals, **place, num_stock_means=1, stock_input_tokens=6)
    columns = {"ids": (4, 7), "lengths": (2, 3), "units": (1, 2), "stock_units": (3, 3)}
    columns |= {key: changes.pop(key) for key in columns if key in changes}
    samples = tuple(SampleInfo(*row, stock) for *row, stock in zip(*columns.values()))
    return MicroBatch(**{"step": step, "index": 0, "samples": samples, "totals": MicroStepTotals(**totals)} | changes)
