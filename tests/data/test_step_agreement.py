"""All ranks agree on an optimizer step before it begins, whoever collates it, and leave an epoch together."""

from __future__ import annotations

from typing import Any

import pytest
from data.stops import KEEP, LENGTHS, make_loader
from thread_ranks import Seat, run_ranks

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
