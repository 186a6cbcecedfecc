"""Plan one optimizer step whose samples are given: all of them, on all ranks, cut into K micro-steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from odb_factory.planner.cost import Budget, by_number
from odb_factory.planner.flat import FlatSamples, bins_needed, make_bins
from odb_factory.planner.flat_search import Filled, best_fit_decreasing, fill_bins, polish
from odb_factory.planner.padded import Pools, best_cut, cut_by_one_cap, groups_of_cut
from odb_factory.planner.plan import BufferMetadata, Plan, PoolGroup, Samples, to_plan, to_ranks

# ----------------------------------------------------------------------------------------------------------------------
# Cut samples of one modality into flat micro-batches: K bins for every rank, as even as can be.
# Ranks that share parameters wait for each other in the vision tower and in the language model. So a micro-step costs
# what the most tokens and the most patches of any rank cost, each of these by itself.

FEW_SAMPLES = 4096
"""Above this number of samples best fit is not improved on: that would take too long."""
FLAT_CANDIDATES = 3
"""Number of K tried from the K of best fit downwards. A larger K is never cheaper if a smaller one fits, because two
micro-steps merged into one cost no more; it is needed if bins would have to be fuller than exchanges can make them.
"""


def _best_bins(samples: FlatSamples) -> Filled:
    """All samples in bins, within the budgets."""
    budget = samples.budget
    needed = bins_needed(samples, (budget.token_budget, budget.max_patches), samples.num_pools)
    min_steps = -(-int(needed.max()) // samples.slots)
    best = _polished(samples, min_steps)
    if best.within:
        return best
    best = match_by_cost(best_fit_decreasing(samples))
    first, last = best.num_steps - FLAT_CANDIDATES + 1, best.num_steps + 1
    if len(samples) > FEW_SAMPLES:
        first = last = best.num_steps
    for num_steps in range(max(min_steps + 1, first), last + 1):
        if flat_lower_bound(samples, num_steps) < best.cost:
            candidate = _polished(samples, num_steps)
            best = candidate if candidate.within and candidate.cost < best.cost else best
    return best


def _polished(samples: FlatSamples, num_steps: int) -> Filled:
    filled = put_into_bins(samples, num_steps)
    polish(filled, flat_lower_bound(samples, num_steps))
    return filled


def flat_lower_bound(samples: FlatSamples, num_steps: int) -> int:
    """No cut into `num_steps` micro-steps costs less: the mean of a pool, or the largest sample, in each measure."""
    measures = samples.measures[:, :2]
    sums = by_number(samples.pool, measures, samples.num_pools)
    largest = np.maximum((-(-sums // samples.slots)).max(axis=0), measures.max(axis=0))
    return num_steps * samples.step_price + int(largest @ samples.prices)


def put_into_bins(samples: FlatSamples, num_steps: int) -> Filled:
    """All samples in bins of `num_steps` micro-steps; the bins may break the budgets.

    Bins that end far from their targets, because few sizes of samples fit together, are better matched by cost.
    """
    bins = make_bins(samples, num_steps)
    filled = Filled(samples, fill_bins(bins), bins.pool, bins.step)
    return min(filled, match_by_cost(filled), key=lambda candidate: candidate.cost)


def match_by_cost(filled: Filled) -> Filled:
    """The same bins in other micro-steps: the costliest bins of each pool in the first micro-step, and so on."""
    costs = filled.samples.shapes(filled.sums) @ filled.samples.prices
    order = np.lexsort((-costs, filled.pool))
    step = np.empty_like(filled.step)
    step[order] = (np.arange(len(order)) - np.searchsorted(filled.pool, filled.pool)) // filled.samples.slots
    return replace(filled, step=step)


def _without_excess(filled: Filled) -> Filled:
    """The same bins without the youngest and shortest samples of those that break a budget."""
    samples, bin_of, sums, ages = filled.samples, filled.bin_of.copy(), filled.sums.copy(), filled.samples.rows["age"]
    for number in np.flatnonzero((samples.excess(sums) > 0) & ~filled.frozen).tolist():
        in_bin = np.flatnonzero(bin_of == number)
        for out in in_bin[np.lexsort((in_bin, samples.measures[in_bin, 0], ages[in_bin]))][:-1].tolist():
            bin_of[out] = -1
            sums[number] -= samples.measures[out]
            if not samples.excess(sums[number]):
                break
    stays = np.flatnonzero(bin_of >= 0)
    return replace(filled, samples=samples.of(stays), bin_of=bin_of[stays])


def _groups_of_bins(filled: Filled) -> list[list[PoolGroup]]:
    """By micro-step."""
    by_bin = np.argsort(filled.bin_of, kind="stable")
    ends = np.cumsum(np.bincount(filled.bin_of, minlength=len(filled.step)))
    groups = np.split(filled.samples.index[by_bin], ends[:-1])
    steps: list[list[PoolGroup]] = [[] for _ in range(filled.num_steps)]
    for step, number, group in zip(filled.step.tolist(), filled.pool.tolist(), groups):
        steps[step].append((number, group))
    return steps


# ----------------------------------------------------------------------------------------------------------------------
# Cut an optimizer step, in either layout.


def plan_optimizer_step(buffers: Sequence[BufferMetadata], budget: Budget, *, balance: bool) -> Plan:
    """Cut the samples of one optimizer step into K micro-steps, the same K on all ranks.

    buffers: one a rank, the samples of this optimizer step that it holds.
    balance: a sample may go to another rank than the one that holds it, unless they are too heavy to travel.

    K and the cut are those for which the sum over micro-steps of what the costliest rank costs is least. Every sample
    is in exactly one micro-batch, every micro-batch of two or more is within both budgets, and a rank idles, in the
    last micro-steps, only if there are too few samples of a modality. The costliest micro-step comes first, so that
    the peak of memory shows at once.

        buffers = [make_metadata([Cost(8), Cost(3)], [0, 0], exhausted=False)]
        plan = plan_optimizer_step(buffers, Budget(16), balance=True)
        plan.groups  # [[[1, 0]]]: of rank 0 the samples of each micro-step
    """
    samples = Samples.held_by(buffers, budget, balance=balance)
    final = all(buffer.exhausted for buffer in buffers)
    return _costliest_first(to_plan(to_ranks(cut(samples), samples), samples, final))


def _costliest_first(plan: Plan) -> Plan:
    """The same micro-steps, those with most ranks first, because a rank idles after its last micro-batch; then the
    costliest."""

    def key(k: int) -> tuple[int, ...]:
        step = plan.totals[k]
        return -step.active_ranks, -step.max_rank_tokens, -step.max_rank_patches

    order = sorted(range(len(plan.totals)), key=key)
    groups = [[of_rank[k] for k in order] for of_rank in plan.groups]
    return replace(plan, groups=groups, totals=[plan.totals[k] for k in order])


def cut(samples: Samples) -> list[list[PoolGroup]]:
    """The groups of each micro-step, in the layout of the budget. Each modality is cut by itself."""
    steps: list[list[PoolGroup]] = []
    modality = samples.rows["modality"]
    modalities = np.unique(modality)
    for number in modalities.tolist():
        of_modality = samples.of(modality == number)
        if samples.budget.layout == "flat":
            steps += _groups_of_bins(_best_bins(FlatSamples(**vars(of_modality))))
        else:
            pools = Pools(of_modality)
            steps += groups_of_cut(pools, best_cut(pools))
    return steps if len(modalities) < 2 else _join_partial(steps, samples.slots, len(np.unique(samples.pool)))


def _join_partial(steps: list[list[PoolGroup]], slots: int, num_pools: int) -> list[list[PoolGroup]]:
    """The same groups with the micro-steps in which ranks idle joined: ranks that one modality leaves idle compute
    another one meanwhile, and a rank idles after its last group."""
    full_steps = [step for step in steps if len(step) == slots * num_pools]
    by_pool: dict[int, list[PoolGroup]] = {}
    for number, group in (pair for step in steps if len(step) < slots * num_pools for pair in step):
        by_pool.setdefault(number, []).append((number, group))
    num_steps = max((-(-len(groups) // slots) for groups in by_pool.values()), default=0)
    parts = [slice(k * slots, (k + 1) * slots) for k in range(num_steps)]
    return full_steps + [[pair for groups in by_pool.values() for pair in groups[part]] for part in parts]


def cut_into(num_steps: int, samples: Samples) -> list[list[PoolGroup]]:
    """As `cut`, into exactly `num_steps` micro-steps, for which the samples have been chosen: each pool has samples of
    one modality. If flat bins cannot be kept within the budgets, their youngest samples are not in them."""
    if not len(samples.index):
        return []
    if samples.budget.layout == "flat":
        return _groups_of_bins(_without_excess(put_into_bins(FlatSamples(**vars(samples)), num_steps)))
    pools = Pools(samples)
    return groups_of_cut(pools, cut_by_one_cap(pools, num_steps))
