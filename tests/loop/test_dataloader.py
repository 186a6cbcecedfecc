"""`ODBDataLoader`, `apply_odb` and `pop_step_info` in custom loops."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from loop.loops import BUDGET, EVERY_ROW, make, rows_of, stopped
from support import read_audit
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler, get_worker_info
from toy import NUM_ROWS, Opening, Rows, item, pad
from transformers import AutoTokenizer, BatchEncoding, DataCollatorForLanguageModeling

from odb_factory import ConfigError, Cost, DataError, ODBDataLoader, apply_odb, pop_step_info

STOCK = [4] * (NUM_ROWS // 4)
"""Rows of each batch of a DataLoader without odb."""


def num_rows(loader: Any) -> list[int]:
    return [len(batch["input_ids"]) for batch in loader]


def epoch_of(loader: Any) -> list[list[int]]:
    """The rows of each batch of an epoch, none on an idle micro-batch; checks the budget of each."""
    batches = []
    for batch in loader:
        info = pop_step_info(batch)
        assert set(batch) == {"input_ids", "labels"}, "only the keys of the collator"
        assert info.samples_all_ranks == info.samples == (0 if info.is_idle else len(batch["input_ids"]))
        assert batch["input_ids"].numel() <= BUDGET
        batches.append([] if info.is_idle else (batch["input_ids"][:, 0] - 1).tolist())
    return batches


def flat(batches: list[list[int]]) -> Counter:
    return Counter(row for batch in batches for row in batch)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, lambda ids: torch.tensor([ids])], ids=["np", "pt", "1xL"])
def test_ids_of_any_kind(kind: Any) -> None:
    with make(Rows(lambda k: {key: kind(ids) for key, ids in item(k).items()})) as loader:
        assert flat(epoch_of(loader)) == EVERY_ROW


@pytest.mark.parametrize(
    ("more", "cost_fn", "patches"),
    [
        ({"odb_n_patches": 5}, None, 5),
        ({"image_grid_thw": torch.tensor([[1, 2, 4]])}, None, 8),
        ({}, lambda item: Cost(len(item["input_ids"]), 3, len(item["labels"]) - 1), 3),
        ({"odb_n_patches": 5}, lambda item: len(item["input_ids"]), 5),
    ],
    ids=["given", "grid", "cost", "cost in tokens"],
)
def test_patches_of_an_item_are_counted(more: dict[str, Any], cost_fn: Any, patches: int) -> None:
    """I4: two samples are within the cap, three are not; the collator does not see `odb_n_patches`. Kinds of media:
    tests/data/test_collate.py."""

    def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        assert not any("odb_n_patches" in item for item in items)
        return pad(items)

    options = {"token_budget": 2048, "max_patches": 2 * patches + 1, "batch_size": 60}
    with make(Rows(lambda k: item(k) | more), collate_fn=collate, cost_fn=cost_fn, **options) as loader:
        assert set(num_rows(loader)) == {2}


def test_labels_may_be_made_by_the_collator(tiny_text: Path) -> None:
    """Labels are counted on each item, collated alone."""
    collator = DataCollatorForLanguageModeling(AutoTokenizer.from_pretrained(tiny_text), mlm=False)
    rows = Rows(lambda k: {"input_ids": item(k)["input_ids"]})
    with make(rows, batch_size=1, collate_fn=collator) as loader:
        batch = next(iter(loader))
        assert isinstance(batch, BatchEncoding)
        assert pop_step_info(batch).loss_scale == pytest.approx(1.0)


def test_apply_changes_one_loader_and_can_be_undone(tmp_path: Path) -> None:
    """Also if an error is replaced by its cause."""
    stock = DataLoader(Rows(), batch_size=4, shuffle=True, collate_fn=pad, num_workers=1)
    other = DataLoader(Rows(), batch_size=4, collate_fn=pad)
    handle = apply_odb(stock, token_budget=BUDGET, gradient_accumulation_steps=4, audit_dir=tmp_path)
    assert isinstance(stock, DataLoader)
    first = epoch_of(stock)
    assert flat(first) == EVERY_ROW and num_rows(other) == STOCK
    with pytest.raises(ConfigError, match="already"):
        apply_odb(stock, token_budget=BUDGET)
    assert [line["ids"] for line in read_audit(tmp_path) if not line["idle"]] == first
    assert flat(epoch_of(handle)) == EVERY_ROW and handle.stats()["odb/budget_use"] > 0
    handle.remove()
    assert type(stock) is DataLoader and stock.collate_fn is pad and num_rows(stock) == STOCK
    with pytest.raises(DataError, match="ran out of memory"), apply_odb(stock, token_budget=BUDGET):
        raise MemoryError
    assert type(stock) is DataLoader and stock.collate_fn is pad


# States


def applied_to(loader: Any) -> tuple[Any, Any]:
    return loader, apply_odb(loader, token_budget=BUDGET)


def under_accelerate() -> tuple[Any, Any]:
    return applied_to(Accelerator(cpu=True).prepare(DataLoader(Rows(), batch_size=4, shuffle=True, collate_fn=pad)))


def of_torchdata() -> tuple[Any, Any]:
    """State by its own methods; the shuffled order is the same after the resume."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    return applied_to(stateful(Rows(), batch_size=4, shuffle=True, collate_fn=pad))


