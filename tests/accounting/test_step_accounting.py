"""What is counted, checked and written of the optimizer steps of a run."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from accounting.steps import Row, cut, measured, optimizer_step, random_rows

from odb_factory.accounting.statistics import summary_line
from odb_factory.accounting.step_accounting import StepAccounting
from odb_factory.config import ODBConfig
from odb_factory.data.observe import measure_batch
from odb_factory.data.samples import LeftOut, Measured, MicroBatch, OptimizerStep
from odb_factory.errors import ConfigError, DataError
from odb_factory.planning import Budget, Media


class Loader:
    """What the accounting knows of a loader."""

    rank, num_samples, lowered, counts_labels, budget = 0, 40, None, True, Budget(1000)

    def __init__(self, world_size: int = 1):
        self.world_size = world_size
        self.consumed: list[OptimizerStep] = []
        self.left_out = LeftOut()

    def consume(self, step: OptimizerStep) -> None:
        self.consumed.append(step)


def _accounting(loader: Loader | None = None, folder: Path | None = None, **block: Any) -> StepAccounting:
    return StepAccounting(loader or Loader(), ODBConfig(token_budget=1000, **block), folder)  # type: ignore[arg-type]


def _run(accounting: StepAccounting, micro_batches: list[MicroBatch]) -> None:
    for one in micro_batches:
        accounting.begin(one, measured(one, 70))
        accounting.end()


def test_figures_are_those_of_all_ranks_and_of_whole_optimizer_steps(tmp_path: Path) -> None:
    rng = random.Random(2)
    loader = Loader(world_size=3)
    accounting = _accounting(loader, tmp_path)
    steps, rows = [], random_rows(rng, 30)
    for index, num_micro_batches in enumerate((2, 4, 3)):
        mine = rows[10 * index : 10 * index + 10]
        rejected = Counter({"unreadable": index})
        slots = cut(rng, 10, 3, num_micro_batches)
        last = index == 2
        (first, *_) = optimizer_step(mine, slots, index=index, rejected=rejected, last=last, remainder=last, overlong=2)
        steps.append(first)
        _run(accounting, first[:-1])
        assert [step.index for step in loader.consumed] == list(range(index)), "not before its last micro-batch"
        _run(accounting, first[-1:])
    assert loader.consumed == [first[0].step for first in steps]
    summary = accounting.summary()
    assert summary["samples"] == 30
    assert summary["tokens"] == sum(row.tokens for row in rows)
    assert (summary["optimizer_steps"], summary["micro_steps"]) == (3, 9)
    assert summary["idle_micro_batches"] == 27 - sum(first[0].step.active_ranks for first in steps)
    assert (summary["left_out"], summary["remainder"], summary["overlong"]) == ({"unreadable": 2}, 1, 2)
    metrics = accounting.metrics()
    assert metrics["odb/micro_batches"] == 3
    assert (metrics["odb/skipped"], metrics["odb/idle"]) == (2, summary["idle_micro_batches"])
    line = summary_line(summary)
    assert "30 samples in 3 optimizer steps" in line and "2 unreadable" in line
    lines = [json.loads(line) for line in (tmp_path / "odb_audit_rank0.jsonl").read_text().splitlines()]
    assert [(line["optimizer_step"], line["micro_batch"], line["micro_batches"]) for line in lines] == [
        *((1, k, 2) for k in range(2)),
        *((2, k, 4) for k in range(4)),
        *((3, k, 3) for k in range(3)),
    ]
    assert [line["ids"] for line in lines] == [list(one.ids) for first in steps for one in first]


def test_an_interval_restarts_and_the_run_continues() -> None:
    rows = random_rows(random.Random(1), 8)
    accounting = _accounting()
    for index in range(2):
        _run(accounting, optimizer_step(rows, [[[0, 1, 2], [3, 4, 5, 6, 7]]], index=index)[0])
    assert accounting.interval_metrics()["odb/micro_batches"] == 2
    _run(accounting, optimizer_step(rows, [[list(range(8))]], index=2)[0])
    assert accounting.interval_metrics()["odb/micro_batches"] == 1
    assert accounting.metrics()["odb/micro_batches"] == round(5 / 3, 2)


def test_an_audit_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    accounting = _accounting(folder=tmp_path / "file")
    with pytest.raises(ConfigError, match=r"odb_audit_rank0.jsonl: the audit cannot be written \(.*Error: .*\); give"):
        _run(accounting, optimizer_step([Row(9, 4, False, 0, 0)], [[[0]]])[0])


@pytest.mark.parametrize(
    ("scaling", "found", "message"),
    [
        ("stock", Measured(2, 70, Media(), 6), None),
        ("stock", Measured(1, 70, Media(), 6), "made 1 rows of these 2 samples, and loss_scaling 'stock' gives"),
        ("stock", Measured(4, 70, Media(), 6), "made 4 rows of these 2 samples"),
        ("exact", Measured(2, 70, Media(), 5), "the collator left 5 units of 6 observed"),
        ("approx", Measured(2, 70, Media(), 5), None),
        ("exact", Measured(1, 12, Media(), 6), "some were left out"),
    ],
)
def test_what_the_collator_changed_is_said(scaling: str, found: Measured, message: str | None) -> None:
    rows = [Row(9, 2, False, 0, 0), Row(9, 4, False, 0, 1)]
    ((one,),) = optimizer_step(rows, [[[0, 1]]], stock_mean="micro_batch")
    accounting = _accounting(loss_scaling=scaling)
    if message is None:
        accounting.begin(one, found)
    else:
        with pytest.raises(DataError, match=message):
            accounting.begin(one, found)


SEGMENTS = (9, 12, 3)


def test_samples_of_a_flat_row_are_found_by_its_segments(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Order and labels of each; what fills up has none; nothing is said of one row."""
    rows = [Row(9, 2, False, 0, 0), Row(12, 4, False, 0, 1)]
    ((one,),) = optimizer_step(rows, [[[0, 1]]], stock_mean="micro_batch")

    def found(*units: int) -> Measured:
        labels = [[-100] * (length - n) + [5] * n for length, n in zip(SEGMENTS, units)]
        row = torch.tensor([list(chain(*labels))])
        return measure_batch({"input_ids": row, "labels": row}, segments=SEGMENTS)

    accounting = _accounting(folder=tmp_path, loss_scaling="stock")
    accounting.begin(one, found(2, 4, 0))
    accounting.end()
    accounting.close()
    assert not caplog.messages
    (line,) = [json.loads(line) for line in (tmp_path / "odb_audit_rank0.jsonl").read_text().splitlines()]
    assert (line["rows"], line["length"], line["segments"]) == (1, 24, [9, 12, 3])
    assert line["weight"] == pytest.approx([1 / 4, 1 / 8])
    for wrong in ((4, 2, 0), (2, 3, 1)):
        with pytest.raises(DataError, match="their labels in another order"):
            _accounting(loss_scaling="stock").begin(one, found(*wrong))
    _accounting(loss_scaling="exact").begin(one, found(4, 2, 0))
    assert "in the order of the rows" in caplog.text
    with pytest.raises(DataError, match="left 5 units of 6"):
        _accounting(loss_scaling="exact").begin(one, found(2, 3, 0))


def test_waiting_for_the_loader_is_counted() -> None:
    ((one,),) = optimizer_step([Row(9, 4, False, 0, 0)], [[[0]]])
    accounting, items = _accounting(), iter([(one, measured(one, 9), {})])
    assert accounting.next(items) is not None and accounting.next(items) is None
    assert 0 < accounting.summary()["data_wait_s"] <= accounting.summary()["seconds"]
