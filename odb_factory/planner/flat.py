"""Fill the bins of a given number of micro-steps: a target for each bin, and samples that reach the targets.

A flat micro-batch is a bin: its tokens and its patches are sums over its samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from odb_factory.planner.cost import by_number
from odb_factory.planner.plan import Samples

LARGEST_AMOUNT = 1 << 28
"""Upper limit of an amount, so that the product of two amounts does not overflow."""
AMOUNT_OF_A_BIN = 1 << 20
"""Upper limit of the amount in an average bin."""
MARGIN = 64
"""The target of a bin is below the budget by 1/MARGIN."""
SHARE_BITS = 20
"""Precision of the fixed-point numbers that scale targets to the samples of a pool."""


def bins_needed(samples: Samples, most_of_a_bin: Sequence[int | None]) -> np.ndarray:
    """A lower bound of the number of bins of each pool [pools]. most_of_a_bin: tokens and patches; None: no limit.

    The bins have room for the sum of the samples; two samples of more than half a bin each cannot share a bin.
    """
    pool, num_pools = samples.pool[~samples.overlong], samples.num_pools
    needed = np.minimum(np.bincount(pool, minlength=num_pools), 1)
    for measure, limit in zip(samples.measures[~samples.overlong].T, most_of_a_bin):
        if limit is not None:
            halves = by_number(pool, 2 * measure > limit, num_pools)
            rounded_up = -(-by_number(pool, measure, num_pools) // max(limit, 1))
            needed = np.maximum(np.maximum(needed, halves), rounded_up)
    with_overlong: np.ndarray = needed + np.bincount(samples.pool[samples.overlong], minlength=num_pools)
    return with_overlong


@dataclass(frozen=True, eq=False)
class Bins:
    """Bins, sorted by pool, and their targets.

    pool, step: the pool and the micro-step of each bin [bins]. frozen: the bin holds one overlong sample [bins].
    amounts: the cost of each sample in each dimension [n, dimensions]; tokens come first.
    targets: the desired sum of amounts in each bin [bins, dimensions].
    """

    samples: Samples
    pool: np.ndarray
    step: np.ndarray
    frozen: np.ndarray
    amounts: np.ndarray
    targets: np.ndarray


def make_bins(samples: Samples, num_steps: int) -> Bins:
    """Empty bins for this number of micro-steps: one for each slot, at most one for each sample.

    Overlong samples get separate bins in the first micro-steps, the longest first.

    The dimensions are tokens and, if any sample has some, patches. Both have one unit of cost, so that an excess of
    tokens can be weighed against a lack of patches. The unit is so large that an average bin holds at most
    `AMOUNT_OF_A_BIN`: the product of two amounts then fits into 64 bits.

    Example: a token costs 4, a patch 1, and the unit is 1. Samples of 800 tokens with 3,200 patches and of 200 tokens
    add (3200, 3200) and (800, 0). Under `token_budget` 1,000 and `max_patches` 4,096 a bin may hold (4000, 4096).
    """
    count = np.bincount(samples.pool, minlength=samples.num_pools)
    num_overlong = np.bincount(samples.pool[samples.overlong], minlength=samples.num_pools)
    num_bins = np.minimum(np.maximum(num_steps * samples.slots, num_overlong), count)
    pool = np.repeat(np.arange(samples.num_pools), num_bins)
    place = np.arange(len(pool)) - np.repeat(np.cumsum(num_bins) - num_bins, num_bins)
    step, frozen = place // samples.slots, place < num_overlong[pool]
    budget, costs = samples.budget, samples.measures[:, :2] * samples.prices
    most_patches = int(samples.measures[:, 1].sum()) if budget.max_patches is None else budget.max_patches
    limits = np.array([budget.token_budget, most_patches]) * samples.prices
    unit = max(int(costs.sum()) // (len(pool) * AMOUNT_OF_A_BIN), 1)
    dimensions = np.flatnonzero(samples.prices)
    amounts, limits = (np.minimum(values // unit, LARGEST_AMOUNT)[..., dimensions] for values in (costs, limits))
    bins = Bins(samples, pool, step, frozen, amounts, amounts)
    targets = [_targets(bins, amount, limit) for amount, limit in zip(amounts.T, limits.tolist())]
    return replace(bins, targets=np.stack(targets, axis=1))


def _targets(bins: Bins, amount: np.ndarray, limit: int) -> np.ndarray:
    """The targets of the bins in one dimension [bins].

    amount: of each sample [n]. limit: the budget of a bin.

    1. A bin may be as full as the fullest bin of its micro-step has to be (`_heights`), but not fuller than the budget
       less a margin.
    2. The targets of the bins of a pool are then scaled down, or each raised by the same amount, until their sum is
       that of its samples.

    Example: two bins of heights 20 and two of height 5, and samples that add 40: the targets are 16, 16, 4, 4.
    """
    samples, pool, step, frozen = bins.samples, bins.pool, bins.step, bins.frozen
    num_pools, num_steps, ordinary = samples.num_pools, int(step.max(initial=0)) + 1, ~samples.overlong
    bins_in_step = np.zeros((num_pools, num_steps), dtype=np.int64)
    np.add.at(bins_in_step, (pool[~frozen], step[~frozen]), 1)
    # All ranks wait for an overlong sample, so the bins of its micro-step may be as full as it is.
    has_overlong = np.bincount(step[frozen], minlength=num_steps) > 0
    least_heights = np.where(has_overlong, min(int(amount[samples.overlong].max(initial=0)), limit), 0)
    heights = _heights(amount[ordinary], samples.pool[ordinary], bins_in_step, least_heights)
    # Exchanges end near the target, often above it.
    heights = np.minimum(heights, limit - limit // MARGIN)
    targets = np.where(frozen, 0, heights[step])
    added = by_number(samples.pool[ordinary], amount[ordinary], num_pools)
    room = by_number(pool, targets, num_pools)
    missing = np.maximum(added - room, 0) // np.maximum(bins_in_step.sum(axis=1), 1)
    share = np.minimum((added << SHARE_BITS) // np.maximum(room, 1), 1 << SHARE_BITS)
    return np.where(frozen, 0, (targets * share[pool] >> SHARE_BITS) + missing[pool])


def _heights(amount: np.ndarray, pool: np.ndarray, bins_in_step: np.ndarray, min_heights: np.ndarray) -> np.ndarray:
    """How full the fullest bin of each micro-step has to be [micro-steps].

    amount, pool: of each sample [n]. bins_in_step: bins of each pool in each micro-step [pools, micro-steps].
    min_heights: a lower limit of each height [micro-steps].

    All ranks wait for the fullest bin, so the other bins of its micro-step can be filled as high at no cost. The
    micro-steps get their heights one after the other: the mean of the remaining amount for each remaining bin, or the
    largest remaining sample, whichever is more. Each bin of the micro-step then takes one of the largest samples, and
    all of them together take as much as they hold at that height.

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


