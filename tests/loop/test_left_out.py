"""Rows that cannot be collated, in a loop of one's own: left out before their optimizer step begins, or weighing
nothing (I2, I8)."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from loop.loops import EVERY_ROW, rows_of
from support import read_jsonl
from toy import NUM_ROWS, Rows, item, pad

from odb_factory import DataError, ODBDataLoader, pop_step_info

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
                weights[key] += sum(
                    weight * int((labels[1:] != -100).sum())
                    for weight, labels in zip(info.token_weights, batch["labels"])
                )
                ids.update(info.ids)
        return weights, ids, loader.stats()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("changes", [{}, SHORT, {"global_batch_size": "fill"}], ids=["keep", "short", "fill"])
def test_a_row_that_cannot_be_collated_is_left_out_and_told(tmp_path, workers: int, changes: dict[str, Any]) -> None:
    weights, ids, stats = train(tmp_path, Failing(BAD), num_workers=workers, **changes)
    assert ids == Counter(set(range(NUM_ROWS)) - BAD), "I2"
    assert stats["odb/left_out"] == len(BAD)
    lines = read_jsonl(tmp_path / "odb_left_out_rank0.jsonl")
    assert {line["id"] for line in lines} == BAD
    assert {line["reason"] for line in lines} == {"collation"}
    assert all(f"no pixels in {line['id']}" in line["message"] for line in lines)
    lost: dict[int, float] = defaultdict(float)
    for line in lines:
        lost[line["optimizer_step"]] += line["lost_weight"]
    assert sum(lost.values()) == pytest.approx(stats["odb/lost_weight"], abs=1e-5)
    for number, (step, weight) in enumerate(weights.items(), 1):
        assert weight + lost[number] == pytest.approx(1), f"I8, {step}"


def test_an_optimizer_step_of_which_no_row_is_left_is_idle(tmp_path) -> None:
    weights, ids, stats = train(tmp_path, Failing(set(range(12, 24))), num_workers=1)
    assert ids == Counter(set(range(NUM_ROWS)) - set(range(12, 24)))
    assert [round(weight, 6) for weight in weights.values()] == [1, 0, 1, 1, 1]
    assert stats["odb/left_out"] == 12


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_collation_that_fails_once_is_tried_again(tmp_path, workers: int, policy: str) -> None:
    _, ids, stats = train(tmp_path, Failing(BAD, tmp_path), num_workers=workers, on_error=policy)
    assert ids == EVERY_ROW
    assert stats["odb/left_out"] == 0
    assert not (tmp_path / "odb_left_out_rank0.jsonl").exists()


def test_a_read_that_fails_once_is_tried_again(tmp_path) -> None:
    class Flaky(Rows):
        def __getitem__(self, k: int) -> Any:
            if not (tmp_path / str(k)).exists():
                (tmp_path / str(k)).touch()
                raise OSError("stale file handle")
            return item(k)

    with ODBDataLoader(Flaky(), token_budget=128, batch_size=12, collate_fn=pad) as loader:
        assert rows_of(loader) == EVERY_ROW


def test_raise_ends_in_one_line(tmp_path) -> None:
    with pytest.raises(DataError, match="row 31 .*no pixels in 31; fix or remove the row") as caught:
        train(tmp_path, Failing({31}), num_workers=1, on_error="raise")
    assert "\n" not in str(caught.value)


def test_left_out_for_whatever_reason_stands_in_one_file(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    """A row of every reason, each epoch; the log names the first ten and the file."""

    class Odd(Rows):
        def __getitem__(self, k: int) -> Any:
            if k in (3, 4, 5):
                raise OSError("no such file")
            return item(k) | ({"labels": [-100] * len(item(k)["labels"])} if k in (20, 21) else {})

    with ODBDataLoader(
        Odd(),
        token_budget=39,
        overlong="drop",
        batch_size=12,
        collate_fn=Failing({9}),
        on_error="skip",
        audit_dir=tmp_path,
    ) as loader:
        for _ in range(2):
            ids = rows_of(loader)
        num_left_out = loader.stats()["odb/left_out"]
    lines = read_jsonl(tmp_path / "odb_left_out_rank0.jsonl")
    reasons = {id: {line["reason"] for line in lines if line["id"] == id} for id in range(NUM_ROWS) if not ids[id]}
    long = {k for k in range(NUM_ROWS) if len(item(k)["input_ids"]) > 39}
    assert reasons == {
        **{k: {"unreadable"} for k in (3, 4, 5)},
        **{k: {"unsupervised"} for k in (20, 21)},
        **{k: {"overlong"} for k in long},
        9: {"collation"},
    }
    assert Counter(line["epoch"] for line in lines) == Counter({0: len(reasons), 1: len(reasons)})
    assert num_left_out == 2 * len(reasons)
    named = [message for message in caplog.messages if message.startswith("left out (")]
    assert len(named) == 10
    assert f"listed in {tmp_path / 'odb_left_out_rank0.jsonl'}" in caplog.text


@pytest.mark.parametrize("accumulation", [1, 4])
def test_rows_after_the_last_usable_one_stand_in_the_file_too(tmp_path, accumulation: int) -> None:
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
        audit_dir=tmp_path,
        **options,
    ) as loader:
        rows_of(loader)
        assert loader.stats()["odb/left_out"] == 5
    assert [line["id"] for line in read_jsonl(tmp_path / "odb_left_out_rank0.jsonl")] == [19, 20, 21, 22, 23]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_that_is_drawn_twice_in_an_optimizer_step_is_left_out_twice(tmp_path, workers: int) -> None:
    """I8: one of the two may be known in time, and the other late."""
    order = [11, *range(12, 22), 11]  # the longest row: of the first micro-batch, and of the second
    weights, ids, stats = train(tmp_path, Failing({11}), num_workers=workers, sampler=order, token_budget=41)
    assert ids == Counter(range(12, 22))
    assert sum(weights.values()) + stats["odb/lost_weight"] == pytest.approx(1, abs=1e-5)
