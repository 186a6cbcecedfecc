"""How good plans are, in simulation: everybody cuts the same samples, with the code that a training runs.

For each number of ranks, N (samples of an optimizer step), profile of lengths, with and without images: step efficiency
(cuts.py), padding, balance of tokens and of patches, micro-steps, samples moved and the largest micro-batch; beside
them what no cut can exceed. A number of ranks whose file is in `--output-dir` is not computed again.

    python examples/benchmark/planning.py                                    # 1 to 1,024 ranks
    python examples/benchmark/planning.py --ranks 8 --batch-sizes 256 --processes 8
    python examples/benchmark/planning.py --ranks 8 --data my.yaml           # the real lengths of what you train on
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

import numpy as np
from contestants import ODB, Rebalancer, choosing, keeping
from cuts import FIXED_COST, TOKEN_BUDGET, Cut, Epoch, bound
from simulation import BUILT_IN, WORKLOADS

BOUND = "what no cut can exceed"
SHOWN = {1: 64, 8: 256, 64: 1024, 1024: 8192}
"""Ranks and N of the tables of step efficiency."""
DETAILS = (8, 256)
"""Ranks and N of the tables of all figures."""
DIGITS = 6
TOLD = 5e-4
"""Differences that a table of three digits does not show are none."""

Row = dict[str, Any]
"""ranks, profile, images, batch_size (N; None: whatever it holds), name, and the figures, or why there are none."""

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


def mean(draws: Sequence[Cut | str]) -> Row:
    """Over the seeds; a reason where there is no cut."""
    cuts = [draw.figures() for draw in draws if not isinstance(draw, str)]
    if not cuts:
        return {"why": draws[0]}
    columns = {key: [cut[key] for cut in cuts] for key in cuts[0]}
    return {key: _mean(values) for key, values in columns.items()}


def compare(ranks: int, given: argparse.Namespace, rebalancer: Rebalancer | None, real: np.ndarray | None) -> list[Row]:
    """All contestants on the same samples. real: those that are drawn from; None: made-up ones."""
    sizes = [size for size in given.batch_sizes if size % ranks == 0]
    size = max(given.samples, given.steps * max(sizes, default=0) // ranks)
    rows: list[Row] = []
    for profile, images in itertools.product(given.profiles, (False, True)):
        epochs = [Epoch(profile, ranks, images, size, seed, real) for seed in range(given.seeds)]
        shared: Row = {"ranks": ranks, "profile": profile, "images": images}
        for batch_size in sizes:
            kept = shared | {"batch_size": batch_size}
            for name, way in keeping(rebalancer).items():
                rows.append(kept | {"name": name} | mean([way(epoch, batch_size, given.steps) for epoch in epochs]))
            bounds = [bound(epoch, batch_size, given.steps) for epoch in epochs]
            rows.append(kept | {"name": BOUND} | {key: _mean([one[key] for one in bounds]) for key in bounds[0]})
        own = shared | {"batch_size": None}
        for name, choose in choosing(given.processes).items():
            rows.append(own | {"name": name} | mean([choose(dataclasses.replace(epochs[0], size=given.samples))]))
        print(f"{ranks:,} ranks, {profile}{', images' * images}", file=sys.stderr, flush=True)
    return rows


def _mean(values: Sequence[float | None]) -> float | None:
    return None if None in values else round(statistics.mean(values), DIGITS)


def efficiencies(rows: Sequence[Row], ranks: int, batch_size: int) -> str:
    """A table: the contestants' step efficiency by profile, without images."""
    chosen = [row for row in rows if row["ranks"] == ranks and not row["images"]]
    chosen = [row for row in chosen if row["batch_size"] in (batch_size, None)]
    profiles = list(dict.fromkeys(row["profile"] for row in chosen))
    lines = [f"| {ranks:,} rank{'s' * (ranks > 1)}, N = {batch_size:,} | {' | '.join(profiles)} |"]
    lines.append(f"|---|{'--:|' * len(profiles)}")
    missing: dict[str, str] = {}
    for name in dict.fromkeys(row["name"] for row in chosen):
        mine = [row for row in chosen if row["name"] == name]
        own_n = ", own N" * (mine[0]["batch_size"] is None)
        if "why" in mine[0]:
            missing.setdefault(name.partition(",")[0], mine[0]["why"])
        else:
            reached = [f"{row['efficiency']:.3f}" for row in mine]
            lines.append(f"| {name}{own_n} | {' | '.join(reached)} |")
    lines += [f"| {name} | not measured: {why} {'| ' * len(profiles)}|" for name, why in missing.items()]
    return "\n".join(lines)


