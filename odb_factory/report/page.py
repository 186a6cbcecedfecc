"""The HTML page: everything in one file, without scripts and without anything to fetch. Its template is page.html; its
charts are drawn by matplotlib as SVG that takes its colours from page.css."""

from __future__ import annotations

import datetime
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import jinja2
import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from odb_factory.planning import Media
from odb_factory.report.words import UNKNOWN, Run, number, percent, seconds_text, settings
from odb_factory.version import __version__

NUMBER = r"(?<![#\w])[0-9][0-9,.e%-]*(?: (?:s|h|min)\b)?(?: [0-9]+ (?:s|min)\b)?"
"""With its unit; digits of an HTML entity are no number."""
MOST_ROWS = 40
"""Rows of a long table; all are in the JSON."""
TILES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("optimizer_steps", "optimizer steps", number),
    ("samples", "samples", number),
    ("seconds", "time of training", seconds_text),
    ("samples_per_second", "samples per second", number),
    ("tokens_per_second", "tokens per second", number),
    ("padding_ratio", "padding", percent),
    ("balance", "balance", percent),
    ("patch_balance", "patch balance", percent),
    ("encoder_patches", "patches encoded by each rank", lambda counts: " / ".join(map(number, counts or ()))),
    ("budget_use", "budget use", percent),
    ("data_wait_s", "waited for data", seconds_text),
    ("micro_steps", "micro-steps", number),
    ("units_cv", "spread of units", percent),
)


def make_page(figures: Mapping[str, Any], made: datetime.datetime) -> str:
    """figures: the content of the JSON, with one run or two. made: when."""
    runs: Sequence[Run] = figures["runs"]
    tiles = [
        (name, label, [(run["totals"][name], text(run["totals"][name])) for run in runs])
        for name, label, text in TILES
        if any(run["totals"][name] is not None for run in runs)
        and ("balance" not in name or any(run["asked"].get("ranks") != 1 for run in runs))
    ]
    sections = [
        ("Course of the training", list(of_entries(runs))),
        ("Optimizer steps", list(of_steps(runs))),
        ("Distributions", list(distributions(runs))),
    ]
    package = resources.files("odb_factory.report")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"number": number, "percent": percent, "seconds": seconds_text, "prose": prose, "some": some}
    template = environment.from_string((package / "page.html").read_text(encoding="utf-8"))
    style = Markup((package / "page.css").read_text(encoding="utf-8"))
    values = {
        "figures": figures,
        "runs": runs,
        "comparison": figures["comparison"],
        "tiles": tiles,
        "sections": sections,
    }
    values |= {"style": style, "settings": settings(runs[0]), "unknown": UNKNOWN, "version": __version__, "made": made}
    return template.render(values)


