"""Plan one kept optimizer step: cut all its samples, on all ranks, into K micro-steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from odb_factory.planner.cost import Budget
from odb_factory.planner.flat_search import best_bins, put_into_bins
from odb_factory.planner.padded import Pools, best_cut, cut_by_one_cap
from odb_factory.planner.plan import BufferMetadata, Plan, Samples, Step, to_plan


def plan_optimizer_step(buffers: Sequence[BufferMetadata], budget: Budget, *, balance: bool) -> Plan:
    """Cut the samples of one optimizer step into K micro-steps, the same K on all ranks.

    buffers: for each rank the samples of this optimizer step that it holds.
    balance: a sample may move to another rank, unless the samples are too heavy to travel.

    K and the cut minimise the sum over micro-steps of the cost of the costliest rank. Every sample is in exactly one
    micro-batch, and every micro-batch of two or more samples is within both budgets. A rank idles in the last
    micro-steps only, and only if a modality has too few samples. The costliest micro-step comes first, so that the peak
    of memory shows at once.

        buffers = [make_metadata([Cost(8), Cost(3)], [0, 0], exhausted=False)]
        plan = plan_optimizer_step(buffers, Budget(16), balance=True)
        plan.groups  # [[[1, 0]]]: the samples of each micro-step on rank 0
    """
    samples = Samples.held_by(buffers, budget, balance=balance)
    plan = to_plan(cut(samples), samples, final=all(buffer.exhausted for buffer in buffers))
    # Micro-steps with most busy ranks come first, because a rank idles after its last micro-batch; then the costliest.
    keys = [(-step.active_ranks, -step.max_rank_tokens, -step.max_rank_patches) for step in plan.totals]
    return plan.of(sorted(range(len(keys)), key=keys.__getitem__))


def cut(samples: Samples) -> list[Step]:
    """The groups of each micro-step, in the layout of the budget. Each modality is cut separately."""
    steps: list[Step] = []
    modality = samples.rows["modality"]
    modalities = np.unique(modality)
    for number in modalities.tolist():
        of_modality = samples.of(modality == number)
        is_flat = samples.budget.layout == "flat"
        steps += best_bins(of_modality).steps() if is_flat else best_cut(Pools(of_modality))
    # Join the micro-steps in which ranks idle: ranks that are idle in one modality compute another one meanwhile.
    full = samples.slots * len(np.unique(samples.pool))
    by_pool: dict[int, Step] = {}
    for number, group in (pair for step in steps if len(step) < full for pair in step):
        by_pool.setdefault(number, []).append((number, group))
    if len(modalities) < 2 or not by_pool:
        return steps
    num_joined = -(-max(map(len, by_pool.values())) // samples.slots)
    parts = [slice(k * samples.slots, (k + 1) * samples.slots) for k in range(num_joined)]
    joined = [[pair for groups in by_pool.values() for pair in groups[part]] for part in parts]
    return [step for step in steps if len(step) == full] + joined


def cut_into(num_steps: int, samples: Samples) -> list[Step]:
    """The groups of exactly `num_steps` micro-steps. Each pool has samples of one modality, about as many as fit; flat
    bins that break a budget leave their shortest samples out."""
    if not len(samples):
        return []
    if samples.budget.layout == "flat":
        return put_into_bins(samples, num_steps).without_excess().steps()
    return cut_by_one_cap(Pools(samples), num_steps)[1]
