"""What a plan costs the training thread: the time that a thread of pure Python loses beside it.

The worst case: such a thread needs the interpreter lock all the time, while most of a step is spent in kernels. Once
the plan is made by another thread of the process, as a loader without worker processes would, once by a process of its
own, as all others do. Counted with it is what else the planning thread does: reading the messages of all ranks.

    python examples/benchmark/beside.py
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuts import TOKEN_BUDGET, Epoch

from odb_factory.comm.coordinator import RankMetadata, decode, encode
from odb_factory.config import ODBConfig
from odb_factory.data.plan_process import Compute, PlanProcess, compute_here
from odb_factory.planning import Budget, BufferMetadata, CostModel, plan_optimizer_step
from odb_factory.planning.keep import group_of, plan_group

WORKLOAD = "ShareGPT4o"
GROUP_SIZE = ODBConfig.balance_group_size
"""`balance_group_size`: of more ranks than that, each plans for its group, where the layout is flat."""
SHARE = 0.02
TURN = 10_000
"""Rounds of a loop between two looks whether all is planned."""


@dataclass(frozen=True)
class Lost:
    """in_a_thread, in_a_process: seconds that one plan costs the thread beside it, medians."""

    ranks: int
    samples: int
    layout: str
    in_a_thread: float
    in_a_process: float


def lost(plan: Callable[[], Any], count: int) -> float:
    """Seconds a plan that this thread, which always wants to run, does not run while another makes `count` of them."""
    planning = threading.Thread(target=lambda: [plan() for _ in range(count)])
    planning.start()
    started, ran = time.perf_counter(), time.thread_time()
    while planning.is_alive():
        for _ in range(TURN):
            pass
    return (time.perf_counter() - started - (time.thread_time() - ran)) / count


def measure(ranks: int, batch_size: int, layout: str, rounds: int, count: int) -> Lost:
    epoch, budget = Epoch(WORKLOAD, ranks, size=batch_size // ranks), Budget(TOKEN_BUDGET, layout=layout)
    (shares,) = epoch.optimizer_steps(batch_size, 1)
    messages = [encode(RankMetadata(BufferMetadata(share, exhausted=False), Counter())) for share in shares]
    process = PlanProcess()
    process.start()

    def plan(compute: Compute) -> None:
        buffers = [decode(message).buffer for message in messages]
        if layout == "flat" and ranks > GROUP_SIZE:
            compute(plan_group, buffers, budget, group_of(0, ranks, GROUP_SIZE), model=CostModel()).checksum()
        else:
            compute(plan_optimizer_step, buffers, budget, balance=True).checksum()

    try:
        found: dict[Compute, list[float]] = {compute_here: [], process: []}
        for _ in range(rounds):
            for compute, seconds_lost in found.items():
                seconds_lost.append(lost(lambda compute=compute: plan(compute), count))
    finally:
        process.close()
    return Lost(ranks, batch_size, layout, *map(statistics.median, found.values()))


def table(results: list[Lost]) -> str:
    lines = [
        "| ranks | N | layout | lost to a planning thread | lost beside a process | which is 2 % of a step of |",
        "|--:|--:|---|--:|--:|--:|",
    ]
    for one in results:
        lines.append(
            f"| {one.ranks:,} | {one.samples:,} | {one.layout} | {1e3 * one.in_a_thread:.1f} ms | "
            f"{1e3 * one.in_a_process:.1f} ms | {one.in_a_process / SHARE:.2f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", nargs="+", default=["8x256", "64x2048", "256x2048", "1024x8192"], help="ranks x N")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plans", type=int, default=5, help="of a round")
    parser.add_argument("--output-dir", type=Path, help="write beside.json there")
    given = parser.parse_args()
    results = []
    for layout in ("flat", "padded"):
        for step in given.steps:
            ranks, batch_size = map(int, step.split("x"))
            results.append(measure(ranks, batch_size, layout, given.rounds, given.plans))
    print(table(results))
    if given.output_dir:
        given.output_dir.mkdir(parents=True, exist_ok=True)
        figures = [dataclasses.asdict(one) for one in results]
        (given.output_dir / "beside.json").write_text(json.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
