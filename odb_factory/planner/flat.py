"""The flat planner: cut samples into bins, whose tokens and patches are sums over their samples.

For a number of micro-steps, each bin gets a target, and samples that reach it; `best_bins` chooses the number.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from odb_factory.planner.cost import by_number
from odb_factory.planner.plan import Samples, Step, to_steps

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


# ----------------------------------------------------------------------------------------------------------------------
# Cut samples of one modality into flat micro-batches: K even bins for every rank.
# Ranks that share parameters wait for each other in the vision tower and again in the language model. So a micro-step
# costs the price of the most tokens of any rank plus the price of the most patches of any rank.

FEW_SAMPLES = 4096
"""For more samples than this the result of best fit is final: to improve it would take too long."""
FLAT_CANDIDATES = 3
"""Number of values of K tried, from the K of best fit down. If a smaller K fits it is not more expensive, because two
micro-steps cost no less than one with the samples of both. A larger K is needed if exchanges cannot fill bins enough.
"""


@dataclass(eq=False)
class Filled:
    """Samples in bins in micro-steps. Ranks wait for the most tokens and for the most patches of each micro-step.

    bin_of: the bin of each sample [n]. pool, step: the pool and the micro-step of each bin [bins].
    frozen: the bin holds an overlong sample [bins]. sums: sums of the measures of its samples [bins, 4].
    """

    samples: Samples
    bin_of: np.ndarray
    pool: np.ndarray
    step: np.ndarray

    def __post_init__(self) -> None:
        self.frozen = np.bincount(self.bin_of, self.samples.overlong, minlength=len(self.step)) > 0
        self.sums = by_number(self.bin_of, self.samples.measures, len(self.step))

    @property
    def num_steps(self) -> int:
        return int(self.step.max()) + 1

    def maxima(self) -> np.ndarray:
        """The most tokens and the most patches of any bin of each micro-step [micro-steps, 2]."""
        return by_number(self.step, self.samples.shapes(self.sums), self.num_steps, np.maximum)

    @property
    def cost(self) -> int:
        """The cost of all micro-steps."""
        return int((self.samples.step_price + self.maxima() @ self.samples.prices).sum())

    def over(self) -> np.ndarray:
        """Tokens and patches of each bin above the budgets; 0 for bins of overlong samples [bins]."""
        return np.where(self.frozen, 0, self.samples.excess(self.sums))

    def matched(self) -> Filled:
        """The bins in other micro-steps: the costliest bins of each pool in the first micro-step, and so on."""
        order = np.lexsort((-(self.samples.shapes(self.sums) @ self.samples.prices), self.pool))
        step = np.empty_like(self.step)
        step[order] = (np.arange(len(order)) - np.searchsorted(self.pool, self.pool)) // self.samples.slots
        return replace(self, step=step)

    def without_excess(self) -> Filled:
        """The bins, of which those that break a budget lose their shortest samples, but never the oldest sample."""
        samples, bin_of, sums = self.samples, self.bin_of.copy(), self.sums.copy()
        tokens, position = samples.measures[:, 0], samples.rows["position"]
        for number in np.flatnonzero(self.over()).tolist():
            in_bin = np.flatnonzero(bin_of == number)
            younger = np.delete(in_bin, position[in_bin].argmin())
            for out in younger[np.argsort(tokens[younger], kind="stable")].tolist():
                bin_of[out] = -1
                sums[number] -= samples.measures[out]
                if not samples.excess(sums[number]):
                    break
        stays = np.flatnonzero(bin_of >= 0)
        return replace(self, samples=samples.of(stays), bin_of=bin_of[stays])

    def steps(self) -> list[Step]:
        """The groups of each micro-step."""
        ends = np.cumsum(np.bincount(self.bin_of, minlength=len(self.step)))
        groups = np.split(self.samples.index[np.argsort(self.bin_of, kind="stable")], ends[:-1])
        return to_steps(self.step, self.pool, groups)


def best_bins(samples: Samples) -> Filled:
    """All samples in bins, within the budgets."""
    needed = bins_needed(samples, (samples.budget.token_budget, samples.budget.max_patches))
    min_steps = -(-int(needed.max()) // samples.slots)
    best = put_into_bins(samples, min_steps)
    _polish(best, min_steps)
    if not best.over().any():
        return best
    best = best_fit_decreasing(samples).matched()
    first, last = best.num_steps - FLAT_CANDIDATES + 1, best.num_steps + 1
    if len(samples) > FEW_SAMPLES:
        first = last = best.num_steps
    for num_steps in range(max(min_steps + 1, first), last + 1):
        if _lower_bound(samples, num_steps) < best.cost:
            candidate = put_into_bins(samples, num_steps)
            _polish(candidate, num_steps)
            best = candidate if not candidate.over().any() and candidate.cost < best.cost else best
    return best


def put_into_bins(samples: Samples, num_steps: int) -> Filled:
    """All samples in bins of `num_steps` micro-steps; the bins may break the budgets.

    If bins end far from their targets, because few sizes of samples fit together, matching them by cost is better.
    """
    bins = make_bins(samples, num_steps)
    filled = Filled(samples, fill_bins(bins), bins.pool, bins.step)
    return min(filled, filled.matched(), key=lambda candidate: candidate.cost)


def _lower_bound(samples: Samples, num_steps: int) -> int:
    """A lower bound of the cost: in each measure the mean of a pool, or the largest sample."""
    measures = samples.measures[:, :2]
    sums = by_number(samples.pool, measures, samples.num_pools)
    largest = np.maximum((-(-sums // samples.slots)).max(axis=0), measures.max(axis=0))
    return num_steps * samples.step_price + int(largest @ samples.prices)


# ----------------------------------------------------------------------------------------------------------------------
# The exact cost of bins in micro-steps, and exchanges that lower it.

MOST_POLISHED = 1 << 15
"""Maximum number of exchanges tried."""
MOST_REPAIRED_OF_A_SAMPLE, FEWEST_REPAIRED, MOST_REPAIRED = 256, 1 << 18, 1 << 20
"""Maxima for each sample and in total if a bin breaks a budget, because otherwise the whole plan is lost."""
MOST_PARTNERS = 256
"""A bin exchanges samples with so many others at most: those that cost least."""
CLOSE_ENOUGH = 1024
"""Nothing is tried if at most 1/CLOSE_ENOUGH of the cost could be saved."""
FAR_OVER = 1 << 40


def _polish(filled: Filled, num_steps: int) -> None:
    """Exchange samples of the bins that all ranks wait for, or that break a budget, with samples of other bins.

    An exchange of two samples, or a move of one, helps if it lowers the excess over the budgets, or the cost at equal
    excess. Ends when the cost is close to its lower bound, when nothing helps, or after a bounded number of trials.
    """
    samples, bound = filled.samples, _lower_bound(filled.samples, num_steps)
    trials_left = MOST_POLISHED
    if filled.over().any():
        trials_left = min(max(MOST_REPAIRED_OF_A_SAMPLE * len(samples), FEWEST_REPAIRED), MOST_REPAIRED)
    helps = True
    while helps:
        # Bins that break a budget, the worst first, or else bins with the most tokens or patches of their micro-step.
        over = filled.over()
        critical = np.argsort(-over, kind="stable")[: np.count_nonzero(over)]
        if not len(critical):
            if filled.cost - bound <= bound // CLOSE_ENOUGH:
                return
            at_most = (samples.shapes(filled.sums) == filled.maxima()[filled.step]) & (samples.prices > 0)
            critical = np.flatnonzero(at_most.any(axis=1) & ~filled.frozen)
        helps = False
        for giver in critical.tolist():
            # The samples that the giver may give, the samples that it may take, and the bin of each of the latter.
            partners = np.flatnonzero((filled.pool == filled.pool[giver]) & ~filled.frozen)
            partners = partners[partners != giver]
            if len(partners) > MOST_PARTNERS:
                costs = samples.shapes(filled.sums[partners]) @ samples.prices
                partners = np.sort(partners[np.argsort(costs, kind="stable")[:MOST_PARTNERS]])
            partner_samples, nobody = np.flatnonzero(np.isin(filled.bin_of, partners)), len(samples)
            to_give = np.append(np.flatnonzero(filled.bin_of == giver), nobody)
            to_take = np.concatenate([partner_samples, np.full(len(partners), nobody)])
            trials_left -= len(to_give) * len(to_take)
            if trials_left < 0:
                return
            partner = np.concatenate([filled.bin_of[partner_samples], partners])
            if helps := len(to_take) > 0 and _improve(filled, giver, to_give, to_take, partner):
                break


def _improve(filled: Filled, giver: int, to_give: np.ndarray, to_take: np.ndarray, partner: np.ndarray) -> bool:
    """Make the best exchange of one of `to_give` for one of `to_take`; returns whether any helps.

    partner: the bin of each of `to_take`. The number len(samples) stands for no sample.
    """
    samples, sums, step, nobody = filled.samples, filled.sums, filled.step, len(filled.samples)
    measures = np.concatenate([samples.measures, np.zeros_like(samples.measures[:1])])
    moved = measures[to_give][:, None] - measures[to_take][None]
    after, after_partner = sums[giver] - moved, sums[partner] + moved
    over = samples.excess(after) + samples.excess(after_partner)
    over -= samples.excess(sums[giver]) + samples.excess(sums[partner])
    count = np.bincount(filled.bin_of, minlength=len(step))
    over[(to_give != nobody)[:, None] & (to_take == nobody) & (count[giver] == 1)] = FAR_OVER  # it would be empty
    over[(to_give == nobody)[:, None] & (to_take != nobody) & (count[partner] == 1)] = FAR_OVER
    # The change of the cost. Without the partner the maximum of a micro-step is the second largest value, if only the
    # partner has the largest.
    maxima, shapes = filled.maxima(), samples.shapes(sums)
    shapes[giver] = 0
    without = by_number(step, shapes, len(maxima), np.maximum)
    is_most = shapes == without[step]
    num_most = by_number(step, is_most, len(maxima))
    second = by_number(step, np.where(is_most, 0, shapes), len(maxima), np.maximum)
    without_partner = np.where(is_most & (num_most[step] == 1), second[step], without[step])[partner]
    partner_maxima = np.maximum(without_partner, samples.shapes(after_partner))
    shared = (step[partner] == step[giver])[:, None]
    giver_maxima = np.maximum(np.where(shared, partner_maxima, without[step[giver]]), samples.shapes(after))
    added = giver_maxima - maxima[step[giver]] + np.where(shared, 0, partner_maxima - maxima[step[partner]])
    change, min_over = added @ samples.prices, int(over.min())
    i, j = divmod(int(np.where(over == min_over, change, np.iinfo(np.int64).max).argmin()), len(to_take))
    if min_over > 0 or (min_over == 0 and change[i, j] >= 0):
        return False
    for sample, number in ((to_give[i], partner[j]), (to_take[j], giver)):
        if sample != nobody:
            filled.bin_of[sample] = number
    sums[giver], sums[partner[j]] = after[i, j], after_partner[i, j]
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Best fit (Johnson 1973): each sample goes into the bin with the least room that is enough for it.
# Unlike with exchanges, bins are within the budgets by construction.

MAX_LOOKS = 64
"""Number of bins tried for a sample."""


def best_fit_decreasing(samples: Samples, least_steps: int = 0) -> Filled:
    """Bins for at least `least_steps` micro-steps, all in step 0. No slot is empty as long as there are samples.

    So the last and smallest samples of a pool go alone if it has no more of them than slots to fill (I7).
    Room is measured in the budget that the samples use up more: tokens or patches.
    """
    budget = samples.budget
    # The measure that rooms are kept in, and the bounds of a bin by the dummy media that its row needs.
    tokens, patches = samples.measures[~samples.overlong, :2].sum(axis=0).tolist()
    column, capacity = 0, budget.token_budget
    if budget.max_patches is not None and patches * budget.token_budget > tokens * budget.max_patches:
        column, capacity = 1, budget.max_patches
    # Maximum tokens and patches of the samples of a bin, for bins with and without media and audio.
    most_tokens = budget.token_budget // budget.pad_to_multiple_of * budget.pad_to_multiple_of
    most = np.array([most_tokens, math.inf if budget.max_patches is None else budget.max_patches])
    kinds = itertools.product((False, True), repeat=2)
    limits = {kind: (most - budget.collation.dummies(*kind)).tolist() for kind in kinds}
    # Of each pool: samples left, bins, bins that fill the last micro-step, rooms in rising order.
    count = np.bincount(samples.pool, minlength=samples.num_pools)
    num_left, num_bins = count.tolist(), [0] * samples.num_pools
    missing = [least_steps * samples.slots] * samples.num_pools
    bin_of, pool_of_bin, sums = np.empty_like(samples.index), list[int](), list[list[int]]()
    rooms_of_pool: list[list[tuple[int, int]]] = [[] for _ in num_bins]
    details = list(zip(samples.measures.tolist(), samples.pool.tolist(), samples.overlong.tolist()))
    # The largest sample first, into the least room that holds it; alone if bins are missing.
    for sample in np.argsort(-samples.measures[:, column], kind="stable").tolist():
        measure, pool, overlong = details[sample]
        rooms, number = rooms_of_pool[pool], len(sums)
        first = len(rooms) if overlong or num_left[pool] <= missing[pool] else bisect_left(rooms, (measure[column], -1))
        num_left[pool] -= 1
        for place in range(first, min(first + MAX_LOOKS, len(rooms))):
            new_sums = list(map(operator.add, sums[rooms[place][1]], measure))
            if all(map(operator.le, new_sums[:2], limits[new_sums[2] > 0, new_sums[3] > 0])):
                _, number = rooms.pop(place)
                sums[number] = new_sums
                break
        else:
            sums.append(measure)
            pool_of_bin.append(pool)
            num_bins[pool] += 1
            missing[pool] = max(-(-num_bins[pool] // samples.slots), least_steps) * samples.slots - num_bins[pool]
        bin_of[sample] = number
        if not overlong:
            insort(rooms, (capacity - sums[number][column], number))
    # All pools have the steps of the largest; bins are numbered by pool.
    num_steps = -(-max(num_bins) // samples.slots)
    if (num_bins < np.minimum(num_steps * samples.slots, count)).any():
        return best_fit_decreasing(samples, num_steps)
    order = np.argsort(pool_of_bin, kind="stable")
    return Filled(samples, np.argsort(order)[bin_of], np.array(pool_of_bin)[order], np.zeros_like(order))
