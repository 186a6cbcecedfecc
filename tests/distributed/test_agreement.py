"""If ranks differ, all of them stop before the first step, with one line (I11)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from distributed.ranks import run_ranks, toy_loader

from odb_factory.errors import ODBError
from odb_factory.planner import Plan

NUM_ROWS = 120


def take_epoch(**options: Any) -> dict[str, Any]:
    """Batches and rows of an epoch on this rank, or the error that ended it."""
    rows: list[int] = []
    batches = 0
    try:
        with toy_loader(NUM_ROWS, num_workers=0, **options) as loader:
            for micro_batch, _, _ in loader:
                batches += 1
                rows += micro_batch.ids
    except ODBError as error:
        return {"batches": batches, "error": str(error)}
    return {"batches": batches, "rows": rows}


KEEP = {"global_batch_size": "keep"}
ORDER = list(range(NUM_ROWS))
DIFFERENCES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"token_budget": 100}, {"token_budget": 200}, "odb.token_budget (100 on rank 0; 200 on rank 1)"),
    ({"token_budget": 100, "balance": True}, {"token_budget": 200, "balance": True}, "odb.token_budget"),
    ({"accumulation": 1}, {"accumulation": 4}, "gradient_accumulation_steps"),
    ({**KEEP, "batch_size": 1}, {**KEEP, "batch_size": 2}, "per_device_train_batch_size"),
    (KEEP, {}, "odb.global_batch_size ('keep' on rank 0; 'fill' on rank 1)"),
    (KEEP, {"global_batch_size": 16}, "odb.global_batch_size ('keep' on rank 0; 16 on rank 1)"),
    (KEEP, {**KEEP, "drop_last": True}, "drop_last"),
    (KEEP, {**KEEP, "stock_mean": "micro_batch"}, "what stock's loss is the mean of"),
    ({}, {"loss_scaling": "approx"}, "odb.loss_scaling"),
    ({}, {"join": False}, "odb.join"),
    ({"seed": 1}, {"seed": 2}, "seed"),
    ({**KEEP, "balance": True}, KEEP, "odb.balance"),
    ({"sampler": ORDER}, {"sampler": ORDER[::-1]}, "different orders"),
    ({"resolved": "flat"}, {}, "layout of the micro-batches ('flat' on rank 0; 'padded' on rank 1)"),
    ({"agree_on": {"x": 1}}, {"agree_on": {"x": True}}, "x (1 on rank 0; True on rank 1)"),
    ({}, {"agree_on": {f"key {k}": "x" * 1000 for k in range(20)}}, "key 0 (nothing on rank 0; 'xxx"),
]
"""The options of rank 0 and of rank 1, and words of the message of both."""


MAY_DIFFER = {"exchange_timeout_s": 30, "audit": False}, {"exchange_timeout_s": 60, "audit": True}


def each_difference(rank: int, *, differences: list[tuple[dict, dict]]) -> list[dict[str, Any]]:
    """Take all epochs in the same processes: after a failed agreement the ranks can start again."""
    return [take_epoch(**pair[rank]) for pair in differences]


def test_settings_that_differ(tmp_path: Path) -> None:
    pairs = [(first, second) for first, second, _ in DIFFERENCES]
    ended = run_ranks("distributed.test_agreement:each_difference", tmp_path, differences=[*pairs, MAY_DIFFER])
    rows = [row for outcome in ended for row in outcome.value.pop()["rows"]]
    assert sorted(rows) == list(range(NUM_ROWS)), "those of MAY_DIFFER"
    for (*_, words), *values in zip(DIFFERENCES, *(outcome.value for outcome in ended), strict=True):
        for value in values:
            assert value["batches"] == 0, words
            assert words in value["error"] and "\n" not in value["error"] and len(value["error"]) < 1200, value


def take_kept_epoch(rank: int, **options: Any) -> dict[str, Any]:
    return take_epoch(batch_size=3, stock_mean="micro_batch", **KEEP | options)


@pytest.mark.parametrize(("options", "world_size"), [({"balance": True, "layout": "flat"}, 5), ({"balance": False}, 3)])
def test_kept_optimizer_steps(tmp_path: Path, options: dict[str, Any], world_size: int) -> None:
    """I1, I2 over gloo, on odd numbers of ranks."""
    ended = run_ranks("distributed.test_agreement:take_kept_epoch", tmp_path, world_size=world_size, **options)
    values = [outcome.value for outcome in ended]
    assert len({value["batches"] for value in values}) == 1 and values[0]["batches"] > 1, ended
    assert sorted(itertools.chain.from_iterable(value["rows"] for value in values)) == list(range(NUM_ROWS))


def other_plan(rank: int) -> dict[str, Any]:
    """Rank 1 computes another plan from the same metadata, as another version might."""
    if rank == 1:
        checksum = Plan.checksum
        Plan.checksum = lambda plan: checksum(plan) + 1
    return take_epoch(balance=True)


def test_plans_that_differ(tmp_path: Path) -> None:
    """I6 is checked with the next gather, so one optimizer step may have been yielded."""
    for outcome in run_ranks("distributed.test_agreement:other_plan", tmp_path):
        assert "different plans" in outcome.value["error"] and outcome.value["batches"] <= 2
