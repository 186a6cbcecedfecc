"""Fill flat bins: best fit, exchanges between pairs of bins, and exchanges by exact cost."""

from __future__ import annotations

import heapq
import math
import operator
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, replace

import numpy as np

from odb_factory.planning.cost import CostModel
from odb_factory.planning.flat import LARGEST_AMOUNT, Bins, Samples

# ----------------------------------------------------------------------------------------------------------------------
# The exact cost of bins in micro-steps, and exchanges that lower it.

MOST_POLISHED = 1 << 15
"""Upper limit of exchanges tried."""
LEAST_REPAIRED, MOST_REPAIRED_OF_A_SAMPLE = 1 << 18, 256
"""The same, in all or of a sample, where a bin breaks a budget: else the whole plan would be lost."""
CLOSE_ENOUGH = 1024
"""Nothing is tried where at most 1/CLOSE_ENOUGH of the cost could be saved."""
FAR_OVER = 1 << 40


@dataclass(eq=False)
class Filled:
    """Samples in bins in micro-steps. Ranks wait for the most tokens, the most patches and the most squares of each.

    bin_of: of each sample [n]. bin_class, step: of each bin [bins].
    pool: of each bin. frozen: it holds an overlong sample [bins]. sums: of `Samples.measures` [bins, 5 + caps].
    """

    samples: Samples
    model: CostModel
    bin_of: np.ndarray
    bin_class: np.ndarray
    step: np.ndarray

    def __post_init__(self) -> None:
        self.pool = self.bin_class // self.samples.num_modalities
        self.frozen = np.bincount(self.bin_of, self.samples.overlong, minlength=len(self.step)) > 0
        self.num_steps = int(self.step.max(initial=-1)) + 1
        self.weights = np.array([self.model.token, self.model.patch, self.model.square], dtype=np.int64)
        self.sums = self.samples.sums(self.bin_of, len(self.step))

    def maxima(self) -> np.ndarray:
        """Of each micro-step [micro-steps, 3]."""
        most = np.zeros((self.num_steps, 3), dtype=np.int64)
        np.maximum.at(most, self.step, self.samples.shapes(self.sums))
        return most

    def step_costs(self) -> np.ndarray:
        """What ranks wait for in each micro-step [micro-steps]."""
        costs: np.ndarray = self.model.fixed + self.maxima() @ self.weights
        return costs

    @property
    def cost(self) -> int:
        return int(self.step_costs().sum())

    @property
    def within(self) -> bool:
        """Whether all bins but those of overlong samples are within the budgets."""
        return not self.samples.excess(self.sums[~self.frozen]).any()


