"""Samples and bins of a plan of flat micro-batches: what a sample adds to a bin, and how full each bin shall be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from odb_factory.planner.cost import STEP_COST, by_number
from odb_factory.planner.plan import Samples

# ----------------------------------------------------------------------------------------------------------------------
# The samples of a plan of flat micro-batches: what each adds to a bin, and what a bin costs.
# A flat micro-batch is a bin: its tokens and its patches are sums over its samples.

PATCHES_PER_TOKEN = 4
"""Patches that cost as much as a token: vision towers merge 2 x 2."""


class FlatSamples(Samples):
    """Samples of one modality to put into bins.

    overlong: the sample breaks a budget alone, so it goes alone [n]. measures: tokens, patches, whether it has media,
    and audio [n, 4]. prices: of a token and of a patch (0: no sample has any) [2]; step_price: of a micro-step.
    """

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def num_pools(self) -> int:
        return int(self.pool.max(initial=0)) + 1

    @cached_property
    def measures(self) -> np.ndarray:
        rows = self.rows
        columns = [rows[name] for name in ("tokens", "patches", "has_media", "has_audio")]
        return np.stack(columns, axis=1, dtype=np.int64, casting="unsafe")

    @cached_property
    def prices(self) -> np.ndarray:
        return np.array([PATCHES_PER_TOKEN, 1] if self.measures[:, 1].any() else [1, 0])

    @property
    def step_price(self) -> int:
        return STEP_COST * int(self.prices[0])

    @cached_property
    def overlong(self) -> np.ndarray:
        alone: np.ndarray = self.excess(self.measures) > 0
        return alone

    def shapes(self, sums: np.ndarray) -> np.ndarray:
        """Tokens and patches of bins with these sums of `measures`, as collated [..., 2]."""
        tokens, patches, media, audio = np.moveaxis(sums, -1, 0)
        sums_of_rows = {"tokens": tokens, "patches": patches, "media": media, "audio": audio}
        _, *shapes = self.budget.collated(**sums_of_rows, count=tokens, longest=tokens, first=tokens)
        return np.stack(shapes, axis=-1)

    def excess(self, sums: np.ndarray) -> np.ndarray:
        """By how much bins with these sums break the budgets (tokens and patches) [...]."""
        shapes = self.shapes(sums)
        return self.budget.excess(shapes[..., 0], shapes[..., 1])

    def sums(self, bin_of: np.ndarray, num_bins: int) -> np.ndarray:
        """`measures` of each bin [bins, 4]."""
        return by_number(bin_of, self.measures, num_bins)


# ----------------------------------------------------------------------------------------------------------------------
# Bins for the samples of a plan: how many, in which micro-steps, and how full they shall be.

LARGEST_AMOUNT = 1 << 28
"""Largest amount, so that the product of two amounts does not overflow."""
AMOUNT_OF_A_BIN = 1 << 20
"""Upper limit of the amount in an average bin."""
MARGIN = 64
"""The target of a bin is below the budget by 1/MARGIN."""
SHARE_BITS = 20
"""Precision of the fixed-point numbers by which targets are scaled to what a pool holds."""


@dataclass(frozen=True, eq=False)
class Bins:
    """Bins in the order of their pools, and what is to be balanced between them.

    pool, step: of each bin [bins]. frozen: it holds an overlong sample and nothing else [bins].
    amounts: what each sample adds in each dimension, in one unit of cost [n, dimensions]; tokens come first.
    targets: what each bin shall hold of it [bins, dimensions].
    """

    samples: FlatSamples
    pool: np.ndarray
    step: np.ndarray
    frozen: np.ndarray
    amounts: np.ndarray
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.step)


def bins_needed(samples: FlatSamples, most_of_a_bin: Sequence[int | None], num_pools: int) -> np.ndarray:
    """No fewer bins hold the samples of each pool [pools]. most_of_a_bin: tokens and patches; None: not limited.

    The bins have room for the sum of the samples; two samples of more than half a bin cannot share one.
    """
    pool = samples.pool[~samples.overlong]
    needed = np.minimum(np.bincount(pool, minlength=num_pools), 1)
    for measure, limit in zip(samples.measures[~samples.overlong].T, most_of_a_bin):
        if limit is not None:
            sums = by_number(pool, measure, num_pools)
            halves = by_number(pool, 2 * measure > limit, num_pools)
            needed = np.maximum(np.maximum(needed, halves), -(-sums // max(limit, 1)))
    with_overlong: np.ndarray = needed + np.bincount(samples.pool[samples.overlong], minlength=num_pools)
    return with_overlong


def make_bins(samples: FlatSamples, num_steps: int) -> Bins:
    """Empty bins for this number of micro-steps: as many as there are slots, or samples if these are fewer.

    Overlong samples get bins of their own in the first micro-steps, the longest first.
    """
    count = np.bincount(samples.pool, minlength=samples.num_pools)
    num_overlong = np.bincount(samples.pool[samples.overlong], minlength=samples.num_pools)
    num_bins = np.minimum(np.maximum(num_steps * samples.slots, num_overlong), count)
    pool = np.repeat(np.arange(samples.num_pools), num_bins)
    place = np.arange(len(pool)) - np.repeat(np.cumsum(num_bins) - num_bins, num_bins)
    step, frozen = place // samples.slots, place < num_overlong[pool]
    amounts, most_of_a_bin = _amounts(samples, len(pool))
    targets = [_targets(samples, amount, limit, pool, step, frozen) for amount, limit in zip(amounts.T, most_of_a_bin)]
    return Bins(samples, pool, step, frozen, amounts, np.stack(targets, axis=1))


def _amounts(samples: FlatSamples, num_bins: int) -> tuple[np.ndarray, list[int]]:
    """What each sample adds to its bin [n, dimensions], and the most that a bin may hold of each dimension.

    The dimensions are tokens and, if samples have some, patches. Both are in one unit of cost, so that tokens that a
    bin has too many can be weighed against patches that it has too few. The unit is so large that an average bin holds
    at most `AMOUNT_OF_A_BIN`: the product of two amounts is an integer of 64 bits.

    Example: a token costs 4, a patch 1, and the unit is 1. Samples of 800 tokens with 3,200 patches and of 200 tokens
    add (3200, 3200) and (800, 0). Under `token_budget` 1,000 and `max_patches` 4,096 a bin may hold (4000, 4096).
    """
    budget, costs = samples.budget, samples.measures[:, :2] * samples.prices
    most_patches = int(samples.measures[:, 1].sum()) if budget.max_patches is None else budget.max_patches
    limits = np.array([budget.token_budget, most_patches]) * samples.prices
    unit = max(int(costs.sum()) // (num_bins * AMOUNT_OF_A_BIN), 1)
    dimensions = np.flatnonzero(samples.prices)
    amounts = np.minimum(costs // unit, LARGEST_AMOUNT)[:, dimensions]
    return amounts, np.minimum(limits // unit, LARGEST_AMOUNT)[dimensions].tolist()


def _targets(
    samples: FlatSamples, amount: np.ndarray, limit: int, pool: np.ndarray, step: np.ndarray, frozen: np.ndarray
) -> np.ndarray:
    """How much of one dimension each bin shall hold [bins].

    amount: what each sample adds of it [n]. limit: what the budget allows a bin.

    1. A bin may be as full as the fullest bin of its micro-step has to be (`_heights`), and no fuller than the budget
       allows, less a margin.
    2. What a pool's bins hold at these heights is more than its samples add, or less. So the targets of the bins of a
       pool are scaled down, or raised by the same amount each, until they sum up to its samples.

    Example: two bins of heights 20 and two of height 5, and samples that add 40: the targets are 16, 16, 4, 4.
    """
    num_pools, num_steps, ordinary = samples.num_pools, int(step.max(initial=0)) + 1, ~samples.overlong
    bins_in_step = np.zeros((num_pools, num_steps), dtype=np.int64)
    np.add.at(bins_in_step, (pool[~frozen], step[~frozen]), 1)
    # Bins may be as full as an overlong sample of their micro-step, for which all ranks wait.
    has_overlong = np.bincount(step[frozen], minlength=num_steps) > 0
    least_heights = np.where(has_overlong, min(int(amount[samples.overlong].max(initial=0)), limit), 0)
    heights = _heights(amount[ordinary], samples.pool[ordinary], bins_in_step, least_heights)
    # Exchanges end near their target, not at it, and often above it.
    heights = np.minimum(heights, limit - limit // MARGIN)
    targets = np.where(frozen, 0, heights[step])
    added = by_number(samples.pool[ordinary], amount[ordinary], num_pools)
    room = by_number(pool, targets, num_pools)
    missing = np.maximum(added - room, 0) // np.maximum(bins_in_step.sum(axis=1), 1)
    share = np.minimum((added << SHARE_BITS) // np.maximum(room, 1), 1 << SHARE_BITS)
    return np.where(frozen, 0, (targets * share[pool] >> SHARE_BITS) + missing[pool])


def _heights(amount: np.ndarray, pool: np.ndarray, bins_in_step: np.ndarray, min_heights: np.ndarray) -> np.ndarray:
    """How full the fullest bin of each micro-step has to be [micro-steps], as water finds its level.

    amount, pool: of each sample [n]. bins_in_step: bins of each pool in each micro-step [pools, micro-steps].
    min_heights: a lower limit of each height [micro-steps].

    All ranks wait for the fullest bin, so the other bins of its micro-step can be filled as high at no cost. The
    micro-steps take their heights one after the other: the mean of what is left for each bin, or the largest sample
    that is left, whichever is more. Each bin of a micro-step then takes one of the largest samples, and all of them
    together as much as they hold at that height.

    Example: two ranks, three micro-steps, a sample of 20 and eight of 5, together 60. If every bin held the mean of 10,
    ranks would wait for 20 + 10 + 10. But the micro-step with the 20 costs 20 whatever else it holds, so both of its
    bins are filled to 20, and 20 is left for the four other bins: the heights are 20, 5, 5.
    """
    num_pools, num_steps = bins_in_step.shape
    order = np.lexsort((-amount, pool))
    amount, pool = np.append(amount[order], 0), pool[order]
    starts = np.searchsorted(pool, np.arange(num_pools + 1))
    largest_left, ends = starts[:-1].copy(), starts[1:]  # of each pool a place in the sorted amounts
    before = np.concatenate([[0], np.cumsum(amount)])
    amount_left, bins_left = before[ends] - before[starts[:-1]], bins_in_step.sum(axis=1)
    heights = np.zeros(num_steps, dtype=np.int64)
    for k, num_bins in enumerate(bins_in_step.T):
        largest = np.where(largest_left < ends, amount[largest_left], 0)
        height = np.maximum(np.maximum(-(-amount_left // np.maximum(bins_left, 1)), largest), min_heights[k])
        heights[k] = int(np.where(num_bins > 0, height, 0).max())
        amount_left, bins_left = np.maximum(amount_left - num_bins * height, 0), bins_left - num_bins
        largest_left = np.minimum(largest_left + num_bins, ends)
    return heights
