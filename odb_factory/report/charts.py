"""The charts of the page: of log entries, of optimizer steps, and distributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from odb_factory.report import html
from odb_factory.report.read import number, percent

# ----------------------------------------------------------------------------------------------------------------------
# Charts as inline SVG, coloured by the style of the page: lines over a scale, and histograms.

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 10, 40
MOST_POINTS = 600
"""Of a line; where there are more, the least and the largest of each stretch are drawn, so that no peak is lost."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """points: (x, y), by x. number: of the run, which decides the colour. dashed: beside another one of this run."""

    name: str
    points: Sequence[Point]
    number: int = 0
    dashed: bool = False
    dots: bool = False


def lines(
    series: Sequence[Series], x_label: str, y_label: str, *, from_zero: bool = False, to_one: bool = False
) -> str:
    """A line chart. from_zero: the scale begins at 0; to_one: it goes from 0 to 1, as a ratio. "" without points."""
    drawn = [one for one in (_finite(one) for one in series) if one.points]
    if not drawn:
        return ""
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points]
    low, high = (0.0, 1.0) if to_one else (0.0 if from_zero else min(ys), max(ys))
    begin = 0.0 if min(xs) >= 0 else min(xs)
    x_scale = _Scale(begin, max(xs), LEFT, WIDTH - RIGHT)
    y_scale = _Scale(low, high, HEIGHT - BOTTOM, TOP, is_rounded=True)
    parts = [_axes(x_scale, y_scale, x_label, y_label)]
    for one in reversed(drawn):  # the first run on top; that of another is broader, to be seen under one that equals it
        points = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in _thinned(one.points))
        style = f"s{one.number}{' dashed' if one.dashed else ''}"
        if len(one.points) > 1:
            parts.append(f'<polyline class="line {style}" points="{points}"/>')
        if one.dots or len(one.points) == 1:
            parts += [
                f'<circle class="dot {style}" cx="{x_scale(x):.1f}" cy="{y_scale(y):.1f}" r="3"/>'
                for x, y in one.points
            ]
    return _svg(parts, f"{y_label} over {x_label}: {', '.join(one.name for one in drawn)}")


def histogram(
    runs: Sequence[tuple[int, Sequence[float], Sequence[float]]], x_label: str, y_label: str, mark: float | None = None
) -> str:
    """runs: of each its number, edges and counts, drawn as shares of their sum. mark: a value to show, such as a
    budget. The scale begins at 0."""
    drawn = [(run, edges, counts) for run, edges, counts in runs if counts and sum(counts)]
    if not drawn:
        return ""
    edges_of_all = [edge for _, edges, _ in drawn for edge in edges] + ([mark] if mark is not None else [])
    tallest = max(count / sum(counts) for _, _, counts in drawn for count in counts)
    x_scale = _Scale(0.0, max(edges_of_all), LEFT, WIDTH - RIGHT)
    y_scale = _Scale(0.0, tallest, HEIGHT - BOTTOM, TOP)
    parts = [_axes(x_scale, y_scale, x_label, y_label)]
    for run, edges, counts in drawn:
        for begin, end, count in zip(edges, edges[1:], counts):
            x, y = x_scale(begin), y_scale(count / sum(counts))
            width = max(x_scale(end) - x - 1, 0.5)
            if count:
                parts.append(
                    f'<rect class="bar s{run}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                    f'height="{HEIGHT - BOTTOM - y:.1f}"/>'
                )
    if mark is not None:
        parts.append(
            f'<line class="mark" x1="{x_scale(mark):.1f}" x2="{x_scale(mark):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        )
    return _svg(parts, f"distribution of {x_label}")


class _Scale:
    """Values to places, with its ticks at round numbers. is_rounded: it begins and ends at one."""

    def __init__(self, low: float, high: float, begin: float, end: float, *, is_rounded: bool = False):
        if high <= low:
            half = max(0.5, 1e-3 * abs(low))  # of very large values 0.5 is less than their rounding
            low, high = (low - half, high + half) if low else (0.0, 1.0)
        step = _round_step((high - low) / 5)
        if is_rounded:
            low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        first = math.ceil(low / step - 1e-9)
        self.ticks = [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]
        self._low, self._high, self._begin, self._end = low, high, begin, end

    def __call__(self, value: float) -> float:
        return self._begin + (value - self._low) / (self._high - self._low) * (self._end - self._begin)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def _axes(x_scale: _Scale, y_scale: _Scale, x_label: str, y_label: str) -> str:
    parts = []
    for tick, place in _places(y_scale):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place}" y2="{place}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{place}" dy="0.32em" text-anchor="end">{tick}</text>')
    for tick, place in _places(x_scale):
        parts.append(f'<text class="tick" x="{place}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{tick}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    turn = f"rotate(-90 12 {(HEIGHT - BOTTOM + TOP) / 2})"
    label = f'x="12" y="{(HEIGHT - BOTTOM + TOP) / 2}" text-anchor="middle" transform="{turn}"'
    return "".join([*parts, f'<text class="label" {label}>{escape(y_label)}</text>'])


def _places(scale: _Scale) -> list[tuple[str, str]]:
    return [(_tick(tick), f"{scale(tick):.1f}") for tick in scale.ticks]


def _tick(value: float) -> str:
    """Short: 12k, 1.5M, 2e-05."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:g}{letter}"
    return f"{value:.4g}" if value else "0"


