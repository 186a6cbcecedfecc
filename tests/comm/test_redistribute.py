"""Samples that change ranks: every rank has what its groups are made of, in the order in which they are collated."""

from __future__ import annotations

from typing import Any

import msgpack
from hypothesis import given
from hypothesis import strategies as st
from planning_strategies import costs
from thread_ranks import Table, TableGroup

from odb_factory.data.samples import Sample
from odb_factory.data.serialize import pack, redistribute
from odb_factory.planning import Budget, make_metadata, plan_buffers


@given(st.lists(st.lists(costs(), max_size=12), min_size=2, max_size=5))
def test_every_rank_gets_the_samples_of_its_groups(world: list[list]) -> None:
    """And nothing else: a buffer holds what its rank trains on, and no rank is met for nothing."""
    held = [
        [Sample(100 * rank + i, cost, pack({"input_ids": [i]})) for i, cost in enumerate(world_costs)]
        for rank, world_costs in enumerate(world)
    ]
    held_by_rank = [make_metadata(one, [0] * len(one), exhausted=True) for one in world]
    plan = plan_buffers(held_by_rank, Budget(100), seed=0, epoch=0, round_index=0, balance=True)
    everything = [sample for mine in held for sample in mine]
    ranks, table = range(len(world)), Table(len(world), timeout_s=0)
    for told in (False, True):  # what is given, then what is taken
        for rank, mine in enumerate(held):
            rows = [row for group in plan.groups[rank] for row in group]

            def swap(given: Any, sources: Any, rank: int = rank, told: bool = told) -> Any:
                found = TableGroup(table, rank).swap({} if told else given, sources if told else [])
                assert all(given.values()) and rank not in {*given, *sources}
                return found if told else dict.fromkeys(sources, msgpack.packb([]))

            try:
                samples = redistribute(plan, ranks, rank, mine, swap)
            except StopIteration:  # what the others give comes second
                assert not told
                continue
            if told or not set(rows) - set(range(plan.starts[rank], plan.starts[rank + 1])):
                assert [samples[row] for row in rows] == [everything[row] for row in rows]
                assert set(samples) == set(rows) | set(range(plan.starts[rank], plan.starts[rank + 1]))
