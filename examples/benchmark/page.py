"""The page `benchmarks.md`: machines, versions and dates, then of each part its command, tables and figures."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import summary
from parts import Part

TABLES, DONE, FIGURES = "tables.md", "done.json", "benchmarks"
"""What a part has to show, how it went, and where docs/ has the figures."""
LOG_LINE = re.compile(r"^\[\d{4}-[^]]*\] \[(INFO|WARNING)\]")
MEASURED = re.compile(r"^[^\[{\"']*\d\.\de[-+]\d\d")
"""A line that a test prints; libraries print them too, of dicts and with times."""


def done(folder: Path, name: str) -> dict[str, Any] | None:
    """How it went, of a part that went well."""
    path = folder / name / DONE
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found if found and found["returncode"] == 0 else None


def why_not(folder: Path, name: str) -> str:
    """Of a part that is not done."""
    return "it failed" if (folder / name / DONE).exists() else "not run"


def files(folder: Path) -> Iterator[Path]:
    """What the page is made of, and figures for whoever wants to reckon with them, of one part."""
    for path in sorted(folder.iterdir()):
        if path.name == TABLES or path.suffix in (".json", ".png"):
            yield path


def make(folder: Path, parts: Sequence[Part], missing: Mapping[str, str], figures_in: str = "") -> str:
    """missing: why a part has no tables, by its name. figures_in: what stands before a figure's path in the folder."""
    found = {part.name: done(folder, part.name) for part in parts}
    lines = ["# Benchmarks", "", *head([one for one in found.values() if one]), ""]
    for part in parts:
        anchor = re.sub(r"[^\w\- ]", "", part.heading.lower()).replace(" ", "-")
        lines.append(f"- [{part.heading}](#{anchor})")
    lines += ["", "## In short", *summary.lines(folder, [name for name, one in found.items() if one], figures_in)]
    for part in parts:
        lines += ["", f"## {part.heading}", part.about, ""]
        one = found[part.name]
        if one is None:
            lines.append(f"Not measured: {missing[part.name]}.")
            continue
        took = f"{one['seconds'] / 60:.0f} minutes, {one['began']}, load average before it {one['load']:.1f}"
        lines += [f"`{one['command']}` ({took}, odb_factory at {one['commit']}):", ""]
        lines.append((folder / part.name / TABLES).read_text(encoding="utf-8").strip())
        for path in sorted((folder / part.name).glob("*.png")):
            lines += ["", f"![{part.heading}: {path.stem}]({figures_in}{path.relative_to(folder).as_posix()})"]
    return "\n".join(lines) + "\n"


def body(printed: str, program: str) -> str:
    """What a part has printed, without log lines of libraries; of tests, their tables and what else they measured."""
    lines = [line for line in printed.splitlines() if not LOG_LINE.match(line)]
    if program != "pytest":
        return "\n".join(lines).strip()
    lines = [line.lstrip(".") for line in lines]
    found: list[str] = []
    for is_table, group in itertools.groupby(lines, lambda line: line.startswith("|")):
        kept = [line for line in group if is_table or MEASURED.match(line)]
        if is_table and not "".join(kept[1:2]).startswith("|--"):
            kept.insert(1, "|---" * (kept[0].count("|") - 1) + "|")
        if kept and not is_table:
            kept = ["<details><summary>Each case</summary>", "", "```", *kept, "```", "</details>"]
        found += [*kept, ""] if kept else []
    return "\n".join(found).strip()


def head(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The command, machines and versions of packages, and when it was."""
    lines = [
        "Everything on this page is made by one command:",
        "",
        "```",
        "python examples/benchmark/all.py --rivals --publish",
        "```",
        "",
        "It runs the command of each part with `--output-dir` and the Python that has the rivals. All contestants of a "
        "table get the same samples. Where another method is ahead, the tables say so.",
        "",
    ]
    if parts:
        begins = sorted(part["began"] for part in parts)
        lines += [
            f"- Machine: {' and '.join(dict.fromkeys(part['machine'] for part in parts))}",
            f"- Versions: {' and '.join(dict.fromkeys(part['versions'] for part in parts))}",
            f"- Date: {begins[0]} to {begins[-1]}",
        ]
    return lines
