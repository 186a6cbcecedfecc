"""Cut the samples of an optimizer step into flat micro-batches: K bins for every rank, as even as can be.

Ranks that share parameters wait for each other in the vision tower and in the language model. So a micro-step costs
what the most tokens, the most patches and the most squared lengths of any rank cost, each of these by itself.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from odb_factory.planning.cost import CostModel
from odb_factory.planning.flat_best_fit import best_fit_decreasing, repair
from odb_factory.planning.flat_bins import Bins, fewest_flat_steps, make_bins
from odb_factory.planning.flat_exchange import fill_bins
from odb_factory.planning.flat_polish import Filled, polish
from odb_factory.planning.flat_samples import Samples
from odb_factory.planning.matching import PoolGroup

FEW_SAMPLES = 4096
"""Of more samples best fit is not improved on: that would take too long."""
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
    least = max(fewest_flat_steps(samples), least_steps)
    found = fill(samples, least, model)
    if not found.within:
        found = fitted(samples, model, least_steps)
        first, last = found.num_steps - NUM_CANDIDATES + 1, found.num_steps + 1
        if len(samples) > FEW_SAMPLES:
            first = last = found.num_steps
        for num_steps in range(max(least + 1, first), last + 1):
            if flat_lower_bound(samples, num_steps, model) < found.cost:
                found = _cheaper(found, fill(samples, num_steps, model))
    if samples.num_modalities > 1:
        for num_steps in range(found.num_steps + 1, found.num_steps + 1 + NUM_CANDIDATES):
            if flat_lower_bound(samples, num_steps, model) < found.cost:
                found = _cheaper(found, fill(samples, num_steps, model))
    return in_order(found)


def _cheaper(found: Filled, other: Filled) -> Filled:
    return other if other.within and other.cost < found.cost else found


def flat_lower_bound(samples: Samples, num_steps: int, model: CostModel) -> int:
    """No cut into so many micro-steps costs less: of each measure a pool's mean, or the largest sample."""
    num_pools = int(samples.pool.max()) + 1
    sums = np.zeros((num_pools, 5), dtype=np.int64)
    np.add.at(sums, samples.pool, samples.measures)
    most = np.maximum((-(-sums // samples.slots)).max(axis=0), samples.measures.max(axis=0))
    return num_steps * model.fixed + int(most[:3] @ np.array([model.token, model.patch, model.square]))


def fill(samples: Samples, num_steps: int, model: CostModel) -> Filled:
    """All samples in bins of this number of micro-steps; whether within the budgets is not promised."""
    bins, dense = (make_bins(samples, num_steps, model, dense=dense) for dense in (False, True))
    filled = _filled(samples, num_steps, model, bins)
    if not np.array_equal(bins.targets, dense.targets):
        other = _filled(samples, num_steps, model, dense)
        if (other.within, -other.cost) > (filled.within, -filled.cost):
            return other
    return filled


def _filled(samples: Samples, num_steps: int, model: CostModel, bins: Bins) -> Filled:
    filled = Filled(samples, model, fill_bins(bins), bins.pool, bins.bin_class, bins.step, bins.frozen)
    if not filled.within:
        filled = replace(filled, bin_of=repair(filled))
    filled = min(filled, match_by_cost(filled), key=lambda one: one.cost)
    polish(filled, flat_lower_bound(samples, num_steps, model))
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


def fitted(samples: Samples, model: CostModel, least_steps: int) -> Filled:
    """Bins by best fit, always within the budgets, in as many micro-steps as that takes."""
    bin_of, bin_class = best_fit_decreasing(samples, least_steps)
    frozen = np.bincount(bin_of, samples.overlong, minlength=len(bin_class)) > 0
    step, pool = np.zeros_like(bin_class), bin_class // samples.num_modalities
    return match_by_cost(Filled(samples, model, bin_of, pool, bin_class, step, frozen))
