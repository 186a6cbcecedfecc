"""Whole epochs of kept optimizer steps, of one or several ranks in lockstep: I1, I2, I4 to I7, I9.

What stock would have done is told by accelerate's own `BatchSamplerShard`, which deals its batches to the ranks.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lockstep import (
    NO_FEATURES,
    Epoch,
    Row,
    check_kept,
    check_optimizer_steps,
    run_kept,
    run_shards,
    sample,
    stock_steps,
    usable,
)
from planner_strategies import budgets, collated, costs
from torch.utils.data import BatchSampler

from odb_factory.data.order import MEAN_OF_MICRO_BATCH, MEAN_OF_STEP, StockMean, StockSteps
from odb_factory.data.samples import Rejection, Sample
from odb_factory.errors import CollectiveError
from odb_factory.planner import Budget

Case = tuple[list[Row], StockSteps, dict[str, Any]]


@st.composite
def datasets(draw: st.DrawFn, max_size: int = 30) -> list[Row]:
    """Rows of any cost, some rejected: singly, or in a streak that may be longer than an optimizer step."""
    kinds = draw(st.lists(costs(), max_size=max_size))
    start, length = draw(st.integers(0, max_size)), draw(st.sampled_from([0, 0, 1, 5, 20]))
    stride = draw(st.sampled_from([0, 0, 3]))

    def row(i: int) -> Row:
        if start <= i < start + length or (stride and i % stride == 1):
            return Rejection(i, ("unreadable", "overlong")[i % 2], "")
        return Sample(i, replace(kinds[i], leading_label=i % 3 == 0), NO_FEATURES)

    return [row(i) for i in range(len(kinds))]


@st.composite
def cases(draw: st.DrawFn, whole: bool = False) -> Case:
    """whole: N is what stock's own micro-batches make (`keep`), not any number."""
    rows = draw(datasets())
    batch_size, world_size = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    size = batch_size * world_size * draw(st.integers(1, 3))
    if not whole and draw(st.booleans()):
        size = draw(st.integers(1, 12))
    stock = stock_steps(
        len(rows),
        size=size,
        batch_size=batch_size,
        world_size=world_size,
        drop_last=draw(st.booleans()),
        mean=draw(
            st.sampled_from([MEAN_OF_STEP, StockMean("step", counts="labels"), StockMean("rank"), MEAN_OF_MICRO_BATCH])
        ),
    )
    return rows, stock, {"budget": draw(budgets), "balance": draw(st.booleans())}


def trained(epochs: list[Epoch]) -> list[list[int]]:
    """The ids of each optimizer step."""
    return [
        sorted(id for micro_batches in steps for one in micro_batches for id in one.ids)
        for steps in zip(*(epoch.optimizer_steps for epoch in epochs))
    ]


def stock_micro_batches(stock: StockSteps, num_rows: int, drop_last: bool) -> list[list[list[int]]]:
    """[micro-step of the epoch][rank] -> positions, as accelerate deals them out, without those it repeats."""
    batches = BatchSampler(range(num_rows), stock.batch_size, drop_last)
    shards = [list(BatchSamplerShard(batches, stock.world_size, rank)) for rank in range(stock.world_size)]
    seen: set[int] = set()
    dealt = []
    for micro_step in zip(*shards):
        dealt.append([])
        for batch in micro_step:
            dealt[-1].append([position for position in dict.fromkeys(batch) if position not in seen])
            seen.update(batch)
    return dealt


# Whole epochs


@settings(deadline=None, max_examples=120)
@given(st.data(), cases())
def test_an_epoch_keeps_its_promises(data: Any, case: Case) -> None:
    """I1, I2, I4 to I7, I9: step t has the positions [tN, (t+1)N), whatever N, ranks, budgets, rejected rows.

    The epoch is the same whatever rank runs ahead.
    """
    rows, stock, options = case
    epochs = run_kept(rows, stock, **options)
    check_kept(rows, epochs, stock, **options)
    again = run_kept(rows, stock, order=data.draw(st.permutations(range(stock.world_size))), **options)
    assert [epoch.plans for epoch in again] == [epoch.plans for epoch in epochs]
    assert [str(epoch.error) for epoch in again] == [str(epoch.error) for epoch in epochs]


