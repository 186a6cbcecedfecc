"""The best of the tables: the beginning of `benchmarks.md`, and README's. Of the parts that are done."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import demo
from report import furthest_loss, shares
from train_workloads import FIXED, ONE_ROW

PLANNED = {
    "fixed batches, best of 1, 2, 4 and 8 rows": r"fixed, .*",
    "length-grouped, best of 1, 2, 4 and 8 rows (needs all lengths before training)": r"length-grouped, .*",
    "transformers' batch_rebalance, best of 1, 2, 4 and 8 rows (the same)": r"batch_rebalance.*",
    "LLaMA-Factory's packing (text only, another N)": r"LLaMA-Factory's packing, neat_packing",
    "TRL's bfd packing, padding-free (text only, another N)": r"TRL's bfd packing.*",
    "online-dynamic-batching (another N)": r"online-dynamic-batching.*",
    "odb, padded": r"odb, keep",
    "**odb**": r"odb, keep, flat",
    "what no cut of these optimizer steps can exceed": r"what no cut can exceed",
    "odb, `fill`: the budget filled, whatever becomes of N": r"odb, fill, flat",
}
"""Of the best of those whose names match."""
RANKS, BATCH_SIZE = 8, 256
TRAINED = (FIXED, ONE_ROW, "length-grouped", "odb, padded", "odb")


def lines(folder: Path, done: Sequence[str], figures_in: str) -> Iterator[str]:
    """done: names of parts, in order. figures_in: what stands before a figure's path in the folder."""
    if "demo" in done:
        yield from ("", "`odb-factory demo`: a tiny Qwen3-VL on two processes, 32 samples an optimizer step:", "")
        yield demo.table(json.loads((folder / "demo" / "demo.json").read_text(encoding="utf-8")))
        yield from ("", f"![Micro-batches and loss curves of the demo]({figures_in}demo/demo.png)")
    rows: list[dict[str, Any]] = []
    for part in ("planning", "planning_real"):
        if part in done:
            rows += json.loads((folder / part / "planning.json").read_text(encoding="utf-8"))
    if planned := plans(rows):
        yield from ("", "Step efficiency in simulation, by lengths alone, `token_budget` 16,384:", "", planned)
    tables: dict[str, list[dict[str, Any]]] = {}
    for part in done:
        trained = folder / part / "train.json"
        if trained.exists():
            tables |= json.loads(trained.read_text(encoding="utf-8"))
    if tables:
        yield from ("", "Trainings by LLaMA-Factory on a CPU, mean seconds; the share is the median of all seeds:", "")
        yield trainings(tables)


def plans(rows: list[dict[str, Any]]) -> str:
    """Step efficiency by profile of lengths, without images; nothing if other ranks and N were planned."""
    rows = [row for row in rows if row["ranks"] == RANKS and row["batch_size"] in (BATCH_SIZE, None)]
    rows = [row for row in rows if not row["images"]]
    profiles = list(dict.fromkeys(row["profile"] for row in rows))
    if not profiles:
        return ""
    found = [
        f"| {RANKS} ranks, N = {BATCH_SIZE} samples an optimizer step | {' | '.join(profiles)} |",
        f"|---|{'--:|' * len(profiles)}",
    ]
    for label, names in PLANNED.items():
        cells = []
        for profile in profiles:
            mine = [row for row in rows if row["profile"] == profile and re.fullmatch(names, row["name"])]
            reached = [row["efficiency"] for row in mine if "why" not in row]
            cells.append(f"{max(reached):.2f}" if reached else "not measured")
        found.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(found)


def trainings(tables: dict[str, list[dict[str, Any]]]) -> str:
    """tables: of each, by its title, what its contestants came to."""
    found = [
        f"| | {' | '.join(TRAINED)} | odb by fixed | losses differ by at most |",
        f"|---|{'--:|' * (len(TRAINED) + 2)}",
    ]
    for title, results in tables.items():
        runs = {result["name"]: result for result in results}
        seconds = [f"{runs[name]['seconds']:.1f}" if name in runs else "" for name in TRAINED]
        fixed, ours = runs[FIXED], runs["odb"]
        share = statistics.median(shares(fixed, ours, lambda run: run["seconds"]))
        found.append(f"| {title} | {' | '.join(seconds)} | {share:.0%} | {furthest_loss(fixed, ours):.0e} |")
    return "\n".join(found)