def details(rows: Sequence[Row], profile: str, images: bool) -> str:
    """A table of all figures of a profile, of those that were measured. rows: of one number of ranks and one N."""
    lines = [f"| {profile}{' with images' * images} | {' | '.join(label for label, _ in COLUMNS.values())} |"]
    lines.append(f"|---|{'--:|' * len(COLUMNS)}")
    for row in rows:
        if (row["profile"], row["images"]) == (profile, images) and "why" not in row:
            shown = [("" if row.get(key) is None else show(row[key])) for key, (_, show) in COLUMNS.items()]
            lines.append(f"| {row['name']} | {' | '.join(shown)} |")
    return "\n".join(lines)


def near_the_bound(rows: Sequence[Row], profile: str, images: bool) -> str:
    """A table of all ranks and N: what odb reaches, and the bound in brackets."""
    found = {
        (row["ranks"], row["batch_size"], row["name"]): row["efficiency"]
        for row in rows
        if row["name"] in (ODB, BOUND) and (row["profile"], row["images"]) == (profile, images)
    }
    ranks, sizes = (sorted({place[k] for place in found}) for k in (0, 1))
    lines = [f"| {profile}{' with images' * images} | {' | '.join(f'N = {size:,}' for size in sizes)} |"]
    lines.append(f"|---|{'--:|' * len(sizes)}")
    for count in ranks:
        cells = [
            f"{found[count, size, ODB]:.3f} ({found[count, size, BOUND]:.3f})" if (count, size, ODB) in found else ""
            for size in sizes
        ]
        lines.append(f"| {count:,} rank{'s' * (count > 1)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ahead(rows: Sequence[Row]) -> str:
    """Where somebody else has a higher step efficiency than `ODB`, of all ranks, N and profiles measured."""
    others = [row for row in rows if not row["name"].startswith("odb") and row["name"] != BOUND and "why" not in row]
    gaps: dict[str, list[float]] = {}
    for ours in (row for row in rows if row["name"] == ODB):
        for row in others:
            same = all(row[key] == ours[key] for key in ("ranks", "profile", "images"))
            if same and row["batch_size"] in (ours["batch_size"], None):
                whose = row["name"] + ", own N" * (row["batch_size"] is None)
                gaps.setdefault(whose, []).append(row["efficiency"] - ours["efficiency"])
    said = []
    for name, found in gaps.items():
        if ahead_in := [gap for gap in found if gap > TOLD]:
            said.append(f"{name} in {len(ahead_in)} of its {len(found)} cases (by {max(found):.3f} at most)")
    return (
        f"Ahead of `{ODB}`, by cases of ranks, N and profile: {'; '.join(said) or 'nobody'}. A way with its own N is "
        "compared with every N."
    )


def draw_figure(rows: Sequence[Row], path: Path) -> None:
    """Step efficiency by ranks, with the largest N of each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    profiles = list(dict.fromkeys(row["profile"] for row in rows))
    figure, axes = pyplot.subplots(1, len(profiles), figsize=(4 * len(profiles), 4), sharey=True, squeeze=False)
    names = ["fixed, 4 rows", "length-grouped, 4 rows", "odb, keep", ODB, BOUND]
    for axis, profile in zip(axes[0], profiles):
        for name in names:
            points = {}
            for row in rows:
                if row["name"] == name and row["profile"] == profile and not row["images"] and "why" not in row:
                    points[row["ranks"]] = max(
                        points.get(row["ranks"], (0, 0.0)), (row["batch_size"], row["efficiency"])
                    )
            line = sorted((count, efficiency) for count, (_, efficiency) in points.items())
            axis.plot(*zip(*line), marker="o", label=name, linestyle="--" if name == BOUND else "-")
        axis.set(title=profile, xlabel="ranks", xscale="log")
    axes[0][0].set_ylabel("step efficiency, largest N")
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def report(rows: Sequence[Row]) -> str:
    measured = list(dict.fromkeys((row["ranks"], row["batch_size"]) for row in rows if row["batch_size"]))
    places = [place for place in SHOWN.items() if place in measured] or measured[:1]
    profiles = list(dict.fromkeys(row["profile"] for row in rows))
    tables = [efficiencies(rows, *place) for place in places]
    tables += [near_the_bound(rows, profile, images) for profile in profiles for images in (False, True)]
    ranks, batch_size = DETAILS if DETAILS in measured else places[0]
    tables.append(f"All figures, {ranks:,} ranks, N = {batch_size:,}:")
    at = [row for row in rows if row["ranks"] == ranks and row["batch_size"] in (batch_size, None)]
    tables += [details(at, profile, images) for images in (False, True) for profile in profiles]
    return "\n\n".join([ahead(rows), *tables])


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 512, 1024])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 256, 1024, 8192], help="these N")
    parser.add_argument("--profiles", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--data",
        nargs="?",
        const=BUILT_IN,
        metavar="CONFIG.yaml",
        help="in place of the profiles the lengths that a LLaMA-Factory YAML's data really have (without a file: those "
        "of the built-in MM-Mix, which is made first)",
    )
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each draw")
    parser.add_argument("--samples", type=int, default=2048, help="of each rank, for those who choose N themselves")
    parser.add_argument("--seeds", type=int, default=2, help="the figures are means over so many draws")
    parser.add_argument("--processes", type=int, default=0, help="up to so many ranks, rivals' loaders are really run")
    parser.add_argument("--newer-transformers", metavar="PYTHON", help="of an environment that has batch_rebalance")
    parser.add_argument("--output-dir", type=Path, default=Path("saves/benchmark_planning"), help="(%(default)s)")
    given = parser.parse_args(arguments)
    given.output_dir.mkdir(parents=True, exist_ok=True)
    real = None
    if given.data:
        from real_lengths import built_in, observed

        given.profiles = [given.data if given.data == BUILT_IN else Path(given.data).stem]
        real = observed(built_in(given.output_dir) if given.data == BUILT_IN else Path(given.data))
        tokens, share = real["tokens"], real["has_media"].mean()
        lengths = f"{tokens.min():,} to {tokens.max():,} tokens, {tokens.mean():,.0f} on average"
        print(f"{given.profiles[0]}: {len(real):,} samples of {lengths}; {share:.0%} have images or videos\n")
    rebalancer = Rebalancer(given.newer_transformers) if given.newer_transformers else None
    rows: list[Row] = []
    for ranks in given.ranks:
        saved, started = given.output_dir / f"ranks_{ranks}.partial", time.monotonic()
        if not saved.exists():
            saved.write_text(json.dumps(compare(ranks, given, rebalancer, real), indent=1), encoding="utf-8")
            print(f"{ranks:,} ranks: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        rows += json.loads(saved.read_text(encoding="utf-8"))
    if rebalancer:
        rebalancer.close()
    lines = ",\n".join(map(json.dumps, rows))
    (given.output_dir / "planning.json").write_text(f"[{lines}]", encoding="utf-8")
    draw_figure(rows, given.output_dir / "planning.png")
    print(f"token_budget {TOKEN_BUDGET:,}, a micro-step costs {FIXED_COST} tokens beside; {given.seeds} draws\n")
    print(report(rows))
    return rows


if __name__ == "__main__":
    main()
