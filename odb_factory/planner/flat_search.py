"""Fill flat bins: best fit, exchanges between pairs of bins, and exchanges by exact cost."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, insort
from dataclasses import dataclass, replace

import numpy as np

from odb_factory.planner.cost import Budget, by_number
from odb_factory.planner.flat import LARGEST_AMOUNT, Bins, FlatSamples

# ----------------------------------------------------------------------------------------------------------------------
# The exact cost of bins in micro-steps, and exchanges that lower it.

MOST_POLISHED = 1 << 15
"""Upper limit of exchanges tried."""
MOST_REPAIRED_OF_A_SAMPLE, FEWEST_REPAIRED, MOST_REPAIRED = 256, 1 << 18, 1 << 20
"""The same, of a sample and in all, if a bin breaks a budget: else the whole plan would be lost."""
MOST_PARTNERS = 256
"""A bin exchanges samples with so many others at most: those that cost least."""
CLOSE_ENOUGH = 1024
"""Nothing is tried if at most 1/CLOSE_ENOUGH of the cost could be saved."""
FAR_OVER = 1 << 40


@dataclass(eq=False)
class Filled:
    """Samples in bins in micro-steps. Ranks wait for the most tokens and the most patches of each.

    bin_of: of each sample [n]. pool, step: of each bin [bins].
    frozen: it holds an overlong sample [bins]. sums: of `FlatSamples.measures` [bins, 4].
    """

    samples: FlatSamples
    bin_of: np.ndarray
    pool: np.ndarray
    step: np.ndarray

    def __post_init__(self) -> None:
        self.frozen = np.bincount(self.bin_of, self.samples.overlong, minlength=len(self.step)) > 0
        self.num_steps = int(self.step.max(initial=-1)) + 1
        self.sums = self.samples.sums(self.bin_of, len(self.step))

    def maxima(self) -> np.ndarray:
        """Of each micro-step [micro-steps, 2]."""
        return by_number(self.step, self.samples.shapes(self.sums), self.num_steps, np.maximum)

    @property
    def cost(self) -> int:
        """What ranks wait for in all micro-steps."""
        return int((self.samples.step_price + self.maxima() @ self.samples.prices).sum())

    @property
    def within(self) -> bool:
        """Whether all bins but those of overlong samples are within the budgets."""
        return not self.samples.excess(self.sums[~self.frozen]).any()


def polish(filled: Filled, bound: int) -> None:
    """Exchange samples of the bins that all wait for, or that break a budget, with those of other bins.

    An exchange of two samples, or a move of one, is made if less of the budgets is broken afterwards, or as much and
    the cost is lower. Done when the cost is close to `bound`, when nothing helps, or after a bounded number of trials.
    """
    trials_left = min(max(MOST_REPAIRED_OF_A_SAMPLE * len(filled.samples), FEWEST_REPAIRED), MOST_REPAIRED)
    if filled.within:
        trials_left = MOST_POLISHED
    while not (filled.within and filled.cost - bound <= bound // CLOSE_ENOUGH):
        for critical in _critical(filled):
            to_give, to_take, partner = _exchanges(filled, critical)
            trials_left -= len(to_give) * len(to_take)
            if trials_left < 0:
                return
            if len(to_take) and _improve(filled, critical, to_give, to_take, partner):
                break
        else:
            return


def _critical(filled: Filled) -> list[int]:
    """Bins that break a budget, the worst first, or else those that have the most of their micro-step in anything."""
    over = np.where(filled.frozen, 0, filled.samples.excess(filled.sums))
    if over.any():
        critical = np.argsort(-over, kind="stable")[: np.count_nonzero(over)]
    else:
        at_most = (filled.samples.shapes(filled.sums) == filled.maxima()[filled.step]) & (filled.samples.prices > 0)
        critical = np.flatnonzero(at_most.any(axis=1) & ~filled.frozen)
    return [int(i) for i in critical]


def _exchanges(filled: Filled, critical: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Samples that a bin may give, samples that it may take, and the bin of each of these; the number of samples stands
    for none."""
    partners = np.flatnonzero((filled.pool == filled.pool[critical]) & ~filled.frozen)
    partners = partners[partners != critical]
    if len(partners) > MOST_PARTNERS:
        costs = filled.samples.shapes(filled.sums[partners]) @ filled.samples.prices
        partners = np.sort(partners[np.argsort(costs, kind="stable")[:MOST_PARTNERS]])
    partner_samples, nobody = np.flatnonzero(np.isin(filled.bin_of, partners)), len(filled.samples)
    to_give = np.append(np.flatnonzero(filled.bin_of == critical), nobody)
    to_take = np.concatenate([partner_samples, np.full(len(partners), nobody)])
    return to_give, to_take, np.concatenate([filled.bin_of[partner_samples], partners])


