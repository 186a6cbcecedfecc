"""All ranks know the same of an optimizer step before it begins, whoever collates it, and leave an epoch together."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from data.stops import KEEP, LENGTHS, make_loader
from thread_ranks import Seat, run_ranks

pytestmark = pytest.mark.timeout(120)

WORKERS = {"training thread": {}, "workers": {"num_workers": 1, "collate_workers": 2}}


def saves(seat: Seat, asks: tuple[int, int], stop: int | None, **options: Any) -> list[bool]:
    """Whether a checkpoint is requested, of each optimizer step of two epochs. asks: (rank, step) that asks for one
    while it takes that step; stop: the step in which every epoch is left."""
    loader = make_loader(LENGTHS, seat, **KEEP | options)
    asked = threading.Event()
    loader.save_when(asked.is_set)
    found = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for micro_batch, _, _ in loader:
            step = micro_batch.step
            if micro_batch.index == 0:
                found.append(step.save_requested)
                asked.clear()
            assert step.save_requested == found[-1], "of all its micro-batches"
            if (seat.rank, step.index) == asks:
                asked.set()
            if step.index == stop and micro_batch.index == seat.rank % step.num_micro_batches:
                break
    loader.close()
    return found


@pytest.mark.parametrize("stop", [None, 3])
@pytest.mark.parametrize("kind", list(WORKERS))
def test_a_checkpoint_that_one_rank_asks_for_is_requested_of_all_at_the_same_step(kind: str, stop: int | None) -> None:
    first, second = run_ranks(2, lambda seat: saves(seat, (1, 1), stop, **WORKERS[kind]))
    assert first == second
    num_steps = len(first) // 2
    for epoch in (first[:num_steps], first[num_steps:]):
        assert not any(epoch[:2])
        assert any(epoch[2:4]), "of one of the two steps that come next"


def test_one_rank_asks_itself() -> None:
    (found,) = run_ranks(1, lambda seat: saves(seat, (0, 1), None, **WORKERS["workers"]))
    assert any(found[2:4])