def prose(text: str) -> Markup:
    """`code` as code; numbers with their units are kept on one line."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(NUMBER, r'<span class="n">\g<0></span>', marked))


def some(rows: Sequence[Any]) -> Sequence[Any]:
    """All rows, or `MOST_ROWS` of them at even distances, the first and the last among them."""
    last = len(rows) - 1
    return rows if last < MOST_ROWS else [rows[k * last // (MOST_ROWS - 1)] for k in range(MOST_ROWS)]


# ----------------------------------------------------------------------------------------------------------------------
# Charts of one run or two.

COLOURS = {"#1f6f9f": "s0", "#b3541e": "s1", "#5c666d": "soft", "#dfe2e0": "rule", "#9b2226": "mark"}
"""Colours as drawn, and the variables of page.css that replace them."""
RUNS, SOFT, RULE, MARK = tuple(COLOURS)[:2], *tuple(COLOURS)[2:]
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "odb_factory", "font.size": 9, "axes.edgecolor": RULE}
STYLE |= {"axes.labelcolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT, "grid.color": RULE}
MOST_POINTS = 600
"""Points of a line; of longer ones the least and the largest of each stretch are drawn, so that no peak is lost."""
LARGEST = 1e300
STEP, SECONDS = "optimizer step", "seconds"
UNITS = (("hours", 3600, 3), ("minutes", 60, 3), (SECONDS, 1, 0))
"""Unit of time, its seconds, and how many of it the longest run takes at least."""


class Chart(NamedTuple):
    title: str
    caption: str
    drawing: Markup


class Line(NamedTuple):
    """points: (x, y), by x. run: its number, which decides the colour. dashed: beside another line of this run."""

    points: Sequence[tuple[float, float]]
    run: int = 0
    dashed: bool = False
    dots: bool = False


OF_ENTRIES: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    ("Loss", "As logged.", STEP, "loss", ("loss",)),
    ("Loss over time", "As logged.", SECONDS, "loss", ("loss",)),
    ("Learning rate", "As logged.", STEP, "learning rate", ("learning_rate",)),
    ("Tokens per second", "All ranks, without padding; evaluation and saving included.", SECONDS, "tokens/s",
     ("tokens_per_second",)),
    ("Samples per second", "All ranks; evaluation and saving included.", SECONDS, "samples/s",
     ("samples_per_second",)),
    ("Time of an optimizer step", "Mean since the log entry before; evaluation and saving included.", STEP, "seconds",
     ("seconds_per_step",)),
    ("Padding", "Share of the collated tokens that is padding or dummy media.", SECONDS, "share", ("padding_ratio",)),
    ("Balance", "Work of all ranks as a share of what they wait for: 1 if no rank waits.", SECONDS, "share",
     ("balance", "patch_balance")),
    ("Budget use", "Collated tokens as a share of token_budget.", SECONDS, "share", ("budget_use",)),
    ("Waiting for data", "Rank 0, since the log entry before.", SECONDS, "seconds", ("data_wait_s",)),
)  # fmt: skip
"""Title, caption, what the chart is over, label, and figures of the log entries, of which the second is dashed."""
OF_STEPS = (
    ("Units of an optimizer step", "What the loss is a mean over: supervised tokens, pairs or examples.", "units"),
    ("Mean length of an optimizer step", "Tokens of a sample, without padding.", "tokens"),
)
OF_DISTRIBUTIONS = (
    ("length", "Lengths of samples", "tokens", None),
    ("tokens_of_micro_batch", "Tokens of a micro-batch", "tokens as collated, on a rank", "token_budget"),
    ("samples_of_micro_batch", "Samples of a micro-batch", "samples, on a rank", None),
    ("patches_of_micro_batch", "Patches of a micro-batch", "media patches, on a rank", "max_patches"),
    *(
        (
            f"{name}_of_micro_batch",
            f"{name.replace('_', ' ').capitalize()} of a micro-batch",
            "on a rank",
            f"max_{name}",
        )
        for name in Media._fields
    ),
    ("micro_batches_of_step", "Micro-batches of an optimizer step", "K, on each rank", None),
)


def of_entries(runs: Sequence[Run]) -> Iterable[Chart]:
    """Of the log entries. A chart that could only show a constant is left out: padding of flat runs, one rank."""
    for title, caption, over, label, names in OF_ENTRIES:
        lines = []
        for place, run in enumerate(runs):
            for name in names:
                is_constant = run["asked"].get("ranks") == 1 or (name == "patch_balance" and not run["totals"][name])
                if "balance" not in name or not is_constant:
                    lines.append(Line(_points(run["entries"], over, name), place, dashed=name != names[0]))
            if label == "loss":
                evaluated = _points(run["evaluations"], over, "eval_loss")
                lines.append(Line(evaluated, place, dashed=True, dots=True))
        if title == "Padding" and not any(y for line in lines for _, y in line.points):
            continue
        if any(line.dashed and line.points for line in lines):
            caption += " Dashed, with dots: validation." if label == "loss" else " Dashed: patches."
        drawing = draw_lines(lines, over, label, from_zero=label != "loss", to_one=title in ("Balance", "Budget use"))
        if drawing:
            yield Chart(title, caption, drawing)


def _points(entries: Sequence[Run], over: str, name: str) -> list[tuple[float, float]]:
    x_name = "step" if over == STEP else "seconds"
    return [(e[x_name], e[name]) for e in entries if e.get(x_name) is not None and e.get(name) is not None]


def of_steps(runs: Sequence[Run]) -> Iterable[Chart]:
    """Of the optimizer steps one by one, of runs with an audit."""
    for title, caption, name in OF_STEPS:
        lines = []
        for place, run in enumerate(runs):
            steps, of = run["optimizer_steps"], f" ({run['name']})" if len(runs) > 1 else ""
            if steps is None:
                continue
            sums = zip(steps["step"], steps[name], steps["samples"])
            lines.append(Line([(k, total / n if name == "tokens" else total) for k, total, n in sums if n], place))
            if name == "units":
                caption += f" Standard deviation / mean{of}: {number(run['totals']['units_cv'], 3)}."
        if drawing := draw_lines(lines, STEP, name, from_zero=True):
            yield Chart(title, caption, drawing)


def distributions(runs: Sequence[Run]) -> Iterable[Chart]:
    """Of runs with an audit. A budget is drawn if it is at most twice the largest value."""
    for name, title, label, budget in OF_DISTRIBUTIONS:
        found = {k: (run["distributions"] or {}).get(name) for k, run in enumerate(runs)}
        shown = {k: one for k, one in found.items() if one}
        if not shown:
            continue
        captions = [
            (f"{runs[k]['name']}: " if len(runs) > 1 else "") + f"{one['count']:,} values, mean {number(one['mean'])}, "
            f"median {number(one['median'])}, 90% within {number(one['p90'])}, largest {number(one['max'])}."
            for k, one in shown.items()
        ]
        limits = {(runs[k]["asked"].get("block") or {}).get(budget) for k in shown} if budget else set()
        limit = limits.pop() if len(limits) == 1 else None
        mark = limit if isinstance(limit, int) and limit <= 2 * max(one["max"] for one in shown.values()) else None
        if isinstance(limit, int):
            captions.append(f"The budget{' (dashed)' if mark else ''}: {number(limit)}.")
        yield Chart(title, " ".join(captions), draw_histograms(shown, label, mark))


def draw_lines(
    lines: Iterable[Line], x_label: str, y_label: str, *, from_zero: bool = False, to_one: bool = False
) -> Markup:
    """from_zero: the scale begins at 0; to_one: it goes from 0 to 1. Empty without points."""
    arrays = ((line, np.array(line.points, float).reshape(-1, 2)) for line in lines)
    finite = ((line, points[(np.abs(points) < LARGEST).all(axis=1)]) for line, points in arrays)
    drawn = [(line, points) for line, points in finite if len(points)]
    if not drawn:
        return Markup()
    seconds = 1
    if x_label == SECONDS:
        longest = max(points[-1, 0] for _, points in drawn)
        x_label, seconds, _ = next((unit for unit in UNITS if longest >= unit[1] * unit[2]), UNITS[-1])
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(x_label, y_label)
        for line, points in reversed(drawn):  # the first run on top of a broader line of the other, which may equal it
            x, y = _thinned(points).T
            look = "o" if line.dots or len(points) == 1 else ""
            axes.plot(x / seconds, y, look + ("--" if line.dashed else "-"), color=RUNS[line.run], markersize=4,
                      linewidth=(1.5, 3.5)[line.run], alpha=(1, 0.55)[line.run])  # fmt: skip
        if x_label == STEP:
            axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.set_xlim(left=min(0, axes.get_xlim()[0]) if x_label != STEP else None)
        if to_one:
            axes.set_ylim(0, 1.04)
        elif from_zero:
            axes.set_ylim(bottom=0)
        return _svg(figure, f"{y_label} over {x_label}")


def draw_histograms(found: Mapping[int, Run], label: str, mark: float | None) -> Markup:
    """found: by number of a run its `histogram`, drawn as shares of the count. mark: a value to show."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(label, "share")
        for run, one in found.items():
            width = one["edges"][1] - one["edges"][0]
            edges = np.array(one["edges"], float) - (
                0.5 if width == 1 else 0
            )  # a whole number in the middle of its bar
            shares = np.array(one["counts"]) / one["count"]
            axes.stairs(shares, edges, fill=True, color=RUNS[run], alpha=(0.75, 0.55)[run])
        if mark is not None:
            axes.axvline(mark, color=MARK, linestyle="--", linewidth=1.2)
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.set_xlim(left=min(0, axes.get_xlim()[0]))
        axes.set_ylim(bottom=0)
        return _svg(figure, f"distribution of {label}")