# ----------------------------------------------------------------------------------------------------------------------
# Fill bins: the largest samples first, then exchanges between pairs of bins, in all pairs at once.
# The start is Graham's rule of the longest processing time (1969), for many bins at a time. The exchanges are a local
# search like that of Kernighan and Lin (1970): a pair of bins exchanges two samples, or moves one, so that the sum over
# dimensions of the squared distances from their targets falls most.

MAX_ROUNDS, PATIENCE = 64, 8
"""Maximum rounds of pairing; stop after PATIENCE rounds without a change in any dimension."""
TOKENS_WITHIN, OTHERS_WITHIN = 4096, 128
"""A bin takes part in exchanges if its excess is above target / TOKENS_WITHIN (patches: target / OTHERS_WITHIN)."""
TOKENS_COUNT_MORE = 4
"""Weight of tokens relative to patches if not all targets can be reached."""
MAX_TRIED, FEWEST, MOST = 1 << 16, 6, 32
"""A round tries about MAX_TRIED exchanges, with FEWEST to MOST samples of each bin."""


def fill_bins(bins: Bins) -> np.ndarray:
    """The bin of each sample [n]. No bin is empty; some may break the budgets."""
    bin_of = _largest_first(bins)
    # An empty bin takes the smallest sample of the bin that has most samples of the same pool.
    count = np.bincount(bin_of, minlength=len(bins.pool))
    for empty in np.flatnonzero(count == 0).tolist():
        giver = int(np.where(bins.pool == bins.pool[empty], count, 0).argmax())
        giver_samples = np.flatnonzero(bin_of == giver)
        bin_of[giver_samples[bins.amounts[giver_samples, 0].argmin()]] = empty
        count[giver], count[empty] = count[giver] - 1, 1
    bin_of = _exchange(bins, bin_of)
    if bins.amounts.shape[1] == 1:
        return bin_of
    # Tokens and patches cannot always reach their targets together. Tokens then count more, and the target of patches
    # is the mean over the bins of the micro-step.
    reached = by_number(bin_of, bins.amounts, len(bins.pool))
    _, kind = np.unique(np.stack([bins.pool, bins.step, bins.frozen]), axis=1, return_inverse=True)
    means = (by_number(kind, reached, int(kind.max()) + 1) // np.bincount(kind)[:, None])[kind]
    means[:, 0] = bins.targets[:, 0]
    weights = np.array([1, TOKENS_COUNT_MORE])
    return _exchange(replace(bins, amounts=bins.amounts // weights, targets=means // weights), bin_of)


def _largest_first(bins: Bins) -> np.ndarray:
    """Each sample goes into the bin with most room, the largest sample first.

    For speed many bins take a sample at once: all bins that would get one before the roomiest bin gets its second.
    """
    samples, bin_of = bins.samples, np.empty(len(bins.samples), dtype=np.int64)
    # All dimensions have equal weight: if one dimension has a few large samples, these must be spread first.
    totals = bins.amounts.sum(axis=0)
    scale = np.maximum(totals.max() // np.maximum(totals, 1), 1)
    size, targets = bins.amounts @ scale, bins.targets @ scale
    by_size = np.lexsort((-size, samples.pool))
    bin_of[by_size[samples.overlong[by_size]]] = np.flatnonzero(bins.frozen)
    order, ordinary = by_size[~samples.overlong[by_size]], np.flatnonzero(~bins.frozen)
    pools = np.arange(samples.num_pools + 1)
    bounds = np.searchsorted(samples.pool[order], pools)
    following, ends = bounds[:-1], bounds[1:]  # for each pool the largest sample that is left, and the end
    pool, room = bins.pool[ordinary], targets[ordinary]
    first = np.searchsorted(pool, pools[:-1])
    place = np.arange(len(ordinary)) - first[pool]
    while (num_left := ends - following).any():
        by_room = np.lexsort((-room, pool))
        min_room = np.append(room[by_room], 0)[first] - np.append(size[order], 0)[following]
        takes = (place < num_left[pool]) & ((room[by_room] > min_room[pool]) | (place == 0))
        taking = by_room[takes]
        chosen = order[following[pool[takes]] + place[takes]]
        bin_of[chosen] = ordinary[taking]
        room[taking] -= size[chosen]
        following = following + np.bincount(pool[takes], minlength=samples.num_pools)
    return bin_of


def _exchange(bins: Bins, bin_of: np.ndarray) -> np.ndarray:
    """The bin of each sample after exchanges between pairs of bins until nothing improves."""
    movable = np.flatnonzero(~bins.frozen)
    starts = np.searchsorted(bins.pool[movable], np.arange(bins.samples.num_pools + 1))
    halves = np.diff(starts) // 2
    num_pairs, num_dimensions = int(halves.sum()), bins.amounts.shape[1]
    if not num_pairs:
        return bin_of
    held = _Held(bins, bin_of)
    pool_of_pair = np.repeat(np.arange(len(halves)), halves)
    place = np.arange(num_pairs) - np.repeat(np.cumsum(halves) - halves, halves)
    tolerated = bins.targets // np.array([TOKENS_WITHIN, OTHERS_WITHIN])[:num_dimensions]
    most_pairs = max(MAX_TRIED // FEWEST**2 // (int(bins.pool[-1]) + 1), 1)
    unchanged = 0
    rounds = MAX_ROUNDS if num_pairs <= most_pairs else MAX_ROUNDS // 2
    if len(bin_of) < 2 * len(bins.pool):  # a swap of samples that are alone in their bins changes nothing
        rounds //= 4
    for k in range(rounds):
        dimension, shift = k % num_dimensions, k // num_dimensions
        # The fullest bin of a pool with the emptiest; in later rounds with a bin next to the emptiest.
        order = movable[np.lexsort((-held.excess[movable, dimension], bins.pool[movable]))]
        partner = (place + shift) % halves[pool_of_pair]
        fuller = order[starts[pool_of_pair] + place]
        emptier = order[starts[pool_of_pair + 1] - 1 - partner]
        too_full = (held.excess > tolerated).any(axis=1)
        if unchanged >= PATIENCE * num_dimensions or not too_full[movable].any():
            break
        pairs = (too_full[fuller] | too_full[emptier]) & (place < most_pairs)
        unchanged = 0 if pairs.any() and held.exchange(fuller[pairs], emptier[pairs], k) else unchanged + 1
    after = np.empty_like(bin_of)
    number, place = np.nonzero(held.rows != held.nobody)
    after[held.rows[number, place]] = number
    return after


class _Held:
    """The samples of each bin in rows of one width, filled up with empty places (`nobody`).

    excess: amount of each bin above its target [bins, dimensions].
    """

    def __init__(self, bins: Bins, bin_of: np.ndarray):
        self.count = np.bincount(bin_of, minlength=len(bins.pool))
        order = np.argsort(bin_of, kind="stable")
        place = np.arange(len(order)) - np.repeat(np.cumsum(self.count) - self.count, self.count)
        self.nobody = len(order)
        self.rows = np.full((len(bins.pool), int(self.count.max()) + 4), self.nobody)
        self.rows[bin_of[order], place] = order
        self.amounts = np.concatenate([bins.amounts, np.zeros((1, bins.amounts.shape[1]), dtype=np.int64)])
        self.excess = self.amounts[self.rows].sum(axis=1) - bins.targets

    def _places(self, chosen: np.ndarray, width: int, k: int) -> np.ndarray:
        """Places of each bin to try, one of them empty; different places in each round k if a bin has many samples."""
        count = self.count[chosen][:, None]
        few = np.arange(width)
        many = (k * (width - 1) + few * count // (width - 1)) % np.maximum(count, 1)
        many[:, -1:] = count
        places: np.ndarray = np.minimum(np.where(count < width, few, many), self.rows.shape[1] - 1)
        return places

    def exchange(self, fuller: np.ndarray, emptier: np.ndarray, k: int) -> bool:
        """Make the best exchange in each pair of bins; returns whether any helped."""
        width = min(max(math.isqrt(MAX_TRIED // len(fuller)), FEWEST), MOST, self.rows.shape[1])
        first_places, second_places = self._places(fuller, width, k), self._places(emptier, width, k)
        first = self.rows[fuller[:, None], first_places]
        second = self.rows[emptier[:, None], second_places]
        gap = np.clip(self.excess[fuller] - self.excess[emptier], -2 * LARGEST_AMOUNT, 2 * LARGEST_AMOUNT)
        amounts_given, amounts_taken = self.amounts.take(first, axis=0), self.amounts.take(second, axis=0)
        # With d = given - taken the squared distances change by 2 d (d - gap). This is half of that, expanded.
        by_given = np.einsum("psd,psd->ps", amounts_given, amounts_given - gap[:, None])
        by_taken = np.einsum("psd,psd->ps", amounts_taken, amounts_taken + gap[:, None])
        change = by_given[:, :, None] + by_taken[:, None, :]
        change -= 2 * amounts_given @ amounts_taken.transpose(0, 2, 1)
        # No exchange empties a bin.
        empties = (self.count[fuller] == 1)[:, None, None] & (second == self.nobody)[:, None, :]
        change[empties | ((self.count[emptier] == 1)[:, None, None] & (first == self.nobody)[:, :, None])] = 0
        change = change.reshape(len(fuller), -1)
        best = change.argmin(axis=1)
        helps = change[np.arange(len(fuller)), best] < 0
        fuller, emptier, best = fuller[helps], emptier[helps], best[helps]
        i, j = first_places[helps, best // width], second_places[helps, best % width]
        gives, takes = self.rows[fuller, i], self.rows[emptier, j]
        moved = self.amounts[gives] - self.amounts[takes]
        for bins, place, leaves, comes, added in ((fuller, i, gives, takes, -moved), (emptier, j, takes, gives, moved)):
            self.rows[bins, place] = comes
            self.excess[bins] += added
            # If a sample leaves and none comes, the last sample of the bin takes its place.
            shrinks = comes == self.nobody
            last = self.count[bins[shrinks]] - 1
            self.rows[bins[shrinks], place[shrinks]] = self.rows[bins[shrinks], last]
            self.rows[bins[shrinks], last] = self.nobody
            self.count[bins] += (leaves == self.nobody).astype(np.int64) - shrinks
        return bool(helps.any())
