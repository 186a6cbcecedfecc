"""The public surface is short and frozen: a change here is a change for every user."""

from __future__ import annotations

import dataclasses
import time
from typing import get_type_hints

from test_docs import first_column
from toy import a_micro_batch

import odb_factory
from odb_factory.accounting.losses import MicroBatchLoss
from odb_factory.accounting.statistics import AUDIT_FILE, SUMMARY_FILE, Computing, StepStatistics, audit_line
from odb_factory.config import ODBKeys
from odb_factory.data.samples import Measured
from odb_factory.planning import Media


def test_names_of_the_package() -> None:
    assert sorted(odb_factory.__all__) == [
        "Collation",
        "ConfigError",
        "Cost",
        "DataError",
        "ODBConfig",
        "ODBDataLoader",
        "ODBError",
        "ODBHandle",
        "ODBStepInfo",
        "ODBTrainer",
        "ODBTrainerMixin",
        "__version__",
        "apply_odb",
        "enable_odb",
        "plan_micro_batches",
        "pop_step_info",
        "unpad",
        "weighted_loss",
        "without_logits",
    ]
    assert all(getattr(odb_factory, name) is not None for name in odb_factory.__all__)
    assert sorted(dir(odb_factory)) == sorted(odb_factory.__all__)


def test_errors_a_caller_may_catch() -> None:
    """A bad setting is a ValueError, a bad row a RuntimeError, and one name catches both."""
    assert issubclass(odb_factory.ConfigError, odb_factory.ODBError)
    assert issubclass(odb_factory.ConfigError, ValueError)
    assert issubclass(odb_factory.DataError, odb_factory.ODBError)
    assert issubclass(odb_factory.DataError, RuntimeError)


def test_keys_of_the_block() -> None:
    assert [item.name for item in dataclasses.fields(odb_factory.ODBConfig)] == [
        "token_budget",
        "max_patches",
        "memory_fraction",
        "eval_token_budget",
        "global_batch_size",
        "layout",
        "pad_to_multiple_of",
        "row_multiple",
        "buffer_size",
        "loss_scaling",
        "lr_scale",
        "join",
        "balance",
        "balance_encoder",
        "overlong",
        "on_error",
        "oom",
        "recompute",
        "exchange_timeout_s",
        "audit",
    ]


def test_typed_keys_are_those_of_the_block() -> None:
    """With the same types and choices."""
    assert get_type_hints(ODBKeys) == get_type_hints(odb_factory.ODBConfig)


def test_fields_of_the_step_info() -> None:
    fields = [item.name for item in dataclasses.fields(odb_factory.ODBStepInfo) if item.repr]
    assert fields == [
        "loss_scaling",
        "token_weight",
        "is_idle",
        "ids",
        "segments",
        "samples",
        "tokens",
        "units",
        "samples_all_ranks",
        "optimizer_step",
        "optimizer_step_samples",
        "micro_batch",
        "micro_batches",
        "ends_optimizer_step",
        "epoch",
        "progress",
    ]


def test_metric_names() -> None:
    names = {
        "odb/tokens_per_second",
        "odb/samples_per_second",
        "odb/padding_ratio",
        "odb/budget_use",
        "odb/micro_batches",
        "odb/balance",
        "odb/data_wait_share",
        "odb/skipped",
        "odb/idle",
    }
    assert set(StepStatistics().metrics(token_budget=8, world_size=1)) - {"odb/peak_memory_gib"} == names
    statistics = StepStatistics()
    statistics.add(a_micro_batch().totals, world_size=1)
    assert set(statistics.metrics(token_budget=8, world_size=1)) - {"odb/peak_memory_gib"} == names


def test_audit_keys() -> None:
    measured = Measured(rows=2, length=3, media=Media(), units=3)
    done = Computing(a_micro_batch(), measured, MicroBatchLoss(1.0, None))
    found = audit_line(done, rank=0, optimizer_step=2, data_wait_s=0.25)
    assert abs(found.pop("time") - time.time()) < 60
    assert found.keys() | {"time"} == first_column("Audit"), "docs/metrics.md"
    assert found == {
        "epoch": 0,
        "optimizer_step": 2,
        "micro_batch": 0,
        "micro_batches": 1,
        "part": 0,
        "parts": 1,
        "ids": [4, 7],
        "lengths": [2, 3],
        "rows": 2,
        "length": 3,
        "segments": [],
        "patches": 0,
        "encoder_patches": 0,
        "image_patches": 0,
        "video_patches": 0,
        "audio_frames": 0,
        "units": 3,
        "weight": 1.0,
        "idle": False,
        "data_wait_s": 0.25,
    }


def test_file_names() -> None:
    assert (AUDIT_FILE, SUMMARY_FILE) == ("odb_audit_rank{rank}.jsonl", "odb_summary.json")