def polish(filled: Filled, bound: int) -> None:
    """Exchange samples of the bins that all wait for, or that break a budget, with those of any other bin.

    An exchange of two samples, or a move of one, is made if less of the budgets is broken afterwards, or as much and
    the cost is lower. Done when the cost is close to `bound`, when nothing helps, or after a bounded number of trials.
    """
    left = max(LEAST_REPAIRED, MOST_REPAIRED_OF_A_SAMPLE * len(filled.samples))
    if filled.within:
        left = MOST_POLISHED
    while not (filled.within and filled.cost - bound <= bound // CLOSE_ENOUGH):
        for critical in _critical(filled):
            own = np.flatnonzero(filled.bin_of == critical)
            left -= (len(own) + 1) * (len(filled.samples) + len(filled.step))
            if left < 0:
                return
            if _improve(filled, critical, own):
                break
        else:
            return


def _critical(filled: Filled) -> list[int]:
    """Bins that break a budget, the worst first, or else those that have the most of their micro-step in anything."""
    over = np.where(filled.frozen, 0, filled.samples.excess(filled.sums))
    if over.any():
        critical = np.argsort(-over, kind="stable")[: np.count_nonzero(over)]
    else:
        at_most = (filled.samples.shapes(filled.sums) == filled.maxima()[filled.step]) & (filled.weights > 0)
        critical = np.flatnonzero(at_most.any(axis=1) & ~filled.frozen)
    return [int(i) for i in critical]


def _improve(filled: Filled, critical: int, own: np.ndarray) -> bool:
    """Make the best exchange of a sample of one bin with any of its class; whether there is one that helps."""
    samples = filled.samples
    others = np.flatnonzero((filled.bin_class == filled.bin_class[critical]) & ~filled.frozen)
    others = others[others != critical]
    if not len(others):
        return False
    theirs = np.flatnonzero(np.isin(filled.bin_of, others))
    nobody = len(samples)
    measures = np.concatenate([samples.measures, np.zeros_like(samples.measures[:1])])
    given = np.append(own, nobody)
    taken = np.concatenate([theirs, np.full(len(others), nobody)])
    partner = np.concatenate([filled.bin_of[theirs], others])
    moved = measures[given][:, None] - measures[taken][None]
    after, after_partner = filled.sums[critical] - moved, filled.sums[partner] + moved
    over = filled.samples.excess(after) + filled.samples.excess(after_partner)
    over -= (filled.samples.excess(filled.sums[critical]) + filled.samples.excess(filled.sums[partner]))[None]
    cost = _cost_after(filled, critical, partner, filled.samples.shapes(after), filled.samples.shapes(after_partner))
    cost -= filled.cost
    count = np.bincount(filled.bin_of, minlength=len(filled.step))
    empties = (given != nobody)[:, None] & (taken == nobody) & (count[critical] == 1)
    empties |= (given == nobody)[:, None] & (taken != nobody) & (count[partner] == 1)
    over[empties] = FAR_OVER
    least = int(over.min())
    chosen = int(np.where(over == least, cost, np.iinfo(np.int64).max).argmin())
    if least > 0 or (least == 0 and cost.flat[chosen] >= 0):
        return False
    i, j = divmod(chosen, len(taken))
    if given[i] != nobody:
        filled.bin_of[given[i]] = partner[j]
    if taken[j] != nobody:
        filled.bin_of[taken[j]] = critical
    filled.sums[critical], filled.sums[partner[j]] = after[i, j], after_partner[i, j]
    return True


def _cost_after(
    filled: Filled, critical: int, partner: np.ndarray, after: np.ndarray, after_partner: np.ndarray
) -> np.ndarray:
    """The cost of all once two bins have changed: `critical` and, of each column, `partner`."""
    shapes, step, own_step = filled.samples.shapes(filled.sums), filled.step, filled.step[critical]
    shapes[critical] = 0
    without = np.zeros((filled.num_steps, 3), dtype=np.int64)
    np.maximum.at(without, step, shapes)
    # The most of a micro-step without a bin is the second most, where only that bin has the most.
    is_most = shapes == without[step]
    num_most = np.zeros_like(without)
    np.add.at(num_most, step, is_most)
    second = np.zeros_like(without)
    np.maximum.at(second, step, np.where(is_most, 0, shapes))
    rest = np.where(is_most & (num_most[step] == 1), second[step], without[step])[partner]
    shares_step = (step[partner] == own_step)[None, :, None]
    theirs = np.maximum(rest[None], after_partner)
    mine = np.maximum(np.where(shares_step, theirs, without[own_step]), after)
    changed = mine + np.where(shares_step, 0, theirs)
    total = without.sum(axis=0) - without[own_step]
    total = total[None] - np.where(shares_step[0], 0, without[step[partner]])
    cost: np.ndarray = (total[None] + changed) @ filled.weights + filled.model.fixed * filled.num_steps
    return cost


# ----------------------------------------------------------------------------------------------------------------------
# Best fit (Johnson 1973): samples go, one at a time, into the bin with the least room that holds them.
# Bins stay within the budgets by construction, which exchanges do not promise.

MAX_LOOKS = 64
"""Number of bins tried for a sample."""


class OpenBins:
    """Bins of samples; those of each class sorted by the room they have left.

    members: the samples of each bin. bin_class: the class of each bin.
    Room is measured in the budget that is used up more: tokens or patches.
    _left: by whether a sample has media and audio, what it may add to each bin: tokens, patches and what is capped.
    """

    def __init__(self, samples: Samples):
        self.samples, self.budget = samples, samples.budget
        self.members: list[list[int]] = []
        self.bin_class: list[int] = []
        tokens, patches = (int(total) for total in samples.measures[~samples.overlong, :2].sum(axis=0))
        token_budget, max_patches = self.budget.token_budget, self.budget.max_patches
        self._column = int(max_patches is not None and patches * token_budget > tokens * max_patches)
        self._capacity = max_patches if self._column and max_patches is not None else token_budget
        self._measures: list[list[int]] = samples.measures.tolist()
        self._classes: list[int] = samples.sample_class.tolist()
        self._overlong: list[bool] = samples.overlong.tolist()
        self._most = {(media, audio): self._real(media, audio) for media in (False, True) for audio in (False, True)}
        self._kinds = [(media > 0, audio > 0) for _, _, _, media, audio, *_ in self._measures]
        self._left: dict[tuple[bool, bool], dict[int, tuple[float, ...]]] = {kind: {} for kind in set(self._kinds)}
        self._sums: list[list[int]] = []
        self._by_room: dict[int, list[tuple[int, int]]] = {}

    def size(self, sample: int) -> int:
        return self._measures[sample][self._column]

    def open(self, members: list[int], sums: list[int]) -> None:
        """Add a bin with these samples, which are of one class. sums: of their measures."""
        self.members.append(members)
        self.bin_class.append(self._classes[members[0]])
        self._sums.append(sums)
        self._list(len(self.members) - 1)

    def insert(self, sample: int) -> bool:
        """Put a sample into a bin that has room for it; return whether one of `MAX_LOOKS` bins has."""
        by_room, measures = self._by_room.get(self._classes[sample], []), self._measures[sample]
        if self._overlong[sample]:
            return False
        tokens, patches, _, _, _, *capped = measures
        left = self._left[self._kinds[sample]]
        first = bisect_left(by_room, (measures[self._column], -1))
        for _, number in by_room[first : first + MAX_LOOKS]:
            tokens_left, patches_left, *capped_left = left[number]
            fits = tokens <= tokens_left and patches <= patches_left
            if fits and (not capped or all(map(operator.le, capped, capped_left))):
                sums = [held + added for held, added in zip(self._sums[number], measures)]
                self._set(number, [*self.members[number], sample], sums)
                return True
        return False

    def split(self, number: int) -> bool:
        """Move samples of a bin to a new bin, about half of its tokens; return whether both bins are then allowed."""
        members = sorted(self.members[number], key=self._measures.__getitem__, reverse=True)
        halves: tuple[list[int], list[int]] = ([], [])
        tokens = [0, 0]
        for sample in members:
            lighter = int(tokens[0] > tokens[1])
            halves[lighter].append(sample)
            tokens[lighter] += self._measures[sample][0]
        # A half without the media of the whole gets dummy media, which may be too much for it. Then one sample goes
        # alone.
        for kept, moved in (halves, *(([j for j in members if j != i], [i]) for i in members)):
            if all(len(part) == 1 or not self._excess(self._sum(part)) for part in (kept, moved)):
                self._set(number, kept, self._sum(kept))
                self.open(moved, self._sum(moved))
                return True
        return False

    def split_to_fill_slots(self, least_steps: int) -> None:
        """Split bins, the longest first, until each slot of each pool has one, as far as there are samples (I7).

        least_steps: the fewest micro-steps to fill.
        """
        samples = self.samples
        pools = np.array(self.bin_class) // samples.num_modalities
        num_bins = np.bincount(pools)
        num_steps = max(int((-(-num_bins // samples.slots)).max()), least_steps)
        missing = np.minimum(num_steps * samples.slots, np.bincount(samples.pool)) - num_bins
        heaps: dict[int, list[tuple[int, int]]] = {pool: [] for pool in np.flatnonzero(missing > 0).tolist()}
        for number, pool in enumerate(pools.tolist()):
            if pool in heaps:
                heaps[pool].append((-self._sums[number][0], number))
        for pool, heap in heaps.items():
            heapq.heapify(heap)
            left = int(missing[pool])
            while left and heap:
                _, number = heapq.heappop(heap)
                if len(self.members[number]) > 1 and self.split(number):
                    left -= 1
                    for half in (number, len(self.members) - 1):
                        heapq.heappush(heap, (-self._sums[half][0], half))

    def bin_of(self) -> np.ndarray:
        """The bin of each sample [n]."""
        bin_of = np.empty(len(self.samples), dtype=np.int64)
        bin_of[[sample for members in self.members for sample in members]] = np.repeat(
            np.arange(len(self.members)), [len(members) for members in self.members]
        )
        return bin_of

    def _sum(self, members: list[int]) -> list[int]:
        return [sum(column) for column in zip(*(self._measures[sample] for sample in members))]

    def _set(self, number: int, members: list[int], sums: list[int]) -> None:
        by_room = self._by_room[self.bin_class[number]]
        del by_room[bisect_left(by_room, self._room(number))]
        self.members[number], self._sums[number] = members, sums
        self._list(number)

    def _list(self, number: int) -> None:
        """Offer a bin to further samples, unless it holds an overlong one."""
        if not self._overlong[self.members[number][0]]:
            tokens, patches, _, media, audio, *capped = self._sums[number]
            for (with_media, with_audio), left in self._left.items():
                most = self._most[with_media or media > 0, with_audio or audio > 0]
                left[number] = tuple(map(operator.sub, most, (tokens, patches, *capped)))
            insort(self._by_room.setdefault(self.bin_class[number], []), self._room(number))

    def _room(self, number: int) -> tuple[int, int]:
        return self._capacity - self._sums[number][self._column], number

    def _real(self, media: bool, audio: bool) -> tuple[float, ...]:
        """The most that a bin may have of its samples, with or without media and audio."""
        budget = self.budget
        dummy_tokens, dummy_patches = budget.collation.dummies(int(media), int(audio))
        sizes = range(budget.token_budget + 1)
        tokens = bisect_right(sizes, budget.token_budget, key=lambda size: budget.sizes.up(size + dummy_tokens)) - 1
        patches = math.inf if budget.max_patches is None else budget.max_patches - dummy_patches
        return tokens, patches, *(cap - budget.collation.dummy_of(name, media, audio) for name, cap in budget.caps)

    def _excess(self, sums: list[int]) -> int:
        """By how much a bin with these sums breaks the budgets."""
        tokens, patches, squares, media, audio, *capped = sums
        of_bin = {"tokens": tokens, "squares": squares, "patches": patches, "media": media, "audio": audio}
        _, length, patches, _ = self.budget.collated(**of_bin, count=1, longest=0, first=0)
        return self.budget.excess(length, patches) + self.budget.excess_of_caps(capped, media, audio)


def best_fit_decreasing(samples: Samples, least_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The bin of each sample [n], and the class of each bin [bins], in the order of classes.

    least_steps: the fewest micro-steps that the bins fill, as far as there are samples.
    """
    bins = OpenBins(samples)
    for sample in sorted(range(len(samples)), key=bins.size, reverse=True):
        if not bins.insert(sample):
            bins.open([sample], samples.measures[sample].tolist())
    bins.split_to_fill_slots(least_steps)
    order = np.argsort(bins.bin_class, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place[bins.bin_of()], np.array(bins.bin_class)[order]


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
