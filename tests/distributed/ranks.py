"""Ranks without a training: processes that each run one function, with a toy loader to run in it."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import forks
from support import free_port

from odb_factory.config import ODBConfig
from odb_factory.data.loader import ODBLoader
from odb_factory.data.order import DataLoaderParts, OptimizerStepRule, StockMean
from odb_factory.data.ranks import Ranks
from odb_factory.planning import Cost

TESTS = Path(__file__).parents[1]
IGNORE = -100
GROUP_TIMEOUT = "ODB_TEST_GROUP_TIMEOUT"
"""In the environment: the timeout of the default process group (seconds), as `ddp_timeout` sets it."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: what its function returned (None if it raised), and what it wrote."""

    returncode: int
    value: Any
    said: str


def run_ranks(
    function: str,
    folder: Path,
    *,
    world_size: int = 2,
    limit_s: float = 60,
    ends_with: int | None = None,
    may_fail: bool = False,
    env: Mapping[str, str] = {},
    **kwargs: Any,
) -> list[Outcome]:
    """Run `module:function(rank, **kwargs)` in one process a rank, with gloo between them.

    kwargs and the returned value are made of what JSON knows. Fails the test if a rank has not ended in time, or not
    well (unless it `may_fail`). env: beside the environment of this process.
    ends_with: the rank at whose end the others are killed, as a launcher does (None: each ends by itself).
    """
    env = os.environ | {
        **env,
        "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS)]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
    }
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    results = [folder / f"rank{rank}.json" for rank in range(world_size)]
    processes = [
        forks.start(
            "distributed.ranks:main",
            [function, json.dumps(kwargs), str(results[rank])],
            modules=["distributed.ranks", function.split(":")[0]],
            env=env | {"RANK": str(rank)},
            log=logs[rank],
        )
        for rank in range(world_size)
    ]
    hung = []
    try:
        for rank, process in enumerate(processes):
            if ends_with not in (None, rank):
                continue
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                hung.append(rank)
                process.send_signal(signal.SIGABRT)  # faulthandler writes where it stands
    finally:
        for process in processes:
            _kill_group(process)
    said = [log.read_text(errors="replace") for log in logs]
    if hung:
        pytest.fail(f"ranks {hung} did not end within {limit_s} s:\n" + "\n".join(text[-4000:] for text in said))
    values = [json.loads(path.read_text()) if path.exists() else None for path in results]
    assert may_fail or not any(process.returncode for process in processes), "\n".join(text[-3000:] for text in said)
    return [Outcome(process.returncode, *rest) for process, *rest in zip(processes, values, said)]


def _kill_group(process: forks.Forked) -> None:
    """End a rank and its workers, which share its process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait(10)


# In a rank


class Observer:
    """A row is (its number, its length). Every id of row k is k + 1, so that a batch tells what it is made of.

    hangs: (row, epoch) that is never done.
    """

    def __init__(self, hangs: tuple[int, int] | None = None):
        self.hangs, self.seen = hangs, Counter()

    def __call__(self, row: tuple[int, int]) -> tuple[dict[str, Any], Cost]:
        index, length = row
        if self.hangs and index == self.hangs[0] and self.seen[index] == self.hangs[1]:
            time.sleep(3600)
        self.seen[index] += 1
        ids = [index + 1] * length
        return {"input_ids": ids, "labels": ids}, Cost(len(ids), 0, len(ids) - 1)

    def describe(self, dataset: list[int], index: int) -> str:
        return f"row {index}"


class Collator:
    """Pads; refuses row `bad`."""

    def __init__(self, bad: int | None = None):
        self.bad = bad

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if any(feature["input_ids"][0] - 1 == self.bad for feature in features):
            raise OSError("image file is truncated")
        length = max(len(feature["input_ids"]) for feature in features)

        def pad(key: str, filler: int) -> torch.Tensor:
            return torch.tensor([feature[key] + [filler] * (length - len(feature[key])) for feature in features])

        return {"input_ids": pad("input_ids", 0), "labels": pad("labels", IGNORE)}


@contextmanager
def toy_loader(
    num_rows: int,
    *,
    workers: tuple[int, int] = (1, 1),
    timeout_s: float = 30,
    bad: int | None = None,
    hangs: tuple[int, int] | None = None,
    start_method: str = "fork",
    process_group: dist.ProcessGroup | None = None,
    agree_on: dict[str, Any] | None = None,
    seed: int = 0,
    sampler: Any = None,
    **options: Any,
) -> Iterator[ODBLoader]:
    """Rows of 2 to 40 tokens, dealt out in turn. workers: those that observe and those that collate.

    options: of the config (default: `fill`, not balanced) and of `OptimizerStepRule` (default: 2 micro-batches).
    """
    rule = {key: options.pop(key) for key in OptimizerStepRule.__dataclass_fields__ if key in options}
    if "stock_mean" in rule:  # JSON knows its name only
        rule["stock_mean"] = StockMean(rule["stock_mean"])
    config = {"token_budget": 100, "buffer_size": 8, "global_batch_size": "fill", "balance": False}
    config_of = ODBConfig(**config | options)
    loader = ODBLoader(
        DataLoaderParts(
            dataset=[(k, 2 + k * 7 % 39) for k in range(num_rows)],
            sampler=range(num_rows) if sampler is None else sampler,
            collate_fn=Collator(bad),
            num_workers=workers[0],
            persistent_workers=True,
            multiprocessing_context=start_method if any(workers) else None,
        ),
        config_of,
        observer=Observer(hangs),
        rule=OptimizerStepRule(**{"accumulation": 2} | rule),
        seed=seed,
        ranks=Ranks(process_group, timeout_s),
        agree_on=agree_on,
    )
    try:
        yield loader
    finally:
        loader.close()


def main(function: str, kwargs: str, result: str) -> None:
    module, name = function.split(":")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get(GROUP_TIMEOUT, 300))))
    try:
        value = getattr(importlib.import_module(module), name)(dist.get_rank(), **json.loads(kwargs))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a peer may hold this one's threads
    Path(result).write_text(json.dumps(value))
    dist.destroy_process_group()
