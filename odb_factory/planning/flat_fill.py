"""Fill flat micro-batches to the budget from what ranks hold. No sample waits for its like: the oldest go first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from odb_factory.planning.candidates import MAX_WAIT_ROUNDS
from odb_factory.planning.cost import CostModel
from odb_factory.planning.flat_bins import Bins, make_bins
from odb_factory.planning.flat_exchange import fill_bins
from odb_factory.planning.flat_keep import cut_flat, in_order, match_by_cost
from odb_factory.planning.flat_polish import Filled
from odb_factory.planning.flat_samples import Samples
from odb_factory.planning.matching import PoolGroup

SLACK = 2048
"""Bins shall be full but for one part in so many: that close do exchanges get to what is aimed at."""
FINISHING = 2
"""Once the next oldest sample is too large, so many others of each pool may go before it, to fill what is left."""
MAX_TOPPED_UP = 1024
"""So many samples, of those that would wait, are put where there is room for them after all."""


def fill_flat(
    samples: Samples, exhausted: Sequence[bool], model: CostModel, *, accumulation: int = 1, join: bool = True
) -> tuple[list[list[PoolGroup]], bool]:
    """The groups of each micro-step of one round, and whether the epoch ends with it.

    samples: in the order in which equally old ones shall go. exhausted: of each pool, whether it gets no further ones.
    accumulation, join: as in `fill.plan_buffers`.
    The oldest sample of every pool goes out in any case, so none waits for longer than others are before it.
    """
    if join and all(exhausted):
        return cut_flat(samples, model), True
    done, count = np.array(exhausted), np.bincount(samples.pool, minlength=len(exhausted))
    multiple, required = (1, ~done) if join else (accumulation, np.ones_like(done))
    num_steps = _num_steps(samples, count, required, multiple)
    if not num_steps:
        return [], bool((done & (count < accumulation)).any())
    taken = _oldest(samples, num_steps)
    chosen = samples.of(np.flatnonzero(taken))
    bins = make_bins(chosen, num_steps, chosen.weigh(model))
    bin_of = np.full(len(samples), -1)
    bin_of[taken] = fill_bins(bins)
    _hold_back(samples, bins, bin_of)
    _top_up(samples, bins, bin_of)
    going = np.flatnonzero(bin_of >= 0)
    gone = samples.of(going)
    filled = Filled(gone, gone.weigh(model), bin_of[going], bins.pool, bins.bin_class, bins.step, bins.frozen)
    filled = min(filled, match_by_cost(filled), key=lambda one: one.cost)
    left = count - np.bincount(gone.pool, minlength=len(count))
    return in_order(filled), not join and bool((done & (left < accumulation)).any())


def _room(samples: Samples) -> tuple[int, int | None]:
    """The most real tokens and patches that surely fit in a bin."""
    budget = samples.budget
    dummy_tokens, dummy_patches = budget.collation.dummies(0, 0)
    tokens = budget.token_budget // budget.sizes.multiple * budget.sizes.multiple - dummy_tokens
    if budget.max_patches is None:
        return max(tokens, 1), None
    return max(tokens, 1), max(budget.max_patches - dummy_patches, 1)


def _loads(samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and patches that each sample takes from the room of a pool: an overlong one takes a whole bin."""
    tokens, patches = _room(samples)
    by_tokens = np.where(samples.overlong, tokens, np.minimum(samples.tokens, tokens))
    most = patches if patches is not None else int(samples.patches.max(initial=0))
    return by_tokens, np.where(samples.overlong, 0, np.minimum(samples.patches, most))


