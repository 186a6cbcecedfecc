"""Best fit (Johnson 1973): samples go, one at a time, into the bin with the least room that holds them.

Bins stay within the budgets by construction, which the exchanges of `flat_exchange` do not promise. Two uses: put all
samples into as many bins as that takes, or move a few samples out of bins that break a budget.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort

import numpy as np

from odb_factory.planning.flat_polish import Filled
from odb_factory.planning.flat_samples import Samples

MAX_LOOKS = 64
"""Number of bins tried for a sample."""


class OpenBins:
    """Bins of samples; those of each class sorted by the room they have left.

    members: the samples of each bin. bin_class: the class of each bin.
    Room is measured in the budget that is used up more: tokens or patches.
    _left: by whether a sample has media and audio, the tokens and patches that it may add to each bin.
    """

    def __init__(self, samples: Samples):
        self.samples, self.budget = samples, samples.budget
        self.members: list[list[int]] = []
        self.bin_class: list[int] = []
        tokens, patches, *_ = (int(total) for total in samples.measures[~samples.overlong].sum(axis=0))
        token_budget, max_patches = self.budget.token_budget, self.budget.max_patches
        self._column = int(max_patches is not None and patches * token_budget > tokens * max_patches)
        self._capacity = max_patches if self._column and max_patches is not None else token_budget
        self._measures: list[list[int]] = samples.measures.tolist()
        self._classes: list[int] = samples.sample_class.tolist()
        self._overlong: list[bool] = samples.overlong.tolist()
        self._most = {(media, audio): self._real(media, audio) for media in (False, True) for audio in (False, True)}
        self._kinds = [(media > 0, audio > 0) for *_, media, audio in self._measures]
        self._left: dict[tuple[bool, bool], dict[int, tuple[int, float]]] = {kind: {} for kind in set(self._kinds)}
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

    def insert(self, sample: int, preferred: list[list[int]] | None = None) -> bool:
        """Put a sample into a bin that has room for it; return whether one of `MAX_LOOKS` bins has.

        preferred: sums that each bin should not exceed, where another choice is left [bins, 3].
        """
        by_room, measures = self._by_room.get(self._classes[sample], []), self._measures[sample]
        if self._overlong[sample]:
            return False
        tokens, patches, squares, *_ = measures
        left = self._left[self._kinds[sample]]
        chosen: int | None = None
        first = bisect_left(by_room, (measures[self._column], -1))
        for _, number in by_room[first : first + MAX_LOOKS]:
            tokens_left, patches_left = left[number]
            if tokens > tokens_left or patches > patches_left:
                continue
            chosen = number if chosen is None else chosen
            if preferred is None:
                break
            held, most = self._sums[number], preferred[number]
            if held[0] + tokens <= most[0] and held[1] + patches <= most[1] and held[2] + squares <= most[2]:
                chosen = number
                break
        if chosen is None:
            return False
        self._add(chosen, sample)
        return True

    def take_out_excess(self, number: int) -> list[int]:
        """Take samples, the smallest first, out of a bin until it is within the budgets."""
        kept, out = sorted(self.members[number], key=self.size), []
        sums = self._sums[number]
        for sample in sorted(kept, key=self.size):
            excess = self._excess(sums)
            if not excess or len(kept) == 1:
                break
            rest = [held - taken for held, taken in zip(sums, self._measures[sample])]
            if self._excess(rest) < excess:
                kept.remove(sample)
                out.append(sample)
                sums = rest
        self._set(number, kept, sums)
        return out

    def put_back(self, sample: int, number: int) -> None:
        self._add(number, sample)

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

    def _add(self, number: int, sample: int) -> None:
        sums = [held + added for held, added in zip(self._sums[number], self._measures[sample])]
        self._set(number, [*self.members[number], sample], sums)

    def _set(self, number: int, members: list[int], sums: list[int]) -> None:
        by_room = self._by_room[self.bin_class[number]]
        del by_room[bisect_left(by_room, self._room(number))]
        self.members[number], self._sums[number] = members, sums
        self._list(number)

    def _list(self, number: int) -> None:
        """Offer a bin to further samples, unless it holds an overlong one."""
        if not self._overlong[self.members[number][0]]:
            tokens, patches, _, media, audio = self._sums[number]
            for (with_media, with_audio), left in self._left.items():
                most_tokens, most_patches = self._most[with_media or media > 0, with_audio or audio > 0]
                left[number] = most_tokens - tokens, most_patches - patches
            insort(self._by_room.setdefault(self.bin_class[number], []), self._room(number))

    def _room(self, number: int) -> tuple[int, int]:
        return self._capacity - self._sums[number][self._column], number

    def _real(self, media: bool, audio: bool) -> tuple[int, float]:
        """The most tokens and patches of its samples that a bin may have, with or without media and audio."""
        budget = self.budget
        dummy_tokens, dummy_patches = budget.collation.dummies(int(media), int(audio))
        sizes = range(budget.token_budget + 1)
        tokens = bisect_right(sizes, budget.token_budget, key=lambda size: budget.sizes.up(size + dummy_tokens)) - 1
        return tokens, math.inf if budget.max_patches is None else budget.max_patches - dummy_patches

    def _excess(self, sums: list[int]) -> int:
        """By how much a bin with these sums breaks the budgets (tokens and patches)."""
        budget, (tokens, patches, _, media, audio) = self.budget, sums
        dummy_tokens, dummy_patches = budget.collation.dummies(media, audio)
        over = max(budget.sizes.up(tokens + dummy_tokens) - budget.token_budget, 0)
        if budget.max_patches is not None:
            over += max(patches + dummy_patches - budget.max_patches, 0)
        return over


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


def repair(filled: Filled) -> np.ndarray:
    """The bin of each sample [n] once bins that break a budget have given away what other bins have room for."""
    bins = OpenBins(filled.samples)
    by_bin = np.argsort(filled.bin_of, kind="stable").tolist()
    ends = np.cumsum(np.bincount(filled.bin_of, minlength=len(filled.step))).tolist()
    for start, end, sums in zip([0, *ends], ends, filled.sums.tolist()):
        bins.open(by_bin[start:end], sums)
    broken = (filled.excess(filled.sums) > 0) & ~filled.frozen
    # A bin should not become the one that its micro-step waits for.
    most = np.zeros((filled.num_steps, 3), dtype=np.int64)
    np.maximum.at(most, filled.step, np.where(broken[:, None], 0, filled.sums[:, :3]))
    preferred = most[filled.step].tolist()
    out = [(sample, number) for number in np.flatnonzero(broken).tolist() for sample in bins.take_out_excess(number)]
    for sample, number in sorted(out, key=lambda one: -bins.size(one[0])):
        if not bins.insert(sample, preferred):
            bins.put_back(sample, number)
    return bins.bin_of()
