"""Kept optimizer steps planned in groups of ranks: all agree on K and on the totals, and no sample leaves its group."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import of_all_ranks, stock_steps
from planning_strategies import costs
from thread_ranks import Seat, run_ranks

from odb_factory.comm.ranks import Sums
from odb_factory.data.cursor import Place
from odb_factory.data.epoch import EpochContext, KeepEpoch
from odb_factory.data.samples import MicroBatch, Sample
from odb_factory.data.serialize import pack
from odb_factory.errors import CollectiveError
from odb_factory.planning import Budget, BufferMetadata, Cost, keep, make_metadata, plan_in_groups, plan_optimizer_step
from odb_factory.planning.keep import GroupOutline

BUDGET = Budget(64, 32, layout="flat")


def epoch_of(seat: Any, samples: list[Sample], global_batch_size: int, balance: bool = True) -> list[MicroBatch]:
    """The micro-batches of one rank, which draws every so-manyth sample."""
    planner = KeepEpoch(
        iter(samples[seat.rank :: seat.world_size]),
        EpochContext(
            budget=BUDGET,
            num_samples=len(samples),
            balance=balance,
            seed=0,
            ranks=seat,
            stand_in=lambda: samples[0],
            leave_out=print,
        ),
        Place(),
        stock=stock_steps(len(samples), size=global_batch_size, world_size=seat.world_size),
    )
    return [micro_batch for tasks in planner for micro_batch, _ in tasks]


@settings(deadline=None, max_examples=25)
@given(st.lists(costs(), min_size=1, max_size=40), st.integers(2, 5), st.integers(1, 3), st.integers(1, 6))
def test_groups_take_the_same_optimizer_steps(
    kinds: list[Cost], world_size: int, group_size: int, per_rank: int
) -> None:
    """I1, I2, I6, I9, and that every rank knows the totals of all."""
    samples = [Sample(i, cost, pack({})) for i, cost in enumerate(kinds)]
    size = per_rank * world_size
    ranks = run_ranks(world_size, lambda seat: epoch_of(seat, samples, size), group_size=group_size)
    assert not [one for one in ranks if isinstance(one, Exception)]
    trained: dict[int, list[int]] = {}
    for items in zip(*ranks, strict=True):
        of_all = items[0].totals
        for one in items:
            assert of_all_ranks(one.step) == of_all_ranks(items[0].step) and one.totals == of_all
        assert of_all.samples == sum(len(one.ids) for one in items)
        assert of_all.tokens == sum(one.tokens for one in items)
        assert of_all.padded_tokens == sum(one.tokens for one in items), "no padding, no dummies here"
        assert of_all.max_rank_tokens == max(one.tokens for one in items)
        assert of_all.active_ranks == sum(not one.idle for one in items)
        for rank, one in enumerate(items):
            assert all(id % world_size // group_size == rank // group_size for id in one.ids)
            trained.setdefault(one.step.index, []).extend(one.ids)
    for index, ids in trained.items():
        assert sorted(ids) == list(range(index * size, min((index + 1) * size, len(samples))))
    for micro_batch in ranks[0]:
        whole = [kinds[i] for i in trained[micro_batch.step.index]]
        assert micro_batch.step.units == sum(cost.units for cost in whole)


def test_a_group_that_needs_more_micro_steps_takes_the_others_along() -> None:
    """Ranks 0 and 1 hold short samples, 2 and 3 long ones: K is that of the second group, and the first fills it."""
    samples = [Sample(i, Cost(30 if i % 4 > 1 else 8, units=1), pack({})) for i in range(32)]
    ranks = run_ranks(4, lambda seat: epoch_of(seat, samples, 32), group_size=2)
    assert {len(micro_batches) for micro_batches in ranks} == {4}
    assert all(not one.idle for micro_batches in ranks for one in micro_batches)


def test_what_each_rank_plans_is_the_plan_of_all_groups() -> None:
    """The benchmark's `plan_in_groups` is what ranks do."""
    samples = [Sample(i, Cost(1 + (i * 37) % 60, units=1), pack({})) for i in range(48)]
    ranks = run_ranks(6, lambda seat: epoch_of(seat, samples, 48), group_size=4)
    sizes = [len(sample.features) for sample in samples[:8]]
    buffers = [make_metadata([one.cost for one in samples[rank::6]], [0] * 8, True, sizes) for rank in range(6)]
    plan = plan_in_groups(buffers, BUDGET, 4)
    drawn = [sample.id for rank in range(6) for sample in samples[rank::6]]
    expected = [[tuple(drawn[i] for i in group) for group in groups] for groups in plan.groups]
    assert [[one.ids for one in micro_batches] for micro_batches in ranks] == expected
    assert [one.totals for one in ranks[0]] == plan.totals


def test_ranks_of_a_group_that_plan_otherwise_stop() -> None:
    """I6: also those of other groups, which could not know."""
    samples = [Sample(i, Cost(10, units=1), pack({})) for i in range(16)]

    class Tampering(Seat):
        def sum_up(self, sums: Sums, round_index: int) -> Sums:
            told = [(first, checksum + (self.rank == 3), rank) for first, checksum, rank in sums.plans]
            return super().sum_up(replace(sums, plans=told), round_index)

    ranks = run_ranks(4, lambda seat: epoch_of(Tampering(seat.table, seat.rank), samples, 16), group_size=2)
    for error in ranks:
        assert isinstance(error, CollectiveError)
        assert "different plans" in str(error) and "rank 3" in str(error)


def test_sums_travel_whole() -> None:
    buffers = [BufferMetadata(make_metadata([Cost(50, 3), Cost(20)], [0, 0], False).rows, False)]
    outline = GroupOutline.of(plan_optimizer_step(buffers, BUDGET, balance=True), 0)
    told = Sums(outline=outline, rejected=Counter(unreadable=2), means=Counter({7: 3}), roots=1 << 70, exhausted=False)
    assert outline.totals[0].tokens > 0
    assert Sums.decode(told.encode()) == Sums.decode(Sums.merge([told.encode(), Sums().encode()])) == told


def test_groups_that_never_agree_on_k_end_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """I5: every agreement has a bound; where ranks run it, and in the plan of all groups at once."""
    monkeypatch.setattr(keep, "steps_to_reach", lambda outlines: 3)
    samples = [Sample(i, Cost(10, units=1), pack({})) for i in range(16)]
    for error in run_ranks(4, lambda seat: epoch_of(seat, samples, 16), group_size=2):
        assert isinstance(error, Exception) and "do not agree on the number of micro-steps" in str(error)
    buffers = [make_metadata([Cost(10)] * 4, [0] * 4, True, [1] * 4) for _ in range(4)]
    with pytest.raises(RuntimeError, match="do not agree on the number of micro-steps"):
        plan_in_groups(buffers, BUDGET, 2)
