"""How fast the loader alone is: odb_factory, a plain torch DataLoader and the package `online-dynamic-batching`.

All take the same rows, in the same run: text (lists of token ids) and pictures (files, through Qwen-VL's image
processor). Each has processes of its own and is measured in turn with the others, several times; medians are given.

    pip install -e ".[bench]"
    python examples/benchmark/loader.py --output-dir out       # about nine minutes on two cores
    python examples/benchmark/loader.py --short --output-dir out

samples/s, tokens/s: of an epoch for a consumer that takes no time, from the making of the loader to the last batch.
first batch: seconds from the making of the loader.
blocked: share of the time after the first batch that a consumer spends in `next()`, if it takes 1.25 times as long for
    the samples of a batch as the loader took in the run before: workers can keep up with it. It sleeps, as a training
    process that waits for its accelerator does.
CPU: milliseconds of processor time a sample, in the training process and all workers.
memory: peak in that second run, proportional set size of the training process and all workers, with tensors that are
    on their way from one to another (MiB).
window of 1,024: what that peak grows by when the window of an online loader is 1,024 picture samples instead of 32.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from loader_contest import (
    BATCH_SIZE,
    Contestant,
    Workload,
    consume,
    memory_mib,
    odb_factory,
    plain,
    published,
    published_light,
)
from loader_rows import write_pictures
from processes import make_processes

SLOWER = 1.25
WINDOWS = (32, 1024)
PUBLISHED = "online-dynamic-batching"


def contestants(workers: int) -> list[Contestant]:
    """Those with as many worker processes as the plain DataLoader, then those with the same `num_workers`."""
    half = workers // 2
    lineup = [
        Contestant("plain DataLoader", plain, workers),
        Contestant("odb_factory", odb_factory, workers - half, half),
        Contestant("odb_factory", odb_factory, workers - half, half, layout="flat"),
        Contestant("odb_factory", odb_factory, workers, workers),
    ]
    if importlib.util.find_spec("odb") is None:
        print(f"{PUBLISHED} is not installed and left out; it comes with `pip install -e .[bench]`")
        return lineup
    for run, name in ((published, PUBLISHED), (published_light, f"{PUBLISHED}, light items")):
        lineup += [Contestant(name, run, workers - 1, 1), Contestant(name, run, workers, 1)]
    return lineup


Lineup = dict[Contestant, ProcessPoolExecutor]


def compare(lineup: Lineup, workload: Workload, repeats: int) -> list[dict[str, Any]]:
    """One after the other in every round; medians over the rounds."""
    runs: dict[Contestant, list[dict[str, float]]] = {how: [] for how in lineup}
    for _ in range(repeats):
        for how, home in lineup.items():
            free = home.submit(consume, how, workload).result()
            pace = SLOWER * free["seconds"] / workload.num_rows
            paced = home.submit(consume, how, workload, pace, watched=True).result()
            runs[how].append(free | {key: paced[key] for key in ("blocked", "peak_mib")})
    baseline = next(iter(runs.values()))
    return [
        {"workload": workload.name, "loader": how.name, "layout": how.layout, "num_workers": how.workers}
        | {"collating": how.collating}
        | {key: statistics.median(run[key] for run in mine) for key in baseline[0]}
        | {
            "of_plain": statistics.median(
                own["samples_per_second"] / plain["samples_per_second"] for own, plain in zip(mine, baseline)
            ),
            "runs": mine,
        }
        for how, mine in runs.items()
    ]


def window_mib(how: Contestant, home: ProcessPoolExecutor, workload: Workload) -> float:
    """What the peak of memory grows by with the window."""
    of_one_window = replace(workload, num_rows=max(WINDOWS))
    peaks = [
        home.submit(consume, replace(how, window=window), of_one_window, watched=True).result()["peak_mib"]
        for window in WINDOWS
    ]
    return peaks[1] - peaks[0]


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "loader": lambda row: row["loader"],
    "layout": lambda row: row["layout"],
    "worker processes": lambda row: " + ".join(str(row[key]) for key in ("num_workers", "collating") if row[key]),
    "samples/s": lambda row: f"{row['samples_per_second']:,.0f}",
    "of plain": lambda row: f"{row['of_plain']:.2f}",
    "real tokens/s": lambda row: f"{row['real_tokens_per_second']:,.0f}",
    "padded tokens/s": lambda row: f"{row['padded_tokens_per_second']:,.0f}",
    "padding": lambda row: f"{row['padding']:.1%}",
    "first batch": lambda row: f"{row['first_batch_s']:.2f} s",
    "blocked": lambda row: f"{row['blocked']:.1%}",
    "CPU": lambda row: f"{row['cpu_ms_a_sample']:.2f} ms",
    "memory": lambda row: f"{row['peak_mib']:,.0f}",
    "window of 1,024": lambda row: f"{row['window_mib']:,.0f}" if "window_mib" in row else "",
}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"| {rows[0]['workload']}: {' | '.join(COLUMNS)} |", f"|---|---|---|{'--:|' * (len(COLUMNS) - 3)}"]
    return "\n".join(lines + [f"| {' | '.join(cell(row) for cell in COLUMNS.values())} |" for row in rows])


def draw(results: list[list[dict[str, Any]]], path: Path) -> None:
    """Bars: samples/s, blocked and memory of every loader, one row of panels a workload."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = {
        "samples_per_second": "samples/s",
        "blocked": "share of time blocked in next()",
        "peak_mib": "memory (MiB)",
    }
    figure, panels = plt.subplots(len(results), len(shown), figsize=(13, 3 * len(results)), sharey="row", squeeze=False)
    for line, rows in zip(panels, results):
        names = [f"{row['loader']} ({row['layout']}, {COLUMNS['worker processes'](row)})" for row in rows]
        colours = ["#2a6f97" if row["loader"] == "odb_factory" else "#adb5bd" for row in rows]
        for axes, (key, title) in zip(line, shown.items()):
            axes.barh(names, [row[key] for row in rows], color=colours)
            axes.set_title(f"{rows[0]['workload']}: {title}", loc="left", fontsize=10)
        line[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the plain DataLoader, two or more")
    parser.add_argument("--short", action="store_true", help="few samples, once: shows that it runs, not how fast")
    parser.add_argument("--output-dir", type=Path, required=True, help="loader.json and loader.png are written there")
    given = parser.parse_args()
    given.output_dir.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        shared = stack.enter_context(make_processes(1)) if given.short else None
        lineup = {how: shared or stack.enter_context(make_processes(1)) for how in contestants(given.workers)}
        for ready in [home.submit(memory_mib) for home in lineup.values()]:  # imports done, together
            ready.result()
        pictures = tuple(write_pictures(Path(folder), 16 if given.short else 256))
        text = Workload("text", 400 if given.short else 10_000, 200, 2048, BATCH_SIZE * 2048)
        images = Workload("images", 48 if given.short else 1_024, 40, 512, BATCH_SIZE * 512, BATCH_SIZE * 576, pictures)
        for workload in (text, images):
            rows = compare(lineup, workload, repeats=1 if given.short else 3)
            if workload is images and not given.short:
                for (how, home), row in zip(lineup.items(), rows):
                    if how.workers + how.collating == given.workers and how.collating and how.layout == "padded":
                        row["window_mib"] = window_mib(how, home, workload)
            print(table(rows), end="\n\n", flush=True)
            results.append(rows)
    machine = {"cores": os.cpu_count(), "load": os.getloadavg(), "torch": torch.__version__}
    report = json.dumps({"machine": machine, "results": [row for rows in results for row in rows]}, indent=2)
    (given.output_dir / "loader.json").write_text(report, encoding="utf-8")
    draw(results, given.output_dir / "loader.png")


if __name__ == "__main__":
    main()
