"""Optimizer steps to account for: random samples, cut at random over ranks and micro-steps."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from odb_factory.data.samples import Measured, MicroBatch, OptimizerStep, SampleInfo
from odb_factory.planning import Media, MicroStepTotals


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


def random_rows(rng: random.Random, num_rows: int, *, stock_rows: int = 3, stock_ranks: int = 2) -> list[Row]:
    """stock_rows: rows of stock's micro-batches, which are dealt to its ranks in turn."""
    rows = []
    for k in range(num_rows):
        supervised = rng.randrange(1, 40)
        batch = k // stock_rows
        rows.append(Row(supervised + rng.randrange(1, 30), supervised, rng.random() < 0.5, batch % stock_ranks, batch))
    return rows


def cut(rng: random.Random, num_rows: int, world_size: int, micro_batches: int) -> list[list[list[int]]]:
    """[rank][micro-step] -> ids; some are idle."""
    slots: list[list[list[int]]] = [[[] for _ in range(micro_batches)] for _ in range(world_size)]
    for k in range(num_rows):
        slots[rng.randrange(world_size)][rng.randrange(micro_batches)].append(k)
    return slots


def optimizer_step(
    rows: list[Row],
    slots: list[list[list[int]]],
    *,
    stock_mean: str = "step",
    epoch: int = 0,
    index: int = 0,
    last: bool = False,
    **changes: Any,
) -> list[list[MicroBatch]]:
    """[rank][micro-step] -> micro-batch, as the loader of each rank hands them out."""
    micro_batches = len(slots[0])
    groups = Counter[Any]()
    of_row = {
        "step": lambda row: 0,
        "rank": lambda row: row.stock_rank,
        "micro_batch": lambda row: row.stock_micro_batch,
    }
    group_of = of_row[stock_mean]
    for row in rows:
        groups[group_of(row)] += row.supervised if stock_mean == "micro_batch" else row.stock_labels
    totals = [_totals([[rows[i] for i in rank[k]] for rank in slots]) for k in range(micro_batches)]
    step = OptimizerStep(
        epoch=epoch,
        index=index,
        num_micro_batches=micro_batches,
        active_ranks=sum(bool(ids) for rank in slots for ids in rank),
        samples=len(rows),
        tokens=sum(row.tokens for row in rows),
        padded_tokens=sum(one.padded_tokens for one in totals),
        units=sum(row.supervised for row in rows),
        num_stock_means=len(groups),
        stock_input_tokens=None,
        done=(index + 1) * len(rows),
        progress=None,
        **{"rejected": Counter(), "overlong": 0, "remainder": 0, "epoch_steps": 0, "last": last} | changes,
    )
    return [
        [
            MicroBatch(
                step=step,
                index=k,
                samples=tuple(
                    SampleInfo(i, rows[i].tokens, rows[i].supervised, stock_units=groups[group_of(rows[i])])
                    for i in ids
                ),
                totals=totals[k],
            )
            for k, ids in enumerate(slots[r])
        ]
        for r in range(len(slots))
    ]


def measured(micro_batch: MicroBatch, length: int) -> Measured:
    """The tensors of a collator that pads to `length`."""
    return Measured(max(len(micro_batch.ids), 1), length, Media(), micro_batch.num_units)


def _totals(groups: list[list[Row]]) -> MicroStepTotals:
    padded = [len(group) * max((row.tokens for row in group), default=0) for group in groups]
    return MicroStepTotals(
        samples=sum(map(len, groups)),
        tokens=sum(row.tokens for group in groups for row in group),
        padded_tokens=sum(padded),
        units=sum(row.supervised for group in groups for row in group),
        active_ranks=sum(map(bool, groups)),
        max_rank_tokens=max(padded),
    )