def find_the_dataset(worker_id: int) -> None:
    worker = get_worker_info()
    assert worker is not None and worker.dataset.opened_by is None


def opened_when_read() -> tuple[Any, Any]:
    """Workers inherit no file: neither from the first look at the rows nor from the look at those of a state."""
    loader = make(Opening(), num_workers=1, worker_init_fn=find_the_dataset)
    return loader, loader


def without_a_length() -> tuple[Any, Any]:
    """Neither the sampler nor its dataset has a length."""

    class Endless(Sampler):
        def __iter__(self) -> Any:
            return iter(range(NUM_ROWS))

    loader = make(type("Unbounded", (), {"__getitem__": lambda _, k: item(k)})(), sampler=Endless())
    assert loader.num_optimizer_steps is None
    return loader, loader


def of_the_datasets_library() -> tuple[Any, Any]:
    """A stream of several shards, shuffled through a buffer and mapped."""
    rows = datasets.Dataset.from_list([item(k) for k in range(NUM_ROWS)]).to_iterable_dataset(num_shards=8)
    loader = make(rows.shuffle(seed=1, buffer_size=50).map(lambda row: row), num_workers=1)
    return loader, loader


@pytest.mark.parametrize(
    "source", [under_accelerate, of_torchdata, opened_when_read, without_a_length, of_the_datasets_library]
)
def test_a_state_is_resumed(source: Callable[[], tuple[Any, Any]]) -> None:
    """I2, with common loaders and datasets. source: makes the loader, and the object that closes it."""
    loader, handle = source()
    with handle:
        before, state = stopped(loader, 3)
    loader, handle = source()
    with handle:
        loader.load_state_dict(state)
        assert before + rows_of(loader) == EVERY_ROW
        assert getattr(loader.dataset, "opened_by", None) is None


@pytest.mark.parametrize("step", [6, 8])
def test_a_sampler_that_goes_by_the_orders_it_has_drawn_is_resumed_in_a_later_epoch(step: int) -> None:
    """I2, and the same samples; also at the end of the second epoch of four optimizer steps."""

    def weighted() -> ODBDataLoader:
        generator = torch.Generator().manual_seed(3)
        return make(sampler=WeightedRandomSampler([1.0] * NUM_ROWS, NUM_ROWS, generator=generator))

    with weighted() as loader:
        epochs = [rows_of(loader) for _ in range(3)]
    with weighted() as loader:
        assert rows_of(loader) == epochs[0]
        before, state = stopped(loader, step)
    with weighted() as loader:
        loader.load_state_dict(state)
        if step == 6:
            assert before + rows_of(loader) == epochs[1]
        assert rows_of(loader) == epochs[2]


def test_a_loaded_state_is_not_dropped_in_silence(logged: pytest.LogCaptureFixture) -> None:
    with make(batch_size=1) as first:
        next(iter(first))
        amid = first.state_dict()
        first.set_epoch(3)
        end = first.state_dict()
    with make(batch_size=1) as second:
        for state, epoch in ((end, 3), (amid, 0)):
            second.load_state_dict(state)
            second.set_epoch(epoch)
        assert second.estimate_optimizer_steps() and not logged.messages
        second.set_epoch(1)
        assert "the loaded state, of epoch 0, is dropped" in logged.text
        assert flat(epoch_of(second)) == EVERY_ROW
        second.load_state_dict(end)
        second.set_epoch(0)
        assert "the loaded state, of epoch 3, is dropped" in logged.text


# Rows that cannot be collated: left out before their optimizer step begins, or with weight 0 (I2, I8)

BAD = {9, 31, 32, 33, 34, 57}
SKIPS = {"batch_size": 12, "on_error": "skip"}
TWICE = [11, *range(12, 22), 11]
"""Row 11, the longest, is in the first micro-batch and in the second: the first may fail in time, the second late."""


