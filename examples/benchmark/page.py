"""The page `benchmarks.md`: machine, versions and date, then of each part its command, tables and figures."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import summary
from parts import Part

TABLES, DONE, FIGURES = "tables.md", "done.json", "benchmarks"
"""What a part prints, how it went, and where docs/ has the figures."""
PACKAGES = ("torch", "transformers", "llamafactory", "accelerate", "trl")
LOG_LINE = re.compile(r"^\[\d{4}-[^]]*\] \[(INFO|WARNING)\]")
PYTEST_LINE = re.compile(r"^[.sxFE]*\s*(\[ *\d+%\])?$|^=+|^\d+ passed|^-- Docs|^SKIPPED")


def done(folder: Path, name: str) -> dict[str, Any] | None:
    """How it went, of a part that went well."""
    path = folder / name / DONE
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found if found and found["returncode"] == 0 else None


def why_not(folder: Path, name: str) -> str:
    """Of a part that is not done."""
    return "it failed" if (folder / name / DONE).exists() else "not run"


def figures(folder: Path) -> Iterator[Path]:
    """PNGs of the parts that are done."""
    for path in sorted(folder.glob("*/*.png")):
        if done(folder, path.parent.name):
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
        took = f"{one['seconds'] / 60:.0f} minutes, {one['began']}, odb_factory at {one['commit']}"
        lines += [f"`{one['command']}` ({took}):", ""]
        lines.append(body((folder / part.name / TABLES).read_text(encoding="utf-8"), one["command"]))
        for path in figures(folder):
            if path.parent.name == part.name:
                lines += ["", f"![{part.heading}: {path.stem}]({figures_in}{path.relative_to(folder).as_posix()})"]
    return "\n".join(lines) + "\n"


def body(printed: str, command: str) -> str:
    """What a part has printed, without log lines of libraries; of pytest, without its own."""
    printed = "\n".join(line for line in printed.splitlines() if not LOG_LINE.match(line))
    if not command.startswith("pytest"):
        return printed.strip()
    kept = "\n".join(line for line in printed.splitlines() if not PYTEST_LINE.match(line.strip()) or not line.strip())
    return "```\n" + re.sub(r"\n{3,}", "\n\n", kept).strip() + "\n```"


def head(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The command, the machine, its versions of packages, when it was and how busy the machine was."""
    versions = [f"{name} {version}" for name in PACKAGES if (version := _version(name))]
    memory = psutil.virtual_memory().total / 2**30
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
        f"- Machine: {_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}; {_device()}",
        f"- Versions: Python {platform.python_version()}, {', '.join(versions)}",
    ]
    if parts:
        begins = sorted(part["began"] for part in parts)
        loads = max(part["load"] for part in parts)
        lines.append(f"- Date: {begins[0]} to {begins[-1]}; load average before a part at most {loads:.1f}")
    return lines


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