def _thinned(points: np.ndarray) -> np.ndarray:
    if len(points) <= MOST_POINTS:
        return points
    stretches = np.array_split(np.arange(len(points)), MOST_POINTS // 2)
    kept = [stretch[[points[stretch, 1].argmin(), points[stretch, 1].argmax()]] for stretch in stretches]
    return points[np.unique([0, *np.concatenate(kept), len(points) - 1])]


def _axes(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.7, 2.3))
    axes = figure.subplots()
    figure.subplots_adjust(left=0.17, right=0.98, top=0.96, bottom=0.2)
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.yaxis.set_label_coords(-0.165, 0.5)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.tick_params(bottom=False, left=False)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    return figure, axes


def tick(value: float) -> str:
    """Short: 12k, 1.5M, 2e-05."""
    for size, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= size:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}" if value else "0"


def _svg(figure: Figure, meaning: str) -> Markup:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    text = out.getvalue()
    attributes = f'role="img" aria-label="{escape(meaning)}"'
    text = re.sub(r'^.*?<svg [^>]*(viewBox="[^"]*")[^>]*>', rf"<svg \1 {attributes}>", text, count=1, flags=re.DOTALL)
    text = re.sub(r"font: ([0-9.]+px) [^;\"]*", r"font-size: \1", text)
    for colour, name in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    return Markup(re.sub(r"\n\s*", "\n", text))
