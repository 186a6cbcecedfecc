"""The HTML page: everything in one file, without scripts and without anything to fetch. Its template is page.html."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup, escape

from odb_factory.report import charts
from odb_factory.report.words import UNKNOWN, number, percent, seconds_text, settings
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
    runs: Sequence[Mapping[str, Any]] = figures["runs"]
    tiles = [
        (name, label, [(run["totals"][name], text(run["totals"][name])) for run in runs])
        for name, label, text in TILES
        if any(run["totals"][name] is not None for run in runs)
        and ("balance" not in name or any(run["asked"].get("ranks") != 1 for run in runs))
    ]
    sections = [
        ("Course of the training", list(charts.of_entries(runs))),
        ("Optimizer steps", list(charts.of_steps(runs))),
        ("Distributions", list(charts.distributions(runs))),
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
