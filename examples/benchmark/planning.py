"""How well micro-batches are planned: step efficiency, padding and balance of odb and its rivals, in simulation.

All cut the same samples with the code that a training runs. Every number of ranks has a file of its own in the output
folder; one that is there is not computed again.

    python examples/benchmark/planning.py --ranks 8 --batch-sizes 256
    python examples/benchmark/planning.py --data my.yaml        # lengths of the data of a LLaMA-Factory YAML
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import page
from contestants import ODB, choosing, keeping
from rivals import Rebalancer
from simulation import BUILT_IN, FIXED_COST, PROFILES, TOKEN_BUDGET, Cut, Epoch, bound, observe

matplotlib.use("Agg")
from matplotlib import pyplot

BOUND = "what no cut can exceed"
SHOWN = {8: 256, 1: 64, 64: 1024, 512: 8192, 1024: 8192}
"""Ranks and N of the tables of step efficiency; the first that was measured is on the page, with all its figures in
the part's own file."""
DIFFERENCE = 5e-4
"""Smaller differences of step efficiency do not show in three digits and count as none."""

Row = dict[str, Any]
"""ranks, profile, images, batch_size (N; None: the method chooses it), name, and the figures, or why there are none."""

COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "efficiency": ("step efficiency", "{:.3f}".format),
    "padding": ("padding", "{:.1%}".format),
    "balance": ("balance of tokens", "{:.3f}".format),
    "balance_patches": ("balance of patches", "{:.3f}".format),
    "micro_steps": ("micro-steps", "{:.1f}".format),
    "samples": ("samples of an optimizer step", "{:,.0f}".format),
    "moved": ("samples moved", "{:.0%}".format),
    "peak": ("peak tokens", "{:,.0f}".format),
}


def means(draws: Sequence[Cut | str]) -> Row:
    """Of the figures over the seeds; a reason where there is no cut."""
    cuts = [draw.figures() for draw in draws if not isinstance(draw, str)]
    return {key: mean([cut[key] for cut in cuts]) for key in cuts[0]} if cuts else {"why": draws[0]}


def mean(values: Sequence[float | None]) -> float | None:
    return None if None in values else round(statistics.mean(values), 6)