def _improve(filled: Filled, critical: int, to_give: np.ndarray, to_take: np.ndarray, partner: np.ndarray) -> bool:
    """Make the best exchange of one of `to_give` for one of `to_take`; whether there is one that helps."""
    samples, nobody = filled.samples, len(filled.samples)
    measures = np.concatenate([samples.measures, np.zeros_like(samples.measures[:1])])
    moved = measures[to_give][:, None] - measures[to_take][None]
    after, after_partner = filled.sums[critical] - moved, filled.sums[partner] + moved
    over = samples.excess(after) + samples.excess(after_partner)
    over -= samples.excess(filled.sums[critical]) + samples.excess(filled.sums[partner])
    change = _change(filled, critical, partner, samples.shapes(after), samples.shapes(after_partner))
    count = np.bincount(filled.bin_of, minlength=len(filled.step))
    empties = (to_give != nobody)[:, None] & (to_take == nobody) & (count[critical] == 1)
    empties |= (to_give == nobody)[:, None] & (to_take != nobody) & (count[partner] == 1)
    over[empties] = FAR_OVER
    min_over = int(over.min())
    chosen = int(np.where(over == min_over, change, np.iinfo(np.int64).max).argmin())
    if min_over > 0 or (min_over == 0 and change.flat[chosen] >= 0):
        return False
    i, j = divmod(chosen, len(to_take))
    if to_give[i] != nobody:
        filled.bin_of[to_give[i]] = partner[j]
    if to_take[j] != nobody:
        filled.bin_of[to_take[j]] = critical
    filled.sums[critical], filled.sums[partner[j]] = after[i, j], after_partner[i, j]
    return True


def _change(
    filled: Filled, critical: int, partner: np.ndarray, after: np.ndarray, after_partner: np.ndarray
) -> np.ndarray:
    """What is added to the cost of all once two bins have these shapes: `critical` and, of each column, `partner`."""
    step, maxima, shapes = filled.step, filled.maxima(), filled.samples.shapes(filled.sums)
    shapes[critical] = 0
    without = by_number(step, shapes, len(maxima), np.maximum)
    # The most of a micro-step without a bin is the second most, if only that bin has the most.
    is_most = shapes == without[step]
    num_most = by_number(step, is_most, len(maxima))
    second = by_number(step, np.where(is_most, 0, shapes), len(maxima), np.maximum)
    without_partner = np.where(is_most & (num_most[step] == 1), second[step], without[step])[partner]
    shared = (step[partner] == step[critical])[:, None]
    partner_maxima = np.maximum(without_partner, after_partner)
    critical_maxima = np.maximum(np.where(shared, partner_maxima, without[step[critical]]), after)
    changed = critical_maxima - maxima[step[critical]] + np.where(shared, 0, partner_maxima - maxima[step[partner]])
    change: np.ndarray = changed @ filled.samples.prices
    return change


# ----------------------------------------------------------------------------------------------------------------------
# Best fit (Johnson 1973): samples go, one at a time, into the bin with the least room that holds them.
# Bins stay within the budgets by construction, which exchanges do not promise.

MAX_LOOKS = 64
"""Number of bins tried for a sample."""


