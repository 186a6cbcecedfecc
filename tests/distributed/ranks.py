"""Ranks without a training: processes that each run one function."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import forks
from support import free_port

TESTS = Path(__file__).parents[1]
GROUP_TIMEOUT = "ODB_TEST_GROUP_TIMEOUT"
"""Environment variable: the timeout of the default process group (seconds), as set by `ddp_timeout`."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: the result of its function (None if it raised), and its output."""

    returncode: int
    value: Any
    output: str


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
    """Run `module:function(rank, **kwargs)` in one process per rank, connected by gloo.

    kwargs and the returned value have JSON types. Fails the test if a rank has not ended in time, or has failed (unless
    it `may_fail`). env: in addition to the environment of this process.
    ends_with: the rank at whose end the others are killed, as by a launcher (None: each ends by itself).
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
                process.send_signal(signal.SIGABRT)  # faulthandler writes its stack
    finally:
        for process in processes:
            _kill_group(process)
    outputs = [log.read_text(errors="replace") for log in logs]
    if hung:
        pytest.fail(f"ranks {hung} did not end within {limit_s} s:\n" + "\n".join(text[-4000:] for text in outputs))
    values = [json.loads(path.read_text()) if path.exists() else None for path in results]
    assert may_fail or not any(process.returncode for process in processes), "\n".join(text[-3000:] for text in outputs)
    return [Outcome(process.returncode, *rest) for process, *rest in zip(processes, values, outputs)]


def _kill_group(process: forks.Forked) -> None:
    """End a rank and its workers, which share its process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait(10)


def main(function: str, kwargs: str, result: str) -> None:
    module, name = function.split(":")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get(GROUP_TIMEOUT, 300))))
    try:
        value = getattr(importlib.import_module(module), name)(dist.get_rank(), **json.loads(kwargs))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # threads may wait for another rank
    Path(result).write_text(json.dumps(value))
    dist.destroy_process_group()
