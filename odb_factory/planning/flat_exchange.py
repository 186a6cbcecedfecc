"""Fill bins: the largest samples first, then exchanges between pairs of bins, in all pairs at once.

The start is Graham's rule of the longest processing time (1969), many bins at a time. The exchanges are a local search
as in Kernighan and Lin's (1970): a pair of bins exchanges two samples, or moves one, so that the squared distances
from their targets, summed over all dimensions, fall by most.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from odb_factory.planning.flat_bins import LARGEST_AMOUNT, Bins

MAX_ROUNDS, PATIENCE = 64, 8
"""Bins are paired at most so often, and no more once nothing has changed in so many rounds in all dimensions."""
TOKENS_WITHIN, OTHERS_WITHIN = 4096, 128
"""Nothing is done for a bin that is fuller than its target by no more than one part in so many."""
TOKENS_COUNT_MORE = 4
"""Weight of tokens against other dimensions once the targets of these are known to be out of reach."""
MAX_TRIED, FEWEST, MOST = 1 << 16, 6, 32
"""In a round about so many exchanges are tried, of at least and at most so many samples of a bin."""


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
    held = np.zeros_like(bins.targets)
    np.add.at(held, bin_of, bins.amounts)
    _, kind = np.unique(np.stack([bins.bin_class, bins.step, bins.frozen]), axis=1, return_inverse=True)
    sums = np.zeros((int(kind.max()) + 1, held.shape[1]), dtype=np.int64)
    np.add.at(sums, kind, held)
    means = (sums // np.bincount(kind)[:, None])[kind]
    means[:, 0] = bins.targets[:, 0]
    weights = np.array([1] + [TOKENS_COUNT_MORE] * (held.shape[1] - 1))
    return replace(bins, amounts=bins.amounts // weights, targets=means // weights)


def _largest_first(bins: Bins) -> np.ndarray:
    """Each sample goes where most is missing, the largest first.

    One at a time that would be slow. So all bins with about as much room as the roomiest take one at once: those that
    would get a sample before this one got its second.
    """
    samples, bin_of = bins.samples, np.empty(len(bins.samples), dtype=np.int64)
    overlong = np.flatnonzero(samples.overlong)
    # Here all dimensions count alike: where one of them has few large samples these must be spread before all others.
    totals = bins.amounts.sum(axis=0)
    scale = np.maximum(totals.max() // np.maximum(totals, 1), 1)
    size, targets = bins.amounts @ scale, bins.targets @ scale
    overlong = overlong[np.lexsort((-size[overlong], samples.sample_class[overlong]))]
    bin_of[overlong] = np.flatnonzero(bins.frozen)
    order = np.flatnonzero(~samples.overlong)
    order = order[np.lexsort((-size[order], samples.sample_class[order]))]
    num_classes = int(samples.sample_class.max()) + 1
    ends = np.searchsorted(samples.sample_class[order], np.arange(num_classes), side="right")
    following = np.searchsorted(samples.sample_class[order], np.arange(num_classes))
    ordinary = np.flatnonzero(~bins.frozen)
    bin_class, room = bins.bin_class[ordinary], targets[ordinary]
    start = np.searchsorted(bin_class, np.arange(num_classes))
    place = np.arange(len(ordinary)) - start[bin_class]
    while (left := ends - following).any():
        by_room = np.lexsort((-room, bin_class)) if num_classes > 1 else np.argsort(-room, kind="stable")
        sorted_room = room[by_room]
        open_classes = left > 0
        least = np.zeros(num_classes, dtype=np.int64)
        least[open_classes] = sorted_room[start[open_classes]] - size[order[following[open_classes]]]
        takes = (place < left[bin_class]) & ((sorted_room > least[bin_class]) | (place == 0))
        taking = by_room[takes]
        chosen = order[following[bin_class[takes]] + place[takes]]
        bin_of[chosen] = ordinary[taking]
        room[taking] -= size[chosen]
        following = following + np.bincount(bin_class[takes], minlength=num_classes)
    return bin_of


def _fill_empty(bins: Bins, bin_of: np.ndarray) -> None:
    """A bin without a sample takes the smallest from the one that has most of its class."""
    count = np.bincount(bin_of, minlength=len(bins))
    for empty in np.flatnonzero(count == 0).tolist():
        giver = int(np.where(bins.bin_class == bins.bin_class[empty], count, 0).argmax())
        own = np.flatnonzero(bin_of == giver)
        bin_of[own[bins.amounts[own, 0].argmin()]] = empty
        count[giver], count[empty] = count[giver] - 1, 1


def _exchange(bins: Bins, bin_of: np.ndarray) -> None:
    """Exchange samples between pairs of bins until nothing improves. Changes `bin_of`."""
    movable = np.flatnonzero(~bins.frozen)
    starts = np.searchsorted(bins.bin_class[movable], np.arange(int(bins.bin_class.max()) + 2))
    halves = np.diff(starts) // 2
    num_pairs = int(halves.sum())
    if not num_pairs:
        return
    held = _Held(bins, bin_of)
    num_dimensions = bins.amounts.shape[1]
    class_of_pair = np.repeat(np.arange(len(halves)), halves)
    place = np.arange(num_pairs) - np.repeat(np.cumsum(halves) - halves, halves)
    tolerated = bins.targets // np.array([TOKENS_WITHIN, *[OTHERS_WITHIN] * (num_dimensions - 1)])
    most_pairs = max(MAX_TRIED // FEWEST**2 // len(halves), 1)
    unchanged = 0
    rounds = MAX_ROUNDS if num_pairs <= most_pairs else MAX_ROUNDS // 2
    if len(bin_of) < 2 * len(bins):  # to swap samples that are alone in their bins changes nothing
        rounds //= 4
    for k in range(rounds):
        dimension, shift = k % num_dimensions, k // num_dimensions
        # The fullest of a class with its emptiest; in later rounds with one beside that.
        order = movable[np.lexsort((-held.excess[movable, dimension], bins.bin_class[movable]))]
        partner = (place + shift) % halves[class_of_pair]
        fuller = order[starts[class_of_pair] + place]
        emptier = order[starts[class_of_pair + 1] - 1 - partner]
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
        """Places to exchange of each bin, an empty one among them: others in each round, where there are many."""
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
        given, taken = self.amounts.take(first, axis=0), self.amounts.take(second, axis=0)
        # With d given less what is taken, squared distances change by 2 d (d - gap): here half of it, written out.
        by_given = np.einsum("psd,psd->ps", given, given - gap[:, None])
        by_taken = np.einsum("psd,psd->ps", taken, taken + gap[:, None])
        change = by_given[:, :, None] + by_taken[:, None, :]
        change -= 2 * given @ taken.transpose(0, 2, 1)
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
        which, place = np.nonzero(self.rows != self.nobody)
        bin_of[self.rows[which, place]] = which
