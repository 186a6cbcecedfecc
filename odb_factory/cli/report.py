"""`odb-factory report`: what one run has done, or two side by side, as one HTML page and as JSON."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from odb_factory.errors import ODBError
from odb_factory.report.compare import compare, diverged, headline_of_two
from odb_factory.report.figures import read_run, to_json
from odb_factory.report.page import make_page
from odb_factory.report.read import UNKNOWN, counted, number, percent, seconds_text
from odb_factory.version import __version__

PAGE = "odb_report.html"


def main(argv: Sequence[str]) -> int:
    """Write the page; print the headline and where it is. Raises `ODBError` where there is no run or it cannot be
    written."""
    parser = argparse.ArgumentParser(prog="odb-factory report", description=__doc__)
    parser.add_argument(
        "output_dir", metavar="OUTPUT_DIR", type=Path, help="output_dir of a training, ended or under way"
    )
    parser.add_argument("other_dir", metavar="OTHER_DIR", type=Path, nargs="?", help="another one, to compare with")
    parser.add_argument("--html", metavar="FILE", type=Path, help=f"the page (OUTPUT_DIR/{PAGE})")
    parser.add_argument("--json", metavar="FILE", type=Path, help="the figures of the page; - prints them")
    arguments = parser.parse_args(argv)
    page = arguments.html or arguments.output_dir / PAGE
    if arguments.json is not None and str(arguments.json) != "-" and arguments.json.resolve() == page.resolve():
        raise ODBError(f"{page}: the page (--html) and its figures (--json) cannot be one file; give --json another.")
    figures = report([folder for folder in (arguments.output_dir, arguments.other_dir) if folder is not None])
    _write(page, make_page(figures, datetime.datetime.now()), "--html")
    if str(arguments.json) == "-":
        print(to_json(figures), end="")
        return 0
    if arguments.json is not None:
        _write(arguments.json, to_json(figures), "--json")
    print(figures["headline"])
    for run in figures["runs"]:
        for note in run["notes"]:
            print(f"{run['name']}: {note}")
    for note in (figures["comparison"] or {}).get("notes", []):
        print(note)
    print(f"The page: {page}" + (f"; the figures: {arguments.json}" if arguments.json else ""))
    return 0


def report(folders: Sequence[Path]) -> dict[str, Any]:
    """The figures of one run or two; see docs/reference.md."""
    runs = [read_run(folder) for folder in folders]
    if len(runs) == 2 and runs[0]["name"] == runs[1]["name"]:
        for run in runs:
            run["name"] = run["folder"]
    comparison = compare(*runs) if len(runs) == 2 else None
    headline = _headline(runs[0]) if comparison is None else headline_of_two(runs[0], runs[1], comparison)
    return {"odb_factory": __version__, "headline": headline, "runs": runs, "comparison": comparison}


def _headline(run: Mapping[str, Any]) -> str:
    totals = run["totals"]
    steps = counted(totals["optimizer_steps"], "optimizer step")
    said = steps if totals["samples"] is None else f"{counted(totals['samples'], 'sample')} in {steps}"
    if totals["seconds"] is not None:
        said += f", {seconds_text(totals['seconds'])}"
    known = [("padding", percent(totals["padding_ratio"])), ("balance", number(totals["balance"], 3))]
    said += "".join(f"{';' if name == 'padding' else ','} {name} {value}" for name, value in known if value != UNKNOWN)
    if run["diverged_at"] is not None:
        said += f"; {diverged(run)}"
    losses = [entry["loss"] for entry in run["entries"] if entry["loss"] is not None]
    if losses and run["diverged_at"] is None:
        said += f"; loss from {number(losses[0])} to {number(losses[-1])}"
    state = "" if run["finished"] else "so far: "
    return f"{run['name']}: {state}{said}."


def _write(path: Path, text: str, option: str) -> None:
    """A page that is there stays whole until the new one is."""
    aside = path.with_name(f"{path.name}.part") if path.is_file() or not path.exists() else path
    try:
        aside.write_text(text, encoding="utf-8")
        if aside != path:
            aside.replace(path)
    except OSError as error:
        raise ODBError(f"{path}: cannot be written ({error.strerror}); give another file with {option}.") from None
