"""Cut the samples of an optimizer step into flat micro-batches: K bins for every rank, as even as can be.

Ranks that share parameters wait for each other in the vision tower and in the language model. So a micro-step costs
what the most tokens, the most patches and the most squared lengths of any rank cost, each of these by itself.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from odb_factory.planning.cost import CostModel
from odb_factory.planning.flat_bins import fewest_steps, make_bins
from odb_factory.planning.flat_exchange import fill_bins
from odb_factory.planning.flat_polish import Filled, polish
from odb_factory.planning.flat_samples import Samples
from odb_factory.planning.matching import PoolGroup

NUM_CANDIDATES = 3
"""So many K are tried at most beside the least. Of one modality a larger K is never better where a smaller one fits,
for two micro-steps as one cost no more; it is needed where bins would have to be fuller than exchanges can make them.
Modalities share no bin, so that ranks which wait for the bin of one can do better in more micro-steps."""


def cut_flat(samples: Samples, model: CostModel, least_steps: int = 0) -> list[list[PoolGroup]]:
    """The groups of each micro-step; of `least_steps` at least, as far as there are samples.

    Every sample is in a group, and groups of two or more are within the budgets. The costliest micro-step comes first.
    """
    if not len(samples):
        return []
    model = samples.weigh(model)
    least = max(fewest_steps(samples), least_steps)
    found = fill(samples, least, model)
    if not found.within:
        fitted = first_fit(samples, model)
        for num_steps in range(max(least + 1, fitted.num_steps - NUM_CANDIDATES + 1), fitted.num_steps + 1):
            found = fill(samples, num_steps, model)
            if found.within:
                break
        if not found.within or fitted.cost < found.cost:
            found = fitted
    if samples.num_modalities > 1:
        for num_steps in range(found.num_steps + 1, found.num_steps + 1 + NUM_CANDIDATES):
            if lower_bound(samples, num_steps, model) < found.cost:
                more = fill(samples, num_steps, model)
                found = more if more.within and more.cost < found.cost else found
    return in_order(found)


def lower_bound(samples: Samples, num_steps: int, model: CostModel) -> int:
    """No cut into so many micro-steps costs less: of each measure a pool's mean, or the largest sample."""
    num_pools = int(samples.pool.max()) + 1
    sums = np.zeros((num_pools, 5), dtype=np.int64)
    np.add.at(sums, samples.pool, samples.measures)
    most = np.maximum((-(-sums // samples.slots)).max(axis=0), samples.measures.max(axis=0))
    return num_steps * model.fixed + int(most[:3] @ np.array([model.token, model.patch, model.square]))


def fill(samples: Samples, num_steps: int, model: CostModel) -> Filled:
    """All samples in bins of so many micro-steps; whether within the budgets is not promised."""
    bins = make_bins(samples, num_steps, model)
    filled = Filled(samples, model, fill_bins(bins), bins.pool, bins.bin_class, bins.step, bins.frozen)
    filled = min(filled, match_by_cost(filled), key=lambda one: one.cost)
    polish(filled, lower_bound(samples, num_steps, model))
    return filled


def match_by_cost(filled: Filled) -> Filled:
    """The same bins in other micro-steps: of each pool the costliest in the first, and so on."""
    samples, pool = filled.samples, filled.pool
    costs = filled.shapes(filled.sums) @ filled.weights
    order = np.lexsort((-costs, pool))
    step = np.empty_like(filled.step)
    step[order] = (np.arange(len(order)) - np.searchsorted(pool, pool)) // samples.slots
    return replace(filled, step=step)


def in_order(filled: Filled) -> list[list[PoolGroup]]:
    """Its groups by micro-step: those with most groups first, for a rank idles behind its last; then by cost."""
    samples = filled.samples
    active = np.bincount(filled.step, minlength=filled.num_steps)
    order = np.lexsort((-filled.maxima()[:, 0], -filled.step_costs(), -active))
    by_bin = np.argsort(filled.bin_of, kind="stable")
    ends = np.cumsum(np.bincount(filled.bin_of, minlength=len(filled.step)))
    groups = np.split(samples.index[by_bin], ends[:-1])
    return [
        [(int(filled.pool[i]), groups[i]) for i in np.flatnonzero(filled.step == step).tolist()]
        for step in order.tolist()
    ]


def first_fit(samples: Samples, model: CostModel) -> Filled:
    """First-fit decreasing (Johnson 1973), within the budgets, in as many micro-steps as that takes."""
    bin_of = np.empty(len(samples), dtype=np.int64)
    sums = np.zeros((len(samples), 5), dtype=np.int64)
    bin_class: list[int] = []
    first = 0
    for i in np.lexsort((-samples.tokens, samples.overlong, samples.sample_class)).tolist():
        if not bin_class or bin_class[-1] != samples.sample_class[i]:
            first = len(bin_class)
        after = sums[first : len(bin_class)] + samples.measures[i]
        holds = samples.budget.holds_flat(after) & ~samples.overlong[i]
        chosen = first + int(holds.argmax()) if holds.any() else len(bin_class)
        if chosen == len(bin_class):
            bin_class.append(int(samples.sample_class[i]))
        bin_of[i] = chosen
        sums[chosen] += samples.measures[i]
    _split_to_fill_slots(samples, bin_of, bin_class)
    order = np.argsort(bin_class, kind="stable")
    bin_of = np.argsort(order)[bin_of]
    frozen = np.bincount(bin_of, samples.overlong, minlength=len(order)) > 0
    step = np.zeros(len(order), dtype=np.int64)
    of_bin = np.array(bin_class)[order]
    return match_by_cost(Filled(samples, model, bin_of, of_bin // samples.num_modalities, of_bin, step, frozen))


def _split_to_fill_slots(samples: Samples, bin_of: np.ndarray, bin_class: list[int]) -> None:
    """New bins until every slot of every pool has one, as far as there are samples: no rank idles without need."""
    pools = np.array(bin_class) // samples.num_modalities
    num_steps = int((-(-np.bincount(pools) // samples.slots)).max())
    for pool, num_bins in enumerate(np.bincount(pools).tolist()):
        for _ in range(num_bins, min(num_steps * samples.slots, int((samples.pool == pool).sum()))):
            count = np.bincount(np.where(samples.pool == pool, bin_of, 0), minlength=len(bin_class))
            count[0] = np.count_nonzero((samples.pool == pool) & (bin_of == 0))
            own = np.flatnonzero(bin_of == int(count.argmax()))
            # One without media, if there is any: what keeps its media gets no dummies that could be too much.
            num_media = samples.has_media[own] * 1 + samples.has_audio[own]
            rest_fits = samples.budget.holds_flat(samples.measures[own].sum(axis=0) - samples.measures[own])
            chosen = own[int(np.lexsort((num_media, ~rest_fits))[0])]
            bin_class.append(int(samples.sample_class[chosen]))
            bin_of[chosen] = len(bin_class) - 1
