"""The quality of plans: optimizer steps of 1 to 256 ranks beside what no plan can undercut (see `lower_bounds`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from lower_bounds import flat_bound, padded_bound, table_of

from odb_factory.planner import Budget, BufferMetadata, Collation, plan_optimizer_step
from odb_factory.planner.cost import STEP_COST
from odb_factory.planner.flat import PATCHES_PER_TOKEN

BUDGET = 16384
Lengths = Callable[[np.random.Generator, int], np.ndarray]


def log_normal(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.lognormal(rng.uniform(5.5, 8), rng.uniform(0.5, 1.5), count)


def full_length(rng: np.random.Generator, count: int) -> np.ndarray:
    """Many samples are truncated to the budget."""
    return np.where(rng.random(count) < rng.uniform(0, 0.5), BUDGET, log_normal(rng, count))


def one_giant(rng: np.random.Generator, count: int) -> np.ndarray:
    others = np.minimum(log_normal(rng, max(count - 1, 0)), BUDGET)
    return np.append(others, rng.choice([1, 2, 20]) * BUDGET)[:count]


def all_alike(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.full(count, rng.integers(BUDGET // 40, BUDGET + 1))


def heavy_tail(rng: np.random.Generator, count: int) -> np.ndarray:
    return 50 * rng.uniform(1, 10) * (1 + rng.pareto(1.1, count))


def uniform(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(1, BUDGET // rng.choice([1, 2, 4]) + 1, count)


def short_and_long(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.where(rng.random(count) < 0.7, rng.lognormal(6, 0.8, count), rng.lognormal(8.6, 0.6, count))


def parts_of_a_bin(rng: np.random.Generator, count: int) -> np.ndarray:
    """All lengths are close to a half, a third, a quarter or a fifth of the budget."""
    part = BUDGET // rng.integers(2, 6)
    return rng.integers(part - BUDGET // 50, part + BUDGET // 50, count)


def two_lengths(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.where(rng.random(count) < rng.random(), *rng.integers(1, BUDGET + 1, 2))


KINDS: list[Lengths] = [
    log_normal,
    full_length,
    one_giant,
    all_alike,
    heavy_tail,
    uniform,
    short_and_long,
    parts_of_a_bin,
    two_lengths,
]


@dataclass(frozen=True)
class Drawn:
    """An optimizer step: rank r holds rows r, r + ranks, ..."""

    rows: np.ndarray
    num_ranks: int
    budget: Budget

    def cost(self) -> int:
        """What ranks wait for, as planned."""
        buffers = [BufferMetadata(self.rows[rank :: self.num_ranks].copy(), False) for rank in range(self.num_ranks)]
        plan = plan_optimizer_step(buffers, self.budget, balance=True)
        tokens = sum(STEP_COST + step.max_rank_tokens for step in plan.totals)
        if self.budget.layout == "padded":
            return tokens
        return PATCHES_PER_TOKEN * tokens + sum(step.max_rank_patches for step in plan.totals)

    def bound(self) -> int:
        """No plan costs less."""
        if self.budget.layout == "padded":
            return padded_bound(self.rows, self.budget, self.num_ranks)
        return flat_bound(self.rows, self.budget, self.num_ranks)[1]


def draw(seed: int, kind: Lengths, num_ranks: int, per_rank: int, *, media: bool, layout: str) -> Drawn:
    """About `per_rank` samples a rank. media: some samples have images, a tenth to nine tenths of their tokens."""
    rng = np.random.default_rng([seed, KINDS.index(kind), media, num_ranks])
    count = num_ranks * per_rank + int(rng.integers(0, num_ranks + 1))
    most = 20 * BUDGET if kind is one_giant else BUDGET
    tokens = np.clip(kind(rng, count), 1, most).astype(np.int64)
    budget, patches = Budget(BUDGET, layout=layout), None
    if media:
        part = rng.uniform(0.1, 0.9, count) * (rng.random(count) < rng.choice([0.05, 0.5, 0.95]))
        patches = (4 * tokens * part).astype(np.int64)
        collation = Collation(dummy_media_tokens=66, dummy_media_patches=256)
        max_patches = int(rng.choice([2, 4])) * BUDGET
        budget = Budget(BUDGET, max_patches, collation, layout=layout)
    return Drawn(table_of(tokens, patches), num_ranks, budget)


SHAPES = [(1, 32), (2, 61), (4, 16), (8, 8), (8, 32)]
MORE_SHAPES = [(16, 16), (16, 61), (32, 32), (64, 16), (64, 24), (256, 24)]
"""(ranks, samples a rank)."""
TABLE = {
    # layout, media: least mean, and least, of bound / cost. The bound of images takes tokens and patches as if each
    # could be balanced without the other; that of padded plans leaves out that ranks wait for each other.
    ("flat", False): (0.995, 0.95),
    ("flat", True): (0.965, 0.82),
    ("padded", False): (0.945, 0.73),
}


@pytest.mark.parametrize("shapes", [SHAPES, pytest.param(MORE_SHAPES, marks=pytest.mark.nightly)], ids=["few", "many"])
@pytest.mark.parametrize(("layout", "media"), TABLE)
def test_no_plan_could_cost_much_less(
    layout: str, media: bool, shapes: list[tuple[int, int]], capsys: pytest.CaptureFixture
) -> None:
    """I7 as a figure: the cost of plans beside what no plan can undercut, for nine kinds of lengths."""
    found: dict[str, list[float]] = {}
    for kind, shape, seed in itertools.product(KINDS, shapes, range(1 if shapes is SHAPES else 2)):
        drawn = draw(seed, kind, *shape, media=media, layout=layout)
        ratio = drawn.bound() / drawn.cost()
        assert ratio <= 1, "the bound is one"
        found.setdefault(kind.__name__, []).append(ratio)
    every = [ratio for ratios in found.values() for ratio in ratios]
    with capsys.disabled():
        print(f"\n{layout}{', images' * media}: bound / cost {np.mean(every):.4f}, least {min(every):.3f};", end="")
        print(", ".join(f" {name} {np.mean(ratios):.3f}" for name, ratios in found.items()))
    least_mean, least = TABLE[layout, media]
    assert np.mean(every) >= least_mean and min(every) >= least