def _svg(parts: Sequence[str], meaning: str) -> str:
    view = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(meaning, quote=True)}"'
    return f"<svg {view}>{''.join(parts)}</svg>"


def _finite(series: Series) -> Series:
    points = [(x, y) for x, y in series.points if math.isfinite(x) and math.isfinite(y)]
    return Series(series.name, points, series.number, series.dashed, series.dots)


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    if len(points) <= MOST_POINTS:
        return points
    stretch = -(-len(points) * 2 // MOST_POINTS)
    kept: list[Point] = []
    of_y: Callable[[Point], float] = lambda point: point[1]  # noqa: E731
    for begin in range(0, len(points), stretch):
        part = points[begin : begin + stretch]
        kept += sorted({min(part, key=of_y), max(part, key=of_y)})
    return [points[0], *kept, points[-1]]


# ----------------------------------------------------------------------------------------------------------------------

Run = Mapping[str, Any]
STEP, SECONDS = "optimizer step", "seconds of training"
NEAR = 2
"""A budget is drawn beside values that come to more than one in so many of it; elsewhere it would crowd them."""


@dataclass(frozen=True)
class Chart:
    """values: (name of a log entry's figure, what a legend calls it); the second is dashed. over: see `STEP`."""

    title: str
    caption: str
    over: str
    values: tuple[tuple[str, str], ...]
    label: str
    to_one: bool = False

    @property
    def from_zero(self) -> bool:
        return self.label != "loss"


ALL = "evaluation and saving included."
OF_ENTRIES = (
    Chart("Loss", "As logged.", STEP, (("loss", "training"),), "loss"),
    Chart("Loss over time", "By when it was logged.", SECONDS, (("loss", "training"),), "loss"),
    Chart("Learning rate", "As logged.", STEP, (("learning_rate", ""),), "learning rate"),
    Chart("Learning rate over time", "As logged.", SECONDS, (("learning_rate", ""),), "learning rate"),
    Chart(
        "Tokens per second", f"Of all ranks, without padding; {ALL}", SECONDS, (("tokens_per_second", ""),), "tokens/s"
    ),
    Chart("Samples per second", f"Of all ranks; {ALL}", SECONDS, (("samples_per_second", ""),), "samples/s"),
    Chart(
        "Time of an optimizer step",
        f"Mean since the log entry before; {ALL}",
        STEP,
        (("seconds_per_step", ""),),
        "seconds",
    ),
    Chart(
        "Padding", "Share of the collated tokens, dummy media included.", SECONDS, (("padding_ratio", ""),), "padding"
    ),
    Chart(
        "Balance",
        "Work of all ranks as a share of what they wait for: 1 where no rank waits.",
        SECONDS,
        (("balance", "tokens"), ("patch_balance", "patches (dashed)")),
        "balance",
        to_one=True,
    ),
    Chart(
        "Budget use",
        "Collated tokens as a share of token_budget.",
        SECONDS,
        (("budget_use", ""),),
        "share",
        to_one=True,
    ),
    Chart("Waiting for data", "Rank 0, since the log entry before.", SECONDS, (("data_wait_s", ""),), "seconds"),
)


def of_entries(runs: Sequence[Run]) -> list[str]:
    """Charts that have something to show."""
    return [made for made in (_of_entries(chart, runs) for chart in OF_ENTRIES) if made]


def _of_entries(chart: Chart, runs: Sequence[Run]) -> str:
    series, columns = [], []
    x_name = "step" if chart.over == STEP else "seconds"
    for place, run in enumerate(runs):
        for which, (name, label) in enumerate(chart.values):
            if name == "patch_balance" and run["totals"]["patch_balance"] is None:
                continue
            points = _points(run["entries"], x_name, name)
            if points:
                series.append(Series(_called(run, label), points, place, dashed=which > 0))
                columns.append(
                    (_called(run, label), {e["step"]: e[name] for e in run["entries"] if e[name] is not None})
                )
        if chart.label == "loss":
            points = _points(run["evaluations"], x_name, "eval_loss")
            if points:
                series.append(Series(_called(run, "validation"), points, place, dashed=True, dots=True))
                evaluated = {e["step"]: e["eval_loss"] for e in run["evaluations"] if "eval_loss" in e}
                columns.append((_called(run, "validation"), evaluated))
    drawing = lines(series, chart.over, chart.label, from_zero=chart.from_zero, to_one=chart.to_one)
    if not drawing:
        return ""
    caption = chart.caption + (" Dots: validation." if any(one.dots for one in series) else "")
    return html.figure(chart.title, _legend(runs, series) + html.text(caption), drawing, *_rows(runs, columns, x_name))


def _points(entries: Sequence[Mapping[str, Any]], x_name: str, name: str) -> list[Point]:
    return [(e[x_name], e[name]) for e in entries if e.get(x_name) is not None and e.get(name) is not None]


def _rows(
    runs: Sequence[Run], columns: Sequence[tuple[str, Mapping[int, float]]], x_name: str
) -> tuple[list[str], list[int], Callable[[int], list[str]]]:
    """The head of a table, the optimizer steps that any run has logged, and the cells of one, with its time where that
    is what the chart is over."""
    steps = sorted({step for _, values in columns for step in values})
    head, times = [STEP], []
    if x_name == "seconds":
        times = [{e["step"]: e["seconds"] for e in (*run["evaluations"], *run["entries"])} for run in runs]
        head += [_called(run, "seconds") for run in runs]
    head += [name for name, _ in columns]
    values = [*times, *(one for _, one in columns)]
    return head, steps, lambda step: [f"{step:,}", *(_cell(one.get(step)) for one in values)]


def _cell(value: float | None) -> str:
    return "" if value is None else number(value, 6)


def _called(run: Run, label: str) -> str:
    return f"{run['name']} {label}".strip()


def _legend(runs: Sequence[Run], series: Sequence[Series]) -> str:
    """Which colour is which run, where there are two."""
    present = sorted({one.number for one in series})
    if len(runs) < 2:
        return ""
    return f"{' '.join(html.key(k) + html.text(runs[k]['name']) for k in present)}<br>"


def of_steps(runs: Sequence[Run]) -> list[str]:
    """Charts of the optimizer steps one by one, of runs with an audit."""
    units = "What the loss is a mean over: supervised tokens, pairs or examples."
    return [
        made
        for made in (
            _of_steps(runs, "Units of an optimizer step", units, "units"),
            _of_steps(runs, "Mean length of an optimizer step", "Tokens of a sample, without padding.", "tokens"),
        )
        if made
    ]


def _of_steps(runs: Sequence[Run], title: str, caption: str, name: str) -> str:
    """name: of the sum; that of tokens is divided by samples."""
    series, columns = [], []
    for place, run in enumerate(runs):
        steps = run["optimizer_steps"]
        if steps is None:
            continue
        values = {
            step: amount / samples if name == "tokens" else amount
            for step, amount, samples in zip(steps["step"], steps[name], steps["samples"])
            if samples
        }
        series.append(Series(run["name"], list(values.items()), place))
        columns.append((_called(run, name), values))
        caption += _said_of_steps(run, name, len(runs) > 1)
    drawing = lines(series, STEP, name, from_zero=True)
    if not drawing:
        return ""
    return html.figure(title, _legend(runs, series) + html.text(caption), drawing, *_rows(runs, columns, "step"))


def _said_of_steps(run: Run, label: str, is_named: bool) -> str:
    of = f" ({run['name']})" if is_named else ""
    if label == "units":
        return f" Standard deviation / mean{of}: {number(run['totals']['units_cv'], 3)}."
    found = run["lengths_of_successive_steps"]
    if found is None:
        return ""
    return f" Correlation with the next step{of}: {number(found['correlation'], 2)} (random orders: about 0)."


def distributions(runs: Sequence[Run]) -> list[str]:
    """Histograms, of runs with an audit."""
    made = []
    for name, title, label in (
        ("length", "Lengths of samples", "tokens"),
        ("tokens_of_micro_batch", "Tokens of a micro-batch", "tokens as collated, a rank"),
        ("samples_of_micro_batch", "Samples of a micro-batch", "samples, a rank"),
        ("patches_of_micro_batch", "Patches of a micro-batch", "vision patches, a rank"),
        ("micro_batches_of_step", "Micro-batches of an optimizer step", "K, on each rank"),
    ):
        found = [
            (k, run["distributions"][name]) for k, run in enumerate(runs) if (run["distributions"] or {}).get(name)
        ]
        drawn = [(k, one["edges"], one["counts"]) for k, one in found]
        limits = {_limit(runs[k], name) for k, _ in found}
        mark = limits.pop() if len(limits) == 1 else None
        is_near = mark is not None and mark <= NEAR * max(one["max"] for _, one in found)
        drawing = histogram(drawn, label, "share", mark if is_near else None)
        if not drawing:
            continue
        captions = []
        for k, one in found:
            of = f"{html.key(k)}{html.text(runs[k]['name'])}: " if len(runs) > 1 else ""
            captions.append(
                f"{of}{one['count']:,} values, mean {number(one['mean'])}, median {number(one['median'])}, 90% within "
                f"{number(one['p90'])}, largest {number(one['max'])}."
            )
        if mark is not None:
            captions.append(f"The budget{' (dashed)' if is_near else ''}: {number(mark)}.")
        rows = [
            [runs[k]["name"], f"{begin:,} to {end - 1:,}", f"{count:,}", percent(count / sum(counts))]
            for k, edges, counts in drawn
            for begin, end, count in zip(edges, edges[1:], counts)
        ]
        made.append(html.figure(title, " ".join(captions), drawing, ["run", label, "count", "share"], rows))
    return made


def _limit(run: Run, name: str) -> float | None:
    key = {"tokens_of_micro_batch": "token_budget", "patches_of_micro_batch": "max_patches"}.get(name)
    value = (run["asked"].get("block") or {}).get(key)
    return value if isinstance(value, int) else None
