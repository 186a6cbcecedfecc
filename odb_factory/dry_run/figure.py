"""A look as one page of plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from odb_factory.dry_run.distribution import ALL
from odb_factory.dry_run.look import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ODB, OTHER, FIXED, GROUPED, OWN = "#2a6f97", "#8ecae6", "#e9c46a", "#6a994e", "#9b2226"


def draw(found: Look, path: Path) -> None:
    """Save a PNG: how long the samples are, what budgets and ranks do with them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plots: list[Any] = [_samples, _speed, _shares]
    if found.by_ranks:
        plots.append(_ranks)
    columns = 2
    rows = -(-len(plots) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(13, 4 * rows), layout="constrained", squeeze=False)
    for axes, plot in zip(grid.flat, plots):
        plot(axes, found)
    for axes in list(grid.flat)[len(plots) :]:
        axes.axis("off")
    layout, ranks = f"layout {found.layout}", f"{found.asked.ranks} rank{'s' * (found.asked.ranks > 1)}"
    size = "filled optimizer steps" if found.step_size is None else f"{found.step_size:,} samples an optimizer step"
    figure.suptitle(
        f"{found.asked.path.name}: {len(found.sample.seen):,} rows, {size}, {ranks}, {layout}",
        fontsize=11,
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _samples(axes: Axes, found: Look) -> None:
    names = [part.name for part in found.parts if part.name != ALL]
    seen = [row for row in found.sample.seen if row.cost is not None]
    groups = [[row for row in seen if row.source == name] for name in names] or [seen]
    lengths = [np.array([row.cost.tokens for row in group if row.cost is not None]) for group in groups]
    every = np.concatenate(lengths)
    bins = np.geomspace(max(every.min(), 1), every.max() + 1, 40)
    axes.hist(lengths, bins=bins.tolist(), stacked=True, label=names or ["samples"])
    for value, name in (
        (found.config.token_budget, "token_budget"),
        (found.asked.parsed.data.cutoff_len, "cutoff_len"),
    ):
        axes.axvline(value, color=OWN, linestyle="--" if name == "token_budget" else ":", linewidth=1, label=name)
    axes.set(xscale="log", xlabel="tokens of a sample", ylabel="samples")
    axes.legend(fontsize=8)
    axes.set_title("how long the samples are", loc="left", fontsize=10)


def _speed(axes: Axes, found: Look) -> None:
    budgets = [one.token_budget or 0 for one in found.budgets]
    axes.plot(budgets, [one.speed for one in found.budgets], marker="o", color=ODB, label=f"odb, {found.layout}")
    other = found.other_layout
    axes.plot(
        [found.config.token_budget], [other.speed], marker="s", color=OTHER, linestyle="", label=f"odb, {other.layout}"
    )
    axes.axhline(found.length_grouped.speed, color=GROUPED, linewidth=1.5, label="length-grouped")
    axes.axhline(found.fixed.speed, color=FIXED, linewidth=1.5, label="fixed batches")
    _mark_own(axes, found)
    axes.set(ylabel="times fixed batches", ylim=(0, None))
    _budgets_along(axes, budgets)
    axes.legend(fontsize=8)
    axes.set_title("predicted speed (by the cost model, not measured)", loc="left", fontsize=10)


def _shares(axes: Axes, found: Look) -> None:
    budgets = [one.token_budget or 0 for one in found.budgets]
    for name, color in (
        ("padding_ratio", FIXED),
        ("balance", GROUPED),
        ("budget_use", OTHER),
        ("step_efficiency", ODB),
    ):
        values = [getattr(one, name) for one in found.budgets]
        axes.plot(budgets, values, marker="o", markersize=3, color=color, label=name.replace("_", " "))
    axes.plot(
        budgets, [one.limit or 0.0 for one in found.budgets], color="black", linestyle=":", label="limit of efficiency"
    )
    _mark_own(axes, found)
    axes.set(ylim=(0, 1.05))
    _budgets_along(axes, budgets)
    axes.legend(fontsize=8)
    axes.set_title("what a budget does", loc="left", fontsize=10)


def _budgets_along(axes: Axes, budgets: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("token_budget")


def _ranks(axes: Axes, found: Look) -> None:
    ranks = [f"{number}" for number, _ in found.by_ranks]
    colors = [OWN if number == found.asked.ranks else ODB for number, _ in found.by_ranks]
    axes.bar(ranks, [one.step_efficiency for _, one in found.by_ranks], color=colors)
    axes.set(xlabel="ranks", ylabel="step efficiency", ylim=(0, 1.05))
    axes.set_title(f"the same {found.step_size:,} samples on other numbers of ranks", loc="left", fontsize=10)


def _mark_own(axes: Axes, found: Look) -> None:
    axes.axvline(found.config.token_budget, color=OWN, linestyle="--", linewidth=1)