def best_fit_decreasing(samples: FlatSamples, least_steps: int = 0) -> Filled:
    """Bins in no particular micro-steps; in `least_steps` at least, and no slot is empty as far as there are samples.

    So the last samples of a pool, the smallest, go alone if it has no more of them than slots to fill (I7).
    Room is measured in the budget that is used up more: tokens or patches.
    """
    budget, measures = samples.budget, samples.measures.tolist()
    tokens, patches = (int(total) for total in samples.measures[~samples.overlong, :2].sum(axis=0))
    is_patches = budget.max_patches is not None and patches * budget.token_budget > tokens * budget.max_patches
    column, capacity = (1, budget.max_patches or 0) if is_patches else (0, budget.token_budget)
    limit = {(media, audio): _most_of_a_bin(budget, media, audio) for media in (False, True) for audio in (False, True)}
    num_left = np.bincount(samples.pool).tolist()
    num_bins, missing = [0] * len(num_left), [least_steps * samples.slots] * len(num_left)
    bin_of, pool_of_bin, sums = [0] * len(samples), list[int](), list[list[int]]()
    by_room: dict[int, list[tuple[int, int]]] = {}
    details = list(zip(measures, samples.pool.tolist(), samples.overlong.tolist()))
    for sample in sorted(range(len(samples)), key=lambda i: measures[i][column], reverse=True):
        measure, pool, overlong = details[sample]
        rooms, number = by_room.setdefault(pool, []), len(sums)
        first = len(rooms) if overlong or num_left[pool] <= missing[pool] else bisect_left(rooms, (measure[column], -1))
        num_left[pool] -= 1
        for place in range(first, min(first + MAX_LOOKS, len(rooms))):
            new_sums = list(map(operator.add, sums[rooms[place][1]], measure))
            if all(map(operator.le, new_sums[:2], limit[new_sums[2] > 0, new_sums[3] > 0])):
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
    num_steps = max(-(-count // samples.slots) for count in num_bins)
    if (np.array(num_bins) < np.minimum(num_steps * samples.slots, np.bincount(samples.pool))).any():
        return best_fit_decreasing(samples, num_steps)
    order = np.argsort(pool_of_bin, kind="stable")
    place_of = np.empty_like(order)
    place_of[order] = np.arange(len(order))
    return Filled(samples, place_of[bin_of], np.array(pool_of_bin)[order], np.zeros_like(order))


def _most_of_a_bin(budget: Budget, media: bool, audio: bool) -> tuple[float, float]:
    """The most tokens and patches that the samples of a bin may have, with media and audio or not."""
    dummy_tokens, dummy_patches = budget.collation.dummies(int(media), int(audio))
    tokens = budget.token_budget // budget.pad_to_multiple_of * budget.pad_to_multiple_of - dummy_tokens
    patches = math.inf if budget.max_patches is None else budget.max_patches - dummy_patches
    return tokens, patches


# ----------------------------------------------------------------------------------------------------------------------
# Fill bins: the largest samples first, then exchanges between pairs of bins, in all pairs at once.
# The start is Graham's rule of the longest processing time (1969), many bins at a time. The exchanges are a local
# search as in Kernighan and Lin's (1970): a pair of bins exchanges two samples, or moves one, so that the squared
# distances from their targets, summed over all dimensions, fall by most.

MAX_ROUNDS, PATIENCE = 64, 8
"""Maximum rounds of pairing; stop after PATIENCE rounds without a change in any dimension."""
TOKENS_WITHIN, OTHERS_WITHIN = 4096, 128
"""A bin is left alone if its excess is at most target / TOKENS_WITHIN (other dimensions: OTHERS_WITHIN)."""
TOKENS_COUNT_MORE = 4
"""Weight of tokens against other dimensions once the targets of these are known to be out of reach."""
MAX_TRIED, FEWEST, MOST = 1 << 16, 6, 32
"""About MAX_TRIED exchanges are tried in a round, between FEWEST and MOST samples of a bin."""


def fill_bins(bins: Bins) -> np.ndarray:
    """The bin of each sample [n]. No bin is empty; whether they are within the budgets is for the caller to see."""
    bin_of = _largest_first(bins)
    _fill_empty(bins, bin_of)
    _exchange(bins, bin_of)
    if bins.amounts.shape[1] > 1:
        _exchange(_with_reached_targets(bins, bin_of), bin_of)
    return bin_of


def _with_reached_targets(bins: Bins, bin_of: np.ndarray) -> Bins:
    """The bins with other targets for all dimensions but tokens: what the bins of each micro-step hold in the mean.

    Tokens and patches cannot always reach their targets together. Tokens then count more, for they have a budget.
    """
    reached = by_number(bin_of, bins.amounts, len(bins))
    _, kind = np.unique(np.stack([bins.pool, bins.step, bins.frozen]), axis=1, return_inverse=True)
    means = (by_number(kind, reached, int(kind.max()) + 1) // np.bincount(kind)[:, None])[kind]
    means[:, 0] = bins.targets[:, 0]
    weights = np.array([1] + [TOKENS_COUNT_MORE] * (reached.shape[1] - 1))
    return replace(bins, amounts=bins.amounts // weights, targets=means // weights)


def _largest_first(bins: Bins) -> np.ndarray:
    """Each sample goes where most is missing, the largest first.

    One at a time that would be slow. So all bins with about as much room as the roomiest take one at once: those that
    would get a sample before this one got its second.
    """
    samples, bin_of = bins.samples, np.empty(len(bins.samples), dtype=np.int64)
    overlong = np.flatnonzero(samples.overlong)
    # Here all dimensions count alike: if one of them has few large samples these must be spread before all others.
    totals = bins.amounts.sum(axis=0)
    scale = np.maximum(totals.max() // np.maximum(totals, 1), 1)
    size, targets = bins.amounts @ scale, bins.targets @ scale
    overlong = overlong[np.lexsort((-size[overlong], samples.pool[overlong]))]
    bin_of[overlong] = np.flatnonzero(bins.frozen)
    order = np.flatnonzero(~samples.overlong)
    order = order[np.lexsort((-size[order], samples.pool[order]))]
    pools = np.arange(samples.num_pools)
    ends = np.searchsorted(samples.pool[order], pools, side="right")
    following = np.searchsorted(samples.pool[order], pools)
    ordinary = np.flatnonzero(~bins.frozen)
    pool, room = bins.pool[ordinary], targets[ordinary]
    start = np.searchsorted(pool, pools)
    place = np.arange(len(ordinary)) - start[pool]
    while (num_left := ends - following).any():
        by_room = np.lexsort((-room, pool)) if len(pools) > 1 else np.argsort(-room, kind="stable")
        sorted_room = room[by_room]
        is_open = num_left > 0
        min_room = np.zeros(len(pools), dtype=np.int64)
        min_room[is_open] = sorted_room[start[is_open]] - size[order[following[is_open]]]
        takes = (place < num_left[pool]) & ((sorted_room > min_room[pool]) | (place == 0))
        taking = by_room[takes]
        chosen = order[following[pool[takes]] + place[takes]]
        bin_of[chosen] = ordinary[taking]
        room[taking] -= size[chosen]
        following = following + np.bincount(pool[takes], minlength=len(pools))
    return bin_of


def _fill_empty(bins: Bins, bin_of: np.ndarray) -> None:
    """A bin without a sample takes the smallest from the one that has most of its pool."""
    count = np.bincount(bin_of, minlength=len(bins))
    for empty in np.flatnonzero(count == 0).tolist():
        giver = int(np.where(bins.pool == bins.pool[empty], count, 0).argmax())
        giver_samples = np.flatnonzero(bin_of == giver)
        bin_of[giver_samples[bins.amounts[giver_samples, 0].argmin()]] = empty
        count[giver], count[empty] = count[giver] - 1, 1


def _exchange(bins: Bins, bin_of: np.ndarray) -> None:
    """Exchange samples between pairs of bins until nothing improves. Changes `bin_of`."""
    movable = np.flatnonzero(~bins.frozen)
    starts = np.searchsorted(bins.pool[movable], np.arange(bins.samples.num_pools + 1))
    halves = np.diff(starts) // 2
    num_pairs = int(halves.sum())
    if not num_pairs:
        return
    held = _Held(bins, bin_of)
    num_dimensions = bins.amounts.shape[1]
    pool_of_pair = np.repeat(np.arange(len(halves)), halves)
    place = np.arange(num_pairs) - np.repeat(np.cumsum(halves) - halves, halves)
    tolerated = bins.targets // np.array([TOKENS_WITHIN, *[OTHERS_WITHIN] * (num_dimensions - 1)])
    most_pairs = max(MAX_TRIED // FEWEST**2 // len(halves), 1)
    unchanged = 0
    rounds = MAX_ROUNDS if num_pairs <= most_pairs else MAX_ROUNDS // 2
    if len(bin_of) < 2 * len(bins):  # to swap samples that are alone in their bins changes nothing
        rounds //= 4
    for k in range(rounds):
        dimension, shift = k % num_dimensions, k // num_dimensions
        # The fullest of a pool with its emptiest; in later rounds with one beside that.
        order = movable[np.lexsort((-held.excess[movable, dimension], bins.pool[movable]))]
        partner = (place + shift) % halves[pool_of_pair]
        fuller = order[starts[pool_of_pair] + place]
        emptier = order[starts[pool_of_pair + 1] - 1 - partner]
        too_full = (held.excess > tolerated).any(axis=1)
        if unchanged >= PATIENCE * num_dimensions or not too_full[movable].any():
            break
        pairs = (too_full[fuller] | too_full[emptier]) & (place < most_pairs)
        unchanged = 0 if pairs.any() and held.exchange(fuller[pairs], emptier[pairs], k) else unchanged + 1
    held.write(bin_of)


class _Held:
    """The samples of each bin in rows of one width, empty places behind them.

    excess: by how much each bin is fuller than its target [bins, dimensions].
    """

    def __init__(self, bins: Bins, bin_of: np.ndarray):
        self.count = np.bincount(bin_of, minlength=len(bins))
        order = np.argsort(bin_of, kind="stable")
        place = np.arange(len(order)) - np.repeat(np.cumsum(self.count) - self.count, self.count)
        self.nobody = len(order)
        self.rows = np.full((len(bins), int(self.count.max()) + 4), self.nobody)
        self.rows[bin_of[order], place] = order
        self.amounts = np.concatenate([bins.amounts, np.zeros((1, bins.amounts.shape[1]), dtype=np.int64)])
        self.excess = self.amounts[self.rows].sum(axis=1) - bins.targets

    def _places(self, chosen: np.ndarray, width: int, k: int) -> np.ndarray:
        """Places to exchange of each bin, an empty one among them: others in each round, if there are many."""
        count = self.count[chosen][:, None]
        few = np.arange(width)
        many = (k * (width - 1) + few * count // (width - 1)) % np.maximum(count, 1)
        many[:, -1:] = count
        places: np.ndarray = np.minimum(np.where(count < width, few, many), self.rows.shape[1] - 1)
        return places

    def exchange(self, fuller: np.ndarray, emptier: np.ndarray, k: int) -> bool:
        """In each pair of bins the exchange that helps most; whether any did."""
        width = min(max(math.isqrt(MAX_TRIED // len(fuller)), FEWEST), MOST, self.rows.shape[1])
        first_places, second_places = self._places(fuller, width, k), self._places(emptier, width, k)
        first = self.rows[fuller[:, None], first_places]
        second = self.rows[emptier[:, None], second_places]
        gap = np.clip(self.excess[fuller] - self.excess[emptier], -2 * LARGEST_AMOUNT, 2 * LARGEST_AMOUNT)
        amounts_given, amounts_taken = self.amounts.take(first, axis=0), self.amounts.take(second, axis=0)
        # With d given less what is taken, squared distances change by 2 d (d - gap): here half of it, written out.
        by_given = np.einsum("psd,psd->ps", amounts_given, amounts_given - gap[:, None])
        by_taken = np.einsum("psd,psd->ps", amounts_taken, amounts_taken + gap[:, None])
        change = by_given[:, :, None] + by_taken[:, None, :]
        change -= 2 * amounts_given @ amounts_taken.transpose(0, 2, 1)
        # No bin is emptied: one that gives its last sample gets another for it.
        alone, also_alone = self.count[fuller] == 1, self.count[emptier] == 1
        if alone.any() or also_alone.any():
            empties = alone[:, None, None] & (second == self.nobody)[:, None, :]
            change[empties | (also_alone[:, None, None] & (first == self.nobody)[:, :, None])] = 0
        change = change.reshape(len(fuller), -1)
        best = change.argmin(axis=1)
        helps = change[np.arange(len(fuller)), best] < 0
        if not helps.any():
            return False
        fuller, emptier, best = fuller[helps], emptier[helps], best[helps]
        i, j = first_places[helps, best // width], second_places[helps, best % width]
        gives, takes = self.rows[fuller, i], self.rows[emptier, j]
        self.rows[fuller, i], self.rows[emptier, j] = takes, gives
        moved = self.amounts[gives] - self.amounts[takes]
        self.excess[fuller] -= moved
        self.excess[emptier] += moved
        self._close_up(fuller[takes == self.nobody], i[takes == self.nobody])
        self._close_up(emptier[gives == self.nobody], j[gives == self.nobody])
        self.count[fuller] += (gives == self.nobody).astype(np.int64) - (takes == self.nobody)
        self.count[emptier] += (takes == self.nobody).astype(np.int64) - (gives == self.nobody)
        return True

    def _close_up(self, givers: np.ndarray, place: np.ndarray) -> None:
        """The last sample of a bin takes the place of the one that left."""
        last = self.count[givers] - 1
        self.rows[givers, place] = self.rows[givers, last]
        self.rows[givers, last] = self.nobody

    def write(self, bin_of: np.ndarray) -> None:
        bins, place = np.nonzero(self.rows != self.nobody)
        bin_of[self.rows[bins, place]] = bins
