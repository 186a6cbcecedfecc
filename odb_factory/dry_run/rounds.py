"""Epochs of `global_batch_size: fill`, round by round, without a training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from odb_factory.planning import Budget, BufferMetadata, CostModel, Plan, plan_buffers


@dataclass(frozen=True)
class Round:
    windows: list[BufferMetadata]
    plan: Plan


def rounds(
    samples: Sequence[np.ndarray],
    budget: Budget,
    buffer_size: int,
    *,
    balance: bool = False,
    join: bool = True,
    accumulation: int = 1,
    model: CostModel = CostModel(),
    endless: bool = False,
    seed: int = 0,
) -> Iterator[Round]:
    """One epoch over the samples of each rank (as `ROW`); endless: from the beginning again, without end.

    buffer_size: samples that a rank holds.
    """
    held = [rows[:0] for rows in samples]
    drawn = [0] * len(samples)
    round_index = 0
    final = False
    while not final:
        for rank, rows in enumerate(samples):
            wanted = drawn[rank] + np.arange(buffer_size - len(held[rank]))
            fresh = rows[wanted % len(rows)] if endless else rows[wanted[wanted < len(rows)]]
            drawn[rank] += len(fresh)
            held[rank] = np.concatenate([held[rank], fresh])
        windows = [
            BufferMetadata(rows, not endless and drawn[rank] == len(samples[rank])) for rank, rows in enumerate(held)
        ]
        plan = plan_buffers(
            windows,
            budget,
            seed=seed,
            epoch=0,
            round_index=round_index,
            accumulation=accumulation,
            join=join,
            balance=balance,
            model=model,
        )
        yield Round(windows, plan)
        gone = np.zeros(sum(map(len, held)), bool)
        for groups in plan.groups:
            for group in groups:
                gone[group] = True
        for rank, (start, end) in enumerate(zip(plan.starts, plan.starts[1:])):
            held[rank] = held[rank][~gone[start:end]]
            held[rank]["age"] = np.minimum(held[rank]["age"], 254) + 1
        round_index, final = round_index + 1, plan.final
