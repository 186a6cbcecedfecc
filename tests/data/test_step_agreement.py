"""All ranks agree on an optimizer step before it begins, whoever collates it, and leave an epoch together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from data.stops import KEEP, LENGTHS, make_loader
from thread_ranks import Seat, run_ranks
from torch.nn.functional import pad as widen
from toy import a_micro_batch, pad

from odb_factory.data.step_agreement import Agreed

pytestmark = pytest.mark.timeout(120)

WORKERS = {"training thread": {}, "workers": {"num_workers": 1, "collate_workers": 2}}


def take(seat: Seat, stop: int | None, **options: Any) -> list[tuple[int, ...]]:
    """The optimizer steps of two epochs, with the samples that all ranks count in them. stop: the step in which every
    epoch is left, by each rank at another micro-batch."""
    loader = make_loader(LENGTHS, seat, **KEEP | options)
    found = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for micro_batch, _, _ in loader:
            step = micro_batch.step
            if micro_batch.index == 0:
                found.append((epoch, step.index, step.samples, step.units))
            if step.index == stop and micro_batch.index == seat.rank % step.num_micro_batches:
                break
    loader.close()
    return found


@pytest.mark.parametrize("stop", [None, 3])
@pytest.mark.parametrize("kind", list(WORKERS))
def test_ranks_count_the_same_and_leave_an_epoch_together(kind: str, stop: int | None) -> None:
    first, second = run_ranks(2, lambda seat: take(seat, stop, **WORKERS[kind]))
    assert first == second
    num_steps = len(first) // 2 if stop is None else stop + 1
    assert [step[:2] for step in first] == [(epoch, index) for epoch in range(2) for index in range(num_steps)]


def wide(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: widen(tensor, (0, 20)) for name, tensor in pad(items).items()}


@pytest.mark.parametrize("kind", list(WORKERS))
def test_all_ranks_count_the_micro_batches_that_are_over_budget_on_any(kind: str) -> None:
    """The last one of an epoch too, after which no further optimizer step is agreed on."""

    def count(seat: Seat) -> list[int]:
        loader = make_loader(LENGTHS, seat, **KEEP | WORKERS[kind], collate_fn=wide if seat.rank else pad)
        found = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            own = [(len(one.ids), measured.rows * measured.length) for one, measured, _ in loader]
            found += [loader.reports.take().over_budget, sum(rows > 1 and tokens > 32 for rows, tokens in own)]
        loader.close()
        return found

    first, second = run_ranks(2, count)
    assert first[1::2] == [0, 0] and all(second[1::2])
    assert first[::2] == second[::2] == second[1::2]


def test_what_workers_tell_of_earlier_steps_is_not_kept() -> None:
    """An optimizer step of many micro-batches begins when the first of them are collated; an epoch has many steps."""

    def count(seat: Seat) -> int:
        with_workers = {"num_workers": 1, "collate_workers": 1, "batch_size": 15}
        loader = make_loader([30] * 300, seat, **KEEP | with_workers)
        for micro_batch, _, _ in loader:
            assert micro_batch.step.num_micro_batches == 60
            notes = loader.under_way.agreement._notes
        loader.close()
        return sum(map(len, notes.values()))

    assert run_ranks(1, count) == [0]


def test_rows_that_fail_in_time_leave_all_sums_of_their_step() -> None:
    planned = a_micro_batch()
    planned = replace(planned, totals=replace(planned.totals, squares=4 + 9), step=replace(planned.step, squares=4 + 9))
    agreed = Agreed.of(planned.step, {"failed": [(0, *planned.samples[1])]})
    for left in (agreed.step, agreed.apply(planned).totals):
        assert (left.samples, left.tokens, left.squares, left.units, left.active_ranks) == (1, 2, 4, 1, 1)
