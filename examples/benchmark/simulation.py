"""Epochs in simulation: lengths and patches as real data have them, planned by the planner of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from odb_factory.planning import ROW, Budget, BufferMetadata, CostModel, Plan, plan_buffers

SHORTEST, LONGEST = 16, 8192
PATCHES_PER_TOKEN = 4
"""The vision tower merges 2 x 2 patches into one token."""

Draw = Callable[[np.random.Generator, int], np.ndarray]


def lognormal(mean: float, cv: float) -> Draw:
    """Lengths with this mean (tokens) and coefficient of variation."""
    sigma = np.sqrt(np.log(1 + cv**2))
    return lambda rng, count: rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)


def mm_mix(rng: np.random.Generator, count: int) -> np.ndarray:
    """80 % short answers, 20 % pages."""
    long = rng.random(count) < 0.2
    return np.where(long, rng.lognormal(np.log(2500), 0.5, count), rng.lognormal(np.log(150), 0.35, count))


WORKLOADS: dict[str, Draw] = {
    "UltraChat": lognormal(1100, 0.48),
    "LLaVA": lognormal(700, 0.29),
    "ShareGPT4o": lognormal(900, 1.00),
    "MM-Mix": mm_mix,
}


def draw(workload: str, ranks: int, samples: int, seed: int = 0, image_share: float = 0.0) -> list[np.ndarray]:
    """Of each rank, its `samples` samples in the order of draws, as `ROW`.

    image_share: this part of them has an image, which makes between a tenth and nine tenths of their tokens.
    """
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(ranks):
        rows = np.zeros(samples, ROW)
        rows["tokens"] = np.clip(WORKLOADS[workload](rng, samples), SHORTEST, LONGEST)
        rows["units"] = rows["tokens"] // 2
        if image_share:
            rows["has_media"] = rng.random(samples) < image_share
            part = rng.uniform(0.1, 0.9, samples) * rows["has_media"]
            rows["patches"] = (rows["tokens"] * part).astype(int) * PATCHES_PER_TOKEN
        drawn.append(rows)
    return drawn


@dataclass(frozen=True)
class Round:
    windows: list[BufferMetadata]
    plan: Plan


def rounds(
    samples: Sequence[np.ndarray],
    budget: Budget,
    window: int,
    *,
    balance: bool = False,
    model: CostModel = CostModel(),
    endless: bool = False,
) -> Iterator[Round]:
    """One epoch over the samples of each rank; endless: from the beginning again, without end."""
    held = [rows[:0] for rows in samples]
    drawn = [0] * len(samples)
    round_index = 0
    final = False
    while not final:
        for rank, rows in enumerate(samples):
            wanted = drawn[rank] + np.arange(window - len(held[rank]))
            fresh = rows[wanted % len(rows)] if endless else rows[wanted[wanted < len(rows)]]
            drawn[rank] += len(fresh)
            held[rank] = np.concatenate([held[rank], fresh])
        windows = [
            BufferMetadata(rows, not endless and drawn[rank] == len(samples[rank])) for rank, rows in enumerate(held)
        ]
        plan = plan_buffers(
            windows,
            budget,
            seed=0,
            epoch=0,
            round_index=round_index,
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
