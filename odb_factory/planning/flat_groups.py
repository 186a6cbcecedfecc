"""Plan an optimizer step of very many ranks in groups: samples travel within a group only.

A group is ranks that follow each other, best those of whole nodes. It is planned by itself, from what its own ranks
hold, so that planning does not grow with the number of ranks. What the groups agree on is K: the most that any needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odb_factory.planning.cost import Budget, CostModel
from odb_factory.planning.flat_keep import cut_flat
from odb_factory.planning.flat_samples import Samples
from odb_factory.planning.matching import place
from odb_factory.planning.metadata import BufferMetadata
from odb_factory.planning.plan import MicroStepTotals, Plan, pool, to_plan

MAX_AGREEMENTS = 16
"""Rounds in which groups plan anew to reach the K of the group that needs most. Usually one is enough."""
MAXIMA = ("max_rank_tokens", "max_rank_patches", "max_rank_attention")


@dataclass(frozen=True)
class GroupOutline:
    """What ranks of other groups have to know of the plan of a group.

    checksum: of the plan, the same on all ranks of the group. num_ranks, num_samples: of the group. totals: of each
    micro-step, over the ranks of the group.
    """

    checksum: int
    num_ranks: int
    num_samples: int
    totals: list[MicroStepTotals]

    def to_bytes(self) -> bytes:
        numbers = [self.checksum, self.num_ranks, self.num_samples]
        numbers += [number for one in self.totals for number in dataclasses.astuple(one)]
        return np.array(numbers, dtype="<i8").tobytes()

    @classmethod
    def from_bytes(cls, message: bytes) -> GroupOutline:
        checksum, num_ranks, num_samples, *rest = np.frombuffer(message, dtype="<i8").tolist()
        width = len(dataclasses.fields(MicroStepTotals))
        totals = [MicroStepTotals(*rest[start : start + width]) for start in range(0, len(rest), width)]
        return cls(checksum, num_ranks, num_samples, totals)


def group_of(rank: int, num_ranks: int, group_size: int) -> range:
    """The ranks of the group that this rank is in; the last group may have fewer."""
    first = rank - rank % group_size
    return range(first, min(first + group_size, num_ranks))


def plan_group(
    buffers: Sequence[BufferMetadata], budget: Budget, ranks: range, *, model: CostModel, least_steps: int = 0
) -> Plan:
    """The part of a group in an optimizer step; see `plan_optimizer_step`, whose promises it keeps for its ranks.

    buffers: one a rank, of all ranks; samples are numbered through them, and ranks of other groups have no group in the
    plan. least_steps: K at least, as far as there are samples.
    """
    if budget.layout != "flat":
        raise ValueError(f"samples are balanced in groups of ranks where the layout is flat, not {budget.layout!r}")
    table, starts, owner_rank = pool([buffers[rank] for rank in ranks])
    samples = Samples(table, np.arange(len(table)), np.zeros_like(owner_rank), len(ranks), budget)
    cut = cut_flat(samples, model, least_steps)
    steps = [place(step, owner_rank, len(ranks), balance=True) for step in cut]
    plan = to_plan(steps, table, starts, owner_rank, budget, False, False)
    all_starts = np.cumsum([0, *(len(buffer.rows) for buffer in buffers)]).tolist()
    offset = all_starts[ranks.start]
    of_rank = [[[sample + offset for sample in group] for group in groups] for groups in plan.groups]
    groups = [of_rank[rank - ranks.start] if rank in ranks else [] for rank in range(len(buffers))]
    final = all(buffer.exhausted for buffer in buffers)
    return dataclasses.replace(plan, groups=groups, starts=all_starts, final=final)


def outline(plan: Plan, ranks: range) -> GroupOutline:
    num_samples = plan.starts[ranks.stop] - plan.starts[ranks.start]
    return GroupOutline(plan.checksum(), len(ranks), num_samples, plan.totals)


def steps_to_reach(outlines: Sequence[GroupOutline]) -> int:
    """K for which groups have to plan anew, because another needs so many micro-steps; 0 where none has to.

    outlines: one a group. A group with too few samples for that idles at the end.
    """
    num_steps = max(len(one.totals) for one in outlines)
    reachable = (min(num_steps, -(-one.num_samples // one.num_ranks)) for one in outlines)
    return num_steps if any(len(one.totals) < steps for one, steps in zip(outlines, reachable)) else 0


def disagreement(outlines: Sequence[GroupOutline]) -> RuntimeError:
    """The error when groups have not reached the same K in `MAX_AGREEMENTS` rounds."""
    counts = [len(one.totals) for one in outlines]
    return RuntimeError(
        f"groups of ranks do not agree on the number of micro-steps: after {MAX_AGREEMENTS} rounds of planning they "
        f"have {counts[:8]}; this is a bug in odb_factory; set odb.balance_group_size to the number of ranks, or "
        "odb.balance: false"
    )


def joined(plan: Plan, ranks: range, outlines: Sequence[GroupOutline]) -> Plan:
    """The plan of a group once all have agreed on K: empty groups where its ranks idle, totals of all ranks."""
    num_steps = max(len(one.totals) for one in outlines)
    groups = [own + [[]] * (num_steps - len(own)) if rank in ranks else own for rank, own in enumerate(plan.groups)]
    totals = [_sum([one.totals[k] for one in outlines if k < len(one.totals)]) for k in range(num_steps)]
    return dataclasses.replace(plan, groups=groups, totals=totals)


def plan_in_groups(
    buffers: Sequence[BufferMetadata], budget: Budget, group_size: int, *, model: CostModel = CostModel()
) -> Plan:
    """The parts of all groups as one plan: what the ranks together do.

    plan = plan_in_groups(buffers, Budget(16384, layout="flat"), group_size=256)
    """
    groups = [group_of(first, len(buffers), group_size) for first in range(0, len(buffers), group_size)]
    plans = [plan_group(buffers, budget, ranks, model=model) for ranks in groups]
    for _ in range(MAX_AGREEMENTS):
        outlines = list(map(outline, plans, groups))
        least_steps = steps_to_reach(outlines)
        if not least_steps:
            break
        plans = [
            plan
            if len(plan.totals) == least_steps
            else plan_group(buffers, budget, ranks, model=model, least_steps=least_steps)
            for plan, ranks in zip(plans, groups)
        ]
    else:
        raise disagreement(outlines)
    parts = [joined(plan, ranks, outlines) for plan, ranks in zip(plans, groups)]
    of_rank = [part.groups[rank] for part, ranks in zip(parts, groups) for rank in ranks]
    return dataclasses.replace(parts[0], groups=of_rank)


def _sum(totals: Sequence[MicroStepTotals]) -> MicroStepTotals:
    names = [item.name for item in dataclasses.fields(MicroStepTotals)]
    columns = {name: [getattr(one, name) for one in totals] for name in names}
    return MicroStepTotals(**{name: max(ns) if name in MAXIMA else sum(ns) for name, ns in columns.items()})