@settings(deadline=None, max_examples=100)
@given(cases(whole=True))
def test_the_optimizer_steps_are_those_of_stock(case: Case) -> None:
    """I9 against accelerate: ids, what its means are taken of, its padded tokens, where it says the epoch is."""
    rows, stock, options = case
    epochs = run_kept(rows, stock, **options)
    assume(epochs[0].error is None)
    accumulation = stock.global_batch_size // (stock.batch_size * stock.world_size)
    dealt = stock_micro_batches(stock, len(rows), stock.remainder > 0)
    steps = [dealt[k : k + accumulation] for k in range(0, len(dealt), accumulation)]
    assert stock.steps_an_epoch == len(steps) == len(epochs[0].steps)
    cost = {row.id: row.cost for row in usable(rows)}
    for k, micro_steps in enumerate(steps):
        batches = [[[id for id in batch if id in cost] for batch in micro_step] for micro_step in micro_steps]
        assert trained(epochs)[k] == sorted(id for micro_step in batches for batch in micro_step for id in batch)
        of_ranks = [[id for batch in batches_of_rank for id in batch] for batches_of_rank in zip(*batches)]
        groups = {
            "step": [list(itertools.chain.from_iterable(of_ranks))],
            "rank": of_ranks,
            "micro_batch": [batch for micro_step in batches for batch in micro_step],
        }[stock.mean.over]
        # A model that takes its own mean shifts the labels first; the Trainer counts them all.
        counted = {id: one.units + ("labels" in stock.mean.counts and one.leading_label) for id, one in cost.items()}
        divided_by = {id: sum(counted[other] for other in group) for group in groups for id in group}
        for rank, epoch in enumerate(epochs):
            step = epoch.steps[k]
            assert step.num_stock_means == sum(bool(group) for group in groups)
            for one in epoch.optimizer_steps[k]:
                assert [sample.stock_units for sample in one.samples] == [divided_by[id] for id in one.ids]
            own = [batches_of_rank for batches_of_rank in list(zip(*batches))[rank] if batches_of_rank]
            shapes = [collated([cost[id] for id in batch], options["budget"].collation) for batch in own]
            assert step.stock_input_tokens == sum(num_rows * length for num_rows, length, _ in shapes)
            assert step.progress == pytest.approx(min((k + 1) * accumulation, len(dealt)) / len(dealt), abs=1e-12)
    assert epochs[0].steps[-1].progress == 1.0
    assert {step.epoch_steps for step in epochs[0].steps} == {len(steps)}, "no estimate is left"


@settings(deadline=None, max_examples=40)
@given(cases())
def test_an_epoch_may_begin_at_any_optimizer_step(case: Case) -> None:
    """A cursor is all that a resume needs: the same micro-batches follow."""
    rows, stock, options = case
    whole = run_kept(rows, stock, **options)
    for before in whole[0].steps[:-1]:
        rest = run_kept(
            rows,
            stock,
            first_step=before.index + 1,
            planned=before.done - before.rejected.total(),
            rejected=before.rejected,
            overlong=before.overlong,
            **options,
        )
        assert [epoch.error for epoch in rest] == [None] * len(rest)
        assert [epoch.micro_batches for epoch in rest] == [
            [one for one in epoch.micro_batches if one.step.index > before.index] for epoch in whole
        ]


def test_overlong_samples_are_counted_and_trained_on() -> None:
    rows: list[Row] = [sample(i, 100 if i in (1, 6) else 5) for i in range(8)]
    for epoch in run_kept(rows, stock_steps(8, size=4, world_size=2), budget=Budget(32)):
        assert [step.overlong for step in epoch.steps] == [1, 2]


# Datasets whose length is not known, or wrong


