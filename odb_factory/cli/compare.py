"""`odb-factory compare`: show one or two trainings as a table and an HTML page, from their `trainer_state.json`."""

from __future__ import annotations

import argparse
import html
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from string import Template
from typing import Any

from odb_factory.errors import ODBError, one_line, printable

STATE_FILE, SUMMARY_FILE, MODEL_CARD = "trainer_state.json", "odb_summary.json", "README.md"
CURVES = ("loss", "loss difference", "eval_loss", "tokens/s", "memory, GiB", "grad_norm", "learning_rate")
"""Curves over optimizer steps on the page, drawn if a run has logged them."""
RENAMED = {"odb/tokens_per_second": "tokens/s", "throughput": "tokens/s", "vram_reserved": "memory, GiB"}
"""Log key -> curve name. LLaMA-Factory logs its keys with `include_num_input_tokens_seen` and RECORD_VRAM."""
COLOURS, STYLES, WIDTHS, GREY = ("#e66100", "#3584e4"), ("-", "--"), (2.6, 1.4), "#888888"
"""Line styles of the two runs, readable on white and black; a broad first line shows under an identical second one."""
PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>odb-factory compare</title>
<style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: auto; padding: 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
.a { color: $a; } .b { color: $b; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; margin: 1rem 0; }
td { padding: .2rem .4rem; border-bottom: 1px solid #8884; text-align: right; overflow-wrap: anywhere; }
td:first-child { text-align: left; }
table:first-of-type tr + tr td + td { white-space: nowrap; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; color: inherit; }
svg text { fill: currentColor !important; }
</style>
<h1>$title</h1>
$tables
<h2>Curves over optimizer steps</h2>
<div class="curves">
$curves</div>
</html>
""")


def run(arguments: argparse.Namespace) -> int:
    """Print the table and write the page. Raises `ODBError` if a folder holds no training or a file cannot be read."""
    runs = [Run(path) for path in (arguments.a, arguments.b) if path is not None]
    figures, differences = figures_of(runs), differences_of(runs)
    labels = [run.folder.name for run in runs]
    labels = labels if len({*labels}) == len(labels) else [str(run.folder) for run in runs]
    if arguments.json:
        content = {"folders": [str(run.folder) for run in runs], "figures": figures, "differences": differences}
        strict = json.loads(json.dumps(content, default=str), parse_constant=lambda name: None)  # null for NaN
        print(json.dumps(strict, indent=2))
    table = [_cells("", labels, "ratio"), *(_cells(name, values, _ratio(values)) for name, values in figures.items())]
    settings = [_cells("settings that differ", labels), *(_cells(name, values) for name, values in differences.items())]
    tables = [table, settings] if differences else [table]
    for lines in () if arguments.json else tables:
        print_table(lines)
        print()
    if arguments.json and arguments.html is None:
        return 0
    if find_spec("matplotlib") is None:
        print('no page: matplotlib is not installed; pip install "odb_factory[tools]"', file=sys.stderr)
        return 0
    name = "_".join(["odb_compare", *(run.folder.resolve().name for run in runs[1:])])
    path = arguments.html or runs[0].folder / f"{name}.html"
    try:
        path.write_text(page_of(runs, labels, tables), encoding="utf-8")
    except OSError as error:
        raise ODBError(f"{path}: cannot be written ({error.strerror}); name another file with --html.") from None
    print(f"page: {path}", file=sys.stderr)
    return 0


def _cells(name: str, values: Sequence[Any], ratio: str = "") -> list[str]:
    """A row of a table; `ratio` is its last column if there are two runs."""
    return [printable(cell) for cell in (name, *map(_text, values), *([ratio] if len(values) == 2 else []))]


def _ratio(values: Sequence[Any]) -> str:
    a, b = values[0], values[-1]
    return f"{a / b:.3g}" if _is_number(a) and _is_number(b) and a > 0 and b > 0 else ""


def print_table(table: Sequence[Sequence[str]]) -> None:
    """Print columns of text; the first is left-aligned, the others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*table)]
    for first, *cells in table:
        print("  ".join([first.ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(cells, widths[1:]))]).rstrip())


class Run:
    """A training, read from its folder: the state of the Trainer or of its newest checkpoint, and its settings.

    path: output_dir of the training, or its YAML, which names that folder. log: entries of the Trainer's log and of
    LLaMA-Factory's log. steps, max_steps: optimizer steps taken, and planned. settings: four mappings, read from the
    state, the YAML (or YAML files in the folder), the model card that LLaMA-Factory writes, and the `odb:` block.
    Raises `ODBError` if the folder holds no training, or if a file has invalid content.
    """

    def __init__(self, path: Path):
        yaml = _read(path) if path.suffix in (".yaml", ".yml") else {}
        self.folder = folder = Path(str(yaml.get("output_dir"))) if yaml else path
        saved = sorted(folder.glob(f"checkpoint-*/{STATE_FILE}"), key=lambda file: file.stat().st_mtime)
        file = folder / STATE_FILE
        if not file.is_file() and not saved:
            raise ODBError(f"{folder}: no {STATE_FILE} in it; give the output_dir of a training that has saved.")
        file = file if file.is_file() else saved[-1]
        state = _read(file)
        try:
            self.log = [{**entry, "step": int(entry["step"])} for entry in state["log_history"]]
            self.steps, self.max_steps = int(state["global_step"]), int(state["max_steps"])
        except (KeyError, TypeError, ValueError) as error:
            raise ODBError(f"{file}: not the state of a Trainer ({one_line(error)}); give another folder.") from None
        of_llamafactory = folder / "trainer_log.jsonl"
        for line in of_llamafactory.read_text("utf-8").splitlines() if of_llamafactory.is_file() else ():
            with suppress(ValueError, KeyError):  # a training in progress may have written half of the last line
                entry = json.loads(line)
                shown = {key: entry[key] for key in RENAMED if key in entry}
                self.log.insert(0, {"step": entry["current_steps"], **shown})
        of_state = {key: state.get(key) for key in ("max_steps", "num_train_epochs", "train_batch_size")}
        of_files = {
            key: value for yaml_file in sorted(folder.glob("*.yaml")) for key, value in _read(yaml_file).items()
        }
        card = (folder / MODEL_CARD).read_text("utf-8", "replace") if (folder / MODEL_CARD).is_file() else ""
        of_card = dict(re.findall(r"^- (\w+): (.+)$", card.partition("### Training hyperparameters")[2], re.MULTILINE))
        summary = folder / SUMMARY_FILE
        block = {"odb": _read(summary).get("config")} if summary.is_file() else {}
        self.settings = [_flat(of_state), _flat(yaml or of_files), of_card, _flat(block)]

    def curve(self, name: str) -> dict[int, float]:
        """Values of a log entry by optimizer step."""
        names = [name, *(key for key, renamed in RENAMED.items() if renamed == name)]
        points = {entry["step"]: entry[key] for entry in self.log for key in names if _is_number(entry.get(key))}
        return dict(sorted(points.items()))


