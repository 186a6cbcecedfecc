"""Optimizer steps: random samples, cut at random over ranks and micro-steps."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from toy import a_micro_batch

from odb_factory.data.samples import Measured, MicroBatch, SampleInfo
from odb_factory.planner import Media

Slots = list[list[list[int]]]
"""[rank][micro-step] -> numbers of samples; some are idle."""


@dataclass(frozen=True)
class Row:
    """A sample: its tokens, its supervised tokens, whether its first label is one, and stock's rank and micro-batch."""

    tokens: int
    supervised: int
    leading: bool
    stock_rank: int
    stock_micro_batch: int

    @property
    def stock_labels(self) -> int:
        return self.supervised + self.leading


def random_rows(rng: random.Random, num_rows: int) -> list[Row]:
    """Of micro-batches of three, which stock deals to two ranks in turn."""
    rows = []
    for k in range(num_rows):
        supervised = rng.randrange(1, 40)
        rows.append(Row(supervised + rng.randrange(1, 30), supervised, rng.random() < 0.5, k // 3 % 2, k // 3))
    return rows


def cut(rng: random.Random, num_rows: int, world_size: int, micro_batches: int) -> Slots:
    slots: Slots = [[[] for _ in range(micro_batches)] for _ in range(world_size)]
    for k in range(num_rows):
        rng.choice(rng.choice(slots)).append(k)
    return slots


def optimizer_step(rows: list[Row], slots: Slots, *, stock_mean: str) -> list[list[MicroBatch]]:
    """[rank][micro-step], as the loader of each rank hands them out. stock_mean: what stock takes a mean over."""
    mean_of: dict[str, Any] = {
        "step": lambda row: 0,
        "rank": lambda row: row.stock_rank,
        "micro_batch": lambda row: row.stock_micro_batch,
    }
    units = Counter[int]()
    for row in rows:
        units[mean_of[stock_mean](row)] += row.supervised if stock_mean == "micro_batch" else row.stock_labels
    some = a_micro_batch()
    step = replace(
        some.step,
        num_micro_batches=len(slots[0]),
        num_stock_means=len(units),
        samples=len(rows),
        units=sum(row.supervised for row in rows),
        tokens=sum(row.tokens for row in rows),
        active_ranks=sum(bool(numbers) for rank in slots for numbers in rank),
    )
    samples = [SampleInfo(k, row.tokens, row.supervised, units[mean_of[stock_mean](row)]) for k, row in enumerate(rows)]
    return [
        [
            replace(some, step=step, index=index, samples=tuple(samples[k] for k in numbers))
            for index, numbers in enumerate(rank)
        ]
        for rank in slots
    ]


def measured(micro_batch: MicroBatch, length: int) -> Measured:
    """The tensors of a collator that pads to `length`."""
    return Measured(max(len(micro_batch.ids), 1), length, Media(), micro_batch.num_units)
