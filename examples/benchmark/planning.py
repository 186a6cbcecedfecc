"""How good the plan is: step efficiency of whole epochs, in simulation, with the planner that a training uses.

Step efficiency = real tokens / (ranks x sum over steps of (largest padded tokens of any rank in that step + c0)): it
counts padding, part-filled groups, ranks that wait for each other, and the fixed cost of a step (c0 = 500 tokens).
Where samples have images there are two more: that of the vision tower, patches / (ranks x sum over steps of the
largest patches of any rank), and that of the time which tokens, patches and attention take together.

First come optimizer batches that are kept at N samples (kept.py), beside fixed and length-grouped batches, whose
figures do not depend on N; then what fills the budget, whatever becomes of N.

    python examples/benchmark/planning.py                           # 8 and 64 ranks
    python examples/benchmark/planning.py --ranks 8 --processes 8   # whole loaders on gloo ranks, too
    python examples/benchmark/planning.py --ranks 1 8 64 512 1024 --output-dir out
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kept
import numpy as np
import processes
from simulation import PATCHES_PER_TOKEN, WORKLOADS, draw

from odb_factory.dry_run.rounds import rounds
from odb_factory.planning import Budget, CostModel

FIXED_COST = 500
"""Tokens that the fixed cost of a step is worth."""
TOKEN_BUDGET, WINDOW, BATCH_SIZE = 16384, 1024, 8
IMAGE_SHARE = 0.5
TIME = CostModel(fixed=500_000_000, token=1_000_000, patch=200_000, square=30)
"""What a step is taken to take: a patch a fifth of a token, attention another fourth of a row of 8,192 tokens."""

Samples = Sequence[np.ndarray]
Steps = list[int]
"""The largest padded tokens of any rank, of each step."""


def efficiency(samples: Samples, steps: Steps) -> float:
    real = sum(int(rows["tokens"].sum()) for rows in samples)
    return real / (len(samples) * (sum(steps) + FIXED_COST * len(steps)))


def fixed_batch(samples: Samples, batch_size: int = BATCH_SIZE) -> Steps:
    """Batches of `batch_size` rows in the order of draws."""
    return np.max([_padded(rows["tokens"].reshape(-1, batch_size)) for rows in samples], axis=0).tolist()


def length_grouped(samples: Samples, batch_size: int = BATCH_SIZE) -> Steps:
    """All lengths known beforehand: sorted within mega-batches of 50 batches of all ranks, as the Trainer does."""
    size = batch_size * len(samples)
    together = np.stack([rows["tokens"] for rows in samples], axis=1).reshape(-1)
    mega = [np.sort(together[k : k + 50 * size])[::-1] for k in range(0, len(together), 50 * size)]
    batches = _padded(np.concatenate(mega)[: len(together) // size * size].reshape(-1, batch_size))
    return batches.reshape(-1, len(samples)).max(axis=1).tolist()


def sort_fill_split(samples: Samples) -> Steps:
    """The published online algorithm: sort each window, fill groups to the budget, split to the largest count."""
    steps: Steps = []
    for k in range(0, len(samples[0]), WINDOW):
        groups = [_filled(np.sort(rows["tokens"][k : k + WINDOW])[::-1]) for rows in samples]
        count = max(map(len, groups))
        for mine in groups:
            while len(mine) < count:
                i = max(range(len(mine)), key=lambda i: len(mine[i]))
                middle = len(mine[i]) // 2
                mine[i : i + 1] = [mine[i][:middle], mine[i][middle:]]
            mine.sort(key=lambda group: -int(group[0]) * len(group))
        steps += [max(int(group[0]) * len(group) for group in step) for step in zip(*groups)]
    return steps


def oracle(samples: Samples) -> Steps:
    """Offline: the samples of all ranks sorted as one, filled, like with like."""
    groups = _filled(np.sort(np.concatenate([rows["tokens"] for rows in samples]))[::-1])
    padded = sorted((int(group[0]) * len(group) for group in groups), reverse=True)
    return padded[:: len(samples)]


def odb(samples: Samples, balance: bool = False, layout: str = "padded") -> Steps:
    plans = rounds(samples, Budget(TOKEN_BUDGET, layout=layout), WINDOW, balance=balance)
    return [totals.max_rank_tokens for one in plans for totals in one.plan.totals]


WAYS: dict[str, Callable[[Samples], Steps]] = {
    "sort, fill, split to the largest count": sort_fill_split,
    "odb, fill, `balance: false`": odb,
    "odb, fill": lambda samples: odb(samples, balance=True),
    "odb, fill, flat, `balance: false`": lambda samples: odb(samples, layout="flat"),
    "odb, fill, flat": lambda samples: odb(samples, balance=True, layout="flat"),
    "offline oracle": oracle,
}


KEEPS_N: dict[str, Callable[[Samples], Steps]] = {
    f"{name}, {size} row{'s' * (size > 1)}": functools.partial(way, batch_size=size)
    for name, way in (("fixed batch", fixed_batch), ("length-grouped", length_grouped))
    for size in (1, 2, 4, 8)
}
"""Ways that allow any N, with the same figures for all. They know no budget: what they take at once has no bound."""


def kept_batches(ranks: int, sizes: Sequence[int], steps: int, seeds: int) -> dict[str, dict[str, float]]:
    """The efficiencies of `plan_optimizer_step` for each N in `sizes`, by way and workload."""
    reached: dict[str, dict[str, float]] = {}
    for size, workload in itertools.product(sizes, WORKLOADS):
        found = kept.efficiencies(workload, ranks, size, Budget(TOKEN_BUDGET), FIXED_COST, steps, seeds)
        for name, values in found.items():
            reached.setdefault(f"{name}, N = {size:,}", {})[workload] = values["tokens"]
    return reached


def kept_with_images(workload: str, ranks: int, size: int, steps: int, seeds: int) -> dict[str, dict[str, float]]:
    """The efficiencies in tokens and in patches where half of the N = `size` samples have images, and their bounds."""
    budget = Budget(TOKEN_BUDGET, TOKEN_BUDGET * PATCHES_PER_TOKEN)
    found = kept.efficiencies(workload, ranks, size, budget, FIXED_COST, steps, seeds, IMAGE_SHARE)
    bound = {f"bound of {name}": value for name, value in found.pop(kept.BOUND).items()}
    return {f"{name}, N = {size:,}": values | bound for name, values in found.items()}


def with_images(workload: str, ranks: int, samples: int, layout: str = "padded", **options: Any) -> dict[str, float]:
    """The efficiencies where half of the samples have images, and what of them travels to another rank."""
    drawn = draw(workload, ranks, samples, image_share=IMAGE_SHARE)
    budget = Budget(TOKEN_BUDGET, TOKEN_BUDGET * PATCHES_PER_TOKEN, layout=layout)
    table = np.concatenate(drawn)
    tokens = table["tokens"].astype(np.int64)
    work = TIME.of(tokens, table["patches"], tokens * tokens) - TIME.fixed
    totals, seconds = [], 0
    for one in rounds(drawn, budget, WINDOW, **options):
        held = np.concatenate([window.rows for window in one.windows])
        totals += one.plan.totals
        seconds += sum(max(_time(held[group], layout) for group in step if group) for step in zip(*one.plan.groups))
    return {
        "tokens": efficiency(drawn, [step.max_rank_tokens for step in totals]),
        "patches": sum(step.patches for step in totals) / (ranks * sum(step.max_rank_patches for step in totals)),
        "time": float(work.sum() / (ranks * seconds)),
        "moved": sum(step.moved for step in totals) / len(table),
    }


def _time(group: np.ndarray, layout: str) -> int:
    if layout == "flat":
        tokens = group["tokens"].astype(np.int64)
        return TIME.of(int(tokens.sum()), int(group["patches"].sum()), int((tokens**2).sum()))
    length = int(group["tokens"].max())
    return TIME.of(len(group) * length, int(group["patches"].sum()), len(group) * length**2)


PLANS: dict[str, dict[str, Any]] = {
    "odb, fill, `balance: false`": {},
    "odb, fill, `balance: false`, `cost_model: time`": {"model": TIME},
    "odb, fill": {"balance": True},
    "odb, fill, `cost_model: time`": {"balance": True, "model": TIME},
    "odb, fill, flat, `balance: false`": {"layout": "flat"},
    "odb, fill, flat": {"layout": "flat", "balance": True},
    "odb, fill, flat, `cost_model: time`": {"layout": "flat", "balance": True, "model": TIME},
}


def _padded(batches: np.ndarray) -> np.ndarray:
    return batches.max(axis=1) * batches.shape[1]


def _filled(lengths: np.ndarray) -> list[np.ndarray]:
    """Groups of neighbours, each as large as the budget allows; lengths fall."""
    groups, start = [], 0
    while start < len(lengths):
        end = start + max(TOKEN_BUDGET // int(lengths[start]), 1)
        groups.append(lengths[start:end])
        start = end
    return groups


def table(title: str, columns: Sequence[str], rows: dict[str, Sequence[float]]) -> str:
    lines = [f"| {title} | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
    lines += [f"| {name} | {' | '.join(f'{value:.3f}' for value in values)} |" for name, values in rows.items()]
    return "\n".join(lines) + "\n"


def draw_figure(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(WORKLOADS), figsize=(4 * len(WORKLOADS), 4), sharey=True, squeeze=False)
    for axis, workload in zip(axes[0], WORKLOADS):
        for name in dict.fromkeys(name for result in results for name in result["efficiency"]):
            shown = [result for result in results if name in result["efficiency"]]
            points = [(result["ranks"], result["efficiency"][name][workload]) for result in shown]
            axis.plot(*zip(*points), marker="o", label=name.replace("`", ""))
        axis.set(title=workload, xlabel="ranks", xscale="log")
    axes[0][0].set_ylabel("step efficiency")
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--samples", type=int, default=6000, help="of each rank; half as many from 64 ranks on")
    parser.add_argument("--seeds", type=int, default=6, help="the figures are means over so many draws")
    parser.add_argument("--processes", type=int, default=0, help="up to so many ranks loaders are really run, too")
    parser.add_argument("--output-dir", type=Path, help="write planning.json and planning.png there")
    parser.add_argument("--kept", type=int, nargs="*", default=[64, 128, 256, 512, 2048, 8192], help="these N")
    parser.add_argument("--kept-images", type=int, nargs="*", default=[256], help="these N, half of them with images")
    parser.add_argument("--kept-steps", type=int, default=8, help="so many optimizer steps of each draw")
    given = parser.parse_args(arguments)
    results = []
    for ranks in given.ranks:
        count = given.samples // 2 if ranks >= 64 else given.samples
        ways = KEEPS_N | WAYS
        if ranks <= given.processes:
            for name in processes.LOADERS:
                ways[name] = functools.partial(processes.run, name, token_budget=TOKEN_BUDGET, window=WINDOW)
        reached = {name: {} for name in ways}
        for workload in WORKLOADS:
            drawn = [draw(workload, ranks, count, seed) for seed in range(given.seeds)]
            for name, way in ways.items():
                reached[name][workload] = float(np.mean([efficiency(samples, way(samples)) for samples in drawn]))
        sizes = [size for size in given.kept if size % ranks == 0]
        kept_rows = kept_batches(ranks, sizes, given.kept_steps, given.seeds)
        figures = {name: list(row.values()) for name, row in (kept_rows | reached).items()}
        print(table(f"{ranks:,} ranks", list(WORKLOADS), figures))
        pictures: dict[str, dict[str, dict[str, float]]] = {}
        for workload in WORKLOADS:
            pictures[workload] = {name: with_images(workload, ranks, count, **way) for name, way in PLANS.items()}
            figures = {name: list(row.values()) for name, row in pictures[workload].items()}
            print(table(f"{ranks:,} ranks, {workload} with images", ["tokens", "patches", "time", "moved"], figures))
        kept_pictures: dict[str, dict[str, dict[str, float]]] = {workload: {} for workload in WORKLOADS}
        for workload, size in itertools.product(WORKLOADS, [size for size in given.kept_images if size % ranks == 0]):
            kept_pictures[workload] |= kept_with_images(workload, ranks, size, given.kept_steps, given.seeds)
        for workload, rows in kept_pictures.items():
            figures = {name: list(row.values()) for name, row in rows.items()}
            columns = list(next(iter(rows.values()), {}))
            print(table(f"{ranks:,} ranks, {workload} with images", columns, figures))
        found = {
            "efficiency": reached,
            "kept": kept_rows,
            "with_images": pictures,
            "kept_with_images": kept_pictures,
        }
        results.append({"ranks": ranks, "samples": count, **found})
    if given.output_dir:
        given.output_dir.mkdir(parents=True, exist_ok=True)
        (given.output_dir / "planning.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
        draw_figure(results, given.output_dir / "planning.png")
    return results


if __name__ == "__main__":
    main()