def figures_of(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Rows of the table: the name of a figure, and its value in each run (None: not logged)."""
    losses, memory = [run.curve("loss") for run in runs], [run.curve("memory, GiB") for run in runs]
    rows: dict[str, list[Any]] = {
        "optimizer steps": [run.steps for run in runs],
        "of planned": [run.max_steps for run in runs],
        "last loss": [next(reversed(by_step.values()), None) for by_step in losses],
    }
    if difference := loss_difference(runs):
        rows["mean loss difference"] = [None, sum(map(abs, difference.values())) / len(difference)]
    if any(memory):
        rows["memory, GiB"] = [max(by_step.values(), default=None) for by_step in memory]
    if any(speeds := [run.curve("tokens/s") for run in runs]):
        rows["tokens/s"] = [sum(by_step.values()) / len(by_step) if by_step else None for by_step in speeds]
    # The final log entry describes the whole run; during training, the last entry is used.
    ends = [[dict[str, Any](), *sorted(run.log, key=lambda entry: "train_runtime" in entry)][-1] for run in runs]
    names = {name for end in ends for name in end if _is_number(end[name])} - {"step", "total_flos", *RENAMED.values()}
    for name in sorted(names, key=lambda name: (name.startswith("odb/"), name)):
        rows[name] = [end.get(name) for end in ends]
    return rows


def loss_difference(runs: Sequence[Run]) -> dict[int, float]:
    """Loss of the first run minus loss of the second, by optimizer step; {} unless both logged the same steps."""
    a, b = runs[0].curve("loss"), runs[-1].curve("loss")
    return {step: a[step] - b[step] for step in a} if len(runs) == 2 and a.keys() == b.keys() else {}


def differences_of(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Settings that differ, from the kinds of file that both runs have; `odb` if only one run has an `odb:` block."""
    if len(runs) < 2:
        return {}
    differing: dict[str, list[Any]] = {}
    for a, b in zip(runs[0].settings, runs[1].settings):
        if a and b:
            differing |= {key: [a.get(key), b.get(key)] for key in sorted(a | b) if a.get(key) != b.get(key)}
    blocks = [bool(run.settings[-1]) for run in runs]
    return differing if len(set(blocks)) == 1 else differing | {"odb": ["on" if block else None for block in blocks]}


def page_of(runs: Sequence[Run], labels: Sequence[str], tables: Sequence[Sequence[Sequence[str]]]) -> str:
    """An HTML page with the tables, and each curve as an inline SVG. The page has no scripts and fetches nothing."""
    curves = []
    for name in CURVES:
        lines = [run.curve(name) for run in runs] if name != "loss difference" else [loss_difference(runs)]
        if any(len(line) > 1 for line in lines):
            curves.append(f"<figure><figcaption>{name}</figcaption>\n{_drawn(lines)}</figure>\n")
    titles = (f'<span class="{kind}">{html.escape(printable(label))}</span>' for kind, label in zip("ab", labels))
    rows = [
        [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in table] for table in tables
    ]
    text = "\n".join("<table>\n" + "\n".join(lines) + "\n</table>" for lines in rows)
    title, (a, b) = " and ".join(titles), COLOURS
    return PAGE.substitute(title=title, a=a, b=b, tables=text, curves="".join(curves) or "no step has been logged")


def _drawn(lines: Sequence[Mapping[int, float]]) -> str:
    """Draw the curves as an SVG that takes its text colour from the page."""
    import matplotlib
    from matplotlib.figure import Figure

    drawing = StringIO()
    greys: Any = dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), GREY)
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "font.size": 12, "axes.grid": True, "grid.alpha": 0.3, **greys}
    ):
        figure = Figure(figsize=(4.5, 2.8), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.locator_params(nbins=5)
        for line, colour, style, width in zip(lines, COLOURS, STYLES, WIDTHS):
            marker = "o" if len(line) < 20 else ""
            axes.plot([*line], [*line.values()], style, color=colour, linewidth=width, marker=marker, markersize=4)
        figure.savefig(drawing, format="svg", transparent=True)
    svg = drawing.getvalue()
    return svg[svg.index("<svg") :]


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON or YAML file that holds a mapping. Raises `ODBError`."""
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
    """Flatten nested mappings, joining their keys with dots."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
