"""Every small world, without chance: I1 to I7, I9 for all epochs of a few ranks with a few samples each.

A world is the shard of each rank, in the order in which its sampler hands it out; `buffer_size` decides how the buffers
fill from it. The production `FillEpoch` of all ranks run each world from the first draw to the last step. Ranks may
change places, and in a buffer of one sample there is one group, whatever the length: worlds that differ in these only
are run once (a test of its own says that they are the same).

A kept world is the order of all ranks together, and the production `KeepEpoch` runs it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import Epoch, Row, check_kept, check_promises, rejection, run_kept, run_shards, sample, stock_steps

from odb_factory.planner import ROW, Budget, BufferMetadata, Plan

LENGTHS = (2, 3, 7)
BUDGET, FLAT = Budget(6), Budget(6, layout="flat")
"""Three rows of 2 or two of 3 make a full group; 7 breaks the budget alone. In one row 2 and 3 go together too."""
MAX_SAMPLES, MAX_RANKS = 5, 3

Shard = tuple[int, ...]
World = tuple[Callable[..., list[Epoch]], Callable[[list[Epoch]], None]]
"""What runs it (given the order of the ranks), and what checks the epochs of its ranks."""


@functools.lru_cache(maxsize=500_000)
def _planned(
    make: Callable[..., Plan],
    buffers: tuple[tuple[bytes, bool], ...],
    budget: Budget,
    options: tuple[tuple[str, Any], ...],
) -> Plan:
    rows = [BufferMetadata(np.frombuffer(rows, ROW), exhausted) for rows, exhausted in buffers]
    return make(rows, budget, **dict(options))


def once(make: Callable[..., Plan], buffers: Sequence[BufferMetadata], budget: Budget, **options: Any) -> Plan:
    """The production planner: each plan is made once, since it depends on its arguments only."""
    known = tuple((buffer.rows.tobytes(), buffer.exhausted) for buffer in buffers)
    return _planned(make, known, budget, tuple(options.items()))


def check_all(worlds: Iterable[World], again: bool = False) -> int:
    """How many there are. again: each is run a second time, its ranks in reverse order (I6)."""
    count = 0
    for run, check in worlds:
        count += 1
        epochs = run()
        try:
            check(epochs)
            if again:
                repeated = run(order=range(len(epochs))[::-1])
                assert [epoch.plans for epoch in repeated] == [epoch.plans for epoch in epochs], "I6"
        except AssertionError as error:
            raise AssertionError(str(run)) from error
    return count


def shards(buffer_size: int, max_samples: int) -> list[Shard]:
    """The lengths of every shard that fills its buffers in a way of its own."""
    if buffer_size == 1:
        return [LENGTHS[:1] * n for n in range(max_samples + 1)]
    return [lengths for n in range(max_samples + 1) for lengths in itertools.product(LENGTHS, repeat=n)]


def rows_of(world: Sequence[Sequence[int]]) -> list[list[Row]]:
    """Ids count the samples from rank to rank."""
    ids = itertools.count()
    return [[sample(next(ids), tokens) for tokens in shard] for shard in world]


def filled_worlds(num_ranks: int, max_samples: int, **options: Any) -> Iterator[World]:
    """options: buffer_size, accumulation, join, balance, budget."""
    options["compute"] = once
    for world in itertools.combinations_with_replacement(shards(options["buffer_size"], max_samples), num_ranks):
        rows = rows_of(world)
        yield partial(run_shards, rows, **options), partial(check_promises, rows, **options)


def kept_worlds(
    num_ranks: int, max_samples: int, max_size: int, *, rejected: bool = False, budget: Budget = BUDGET
) -> Iterator[World]:
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
                    options: dict[str, Any] = {"budget": budget, "balance": balance, "compute": once}
                    yield partial(run_kept, rows, stock, **options), partial(check_kept, rows, stock=stock, **options)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Optimizer steps without a usable sample are warned of; here there are thousands."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


ALONE = [(accumulation, join, False) for accumulation, join in itertools.product((1, 2), (True, False))]
"""(accumulation, join, balance)."""
BALANCED = [(1, True, True), (2, True, True)]


@pytest.mark.parametrize(
    ("sizes", "modes", "budget", "least"),
    [
        pytest.param(((1, 5), (2, 3), (3, 2)), ALONE, BUDGET, 5_000, id="own samples", marks=pytest.mark.nightly),
        pytest.param(((2, 3), (3, 2)), BALANCED, BUDGET, 1_500, id="balanced"),
        pytest.param(((1, 4), (2, 2)), [*ALONE, (1, True, True)], FLAT, 1_000, id="flat"),
    ],
)
def test_every_small_world_keeps_its_promises(
    sizes: Sequence[tuple[int, int]], modes: Any, budget: Budget, least: int
) -> None:
    """sizes: (ranks, samples of each at most). least: worlds that there are."""
    worlds = itertools.chain.from_iterable(
        filled_worlds(*size, buffer_size=buffer_size, accumulation=steps, join=join, balance=balance, budget=budget)
        for size in sizes
        for steps, join, balance in modes
        for buffer_size in range(1 if join else steps, size[1] + 1)
    )
    assert check_all(worlds, again=True) > least


@pytest.mark.parametrize(
    ("sizes", "most", "budget", "least"),
    [
        pytest.param(((1, 4), (2, 4), (3, 3)), 5, BUDGET, 5_000, id="padded", marks=pytest.mark.nightly),
        pytest.param(((1, 4), (2, 3), (3, 3)), 4, FLAT, 1_000, id="flat"),
    ],
)
def test_every_small_kept_world_keeps_its_promises(
    sizes: Sequence[tuple[int, int]], most: int, budget: Budget, least: int
) -> None:
    """sizes: (ranks, samples of the order at most); N up to `most`. Padded also orders of 3 with rejected rows."""
    count = sum(check_all(kept_worlds(*size, most, budget=budget), again=True) for size in sizes)
    if budget is BUDGET:
        count += sum(check_all(kept_worlds(num_ranks, 3, 3, rejected=True)) for num_ranks in (1, 2, 3))
    assert count > least


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("budget", [BUDGET, FLAT], ids=["padded", "flat"])
@pytest.mark.parametrize("num_ranks", range(1, MAX_RANKS + 1))
def test_the_full_grid_of_kept_worlds(num_ranks: int, budget: Budget) -> None:
    """Orders of up to 6 samples, and of up to 5 with rejected rows; N up to 6."""
    assert check_all(kept_worlds(num_ranks, 6, 6, budget=budget), again=True) > 1_000
    assert check_all(kept_worlds(num_ranks, 5, 6, rejected=True, budget=budget)) > 1_000


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("accumulation", "join", "balance"), [*ALONE, *BALANCED])
@pytest.mark.parametrize("buffer_size", range(1, MAX_SAMPLES + 1))
@pytest.mark.parametrize("num_ranks", range(1, MAX_RANKS + 1))
@pytest.mark.parametrize("budget", [BUDGET, FLAT], ids=["padded", "flat"])
def test_the_full_grid(
    num_ranks: int, buffer_size: int, accumulation: int, join: bool, balance: bool, budget: Budget
) -> None:
    """Up to three ranks of up to 5 samples each."""
    if not join and buffer_size < accumulation:
        pytest.skip("refused: a buffer must hold a whole optimizer step")
    options = {"buffer_size": buffer_size, "accumulation": accumulation, "join": join, "balance": balance}
    count = check_all(filled_worlds(num_ranks, MAX_SAMPLES, budget=budget, **options))
    assert count == math.comb(len(shards(buffer_size, MAX_SAMPLES)) + num_ranks - 1, num_ranks)


def lengths_of(world: Sequence[Sequence[int]], **options: Any) -> list[Any]:
    """Of each rank, in each plan, the groups in the order in which they go out, as lengths."""
    rows = rows_of(world)
    tokens = {row.id: row.cost.tokens for shard in rows for row in shard}  # type: ignore[union-attr]
    epochs = run_shards(rows, budget=BUDGET, **options)
    return [
        [[[tokens[id] for id in one.ids] for one, _ in tasks] for tasks in epoch.plans] + [str(epoch.error)]
        for epoch in epochs
    ]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(LENGTHS), max_size=MAX_SAMPLES), min_size=1, max_size=MAX_RANKS),
    st.integers(1, 6),
    st.sampled_from([(1, True), (2, True), (1, False), (2, False)]),
    st.data(),
)
def test_what_makes_worlds_the_same(
    world: list[list[int]], buffer_size: int, mode: tuple[int, bool], data: st.DataObject
) -> None:
    """Ranks may change places; a buffer of one sample is one group whatever its length."""
    accumulation, join = mode
    options = {"buffer_size": buffer_size if join else max(buffer_size, accumulation), "join": join}
    options["accumulation"] = accumulation
    groups, places = lengths_of(world, **options), data.draw(st.permutations(range(len(world))))
    assert lengths_of([world[rank] for rank in places], **options) == [groups[rank] for rank in places]
    if options["buffer_size"] == 1:
        plain = lengths_of([[LENGTHS[0]] * len(shard) for shard in world], **options)
        for mine, theirs in zip(groups, plain):
            assert [[*map(len, plan)] for plan in mine[:-1]] == [[*map(len, plan)] for plan in theirs[:-1]]
