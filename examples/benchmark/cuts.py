"""Samples of an epoch, and what is said of a way to cut them into micro-batches: step efficiency, padding, balance.

Step efficiency = real tokens / (ranks x sum over micro-steps of (largest padded tokens of any rank + FIXED_COST)). It
counts padding, part-filled micro-batches, ranks that wait for each other, and the fixed cost of a micro-step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from simulation import PATCHES_PER_TOKEN, draw, draw_observed

from odb_factory.plan.simulate import FIXED, least_time
from odb_factory.planning import Budget, MicroStepTotals

FIXED_COST = FIXED
"""Of a micro-step, in tokens."""
TOKEN_BUDGET = 16384
IMAGE_SHARE = 0.5


@dataclass(frozen=True)
class Epoch:
    """The samples that all contestants get.

    images: half of the samples have one, or those of the observed ones that do. size: samples of a rank. observed: what
    is drawn from, as `ROW`; None: the profile says it.
    """

    profile: str
    ranks: int
    images: bool = False
    size: int = 2048
    seed: int = 0
    observed: np.ndarray | None = field(default=None, repr=False, compare=False)

    @functools.cached_property
    def shares(self) -> list[np.ndarray]:
        """Of each rank its samples in the order of draws, as `ROW`."""
        if self.observed is not None:
            return draw_observed(self.observed, self.ranks, self.size, self.seed, with_media=self.images)
        return draw(self.profile, self.ranks, self.size, self.seed, IMAGE_SHARE if self.images else 0.0)

    @functools.cached_property
    def samples(self) -> np.ndarray:
        """Of all ranks, who take their samples in turn."""
        return np.stack(self.shares, axis=1).reshape(-1)

    def budget(self, layout: str) -> Budget:
        return Budget(TOKEN_BUDGET, TOKEN_BUDGET * PATCHES_PER_TOKEN if self.images else None, layout=layout)

    def optimizer_steps(self, batch_size: int, count: int) -> Iterator[list[np.ndarray]]:
        """The first `count` optimizer steps of `batch_size` samples: of each rank its share."""
        share = batch_size // self.ranks
        for k in range(min(count, self.size // share)):
            yield [rows[k * share : (k + 1) * share] for rows in self.shares]


@dataclass(frozen=True)
class Cut:
    """Micro-steps of all ranks, an array element each: what all ranks compute, and what the busiest does.

    tokens, samples: real ones, in all. optimizer_steps: they make up so many. moved: samples that changed rank.
    """

    ranks: int
    padded: np.ndarray
    most: np.ndarray
    tokens: int
    samples: int
    optimizer_steps: int
    patches: np.ndarray | None = None
    most_patches: np.ndarray | None = None
    moved: int = 0

    def figures(self) -> dict[str, float | None]:
        """balance: what the ranks compute by what they would if each had as much as the busiest of its micro-step."""
        return {
            "efficiency": self.tokens / (self.ranks * float(self.most.sum() + FIXED_COST * len(self.most))),
            "padding": 1 - self.tokens / float(self.padded.sum()),
            "balance": float(self.padded.sum() / (self.ranks * self.most.sum())),
            "balance_patches": self._balance_of_patches(),
            "micro_steps": len(self.most) / self.optimizer_steps,
            "moved": self.moved / self.samples,
            "samples": self.samples / self.optimizer_steps,
            "peak": float(self.most.max()),
        }

    def _balance_of_patches(self) -> float | None:
        if self.patches is None or self.most_patches is None or not self.most_patches.any():
            return None
        return float(self.patches.sum() / (self.ranks * self.most_patches.sum()))


def cut_of_batches(
    samples: np.ndarray, steps: Sequence[Sequence[Sequence[int]]], optimizer_steps: int, layout: str = "padded"
) -> Cut:
    """steps: of each micro-step and rank the samples of a micro-batch, by their index."""
    ranks = len(steps[0])
    batches = [np.asarray(batch, dtype=np.int64) for step in steps for batch in step]
    order, sizes = np.concatenate(batches), np.array([len(batch) for batch in batches])
    chosen = samples[order]
    starts = np.cumsum(sizes) - sizes
    own = np.add if layout == "flat" else np.maximum
    padded = own.reduceat(chosen["tokens"].astype(np.int64), starts) * (1 if layout == "flat" else sizes)
    patches = np.add.reduceat(chosen["patches"].astype(np.int64), starts)
    of_ranks, patches = padded.reshape(-1, ranks), patches.reshape(-1, ranks)
    return Cut(
        ranks,
        of_ranks.sum(axis=1),
        of_ranks.max(axis=1),
        int(chosen["tokens"].sum()),
        len(chosen),
        optimizer_steps,
        patches.sum(axis=1),
        patches.max(axis=1),
    )


def cut_of_plan(totals: Sequence[MicroStepTotals], ranks: int, optimizer_steps: int) -> Cut:
    def of(name: str) -> np.ndarray:
        return np.array([getattr(one, name) for one in totals], np.int64)

    return Cut(
        ranks,
        of("padded_tokens"),
        of("max_rank_tokens"),
        int(of("tokens").sum()),
        int(of("samples").sum()),
        optimizer_steps,
        of("patches"),
        of("max_rank_patches"),
        int(of("moved").sum()),
    )


def least(shares: Sequence[np.ndarray], token_budget: int = TOKEN_BUDGET, fixed: int = FIXED_COST) -> float:
    """What no cut of one optimizer step can beat, padded or not: a rank has at least the mean load of all, or the
    longest sample, and a micro-step at most the token budget."""
    return least_time(np.concatenate([rows["tokens"] for rows in shares]), len(shares), token_budget, fixed)


def bound(epoch: Epoch, batch_size: int, count: int) -> dict[str, float | None]:
    """The largest step efficiency and balance of patches that any cut of these optimizer steps can have."""
    tokens = time = patches = most = 0.0
    for shares in epoch.optimizer_steps(batch_size, count):
        tokens += sum(int(rows["tokens"].sum()) for rows in shares) / epoch.ranks
        time += least(shares)
        load = sum(int(rows["patches"].sum()) for rows in shares) / epoch.ranks
        patches += load
        most += max(load, *(int(rows["patches"].max()) for rows in shares))
    return {"efficiency": tokens / time, "balance_patches": patches / most if most else None}
