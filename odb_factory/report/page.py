"""The HTML page: everything in one file, without scripts and without anything to fetch."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

from odb_factory.report import charts, html
from odb_factory.report.read import UNKNOWN, counted, number, percent, seconds_text
from odb_factory.version import __version__

# ----------------------------------------------------------------------------------------------------------------------
# What a run was asked to do by one set of names, whoever wrote it down, and two runs side by side.
# The names are those of LLaMA-Factory's YAML and of pip; the Trainer's model card has others for the same settings.

BLOCK = "odb."
RENAMED = {
    "num_devices": "ranks",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "training_steps": "max_steps",
    "lr_scheduler_warmup_steps": "warmup_steps",
    "lr_scheduler_warmup_ratio": "warmup_ratio",
}
"""Of the model card."""
PACKAGES = {"pytorch": "torch"}
_OPTIMIZER = re.compile(r"Use (\S+)(?: with (.*))?")


def settings(asked: Mapping[str, Any]) -> dict[str, str]:
    """asked: see `read.asked`. Those that are known, as text."""
    found: dict[str, str] = {}
    if asked.get("ranks"):
        found["ranks"] = str(asked["ranks"])
    if asked.get("layout"):
        found["layout taken"] = f"{asked['layout']['name']} ({asked['layout']['reason']})"
    found |= _texts(asked.get("about"))
    for name, value in _texts(asked.get("arguments")).items():
        if name == "optimizer" and (match := _OPTIMIZER.fullmatch(value)):
            found["optim"] = _member(match[1])
            found |= {"optimizer arguments": match[2]} if match[2] else {}
        else:
            found[RENAMED.get(name, name)] = _member(value)
    found |= {BLOCK + name: value for name, value in _texts(asked.get("block")).items()}
    for name, value in _texts(asked.get("versions")).items():
        found[f"version of {PACKAGES.get(name.lower(), name.lower())}"] = value
    return found


def side_by_side(asked: Mapping[str, Any], other: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A line for each setting that either tells: `name`, `value`, `other_value`, and whether they are the `same`, None
    where one does not tell. Those that both tell come first."""
    mine, theirs = settings(asked), settings(other)
    lines = []
    for name in dict.fromkeys((*mine, *theirs)):
        values = mine.get(name), theirs.get(name)
        same = None if values[0] is None or values[1] is None else _same(name, values[0], values[1])
        lines.append({"name": name, "value": values[0], "other_value": values[1], "same": same})
    return sorted(lines, key=lambda line: (line["same"] is None, line["name"].startswith(BLOCK)))


def _texts(values: Mapping[str, Any] | None) -> dict[str, str]:
    return {
        name: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in (values or {}).items()
        if value is not None
    }


def _member(value: str) -> str:
    """ "OptimizerNames.ADAMW_TORCH", a member of an enumeration as some releases print it, as its value."""
    match = re.fullmatch(r"[A-Z]\w*\.([A-Z][A-Z0-9_]*)", value)
    return match[1].lower() if match else value


def _same(name: str, mine: str, theirs: str) -> bool:
    if name.startswith("version of ") and "+" not in (mine if "+" in theirs else theirs):
        mine, theirs = mine.split("+")[0], theirs.split("+")[0]  # of a build, which pip leaves out: 2.12.1+cu130
    try:
        return mine == theirs or float(mine) == float(theirs)
    except ValueError:
        return False


# ----------------------------------------------------------------------------------------------------------------------

