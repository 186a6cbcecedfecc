"""Rows that cannot be collated, in a custom loop: left out before their optimizer step begins, or with weight 0 (I2,
I8)."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from loop.loops import EVERY_ROW, make, rows_of
from toy import NUM_ROWS, Rows, item, pad

from odb_factory import pop_step_info

pytestmark = pytest.mark.timeout(120)

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


@pytest.mark.parametrize("accumulation", [1, 4])
def test_rows_after_the_last_usable_one_are_counted_too(accumulation: int) -> None:
    """Without join an epoch ends with an optimizer step that was planned before these rows were read."""

    class Odd(Rows):
        def __getitem__(self, k: int) -> Any:
            if k >= 19:
                raise OSError("no such file")
            return item(0)

    fill = {"global_batch_size": "fill", "join": False, "gradient_accumulation_steps": accumulation, "buffer_size": 8}
    with make(Odd(num_rows=24), token_budget=400, on_error="skip", **fill) as loader:
        rows_of(loader)
        assert loader.stats()["odb/skipped"] == 5
