"""Samples that tell what they are: datasets and a collator that worker processes of any start method can import."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from odb_factory.data.samples import MicroBatch, OptimizerStep, SampleInfo
from odb_factory.planning import MicroStepTotals

NUM_ROWS = 60


def item(k: int) -> dict[str, Any]:
    """Row k: 2 to 40 times the id k + 1, so that a batch tells what it is made of."""
    ids = [k + 1] * (2 + k * 7 % 39)
    return {"input_ids": ids, "labels": ids}


class Rows(Dataset):
    """`make(k)` is item k."""

    def __init__(self, make: Any = item, num_rows: int = NUM_ROWS):
        self.make, self.num_rows = make, num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, k: int) -> Any:
        return self.make(k)


class Opening(Rows):
    """Opens a file when it is read first, which no other process may read from."""

    opened_by: int | None = None

    def __getitem__(self, k: int) -> Any:
        self.opened_by = self.opened_by or os.getpid()
        assert self.opened_by == os.getpid()
        return item(k)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return map(item, range(NUM_ROWS))


def pad(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Knows two keys, and drops all others."""
    rows = [np.asarray(item["input_ids"]).reshape(-1) for item in items]
    length = max(map(len, rows))
    padded = np.stack([np.pad(row, (0, length - len(row))) for row in rows])
    ids = torch.from_numpy(padded).long()
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}


def a_micro_batch(**changes: Any) -> MicroBatch:
    """Two samples on one of the ranks, the only micro-batch of the only optimizer step of its epoch."""
    step = OptimizerStep(
        epoch=0,
        index=0,
        num_micro_batches=1,
        active_ranks=1,
        samples=2,
        tokens=5,
        padded_tokens=6,
        units=3,
        num_stock_means=1,
        stock_input_tokens=6,
        done=2,
        progress=1.0,
        rejected=Counter(),
        overlong=0,
        remainder=0,
        epoch_steps=1,
        last=True,
    )
    totals = MicroStepTotals(samples=2, tokens=5, padded_tokens=6, units=3, active_ranks=1)
    columns = {"ids": (4, 7), "lengths": (2, 3), "units": (1, 2), "stock_units": (3, 3)}
    columns |= {key: changes.pop(key) for key in columns if key in changes}
    samples = tuple(SampleInfo(*row, stock) for *row, stock in zip(*columns.values()))
    return MicroBatch(**{"step": step, "index": 0, "samples": samples, "totals": totals} | changes)
