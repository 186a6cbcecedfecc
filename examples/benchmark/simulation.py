"""Samples of an epoch in simulation, and the figures of a way to cut them into micro-batches.

Step efficiency = real tokens / (ranks x sum over micro-steps of (largest padded tokens of any rank + FIXED_COST)). It
counts padding, part-filled micro-batches, ranks that wait for each other, and the fixed cost of a micro-step.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml

from odb_factory.planning import ROW, Budget, CostModel, MicroStepTotals, make_metadata

FIXED_COST = CostModel().fixed
"""Of a micro-step, in tokens."""
TOKEN_BUDGET = 16384
SHORTEST, LONGEST = 16, 8192
IMAGE_SHARE = 0.5
"""Of the samples, in an epoch with images: an image makes between a tenth and nine tenths of its sample's tokens."""
PATCHES_PER_TOKEN = 4
"""The vision tower merges 2 x 2 patches into one token."""
BUILT_IN = "built-in MM-Mix"
"""The profile of the real samples that the demo trains on."""
OBSERVED = 1024
"""Real samples that are observed; the simulation draws from them."""

Draw = Callable[[np.random.Generator, int], np.ndarray]


def lognormal(mean: float, cv: float) -> Draw:
    """Lengths with this mean (tokens) and coefficient of variation."""
    sigma = np.sqrt(np.log(1 + cv**2))
    return lambda rng, count: rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)


def mm_mix(rng: np.random.Generator, count: int) -> np.ndarray:
    """80 % short answers, 20 % pages."""
    long = rng.random(count) < 0.2
    return np.where(long, rng.lognormal(np.log(2500), 0.5, count), rng.lognormal(np.log(150), 0.35, count))


PROFILES: dict[str, Draw] = {
    "UltraChat": lognormal(1100, 0.48),
    "LLaVA": lognormal(700, 0.29),
    "ShareGPT4o": lognormal(900, 1.00),
    "MM-Mix": mm_mix,
}


def draw(profile: str, ranks: int, samples: int, seed: int = 0, image_share: float = 0.0) -> list[np.ndarray]:
    """Of each rank its `samples` samples in the order of draws, as `ROW`."""
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(ranks):
        rows = np.zeros(samples, ROW)
        rows["tokens"] = rows["row_tokens"] = np.clip(PROFILES[profile](rng, samples), SHORTEST, LONGEST)
        rows["units"] = rows["tokens"] // 2
        if image_share:
            rows["has_media"] = rng.random(samples) < image_share
            part = rng.uniform(0.1, 0.9, samples) * rows["has_media"]
            rows["patches"] = (rows["tokens"] * part).astype(int) * PATCHES_PER_TOKEN
        drawn.append(rows)
    return drawn


def draw_real(real: np.ndarray, ranks: int, samples: int, seed: int, *, with_media: bool) -> list[np.ndarray]:
    """The same, drawn from samples that were observed (as `ROW`); without media they are texts of the same lengths."""
    rng = np.random.default_rng(seed)
    drawn = [real[rng.integers(len(real), size=samples)] for _ in range(ranks)]
    for rows in drawn:
        for key in () if with_media else ("patches", "modality", "has_media", "has_audio"):
            rows[key] = 0
    return drawn


def observe(config: Path | None, folder: Path) -> np.ndarray:
    """The samples of a LLaMA-Factory YAML (None: of the built-in MM-Mix, written into `folder`), as `ROW`."""
    from runs import sft_config

    from odb_factory.llamafactory import activation

    if config is None:
        from workloads import build_vl

        model, data = build_vl(folder, OBSERVED)
        shared = {"dataset": "mm_mix", "template": "qwen3_vl_nothink", "cutoff_len": LONGEST}
        config = folder / "built_in.yaml"
        config.write_text(yaml.safe_dump(sft_config(model, data, folder / "output", **shared)), encoding="utf-8")
    activation.activate()
    with contextlib.redirect_stdout(sys.stderr):  # what is logged meanwhile
        from odb_factory.cli import plan

        costs = [row.cost for row in plan.observe(plan.read(config, ranks=1), OBSERVED).rows]
    rows = make_metadata(costs, [0] * len(costs), exhausted=True, sizes=[0] * len(costs)).rows
    if not len(rows) or rows["tokens"].max() > LONGEST:
        sys.exit(f"{config}: the simulation takes samples of 1 to {LONGEST:,} tokens; set cutoff_len: {LONGEST}")
    return rows