@settings(deadline=None, max_examples=40)
@given(datasets(), st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_a_stream_keeps_its_optimizer_steps(rows: list[Row], size: int, world_size: int, balance: bool) -> None:
    """Its length is known when it ends: the same samples and steps as with one, and no figure before that."""
    known = stock_steps(len(rows), size=size, world_size=world_size)
    with_length = run_kept(rows, known, balance=balance)
    without = run_kept(rows, stock_steps(None, size=size, world_size=world_size), balance=balance)
    if with_length[0].error is not None:
        assert all(isinstance(epoch.error, CollectiveError) for epoch in without)
        return
    assert [epoch.error for epoch in without] == [None] * world_size
    check_optimizer_steps(without, {row.id: row.cost for row in usable(rows)}, Budget(32))
    assert trained(without) == trained(with_length)
    seen = 0
    for step, other in zip(without[0].steps, with_length[0].steps):
        seen += step.samples
        assert step.done == seen + step.rejected.total() == other.done
        assert (step.progress, step.remainder) == (None, 0)
        assert step.epoch_steps == (len(without[0].steps) if step.last else 0)


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize(("said", "found", "word"), [(8, 12, "more"), (40, 12, "fewer"), (4, 0, None), (0, 12, "more")])
def test_a_length_that_is_wrong_ends_all_ranks(said: int, found: int, word: str | None, balance: bool) -> None:
    """The steps of the epoch, its schedule and its end are counted by it; at the last step that it allows."""
    rows: list[Row] = [sample(i, 5) for i in range(found)]
    epochs = run_shards(
        [rows[rank::2] for rank in range(2)], stock=stock_steps(said, size=4, world_size=2), balance=balance
    )
    for epoch in epochs:
        assert isinstance(epoch.error, CollectiveError)
        if word:
            assert f"has {said} samples by its `__len__`, and yields {word}; fix" in str(epoch.error)
            assert len(epoch.plans) == max(min(math.ceil(said / 4), found // 4) - 1, 0)
        else:
            assert "it is empty" in str(epoch.error)


@pytest.mark.parametrize("said", [9, 10, 12])
def test_a_length_that_is_wrong_within_the_last_step_loses_nothing(said: int) -> None:
    rows: list[Row] = [sample(i, 5) for i in range(11)]
    epochs = run_shards([rows[rank::2] for rank in range(2)], stock=stock_steps(said, size=4, world_size=2))
    assert trained(epochs) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.integers(1, 20), max_size=12), min_size=2, max_size=3),
    st.integers(1, 2),
    st.integers(1, 2),
    st.booleans(),
)
def test_streams_that_were_split_before_keep_stocks_micro_batches(
    lengths: list[list[int]], batch_size: int, accumulation: int, balance: bool
) -> None:
    """Each rank takes `batch_size` of its own in each micro-step, as long as it has any; the others go on."""
    assume(any(lengths))
    ids = itertools.count()
    shards = [[sample(next(ids), tokens) for tokens in shard] for shard in lengths]
    size = batch_size * accumulation * len(shards)
    stock = stock_steps(
        None,
        size=size,
        batch_size=batch_size,
        world_size=len(shards),
        mean=MEAN_OF_MICRO_BATCH,
        is_split=True,
    )
    epochs = run_shards(shards, stock=stock, balance=balance, num_samples=None)
    assert [epoch.error for epoch in epochs] == [None] * len(shards)
    cost = {row.id: row.cost for shard in shards for row in shard}
    check_optimizer_steps(epochs, cost, Budget(32))
    share = batch_size * accumulation
    num_steps = max(math.ceil(len(shard) / share) for shard in shards)
    taken = [[[row.id for row in shard[k * share : (k + 1) * share]] for shard in shards] for k in range(num_steps)]
    assert trained(epochs) == [sorted(itertools.chain.from_iterable(ranks)) for ranks in taken]
    for k, ranks in enumerate(taken):
        batches = [own[i : i + batch_size] for own in ranks for i in range(0, len(own), batch_size)]
        divided_by = {id: sum(cost[other].units for other in batch) for batch in batches for id in batch}
        assert epochs[0].steps[k].num_stock_means == len(batches)
        for epoch in epochs:
            for one in epoch.optimizer_steps[k]:
                assert [sample.stock_units for sample in one.samples] == [divided_by[id] for id in one.ids]
