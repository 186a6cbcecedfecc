"""Step efficiency where the optimizer batch is kept: N samples are cut into micro-steps, whatever that takes.

Beside it the bound that no cut can beat, padded or not: a rank has at least the mean load of all, or the longest
sample, and a micro-step at most the token budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from simulation import draw

from odb_factory.planning import Budget, BufferMetadata, plan_optimizer_step

KEEP, KEEP_PER_RANK, BOUND = "odb, keep", "odb, keep, `balance: false`", "bound"


def optimizer_steps(workload: str, ranks: int, batch_size: int, count: int, seed: int) -> Iterator[list[np.ndarray]]:
    """`count` optimizer steps of `batch_size` samples: of each rank its share, as `ROW`."""
    share, rest = divmod(batch_size, ranks)
    if rest:
        raise ValueError(f"{batch_size} samples cannot be shared evenly by {ranks} ranks")
    samples = draw(workload, ranks, share * count, seed)
    for k in range(count):
        yield [rows[k * share : (k + 1) * share] for rows in samples]


def spent(shares: Sequence[np.ndarray], budget: Budget, fixed: int, *, balance: bool) -> int:
    """What the costliest ranks of all micro-steps cost, in tokens."""
    plan = plan_optimizer_step([BufferMetadata(rows, exhausted=False) for rows in shares], budget, balance=balance)
    return sum(fixed + step.max_rank_tokens for step in plan.totals)


def least(shares: Sequence[np.ndarray], budget: Budget, fixed: int) -> float:
    """The bound."""
    load = sum(int(rows["tokens"].sum()) for rows in shares) / len(shares)
    longest = max(int(rows["tokens"].max()) for rows in shares)
    return max(load, longest) + fixed * -(-load // budget.token_budget)


def efficiencies(
    workload: str, ranks: int, batch_size: int, budget: Budget, fixed: int, count: int, seeds: int
) -> dict[str, float]:
    """Real tokens / (ranks x what is spent), the mean over `seeds` draws of `count` optimizer steps each."""
    reached = {KEEP: 0.0, KEEP_PER_RANK: 0.0, BOUND: 0.0}
    for seed in range(seeds):
        steps = list(optimizer_steps(workload, ranks, batch_size, count, seed))
        load = sum(int(rows["tokens"].sum()) for shares in steps for rows in shares) / ranks
        for name, balance in ((KEEP, True), (KEEP_PER_RANK, False)):
            reached[name] += load / sum(spent(shares, budget, fixed, balance=balance) for shares in steps) / seeds
        reached[BOUND] += load / sum(least(shares, budget, fixed) for shares in steps) / seeds
    return reached
