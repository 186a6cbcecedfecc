"""What planning costs as ranks are added: time on one core and bytes on the wire, a round.

Every rank tells all others what its buffer holds, a few integers a sample, and plans the round of all of them (fill),
or the optimizer step of all of them (keep). Here the messages of all ranks are made and read in one process, with the
functions that a training uses; only the network is left out.

Last, kept optimizer steps whose samples travel within groups of ranks only (flat): what that costs in step efficiency,
and what it saves. There the network is a model: each of log2(ranks of a group) exchanges takes `LATENCY_S`, and a rank
receives `BYTES_A_SECOND`.

    python examples/benchmark/scale.py
    python examples/benchmark/scale.py --ranks 8 64 --window 256 --rounds 5
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cuts import FIXED_COST, Epoch, least
from simulation import draw

from odb_factory.comm.coordinator import RankMetadata, decode, encode
from odb_factory.plan.simulate import rounds
from odb_factory.planning import Budget, BufferMetadata, CostModel, plan_buffers, plan_in_groups, plan_optimizer_step
from odb_factory.planning.keep import group_of, outline, plan_group

WORKLOAD = "ShareGPT4o"
WORKLOAD_OF_GROUPS = "UltraChat"
"""Here ranks wait for the fullest, not for the longest sample: the more ranks share samples, the less they wait."""
LATENCY_S, BYTES_A_SECOND = 50e-6, 1e9


@dataclass(frozen=True)
class Measured:
    """A round of `ranks` ranks, the median over all rounds. Times in seconds of one core.

    steps: that the round takes. encode_s: encode one window. read_s: decode the messages of all ranks.
    plan_s: choose the steps of all. received: bytes from all ranks, as they travel (padded to the longest).
    """

    ranks: int
    balance: bool
    layout: str
    steps: float
    encode_s: float
    read_s: float
    plan_s: float
    received: float

    @property
    def round_s(self) -> float:
        return self.encode_s + self.read_s + self.plan_s


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    result = function()
    return result, time.process_time() - started


def measure(
    ranks: int, window: int, token_budget: int, num_rounds: int, balance: bool = False, layout: str = "padded"
) -> Measured:
    """Plan `num_rounds` rounds of `ranks` ranks whose samplers never run dry; windows are refilled between them."""
    budget, rows = Budget(token_budget, layout=layout), []
    epoch = rounds(draw(WORKLOAD, ranks, 4 * window), budget, window, balance=balance, endless=True)
    for one in itertools.islice(epoch, num_rounds):
        messages, encode_s = timed(lambda one=one: [encode(RankMetadata(held, Counter())) for held in one.windows])
        reports, read_s = timed(lambda messages=messages: [decode(message) for message in messages])
        windows = [report.buffer for report in reports]
        plan, plan_s = timed(
            lambda windows=windows: plan_buffers(windows, budget, seed=0, epoch=0, round_index=0, balance=balance)
        )
        size = np.dtype(np.int64).itemsize + max(map(len, messages))
        rows.append((len(plan.totals), encode_s / ranks, read_s, plan_s, ranks * size))
    return Measured(ranks, balance, layout, *(statistics.median(column) for column in zip(*rows)))


@dataclass(frozen=True)
class MeasuredStep:
    """Planning one optimizer step that is kept, assignment and totals included: the median, in seconds of one core."""

    ranks: int
    samples: int
    balance: bool
    layout: str
    micro_steps: float
    plan_s: float


def measure_kept(
    ranks: int, batch_size: int, token_budget: int, count: int, balance: bool, layout: str = "padded"
) -> MeasuredStep:
    """Plan `count` optimizer steps of `batch_size` samples."""
    budget, rows = Budget(token_budget, layout=layout), []
    epoch = Epoch(WORKLOAD, ranks, size=count * batch_size // ranks)
    for shares in epoch.optimizer_steps(batch_size, count):
        buffers = [BufferMetadata(share, exhausted=False) for share in shares]
        plan, plan_s = timed(lambda buffers=buffers: plan_optimizer_step(buffers, budget, balance=balance))
        rows.append((len(plan.totals), plan_s))
    return MeasuredStep(ranks, batch_size, balance, layout, *(statistics.median(column) for column in zip(*rows)))


@dataclass(frozen=True)
class MeasuredGroups:
    """One optimizer step whose samples stay within groups of `group_size` ranks: medians.

    efficiency, bound: real tokens by what ranks wait for, and what no plan beats. moved: part of all samples.
    plan_s: one group, in seconds of one core. received: bytes that each rank is told by all, metadata and the outlines
    of the groups' plans. network_s: by the model above.
    """

    ranks: int
    group_size: int
    efficiency: float
    bound: float
    moved: float
    plan_s: float
    received: float
    network_s: float


def measure_groups(ranks: int, group_size: int, batch_size: int, token_budget: int, count: int) -> MeasuredGroups:
    """Plan `count` optimizer steps of `batch_size` samples."""
    budget, rows = Budget(token_budget, layout="flat"), []
    epoch = Epoch(WORKLOAD_OF_GROUPS, ranks, size=count * batch_size // ranks)
    for shares in epoch.optimizer_steps(batch_size, count):
        buffers = [BufferMetadata(share, exhausted=False) for share in shares]
        group = group_of(0, ranks, group_size)
        own, plan_s = timed(functools.partial(plan_group, buffers, budget, group, model=CostModel()))
        plan = plan_in_groups(buffers, budget, group_size)
        real = sum(int(share["tokens"].sum()) for share in shares) / ranks
        waited = sum(FIXED_COST + totals.max_rank_tokens for totals in plan.totals)
        moved = sum(totals.moved for totals in plan.totals) / batch_size
        told = max(len(encode(RankMetadata(held, Counter()))) for held in buffers)
        received = ranks * (told + len(outline(own, group).to_bytes()))
        network_s = 2 * math.ceil(math.log2(ranks)) * LATENCY_S + received / BYTES_A_SECOND
        bound = real / least(shares, token_budget)
        rows.append((real / waited, bound, moved, plan_s, received, network_s))
    return MeasuredGroups(ranks, group_size, *(statistics.median(column) for column in zip(*rows)))


def table_of_groups(results: Sequence[MeasuredGroups]) -> str:
    lines = [
        "| ranks | ranks of a group | step efficiency | bound | moved | plan | received | network |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        lines.append(
            f"| {result.ranks:,} | {result.group_size:,} | {result.efficiency:.3f} | {result.bound:.3f} | "
            f"{result.moved:.2f} | {1e3 * result.plan_s:.0f} ms | {result.received / 1024:,.0f} KiB | "
            f"{1e3 * result.network_s:.1f} ms |"
        )
    return "\n".join(lines)


def _mode(result: Measured | MeasuredStep) -> str:
    return ", ".join(["flat"] * (result.layout == "flat") + ["`balance: false`"] * (not result.balance))


def table_of_kept(results: Sequence[MeasuredStep]) -> str:
    lines = ["| ranks | samples of an optimizer step | | micro-steps | plan |", "|--:|--:|---|--:|--:|"]
    for result in results:
        lines.append(
            f"| {result.ranks:,} | {result.samples:,} | {_mode(result)} | {result.micro_steps:.0f} | "
            f"{1e3 * result.plan_s:.0f} ms |"
        )
    return "\n".join(lines)


def table(results: Sequence[Measured]) -> str:
    """The results as Markdown."""
    lines = [
        "| ranks | | steps a round | encode own window | read all messages | plan | plan a step | received a round |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        lines.append(
            f"| {result.ranks:,} | {_mode(result)} | {result.steps:.0f} | "
            f"{1e3 * result.encode_s:.1f} ms | {1e3 * result.read_s:.1f} ms | {1e3 * result.plan_s:.0f} ms | "
            f"{1e3 * result.round_s / result.steps:.1f} ms | {result.received / 1024:,.0f} KiB |"
        )
    return "\n".join(lines)


def growth(first: Measured, last: Measured) -> dict[str, float]:
    """By how much time a step and bytes have grown from one to the other; 1 is linear in ranks, less is better."""
    factor = last.ranks / first.ranks
    time_a_step = (last.round_s / last.steps) / (first.round_s / first.steps)
    return {"time": time_a_step / factor, "bytes": last.received / first.received / factor}


def main(arguments: Sequence[str] | None = None) -> list[Measured | MeasuredStep | MeasuredGroups]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--window", type=int, default=1024, help="samples a rank holds (buffer_size)")
    parser.add_argument("--token-budget", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples-a-rank", type=int, default=8, help="of an optimizer step that is kept")
    parser.add_argument("--grouped", type=int, nargs="*", default=[1024, 16384], help="so many ranks in groups")
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[64, 256, 1024], help="ranks of a group")
    parser.add_argument("--output-dir", type=Path, help="write scale.json there")
    chosen = parser.parse_args(arguments)
    print(f"windows of {chosen.window:,} samples ({WORKLOAD}), token_budget {chosen.token_budget:,}; one core\n")
    results: list[Measured] = []
    for layout, balance in itertools.product(("padded", "flat"), (False, True)):
        mine = [
            measure(ranks, chosen.window, chosen.token_budget, chosen.rounds, balance, layout) for ranks in chosen.ranks
        ]
        print(table(mine))
        grown = growth(mine[0], mine[-1])
        span = f"from {chosen.ranks[0]:,} to {chosen.ranks[-1]:,} ranks"
        print(f"\ngrowth {span}, 1.00 being linear: time {grown['time']:.2f}, bytes {grown['bytes']:.2f}\n")
        results += mine
    kept = [
        measure_kept(ranks, chosen.samples_a_rank * ranks, chosen.token_budget, 2 * chosen.rounds + 1, balance, layout)
        for layout in ("padded", "flat")
        for balance in (True, False)
        for ranks in chosen.ranks
    ]
    print("one optimizer step that is kept\n")
    print(table_of_kept(kept))
    grouped = [
        measure_groups(ranks, size, chosen.samples_a_rank * ranks, chosen.token_budget, chosen.rounds)
        for ranks in chosen.grouped
        for size in chosen.group_sizes
        if size <= ranks
    ]
    print("\none optimizer step that is kept, flat, in groups of ranks\n")
    print(table_of_groups(grouped))
    if chosen.output_dir:
        chosen.output_dir.mkdir(parents=True, exist_ok=True)
        figures = [dataclasses.asdict(one) for one in (*results, *kept, *grouped)]
        (chosen.output_dir / "scale.json").write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return [*results, *kept, *grouped]


if __name__ == "__main__":
    main()
