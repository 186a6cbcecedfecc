"""The trainer is killed: within 10 s none of its data workers is alive, whatever it and they were doing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed.launch import Run, parent
from distributed.ranks import TESTS, Collator, Observer
from distributed.rows import row
from support import MARK, end_marked_processes, marked_processes, proc_words, shimmed, training_config, write_dataset

from odb_factory.config import ODBConfig
from odb_factory.data.loader import ODBLoader
from odb_factory.data.order import DataLoaderParts, OptimizerStepRule

LIMIT_S = 10
"""From the end of the trainer to that of its last worker."""
START_S = 120


def all_end(alive: Callable[[], dict[int, list[str]]]) -> dict[int, list[str]]:
    """What is still alive at the limit."""
    until = time.monotonic() + LIMIT_S
    while (left := alive()) and time.monotonic() < until:
        time.sleep(0.1)
    return left


# A toy loader in each stage of its workers' lives


class SlowCollator(Collator):
    """Begins, and is never done."""

    def __init__(self, begun: Path):
        super().__init__()
        self.begun = begun

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        self.begun.touch()
        time.sleep(3600)


class SlowStart(Observer):
    """Begins to be unpickled, and is never done."""

    def __init__(self, begun: Path):
        super().__init__()
        self.begun = begun

    def __setstate__(self, state: dict[str, Any]) -> None:
        state["begun"].touch()
        time.sleep(3600)


def toy(
    start_method: str, rows: list[int], workers: tuple[int, int], *, observer: Any = None, collate_fn: Any = None
) -> ODBLoader:
    return ODBLoader(
        DataLoaderParts(
            dataset=list(enumerate(rows)),
            sampler=range(len(rows)),
            collate_fn=collate_fn or Collator(),
            num_workers=workers[0],
            multiprocessing_context=start_method,
        ),
        ODBConfig(token_budget=10**6, buffer_size=1, global_batch_size="fill", balance=False),
        observer=observer or Observer(),
        rule=OptimizerStepRule(),
    )


def be_killed(start_method: str, folder: str) -> None:
    """Have a worker blocked by a full pipe, one in a collation, and one that is still reading its arguments."""
    begun = [Path(folder, name) for name in ("collation", "arguments")]
    # A chunk of rows has a megabyte, and one chunk is asked for.
    full = toy(start_method, [50_000] * 100, (1, 0))
    full.begin()
    slow = iter(toy(start_method, [5] * 20, (1, 0), collate_fn=SlowCollator(begun[0])))
    threading.Thread(target=next, args=(slow,), daemon=True).start()
    if start_method == "fork":
        begun.pop()
    else:
        starting = toy(start_method, [5] * 20, (1, 0), observer=SlowStart(begun[1]))
        threading.Thread(target=starting.begin, daemon=True).start()
    while not all(path.exists() for path in begun):
        time.sleep(0.05)
    time.sleep(1)  # the pipe is full by now
    print("ready", flush=True)
    time.sleep(3600)


@pytest.mark.parametrize(
    "start_method", ["fork", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("forkserver", "spawn"))]
)
def test_no_worker_outlives_a_killed_process(start_method: str, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    code = f"from distributed.test_killed import be_killed; be_killed({start_method!r}, {str(tmp_path)!r})"
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS)])
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {MARK: mark, "PYTHONPATH": path},
            start_new_session=True,
        )
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", (tmp_path / "log").read_text()
        num_workers = 2 if start_method == "fork" else 3
        assert len(marked_processes(mark)) > num_workers
        process.kill()
        process.wait(10)
        assert not all_end(lambda: marked_processes(mark))
    finally:
        watchdog.cancel()
        end_marked_processes(mark)


# Real trainings

NUM_ROWS = 600


def lines(run: Run) -> list[dict[str, Any]]:
    """The audit of rank 0 until now."""
    audit = run.output_dir / "odb_audit_rank0.jsonl"
    whole = audit.read_text().rpartition("\n")[0] if audit.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def said(run: Run, text: str) -> bool:
    ended = run.so_far()
    return any(text in part for part in (*ended.ranks, *ended.launchers))


def trainer(run: Run, under_torchrun: bool) -> int:
    """The process of rank 0; without torchrun it is what was launched."""
    return run.rank_pid(0) if under_torchrun else run.launchers[0].pid


def of_rank_0(run: Run, under_torchrun: bool) -> dict[int, list[str]]:
    processes = run.processes()
    return {
        pid: words for pid, words in processes.items() if not under_torchrun or "RANK=0" in proc_words(pid, "environ")
    }


def num_workers(run: Run, under_torchrun: bool) -> int:
    """Children of rank 0 that are forks of it, or begun by spawn, or the fork server."""
    try:
        pid = trainer(run, under_torchrun)
    except StopIteration:
        return 0
    words = proc_words(pid, "cmdline")
    children = [line for child, line in run.processes().items() if parent(child) == pid]
    return sum(
        line == words or any("forkserver" in w or "-multiprocessing-fork" in w for w in line) for line in children
    )


MOMENTS: dict[str, Callable[[Run, bool], bool]] = {
    "before the workers": lambda run, _: said(run, "training example"),
    "first worker": lambda run, under: num_workers(run, under) >= 1,
    "all workers": lambda run, under: num_workers(run, under) >= 2,
    "first plan": lambda run, _: said(run, "Running training"),
    "first step": lambda run, _: len(lines(run)) >= 1,
    "mid-epoch": lambda run, _: len(lines(run)) >= 20,
    "collation": lambda run, _: (run.folder / "collates").exists(),
    "end of an epoch": lambda run, _: sum(len(line["ids"]) for line in lines(run)) >= NUM_ROWS - 30,
    "next epoch": lambda run, _: any(line["epoch"] == 1 for line in lines(run)),
    "exit": lambda run, _: said(run, "Training completed") or (run.output_dir / "odb_summary.json").exists(),
}


def kill_one(
    model: Path,
    folder: Path,
    moment: str,
    ranks: int,
    under_torchrun: bool,
    how: signal.Signals = signal.SIGKILL,
    more_words: int = 0,
    start_method: str | None = None,
) -> None:
    write_dataset(folder, {"rows": [row(3 + more_words + (k * 11) % 38) for k in range(NUM_ROWS)]})
    epochs = 1 if moment == "exit" else 3
    config = training_config(
        model,
        folder,
        folder / "out",
        dataset="rows",
        disable_shuffling=True,
        num_train_epochs=epochs,
        odb={"token_budget": 256, "buffer_size": 32, "audit": True},
    )
    if under_torchrun:
        config["ddp_backend"] = "gloo"
    env = {"ODB_TEST_COLLATES": str(folder / "out_logs" / "collates")}
    env |= shimmed("endless_collation") if moment == "collation" else {}
    env |= shimmed("start_method") | {"ODB_TEST_START_METHOD": start_method} if start_method else {}
    env |= {} if under_torchrun else {"FORCE_TORCHRUN": "0"}
    with Run(config, num_ranks=ranks, env=env) as run:
        run.wait_until(lambda: MOMENTS[moment](run, under_torchrun), f"never came to {moment}")
        pid = trainer(run, under_torchrun)
        os.kill(pid, how)
        if how != signal.SIGKILL:  # it may take the time to end its workers itself
            all_end(lambda: {pid: words} if (words := proc_words(pid, "cmdline")) else {})
        if not under_torchrun:
            run.launchers[0].wait(10)
        left = all_end(lambda: of_rank_0(run, under_torchrun))
        assert not left, f"{left}\n{run.so_far()}"
        run.end(60)
        assert not run.left_behind()


def test_no_worker_outlives_a_killed_training(tiny_text: Path, tmp_path: Path) -> None:
    """One worker is blocked in a collation, the other by a full pipe: rows are long, and the buffer is full."""
    kill_one(tiny_text, tmp_path, "collation", 1, False, more_words=1500)


@pytest.mark.nightly
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("ranks", "under_torchrun"), [(1, False), (1, True), (2, True)], ids=["plain", "1", "2"])
def test_whenever_a_training_is_killed(
    moment: str, ranks: int, under_torchrun: bool, tiny_text: Path, tmp_path: Path
) -> None:
    kill_one(tiny_text, tmp_path, moment, ranks, under_torchrun)


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["first worker", "mid-epoch"])
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_whatever_the_start_method_of_a_killed_training(
    start_method: str, moment: str, tiny_text: Path, tmp_path: Path
) -> None:
    kill_one(tiny_text, tmp_path, moment, 1, False, start_method=start_method)


@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGABRT])
@pytest.mark.parametrize(("ranks", "under_torchrun"), [(1, False), (2, True)], ids=["plain", "2"])
def test_whatever_signal_ends_a_training(
    how: signal.Signals, ranks: int, under_torchrun: bool, tiny_text: Path, tmp_path: Path
) -> None:
    kill_one(tiny_text, tmp_path, "mid-epoch", ranks, under_torchrun, how)