def _num_steps(samples: Samples, count: np.ndarray, required: np.ndarray, multiple: int) -> int:
    """As many micro-steps as every required pool can fill, and those that what is overdue needs.

    A required pool has a sample for each slot in each of them, unless it has too few for a single micro-step.
    """
    least_count = int(count[required].min())
    most = max(least_count // samples.slots, min(least_count, 1)) // multiple * multiple
    overdue = samples.age >= MAX_WAIT_ROUNDS
    full, needed = np.zeros((2, len(count)), dtype=np.int64)
    for load, room in zip(_loads(samples), _room(samples)):
        if room is not None:
            capacity = room * samples.slots
            sums = np.zeros((2, len(count)), dtype=np.int64)
            np.add.at(sums[0], samples.pool, load)
            np.add.at(sums[1], samples.pool[overdue], load[overdue])
            full, needed = np.maximum(full, sums[0] // capacity), np.maximum(needed, -(-sums[1] // capacity))
    fillable = max(int(full[required].min()) // multiple, 1) * multiple
    return min(max(fillable, -(-int(needed.max()) // multiple) * multiple), most)


def _oldest(samples: Samples, num_steps: int) -> np.ndarray:
    """Which samples to take [n]: of each pool the oldest, until its bins are as good as full, and one a bin."""
    order = np.lexsort((np.arange(len(samples)), -samples.age, samples.pool))
    pool, num_bins = samples.pool[order], num_steps * samples.slots
    first, ends = np.searchsorted(pool, pool), np.searchsorted(pool, pool, side="right")
    takes = np.ones(len(order), dtype=bool)
    loads = [
        (load[order], num_bins * room * (SLACK - 1) // SLACK)
        for load, room in zip(_loads(samples), _room(samples))
        if room is not None
    ]
    for load, most in loads:
        before = np.concatenate([[0], np.cumsum(load)])
        takes &= before[1:] - before[first] <= most
    takes |= np.arange(len(order)) - first < num_bins
    for _ in range(FINISHING):
        # In what is left of a pool goes the largest that fits.
        fits = ~takes
        for load, most in loads:
            before = np.concatenate([[0], np.cumsum(np.where(takes, load, 0))])
            fits &= load <= most - (before[ends] - before[first])
        largest = np.lexsort((np.where(fits, loads[0][0], -1), pool))[ends - 1]
        takes[largest[fits[largest]]] = True
    if samples.num_modalities > 1:
        # Each class and each overlong sample needs a bin; the oldest have them first.
        last = int(samples.sample_class.max()) + 1
        owner = np.where(samples.overlong, last + np.arange(len(samples)), samples.sample_class)[order]
        owner[~takes] = -1
        owners, seen, which = np.unique(owner, return_index=True, return_inverse=True)
        by_seen = np.lexsort((seen, pool[seen], owners < 0))
        turn = np.empty_like(seen)
        turn[by_seen] = np.arange(len(seen)) - np.searchsorted(pool[seen[by_seen]], pool[seen[by_seen]])
        takes &= turn[which] < num_bins
    taken = np.zeros(len(samples), dtype=bool)
    taken[order[takes]] = True
    return taken


def _hold_back(samples: Samples, bins: Bins, bin_of: np.ndarray) -> None:
    """Take the youngest and shortest out of bins that break a budget, never the oldest of a pool. Changes `bin_of`."""
    by_age = np.lexsort((np.arange(len(samples)), -samples.age, samples.pool))
    is_oldest = np.zeros(len(samples), dtype=bool)
    is_oldest[by_age[np.flatnonzero(np.diff(samples.pool[by_age], prepend=-1))]] = True
    taken = np.flatnonzero(bin_of >= 0)
    sums = np.zeros((len(bins), 5), dtype=np.int64)
    np.add.at(sums, bin_of[taken], samples.measures[taken])
    broken = ~samples.budget.holds_flat(sums) & ~bins.frozen
    for i in np.flatnonzero(broken).tolist():
        own = taken[bin_of[taken] == i]
        own = own[np.lexsort((own, samples.tokens[own], samples.age[own], is_oldest[own]))]
        for out in own[:-1].tolist():
            bin_of[out] = -1
            sums[i] -= samples.measures[out]
            if samples.budget.holds_flat(sums[i]):
                break


def _top_up(samples: Samples, bins: Bins, bin_of: np.ndarray) -> None:
    """Put waiting samples, the oldest first, into the fullest bin that has room for them. Changes `bin_of`."""
    taken = np.flatnonzero(bin_of >= 0)
    sums = np.zeros((len(bins), 5), dtype=np.int64)
    np.add.at(sums, bin_of[taken], samples.measures[taken])
    modality = np.empty(len(bins), dtype=np.int64)
    modality[bin_of[taken]] = samples.sample_class[taken]  # as numbered here, where some may be of another modality
    waiting = np.flatnonzero((bin_of < 0) & ~samples.overlong)
    waiting = waiting[np.lexsort((waiting, -samples.age[waiting]))]
    num_classes = int(samples.sample_class.max(initial=-1)) + 1
    for _ in range(MAX_TOPPED_UP):
        room = np.full(num_classes, -1)
        np.maximum.at(room, modality, np.where(bins.frozen, -1, samples.budget.token_budget - sums[:, 0]))
        waiting = waiting[samples.tokens[waiting] <= room[samples.sample_class[waiting]]]
        if not len(waiting):
            break
        chosen, waiting = int(waiting[0]), waiting[1:]
        after = sums + samples.measures[chosen]
        holds = samples.budget.holds_flat(after) & ~bins.frozen
        holds &= modality == samples.sample_class[chosen]
        if holds.any():
            fullest = int(np.where(holds, sums[:, 0], -1).argmax())
            bin_of[chosen] = fullest
            sums[fullest] = after[fullest]
