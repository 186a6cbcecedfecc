"""Which rows are observed: whole optimizer steps spread over the epoch, in a bounded time."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import Dataset
from toy import Rows as ToyRows
from toy import pad

from odb_factory.config import ODBConfig
from odb_factory.data.observe import ItemObserver, ObservedDataset
from odb_factory.plan.rows import ObservedRow, RowReader, chosen_positions, observe
from odb_factory.planning import Budget, Cost


class Numbers(Dataset):
    """Row `index` costs `index + 1` tokens; every tenth is none."""

    def __getitem__(self, index: int) -> ObservedRow:
        if index % 10 == 9:
            return ObservedRow(index=index, source="numbers", reason="invalid", message=f"row {index}")
        return ObservedRow(index=index, source="numbers", cost=Cost(index + 1, units=1))


def rows_of(number: int, is_stream: bool = False) -> Any:
    order = list(reversed(range(number)))
    return SimpleNamespace(reader=Numbers(), order=order, is_stream=is_stream)


def test_all_rows_where_there_are_no_more_than_asked_for() -> None:
    sample = observe(rows_of(50), 16, 100)
    assert sample.is_whole and not sample.resampled and sample.population == 50
    assert [seen.index for seen in sample.seen] == list(reversed(range(50))), "in the order of the epoch"
    assert [step.start for step in sample.steps] == [0, 16, 32, 48]
    assert [len(step.rows) for step in sample.steps] == [14, 14, 15, 2], "without what is no sample"
    first = sample.steps[0].rows
    assert first["position"].tolist() == [k for k in range(16) if (49 - k) % 10 != 9]
    assert first["tokens"].tolist() == [50 - k for k in range(16) if (49 - k) % 10 != 9]


def test_whole_optimizer_steps_spread_over_the_epoch() -> None:
    chosen = chosen_positions(1005, 10, 50)
    assert [step.start for step in chosen] == [0, 250, 500, 740, 990]
    assert all(len(step) == 10 for step in chosen), "the rest of 5 is no whole step"
    sample = observe(rows_of(1005), 10, 50)
    assert len(sample.seen) == 50 and [step.start for step in sample.steps] == [0, 250, 500, 740, 990]
    assert not sample.is_whole and not sample.resampled


def test_an_optimizer_step_larger_than_the_sample_is_drawn_from_it() -> None:
    assert len(chosen_positions(10_000, 4096, 200)) == 200
    sample = observe(rows_of(10_000), 4096, 200)
    assert "4096 samples, and 200 were observed" in sample.resampled
    assert len(sample.steps) >= 2 and all(len(step.rows) == 4096 for step in sample.steps)
    seen = {row.cost.tokens for row in sample.seen if row.cost is not None}
    assert set(itertools.chain.from_iterable(step.rows["tokens"].tolist() for step in sample.steps)) <= seen


def test_every_worker_observes() -> None:
    config = ODBConfig(token_budget=4096).resolved()
    observed = ObservedDataset(ToyRows(num_rows=200), ItemObserver(pad), config, Budget(4096))
    reader = RowReader(observed, None, 4096, "toy")
    sample = observe(SimpleNamespace(reader=reader, order=list(range(200)), is_stream=False), 8, 200)
    assert len(sample.seen) == 200 and all(seen.cost is not None for seen in sample.seen), sample.seen


def test_it_ends_in_time_with_what_was_seen() -> None:
    sample = observe(rows_of(400), 8, 400, seconds=0.0)
    assert 0 < len(sample.seen) < 400 and not sample.is_whole and sample.steps


@pytest.mark.parametrize("is_stream", [False, True])
def test_nobody_knows_the_length_of_a_stream(is_stream: bool) -> None:
    sample = observe(rows_of(10, is_stream), 4, 10)
    assert (sample.population is None) == is_stream
    assert len(sample.steps) == (2 if is_stream else 3), "the last one of a stream that goes on is not whole"
    assert bool(observe(rows_of(10, is_stream), 40, 10).resampled) == is_stream
