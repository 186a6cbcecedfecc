"""The running loader with real worker processes: every row once (I2), the same micro-batches whatever the workers (I6),
any way to leave, nothing left behind, and an error rather than a hang. Of both modes, `fill` where nothing is said."""

from __future__ import annotations

import gc
import itertools
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from odb_factory.config import ODBConfig
from odb_factory.data.loader import ODBLoader
from odb_factory.data.observe import MediaCut, RowDropped
from odb_factory.data.order import DataLoaderParts, OptimizerStepRule
from odb_factory.data.pool import OBSERVE_CHUNK
from odb_factory.data.ranks import Ranks
from odb_factory.errors import DataError
from odb_factory.planning import Collation, Cost

pytestmark = pytest.mark.timeout(60)

PAD, IGNORE = 0, -100
COLLATION = Collation(pad_to_multiple_of=4)
WORKERS = [(0, 0), (1, 1), (2, 2), (2, 0), (0, 1)]
"""(observe workers, collate workers)."""


KEEP = {"global_batch_size": "keep", "batch_size": 2, "accumulation": 4}
"""N = 8 samples an optimizer step of one rank."""


@dataclass(frozen=True)
class Row:
    """tokens: its length. fate: what happens to it on the way, nothing as a rule."""

    index: int
    tokens: int
    fate: str = ""


class ToyObserver:
    """Reads a `Row`; its ids are all the row's own index + 1, so that a batch tells what it is made of."""

    def __call__(self, row: Row) -> tuple[dict[str, Any], Cost]:
        match row.fate:
            case "raise":
                raise OSError("image file is truncated")
            case "two lines":
                raise OSError("image file is truncated\nat byte 17")
            case "dropped":
                raise RowDropped("invalid", "the framework drops it.")
            case "cut":
                raise MediaCut("cutoff_len 8 cuts its visual placeholders.")
            case "kill observer":
                kill_worker()
            case "slow":
                time.sleep(0.02)
        ids = [row.index + 1] * row.tokens
        supervised = 0 if row.fate == "unsupervised" else row.tokens - 1
        labels = [IGNORE] * (row.tokens - supervised) + ids[:supervised]
        return {"input_ids": ids, "labels": labels, "fate": row.fate}, Cost(row.tokens, 0, supervised)

    def describe(self, dataset: list[Row], index: int) -> str:
        return f"row {index} of the toy data"


class ForgetfulObserver(ToyObserver):
    def describe(self, dataset: list[Row], index: int) -> str:
        raise OSError("cannot read the row again either")


def kill_worker() -> None:
    """Kill this process, if it is a worker, once all workers have been started."""
    if get_worker_info() is not None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)


