"""Plan an optimizer step of very many ranks in groups: samples travel within a group only.

A group is the ranks of whole nodes. It plans by itself, from what its own ranks hold, so that neither planning nor
messages grow with the number of ranks. What groups agree on is K: the most that any of them needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from odb_factory.planning.cost import Budget, CostModel
from odb_factory.planning.flat_keep import cut_flat
from odb_factory.planning.flat_samples import Samples
from odb_factory.planning.matching import place
from odb_factory.planning.metadata import BufferMetadata
from odb_factory.planning.per_rank import Steps
from odb_factory.planning.plan import Plan, pool, to_plan


def plan_in_groups(
    buffers: Sequence[BufferMetadata], budget: Budget, group_size: int, *, model: CostModel = CostModel()
) -> Plan:
    """Cut the samples of one optimizer step into flat micro-steps, the same K on all ranks; see `plan_optimizer_step`.

    buffers: one a rank. group_size: of ranks that follow each other; the last group may have fewer.

        plan = plan_in_groups(buffers, Budget(16384, layout="flat"), group_size=256)
    """
    if budget.layout != "flat":
        raise ValueError(f"samples are balanced in groups of ranks where the layout is flat, not {budget.layout!r}")
    table, starts, owner_rank = pool(buffers)
    steps: Steps = []
    groups = []
    for first in range(0, len(buffers), group_size):
        size = min(group_size, len(buffers) - first)
        index = np.arange(starts[first], starts[first + size])
        groups.append((first, size, Samples(table, index, np.zeros_like(index), size, budget)))
    cuts = [cut_flat(samples, model) for _, _, samples in groups]
    num_steps = max(map(len, cuts))
    while any(len(cut) < min(num_steps, -(-len(samples) // size)) for cut, (_, size, samples) in zip(cuts, groups)):
        cuts = [
            cut if len(cut) == num_steps else cut_flat(samples, model, num_steps)
            for cut, (_, _, samples) in zip(cuts, groups)
        ]
        num_steps = max(map(len, cuts))
    for k in range(num_steps):
        step: list[np.ndarray | None] = []
        for cut, (first, size, _) in zip(cuts, groups):
            step += place(cut[k], owner_rank - first, size, balance=True) if k < len(cut) else [None] * size
        steps.append(step)
    return to_plan(steps, table, starts, owner_rank, budget, all(one.exhausted for one in buffers), False)