Run = Mapping[str, Any]
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Of the browser: whatever stood in the page, it would load nothing."""

TILES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("optimizer_steps", "optimizer steps", number),
    ("samples", "samples", number),
    ("seconds", "time of training", seconds_text),
    ("samples_per_second", "samples per second", number),
    ("tokens_per_second", "tokens per second", number),
    ("padding_ratio", "padding", percent),
    ("balance", "balance", lambda value: number(value, 3)),
    ("patch_balance", "patch balance", lambda value: number(value, 3)),
    ("budget_use", "budget use", percent),
    ("data_wait_s", "waited for data", seconds_text),
    ("micro_steps", "micro-steps", number),
    ("units_cv", "spread of units (sd / mean)", lambda value: number(value, 3)),
)
KINDS = {
    "odb": "trained with odb",
    "stock": "stock training",
    "mixed": "partly trained with odb",
    None: "not known whether with odb",
}
ROWS = {
    "not_trained": "neither trained on nor left out (end of an epoch)",
    "overlong": "break a budget alone and were trained on alone",
    "over_budget": "micro-batches of all ranks that the collator made larger than the budget",
}


def make_page(figures: Mapping[str, Any], made: datetime.datetime) -> str:
    """figures: what the JSON says, with one run or two. made: when."""
    runs: Sequence[Run] = figures["runs"]
    title = " and ".join(run["name"] for run in runs)
    body = [
        f"<h1>odb-factory report: {html.text(title)}</h1>",
        f'<p class="headline">{html.text(figures["headline"])}</p>',
        *(_state(run, place, len(runs)) for place, run in enumerate(runs)),
        _tiles(runs),
        _notes(figures),
    ]
    for heading, parts in (
        ("Course of the training", charts.of_entries(runs)),
        ("Optimizer steps", charts.of_steps(runs)),
        ("Distributions", charts.distributions(runs)),
    ):
        if parts:
            body.append(f'<h2>{heading}</h2><div class="charts">{"".join(parts)}</div>')
    if figures["comparison"] is not None:
        body.append(_losses(runs, figures["comparison"]))
    body += [_tables(run, len(runs)) for run in runs]
    body += [_asked(runs, figures["comparison"]), _files(runs, made)]
    style = (resources.files("odb_factory.report") / "page.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{html.text(title)}: odb-factory report</title><style>{style}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _state(run: Run, place: int, count: int) -> str:
    steps, most = run["totals"]["optimizer_steps"], run["totals"]["max_steps"]
    state = "finished" if run["finished"] else "under way or interrupted"
    if not run["finished"] and most:
        state += f", at optimizer step {number(steps)} of {number(most)}"
    kind = KINDS[run["kind"]]
    name = f"{html.key(place)}{html.text(run['name'])}: " if count > 1 else ""
    folder = "" if run["folder"] == run["name"] else f"; folder {html.text(run['folder'])}"
    return f'<p class="state">{name}{kind}, {state}{folder}</p>'


def _tiles(runs: Sequence[Run]) -> str:
    made = []
    for name, label, said in TILES:
        values = [run["totals"][name] for run in runs]
        if all(value is None for value in values) and any(run["kind"] != "stock" for run in runs):
            continue
        parts = []
        for place, value in enumerate(values):
            unknown = ' class="unknown"' if value is None else ""
            shown = UNKNOWN if value is None else f'<data value="{value!r}">{html.text(said(value))}</data>'
            parts.append(f'<dd{unknown} data-figure="{name}">{html.key(place) if len(runs) > 1 else ""}{shown}</dd>')
        made.append(f'<div class="tile"><dt>{html.text(label)}</dt>{"".join(parts)}</div>')
    return f'<dl class="tiles">{"".join(made)}</dl>'


def _notes(figures: Mapping[str, Any]) -> str:
    runs = figures["runs"]
    said = [(f"{run['name']}: " if len(runs) > 1 else "") + note for run in runs for note in run["notes"]]
    if figures["comparison"] is not None:
        said += figures["comparison"]["notes"]
    return f'<ul class="notes">{"".join(f"<li>{html.text(line)}</li>" for line in said)}</ul>' if said else ""


def _losses(runs: Sequence[Run], comparison: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{line['step']:,}",
            number(line["loss"], 8),
            number(line["other_loss"], 8),
            _scientific(line["relative_difference"]),
        ]
        for line in comparison["steps"]
    ]
    if not rows:
        return ""
    shown = html.some(rows)
    head = ["optimizer step", *(f"loss of {run['name']}" for run in runs), "relative difference"]
    largest = _scientific(comparison["largest_loss_difference"])
    return (
        f"<h2>Losses side by side</h2><p>{len(rows):,} optimizer steps are logged by both, {len(shown)} shown; the "
        f"largest relative difference is {largest}.</p>{html.table(head, shown)}"
    )


def _scientific(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1e}" if value else "0"


def _tables(run: Run, count: int) -> str:
    of = f" of {html.text(run['name'])}" if count > 1 else ""
    parts = []
    if run["by_rank"]:
        counts = ("micro_batches", "idle_micro_batches", "samples", "tokens", "patches")
        head = ["rank", "micro-batches", "idle", "samples", "tokens", "patches", "padding", "waited for data"]
        rows = [
            [
                line["rank"],
                *(number(line[name]) for name in counts),
                percent(line["padding_ratio"]),
                seconds_text(line["data_wait_s"]),
            ]
            for line in run["by_rank"]
        ]
        parts.append(f"<h2>Ranks{of}</h2>{html.table(head, rows)}")
    if run["datasets"]:
        head = ["data set", "samples", "tokens", "share of tokens", "mean length", "longest"]
        rows = [
            [
                line["name"], number(line["samples"]), number(line["tokens"]), percent(line["share_of_tokens"]),
                number(line["mean_length"]), number(line["longest"]),
            ]
            for line in run["datasets"]
        ]  # fmt: skip
        parts.append(f"<h2>Data sets{of}</h2>{html.table(head, rows)}")
    if run["rows"] is not None:
        left_out = run["rows"]["left_out"]
        rows = [[f"left out: {reason}", number(count)] for reason, count in (left_out or {}).items()]
        rows += [[meaning, number(run["rows"][name])] for name, meaning in ROWS.items()]
        if not left_out:
            rows.insert(0, ["left out", UNKNOWN if left_out is None else "0"])
        parts.append(f"<h2>Rows that stand apart{of}</h2>{html.table(['what', 'count'], rows)}")
    return "".join(parts)


def _asked(runs: Sequence[Run], comparison: Mapping[str, Any] | None) -> str:
    """What was asked; of two runs whether it was the same, and rows that differ are stressed."""
    title = "<h2>What was asked</h2>"
    if comparison is None:
        rows = [[name, value] for name, value in settings(runs[0]["asked"]).items()]
        return f"{title}{html.table(['setting', runs[0]['name']], rows, 'texts')}" if rows else ""
    lines = comparison["settings"]
    if not lines:
        return ""
    known = [line for line in lines if line["same"] is not None]
    differing = [line["name"] for line in known if not line["same"]]
    said = f"{counted(len(known), 'setting')} of {len(lines)} {'is' if len(known) == 1 else 'are'} known of both"
    if known:
        said += f"; different: {', '.join(differing)}" if differing else "; none differs"
    rows = [
        [
            line["name"],
            *(UNKNOWN if value is None else value for value in (line["value"], line["other_value"])),
            {True: "same", False: "differs", None: ""}[line["same"]],
        ]
        for line in lines
    ]
    head = ["setting", *(run["name"] for run in runs), ""]
    stressed = [line["same"] is False for line in lines]
    return f"{title}<p>{html.text(said)}.</p>{html.table(head, rows, 'texts', stressed)}"


def _files(runs: Sequence[Run], made: datetime.datetime) -> str:
    said = []
    for run in runs:
        files = run["files"]
        broken = "".join(f"; {count} broken in {name}" for name, count in files["broken_lines"].items())
        broken += "".join(f"; {name} is broken" for name in files["broken_files"])
        said.append(f"{run['name']}: {', '.join(files['read']) or 'nothing'}{broken}")
    return (
        f"<footer><p>Read: {html.text('. '.join(said))}.</p><p>Made by odb-factory {html.text(__version__)} on "
        f"{made:%Y-%m-%d at %H:%M}. docs/reference.md explains padding, balance and the others.</p></footer>"
    )
