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
from distributed.ranks import TESTS
from distributed.rows import row
from support import MARK, end_marked_processes, marked_processes, proc_words, shimmed, training_config, write_dataset
from toy import core_loader

from odb_factory.data.loader import ODBLoader

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


class Slow:
    """A collator that begins, and is never done; `while_unpickled`: an observer that never comes out of its pickle."""

    def __init__(self, begun: Path, while_unpickled: bool = False):
        self.begun, self.while_unpickled = begun, while_unpickled

    def __call__(self, items: Any) -> Any:
        self.begun.touch()
        time.sleep(3600)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.while_unpickled:
            self(None)


NEVER_CLOSED: list[Any] = []


def opened(rows: list[int], start_method: str, **options: Any) -> ODBLoader:
    options |= {"token_budget": 10**6, "buffer_size": 1, "num_workers": 1, "multiprocessing_context": start_method}
    NEVER_CLOSED.append(core_loader(rows, **options))
    return NEVER_CLOSED[-1].__enter__()


def be_killed(start_method: str, folder: str) -> None:
    """Have a worker blocked by a full pipe, one in a collation, and one that is still reading its arguments."""
    begun = [Path(folder, name) for name in ("collation", "arguments")]
    # A chunk of rows has a megabyte, and one chunk is asked for.
    full = opened([50_000] * 100, start_method)
    full.begin()
    slow = iter(opened([5] * 20, start_method, collate_fn=Slow(begun[0])))
    threading.Thread(target=next, args=(slow,), daemon=True).start()
    if start_method == "fork":
        begun.pop()
    else:
        starting = opened([5] * 20, start_method, observer=Slow(begun[1], while_unpickled=True))
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


PLAIN, TORCHRUN_1, TORCHRUN_2 = (1, False), (1, True), (2, True)
"""(ranks, under torchrun)."""
CELLS: list[tuple[str, tuple[int, bool], dict[str, Any]]] = [
    *((moment, ranks, {}) for moment in MOMENTS for ranks in (PLAIN, TORCHRUN_1, TORCHRUN_2)),
    *(
        (moment, PLAIN, {"start_method": name})
        for moment in ("first worker", "mid-epoch")
        for name in ("spawn", "forkserver")
    ),
    *(("mid-epoch", ranks, {"how": f"SIG{name}"}) for ranks in (PLAIN, TORCHRUN_2) for name in ("TERM", "INT", "ABRT")),
]


@pytest.mark.parametrize(
    ("moment", "ranks", "changes"),
    [
        # One worker is blocked in a collation, the other by a full pipe: rows are long, and the buffer is full.
        ("collation", PLAIN, {"more_words": 1500}),
        *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in CELLS),
    ],
    ids=str,
)
def test_no_worker_outlives_a_killed_training(
    moment: str, ranks: tuple[int, bool], changes: dict[str, Any], tiny_text: Path, tmp_path: Path
) -> None:
    """Whenever, whatever the start method, and whatever signal ends it."""
    num_ranks, under_torchrun = ranks
    words = 3 + changes.get("more_words", 0)
    write_dataset(tmp_path, {"rows": [row(words + (k * 11) % 38) for k in range(NUM_ROWS)]})
    config = training_config(
        tiny_text,
        tmp_path,
        tmp_path / "out",
        dataset="rows",
        disable_shuffling=True,
        num_train_epochs=1 if moment == "exit" else 3,
        odb={"token_budget": 256, "buffer_size": 32, "audit": True},
        ddp_backend="gloo" if under_torchrun else None,
    )
    env = {"ODB_TEST_COLLATES": str(tmp_path / "out_logs" / "collates")}
    env |= shimmed("endless_collation") if moment == "collation" else {}
    env |= {} if under_torchrun else {"FORCE_TORCHRUN": "0"}
    if "start_method" in changes:
        env |= shimmed("start_method") | {"ODB_TEST_START_METHOD": changes["start_method"]}
    how = signal.Signals[changes.get("how", "SIGKILL")]
    with Run(config, num_ranks=num_ranks, env=env) as run:
        run.wait_until(lambda: MOMENTS[moment](run, under_torchrun), f"never came to {moment}")
        pid = trainer(run, under_torchrun)
        os.kill(pid, how)
        if how != signal.SIGKILL:  # it may take the time to end its workers itself
            all_end(lambda: {pid: line} if (line := proc_words(pid, "cmdline")) else {})
        if not under_torchrun:
            run.launchers[0].wait(10)
        left = all_end(lambda: of_rank_0(run, under_torchrun))
        assert not left, f"{left}\n{run.so_far()}"
        run.end(60)
        assert not run.left_behind()
