"""The quality of plans: the cost of optimizer steps of 1 to 256 ranks, compared with independent lower bounds.

Every rank takes part in every micro-step and waits for the slowest, so an optimizer step of K micro-steps costs
K x `STEP_COST` + the sum over micro-steps of the most tokens of any rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from plan_checks import planned, step_costs

from odb_factory.planner import Budget, Cost
from odb_factory.planner.cost import STEP_COST


def fewest_bins(sizes: np.ndarray, capacity: int) -> int:
    """A lower bound of the number of bins: L2 of Martello and Toth. A size above the capacity takes a bin alone."""
    alone = int((sizes > capacity).sum())
    sizes = np.sort(sizes[(sizes <= capacity) & (sizes > 0)])[::-1]
    if not len(sizes):
        return alone
    before = np.concatenate([[0], np.cumsum(sizes)])
    descending = -sizes
    num_large = int((2 * sizes > capacity).sum())
    # Sizes in [threshold, capacity / 2] may share bins of sizes in (capacity / 2, capacity - threshold] only.
    thresholds = np.unique(np.append(sizes[2 * sizes <= capacity], 0))
    num_no_room = np.searchsorted(descending, -(capacity - thresholds), side="left")
    num_no_room = np.minimum(num_no_room, num_large)
    ends = np.searchsorted(descending, -thresholds, side="right")
    room = (num_large - num_no_room) * capacity - (before[num_large] - before[num_no_room])
    small = before[np.maximum(ends, num_large)] - before[num_large]
    return alone + num_large + int(np.maximum(-(-(small - room) // capacity), 0).max())


def least_wait(sizes: np.ndarray, capacity: int, num_ranks: int) -> int:
    """A lower bound, for any K, of the sum over micro-steps of the fullest bin.

    No rank has more tokens than this sum, so the bounds of scheduling on parallel machines hold: the mean, and the sum
    of the smallest k + 1 of the k x ranks + 1 largest samples, because one rank has at least k + 1 of them.
    """
    sizes = np.sort(sizes)[::-1]
    before = np.concatenate([[0], np.cumsum(sizes)])
    last = np.arange(0, len(sizes), num_ranks) + 1
    # In a micro-step with a sample above the capacity the other bins hold at most the capacity.
    alone = sizes > capacity
    waited = sizes[alone][::num_ranks]
    rest = int(sizes[~alone].sum()) - (len(waited) * num_ranks - int(alone.sum())) * capacity
    return max(
        -(-int(sizes.sum()) // num_ranks),
        int((before[last] - before[last - 1 - np.arange(len(last))]).max()),
        # Two samples of more than half a bin never share one; each micro-step has room for one such sample a rank.
        int(sizes[2 * sizes > capacity][::num_ranks].sum()),
        int(waited.sum()) + max(-(-rest // num_ranks), 0),
    )


def flat_bound(lengths: np.ndarray, token_budget: int, num_ranks: int) -> int:
    """A lower bound of the cost of flat plans of samples of these lengths."""
    num_steps = -(-fewest_bins(lengths, token_budget) // num_ranks)
    return num_steps * STEP_COST + least_wait(lengths, token_budget, num_ranks)


def padded_bound(lengths: np.ndarray, token_budget: int, num_ranks: int) -> int:
    """A lower bound of the cost of padded plans of samples of these lengths.

    The cost of the best cut for a single rank, divided by the ranks: ranks wait for the costliest group of a
    micro-step, which costs at least the mean of the groups.
    """
    lengths = np.sort(lengths)
    best = np.zeros(len(lengths) + 1, dtype=np.int64)
    for end, longest in enumerate(lengths.tolist(), start=1):
        first = end - max(min(token_budget // longest, end), 1)
        count = end - np.arange(first, end)
        best[end] = int((best[first:end] + STEP_COST + longest * count).min())
    return max(-(-int(best[-1]) // num_ranks), STEP_COST + int(lengths[-1]))


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
"""Bound; least mean and least value of bound / cost. The bound of padded plans ignores waits between ranks."""


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
    """I7 as a figure: lower bound / cost of plans for nine kinds of lengths."""
    cells = itertools.product(range(1 if shapes is SHAPES else 2), KINDS, shapes)
    ratios = [ratio_of(seed, kind, *shape, layout) for seed, kind, shape in cells]
    _, least_mean, least = TABLE[layout]
    assert max(ratios) <= 1, "the bound is one"
    assert np.mean(ratios) >= least_mean and min(ratios) >= least, (np.mean(ratios), min(ratios))
