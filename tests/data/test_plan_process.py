"""Planners run in a process of their own: the same plans, errors that tell where, no hang, nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from torch.utils.data import DataLoader
from toy import Rows, pad

from odb_factory.config import ODBConfig
from odb_factory.data.loader import ODBLoader
from odb_factory.data.observe import ItemObserver
from odb_factory.data.order import OptimizerStepRule, dismantle
from odb_factory.data.processes import PlanProcess
from odb_factory.errors import DataError
from odb_factory.planning import Budget, Cost, CostModel, make_metadata, plan_buffers, plan_optimizer_step

BUFFERS = [make_metadata([Cost(tokens) for tokens in (5, 9, 2, 7)], [0] * 4, exhausted=False) for _ in range(2)]


def alive(pid: int) -> bool:
    """Nobody may have reaped a process whose parent was killed."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def process() -> Iterator[PlanProcess]:
    process = PlanProcess()
    process.start()
    yield process
    process.close()


def fail(number: int) -> None:
    raise ValueError(f"number {number}")


class Unsendable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("stays here")


def fail_unsendably() -> None:
    raise Unsendable("a reason")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_its_plans_are_those_made_here(method: str) -> None:
    process, model = PlanProcess(method), CostModel()
    process.start()
    for layout in ("padded", "flat"):
        budget = Budget(16, layout=layout)
        planned = process(plan_optimizer_step, BUFFERS, budget, balance=True, model=model)
        assert planned == plan_optimizer_step(BUFFERS, budget, balance=True, model=model)
        where = {"seed": 1, "epoch": 0, "round_index": 3, "balance": True}
        assert process(plan_buffers, BUFFERS, budget, **where) == plan_buffers(BUFFERS, budget, **where)
    assert process(eval, "'torch' in __import__('sys').modules") is (method == "fork"), "it needs no torch"
    frozen = process(eval, "__import__('gc').get_freeze_count()")
    assert frozen > gc.get_freeze_count() * (method == "fork"), "no collection looks through what it was forked with"
    process.close()


def test_errors_are_those_of_the_function_and_say_where(process: PlanProcess) -> None:
    with pytest.raises(ValueError, match="number 3") as raised:
        process(fail, 3)
    assert "in fail" in raised.value.__notes__[0]
    with pytest.raises(RuntimeError, match="a reason"):
        process(fail_unsendably)
    assert process(max, 1, 2) == 2


def test_one_that_is_killed_is_said_in_a_line(process: PlanProcess) -> None:
    threading.Timer(0.5, os.kill, (process(os.getpid), signal.SIGKILL)).start()
    with pytest.raises(DataError, match="the process that plans ended by itself, exit code -9; look for"):
        process(time.sleep, 60)
    with pytest.raises(DataError, match="the process that plans ended by itself"):
        process(max, 1, 2)


def test_close_ends_it_whatever_it_does() -> None:
    process = PlanProcess()
    process.start()
    pid, failures = process(os.getpid), []

    def plan() -> None:
        try:
            process(time.sleep, 60)
        except DataError as error:
            failures.append(error)

    planning = threading.Thread(target=plan)
    planning.start()
    time.sleep(0.2)
    process.close()
    planning.join(10)
    process.close()
    assert not planning.is_alive() and len(failures) == 1 and not alive(pid)
    PlanProcess().close()  # one that was never begun


def test_it_ends_with_its_parent() -> None:
    code = (
        "import os, time\n"
        "from odb_factory.data.processes import PlanProcess\n"
        "process = PlanProcess(); process.start()\n"
        "print(process(os.getpid), flush=True)\n"
        "process(time.sleep, 60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(pid)


@pytest.mark.parametrize("block", [{}, {"global_batch_size": "fill", "buffer_size": 16}], ids=["keep", "fill"])
def test_a_loader_with_workers_plans_in_it_and_ends_in_a_line_if_it_is_killed(block: dict[str, object]) -> None:
    stock = DataLoader(Rows(), batch_size=2, collate_fn=pad, num_workers=1)
    config = ODBConfig(token_budget=128, **block)
    rule = OptimizerStepRule(batch_size=2)
    loader = ODBLoader(dismantle(stock, seed=0), config, observer=ItemObserver(pad), rule=rule)
    try:
        batches = iter(loader)
        next(batches)
        (planning,) = [child for child in multiprocessing.active_children() if child.name == "odb-planner"]
        planning.kill()
        with pytest.raises(DataError, match="the process that plans ended by itself"):
            list(batches)
    finally:
        loader.close()