@dataclass(frozen=True)
class Epoch:
    """The samples that all contestants get.

    images: whether samples have images (half of them; of real samples those that have). size: samples of a rank.
    real: samples to draw from, as `ROW`; None: the profile makes them up.
    """

    profile: str
    ranks: int
    images: bool = False
    size: int = 2048
    seed: int = 0
    real: np.ndarray | None = field(default=None, repr=False, compare=False)

    @functools.cached_property
    def shares(self) -> list[np.ndarray]:
        """Of each rank its samples in the order of draws, as `ROW`."""
        if self.real is not None:
            return draw_real(self.real, self.ranks, self.size, self.seed, with_media=self.images)
        return draw(self.profile, self.ranks, self.size, self.seed, IMAGE_SHARE if self.images else 0.0)

    @functools.cached_property
    def samples(self) -> np.ndarray:
        """Of all ranks, which take their samples in turn."""
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
    """Micro-steps of all ranks, an array element each: the padded tokens of all ranks, and of the busiest rank.

    tokens, samples: real ones, in all. optimizer_steps: their number. moved: samples that changed rank.
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
        """balance: what all ranks compute as a share of what they would if each computed as much as the busiest."""
        has_patches = self.patches is not None and self.most_patches is not None and self.most_patches.any()
        return {
            "efficiency": self.tokens / (self.ranks * float(self.most.sum() + FIXED_COST * len(self.most))),
            "padding": 1 - self.tokens / float(self.padded.sum()),
            "balance": float(self.padded.sum() / (self.ranks * self.most.sum())),
            "balance_patches": float(self.patches.sum() / (self.ranks * self.most_patches.sum()))
            if has_patches
            else None,
            "micro_steps": len(self.most) / self.optimizer_steps,
            "samples": self.samples / self.optimizer_steps,
            "moved": self.moved / self.samples,
            "peak": float(self.most.max()),
        }


def cut_of_batches(samples: np.ndarray, steps: Sequence[Sequence[Sequence[int]]], optimizer_steps: int) -> Cut:
    """Padded micro-batches. steps: of each micro-step and rank the samples of a micro-batch, by their index."""
    ranks = len(steps[0])
    batches = [np.asarray(batch, dtype=np.int64) for step in steps for batch in step]
    sizes = np.array([len(batch) for batch in batches])
    chosen, starts = samples[np.concatenate(batches)], np.cumsum(sizes) - sizes
    padded = (np.maximum.reduceat(chosen["tokens"].astype(np.int64), starts) * sizes).reshape(-1, ranks)
    patches = np.add.reduceat(chosen["patches"].astype(np.int64), starts).reshape(-1, ranks)
    tokens, of_steps = int(chosen["tokens"].sum()), (patches.sum(axis=1), patches.max(axis=1))
    return Cut(ranks, padded.sum(axis=1), padded.max(axis=1), tokens, len(chosen), optimizer_steps, *of_steps)


def cut_of_plan(totals: Sequence[MicroStepTotals], ranks: int, optimizer_steps: int) -> Cut:
    def of(name: str) -> np.ndarray:
        return np.array([getattr(one, name) for one in totals], np.int64)

    tokens, samples, moved = (int(of(name).sum()) for name in ("tokens", "samples", "moved"))
    patches = of("patches"), of("max_rank_patches")
    return Cut(ranks, of("padded_tokens"), of("max_rank_tokens"), tokens, samples, optimizer_steps, *patches, moved)


def least_time(tokens: np.ndarray, ranks: int, token_budget: int) -> float:
    """No cut of these samples into micro-steps takes less, padded or not: a rank has at least the mean load of all, or
    the longest sample, and a micro-step at most the token budget. tokens: of the samples of an optimizer step."""
    load = int(tokens.sum(dtype=np.int64)) / ranks
    within = int(np.minimum(tokens, token_budget).sum(dtype=np.int64)) / ranks  # a longer one goes alone
    return max(load, int(tokens.max())) + FIXED_COST * -(-within // token_budget)


def bound(epoch: Epoch, batch_size: int, count: int, token_budget: int = TOKEN_BUDGET) -> dict[str, float | None]:
    """The largest step efficiency and balance of patches that any cut of these optimizer steps can have: a rank has at
    least the mean load of all, or the longest sample, and a micro-step at most the token budget."""
    tokens = time = patches = most = 0.0
    for shares in epoch.optimizer_steps(batch_size, count):
        tokens += sum(int(rows["tokens"].sum()) for rows in shares) / epoch.ranks
        time += least_time(np.concatenate([rows["tokens"] for rows in shares]), epoch.ranks, token_budget)
        load = sum(int(rows["patches"].sum()) for rows in shares) / epoch.ranks
        patches += load
        most += max(load, *(int(rows["patches"].max()) for rows in shares))
    return {"efficiency": tokens / time, "balance_patches": patches / most if most else None}
