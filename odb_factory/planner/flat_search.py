"""Cut samples of one modality into flat micro-batches: K even bins for every rank.

Ranks that share parameters wait for each other in the vision tower and again in the language model. So a micro-step
costs the price of the most tokens of any rank plus the price of the most patches of any rank.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left, insort
from dataclasses import dataclass, replace

import numpy as np

from odb_factory.planner.cost import by_number
from odb_factory.planner.flat import bins_needed, fill_bins, make_bins
from odb_factory.planner.plan import Samples, Step, to_steps

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
    tokens, patches = samples.measures[~samples.overlong, :2].sum(axis=0).tolist()
    column, capacity = 0, budget.token_budget
    if budget.max_patches is not None and patches * budget.token_budget > tokens * budget.max_patches:
        column, capacity = 1, budget.max_patches
    # Maximum tokens and patches of the samples of a bin, for bins with and without media and audio.
    most_tokens = budget.token_budget // budget.pad_to_multiple_of * budget.pad_to_multiple_of
    most = np.array([most_tokens, math.inf if budget.max_patches is None else budget.max_patches])
    kinds = itertools.product((False, True), repeat=2)
    limits = {kind: (most - budget.collation.dummies(*kind)).tolist() for kind in kinds}
    count = np.bincount(samples.pool, minlength=samples.num_pools)
    num_left, num_bins = count.tolist(), [0] * samples.num_pools
    missing = [least_steps * samples.slots] * samples.num_pools
    bin_of, pool_of_bin, sums = np.empty_like(samples.index), list[int](), list[list[int]]()
    rooms_of_pool: list[list[tuple[int, int]]] = [[] for _ in num_bins]
    details = list(zip(samples.measures.tolist(), samples.pool.tolist(), samples.overlong.tolist()))
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
    num_steps = -(-max(num_bins) // samples.slots)
    if (num_bins < np.minimum(num_steps * samples.slots, count)).any():
        return best_fit_decreasing(samples, num_steps)
    order = np.argsort(pool_of_bin, kind="stable")
    return Filled(samples, np.argsort(order)[bin_of], np.array(pool_of_bin)[order], np.zeros_like(order))
