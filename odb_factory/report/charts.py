"""The charts of the page: of log entries, of optimizer steps, and distributions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from odb_factory.report import html, svg
from odb_factory.report.numbers import number, percent

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
                series.append(svg.Series(_called(run, label), points, place, dashed=which > 0))
                columns.append(
                    (_called(run, label), {e["step"]: e[name] for e in run["entries"] if e[name] is not None})
                )
        if chart.label == "loss":
            points = _points(run["evaluations"], x_name, "eval_loss")
            if points:
                series.append(svg.Series(_called(run, "validation"), points, place, dashed=True, dots=True))
                evaluated = {e["step"]: e["eval_loss"] for e in run["evaluations"] if "eval_loss" in e}
                columns.append((_called(run, "validation"), evaluated))
    drawing = svg.lines(series, chart.over, chart.label, from_zero=chart.from_zero, to_one=chart.to_one)
    if not drawing:
        return ""
    caption = chart.caption + (" Dots: validation." if any(one.dots for one in series) else "")
    return html.figure(chart.title, _legend(runs, series) + html.text(caption), drawing, *_rows(runs, columns, x_name))


def _points(entries: Sequence[Mapping[str, Any]], x_name: str, name: str) -> list[svg.Point]:
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


def _legend(runs: Sequence[Run], series: Sequence[svg.Series]) -> str:
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
        series.append(svg.Series(run["name"], list(values.items()), place))
        columns.append((_called(run, name), values))
        caption += _said_of_steps(run, name, len(runs) > 1)
    drawing = svg.lines(series, STEP, name, from_zero=True)
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
        drawing = svg.histogram(drawn, label, "share", mark if is_near else None)
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