def pad(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A padding collator, as a framework has one."""
    fates = {feature["fate"] for feature in features}
    if "uncollatable" in fates:
        raise ValueError("cannot decode its image")
    if "uncollatable, two lines" in fates:
        raise ValueError("cannot decode its image\nat byte 17")
    if "loner" in fates and len(features) > 1:
        raise ValueError("sizes differ")
    if "kill collator" in fates:
        kill_worker()
    length = max(len(feature["input_ids"]) for feature in features)
    length = -(-length // COLLATION.pad_to_multiple_of) * COLLATION.pad_to_multiple_of

    def rows(key: str, filler: int) -> torch.Tensor:
        return torch.tensor([feature[key] + [filler] * (length - len(feature[key])) for feature in features])

    return {"input_ids": rows("input_ids", PAD), "labels": rows("labels", IGNORE)}


class EpochOrder:
    """A seeded sampler: another order every epoch, the same for the same epoch."""

    def __init__(self, num_rows: int):
        self.num_rows, self.epoch = num_rows, 0

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(self.num_rows, generator=generator).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def toy_rows(num_rows: int = 60, **fates: str) -> list[Row]:
    """Rows of 2 to 40 tokens; `r7="raise"` gives row 7 that fate."""
    return [Row(i, 2 + (i * 7) % 39, fates.get(f"r{i}", "")) for i in range(num_rows)]


@contextmanager
def open_loader(rows: list[Row], workers: tuple[int, int] = (0, 0), **options: Any) -> Iterator[ODBLoader]:
    """A loader that is closed at the end; `options` go to the loader, to the rule of its optimizer steps or to the
    config, wherever they belong."""
    config = {"token_budget": 100, "buffer_size": 16, "global_batch_size": "fill"}
    config |= {key: options.pop(key) for key in ODBConfig.__dataclass_fields__ if key in options}
    rule = {key: options.pop(key) for key in OptimizerStepRule.__dataclass_fields__ if key in options}
    parts = {"sampler": EpochOrder(len(rows)), "collate_fn": pad, "num_workers": workers[0]}
    parts |= {key: options.pop(key) for key in DataLoaderParts.__dataclass_fields__ if key in options}
    loader = ODBLoader(
        DataLoaderParts(dataset=rows, multiprocessing_context="fork" if any(workers) else None, **parts),
        ODBConfig(**config),
        rule=OptimizerStepRule(**rule),
        **{"observer": ToyObserver(), "collation": COLLATION, "layout": config.get("layout", "padded")} | options,
    )
    try:
        yield loader
    finally:
        loader.close()


def run(loader: ODBLoader, epoch: int = 0) -> list[Any]:
    loader.set_epoch(epoch)
    return list(loader)


def groups(items: list[Any]) -> list[tuple[int, ...]]:
    return [one.ids for one, _, _ in items]


def all_ids(items: list[Any]) -> list[int]:
    return [id for group in groups(items) for id in group]


def failure(loader: ODBLoader) -> str:
    """The message of the error that one epoch ends with; one line."""
    try:
        for _ in loader:
            pass
    except DataError as error:
        message = str(error)
        assert len(message.splitlines()) == 1, message
        return message
    raise AssertionError("the epoch ended without an error")


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Turn a hang of the main thread into a failure, long before the timeout of the test does."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    remaining = signal.alarm(seconds)
    started = time.monotonic()
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.alarm(max(1, remaining - int(time.monotonic() - started)) if remaining else 0)


def holding() -> dict[str, int]:
    """What this process has open."""
    return {
        "child processes": len(multiprocessing.active_children()),
        "threads": threading.active_count(),
        "file descriptors": len(os.listdir("/proc/self/fd")),
    }


def end_workers() -> None:
    """Torch's workers end quietly on their parent's SIGTERM; the garbage collector would wait 5 s for each."""
    for process in multiprocessing.active_children():
        process.terminate()
        process.join(5)


def workers_and_threads(held: dict[str, int] | None = None) -> tuple[int, int]:
    """File descriptors apart: a batch that somebody still has in hand is shared memory."""
    held = held or holding()
    return held["child processes"], held["threads"]


def assert_soon(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Threads of multiprocessing's queues end a moment after the queues are closed."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition(), holding()


@pytest.fixture(autouse=True)
def no_workers_of_another_test() -> Iterator[None]:
    """A test that fails leaves its workers to nobody."""
    yield
    end_workers()


@pytest.fixture
def silence() -> Iterator[None]:
    """Nothing is logged: pytest keeps the records of a test, and with a traceback the workers it has passed."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def before() -> dict[str, int]:
    """What is open before a test; what torch and multiprocessing open once and keep is open by then."""
    with open_loader(toy_rows(), (2, 2)) as loader:
        run(loader)
    gc.collect()
    held = [holding()]
    while len(held) < 10 or held[-10:] != [held[-1]] * 10:
        time.sleep(0.02)
        held.append(holding())
    return held[-1]


# An epoch


@pytest.mark.parametrize("workers", WORKERS)
def test_every_row_once_an_epoch_in_another_order(workers: tuple[int, int]) -> None:
    """I2, with a seeded sampler: the epochs differ, and each is complete."""
    rows = toy_rows()
    with open_loader(rows, workers) as loader:
        epochs = [run(loader, epoch) for epoch in range(3)]
    assert all(sorted(all_ids(items)) == list(range(len(rows))) for items in epochs)
    assert len({str(groups(items)) for items in epochs}) == 3
    assert len({str([sorted(group) for group in sorted(groups(items))]) for items in epochs}) == 3, "other groups, too"


@pytest.mark.parametrize("mode", [{"global_batch_size": "fill", "accumulation": 2}, KEEP], ids=["fill", "keep"])
def test_the_same_micro_batches_in_the_same_order_whatever_the_workers(mode: dict[str, Any]) -> None:
    """I6: for no worker, one or two, with rows that take their time, and when run again."""
    rows = toy_rows(r3="slow", r20="slow", r41="slow", r42="slow", r7="raise", r30="unsupervised")
    runs = []
    for workers in [*WORKERS, (2, 2)]:
        with open_loader(rows, workers, on_error="skip", **mode) as loader:
            runs.append([[(one, measured) for one, measured, _ in run(loader, epoch)] for epoch in range(2)])
    assert all(epochs == runs[0] for epochs in runs)


@pytest.mark.parametrize("mode", [{"global_batch_size": "fill", "accumulation": 4}, KEEP], ids=["fill", "keep"])
@pytest.mark.parametrize("workers", [(0, 0), (2, 2)])
def test_a_batch_is_what_its_micro_batch_and_its_measure_say(workers: tuple[int, int], mode: dict[str, Any]) -> None:
    """I4, I8: the collator got exactly the rows of the micro-batch, unpacked; the budget holds for the tensors."""
    rows = toy_rows()
    with open_loader(rows, workers, **mode) as loader:
        items = run(loader)
    for one, measured, batch in items:
        num_rows, length = batch["input_ids"].shape
        assert (measured.rows, measured.length) == (num_rows, length)
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        if num_rows > 1:
            assert num_rows * length <= 100
        assert not one.idle
        assert [row[0].item() - 1 for row in batch["input_ids"]] == list(one.ids)
        assert (batch["input_ids"] != PAD).sum().item() == one.tokens
        assert (batch["labels"][:, 1:] != IGNORE).sum().item() == one.num_units == measured.units
        assert one.totals.padded_tokens == num_rows * length
    steps = [list(step) for _, step in itertools.groupby((one for one, _, _ in items), lambda one: one.step.index)]
    assert [step[0].step.index for step in steps] == list(range(len(steps)))
    assert all([one.index for one in step] == list(range(step[0].step.num_micro_batches)) for step in steps), "I1"
    assert [step[0].step.last for step in steps] == [False] * (len(steps) - 1) + [True]
    assert steps[-1][0].step.done == len(rows)


def test_kept_optimizer_steps_are_stretches_of_the_order() -> None:
    """I9: N = 2 rows x 4 micro-batches; the last has what is left. `drop_last` ends the epoch as stock does."""
    rows = toy_rows(61)
    for drop_last, end in ((False, 61), (True, 60)):
        with open_loader(rows, **KEEP, drop_last=drop_last) as loader:
            assert (loader.global_batch_size, loader.num_optimizer_steps) == (8, 8)
            for epoch in range(2):
                items = run(loader, epoch)
                order = EpochOrder(61)
                order.set_epoch(epoch)
                expected = list(order)[:end]
                for t in range(8):
                    ids = [id for one, _, _ in items if one.step.index == t for id in one.ids]
                    assert sorted(ids) == sorted(expected[8 * t : 8 * t + 8])
                last = items[-1][0].step
                assert (last.done, last.remainder, last.progress) == (end, 61 - end, 1.0)


@pytest.mark.parametrize("mode", [{"global_batch_size": "fill"}, KEEP], ids=["fill", "keep"])
@pytest.mark.parametrize("workers", [(0, 0), (1, 1)])
def test_begin_waits_for_the_first_plan_and_loses_none(workers: tuple[int, int], mode: dict[str, Any]) -> None:
    """The Trainer asks for the number of optimizer steps before it iterates, and more than once."""
    with open_loader(toy_rows(), workers, buffer_size=100, **mode) as loader:
        estimate = loader.estimate_optimizer_steps()
        assert (loader.under_way is None) == (mode == KEEP), "what is known is not asked of the others"
        assert loader.next_planned is None or mode != KEEP
        loader.begin()
        assert loader.next_planned is not None and loader.next_planned.index == 0
        begun = loader.under_way
        loader.begin()
        assert loader.under_way is begun and loader.estimate_optimizer_steps() == estimate
        steps = {one.step.index for one, _, _ in run(loader)}
        assert steps == set(range(estimate)), "all rows are in the first round, so the estimate is exact"


class CountingObserver(ToyObserver):
    """Counts rows, in whichever process."""

    def __init__(self) -> None:
        self.seen = multiprocessing.get_context("fork").Value("i", 0)

    def __call__(self, row: Row) -> tuple[dict[str, Any], Cost]:
        with self.seen.get_lock():
            self.seen.value += 1
        return super().__call__(row)

    def settled(self) -> int:
        """Rows observed, once no further one has been for a while."""
        before = -1
        while before != self.seen.value:
            before = self.seen.value
            time.sleep(0.3)
        return before


@pytest.mark.parametrize("buffer_size", [4, 48])
def test_two_optimizer_steps_are_planned_ahead_and_no_more_than_the_buffer_has_room_for(buffer_size: int) -> None:
    """Host memory is bounded, and plans are there before the training needs them."""
    observer, window = CountingObserver(), 4
    with open_loader(toy_rows(400), (2, 2), buffer_size=buffer_size, observer=observer, **KEEP) as loader:
        items = iter(loader)
        taken, steps, _ = next(items)[0], {0}, items
        seen = observer.settled()
        current = loader.under_way
        assert current is not None and taken.step.index == 0
        steps |= {one.step.index for one, _ in current.tasks}
    observed_ahead = OBSERVE_CHUNK * (window + 1)
    most = 8 * (max(steps) + 2 + window) + max(2 * 8, buffer_size)
    assert 8 * 3 <= seen <= most + observed_ahead
    if buffer_size == 48:
        assert seen > 48


# Leaving


@pytest.mark.parametrize("workers", WORKERS)
def test_an_epoch_may_be_left_half_way_and_begun_again(workers: tuple[int, int]) -> None:
    """Nothing of the epoch that was left turns up in the one after it."""
    with open_loader(toy_rows(), workers) as loader, within(20):
        first = run(loader)
        for count in (1, 5):
            left = []
            for item in loader:
                left.append(item)
                if len(left) == count:
                    break
            assert groups(left) == groups(first)[:count]
        assert groups(run(loader)) == groups(first), "the same epoch from its beginning"
        loader.begin()
        assert groups(run(loader, 1)) != groups(first), "begun and not even looked at"
        assert sorted(all_ids(run(loader, 2))) == list(range(60))


@pytest.mark.parametrize("workers", [(0, 0), (2, 2)])
def test_an_iterator_left_behind_does_not_end_the_next_epoch(workers: tuple[int, int]) -> None:
    """A Trainer rebinds its iterator: the old one is dropped after the new epoch has begun."""
    with open_loader(toy_rows(), workers) as loader, within(20):
        old = iter(loader)
        next(old)
        loader.set_epoch(1)
        new = iter(loader)
        taken = [next(new)]
        del old
        taken += new
        assert sorted(all_ids(taken)) == list(range(60))
        next(iter(loader))  # the same epoch: it begins again, as a DataLoader's does
        assert sorted(all_ids(list(loader))) == list(range(60))


@pytest.mark.parametrize("workers", [(0, 0), (2, 2)])
def test_begin_after_the_last_step_does_not_hang(workers: tuple[int, int]) -> None:
    """The iterator of an epoch that is taken to its last step, and no further, is still open."""
    with open_loader(toy_rows(), workers) as loader, within(20):
        items = iter(loader)
        while not ((one := next(items)[0]).step.last and one.ends_optimizer_step):
            pass
        loader.begin()


@pytest.mark.parametrize("leave", [False, True])
def test_nothing_is_left_after_close(before: dict[str, int], leave: bool) -> None:
    """No process, thread or file descriptor after five epochs, complete or left half way."""
    with open_loader(toy_rows(), (2, 2)) as loader:
        descriptors = []
        for epoch in range(5):
            loader.set_epoch(epoch)
            for one, _, _ in loader:
                if leave and one.step.index == 2:
                    break
            del one, _
            descriptors.append(holding()["file descriptors"])
        # They do not grow with the epochs; pipes of workers that have ended are closed by a thread.
        assert_soon(lambda: holding()["file descriptors"] <= descriptors[0] + 4)
    assert_soon(lambda: holding() == before)


def test_close_ends_the_workers_while_an_iterator_is_alive(before: dict[str, int]) -> None:
    """A Trainer that raises closes the loader with its own iterator still on the stack."""
    with open_loader(toy_rows(), (2, 2)) as loader:
        items = iter(loader)
        next(items)
    assert_soon(lambda: workers_and_threads() == workers_and_threads(before))
    assert next(items, None) is None, "it is over, and says so"


@pytest.mark.parametrize("workers", [(2, 2), (2, 0)])
def test_close_ends_the_workers_after_an_error(before: dict[str, int], workers: tuple[int, int]) -> None:
    """After a bad row, too, and without the garbage collector: in its hands torch waits 5 s for every worker."""
    gc.disable()
    try:
        with open_loader(toy_rows(r33="raise"), workers) as loader:
            failure(loader)
        assert_soon(lambda: workers_and_threads() == workers_and_threads(before))
    finally:
        end_workers()
        gc.enable()
    gc.collect()
    assert holding() == before, "nor a file descriptor"


def test_close_ends_the_workers_after_an_error_that_is_kept(before: dict[str, int]) -> None:
    """A notebook keeps the last traceback, and with it every frame that the error passed."""
    with open_loader(toy_rows(r33="raise"), (2, 2)) as loader:
        with pytest.raises(DataError) as caught:
            list(loader)
    assert_soon(lambda: workers_and_threads() == workers_and_threads(before))
    assert caught.value is not None


def test_close_may_come_first_or_twice() -> None:
    with open_loader(toy_rows(), (2, 2)) as loader:
        loader.close()
    with open_loader(toy_rows(), (1, 1)) as loader:
        loader.begin()


# Rows that cannot be used


CUT = "row 33 of the toy data: cutoff_len 8 cuts.*overlong: drop"
STOPS = [
    ("raise", {}, "row 33 of the toy data: OSError: image file is truncated.*on_error: skip"),
    ("two lines", {}, "image.*at byte 17"),
    ("uncollatable", {}, "row 33 of the toy data: cannot be collated: ValueError: cannot decode its image;.*on_error"),
    ("uncollatable, two lines", {}, "image.*at byte 17"),
    ("cut", {"overlong": "singleton"}, CUT),
    ("cut", {"overlong": "error"}, CUT),
]
LEFT_OUT = [
    ({"r33": "raise", "r34": "raise", "r50": "dropped"}, {"on_error": "skip"}, {"unreadable": 2, "invalid": 1}),
    ({"r33": "raise"}, {"on_error": "skip", "observer": ForgetfulObserver()}, {"unreadable": 1}),
    ({"r33": "unsupervised"}, {}, {"unsupervised": 1}),
    ({"r33": "cut"}, {"overlong": "drop"}, {"media_cut": 1}),
]


@pytest.mark.parametrize("workers", [(0, 0), (2, 2)])
@pytest.mark.parametrize(("fate", "options", "words"), STOPS)
def test_a_row_stops_the_run_and_is_named(
    workers: tuple[int, int], fate: str, options: dict[str, Any], words: str
) -> None:
    """What, where and what to do, in one line; a row that cannot be collated is found in its micro-batch."""
    with open_loader(toy_rows(r33=fate), workers, **options) as loader, within(20):
        assert re.match(words if words.startswith("row") else f".*{words}", failure(loader))


@pytest.mark.parametrize("workers", [(0, 0), (2, 2)])
@pytest.mark.parametrize(("fates", "options", "counts"), LEFT_OUT)
def test_a_row_is_left_out_and_counted(
    workers: tuple[int, int], fates: dict[str, str], options: dict[str, Any], counts: dict[str, int]
) -> None:
    """I2 for all other rows, also if it cannot be described either; the epoch ends with all of them done."""
    with open_loader(toy_rows(**fates), workers, **options) as loader:
        items = run(loader)
    assert items[-1][0].step.rejected == counts
    assert sorted(all_ids(items)) == [i for i in range(60) if f"r{i}" not in fates]
    assert items[-1][0].step.done == 60


@pytest.mark.parametrize("workers", [(0, 0), (2, 2)])
def test_rows_that_are_all_unusable_are_an_error(workers: tuple[int, int]) -> None:
    rows = [Row(0, 5, "raise"), Row(1, 5, "unsupervised"), Row(2, 5, "dropped")]
    with open_loader(rows, workers, on_error="skip") as loader, within(20):
        message = failure(loader)
    assert message.startswith("no row of the training dataset can be trained on")
    assert all(part in message for part in ("1 unreadable", "1 unsupervised", "1 invalid"))


def test_an_empty_dataset_is_an_error() -> None:
    with open_loader([]) as loader, within(20):
        assert "empty" in failure(loader)


@pytest.mark.parametrize("workers", [(0, 0), (1, 1)])
@pytest.mark.parametrize("overlong", ["singleton", "drop", "error"])
def test_an_overlong_row_meets_its_policy(workers: tuple[int, int], overlong: str) -> None:
    """100 tokens fill the budget, 101 are padded beyond it."""
    rows = [Row(*pair) for pair in enumerate((10, 100, 101, 10, 500, 10))]
    with open_loader(rows, workers, overlong=overlong) as loader, within(20):
        if overlong == "error":
            message = failure(loader)
            assert "101 tokens" in message or "500 tokens" in message
            assert "row 2 of the toy data" in message or "row 4 of the toy data" in message
            return
        items = run(loader)
        if overlong == "drop":
            assert items[-1][0].step.rejected == {"overlong": 2}
            assert sorted(all_ids(items)) == [0, 1, 3, 5]
        else:
            assert (2,) in groups(items) and (4,) in groups(items)
            assert sorted(all_ids(items)) == list(range(6))


def test_rows_that_cannot_be_collated_together_are_named() -> None:
    rows = [Row(0, 10), Row(1, 10, "loner"), Row(2, 10)]
    with open_loader(rows) as loader:
        message = failure(loader)
    assert message.startswith("rows ")
    assert all(str(i) in message.split("cannot")[0] for i in range(3))
    assert "ValueError: sizes differ" in message


@pytest.mark.parametrize("fate", ["raise", "uncollatable"])
@pytest.mark.parametrize("workers", [(0, 0), (2, 2)])
def test_an_error_is_the_same_error_again(workers: tuple[int, int], fate: str) -> None:
    """Never hang: an epoch that failed may be tried again, and fails again. Row 3 fails in the first round."""
    with open_loader(toy_rows(r3=fate), workers, buffer_size=100) as loader, within(20):
        assert failure(loader) == failure(loader)
        if fate == "raise":
            with pytest.raises(DataError, match="^row 3 of the toy data"):
                loader.begin()


# Workers that die


@pytest.mark.timeout(40)
@pytest.mark.parametrize(("row", "fate"), [(0, "kill observer"), (55, "kill observer"), (55, "kill collator")])
def test_a_killed_worker_ends_in_an_error_and_not_in_a_hang(silence: None, row: int, fate: str) -> None:
    """Killed in the first round or later; the error and the end of the other workers come within 30 s."""
    rows = toy_rows(200, **{f"r{row}": fate})
    started = time.monotonic()
    with open_loader(rows, (2, 2), sampler=torch.utils.data.SequentialSampler(rows)) as loader:
        with pytest.raises(Exception, match="killed|exited unexpectedly"):
            run(loader)
    assert_soon(lambda: not multiprocessing.active_children())
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("workers", [(0, 0), (1, 1)])
def test_a_rank_that_fails_does_not_wait_until_the_others_leave(workers: tuple[int, int]) -> None:
    """Never hang: in the training they wait for it, and so do not leave. It tells them in `abort`, and goes."""
    said: list[str] = []

    class OneRank(Ranks):
        def stop(self, reason: str = "") -> None:
            said.append("leave")

        def abort(self, message: str) -> None:
            said.append("abort")

    rows = toy_rows(200, r3="uncollatable")
    options = {"ranks": OneRank(), "sampler": torch.utils.data.SequentialSampler(rows), "buffer_size": 8}
    with open_loader(rows, workers, **options) as loader, within(20):
        message = failure(loader)
        loader.abort(message)
    assert said[0] == "abort"


@pytest.mark.parametrize(("on_error", "advised"), [("raise", True), ("skip", False)])
def test_no_advice_to_set_what_is_set(on_error: str, advised: bool) -> None:
    """Rows of which none can be collated, so that not even an idle micro-batch can be run."""
    rows = [Row(k, 10, "uncollatable") for k in range(4)]
    with open_loader(rows, on_error=on_error) as loader:
        message = failure(loader)
    assert "cannot be collated: ValueError: cannot decode its image; fix or remove the row" in message
    assert ("on_error" in message) == advised
