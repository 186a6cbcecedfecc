"""Step efficiency where the optimizer batch is kept: N samples are cut into micro-steps, whatever that takes.

Beside it the bound that no cut can beat, padded or not: a rank has at least the mean load of all, or the longest
sample, and a micro-step at most the token budget. The same of patches, for which ranks wait in the vision tower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from simulation import draw

from odb_factory.dry_run.efficiency import least_time
from odb_factory.planning import Budget, BufferMetadata, MicroStepTotals, plan_optimizer_step

KEEP, KEEP_PER_RANK, BOUND = "odb, keep", "odb, keep, `balance: false`", "bound"
KEEP_FLAT, KEEP_FLAT_PER_RANK = "odb, keep, flat", "odb, keep, flat, `balance: false`"
PLANS: dict[str, dict[str, Any]] = {
    KEEP: {"layout": "padded", "balance": True},
    KEEP_PER_RANK: {"layout": "padded", "balance": False},
    KEEP_FLAT: {"layout": "flat", "balance": True},
    KEEP_FLAT_PER_RANK: {"layout": "flat", "balance": False},
}


def optimizer_steps(
    workload: str, ranks: int, batch_size: int, count: int, seed: int, image_share: float = 0.0
) -> Iterator[list[np.ndarray]]:
    """`count` optimizer steps of `batch_size` samples: of each rank its share, as `ROW`."""
    share, rest = divmod(batch_size, ranks)
    if rest:
        raise ValueError(f"{batch_size} samples cannot be shared evenly by {ranks} ranks")
    samples = draw(workload, ranks, share * count, seed, image_share)
    for k in range(count):
        yield [rows[k * share : (k + 1) * share] for rows in samples]


def planned(shares: Sequence[np.ndarray], budget: Budget, *, layout: str, balance: bool) -> list[MicroStepTotals]:
    buffers = [BufferMetadata(rows, exhausted=False) for rows in shares]
    return plan_optimizer_step(buffers, replace(budget, layout=layout), balance=balance).totals


def least(shares: Sequence[np.ndarray], budget: Budget, fixed: int) -> float:
    """The bound."""
    tokens = np.concatenate([rows["tokens"] for rows in shares])
    return least_time(tokens, len(shares), budget.token_budget, fixed)


def least_patches(shares: Sequence[np.ndarray]) -> float:
    """The bound of patches."""
    load = sum(int(rows["patches"].sum()) for rows in shares) / len(shares)
    return max(load, *(int(rows["patches"].max()) for rows in shares))


def efficiencies(
    workload: str,
    ranks: int,
    batch_size: int,
    budget: Budget,
    fixed: int,
    count: int,
    seeds: int,
    image_share: float = 0.0,
) -> dict[str, dict[str, float]]:
    """Of each plan and of the bound, in tokens: real ones / (ranks x what is spent), fixed costs included.

    With images also in patches: those of all ranks / (ranks x the most of any rank). Means over `seeds` draws of
    `count` optimizer steps each.
    """
    reached = {name: {"tokens": 0.0, "patches": 0.0} for name in (*PLANS, BOUND)}
    for seed in range(seeds):
        steps = list(optimizer_steps(workload, ranks, batch_size, count, seed, image_share))
        load, patches = (
            sum(int(rows[name].sum()) for shares in steps for rows in shares) / ranks / seeds
            for name in ("tokens", "patches")
        )
        for name, plan in PLANS.items():
            totals = [one for shares in steps for one in planned(shares, budget, **plan)]
            reached[name]["tokens"] += load / sum(fixed + one.max_rank_tokens for one in totals)
            reached[name]["patches"] += patches / max(sum(one.max_rank_patches for one in totals), 1)
        reached[BOUND]["tokens"] += load / sum(least(shares, budget, fixed) for shares in steps)
        reached[BOUND]["patches"] += patches / max(sum(least_patches(shares) for shares in steps), 1)
    return reached
