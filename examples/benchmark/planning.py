"""How good the plan is: step efficiency of whole epochs, in simulation, with the planner that a training uses.

Step efficiency = real tokens / (ranks x sum over steps of (largest padded tokens of any rank in that step + c0)): it
counts padding, part-filled groups, ranks that wait for each other, and the fixed cost of a step (c0 = 500 tokens).

    python examples/benchmark/planning.py                       # 8 ranks
    python examples/benchmark/planning.py --ranks 64 --samples 6000 --output planning.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from odb_factory.batching import Budget, Cost, align, make_offer

FIXED_COST = 500
"""Tokens that the fixed cost of a step is worth."""
SHORTEST, LONGEST = 16, 8192
TOKEN_BUDGET, WINDOW = 16384, 1024
BATCH_SIZE = 8

Lengths = list[np.ndarray]
"""Of each rank, its samples in the order of draws (tokens)."""


def lognormal(mean: float, cv: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    sigma = np.sqrt(np.log(1 + cv**2))
    return lambda rng, count: rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)


def mm_mix(rng: np.random.Generator, count: int) -> np.ndarray:
    """80 % short answers, 20 % pages."""
    long = rng.random(count) < 0.2
    return np.where(long, rng.lognormal(np.log(2500), 0.5, count), rng.lognormal(np.log(150), 0.35, count))


WORKLOADS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "UltraChat": lognormal(1100, 0.48),
    "LLaVA": lognormal(700, 0.29),
    "ShareGPT4o": lognormal(900, 1.00),
    "MM-Mix": mm_mix,
}


def draw(workload: str, ranks: int, samples: int, seed: int = 0) -> Lengths:
    rng = np.random.default_rng(seed)
    return [np.clip(WORKLOADS[workload](rng, samples), SHORTEST, LONGEST).astype(int) for _ in range(ranks)]


def efficiency(lengths: Lengths, steps: Sequence[int]) -> float:
    """steps: the largest padded tokens of any rank, of each step."""
    real = sum(int(mine.sum()) for mine in lengths)
    return real / (len(lengths) * (sum(steps) + FIXED_COST * len(steps)))


def fixed_batch(lengths: Lengths) -> list[int]:
    """Batches of `BATCH_SIZE` in the order of draws."""
    columns = [_padded(mine.reshape(-1, BATCH_SIZE)) for mine in lengths]
    return np.max(columns, axis=0).tolist()


def length_grouped(lengths: Lengths) -> list[int]:
    """All samples known beforehand: sorted within mega-batches of 50 batches of all ranks, as the Trainer does."""
    ranks = len(lengths)
    together = np.stack(lengths, axis=1).reshape(-1)
    mega = BATCH_SIZE * ranks * 50
    ordered = np.concatenate([np.sort(together[k : k + mega])[::-1] for k in range(0, len(together), mega)])
    batches = _padded(ordered[: len(ordered) // (BATCH_SIZE * ranks) * BATCH_SIZE * ranks].reshape(-1, BATCH_SIZE))
    return batches.reshape(-1, ranks).max(axis=1).tolist()


def odb(lengths: Lengths, window: int = WINDOW) -> list[int]:
    """The production planner, round after round."""
    budget = Budget(TOKEN_BUDGET)
    costs = [[Cost(int(length), 0, int(length)) for length in mine] for mine in lengths]
    drawn = [0] * len(costs)
    held: list[list[Cost]] = [[] for _ in costs]
    ages: list[list[int]] = [[] for _ in costs]
    steps: list[int] = []
    final, round_index = False, 0
    while not final:
        formed = []
        for rank, mine in enumerate(costs):
            room = window - len(held[rank])
            fresh = mine[drawn[rank] : drawn[rank] + room]
            drawn[rank] += len(fresh)
            held[rank] += fresh
            ages[rank] += [0] * len(fresh)
            formed.append(make_offer(held[rank], ages[rank], drawn[rank] == len(mine), budget))
        plan = align([offer for _, offer in formed], seed=0, epoch=0, round_index=round_index, steps_before=len(steps))
        final, round_index = plan.final, round_index + 1
        for k in range(len(plan.totals)):
            chosen = [(offer, groups[k]) for (_, offer), groups in zip(formed, plan.groups)]
            steps.append(max(offer.groups[i].padded_tokens for offer, i in chosen if i is not None))
        for rank, ((groups, _), chosen) in enumerate(zip(formed, plan.groups)):
            gone = {i for index in chosen if index is not None for i in groups[index]}
            ages[rank] = [age + 1 for i, age in enumerate(ages[rank]) if i not in gone]
            held[rank] = [cost for i, cost in enumerate(held[rank]) if i not in gone]
    return steps


WAYS: dict[str, Callable[[Lengths], list[int]]] = {
    "fixed batch of 8": fixed_batch,
    "length-grouped, batch of 8": length_grouped,
    "odb": odb,
}


def _padded(batches: np.ndarray) -> np.ndarray:
    return batches.max(axis=1) * batches.shape[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--samples", type=int, default=6000, help="of each rank")
    parser.add_argument("--output", type=Path, help="also write the figures as JSON")
    given = parser.parse_args()
    table: dict[str, dict[str, float]] = {}
    for name, way in WAYS.items():
        table[name] = {}
        for workload in WORKLOADS:
            lengths = draw(workload, given.ranks, given.samples)
            table[name][workload] = round(efficiency(lengths, way(lengths)), 4)
    print(f"| {given.ranks} ranks | {' | '.join(WORKLOADS)} |\n|---|{'--:|' * len(WORKLOADS)}")
    for name, row in table.items():
        print(f"| {name} | {' | '.join(f'{value:.3f}' for value in row.values())} |")
    if given.output:
        given.output.write_text(json.dumps({"ranks": given.ranks, "efficiency": table}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
