"""The quality of plans: optimizer steps of 1 to 256 ranks beside what no plan can undercut (see `lower_bounds`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from lower_bounds import flat_bound, padded_bound
from plan_checks import planned, step_costs

from odb_factory.planner import Budget, Cost

BUDGET = 16384
Lengths = Callable[[np.random.Generator, int], np.ndarray]


def log_normal(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.lognormal(rng.uniform(5.5, 8), rng.uniform(0.5, 1.5), count)


def one_giant(rng: np.random.Generator, count: int) -> np.ndarray:
    others = np.minimum(log_normal(rng, max(count - 1, 0)), BUDGET)
    return np.append(others, rng.choice([1, 2, 20]) * BUDGET)[:count]


def parts_of_a_bin(rng: np.random.Generator, count: int) -> np.ndarray:
    """All lengths are close to a half, a third, a quarter or a fifth of the budget."""
    part = BUDGET // rng.integers(2, 6)
    return rng.integers(part - BUDGET // 50, part + BUDGET // 50, count)


KINDS: list[Lengths] = [
    log_normal,
    # Many samples are truncated to the budget.
    lambda rng, n: np.where(rng.random(n) < rng.uniform(0, 0.5), BUDGET, log_normal(rng, n)),
    one_giant,
    # All alike.
    lambda rng, n: np.full(n, rng.integers(BUDGET // 40, BUDGET + 1)),
    # A heavy tail.
    lambda rng, n: 50 * rng.uniform(1, 10) * (1 + rng.pareto(1.1, n)),
    # Uniform.
    lambda rng, n: rng.integers(1, BUDGET // rng.choice([1, 2, 4]) + 1, n),
    # Short ones and long ones.
    lambda rng, n: np.where(rng.random(n) < 0.7, rng.lognormal(6, 0.8, n), rng.lognormal(8.6, 0.6, n)),
    parts_of_a_bin,
    # Two lengths.
    lambda rng, n: np.where(rng.random(n) < rng.random(), *rng.integers(1, BUDGET + 1, 2)),
]
SHAPES = [(1, 32), (2, 61), (4, 16), (8, 8), (8, 32)]
MORE_SHAPES = [(16, 16), (16, 61), (32, 32), (64, 16), (64, 24), (256, 24)]
"""(ranks, samples a rank)."""
TABLE = {"flat": (flat_bound, 0.995, 0.95), "padded": (padded_bound, 0.945, 0.73)}
"""Least mean, and least, of bound / cost. The bound of padded plans leaves out that ranks wait for each other."""


def ratio_of(seed: int, kind: Lengths, num_ranks: int, per_rank: int, layout: str) -> float:
    """Bound / cost of an optimizer step of about `per_rank` samples a rank."""
    rng = np.random.default_rng([seed, KINDS.index(kind), 0, num_ranks])
    count = num_ranks * per_rank + int(rng.integers(0, num_ranks + 1))
    lengths = np.clip(kind(rng, count), 1, 20 * BUDGET if kind is one_giant else BUDGET).astype(np.int64)
    world = [[Cost(length) for length in lengths[rank::num_ranks].tolist()] for rank in range(num_ranks)]
    cost = sum(step_costs(planned(world, Budget(BUDGET, layout=layout), balance=True)))
    return TABLE[layout][0](lengths, BUDGET, num_ranks) / cost


@pytest.mark.parametrize("shapes", [SHAPES, pytest.param(MORE_SHAPES, marks=pytest.mark.nightly)], ids=["few", "many"])
@pytest.mark.parametrize("layout", TABLE)
def test_no_plan_could_cost_much_less(layout: str, shapes: list[tuple[int, int]]) -> None:
    """I7 as a figure: the cost of plans beside what no plan can undercut, for nine kinds of lengths."""
    cells = itertools.product(range(1 if shapes is SHAPES else 2), KINDS, shapes)
    ratios = [ratio_of(seed, kind, *shape, layout) for seed, kind, shape in cells]
    _, least_mean, least = TABLE[layout]
    assert max(ratios) <= 1, "the bound is one"
    assert np.mean(ratios) >= least_mean and min(ratios) >= least, (np.mean(ratios), min(ratios))