def compare(ranks: int, given: argparse.Namespace, rebalancer: Rebalancer | None, real: np.ndarray | None) -> list[Row]:
    """All contestants on the same samples. real: samples to draw from; None: made-up ones."""
    sizes = [size for size in given.batch_sizes if size % ranks == 0]
    size = max(given.samples, given.steps * max(sizes, default=0) // ranks)
    rows: list[Row] = []
    for profile, images in itertools.product(given.profiles, (False, True)):
        epochs = [Epoch(profile, ranks, images, size, seed, real) for seed in range(given.seeds)]
        shared: Row = {"ranks": ranks, "profile": profile, "images": images}
        for batch_size in sizes:
            kept = shared | {"batch_size": batch_size}
            for name, way in keeping(rebalancer).items():
                rows.append(kept | {"name": name} | means([way(epoch, batch_size, given.steps) for epoch in epochs]))
            bounds = [bound(epoch, batch_size, given.steps) for epoch in epochs]
            rows.append(kept | {"name": BOUND} | {key: mean([one[key] for one in bounds]) for key in bounds[0]})
        own = shared | {"batch_size": None}
        for name, choose in choosing(given.processes).items():
            rows.append(own | {"name": name} | means([choose(dataclasses.replace(epochs[0], size=given.samples))]))
        print(f"{ranks:,} ranks, {profile}{', images' * images}", file=sys.stderr, flush=True)
    return rows


def efficiencies(rows: Sequence[Row], ranks: int, batch_size: int) -> str:
    """The contestants' step efficiency by profile, without images."""
    chosen = [row for row in rows if row["ranks"] == ranks and row["batch_size"] in (batch_size, None)]
    chosen = [row for row in chosen if not row["images"]]
    profiles, cells, missing = list(dict.fromkeys(row["profile"] for row in chosen)), [], {}
    for name in dict.fromkeys(row["name"] for row in chosen):
        mine = [row for row in chosen if row["name"] == name]
        if "why" in mine[0]:
            missing.setdefault(name.partition(",")[0], mine[0]["why"])
        else:
            own_n = ", own N" * (mine[0]["batch_size"] is None)
            cells.append([f"{name}{own_n}", *(f"{row['efficiency']:.3f}" for row in mine)])
    cells += [[name, f"not measured: {why}", *[""] * (len(profiles) - 1)] for name, why in missing.items()]
    return page.table([f"{ranks:,} rank{'s' * (ranks > 1)}, N = {batch_size:,}", *profiles], cells)


def details(rows: Sequence[Row], profile: str, images: bool) -> str:
    """All figures of a profile that were measured. rows: of one number of ranks and one N."""
    cells = []
    for row in rows:
        if (row["profile"], row["images"]) == (profile, images) and "why" not in row:
            shown = [("" if row.get(key) is None else show(row[key])) for key, (_, show) in COLUMNS.items()]
            cells.append([row["name"], *shown])
    return page.table([f"{profile}{' with images' * images}", *(label for label, _ in COLUMNS.values())], cells)


def near_the_bound(rows: Sequence[Row], profile: str, images: bool) -> str:
    """All ranks and N: what odb reaches, and the bound in brackets."""
    found: dict[tuple[int, int, str], float] = {
        (row["ranks"], row["batch_size"], row["name"]): row["efficiency"]
        for row in rows
        if row["name"] in (ODB, BOUND) and (row["profile"], row["images"]) == (profile, images)
    }
    ranks, sizes = (sorted({place[k] for place in found}) for k in (0, 1))
    cells = [[f"{count:,} rank{'s' * (count > 1)}"] for count in ranks]
    for count, row in zip(ranks, cells):
        for size in sizes:
            both = [found.get((count, size, name)) for name in (ODB, BOUND)]
            row.append("" if None in both else "{:.3f} ({:.3f})".format(*both))
    return page.table([f"{profile}{' with images' * images}", *(f"N = {size:,}" for size in sizes)], cells)


def ahead(rows: Sequence[Row]) -> str:
    """Who has a higher step efficiency than `ODB`, of all ranks, N and profiles measured."""
    others = [row for row in rows if not row["name"].startswith("odb") and row["name"] != BOUND and "why" not in row]
    gaps: dict[str, list[float]] = {}
    for ours in (row for row in rows if row["name"] == ODB):
        for row in others:
            same = all(row[key] == ours[key] for key in ("ranks", "profile", "images"))
            if same and row["batch_size"] in (ours["batch_size"], None):
                name = row["name"] + ", own N" * (row["batch_size"] is None)
                gaps.setdefault(name, []).append(row["efficiency"] - ours["efficiency"])
    said = []
    for name, found in gaps.items():
        if count := sum(gap > DIFFERENCE for gap in found):
            said.append(f"{name} in {count} of its {len(found)} cases (by {max(found):.3f} at most)")
    where = f"Ahead of `{ODB}`, by cases of ranks, N and profile: {'; '.join(said) or 'nobody'}."
    return f"{where} A method with its own N is compared with every N."


def draw_figure(rows: Sequence[Row], path: Path) -> None:
    """Step efficiency by ranks, with the largest N of each."""
    profiles = list(dict.fromkeys(row["profile"] for row in rows))
    figure, axes = pyplot.subplots(1, len(profiles), figsize=(4 * len(profiles), 4), sharey=True, squeeze=False)
    for axis, profile in zip(axes[0], profiles):
        for name in ("fixed, 4 rows", "length-grouped, 4 rows", "odb, keep", ODB, BOUND):
            mine = [row for row in rows if (row["name"], row["profile"], row["images"]) == (name, profile, False)]
            largest: dict[int, Row] = {}
            for row in sorted((row for row in mine if "why" not in row), key=lambda row: row["batch_size"]):
                largest[row["ranks"]] = row
            points = sorted((count, row["efficiency"]) for count, row in largest.items())
            axis.plot(*zip(*points), marker="o", label=name, linestyle="--" if name == BOUND else "-")
        axis.set(title=profile, xlabel="ranks", xscale="log")
    axes[0][0].set_ylabel("step efficiency, largest N")
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 512, 1024])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 256, 1024, 8192], help="these N")
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=list(PROFILES))
    data = "lengths of the data of this LLaMA-Factory YAML in place of the profiles (no file: the built-in MM-Mix)"
    parser.add_argument("--data", nargs="?", const=BUILT_IN, metavar="CONFIG.yaml", help=data)
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each draw")
    parser.add_argument("--samples", type=int, default=2048, help="of each rank, for methods that choose N themselves")
    parser.add_argument("--seeds", type=int, default=2, help="draws; the figures are their means")
    parser.add_argument("--processes", type=int, default=0, help="run whole loaders of rivals up to this many ranks")
    parser.add_argument("--newer-transformers", metavar="PYTHON", help="of an environment that has batch_rebalance")
    parser.add_argument("--output-dir", type=Path, default=Path("saves/benchmark_planning"), help="(%(default)s)")
    given = parser.parse_args()
    given.output_dir.mkdir(parents=True, exist_ok=True)
    real, tables = None, [f"token_budget {TOKEN_BUDGET:,}, {FIXED_COST} tokens a micro-step, {given.seeds} draws"]
    if given.data:
        config = None if given.data == BUILT_IN else Path(given.data)
        given.profiles = [config.stem if config else BUILT_IN]
        real = observe(config, given.output_dir)
        tokens, share = real["tokens"], real["has_media"].mean()
        lengths = f"{tokens.min():,} to {tokens.max():,} tokens, {tokens.mean():,.0f} on average"
        tables.append(f"{given.profiles[0]}: {len(real):,} samples of {lengths}; {share:.0%} have images or videos")
    rebalancer = Rebalancer(given.newer_transformers) if given.newer_transformers else None
    rows: list[Row] = []
    for ranks in given.ranks:
        saved, started = given.output_dir / f"ranks_{ranks}.partial", time.monotonic()
        if not saved.exists():
            saved.write_text(json.dumps(compare(ranks, given, rebalancer, real)), encoding="utf-8")
            print(f"{ranks:,} ranks: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        rows += json.loads(saved.read_text(encoding="utf-8"))
    if rebalancer:
        rebalancer.close()
    draw_figure(rows, given.output_dir / "planning.png")
    measured = list(dict.fromkeys((row["ranks"], row["batch_size"]) for row in rows if row["batch_size"]))
    first, *others = [place for place in SHOWN.items() if place in measured] or measured[:1]
    both = list(itertools.product(given.profiles, (False, True)))
    bounds = [near_the_bound(rows, *one) for one in both]
    at = [row for row in rows if row["ranks"] == first[0] and row["batch_size"] in (first[1], None)]
    by_name = [efficiencies(rows, *place) for place in (first, *others)]
    num_shown = int(first[0] <= page.RANKS)  # the page has room for that of few ranks
    tables += [ahead(rows), *by_name[:num_shown], bounds[-1]]
    more = by_name[num_shown:] + bounds[:-1]
    more += [f"All figures, {first[0]:,} ranks, N = {first[1]:,}:", *(details(at, *one) for one in both)]
    page.write(given.output_dir, rows, tables, more)


if __name__ == "__main__":
    main()
