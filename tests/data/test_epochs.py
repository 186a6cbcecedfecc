"""Whole epochs of the loader on one to four ranks: small worlds, random worlds, and orders of custom samplers. Resumed
epochs: test_resume.py."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler, WeightedRandomSampler
from transformers import set_seed
from worlds import KEEP, Claims, Row, SplitStream, Stream, check_epoch, ids_of, of_steps, run, train, usable

from odb_factory.data.order import MEAN_OF_MICRO_BATCH, MEAN_OF_STEP, StockMean, dismantle
from odb_factory.errors import CollectiveError, DataError
from odb_factory.planner import Collation, Cost

SMALL = (2, 3, 7)
"""Tokens of rows for a budget of 6: three rows of 2, or two rows of 3, fill it; a row of 7 breaks it alone. A flat row
may also hold 2 and 3."""


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Hundreds of optimizer steps without a usable sample would be logged."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


# Every small world


def small(most: int, kinds: tuple[int, ...] = SMALL) -> Iterator[list[int]]:
    return (list(rows) for n in range(most + 1) for rows in itertools.product(kinds, repeat=n))


def kept_worlds(most: int, ranks: range, sizes: range) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Every order of at most `most` samples, whole and as `drop_last` cuts it for batches of 1 and 2; also short orders
    with unusable rows."""
    orders = itertools.chain(small(most), (rows for rows in small(3, (0, 3, 7)) if 0 in rows))
    for rows, world_size in itertools.product(orders, ranks):
        rules: list[dict[str, Any]] = [{"global_batch_size": size} for size in sizes]
        rules += [
            {"global_batch_size": "keep", "batch_size": batch_size, "drop_last": True}
            for batch_size in (1, 2)
            if len(rows) % (batch_size * world_size)  # else `drop_last` drops nothing
        ]
        for rule, balance in itertools.product(rules, (True, False)[: 1 + (world_size > 1)]):
            yield rows, {"world_size": world_size, "balance": balance, **rule}


def filled_worlds(most: int, ranks: range, accumulations: range) -> Iterator[tuple[list[int], dict[str, Any]]]:
    for rows, world_size in itertools.product(small(most), ranks):
        for accumulation, kind in itertools.product(accumulations, ("join", "balance", "closes")):
            for buffer_size in range(accumulation, 4):
                options = {"join": kind != "closes", "balance": kind == "balance", "buffer_size": buffer_size}
                yield rows, {"world_size": world_size, "accumulation": accumulation, **options}


@pytest.mark.parametrize("layout", ["padded", "flat"])
@pytest.mark.parametrize(
    ("worlds", "least"),
    [
        pytest.param(lambda: kept_worlds(3, range(1, 4), range(1, 4)), 500, id="keep"),
        pytest.param(lambda: filled_worlds(3, range(1, 3), range(1, 3)), 500, id="fill"),
        pytest.param(lambda: kept_worlds(5, range(1, 5), range(1, 7)), 9_000, id="all keep", marks=pytest.mark.nightly),
        pytest.param(
            lambda: filled_worlds(5, range(1, 5), range(1, 4)), 9_000, id="all fill", marks=pytest.mark.nightly
        ),
    ],
)
@pytest.mark.timeout(0)
def test_every_small_world_keeps_its_promises(worlds: Any, least: int, layout: str) -> None:
    """least: expected number of worlds."""
    count = 0
    for rows, options in worlds():
        options |= {"token_budget": 6, "layout": layout}
        try:
            check_epoch(rows, train(rows, **options), **options)
        except AssertionError as error:
            raise AssertionError(f"{rows} {options}") from error
        count += 1
    assert count > least


# Random worlds


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    """Text, an image, a video; some beyond every budget."""
    tokens = draw(st.integers(2, 30) | st.sampled_from([2, 50, 100, 101]))
    patches = draw(st.just(0) | st.integers(1, 8) | st.sampled_from([12, 13]))
    return Cost(
        tokens, patches, tokens - 1, patches > 0, draw(st.integers(0, 1)) if patches else 0, draw(st.booleans())
    )


