"""The loader with real worker processes: bounded planning ahead, all ways to leave, unusable rows, nothing left behind.
Every row once with any workers: tests/loop/test_dataloader.py, tests/data/test_pool.py."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from toy import Observer, core_loader

from odb_factory.data.loader import OBSERVE_CHUNK, ODBLoader
from odb_factory.errors import DataError
from odb_factory.planner import Cost

pytestmark = pytest.mark.timeout(60)
KEEP = {"global_batch_size": "keep", "batch_size": 2, "accumulation": 4}
"""N = 8 samples an optimizer step of one rank."""
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def fated(*rows: int, num_rows: int = 60, fate: str) -> list[tuple[int, int, str]]:
    """Rows of 2 to 40 tokens, some with a fate; `long`: beyond the budget of 100 tokens."""
    lengths = [101 if fate == "long" and k in rows else 2 + k * 7 % 39 for k in range(num_rows)]
    return [(k, length, fate if k in rows else "") for k, length in enumerate(lengths)]


def open_loader(rows: Any = None, num_workers: int = 0, **options: Any) -> Any:
    settings = {"shuffle": True, "buffer_size": 16} | options
    return core_loader(rows or fated(fate=""), num_workers=num_workers, **settings)


def run(loader: ODBLoader, epoch: int = 0) -> list[tuple[int, ...]]:
    """The ids of each micro-batch."""
    loader.set_epoch(epoch)
    return [micro_batch.ids for micro_batch, _, _ in loader]


def every_row(groups: list[tuple[int, ...]]) -> bool:
    return sorted(id for group in groups for id in group) == list(range(60))


def failure(loader: ODBLoader) -> str:
    """The message of the error that one epoch ends with; one line."""
    with pytest.raises(DataError) as caught:
        list(loader)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def holding() -> tuple[int, int, int]:
    """Child processes, threads and file descriptors of this process."""
    return len(multiprocessing.active_children()), threading.active_count(), len(os.listdir("/proc/self/fd"))


class CountingObserver(Observer):
    """Counts rows, in any process."""

    def __init__(self) -> None:
        super().__init__()
        self.count = multiprocessing.get_context("fork").Value("i", 0)

    def __call__(self, row: Any) -> tuple[dict[str, Any], Cost]:
        with self.count.get_lock():
            self.count.value += 1
        return super().__call__(row)

    def settled(self) -> int:
        """Rows observed, once the count does not change any more."""
        before = -1
        while before != self.count.value:
            before = self.count.value
            time.sleep(0.3)
        return before


@pytest.mark.parametrize("buffer_size", [4, 48])
def test_two_optimizer_steps_are_planned_ahead_and_no_more_than_the_buffer_has_room_for(buffer_size: int) -> None:
    """Host memory is bounded, and the training does not wait for plans."""
    observer, window = CountingObserver(), 4
    rows = fated(num_rows=400, fate="")
    with open_loader(rows, 2, buffer_size=buffer_size, observer=observer, **KEEP) as loader:
        items = iter(loader)
        assert next(items)[0].step.index == 0
        seen = observer.settled()
        current = loader.under_way
        assert current is not None
        last = max([0, *(micro_batch.step.index for micro_batch in current.planned)])
    most = 8 * (last + 2 + window) + max(2 * 8, buffer_size)
    assert 8 * 3 <= seen <= most + OBSERVE_CHUNK * (window + 1)
    assert buffer_size == 4 or seen > buffer_size


# Leaving


@WORKERS
def test_an_epoch_may_be_left_and_begun_again(num_workers: int) -> None:
    """No row of the epoch that was left comes in the next, even if the old iterator lives on."""
    with open_loader(num_workers=num_workers) as loader:
        first = run(loader)
        assert every_row(first)
        for count in (1, 5):
            left = []
            for micro_batch, _, _ in loader:
                left.append(micro_batch.ids)
                if len(left) == count:
                    break
            assert left == first[:count]
        assert run(loader) == first, "the same epoch from its beginning"
        loader.begin()
        assert run(loader, 1) != first, "after an epoch that began and was not iterated"
        loader.set_epoch(2)
        old = iter(loader)
        next(old)
        loader.set_epoch(3)
        new = iter(loader)
        taken = [next(new)[0].ids]
        del old  # a Trainer rebinds its iterator
        assert every_row([*taken, *(micro_batch.ids for micro_batch, _, _ in new)])
        items = iter(loader)
        while not ((micro_batch := next(items)[0]).step.last and micro_batch.ends_optimizer_step):
            pass
        loader.begin()  # the iterator of the epoch has yielded its last step, and is still open


def left_half_way(loader: ODBLoader) -> Any:
    for epoch in range(5):
        loader.set_epoch(epoch)
        next(iter(loader))


def kept_iterator(loader: ODBLoader) -> Any:
    """A Trainer that raises closes the loader with its own iterator still on the stack."""
    items = iter(loader)
    next(items)
    return items


def kept_error(loader: ODBLoader) -> Any:
    """A notebook keeps the last traceback, and with it every frame that the error passed."""
    with pytest.raises(DataError) as caught:
        list(loader)
    return caught


@pytest.mark.parametrize("use", [left_half_way, kept_iterator, kept_error, ODBLoader.begin])
def test_nothing_is_left_after_close(use: Callable[[ODBLoader], Any]) -> None:
    """No process, thread or file descriptor, without the help of the garbage collector."""
    with open_loader(num_workers=2) as loader:
        run(loader)  # torch and multiprocessing open files that they keep
    gc.collect()
    held = [holding()]
    while held[-10:] != [held[-1]] * 10:
        time.sleep(0.02)
        held.append(holding())
    before, until = held[-1], time.monotonic() + 20
    gc.disable()
    try:
        with open_loader(fated(33, fate="unreadable" if use is kept_error else ""), 2) as loader:
            kept = use(loader)
        # A batch that is still referenced is shared memory: file descriptors do not count then.
        size = 2 if kept is not None else 3
        while holding()[:size] != before[:size] and time.monotonic() < until:
            time.sleep(0.02)
        assert holding()[:size] == before[:size]
        assert use is not kept_iterator or next(kept, None) is None, "the iterator has ended"
    finally:
        gc.enable()


# Unusable rows


@WORKERS
@pytest.mark.parametrize(
    ("fate", "options", "words"),
    [
        ("unreadable", {}, ["row 33: OSError: image file is truncated", "on_error: skip"]),
        ("uncollatable", {}, ["row 33: ", "OSError: image file is truncated", "on_error: skip"]),
        ("all uncollatable", {"on_error": "skip"}, ["OSError: image file is truncated"]),
        ("loner", {}, ["rows ", "33", "ValueError: sizes differ"]),
        ("cut", {"overlong": "singleton"}, ["row 33: cutoff_len 8 cuts", "overlong: drop"]),
        ("long", {"overlong": "error"}, ["row 33: 101 tokens break the budget", "drop"]),
    ],
)
def test_a_row_stops_the_run_and_is_named(
    num_workers: int, fate: str, options: dict[str, Any], words: list[str]
) -> None:
    """In one line, again at the next try; no advice to set a key to the value that it has."""
    is_all = fate.startswith("all ")
    rows = fated(*(range(4) if is_all else [33]), num_rows=4 if is_all else 60, fate=fate.removeprefix("all "))
    with open_loader(rows, num_workers, **options) as loader:
        message = failure(loader)
        assert all(word in message for word in words), message
        assert options.get("on_error") != "skip" or "on_error" not in message
        assert failure(loader) == message


class Forgetful(Observer):
    def describe(self, dataset: Any, index: int) -> str:
        raise OSError("cannot read the row again either")


@pytest.mark.parametrize(
    ("fate", "num_workers", "options", "reason"),
    [
        ("unreadable", 2, {"on_error": "skip", "observer": Forgetful()}, "unreadable"),
        ("cut", 0, {"overlong": "drop"}, "media_cut"),
    ],
)
def test_a_row_is_left_out_and_counted(fate: str, num_workers: int, options: dict[str, Any], reason: str) -> None:
    """I2 for all other rows."""
    rows = [*fated(33, 34, num_rows=59, fate=fate), (59, 0)]
    with open_loader(rows, num_workers, **options) as loader:
        items = [micro_batch for micro_batch, _, _ in loader]
    assert items[-1].step.rejected == {reason: 2, "invalid": 1} and items[-1].step.done == 60
    assert sorted(id for micro_batch in items for id in micro_batch.ids) == [k for k in range(59) if k not in (33, 34)]
