"""Every small world, without chance: I1 to I7, I9 for all epochs of a few ranks with a few samples each.

A world is the shard of each rank, in the order in which its sampler hands it out; `buffer_size`
decides how the buffers fill from it. The production `FillEpoch` of all ranks run each world from
the first draw to the last step. Worlds that differ in names only are run once; that these
are the same is a test of its own:

- ranks may change places;
- in a buffer of one sample there is one group, whatever the length.

A kept world is the order of all ranks together, and the production `KeepEpoch` runs it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import Row, check_kept, check_promises, rejection, run_kept, run_shards, sample, stock_steps

from odb_factory.data import steps as steps_module
from odb_factory.data.order import StockSteps
from odb_factory.planning import ROW, Budget, BufferMetadata, Plan, plan_buffers, plan_optimizer_step

LENGTHS = (2, 3, 7)
BUDGET, FLAT = Budget(6), Budget(6, layout="flat")
"""Three rows of 2 or two of 3 make a full group; 7 breaks the budget alone. In one row 2 and 3 go together too."""
MAX_SAMPLES, MAX_RANKS = 5, 3
MODES = list(itertools.product((1, 2), (True, False)))
"""(accumulation, join)."""

Shard = tuple[int, ...]


def shards(buffer_size: int, max_samples: int) -> list[Shard]:
    """The lengths of every shard that fills its buffers in a way of its own."""
    if buffer_size == 1:
        return [LENGTHS[:1] * n for n in range(max_samples + 1)]
    return [lengths for n in range(max_samples + 1) for lengths in itertools.product(LENGTHS, repeat=n)]


def worlds(num_ranks: int, buffer_size: int, max_samples: int) -> Iterator[tuple[Shard, ...]]:
    return itertools.combinations_with_replacement(shards(buffer_size, max_samples), num_ranks)


def run(world: Sequence[Shard], **options: Any) -> tuple[Any, Any]:
    """The rows and the epochs of a world; ids count the samples from rank to rank."""
    ids = itertools.count()
    rows = [[sample(next(ids), tokens) for tokens in shard] for shard in world]
    return rows, run_shards(rows, **{"budget": BUDGET} | options)


@functools.lru_cache(maxsize=500_000)
def _planned(
    make: Callable[..., Plan],
    buffers: tuple[tuple[bytes, bool], ...],
    budget: Budget,
    options: tuple[tuple[str, Any], ...],
) -> Plan:
    return make(
        [BufferMetadata(np.frombuffer(rows, ROW), exhausted) for rows, exhausted in buffers], budget, **dict(options)
    )


def remembered(make: Callable[..., Plan]) -> Callable[..., Plan]:
    """The production planner: each plan is made once, for it depends on its arguments only, and worlds share them."""

    def planned(buffers: Sequence[BufferMetadata], budget: Budget, **options: Any) -> Plan:
        known = tuple((buffer.rows.tobytes(), buffer.exhausted) for buffer in buffers)
        return _planned(make, known, budget, tuple(options.items()))

    return planned


def explore(
    num_ranks: int,
    buffer_size: int,
    max_samples: int,
    accumulation: int,
    join: bool,
    again: bool = False,
    balance: bool = False,
    budget: Budget = BUDGET,
) -> int:
    """Check every world of a kind; how many there are. again: a second time, its ranks run in reverse order (I6)."""
    options: dict[str, Any] = {
        "buffer_size": buffer_size,
        "accumulation": accumulation,
        "join": join,
        "balance": balance,
        "budget": budget,
    }
    count = 0
    with mock.patch.object(steps_module, "plan_buffers", remembered(plan_buffers)):
        for world in worlds(num_ranks, buffer_size, max_samples):
            rows, epochs = run(world, **options)
            try:
                check_promises(rows, epochs, **options)
                if again:
                    _, repeated = run(world, order=range(num_ranks)[::-1], **options)
                    assert [epoch.plans for epoch in repeated] == [epoch.plans for epoch in epochs], "I6"
            except AssertionError as error:
                raise AssertionError(f"shards {world}, {options}") from error
            count += 1
    return count


ALONE = [(*mode, False) for mode in MODES]
"""(accumulation, join, balance)."""
SMALL = [
    pytest.param(((1, 5), (2, 3), (3, 2)), ALONE, BUDGET, 5_000, id="own samples", marks=pytest.mark.nightly),
    pytest.param(((2, 3), (3, 2)), [(1, True, True), (2, True, True)], BUDGET, 1_500, id="balanced"),
    pytest.param(((1, 4), (2, 2)), [*ALONE, (1, True, True)], FLAT, 1_000, id="flat"),
]


@pytest.mark.parametrize(("sizes", "modes", "budget", "least"), SMALL)
def test_every_small_world_keeps_its_promises(
    sizes: Sequence[tuple[int, int]], modes: Any, budget: Budget, least: int, capsys: pytest.CaptureFixture
) -> None:
    """sizes: (ranks, samples of each at most). least: worlds that there are."""
    count = sum(
        explore(num_ranks, buffer_size, max_samples, accumulation, join, again=True, balance=balance, budget=budget)
        for num_ranks, max_samples in sizes
        for accumulation, join, balance in modes
        for buffer_size in range(1 if join else accumulation, max_samples + 1)
    )
    with capsys.disabled():
        print(f"\nI1 to I7 hold in {count:,} worlds of up to 3 ranks")
    assert count > least


def kept_worlds(
    num_ranks: int, max_samples: int, max_size: int, rejected: bool
) -> Iterator[tuple[list[Row], StockSteps, bool]]:
    """Every order of up to so many samples, N up to `max_size`, whole and as `drop_last` cuts it for stock batches of 1
    and 2, with and without balance. rejected: a row may also be one that is rejected."""
    for num_rows in range(max_samples + 1):
        rules = [{"batch_size": 1}] + [
            {"batch_size": batch_size, "drop_last": True}
            for batch_size in (1, 2)
            if num_rows % (batch_size * num_ranks)  # else nothing is left out
        ]
        for lengths in itertools.product((*LENGTHS, None) if rejected else LENGTHS, repeat=num_rows):
            rows = [rejection(i) if tokens is None else sample(i, tokens) for i, tokens in enumerate(lengths)]
            for size, rule in itertools.product(range(1, max_size + 1), rules):
                stock = stock_steps(num_rows, size=size, world_size=num_ranks, **rule)
                for balance in (True, False)[: 1 + (num_ranks > 1)]:
                    yield rows, stock, balance


def explore_kept(
    num_ranks: int,
    max_samples: int,
    max_size: int,
    *,
    rejected: bool = False,
    again: bool = False,
    budget: Budget = BUDGET,
) -> int:
    """Check every kept world of a kind; how many there are. again: a second time, its ranks run in reverse order."""
    count = 0
    with mock.patch.object(steps_module, "plan_optimizer_step", remembered(plan_optimizer_step)):
        for rows, stock, balance in kept_worlds(num_ranks, max_samples, max_size, rejected):
            options: dict[str, Any] = {"budget": budget, "balance": balance}
            epochs = run_kept(rows, stock, **options)
            try:
                check_kept(rows, epochs, stock, **options)
                if again:
                    repeated = run_kept(rows, stock, order=range(num_ranks)[::-1], **options)
                    assert [epoch.plans for epoch in repeated] == [epoch.plans for epoch in epochs], "I6"
            except AssertionError as error:
                raise AssertionError(f"rows {rows}, {stock}, balance {balance}") from error
            count += 1
    return count


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Optimizer steps without a usable sample are warned of; here there are thousands."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("sizes", "most", "budget", "least"),
    [
        pytest.param(((1, 4), (2, 4), (3, 3)), 5, BUDGET, 5_000, id="padded", marks=pytest.mark.nightly),
        pytest.param(((1, 4), (2, 3), (3, 3)), 4, FLAT, 1_000, id="flat"),
    ],
)
def test_every_small_kept_world_keeps_its_promises(
    sizes: Sequence[tuple[int, int]], most: int, budget: Budget, least: int, capsys: pytest.CaptureFixture
) -> None:
    """sizes: (ranks, samples of the order at most); N up to `most`. Padded also orders of 3 with rejected rows."""
    count = sum(explore_kept(num_ranks, samples, most, again=True, budget=budget) for num_ranks, samples in sizes)
    if budget is BUDGET:
        count += sum(explore_kept(num_ranks, 3, 3, rejected=True) for num_ranks in (1, 2, 3))
    with capsys.disabled():
        print(f"\nI1, I2, I4 to I7, I9 hold in {count:,} kept worlds of up to 3 ranks")
    assert count > least


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("budget", [BUDGET, FLAT], ids=["padded", "flat"])
@pytest.mark.parametrize("num_ranks", range(1, MAX_RANKS + 1))
def test_the_full_grid_of_kept_worlds(num_ranks: int, budget: Budget, capsys: pytest.CaptureFixture) -> None:
    """Orders of up to 6 samples, and of up to 5 with rejected rows; N up to 6."""
    count = explore_kept(num_ranks, 6, 6, again=True, budget=budget)
    count += explore_kept(num_ranks, 5, 6, rejected=True, budget=budget)
    with capsys.disabled():
        print(f"\n{count:,} kept worlds of {num_ranks} ranks")


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("accumulation", "join", "balance"), [*ALONE, (1, True, True), (2, True, True)])
@pytest.mark.parametrize("buffer_size", range(1, MAX_SAMPLES + 1))
@pytest.mark.parametrize("num_ranks", range(1, MAX_RANKS + 1))
@pytest.mark.parametrize("budget", [BUDGET, FLAT], ids=["padded", "flat"])
def test_the_full_grid(
    num_ranks: int,
    buffer_size: int,
    accumulation: int,
    join: bool,
    balance: bool,
    budget: Budget,
    capsys: pytest.CaptureFixture,
) -> None:
    """Up to three ranks of up to 5 samples each."""
    if not join and buffer_size < accumulation:
        pytest.skip("refused: a buffer must hold a whole optimizer step")
    count = explore(num_ranks, buffer_size, MAX_SAMPLES, accumulation, join, balance=balance, budget=budget)
    assert count == math.comb(len(shards(buffer_size, MAX_SAMPLES)) + num_ranks - 1, num_ranks)
    with capsys.disabled():
        print(
            f"\n{count:,} worlds: {num_ranks} ranks, buffer_size {buffer_size}, accumulation {accumulation}, "
            f"join {join}, balance {balance}"
        )


# What makes worlds the same

small_worlds = st.lists(st.lists(st.sampled_from(LENGTHS), max_size=MAX_SAMPLES), min_size=1, max_size=MAX_RANKS)
modes = st.fixed_dictionaries(
    {"buffer_size": st.integers(2, 6), "accumulation": st.integers(1, 2), "join": st.booleans()}
)


def lengths_of(world: Sequence[Sequence[int]], **options: Any) -> list[list[list[list[int]]]]:
    """Of each rank, in each plan, the groups in the order in which they go out, as lengths."""
    rows, epochs = run(world, **options)
    tokens = {row.id: row.cost.tokens for shard in rows for row in shard}
    return [
        [[[tokens[id] for id in one.ids] for one, _ in tasks] for tasks in epoch.plans] + [str(epoch.error)]
        for epoch in epochs
    ]


@settings(deadline=None)
@given(small_worlds.flatmap(lambda world: st.tuples(st.just(world), st.permutations(range(len(world))))), modes)
def test_ranks_may_change_places(case: tuple[list[list[int]], list[int]], options: dict[str, Any]) -> None:
    world, places = case
    groups = lengths_of(world, **options)
    assert lengths_of([world[rank] for rank in places], **options) == [groups[rank] for rank in places]


@settings(deadline=None)
@given(small_worlds, st.sampled_from([(1, True), (2, True), (1, False)]))
def test_a_buffer_of_one_sample_is_one_group_whatever_its_length(
    world: list[list[int]], mode: tuple[int, bool]
) -> None:
    options = {"buffer_size": 1, "accumulation": mode[0], "join": mode[1]}

    def rows_of(groups: Any) -> Any:
        return [[plan if isinstance(plan, str) else [len(g) for g in plan] for plan in rank] for rank in groups]

    plain = [[LENGTHS[0]] * len(shard) for shard in world]
    assert rows_of(lengths_of(world, **options)) == rows_of(lengths_of(plain, **options))