@st.composite
def datasets(draw: st.DrawFn) -> list[Row]:
    """Some rows are unusable: single rows, or a streak that may be longer than an optimizer step."""
    rows: list[Row] = draw(st.lists(costs() | st.sampled_from([2, 17, 0, "unreadable", "unsupervised"]), max_size=30))
    start, length = draw(st.integers(0, 30)), draw(st.sampled_from([0, 0, 5, 20]))
    return [0 if start <= k < start + length else row for k, row in enumerate(rows)]


budgets = st.fixed_dictionaries(
    {
        "token_budget": st.integers(8, 100),
        "max_patches": st.none() | st.integers(1, 12),
        "collation": st.builds(Collation, st.sampled_from([1, 4]), st.sampled_from([0, 3]), st.sampled_from([0, 2])),
    }
)
layouts = st.sampled_from(
    [{}, {"row_multiple": 2}, {"layout": "flat"}, {"layout": "flat", "pad_to_multiple_of": 8, "with_boundaries": True}]
)
kept = st.fixed_dictionaries(
    {
        "global_batch_size": st.just("keep") | st.integers(1, 12),
        "batch_size": st.integers(1, 3),
        "drop_last": st.booleans(),
        "stock_mean": st.sampled_from(
            [MEAN_OF_STEP, StockMean("step", counts="labels"), StockMean("rank"), MEAN_OF_MICRO_BATCH]
        ),
        "equal_weights": st.booleans(),
        "balance": st.booleans(),
    }
)
filled = st.fixed_dictionaries({"buffer_size": st.integers(1, 16), "seed": st.integers(0, 3)}).flatmap(
    lambda options: st.sampled_from([options | {"join": join, "balance": balance} for join, balance in JOINS])
)
JOINS = [(True, False), (True, True), (False, False)]
ONE_IMAGE: list[Row] = [Cost(2, 1, 1, True) if k == 6 else 2 for k in range(7)]
DUMMIES = {"token_budget": 8, "collation": Collation(dummy_media_tokens=4)}
UNEQUAL = KEEP | {"batch_size": 2, "accumulation": 2, "stock_mean": MEAN_OF_MICRO_BATCH, "equal_weights": True}


@settings(deadline=None, max_examples=150)
@given(
    datasets(),
    st.fixed_dictionaries({"world_size": st.integers(1, 4), "accumulation": st.integers(1, 4)}),
    budgets,
    layouts,
    kept | filled,
    st.sampled_from([None, None, None, Stream]),
)
# The half without media gets dummy media, too much for two rows (I4).
@example(ONE_IMAGE, {"world_size": 3}, DUMMIES, {"row_multiple": 2}, {"buffer_size": 3, "balance": True}, None)
# The epoch may end with the step before the last plan.
@example([8] * 3, {"accumulation": 2}, {"token_budget": 8}, {}, {"buffer_size": 2, "join": False}, None)
# Samples that stock weighs differently.
@example([3, 9, 4, 20, 7, 5, 6, 8, 9, 10], {"world_size": 2}, {"token_budget": 100}, {}, UNEQUAL, None)
# One group a round is planned, with the oldest sample. If the fullest group came first, the rows of 17 would wait (I5).
@example([17 if k in (1, 3, 5, 7) else 4 + 26 * (k % 2) for k in range(60)], {"world_size": 2}, {}, {}, {}, None)
def test_an_epoch_of_any_world_keeps_its_promises(
    rows: list[Row], world: Any, budget: Any, layout: Any, mode: Any, stream: Any
) -> None:
    """I1 to I7, I9, measured on the collated tensors; a second run is the same, whichever rank runs ahead (I6)."""
    options = budget | layout | mode | world | {"stream": stream}
    if stream is not None:
        options["drop_last"] = False
    epochs = [train(rows, **options) for _ in range(2)]
    check_epoch(rows, epochs[0], **options)
    first, second = ([rank.micro_batches for rank in ranks] for ranks in epochs)
    assert first == second, "I6"
    assert [str(rank.error) for rank in epochs[0]] == [str(rank.error) for rank in epochs[1]]


