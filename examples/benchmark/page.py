"""The page `benchmarks.md`: machine, versions and date, then of each part its command, tables and figures."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from parts import Part

TABLES, DONE, FIGURES = "tables.md", "done.json", "benchmarks"
"""What a part prints, how it went, and where docs/ has the figures."""
PACKAGES = ("torch", "transformers", "llamafactory", "accelerate", "trl")
README_ROWS = {
    "fixed batches, best of 1, 2, 4 and 8 rows": r"fixed, .*",
    "length-grouped, best of 1, 2, 4 and 8 rows (needs all lengths before training)": r"length-grouped, .*",
    "transformers' batch_rebalance, best of 1, 2, 4 and 8 rows (the same)": r"batch_rebalance.*",
    "LLaMA-Factory's packing (text only, another N)": r"LLaMA-Factory's packing, neat_packing",
    "online-dynamic-batching (another N)": r"online-dynamic-batching.*",
    "odb, padded": r"odb, keep",
    "**odb**": r"odb, keep, flat",
    "what no cut can exceed": r"what no cut can exceed",
}
"""Of the best of those whose names match."""
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
    for part in parts:
        lines += ["", f"## {part.heading}", part.about, ""]
        one = found[part.name]
        if one is None:
            lines.append(f"Not measured: {missing[part.name]}.")
            continue
        lines += [f"`{one['command']}` ({one['seconds'] / 60:.0f} minutes, {one['began']}):", ""]
        lines.append(body((folder / part.name / TABLES).read_text(encoding="utf-8"), one["command"]))
        for path in figures(folder):
            if path.parent.name == part.name:
                lines += ["", f"![{part.heading}: {path.stem}]({figures_in}{path.relative_to(folder).as_posix()})"]
    return "\n".join(lines) + "\n"


def readme(folder: Path) -> str | None:
    """The one table and the one picture of README, once the parts they come from are done."""
    if not (done(folder, "planning") and done(folder, "train_mm_mix_2")):
        return None
    rows = json.loads((folder / "planning" / "planning.json").read_text(encoding="utf-8"))
    rows = [row for row in rows if row["ranks"] == 8 and row["batch_size"] in (256, None) and not row["images"]]
    profiles = list(dict.fromkeys(row["profile"] for row in rows))
    lines = [f"| 8 ranks, 256 samples an optimizer step | {' | '.join(profiles)} |", f"|---|{'--:|' * len(profiles)}"]
    for label, names in README_ROWS.items():
        cells = []
        for profile in profiles:
            mine = [row for row in rows if row["profile"] == profile and re.fullmatch(names, row["name"])]
            reached = [row["efficiency"] for row in mine if "why" not in row]
            cells.append(f"{max(reached):.2f}" if reached else "not measured")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    (trained,) = json.loads((folder / "train_mm_mix_2" / "train.json").read_text(encoding="utf-8")).values()
    lines += ["", "| MM-Mix, 2 ranks | training loss | validation loss | seconds |", "|---|--:|--:|--:|"]
    for run in trained:
        if run["name"] in ("fixed batch", "length-grouped", "odb"):
            losses = f"{run['train_loss']:.3f} | {run['validation_loss']:.3f}"
            least, most = run["seconds_spread"]
            lines.append(f"| {run['name']} | {losses} | {run['seconds']:.1f} ({least:.1f} to {most:.1f}) |")
    lines += ["", f"![Losses over optimizer steps and over time](docs/{FIGURES}/train_mm_mix_2/losses.png)"]
    return "\n".join(lines) + "\n"


def body(printed: str, command: str) -> str:
    """What a part has printed, without log lines of libraries; of pytest, without its own."""
    printed = "\n".join(line for line in printed.splitlines() if not LOG_LINE.match(line))
    if not command.startswith("pytest"):
        return printed.strip()
    kept = "\n".join(line for line in printed.splitlines() if not PYTEST_LINE.match(line.strip()) or not line.strip())
    return "```\n" + re.sub(r"\n{3,}", "\n\n", kept).strip() + "\n```"


def head(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The command, the machine, the versions, when it was and how busy the machine was."""
    versions = [f"{name} {version}" for name in PACKAGES if (version := _version(name))]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    ).stdout.strip()
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
        f"- Versions: odb_factory {commit or _version('odb_factory')}, Python {platform.python_version()}, "
        f"{', '.join(versions)}",
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
