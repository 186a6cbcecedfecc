"""A look as text for a terminal, as plain values for machines, and as one picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from odb_factory.plan import simulate
from odb_factory.plan.look import Advice, Look
from odb_factory.plan.rows import Part, Spread
from odb_factory.plan.simulate import Figures

if TYPE_CHECKING:
    pass


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
                     "bound_by_longest")
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
# A look as one picture.


def draw(found: Look, path: Path) -> None:
    """Save a PNG: padding, balance, fill and efficiency under each budget; the YAML's budget is dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="token_budget", ylim=(0, 1.05))
    budgets = [one.token_budget or 0 for one in found.budgets]
    for name in ("padding_ratio", "balance", "budget_use", "step_efficiency", "limit"):
        values = [getattr(one, name) or 0.0 for one in found.budgets]
        axes.plot(budgets, values, ":" if name == "limit" else "o-", label=name.replace("_", " "))
    axes.axvline(found.config.token_budget, color="grey", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(fontsize=8)
    ranks = f"{found.asked.ranks} rank{'s' * (found.asked.ranks > 1)}"
    axes.set_title(f"{found.asked.path.name}: {len(found.sample.seen):,} rows, {ranks}, layout {found.layout}")
    figure.savefig(path, dpi=100)
