"""Charts as inline SVG, coloured by the style of the page: lines over a scale, and histograms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

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
