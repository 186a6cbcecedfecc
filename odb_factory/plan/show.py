"""A look as text for a terminal, as plain values for machines, and as one page of plots."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from odb_factory.plan import simulate
from odb_factory.plan.advice import Advice
from odb_factory.plan.look import Look
from odb_factory.plan.observe import ALL, Part, Spread
from odb_factory.plan.simulate import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ----------------------------------------------------------------------------------------------------------------------
# A look as plain values, for machines.


def to_dict(found: Look, advice: Advice) -> dict[str, Any]:
    """JSON types. These names are public."""
    sample, config = found.sample, found.config
    return {
        "yaml": str(found.asked.path),
        "ranks": found.asked.ranks,
        "global_batch_size": found.step_size,
        "per_device_train_batch_size": found.asked.batch_size,
        "gradient_accumulation_steps": found.asked.accumulation,
        "has_block": found.asked.has_block,
        "config": config.to_dict(),
        "layout": found.layout,
        "layout_reason": found.layout_reason,
        "observed": {
            "rows": len(sample.seen),
            "of": sample.population,
            "optimizer_steps": len(sample.steps),
            "resampled": sample.resampled,
            "seconds": sample.seconds,
        },
        "data": [dataclasses.asdict(part) for part in found.parts],
        "examples": found.examples,
        "cost_model": {"fixed_tokens_a_micro_step": simulate.FIXED, "measured": False},
        "own": dataclasses.asdict(found.own),
        "budgets": [dataclasses.asdict(one) for one in found.budgets],
        "other_layout": dataclasses.asdict(found.other_layout),
        "any_size": None if found.any_size is None else dataclasses.asdict(found.any_size),
        "fixed": dataclasses.asdict(found.fixed),
        "length_grouped": dataclasses.asdict(found.length_grouped),
        "by_ranks": [{"ranks": ranks} | dataclasses.asdict(one) for ranks, one in found.by_ranks],
        "patch_caps": [dataclasses.asdict(one) for one in found.patch_caps],
        "bound_by_longest": found.bound_by_longest,
        "advice": dataclasses.asdict(advice),
    }


# ----------------------------------------------------------------------------------------------------------------------
# A look as text for a terminal.

NARROWEST = 120
"""Characters of a line where nobody looks at a terminal."""


def show(console: Console, found: Look, advice: Advice) -> None:
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST)
    parts: list[RenderableType] = [Text(_head(found)), _distribution(found.parts), _budgets(found)]
    if found.compared.optimizer_steps < found.own.optimizer_steps:
        parts.append(Text(_thinned(found)))
    if found.by_ranks:
        parts.append(_ranks(found))
    parts.append(Text.assemble(("Recommended: ", "bold"), advice.sentence))
    parts += [Text.assemble(("Warning: ", "yellow"), line) for line in advice.warnings]
    if not found.asked.has_block:
        parts.append(Text(f"The YAML has no odb: block; add\n\nodb:\n  token_budget: {advice.token_budget}\n"))
    console.print(Group(*parts), highlight=False)


def _head(found: Look) -> str:
    asked, sample = found.asked, found.sample
    of = "of a stream" if sample.population is None else f"of {sample.population:,}"
    steps = f"optimizer steps of {found.step_size:,} samples (N)" if found.step_size else "filled optimizer steps"
    auto = "".join(
        f"; {key}: auto, here {found.own.token_budget if key == 'token_budget' else 'none'}" for key in asked.auto
    )
    return (
        f"{asked.path}: {len(sample.seen):,} {of} rows observed in {sample.seconds:.0f} s; {steps} on {asked.ranks} "
        f"rank{'s' * (asked.ranks > 1)}, {found.own.optimizer_steps} of them planned; layout {found.layout}: "
        f"{found.layout_reason}{auto}"
    )


def _thinned(found: Look) -> str:
    return (
        f"  Planning takes long here, so all but the YAML's own budget, and all numbers of ranks, are planned over "
        f"{found.compared.optimizer_steps} of the {found.own.optimizer_steps} optimizer steps."
    )


def _distribution(parts: Sequence[Part]) -> Table:
    table = _table(
        "What the samples are", "data set", "rows", "", "mean", "p50", "p90", "p99", "max", "cut off", "left out"
    )
    for part in parts:
        measures: list[tuple[str, Spread]] = [("tokens", part.tokens), ("patches", part.patches), ("units", part.units)]
        for number, (name, spread) in enumerate(one for one in measures if one[1].most or one[0] == "tokens"):
            left_out = ", ".join(f"{n} {reason}" for reason, n in part.left_out.items()) or "0"
            first = (part.name, f"{part.rows:,}") if number == 0 else ("", "")
            last = (f"{part.cut_off:,}", left_out) if number == 0 else ("", "")
            amounts = (f"{spread.mean:,.0f}", *(f"{n:,}" for n in (spread.p50, spread.p90, spread.p99, spread.most)))
            table.add_row(*first, name, *amounts, *last)
    return table


def _budgets(found: Look) -> Table:
    size = found.asked.batch_size
    table = _table(
        f"Budgets (speed is predicted: a micro-step costs the tokens of the fullest rank and {simulate.FIXED})",
        "token_budget", "max_patches", "K", "padding", "balance", "patch balance", "budget use", "efficiency",
        "of limit", "overlong", "speed",
    )  # fmt: skip
    for one in found.budgets:
        is_own = one.token_budget == found.own.token_budget
        shown = found.own if is_own else one
        table.add_row(*_figures(f"{one.token_budget:,}", shown), style="bold" if is_own else None)
    table.add_section()
    table.add_row(*_figures(f"{found.own.token_budget:,} {found.other_layout.layout}", found.other_layout))
    if found.any_size is not None:
        table.add_row(*_figures(f"{found.own.token_budget:,} any size", found.any_size))
    table.add_row(*_figures(f"fixed x {size}", found.fixed))
    table.add_row(*_figures(f"by length x {size}", found.length_grouped))
    return table


def _figures(name: str, one: Outcome) -> list[str]:
    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    patches = "" if one.max_patches is None else f"{one.max_patches:,}"
    few, many = one.least_micro_batches, one.most_micro_batches
    steps = f"{one.micro_batches:.1f}" + (f" ({few}-{many})" if few < many else "")
    ratios = [share(one.padding_ratio), share(one.balance), share(one.patch_balance), share(one.budget_use)]
    reached = [share(one.step_efficiency), share(one.share_of_limit)]
    return [
        name,
        patches,
        steps,
        *ratios,
        *reached,
        "" if one.token_budget is None else f"{one.overlong:,}",
        f"{one.speed:.2f}x",
    ]


def _ranks(found: Look) -> Table:
    table = _table(
        f"On other numbers of ranks (N = {found.step_size:,})", "ranks", "K", "balance", "budget use", "efficiency"
    )
    for ranks, one in found.by_ranks:
        use = "" if one.budget_use is None else f"{one.budget_use:.1%}"
        cells = (f"{ranks}", f"{one.micro_batches:.1f}", f"{one.balance:.1%}", use, f"{one.step_efficiency:.1%}")
        table.add_row(*cells, style="bold" if ranks == found.asked.ranks else None)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column == "left out" else "right", no_wrap=number < 3)
    return table


# ----------------------------------------------------------------------------------------------------------------------
# A look as one page of plots.

ODB, OTHER, FIXED, GROUPED, OWN = "#2a6f97", "#8ecae6", "#e9c46a", "#6a994e", "#9b2226"


def draw(found: Look, path: Path) -> None:
    """Save a PNG: how long the samples are, what budgets and ranks do with them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plots: list[Any] = [_samples, _speed, _shares]
    if found.by_ranks:
        plots.append(_bars_of_ranks)
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


def _bars_of_ranks(axes: Axes, found: Look) -> None:
    ranks = [f"{number}" for number, _ in found.by_ranks]
    colors = [OWN if number == found.asked.ranks else ODB for number, _ in found.by_ranks]
    axes.bar(ranks, [one.step_efficiency for _, one in found.by_ranks], color=colors)
    axes.set(xlabel="ranks", ylabel="step efficiency", ylim=(0, 1.05))
    axes.set_title(f"the same {found.step_size:,} samples on other numbers of ranks", loc="left", fontsize=10)


def _mark_own(axes: Axes, found: Look) -> None:
    axes.axvline(found.config.token_budget, color=OWN, linestyle="--", linewidth=1)