# Datasets whose length is unknown or wrong


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize(
    ("claimed", "yielded", "word"), [(8, 12, "more"), (40, 12, "fewer"), (4, 0, None), (0, 12, "more")]
)
def test_a_length_that_is_wrong_ends_all_ranks(claimed: int, yielded: int, word: str | None, balance: bool) -> None:
    """The steps of an epoch are counted by the length; the error comes at the last step that it allows."""
    options = KEEP | {"global_batch_size": 4, "balance": balance, "sampler": Claims(range(yielded), claimed)}
    for rank in train([5] * 12, world_size=2, **options):
        assert isinstance(rank.error, CollectiveError)
        steps = sum(micro_batch.ends_optimizer_step for micro_batch in rank.micro_batches)
        assert steps == (max(min(math.ceil(claimed / 4), yielded // 4) - 1, 0) if word else 0)
        assert (f"{claimed} samples by its `__len__`, and yields {word}" if word else "it is empty") in str(rank.error)


@pytest.mark.parametrize("claimed", [9, 10, 12])
def test_a_length_that_is_wrong_within_the_last_step_loses_nothing(claimed: int) -> None:
    taken, _ = run([5] * 11, world_size=2, **KEEP | {"global_batch_size": 4, "sampler": Claims(range(11), claimed)})
    assert list(of_steps(taken).values()) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10)]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(2, 20), min_size=3, max_size=30), st.integers(2, 3), st.integers(1, 2), st.integers(1, 2))
def test_streams_that_were_split_before_keep_stocks_micro_batches(
    rows: list[int], world_size: int, batch_size: int, accumulation: int
) -> None:
    """Each rank takes `batch_size` of its samples in each micro-step, until it has none; the others go on."""
    options = KEEP | {"batch_size": batch_size, "accumulation": accumulation, "stock_mean": MEAN_OF_MICRO_BATCH}
    taken, _ = run(rows, world_size=world_size, stream=SplitStream, **options)
    share, parts = batch_size * accumulation, [range(rank, len(rows), world_size) for rank in range(world_size)]
    for (_, t), ids in of_steps(taken).items():
        own = [part[t * share : (t + 1) * share] for part in parts]
        assert list(ids) == sorted(itertools.chain(*own))
        batches = [part[i : i + batch_size] for part in own for i in range(0, len(part), batch_size)]
        divided_by = {id: sum(rows[other] - 1 for other in batch) for batch in batches for id in batch}
        for micro_batch in itertools.chain(*taken):
            if micro_batch.step.index != t:
                continue
            assert micro_batch.step.num_stock_means == len(batches)
            assert [sample.stock_units for sample in micro_batch.samples] == [divided_by[id] for id in micro_batch.ids]
    assert ids_of(taken) == usable(rows)


class OneHasAll(SplitStream):
    def __init__(self, rows: Sequence[Any], rank: int, world_size: int):
        self.rows = [] if rank else rows


SMALL_ROUNDS = {"fill": {"balance": True, "buffer_size": 1}, "keep": KEEP | {"batch_size": 1, "accumulation": 1}}


@pytest.mark.parametrize("mode", SMALL_ROUNDS)
def test_a_rank_whose_part_of_a_stream_is_empty_idles_with_what_others_have(mode: str) -> None:
    """I2, also with one sample at a time for all ranks."""
    options = {"stream": OneHasAll, "stock_mean": MEAN_OF_MICRO_BATCH} | SMALL_ROUNDS[mode]
    taken, _ = run([5] * 9, world_size=2, **options)
    assert ids_of(taken) == Counter(range(0, 18, 2))
    assert any(micro_batch.idle for micro_batch in taken[1])


# Ranks that do not reach the end of an epoch


@settings(deadline=None, max_examples=40)
@given(st.data(), st.integers(1, 40), st.integers(1, 4), st.sampled_from([None, 1, 5, 12]), st.booleans())
def test_rows_that_cannot_be_read_end_all_ranks_alike(
    data: Any, count: int, world_size: int, size: int | None, balance: bool
) -> None:
    """Also in the first round, and on several ranks in the same round: each rank names a row, its own if it has one.
    With kept steps the epoch ends at the optimizer step of the first such row."""
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=3))
    options = {"balance": balance, "on_error": "raise"} | ({"global_batch_size": size} if size else {"buffer_size": 8})
    rows = ["unreadable" if k in bad else 2 + k % 7 for k in range(count)]
    ranks = train(rows, world_size=world_size, **options)
    steps = [sum(micro_batch.ends_optimizer_step for micro_batch in rank.micro_batches) for rank in ranks]
    assert steps == steps[:1] * world_size
    assert not any(micro_batch.step.last for rank in ranks for micro_batch in rank.micro_batches)
    assert size is None or steps[0] == min(bad) // size
    for number, rank in enumerate(ranks):
        assert isinstance(rank.error, (CollectiveError, DataError)) and "image file is truncated" in str(rank.error)
        assert str(rank.error).startswith("rank ") or any(k % world_size == number for k in bad)


