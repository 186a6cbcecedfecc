"""What the benchmarks of whole trainings show: a Markdown table, where another contestant is ahead, a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Result = dict[str, Any]
"""What one training came to, by the keys of the columns; `name` is the contestant's. None: it cannot be said."""


@dataclass(frozen=True)
class Column:
    """best: whether "most" or "least" is best, if that is a question at all. of_steps: only of those with as many
    optimizer steps as odb."""

    key: str
    label: str
    show: Callable[[Any], str]
    best: str | None = None
    of_steps: bool = False


def whole(value: float) -> str:
    return f"{value:,.0f}"


def mib(value: float) -> str:
    return f"{value / 2**20:,.0f}"


SAMPLES = Column("samples_per_second", "samples/s", "{:.1f}".format, "most")
PADDING = Column("padding", "padding", "{:.1%}".format, "least")
SECONDS = Column("seconds", "seconds", "{:.1f}".format, "least")
VALIDATION = Column("validation_loss", "validation loss", "{:.3f}".format, "least", of_steps=True)
COLUMNS = (
    SAMPLES,
    Column("tokens_per_second", "real tokens/s", whole, "most"),
    Column("padded_tokens_per_second", "padded tokens/s", whole),
    PADDING,
    Column("balance", "balance", "{:.2f}".format, "most"),
    Column("steps", "micro-steps", whole),
    SECONDS,
    Column("seconds_to_first_step", "s to first step", "{:.1f}".format, "least"),
    Column("peak_padded_tokens", "peak padded tokens", whole),
    Column("peak_memory", "peak memory, MiB", mib, "least"),
    Column("train_loss", "training loss", "{:.3f}".format, "least", of_steps=True),
    VALIDATION,
)


def shares(fixed: Result, ours: Result, measure: Callable[[Result], float]) -> list[float]:
    """What ours takes by what fixed batches take, of each seed."""
    return [measure(mine) / measure(stock) for stock, mine in zip(fixed["runs"], ours["runs"], strict=True)]


def furthest_loss(fixed: Result, ours: Result) -> float:
    """The largest relative difference of the training losses of any optimizer step, of all seeds."""
    pairs = zip(fixed["runs"], ours["runs"], strict=True)
    losses = [pair for stock, mine in pairs for pair in zip(stock["losses"], mine["losses"], strict=True)]
    return max(abs(a - b) / a for a, b in losses)


def balance(padded: Sequence[Sequence[int]]) -> float:
    """Mean over steps of the mean over the largest padded tokens of the ranks. padded: of each rank, by step."""
    return sum(sum(step) / len(step) / max(step) for step in zip(*padded)) / min(map(len, padded))


def markdown(title: str, results: Sequence[Result], columns: Sequence[Column] = COLUMNS) -> str:
    """A row for each contestant, the best of each column in bold."""
    lines = [f"| {title} | {' | '.join(column.label for column in columns)} |", f"|---|{'--:|' * len(columns)}"]
    best = {column: _best(column, results) for column in columns}
    for result in results:
        shown = {column: _shown(column, result) for column in columns}
        cells = [f"**{text}**" if result["name"] in best[column] else text for column, text in shown.items()]
        lines.append(f"| {result['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ahead_of_odb(results: Sequence[Result], columns: Sequence[Column] = COLUMNS) -> str:
    """In which figures, as shown, somebody else is better than odb; its own variants are not somebody else."""
    ours = next(result for result in results if result["name"] == "odb")
    others = [result for result in results if not result["name"].startswith("odb")]
    found = []
    for column in columns:
        best = _best(column, [*others, ours])
        if best and "odb" not in best:
            (shown,) = set(best.values())
            found.append(f"{column.label} ({' and '.join(best)}: {shown}, odb: {_shown(column, ours)})")
    return f"Ahead of odb, by means: {'; '.join(found)}." if found else "By means odb is ahead in every figure."


def draw(tables: dict[str, Sequence[Result]], columns: Sequence[Column], path: Path) -> None:
    """Save a PNG: a row of panels for each table, a panel for each column, a bar for each contestant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (4.2 * len(columns), 0.8 + 0.42 * sum(len(results) + 1 for results in tables.values()))
    figure, panels = plt.subplots(len(tables), len(columns), figsize=size, squeeze=False)
    for row, (title, results) in zip(panels, tables.items()):
        for axes, column in zip(row, columns):
            names = [result["name"] for result in results]
            values = [result[column.key] or 0 for result in results]
            colors = ["#9b2226" if name.startswith("odb") else "#2a6f97" for name in names]
            bars = axes.barh(names, values, color=colors)
            axes.bar_label(bars, [_shown(column, result) for result in results], fontsize=8, padding=2)
            axes.invert_yaxis()
            axes.margins(x=0.2)
            axes.set_title(f"{title}: {column.label}", loc="left", fontsize=9)
            axes.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_losses(tables: dict[str, Sequence[Result]], path: Path) -> None:
    """Save a PNG: of each table the training losses over optimizer steps and over time, of those who keep the batch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(tables), 2, figsize=(10, 3 * len(tables)), squeeze=False)
    for (title, results), (steps, times) in zip(tables.items(), panels):
        for result in results:
            first = result["runs"][0]
            if result["name"] not in ("fixed batch", "length-grouped", "odb"):
                continue
            style = {"label": result["name"], "linestyle": "--" if result["name"] == "odb" else "-"}
            steps.plot(range(1, len(first["losses"]) + 1), first["losses"], **style)
            times.plot(first["ends"], first["losses"], **style)
        steps.set(xlabel="optimizer step", ylabel="training loss")
        times.set(xlabel="seconds of training")
        steps.set_title(title, loc="left", fontsize=9)
        steps.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _shown(column: Column, result: Result) -> str:
    value = result[column.key]
    return "" if value is None else column.show(value)


def _best(column: Column, results: Sequence[Result]) -> dict[str, str]:
    """The names of those with the best figure of a column, as it is shown; nobody where that is no question."""
    values = {result["name"]: result[column.key] for result in results if result[column.key] is not None}
    if column.of_steps:
        steps = {result["name"]: result.get("optimizer_steps") for result in results}
        values = {name: value for name, value in values.items() if steps[name] == steps["odb"]}
    if column.best is None or len(values) < 2:
        return {}
    best = column.show(max(values.values()) if column.best == "most" else min(values.values()))
    return {name: best for name, value in values.items() if column.show(value) == best}
