"""Tables, and the page `docs/benchmarks.md` made of them.

Each part of the benchmark calls `write` with its figures and its tables. `publish` puts them into docs/: the first
tables of a part stand on the page, the others in a file of the part, and all figures once in `figures.json`.
"""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FIGURES, TABLES, DONE = "figures.json", "tables.md", "done.json"
FOLDER = "benchmarks"
"""Of docs/: a file of tables for each part, the pictures, and `figures.json` of all parts."""
MORE = "<!-- more -->"
"""The tables after this line are not on the page, but in the part's own file."""
DIGITS = 4
NOT_PUBLISHED = ("losses", "ends", "runs")
"""Series of every optimizer step and seed: they are in the part's folder alone."""


def table(head: Sequence[str], rows: Sequence[Sequence[object]], num_text: int = 1) -> str:
    """A Markdown table whose first `num_text` columns are text and whose others are numbers."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * num_text}{'--:|' * (len(head) - num_text)}"]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows])


def write(folder: Path, figures: Any, tables: Sequence[str], more: Sequence[str] = ()) -> None:
    """What a part has found, into its folder; the tables are printed, too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FIGURES).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    text = "\n\n".join([*tables, MORE, *more] if more else tables)
    (folder / TABLES).write_text(text + "\n", encoding="utf-8")
    print(text)


def done(folder: Path, name: str) -> dict[str, Any] | None:
    """How a part went: command, date, machine; None for a part that was not run or failed."""
    path = folder / name / DONE
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found if found and found["returncode"] == 0 else None


