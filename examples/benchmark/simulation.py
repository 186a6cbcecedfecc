"""Samples in simulation: lengths and patches as real data have them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from odb_factory.planning import ROW

SHORTEST, LONGEST = 16, 8192
BUILT_IN = "built-in MM-Mix"
"""The profile of real samples that the demo trains on (`real_lengths.py`)."""
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
        rows["tokens"] = rows["row_tokens"] = np.clip(WORKLOADS[workload](rng, samples), SHORTEST, LONGEST)
        rows["units"] = rows["tokens"] // 2
        if image_share:
            rows["has_media"] = rng.random(samples) < image_share
            part = rng.uniform(0.1, 0.9, samples) * rows["has_media"]
            rows["patches"] = (rows["tokens"] * part).astype(int) * PATCHES_PER_TOKEN
        drawn.append(rows)
    return drawn


def draw_observed(observed: np.ndarray, ranks: int, samples: int, seed: int, *, with_media: bool) -> list[np.ndarray]:
    """Likewise of samples that were observed (as `ROW`), each as often as chance has it. Without media they are text of
    the same lengths."""
    rng = np.random.default_rng(seed)
    drawn = [observed[rng.integers(len(observed), size=samples)] for _ in range(ranks)]
    for rows in drawn:
        for key in () if with_media else ("patches", "modality", "has_media", "has_audio"):
            rows[key] = 0
    return drawn
