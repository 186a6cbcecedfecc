"""`odb-factory compare`: one training, or two side by side, from their `trainer_state.json`: a table and one page."""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from string import Template
from typing import Any

from odb_factory.errors import ODBError, one_line, printable

STATE_FILE, SUMMARY_FILE, PAGE_FILE = "trainer_state.json", "odb_summary.json", "odb_compare.html"
CURVES = ("loss", "eval_loss", "grad_norm", "learning_rate", "odb/tokens_per_second", "odb/padding_ratio")
"""Log entries that the page draws over the optimizer steps, where a run has them."""
COLOURS, GREY = ("#3584e4", "#e66100"), "#888888"
"""Of the runs, and of axes and lines: readable on white and on black."""
PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>odb-factory compare</title>
<style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 46rem; margin: auto; padding: 1rem; }
div { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
td { padding: .2rem .4rem; border-bottom: 1px solid $grey; text-align: right; white-space: nowrap; }
td:first-child { text-align: left; }
tr:first-child td, td:first-child { white-space: normal; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; }
</style>
<h1>odb-factory compare</h1>
<div><table>
$rows</table></div>
$drawing
</html>
""")


def run(arguments: argparse.Namespace) -> int:
    """Print the table and write the page. Raises `ODBError` if a folder holds no training, or a file is broken."""
    runs = [Run(folder) for folder in (arguments.a, arguments.b) if folder is not None]
    figures, differences = figures_of(runs), differences_of(runs)
    folders = [str(run.folder) for run in runs]
    rows = [("", folders), *figures.items(), *([("settings that differ", [""] * 2)] if differences else [])]
    table = [
        [printable(cell) for cell in (name, *map(_text, values))] for name, values in [*rows, *differences.items()]
    ]
    if arguments.json:
        content = {"folders": folders, "figures": figures, "differences": differences}
        strict = json.loads(json.dumps(content, default=str), parse_constant=lambda name: None)  # null for NaN
        print(json.dumps(strict, indent=2))
        if arguments.html is None:
            return 0
    else:
        print_table(table)
    if find_spec("matplotlib") is None:
        print('no page: matplotlib is not installed; pip install "odb_factory[tools]"', file=sys.stderr)
        return 0
    path = arguments.html or arguments.a / PAGE_FILE
    try:
        path.write_text(page_of(runs, table), encoding="utf-8")
    except OSError as error:
        raise ODBError(f"{path}: cannot be written ({error.strerror}); name another file with --html.") from None
    print(f"page: {path}", file=sys.stderr)
    return 0


def print_table(table: Sequence[Sequence[str]]) -> None:
    """Columns of text, the first aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table)]
    for first, *cells in table:
        print("  ".join([first.ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(cells, widths[1:]))]).rstrip())


class Run:
    """A training as its folder shows it: the state of the Trainer, or of its newest checkpoint, and its settings.

    log: the entries of the Trainer's log. steps, max_steps: optimizer steps, taken and planned. settings: those of the
    state, those of YAML files in the folder, and the `odb:` block.
    Raises `ODBError` if there is none, or if a file is not what its name says.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        saved = sorted(folder.glob(f"checkpoint-*/{STATE_FILE}"), key=lambda path: path.stat().st_mtime)
        path = folder / STATE_FILE
        if not path.is_file() and not saved:
            raise ODBError(f"{folder}: no {STATE_FILE} in it; give the output_dir of a training that has saved.")
        path = path if path.is_file() else saved[-1]
        state = _read(path)
        try:
            self.log = [{**entry, "step": int(entry["step"])} for entry in state["log_history"]]
            self.steps, self.max_steps = int(state["global_step"]), int(state["max_steps"])
        except (KeyError, TypeError, ValueError) as error:
            raise ODBError(f"{path}: not the state of a Trainer ({one_line(error)}); give another folder.") from None
        given = {key: state.get(key) for key in ("max_steps", "num_train_epochs", "train_batch_size")}
        of_files = {key: value for file in sorted(folder.glob("*.yaml")) for key, value in _read(file).items()}
        summary = folder / SUMMARY_FILE
        block = {"odb": _read(summary).get("config")} if summary.is_file() else {}
        self.settings = [_flat(given), _flat(of_files), _flat(block)]

    def curve(self, name: str) -> dict[int, float]:
        """An entry of the log by optimizer step."""
        return {entry["step"]: entry[name] for entry in self.log if _is_number(entry.get(name))}


def figures_of(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """For each row of the table its value for each run; None where the run has none."""
    losses = [run.curve("loss") for run in runs]
    rows: dict[str, list[Any]] = {
        "optimizer steps": [run.steps for run in runs],
        "of planned": [run.max_steps for run in runs],
        "last loss": [next(reversed(by_step.values()), None) for by_step in losses],
    }
    a, b = losses[0], losses[-1]
    if len(runs) == 2 and a and a.keys() == b.keys():
        rows["mean loss difference"] = [None, sum(abs(a[step] - b[step]) for step in a) / len(a)]
    # The entry of the end is of the whole run; while that is under way, the last one.
    ends = [[dict[str, Any](), *sorted(run.log, key=lambda entry: "train_runtime" in entry)][-1] for run in runs]
    names = {name for end in ends for name in end if _is_number(end[name])} - {"step", "total_flos"}
    for name in sorted(names, key=lambda name: (name.startswith("odb/"), name)):
        rows[name] = [end.get(name) for end in ends]
    return rows


def differences_of(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The settings whose values differ, from the files that both runs have, and whether one alone has a block."""
    if len(runs) < 2:
        return {}
    found: dict[str, list[Any]] = {}
    for a, b in zip(runs[0].settings, runs[1].settings):
        if a and b:
            found |= {key: [a.get(key), b.get(key)] for key in sorted(a | b) if a.get(key) != b.get(key)}
    blocks = [bool(run.settings[-1]) for run in runs]
    return found if len(set(blocks)) == 1 else found | {"odb": ["on" if block else None for block in blocks]}


def page_of(runs: Sequence[Run], table: Sequence[Sequence[str]]) -> str:
    """One HTML page: the table, and the curves as an inline SVG. It has no scripts and fetches nothing."""
    import matplotlib
    from matplotlib.figure import Figure

    names = [name for name in CURVES if any(run.curve(name) for run in runs)]
    drawing = StringIO()
    greys: Any = dict.fromkeys(("axes.edgecolor", "text.color", "axes.labelcolor", "xtick.color", "ytick.color"), GREY)
    with matplotlib.rc_context({"svg.fonttype": "none", "text.parse_math": False, **greys}):
        figure = Figure(figsize=(4.5, 2.2 * max(len(names), 1)), layout="constrained")
        for number, name in enumerate(names, start=1):
            axes = figure.add_subplot(len(names), 1, number, title=name, xlabel="optimizer step")
            for run, label, colour, style in zip(runs, table[0][1:], COLOURS, (".-", ".--")):
                curve = run.curve(name)
                axes.plot([*curve], [*curve.values()], style, color=colour, label=label[-30:])
            axes.legend(frameon=False)
        figure.savefig(drawing, format="svg", transparent=True)
    rows = (f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in table)
    svg = drawing.getvalue()
    return PAGE.substitute(grey=GREY, rows="".join(rows), drawing=svg[svg.index("<svg") :])


def _read(path: Path) -> dict[str, Any]:
    """A file of JSON or YAML that holds one mapping."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ODBError(f"{path}: cannot be read ({one_line(error)}); correct it, or give another folder.") from None
    if not isinstance(content, dict):
        raise ODBError(f"{path}: holds no mapping; correct it, or give another folder.")
    return content


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys with dots between them."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