def collect(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of each part that is done: `done`, its `tables`, its `figures`, and the names of its `pictures`."""
    parts: dict[str, dict[str, Any]] = {}
    for name in names:
        if (ended := done(folder, name)) is not None:
            figures = json.loads((folder / name / FIGURES).read_text(encoding="utf-8"))
            tables = (folder / name / TABLES).read_text(encoding="utf-8").strip()
            pictures = sorted(path.name for path in (folder / name).glob("*.png"))
            parts[name] = {"done": ended, "tables": tables, "figures": figures, "pictures": pictures}
    return parts


def publish(docs: Path, folder: Path, parts: Sequence[Any]) -> None:
    """Put the parts that are done in `folder` into docs/, beside those that were published before.

    parts: name, heading and about of each (`all.Part`), in the order of the page.
    """
    target, names = docs / FOLDER, [part.name for part in parts]
    target.mkdir(exist_ok=True)
    known = target / FIGURES
    published: dict[str, Any] = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
    for name, found in collect(folder, names).items():
        for picture in found["pictures"]:
            (target / f"{name}_{picture}").write_bytes((folder / name / picture).read_bytes())
        found["pictures"] = [f"{name}_{picture}" for picture in found["pictures"]]
        found["tables"], _, more = found["tables"].partition(MORE)
        if more:
            (target / f"{name}.md").write_text(more.strip() + "\n", encoding="utf-8")
        found |= {"has_more": bool(more), "in_short": in_short(name, found["figures"])}
        published[name] = found | {"figures": rounded(found["figures"])}
    published = {name: published[name] for name in names if name in published}
    short = functools.partial(json.dumps, separators=(",", ":"))
    lines = ",\n".join(f"{short(name)}: {short(found)}" for name, found in published.items())
    known.write_text(f"{{{lines}}}\n", encoding="utf-8")
    (docs / "benchmarks.md").write_text(make(published, parts, f"{FOLDER}/"), encoding="utf-8")


def rounded(figures: Any) -> Any:
    """For publication: few digits, many rows as columns (without those not measured), no series of `NOT_PUBLISHED`."""
    if isinstance(figures, float):
        few = float(f"{figures:.{DIGITS}g}")
        return int(few) if few.is_integer() else few
    if isinstance(figures, dict):
        return {key: rounded(value) for key, value in figures.items() if key not in NOT_PUBLISHED}
    if isinstance(figures, list):
        if len(figures) > 20 and all(isinstance(row, dict) for row in figures):
            measured = [row for row in figures if "why" not in row]
            keys = list(dict.fromkeys(key for row in measured for key in row))
            return {"columns": keys, "rows": [[rounded(row.get(key)) for key in keys] for row in measured]}
        return [rounded(value) for value in figures]
    return figures


def make(found: Mapping[str, Mapping[str, Any]], parts: Sequence[Any], files_in: str = "") -> str:
    """The page. found: of each part that is done its `done`, `tables`, `pictures`, `in_short`, and whether it has more
    tables in a file (`has_more`). files_in: the folder of files and pictures; "" for that of a sitting."""
    lines = ["# Benchmarks", "", *_head([one["done"] for one in found.values()]), "", "## In short"]
    lines += _short([one["in_short"] for one in found.values()])
    for part in parts:
        lines += ["", f"## {part.heading}", part.about, ""]
        if (one := found.get(part.name)) is None:
            lines.append("Not measured.")
            continue
        ended = one["done"]
        took = f"{ended['seconds'] / 60:.0f} minutes, {ended['began']}, load average before it {ended['load']:.1f}"
        more = f"; [more tables]({files_in}{part.name}.md)" if one.get("has_more") else ""
        lines += [f"`{ended['command']}` ({took}, odb_factory at {ended['commit']}{more}):", ""]
        lines.append(one["tables"].strip())
        for picture in one["pictures"]:
            place = picture if files_in else f"{part.name}/{picture}"
            lines += ["", f"![{part.heading}: {Path(picture).stem}]({files_in}{place})"]
    return "\n".join(lines) + "\n"


def _head(ends: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "Everything on this page is made by `python examples/benchmark/all.py --rivals --publish`. All contestants"
    yield "of a table get the same samples. Where another method is ahead, the tables say so. The figures behind the"
    yield f"tables are in [{FOLDER}/{FIGURES}]({FOLDER}/{FIGURES}). No GPU has been measured:"
    yield "`benchmarks/gpu.py` is the run for one, tried at tiny scale on a CPU."
    if ends:
        begins = sorted(one["began"] for one in ends)
        yield ""
        yield f"- Machine: {' and '.join(dict.fromkeys(one['machine'] for one in ends))}"
        yield f"- Versions: {' and '.join(dict.fromkeys(one['versions'] for one in ends))}"
        yield f"- Date: {begins[0]} to {begins[-1]}"


# ----------------------------------------------------------------------------------------------------------------------
# The beginning of the page, and README's tables.

PLANNED = {
    "fixed batches, best of 1, 2, 4 and 8 rows": r"fixed, .*",
    "length-grouped, best of 1, 2, 4 and 8 rows (needs all lengths before training)": r"length-grouped, .*",
    "transformers' batch_rebalance, best of 1, 2, 4 and 8 rows (the same)": r"batch_rebalance.*",
    "LLaMA-Factory's packing (text only, another N)": r"LLaMA-Factory's packing, neat_packing",
    "TRL's bfd packing, padding-free (text only, another N)": r"TRL's bfd packing.*",
    "online-dynamic-batching (another N)": r"online-dynamic-batching.*",
    "odb, padded": r"odb, keep",
    "**odb**": r"odb, keep, flat",
    "what no cut of these optimizer steps can exceed": r"what no cut can exceed",
    "odb, `fill`: the budget filled, whatever becomes of N": r"odb, fill, flat",
}
"""The best of those whose names match, at `RANKS` and `BATCH_SIZE`."""
RANKS, BATCH_SIZE = 8, 256
DEMO = {
    "optimizer steps": ("optimizer_steps", "{:.0f}"),
    "final training loss": ("train_loss", "{:.4f}"),
    "validation loss": ("validation_loss", "{:.4f}"),
    "seconds of training": ("seconds", "{:.1f}"),
    "CPU seconds of a rank": ("cpu_seconds", "{:.1f}"),
    "padding": ("padding_ratio", "{:.1%}"),
    "micro-steps": ("micro_steps", "{:.0f}"),
    "peak tokens of a micro-batch": ("peak_padded_tokens", "{:,.0f}"),
}
TRAINED = ("fixed batch", "fixed batch, 1 row", "length-grouped", "odb, padded", "odb")


def in_short(name: str, figures: Any) -> dict[str, Any]:
    """What the beginning of the page shows of a part: columns of the table of plans, a row of that of trainings."""
    if name.startswith("planning"):
        rows = [row for row in figures if row["ranks"] == RANKS and row["batch_size"] in (BATCH_SIZE, None)]
        columns = {}
        for profile in dict.fromkeys(row["profile"] for row in rows):
            mine = [row for row in rows if row["profile"] == profile and not row["images"] and "why" not in row]
            for label, names in PLANNED.items():
                reached = [row["efficiency"] for row in mine if re.fullmatch(names, row["name"])]
                columns.setdefault(profile, {})[label] = f"{max(reached):.2f}" if reached else "not measured"
        return {"plans": columns}
    if name == "demo":
        return {"demo": figures}
    if isinstance(figures, dict) and "trainings" in figures:
        trainings = {}
        for title, results in figures["trainings"].items():
            runs = {result["name"]: result for result in results}
            fixed, ours = runs[TRAINED[0]], runs["odb"]
            seconds = [f"{runs[name]['seconds']:.1f}" if name in runs else "" for name in TRAINED]
            share = statistics.median(shares(fixed, ours, "seconds"))
            trainings[title] = [*seconds, f"{share:.0%}", f"{furthest_loss(fixed, ours):.0e}"]
        return {"trainings": trainings}
    return {}


def _short(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for runs in (one["demo"] for one in found if "demo" in one):
        shown = [run for run in runs if run["name"] != "odb, fill"]
        heads = [{"fixed": "fixed batches"}.get(run["name"], run["name"]) for run in shown]
        rows = [[label, *(show.format(run[key]) for run in shown)] for label, (key, show) in DEMO.items()]
        yield from ("", "`odb-factory demo`: a tiny Qwen3-VL on two processes, 32 samples an optimizer step:", "")
        yield table(["", *heads], rows)
    plans = {profile: cells for one in found for profile, cells in one.get("plans", {}).items()}
    if plans:
        rows = [[label, *(cells[label] for cells in plans.values())] for label in PLANNED]
        yield from ("", "Step efficiency in simulation, by lengths alone, `token_budget` 16,384:", "")
        yield table([f"{RANKS} ranks, N = {BATCH_SIZE} samples an optimizer step", *plans], rows)
    trainings = {title: cells for one in found for title, cells in one.get("trainings", {}).items()}
    if trainings:
        yield from ("", "Trainings by LLaMA-Factory on a CPU, mean seconds; the share is the median of all seeds:", "")
        heads = ["", *TRAINED, "odb by fixed", "losses differ by at most"]
        yield table(heads, [[title, *cells] for title, cells in trainings.items()])


def shares(fixed: Mapping[str, Any], ours: Mapping[str, Any], key: str) -> list[float]:
    """What ours takes of what fixed batches take, seed by seed."""
    return [mine[key] / stock[key] for stock, mine in zip(fixed["runs"], ours["runs"], strict=True)]


def furthest_loss(fixed: Mapping[str, Any], ours: Mapping[str, Any]) -> float:
    """The largest relative difference of the training losses of any optimizer step, of all seeds."""
    losses = ([loss for run in runs["runs"] for loss in run["losses"]] for runs in (fixed, ours))
    return furthest(*losses)


def furthest(numbers: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference of one from its counterpart."""
    return max(abs(number - other) / abs(number) for number, other in zip(numbers, others, strict=True))