@pytest.mark.parametrize("mode", [{}, {"join": False, "accumulation": 2}, KEEP], ids=["join", "no join", "keep"])
@pytest.mark.parametrize("leavers", [(0,), (2,), (0, 1), (0, 1, 2)], ids=str)
def test_ranks_that_leave_keep_nobody_waiting(mode: dict[str, Any], leavers: tuple[int, ...]) -> None:
    """Some ranks leave after the first optimizer step; the others end with an error at once."""
    ranks = train([5] * 60, world_size=3, leaves=dict.fromkeys(leavers, 1), **mode)
    for number, rank in enumerate(ranks):
        if number in leavers:
            assert rank.error is None
        else:
            assert isinstance(rank.error, CollectiveError) and "stopped: it left" in str(rank.error)


REJECTED: list[Row] = ["unsupervised", 0] * 6
WITHOUT_A_USABLE_ROW: list[tuple[list[Row], dict[str, Any], list[str]]] = [
    (REJECTED, {}, ["6 invalid", "6 unsupervised", "; the warnings above name the first of them"]),
    (["unreadable"], {}, ["1 unreadable"]),
    ([], {}, ["it is empty."]),
    ([4] * 5, {"batch_size": 6, "drop_last": True}, ["5 dropped by drop_last."]),
    # Some ranks would look beyond the rows that `drop_last` leaves, and see another order.
    ([4] * 2, {"drop_last": True, "world_size": 4}, ["2 dropped by drop_last."]),
]


@pytest.mark.parametrize("mode", [KEEP, {}, {"stream": Stream}], ids=["keep", "fill", "stream"])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(("rows", "rule", "words"), WITHOUT_A_USABLE_ROW)
def test_an_epoch_without_a_usable_row_is_an_error(
    rows: list[Row], rule: dict[str, Any], words: list[str], world_size: int, mode: dict[str, Any]
) -> None:
    """On every rank, in one line that counts the reasons."""
    if rule and mode is not KEEP:
        return  # refused with `fill`
    for rank in train(rows, **{"world_size": world_size} | mode | rule):
        message = str(rank.error)
        assert isinstance(rank.error, CollectiveError) and "\n" not in message
        assert message.startswith("no row of the training dataset can be trained on: ")
        assert all(word in message for word in words) and ("empty" in message) == (not rows)
        assert "remain" not in message


# Orders of custom samplers


class Custom(Sampler):
    """Shuffles by an attribute; depends on the number of orders it has drawn."""

    def __init__(self, numbers: Any, inner: Any = range(50)):
        self.numbers, self.inner, self.drawn = numbers, inner, 0

    def __iter__(self) -> Iterator[int]:
        self.drawn += 1
        rows = list(self.inner)
        self.numbers.shuffle(rows)
        return iter(rows[self.drawn :] + rows[: self.drawn])


@pytest.mark.parametrize(
    "sampler_of",
    [
        lambda: SubsetRandomSampler(range(50)),
        lambda: WeightedRandomSampler([1.0] * 50, 50, generator=torch.Generator().manual_seed(3)),
        lambda: Custom(random),
        lambda: Custom(random.Random(3), Custom(np.random.default_rng(3))),
    ],
)
def test_each_epoch_has_the_order_of_a_dataloader(sampler_of: Any) -> None:
    """Also an epoch that begins again, a resumed epoch, and whatever else draws random numbers in between."""

    def loader() -> DataLoader:
        set_seed(5)
        return DataLoader(range(50), sampler=sampler_of(), collate_fn=list)  # type: ignore[arg-type]

    stock = loader()
    expected = [[row for (row,) in stock] for _ in range(3)]
    assert expected[0] != expected[1]
    for epochs in ([0, 0, 1, 2], [2]):
        sampler = dismantle(loader(), seed=9).sampler
        for epoch in epochs:
            torch.rand(3), random.random()
            sampler.set_epoch(epoch)
            assert list(sampler) == expected[epoch]