class Failing:
    """A collator that fails for these rows; only the first time if `folder` is given, where it notes them."""

    def __init__(self, rows: set[int], folder: Path | None = None):
        self.rows, self.folder = rows, folder

    def __call__(self, items: list[dict[str, Any]]) -> Any:
        for k in self.rows & {int(row["input_ids"][0]) - 1 for row in items}:
            if self.folder is None:
                raise ValueError(f"no pixels in {k}")
            if not (self.folder / str(k)).exists():
                (self.folder / str(k)).touch()
                raise OSError("stale file handle")
        return pad(items)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("bad", "changes", "steps"),
    [
        (BAD, {}, None),
        (BAD, {"token_budget": 48}, None),  # many micro-batches an optimizer step
        (BAD, {"global_batch_size": "fill"}, None),
        (set(range(12, 24)), {}, [1, 0, 1, 1, 1]),
        ({11}, {"sampler": TWICE, "token_budget": 41}, None),
    ],
    ids=["keep", "short", "fill", "all of a step", "twice"],
)
def test_a_row_that_cannot_be_collated_is_left_out_and_logged(
    caplog, num_workers: int, bad: set[int], changes: dict[str, Any], steps: list[int] | None
) -> None:
    """steps: the weight of each optimizer step; a step without a usable row is idle."""
    weights: dict[int, float] = defaultdict(float)
    ids: Counter[int] = Counter()
    with make(collate_fn=Failing(bad), num_workers=num_workers, **SKIPS | changes) as loader:
        for batch in loader:
            info = pop_step_info(batch)
            weights[info.optimizer_step] += info.token_weight * int((batch["labels"][:, 1:] != -100).sum())
            ids.update(info.ids)
        order = changes.get("sampler", range(NUM_ROWS))
        assert loader.stats()["odb/skipped"] == sum(row in bad for row in order)
    assert ids == Counter(row for row in order if row not in bad), "I2"
    assert sum(f"no pixels in {row};" in caplog.text for row in bad) == min(len(bad), 10)
    assert all(weight <= 1.00001 for weight in weights.values()), "I8"
    assert steps is None or [round(weight, 6) for weight in weights.values()] == steps


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_failure_is_tried_again(tmp_path: Path, num_workers: int, policy: str) -> None:
    """A collation, and a read."""

    class Flaky(Rows):
        def __getitem__(self, k: int) -> Any:
            path = tmp_path / f"read_{k}"
            if not path.exists():
                path.touch()
                raise OSError("stale file handle")
            return item(k)

    collator = Failing(BAD, tmp_path)
    with make(Flaky(), collate_fn=collator, num_workers=num_workers, **SKIPS | {"on_error": policy}) as loader:
        assert rows_of(loader) == EVERY_ROW and loader.stats()["odb/skipped"] == 0


def test_rows_are_counted_by_reason_and_the_first_ten_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Rows of every reason, in each epoch."""

    class Odd(Rows):
        def __getitem__(self, k: int) -> Any:
            if k in (3, 4, 5):
                raise OSError("no such file")
            without_labels = {20: {"labels": [-100] * len(item(20)["labels"])}, 21: {"input_ids": [], "labels": []}}
            return item(k) | without_labels.get(k, {})

    with make(Odd(), collate_fn=Failing({9}), token_budget=39, overlong="drop", **SKIPS) as loader:
        for _ in range(2):
            ids = rows_of(loader)
        summary = loader.accounting.summary()
        left_out = summary["left_out"]
        assert type(summary["samples"]) is type(summary["oom_cuts"]) is int, "as logged"
        assert loader.stats()["odb/skipped"] == sum(left_out.values())
    long = {k for k in range(NUM_ROWS) if len(item(k)["input_ids"]) > 39}
    assert {k for k in range(NUM_ROWS) if not ids[k]} == {3, 4, 5, 20, 21, 9} | long
    assert left_out == {"unreadable": 6, "unsupervised": 4, "overlong": 2 * len(long), "collation": 2}
    assert len([message for message in caplog.messages if message.startswith("left out (")]) == 10
    assert "are counted and not logged" in caplog.text


class Lines(IterableDataset):
    """All iterators read one file, each from the beginning."""

    def __init__(self, path: Path):
        self.file = path.open()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.file.seek(0)
        while line := self.file.readline():
            yield item(int(line))


def without_row_100(items: list[dict[str, Any]]) -> Any:
    if any(item["input_ids"][0] == 101 for item in items):
        raise ValueError("no pixels")
    return pad(items)


@pytest.mark.parametrize("batch_size", [1, 12])
def test_a_stand_in_is_not_read_by_another_iterator(batch_size: int, tmp_path: Path) -> None:
    """I2: the current iterator would go on elsewhere in the file."""
    path = tmp_path / "rows"
    path.write_text("".join(f"{k:60}\n" for k in range(600)))
    options = {"token_budget": 41, "collate_fn": without_row_100, "on_error": "skip"}
    with ODBDataLoader(Lines(path), batch_size, **options) as loader:
        assert Counter(id for batch in loader for id in pop_step_info(batch).ids) == Counter(set(range(600)) - {100})
