"""Rows that cannot be collated, in a loop of one's own: left out before their optimizer step begins, or weighing
nothing (I2, I8)."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from loop.loops import EVERY_ROW, rows_of
from toy import NUM_ROWS, Rows, item, pad

from odb_factory import ODBDataLoader, pop_step_info

pytestmark = pytest.mark.timeout(120)

BAD = {9, 31, 32, 33, 34, 57}
SHORT = {"token_budget": 48}
"""Many micro-batches an optimizer step."""


class Failing:
    """A collator that cannot take these rows; only the first time if `folder` is given, where it notes them."""

    def __init__(self, rows: set[int], folder: Path | None = None):
        self.rows, self.folder = rows, folder

    def __call__(self, items: list[dict[str, Any]]) -> Any:
        for k in self.rows & {int(one["input_ids"][0]) - 1 for one in items}:
            if self.folder is None:
                raise ValueError(f"no pixels in {k}")
            if not (self.folder / str(k)).exists():
                (self.folder / str(k)).touch()
                raise OSError("stale file handle")
        return pad(items)


def train(folder: Path, collate_fn: Any, epochs: int = 1, **changes: Any) -> tuple[Any, Any, Any]:
    """Of each optimizer step the weight of its loss and its ids; what the loader says of the run."""
    options = {"token_budget": 128, "batch_size": 12, "on_error": "skip", "audit_dir": folder} | changes
    with ODBDataLoader(Rows(), collate_fn=collate_fn, **options) as loader:
        weights: dict[Any, float] = defaultdict(float)
        ids: Counter[int] = Counter()
        for _ in range(epochs):
            for batch in loader:
                info = pop_step_info(batch)
                key = info.epoch, info.optimizer_step
                weights[key] += info.token_weight * int((batch["labels"][:, 1:] != -100).sum())
                ids.update(info.ids)
        return weights, ids, loader.stats()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("changes", [{}, SHORT, {"global_batch_size": "fill"}], ids=["keep", "short", "fill"])
def test_a_row_that_cannot_be_collated_is_left_out_and_logged(
    tmp_path, caplog, workers: int, changes: dict[str, Any]
) -> None:
    weights, ids, stats = train(tmp_path, Failing(BAD), num_workers=workers, **changes)
    assert ids == Counter(set(range(NUM_ROWS)) - BAD), "I2"
    assert stats["odb/skipped"] == len(BAD)
    for row in BAD:
        assert f"no pixels in {row}" in caplog.text
    assert all(weight <= 1.00001 for weight in weights.values()), "I8"


def test_an_optimizer_step_of_which_no_row_is_left_is_idle(tmp_path) -> None:
    weights, ids, stats = train(tmp_path, Failing(set(range(12, 24))), num_workers=1)
    assert ids == Counter(set(range(NUM_ROWS)) - set(range(12, 24)))
    assert [round(weight, 6) for weight in weights.values()] == [1, 0, 1, 1, 1]
    assert stats["odb/skipped"] == 12


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("workers", [0, 1])
def test_what_fails_once_is_tried_again(tmp_path, workers: int, policy: str) -> None:
    """A collation, and a read."""
    _, ids, stats = train(tmp_path, Failing(BAD, tmp_path), num_workers=workers, on_error=policy)
    assert ids == EVERY_ROW
    assert stats["odb/skipped"] == 0

    class Flaky(Rows):
        def __getitem__(self, k: int) -> Any:
            path = tmp_path / f"read_{k}"
            if not path.exists():
                path.touch()
                raise OSError("stale file handle")
            return item(k)

    options = {"token_budget": 128, "batch_size": 12}
    with ODBDataLoader(Flaky(), collate_fn=pad, on_error=policy, **options) as loader:
        assert rows_of(loader) == EVERY_ROW


def test_rows_are_counted_by_reason_and_the_first_ten_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A row of every reason, each epoch."""

    class Odd(Rows):
        def __getitem__(self, k: int) -> Any:
            if k in (3, 4, 5):
                raise OSError("no such file")
            without_labels = {20: {"labels": [-100] * len(item(20)["labels"])}, 21: {"input_ids": [], "labels": []}}
            return item(k) | without_labels.get(k, {})

    options = {"token_budget": 39, "overlong": "drop", "batch_size": 12, "on_error": "skip"}
    with ODBDataLoader(Odd(), collate_fn=Failing({9}), **options) as loader:
        for _ in range(2):
            ids = rows_of(loader)
        left_out = loader.accounting.summary()["left_out"]
        assert loader.stats()["odb/skipped"] == sum(left_out.values())
    long = {k for k in range(NUM_ROWS) if len(item(k)["input_ids"]) > 39}
    assert {k for k in range(NUM_ROWS) if not ids[k]} == {3, 4, 5, 20, 21, 9} | long
    assert left_out == {"unreadable": 6, "unsupervised": 4, "overlong": 2 * len(long), "collation": 2}
    assert len([message for message in caplog.messages if message.startswith("left out (")]) == 10
    assert "are counted and not logged" in caplog.text


@pytest.mark.parametrize("accumulation", [1, 4])
def test_rows_after_the_last_usable_one_are_counted_too(accumulation: int) -> None:
    """Without join an epoch ends with an optimizer step that was planned before these rows were read."""

    class Odd(Rows):
        def __getitem__(self, k: int) -> Any:
            if k >= 19:
                raise OSError("no such file")
            return item(0)

    options = {"global_batch_size": "fill", "join": False, "gradient_accumulation_steps": accumulation}
    with ODBDataLoader(
        Odd(num_rows=24),
        token_budget=400,
        buffer_size=8,
        collate_fn=pad,
        on_error="skip",
        **options,
    ) as loader:
        rows_of(loader)
        assert loader.stats()["odb/skipped"] == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_that_is_drawn_twice_in_an_optimizer_step_is_left_out_twice(tmp_path, workers: int) -> None:
    """I8: one of the two may be known in time, and the other late."""
    order = [11, *range(12, 22), 11]  # the longest row: of the first micro-batch, and of the second
    weights, ids, stats = train(tmp_path, Failing({11}), num_workers=workers, sampler=order, token_budget=41)
    assert ids == Counter(range(12, 22))
    assert stats["odb/skipped"] == 2 and sum(weights.values()) <= 1.00001
