"""Two gloo ranks with a loader each, no training: nothing is left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from distributed.ranks import run_ranks, toy_loader

from odb_factory.data.ranks import BEAT_S

EPOCHS = 20
NUM_ROWS, NUM_OTHER_ROWS = 101, 30


def held() -> dict[str, Any]:
    """What this process has open, the blocks of shared memory that it has mapped among it."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        "child processes": len(multiprocessing.active_children()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "shared memory mapped": sum("/dev/shm/" in line or "memfd:" in line for line in maps.splitlines()),
        "shared memory named": sorted(name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name),
    }


def settled(expected: dict[str, Any] | None = None, patience_s: float = 8.0) -> dict[str, Any]:
    """What is held once that no longer changes, or is as expected (threads of queues end a moment after them)."""
    until, seen = time.monotonic() + patience_s, [held()]
    while time.monotonic() < until and seen[-1] != expected:
        if expected is None and seen[-12:] == [seen[-1]] * 12:
            break
        time.sleep(0.05)
        seen.append(held())
    return seen[-1]


def an_epoch(loader: Any, epoch: int, steps: int | None = None) -> list[int]:
    """The ids of an epoch on this rank, or of its first `steps`."""
    loader.set_epoch(epoch)
    ids = []
    for step, _, batch in islice(loader, steps):
        assert step.idle or sorted({int(i) - 1 for i in batch["input_ids"].flatten()} - {-1}) == sorted(step.ids)
        ids += step.ids
    return ids


def twenty_epochs(rank: int) -> dict[str, Any]:
    """Epochs of one loader, some left half way, with a second one alive; what was held before, between and after."""
    # What torch and multiprocessing open once and keep, they open here.
    with toy_loader(NUM_ROWS) as loader:
        an_epoch(loader, 0)
    start = settled()
    epochs, between = [], []
    with toy_loader(NUM_ROWS) as loader:
        with toy_loader(NUM_OTHER_ROWS) as other:
            others = iter(other)
            next(others)
            for epoch in range(EPOCHS):
                epochs.append(an_epoch(loader, epoch, steps=4 if epoch % 3 == 1 else None))
                if epoch == 1:  # before the first count: its planner has ended then
                    ids_of_other = [id for step, _, _ in others for id in step.ids]
                if epoch % 3 == 2:
                    between.append(settled(between[0] if between else None))
            ids_of_other += an_epoch(other, 1)
    end = settled(start)
    return {"start": start, "between": between, "end": end, "epochs": epochs, "other": ids_of_other}


@pytest.mark.nightly
def test_twenty_epochs_leave_nothing_behind(tmp_path) -> None:
    """I2 in every whole epoch; no process, thread, file descriptor or shared memory too many, then and afterwards."""
    outcomes = run_ranks("distributed.test_leftovers:twenty_epochs", tmp_path, limit_s=120)
    for outcome in outcomes:
        start, between, end = (outcome.value[when] for when in ("start", "between", "end"))
        # Batches in flight are shared memory and descriptors: as many as at some time before, but no more.
        for what in ("file descriptors", "shared memory mapped"):
            assert max(seen.pop(what) for seen in between[3:]) <= max(seen.pop(what) for seen in between[:3])
        assert between == [between[0]] * len(between)
        assert end.pop("file descriptors") <= start.pop("file descriptors")
        assert end == start
    for epoch, shares in enumerate(zip(*(outcome.value["epochs"] for outcome in outcomes), strict=True)):
        counts = Counter(id for share in shares for id in share)
        assert max(counts.values()) == 1
        assert epoch % 3 == 1 or set(counts) == set(range(NUM_ROWS))
    assert all(len(outcome.value["other"]) > NUM_OTHER_ROWS // 2 for outcome in outcomes)


def an_epoch_and_a_pause(rank: int, first: int, fails: bool) -> None:
    with toy_loader(NUM_ROWS) as loader:
        an_epoch(loader, 0)
        if rank != first:
            time.sleep(3 * BEAT_S)
            if fails:
                loader.abort("cannot save")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_rank_may_end_before_the_other(first: int, fails: bool, tmp_path: Path) -> None:
    """Nobody is told of errors, or misses the other: rank 0 serves a store that the other asks now and then."""
    for outcome in run_ranks("distributed.test_leftovers:an_epoch_and_a_pause", tmp_path, first=first, fails=fails):
        assert "Exception" not in outcome.said and "[odb]" not in outcome.said
