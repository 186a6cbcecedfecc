"""Samples and bins of a plan of flat micro-batches: what a sample adds to a bin, and how full bins shall be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from odb_factory.planning.cost import Budget, CostModel, by_number

# ----------------------------------------------------------------------------------------------------------------------
# The samples of a plan of flat micro-batches: what each adds to a bin, and what a bin costs.
# A flat micro-batch is a bin: its tokens, its patches and its squared lengths are sums over its samples.

PATCHES_PER_TOKEN = 4
"""Patches that cost as much as a token where the model gives patches no cost: vision towers merge 2 x 2."""
LEAST_TOKEN_SHARE = 16
"""Tokens count at least 1/LEAST_TOKEN_SHARE of the rest, because the budget is in tokens."""


class Samples:
    """Samples to put into bins. They stay within their class: ranks that share samples, and one modality.

    table: array of `ROW`. index: the samples to take, as positions in `table` [n]. pool: of each of them the ranks it
    may go to: one pool for all ranks that share their samples, or one for each rank [n].
    slots: ranks that share a pool.

    tokens, age follow `index` [n]. overlong: the sample breaks a budget alone, so it goes alone [n].
    sample_class: numbers of the classes, pool by pool [n].
    measures: tokens, patches, squared length, whether it has media and audio [n, 5].
    """

    def __init__(self, table: np.ndarray, index: np.ndarray, pool: np.ndarray, slots: int, budget: Budget):
        rows = table[index]
        self.table, self.index, self.pool, self.slots, self.budget = table, index, pool, slots, budget
        self.tokens, self.age = rows["tokens"].astype(np.int64), rows["age"].astype(np.int64)
        columns = [self.tokens, rows["patches"], self.tokens**2, rows["has_media"], rows["has_audio"]]
        self.measures = np.stack(columns, axis=1, dtype=np.int64, casting="unsafe")
        modalities, modality = np.unique(rows["modality"], return_inverse=True)
        self.num_modalities = max(len(modalities), 1)
        self.sample_class = pool * self.num_modalities + modality
        self.overlong = self.excess(self.measures) > 0

    def __len__(self) -> int:
        return len(self.index)

    def of(self, chosen: np.ndarray) -> Samples:
        """Some of them, as positions in these."""
        return Samples(self.table, self.index[chosen], self.pool[chosen], self.slots, self.budget)

    def shapes(self, sums: np.ndarray) -> np.ndarray:
        """Tokens, patches and squares of bins with these sums of `measures`, as collated [..., 3]."""
        tokens, patches, squares, media, audio = np.moveaxis(sums, -1, 0)
        sums_of_rows = {"tokens": tokens, "squares": squares, "patches": patches, "media": media, "audio": audio}
        _, *shapes = self.budget.collated(**sums_of_rows, count=tokens, longest=tokens, first=tokens)
        return np.stack(shapes, axis=-1)

    def excess(self, sums: np.ndarray) -> np.ndarray:
        """By how much bins with these sums break the budgets (tokens and patches) [...]."""
        shapes = self.shapes(sums)
        return self.budget.excess(shapes[..., 0], shapes[..., 1])

    def sums(self, bin_of: np.ndarray, num_bins: int) -> np.ndarray:
        """`measures` of each bin [bins, 5]."""
        return by_number(bin_of, self.measures, num_bins)

    def weigh(self, model: CostModel) -> CostModel:
        """The model that bins are balanced by: `model`, with something for tokens and patches where it has nothing."""
        tokens, patches, squares = (int(total) for total in self.measures[:, :3].sum(axis=0))
        rest = model.patch * patches + model.square * squares
        token = max(model.token, -(-rest // (LEAST_TOKEN_SHARE * max(tokens, 1))), 1)
        if model.patch or not patches:
            return replace(model, token=token)
        scale = PATCHES_PER_TOKEN
        return CostModel(scale * model.fixed, scale * token, token, scale * model.square)


# ----------------------------------------------------------------------------------------------------------------------
# Bins for the samples of a plan: how many of each class, in which micro-steps, and how full they shall be.

LARGEST_AMOUNT = 1 << 28
"""Largest amount, so that the product of two amounts does not overflow."""
AMOUNT_OF_A_BIN = 1 << 20
"""Upper limit of the amount in an average bin."""
MARGIN = 64
"""The target of a bin is below the budget by 1/MARGIN."""
SHARE_BITS = 20
"""Precision of the fixed-point numbers by which targets are scaled to the load of a class."""


@dataclass(frozen=True, eq=False)
class Bins:
    """Bins in the order of their classes, and what is to be balanced between them.

    bin_class, step: of each bin [bins]. frozen: it holds an overlong sample and nothing else [bins].
    amounts: what each sample adds in each dimension, in one unit of cost [n, dimensions]; tokens come first.
    targets: what each bin shall hold of it [bins, dimensions].
    """

    samples: Samples
    bin_class: np.ndarray
    step: np.ndarray
    frozen: np.ndarray
    amounts: np.ndarray
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.step)


def bins_needed(samples: Samples, most_of_a_bin: Sequence[int | None], num_pools: int) -> np.ndarray:
    """No fewer bins hold the samples of each pool [pools]. most_of_a_bin: tokens and patches; None: not limited.

    Of a class, all that a bin holds little of must have room; samples of more than half a bin cannot share one.
    """
    ordinary, num_classes = ~samples.overlong, num_pools * samples.num_modalities
    class_of = samples.sample_class[ordinary]
    needed = np.minimum(np.bincount(class_of, minlength=num_classes), 1)
    for measure, most in zip(samples.measures.T, most_of_a_bin):
        if most is not None:
            loads = by_number(class_of, measure[ordinary], num_classes)
            halves = by_number(class_of, 2 * measure[ordinary] > most, num_classes)
            needed = np.maximum(np.maximum(needed, halves), -(-loads // max(most, 1)))
    needed = needed + np.bincount(samples.sample_class[samples.overlong], minlength=num_classes)
    by_pool: np.ndarray = needed.reshape(num_pools, samples.num_modalities).sum(axis=1)
    return by_pool


def make_bins(samples: Samples, num_steps: int, model: CostModel) -> Bins:
    """Empty bins for this number of micro-steps: as many as there are slots, or samples if these are fewer.

    Overlong samples get bins of their own in the first micro-steps, the longest first.
    """
    num_classes = int(samples.sample_class.max()) + 1
    pool_of_class = np.arange(num_classes) // samples.num_modalities
    num_overlong = np.bincount(samples.sample_class[samples.overlong], minlength=num_classes)
    shared = _share_out(samples, num_steps, pool_of_class, num_overlong)
    # In a pool bins for overlong samples come first; those of other classes take turns.
    sizes = np.concatenate([num_overlong, shared])
    of_class = np.tile(np.arange(num_classes), 2)
    frozen = np.repeat(np.arange(2 * num_classes) < num_classes, sizes)
    bin_class = np.repeat(of_class, sizes)
    turn = np.arange(len(bin_class)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    turn = (2 * turn + 1) * AMOUNT_OF_A_BIN // np.maximum(2 * np.repeat(sizes, sizes), 1)
    order = np.lexsort((bin_class, turn, ~frozen, pool_of_class[bin_class]))
    pool = pool_of_class[bin_class[order]]
    step = (np.arange(len(order)) - np.searchsorted(pool, pool)) // samples.slots
    by_class = np.lexsort((step, ~frozen[order], bin_class[order]))
    bin_class, frozen = bin_class[order][by_class], frozen[order][by_class]
    pool, step = pool[by_class], step[by_class]
    amounts, budgets = _amounts(samples, num_steps, model)
    of_each = (_targets(samples, *one, pool, bin_class, step, frozen) for one in zip(amounts.T, budgets))
    targets = np.stack(list(of_each), axis=1)
    return Bins(samples, bin_class, step, frozen, amounts, targets)


def _share_out(samples: Samples, num_steps: int, pool_of_class: np.ndarray, num_overlong: np.ndarray) -> np.ndarray:
    """Bins for the ordinary samples of each class, by load (D'Hondt's method), at most one a sample [classes]."""
    num_classes = len(pool_of_class)
    count = np.bincount(samples.sample_class, minlength=num_classes) - num_overlong
    taken = by_number(pool_of_class, num_overlong, pool_of_class[-1] + 1)
    room = np.maximum(num_steps * samples.slots - taken, 0)[pool_of_class]
    if samples.num_modalities == 1:
        fewer: np.ndarray = np.minimum(room, count)
        return fewer
    load = by_number(samples.sample_class, np.where(samples.overlong, 0, samples.tokens), num_classes)
    shared = np.zeros(num_classes, dtype=np.int64)
    for first in range(0, num_classes, samples.num_modalities):
        own = np.s_[first : first + samples.num_modalities]
        for _ in range(int(room[first])):
            left = shared[own] < count[own]
            if not left.any():
                break
            # A class without a bin comes first.
            weight = np.where(shared[own] > 0, load[own] // np.maximum(shared[own], 1), load[own] + load[own].sum())
            shared[first + int(np.where(left, weight, -1).argmax())] += 1
    return shared


def _amounts(samples: Samples, num_steps: int, model: CostModel) -> tuple[np.ndarray, list[int]]:
    """`Bins.amounts`, and of each dimension the most that a bin may hold by the budgets."""
    budget, measures = samples.budget, samples.measures
    most = [budget.token_budget, budget.max_patches if budget.max_patches is not None else int(measures[:, 1].sum()), 0]
    most[2] = budget.token_budget * int(samples.tokens.max())
    weights = [model.token, model.patch, model.square]
    num_bins = max(num_steps * samples.slots, 1) * (int(samples.pool.max()) + 1)
    measures = measures[:, :3]
    totals = [weight * int(total) for weight, total in zip(weights, measures.sum(axis=0))]
    kept = [0, *(d for d in range(1, len(totals)) if totals[d])]
    unit = max(sum(totals) // (num_bins * AMOUNT_OF_A_BIN), 1)
    amounts = [np.minimum(weights[d] * measures[:, d] // unit, LARGEST_AMOUNT) for d in kept]
    return np.stack(amounts, axis=1), [min(weights[d] * most[d] // unit, LARGEST_AMOUNT) for d in kept]


def _targets(
    samples: Samples,
    amount: np.ndarray,
    most: int,
    pool: np.ndarray,
    bin_class: np.ndarray,
    step: np.ndarray,
    frozen: np.ndarray,
) -> np.ndarray:
    """Of one dimension [bins]: the heights of the micro-steps, scaled so that together they hold a class exactly."""
    num_classes, num_pools = int(samples.sample_class.max()) + 1, int(samples.pool.max()) + 1
    num_steps, ordinary = int(step.max(initial=0)) + 1, ~samples.overlong
    bins_of = np.zeros((num_pools, num_steps), dtype=np.int64)
    np.add.at(bins_of, (pool[~frozen], step[~frozen]), 1)
    # Bins may be as full as an overlong sample of their micro-step, for which all ranks wait.
    floor = np.where(np.bincount(step[frozen], minlength=num_steps) > 0, amount[samples.overlong].max(initial=0), 0)
    heights = _heights(amount[ordinary], samples.pool[ordinary], bins_of, np.minimum(floor, most))
    # Exchanges end near their target, not at it, and often above it.
    heights = np.minimum(heights, most - most // MARGIN)
    targets = np.where(frozen, 0, heights[step])
    load = by_number(samples.sample_class[ordinary], amount[ordinary], num_classes)
    planned = by_number(bin_class, targets, num_classes)
    num_bins = np.bincount(bin_class[~frozen], minlength=num_classes)
    missing = np.maximum(load - planned, 0) // np.maximum(num_bins, 1)
    share = np.minimum((load << SHARE_BITS) // np.maximum(planned, 1), 1 << SHARE_BITS)
    return np.where(frozen, 0, (targets * share[bin_class] >> SHARE_BITS) + missing[bin_class])


def _heights(amount: np.ndarray, pool: np.ndarray, bins_of: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """How full the fullest bin of each micro-step must be [micro-steps], as water finds its level.

    A micro-step with a sample above the mean is as costly as that sample, and its other bins can be filled as high;
    what is left is shared by the other micro-steps in the same way. Of the largest samples each bin of a micro-step
    takes one.

    bins_of: of each pool in each micro-step.
    """
    num_pools, num_steps = bins_of.shape
    order = np.lexsort((-amount, pool))
    amount, pool = amount[order], pool[order]
    first = np.searchsorted(pool, np.arange(num_pools + 1))
    before = np.concatenate([[0], np.cumsum(amount)])
    load, place, last = before[first[1:]] - before[first[:-1]], first[:-1].copy(), first[1:]
    padded = np.append(amount, 0)
    heights = np.zeros(num_steps, dtype=np.int64)
    left = bins_of.sum(axis=1)
    for k in range(num_steps):
        longest = np.where(place < last, padded[np.minimum(place, len(amount))], 0)
        height = np.maximum(np.maximum(-(-load // np.maximum(left, 1)), longest), floor[k])
        heights[k] = int(np.where(bins_of[:, k] > 0, height, 0).max())
        load = np.maximum(load - bins_of[:, k] * height, 0)
        left, place = left - bins_of[:, k], np.minimum(place + bins_of[:, k], last)
    return heights
