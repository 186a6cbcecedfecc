"""A look as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from odb_factory.dry_run import efficiency
from odb_factory.dry_run.advice import Advice
from odb_factory.dry_run.distribution import Part, Spread
from odb_factory.dry_run.look import Look
from odb_factory.dry_run.outcome import Outcome

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
        f"Budgets (speed is predicted: a micro-step costs the tokens of the fullest rank and {efficiency.FIXED})",
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
