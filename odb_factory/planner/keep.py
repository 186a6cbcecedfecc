"""Plan one optimizer step whose samples are given: all of them, on all ranks, cut into K micro-steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from odb_factory.planner.cost import Budget
from odb_factory.planner.flat_search import best_bins, put_into_bins
from odb_factory.planner.padded import Pools, best_cut, cut_by_one_cap
from odb_factory.planner.plan import BufferMetadata, Plan, Samples, Step, to_plan


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
    plan = to_plan(cut(samples), samples, final=all(buffer.exhausted for buffer in buffers))
    # Those with most ranks come first, because a rank idles after its last micro-batch; then the costliest.
    keys = [(-step.active_ranks, -step.max_rank_tokens, -step.max_rank_patches) for step in plan.totals]
    return plan.of(sorted(range(len(keys)), key=keys.__getitem__))


def cut(samples: Samples) -> list[Step]:
    """The groups of each micro-step, in the layout of the budget. Each modality is cut by itself."""
    steps: list[Step] = []
    modality = samples.rows["modality"]
    modalities = np.unique(modality)
    for number in modalities.tolist():
        of_modality = samples.of(modality == number)
        is_flat = samples.budget.layout == "flat"
        steps += best_bins(of_modality).steps() if is_flat else best_cut(Pools(of_modality))
    # Micro-steps in which ranks idle are joined: ranks that one modality leaves idle compute another one meanwhile, and
    # a rank idles after its last group.
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
    """As `cut`, into exactly `num_steps` micro-steps, for which the samples have been chosen: each pool has samples of
    one modality. If flat bins cannot be kept within the budgets, their youngest samples are not in them."""
    if not len(samples):
        return []
    if samples.budget.layout == "flat":
        return put_into_bins(samples, num_steps).without_excess().steps()
    return cut_by_one_cap(Pools(samples), num_steps)[1]
