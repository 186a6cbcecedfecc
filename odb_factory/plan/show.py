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
from odb_factory.plan.look import Advice, Look
from odb_factory.plan.rows import ALL, Part, Spread
from odb_factory.plan.simulate import Figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ----------------------------------------------------------------------------------------------------------------------
# A look as plain values, for machines.


def to_dict(found: Look, advice: Advice) -> dict[str, Any]:
    """JSON types. These names are public."""
    sample, asked = found.sample, found.asked
    return {
        "yaml": str(asked.path),
        "ranks": asked.ranks,
        "global_batch_size": found.step_size,
        "per_device_train_batch_size": asked.batch_size,
        "gradient_accumulation_steps": asked.accumulation,
        "has_block": asked.has_block,
        "config": found.config.to_dict(),
        "observed": {
            "rows": len(sample.seen),
            "of": sample.population,
            "optimizer_steps": len(sample.steps),
            "resampled": sample.resampled,
            "seconds": sample.seconds,
        },
        "cost_model": {"fixed_tokens_a_micro_step": simulate.FIXED, "measured": False},
        "advice": dataclasses.asdict(advice),
    } | {
        ("data" if name == "parts" else name): _plain(getattr(found, name))
        for name in ("layout", "layout_reason", "parts", "examples", "own", "budgets", "other_layout", "fixed",
                     "length_grouped", "bound_by_longest")
    }  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [dataclasses.asdict(one) for one in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------------------
# A look as text for a terminal.

NARROWEST = 160
"""Least characters of a line where the output is not a terminal: no column is cut."""
SHOWN_RANKS = 8
"""Of more ranks the least and the most of a figure are shown."""
COLUMNS = (
    "  *: the YAML's budget (without one, rows x cutoff_len of stock's micro-batch). units: what the loss is a mean "
    "over: supervised tokens, pairs (rm, dpo) or examples (kto). K: micro-batches of an optimizer step on each "
    "rank, mean (least-most). padding: of the collated tokens. balance: tokens of all ranks by what they wait "
    "for. budget use: of token_budget; above 100% where overlong samples, which break it alone, are micro-batches "
    "of one. efficiency: real tokens by the time of all ranks in tokens; of limit: the share reached of what no "
    "cut exceeds. speed: by that of fixed batches.\n"
)


def show(console: Console, found: Look, advice: Advice) -> None:
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST)
    parts: list[RenderableType] = [Text(_head(found)), _distribution(found.parts), _budgets(found)]
    if found.own.encoder_patches is not None:
        parts.append(Text(_encoded(found)))
    parts.append(Text(COLUMNS))
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


def _encoded(found: Look) -> str:
    patches, balance = found.own.encoder_patches or [], found.own.encoder_balance or 0.0
    each = " / ".join(f"{one:,}" for one in patches)
    if len(patches) > SHOWN_RANKS:
        each = f"{min(patches):,} to {max(patches):,}"
    how = "with" if found.config.balance_encoder else "without"
    return (
        f"  Vision patches that each rank encodes: {each}; their mean is {balance:.1%} of what the ranks wait for, "
        f"{how} balance_encoder."
    )


def _distribution(parts: Sequence[Part]) -> Table:
    table = _table(
        "What the samples are", "data set", "rows", "", "mean", "p50", "p90", "p99", "max", "cut off", "left out"
    )
    for part in parts:
        media = [(name.replace("_", " "), spread) for name, spread in part.media.items()]
        measures: list[tuple[str, Spread]] = [("tokens", part.tokens), *media, ("units", part.units)]
        for number, (name, spread) in enumerate(one for one in measures if one[1].most or one[0] == "tokens"):
            left_out = ", ".join(f"{n} {reason}" for reason, n in part.left_out.items()) or "0"
            first = (part.name, f"{part.rows:,}") if number == 0 else ("", "")
            last = (f"{part.cut_off:,}", left_out) if number == 0 else ("", "")
            amounts = (f"{spread.mean:,.0f}", *(f"{n:,}" for n in (spread.p50, spread.p90, spread.p99, spread.most)))
            table.add_row(*first, name, *amounts, *last)
    return table


def _budgets(found: Look) -> Table:
    size, has_patches = found.asked.batch_size, found.own.max_patches is not None
    table = _table(
        f"Budgets (speed is predicted: a micro-step costs the tokens of the fullest rank and {simulate.FIXED})",
        "token_budget", *["max_patches"] * has_patches, "K", "padding", "balance", "patch balance", "budget use",
        "efficiency", "of limit", "overlong", "speed",
    )  # fmt: skip
    for one in found.budgets:
        is_own = one.token_budget == found.own.token_budget
        name = f"{'* ' * is_own}{one.token_budget:,}"
        table.add_row(*_figures(has_patches, name, one), style="bold" if is_own else None)
    table.add_section()
    table.add_row(*_figures(has_patches, f"{found.own.token_budget:,} {found.other_layout.layout}", found.other_layout))
    table.add_row(*_figures(has_patches, f"fixed x {size}", found.fixed))
    table.add_row(*_figures(has_patches, f"by length x {size}", found.length_grouped))
    return table


def _figures(has_patches: bool, name: str, one: Figures) -> list[str]:
    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    patches = "" if one.max_patches is None else f"{one.max_patches:,}"
    few, many = one.least_micro_batches, one.most_micro_batches
    steps = f"{one.micro_batches:.1f}" + (f" ({few}-{many})" if few < many else "")
    ratios = [share(one.padding_ratio), share(one.balance), share(one.patch_balance), share(one.budget_use)]
    reached = [share(one.step_efficiency), share(one.share_of_limit)]
    return [
        name,
        *[patches] * has_patches,
        steps,
        *ratios,
        *reached,
        "" if one.token_budget is None else f"{one.overlong:,}",
        f"{one.speed:.2f}x",
    ]


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

    figure, grid = plt.subplots(1, 3, figsize=(17, 4.4), layout="constrained")
    for axes, plot in zip(grid, (_samples, _speed, _shares)):
        plot(axes, found)
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
    axes.axvline(found.asked.parsed.data.cutoff_len, color=OWN, linestyle=":", linewidth=1, label="cutoff_len")
    axes.set_ylabel("samples")
    _tokens_along(axes, "tokens of a sample", found)
    axes.legend(fontsize=8)
    axes.set_title("lengths of the samples; dashed: token_budget", loc="left", fontsize=10)


def _speed(axes: Axes, found: Look) -> None:
    budgets = [one.token_budget or 0 for one in found.budgets]
    axes.plot(budgets, [one.speed for one in found.budgets], marker="o", color=ODB, label=f"odb, {found.layout}")
    other = found.other_layout
    axes.plot(
        [found.config.token_budget], [other.speed], marker="s", color=OTHER, linestyle="", label=f"odb, {other.layout}"
    )
    axes.axhline(found.length_grouped.speed, color=GROUPED, linewidth=1.5, label="length-grouped")
    axes.axhline(found.fixed.speed, color=FIXED, linewidth=1.5, label="fixed batches")
    axes.set(ylabel="times fixed batches", ylim=(0, None))
    _tokens_along(axes, "token_budget", found)
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
    axes.set(ylim=(0, 1.05))
    _tokens_along(axes, "token_budget", found)
    axes.legend(fontsize=8)
    axes.set_title("what a budget does", loc="left", fontsize=10)


def _tokens_along(axes: Axes, label: str, found: Look) -> None:
    """Powers of two, written out, and the YAML's budget."""
    axes.axvline(found.config.token_budget, color=OWN, linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(axis="x", labelsize=8)
    axes.minorticks_off()
    axes.set_xlabel(label)
