"""What planning an optimizer step costs as ranks are added, in seconds of one core, and what groups of ranks cost in
step efficiency (samples travel within a group only).

    python examples/benchmark/scale.py
    python examples/benchmark/scale.py --ranks 8 64 --samples-a-rank 61
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import page
from contestants import CUTTERS, cut_by
from simulation import FIXED_COST, PROFILES, Epoch, bound

from odb_factory.planning import Budget, BufferMetadata, CostModel, plan_in_groups, plan_optimizer_step
from odb_factory.planning.keep import group_of, plan_group

PROFILE, PROFILE_OF_GROUPS = "ShareGPT4o", "UltraChat"
"""With UltraChat's lengths ranks wait for the fullest rank, not for the longest sample: there groups cost most."""


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    result = function()
    return result, time.process_time() - started


def buffers_of(profile: str, ranks: int, batch_size: int, count: int) -> list[list[BufferMetadata]]:
    """Of `count` optimizer steps the samples of each rank."""
    epoch = Epoch(profile, ranks, size=count * batch_size // ranks)
    steps = epoch.optimizer_steps(batch_size, count)
    return [[BufferMetadata(rows, exhausted=False) for rows in shares] for shares in steps]


def whole(ranks: int, batch_size: int, budget: Budget, balance: bool, count: int) -> dict[str, float]:
    """All ranks plan together: medians."""
    found = []
    for buffers in buffers_of(PROFILE, ranks, batch_size, count):
        plan, seconds = timed(functools.partial(plan_optimizer_step, buffers, budget, balance=balance))
        found.append((len(plan.totals), seconds))
    return dict(zip(("micro_steps", "plan_s"), map(statistics.median, zip(*found))))


def grouped(ranks: int, group_size: int, batch_size: int, budget: Budget, count: int) -> dict[str, float]:
    """plan_s: of one group. moved: samples that change rank, as a share. bound: what no plan of all ranks exceeds."""
    found = []
    for buffers in buffers_of(PROFILE_OF_GROUPS, ranks, batch_size, count):
        group = group_of(0, ranks, group_size)
        _, seconds = timed(functools.partial(plan_group, buffers, budget, group, model=CostModel()))
        plan = plan_in_groups(buffers, budget, group_size)
        tokens = sum(totals.tokens for totals in plan.totals)
        waited = ranks * sum(FIXED_COST + totals.max_rank_tokens for totals in plan.totals)
        found.append((tokens / waited, sum(totals.moved for totals in plan.totals) / batch_size, seconds))
    figures = dict(zip(("efficiency", "moved", "plan_s"), map(statistics.median, zip(*found))))
    epoch = Epoch(PROFILE_OF_GROUPS, ranks, size=count * batch_size // ranks)
    return figures | {"bound": bound(epoch, batch_size, count)["efficiency"]}


def beside(ranks: int, batch_size: int, token_budget: int, count: int) -> tuple[list[dict[str, Any]], str]:
    """Ways to cut a list of lengths by a token budget: figures, and their table."""
    figures, cells = [], []
    epochs = {profile: Epoch(profile, ranks, size=count * batch_size // ranks) for profile in PROFILES}
    for name, cutter in CUTTERS.items():
        row = [name]
        for profile, epoch in epochs.items():
            cut, seconds = cut_by(cutter, epoch, batch_size, count, token_budget)
            found = cut.figures()
            figures.append({"ranks": ranks, "name": name, "profile": profile, "plan_s": seconds} | found)
            row.append(f"{found['micro_steps']:.1f}, {found['efficiency']:.3f}, {found['peak'] / token_budget:.0%}")
        mean = statistics.mean(one["plan_s"] for one in figures if one["name"] == name)
        cells.append([*row, f"{1e3 * mean:.0f} ms"])
    bounds = [f"{bound(epoch, batch_size, count, token_budget)['efficiency']:.3f}" for epoch in epochs.values()]
    cells.append(["what no cut can exceed", *bounds, ""])
    return figures, page.table([f"{ranks:,} ranks, N = {batch_size:,}", *PROFILES, "time"], cells)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--token-budget", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps; the figures are their medians")
    parser.add_argument("--samples-a-rank", type=int, default=8, help="of an optimizer step")
    parser.add_argument("--grouped", type=int, nargs="*", default=[1024, 16384], help="ranks that plan in groups")
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[64, 256, 1024], help="ranks of a group")
    parser.add_argument("--output-dir", type=Path, default=Path("saves/benchmark_scale"), help="(%(default)s)")
    parser.add_argument("--beside", action="store_true", help="the planner beside other partitions, and nothing else")
    given = parser.parse_args(arguments)
    if given.beside:
        sizes = [(ranks, given.samples_a_rank * ranks, given.token_budget, given.steps) for ranks in given.ranks]
        parts = [beside(*size) for size in sizes]
        first, *more = [table for _, table in parts]
        page.write(given.output_dir, [one for found, _ in parts for one in found], [first], more)
        return
    figures, rows = [], []
    for layout, balance, ranks in itertools.product(("flat", "padded"), (True, False), given.ranks):
        batch_size, budget = given.samples_a_rank * ranks, Budget(given.token_budget, layout=layout)
        row = whole(ranks, batch_size, budget, balance, given.steps)
        figures.append({"ranks": ranks, "samples": batch_size, "layout": layout, "balance": balance} | row)
        plan = f"{1e3 * row['plan_s']:.0f} ms"
        rows.append([layout, str(balance).lower(), f"{ranks:,}", f"{batch_size:,}", f"{row['micro_steps']:.0f}", plan])
    tables = [page.table(["layout", "balance", "ranks", "samples", "micro-steps", "plan"], rows, num_text=2)]
    rows, budget = [], Budget(given.token_budget, layout="flat")
    for ranks, size in itertools.product(given.grouped, given.group_sizes):
        if size <= ranks:
            row = grouped(ranks, size, given.samples_a_rank * ranks, budget, given.steps)
            figures.append({"ranks": ranks, "group_size": size} | row)
            efficiency = f"{row['efficiency']:.3f} ({row['bound']:.3f})"
            rows.append([f"{ranks:,}", f"{size:,}", efficiency, f"{row['moved']:.2f}", f"{1e3 * row['plan_s']:.0f} ms"])
    heads = ["ranks", "ranks of a group", "step efficiency (bound)", "moved", "plan of a group"]
    page.write(given.output_dir, figures, [*tables, page.table(heads, rows, num_text=0)])


if __name__ == "__main__":
    main()
