"""The real LLaMA-Factory on a CPU, on one and on two ranks: fixed batches, length-grouped, packed, and odb.

A tiny random Qwen2 on made-up text of very uneven length, and a tiny random Qwen3-VL on the built-in MM-Mix, one epoch
of the same samples each, at the same learning rate, with the same samples in an optimizer step (packing and `fill`
cannot have that) and at most the same peak of memory, in padded tokens of the largest micro-batch.
A fixed batch reaches rows x longest row, whatever the order, and so does a length-grouped one; packed rows are as long
as that longest row, and as many; token_budget is that product.

Each training is run with several seeds, contestants in turn, and has a JSON file: one that has it is not run again.
Where all samples are alike nothing can be won: what odb itself costs shows there.

    python examples/benchmark/train.py                                  # three seeds; about an hour on two cores
    python examples/benchmark/train.py --workloads MM-Mix --ranks 2
    python examples/benchmark/train.py --short                          # to see that everything works
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import page
from page import furthest_loss, shares
from workloads import FIXED, GLOBAL_BATCH_SIZE, WORKLOADS, Workload

matplotlib.use("Agg")
from matplotlib import pyplot
from runs import Run, padded_tokens, run_llamafactory, sft_config, train

SHORT = (FIXED, "odb")
SHORT_SAMPLES = 64
Result = dict[str, Any]
"""What one training came to, by the keys of the columns; `name` is the contestant's."""


class Column(NamedTuple):
    """best: whether "most" or "least" is best, if either is. of_steps: compared only among contestants with as many
    optimizer steps as odb."""

    key: str
    label: str
    show: Callable[[Any], str]
    best: str | None = None
    of_steps: bool = False


COLUMNS = (
    Column("optimizer_steps", "optimizer steps", "{:,.0f}".format),
    Column("samples_per_second", "samples/s", "{:.1f}".format, "most"),
    Column("tokens_per_second", "real tokens/s", "{:,.0f}".format, "most"),
    Column("padded_tokens_per_second", "padded tokens/s", "{:,.0f}".format),
    Column("padding", "padding", "{:.1%}".format, "least"),
    Column("balance", "balance", "{:.2f}".format, "most"),
    Column("steps", "micro-steps", "{:,.0f}".format),
    Column("seconds", "seconds", "{:.1f}".format, "least"),
    Column("seconds_spread", "their spread", "{0[0]:.1f} to {0[1]:.1f}".format),
    # Of the busiest training process: other work on the machine changes them less than the seconds of the clock.
    Column("cpu_seconds", "CPU seconds", "{:.1f}".format, "least"),
    Column("seconds_to_first_step", "s to first step", "{:.1f}".format, "least"),
    Column("peak_padded_tokens", "peak padded tokens", "{:,.0f}".format),
    Column("peak_memory", "peak memory, MiB", lambda value: f"{value / 2**20:,.0f}", "least"),
    Column("train_loss", "training loss", "{:.3f}".format, "least", of_steps=True),
    Column("validation_loss", "validation loss", "{:.3f}".format, "least", of_steps=True),
)


def shown(column: Column, result: Result) -> str:
    value = result[column.key]
    return "" if value is None else column.show(value)


def best_of(column: Column, results: Sequence[Result]) -> dict[str, str]:
    """The names of the contestants with the best figure of a column, as it is shown; empty where none is better."""
    values = {result["name"]: result[column.key] for result in results if result[column.key] is not None}
    if column.of_steps:
        steps = {result["name"]: result["optimizer_steps"] for result in results}
        values = {name: value for name, value in values.items() if steps[name] == steps["odb"]}
    if column.best is None or len(values) < 2:
        return {}
    best = column.show(max(values.values()) if column.best == "most" else min(values.values()))
    return {name: best for name, value in values.items() if column.show(value) == best}


def table(title: str, results: Sequence[Result]) -> str:
    """A row for each contestant, the best of each column in bold."""
    best = {column: best_of(column, results) for column in COLUMNS}
    rows = []
    for result in results:
        cells = {column: shown(column, result) for column in COLUMNS}
        bold = [f"**{text}**" if result["name"] in best[column] else text for column, text in cells.items()]
        rows.append([result["name"], *bold])
    return page.table([title, *(column.label for column in COLUMNS)], rows)


def ahead_of_odb(results: Sequence[Result]) -> str:
    """In which figures another contestant, not a variant of odb, is better than odb."""
    ours = next(result for result in results if result["name"] == "odb")
    others = [result for result in results if not result["name"].startswith("odb")]
    found = []
    for column in COLUMNS:
        best = best_of(column, [*others, ours])
        if best and "odb" not in best:
            found.append(f"{column.label} ({' and '.join(best)}: {min(best.values())}, odb: {shown(column, ours)})")
    return f"Ahead of odb, by means: {'; '.join(found)}." if found else "By means odb is ahead in every figure."


def balance(padded: Sequence[Sequence[int]]) -> float:
    """Mean over steps of the mean over the largest padded tokens of the ranks. padded: of each rank, by step."""
    return sum(sum(step) / len(step) / max(step) for step in zip(*padded)) / min(map(len, padded))


def result(name: str, run: Run, samples: int, real_tokens: int, validation_loss: float) -> Result:
    """samples, real_tokens: of the data set, each once; whatever else was computed is padding, for everyone alike."""
    padded = [[padded_tokens(batch) for batch in mine] for mine in run.batches]
    computed = sum(map(sum, padded))
    return {
        "name": name,
        "samples_per_second": samples / run.seconds,
        "tokens_per_second": real_tokens / run.seconds,
        "padded_tokens_per_second": computed / run.seconds,
        "padding": 1 - real_tokens / computed,
        "balance": balance(padded) if len(padded) > 1 else None,
        "optimizer_steps": run.num_optimizer_steps,
        "steps": max(map(len, padded)),
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "seconds_to_first_step": run.seconds_to_first_step,
        "peak_padded_tokens": max(map(max, padded)),
        "peak_memory": max(mine[-1]["peak_memory"] for mine in run.batches),
        # Over the last tenth of the epoch.
        "train_loss": float(np.mean([e["loss"] for e in run.history() if "loss" in e and e["epoch"] > 0.9])),
        "validation_loss": validation_loss,
        "losses": [loss for _, _, loss in run.losses()],
        "ends": [end for _, end, _ in run.losses()],
        "real_tokens": real_tokens,
    }


def validation_loss(config: dict[str, Any], run: Run) -> float:
    """Mean over the validation samples: at the end of the training, or of what it has saved."""
    for entry in run.history():
        if "eval_loss" in entry:
            return entry["eval_loss"]
    kept = {key: value for key, value in config.items() if key not in ("packing", "neat_packing", "odb")}
    trained = {"model_name_or_path": config["output_dir"], "output_dir": f"{config['output_dir']}/validation"}
    asked = {"do_train": False, "do_eval": True, "eval_strategy": "no", "eval_dataset": f"{config['dataset']}_val"}
    again = kept | trained | asked
    run_llamafactory(again, record=run.output / "none.jsonl")
    return json.loads((run.output / "validation" / "all_results.json").read_text(encoding="utf-8"))["eval_loss"]


def mean_of(runs: list[Result]) -> Result:
    """Of one contestant's trainings, a seed each: means, the least and the most of seconds and validation losses."""
    mean = dict(runs[0])
    for key, value in runs[0].items():
        if isinstance(value, int | float):
            mean[key] = statistics.mean(run[key] for run in runs)
    for key in ("seconds", "validation_loss"):
        mean[f"{key}_spread"] = min(run[key] for run in runs), max(run[key] for run in runs)
    return mean | {"runs": runs}


def same_training(fixed: Result, ours: Result) -> str:
    """How far the losses of odb are from those of fixed batches, optimizer step by optimizer step, of all seeds."""
    seconds = shares(fixed, ours, "seconds")
    cpu = statistics.median(shares(fixed, ours, "cpu_seconds"))
    return (
        f"{ours['name']} and fixed batches: {len(fixed['losses'])} optimizer steps each, whose training losses differ "
        f"by {furthest_loss(fixed, ours):.1e} at most, relatively; in {statistics.median(seconds):.1%} of the time "
        f"({min(seconds):.1%} to {max(seconds):.1%}; {cpu:.1%} of the CPU time)."
    )


def overhead(fixed: Result, ours: Result) -> str:
    """What odb costs where nothing can be won: an optimizer step, and all of it with what stock does before them."""
    found = []
    for run in (*fixed["runs"], *ours["runs"]):
        run["a_step"] = float(np.median(np.diff(run["ends"])[1:]))
        run["in_all"] = run["seconds_to_first_step"] + run["seconds"]
    for key in ("a_step", "in_all"):
        share = shares(fixed, ours, key)
        found.append(f"{statistics.median(share):.1%} ({min(share):.1%} to {max(share):.1%})")
    return (
        f"{ours['name']}: from the third on, an optimizer step takes {found[0]} of the time of fixed batches; from the "
        f"start of the process to the end of the last optimizer step it takes {found[1]}."
    )


def compare(workload: Workload, folder: Path, ranks: int, seeds: int, is_short: bool) -> list[Result]:
    """The results of all contestants, fixed batches first."""
    place = folder / f"{workload.name}_{ranks}".replace(" ", "_")
    model, data = workload.build(place, SHORT_SAMPLES if is_short else workload.samples)
    samples = len(json.loads((data / f"{workload.dataset}.json").read_text(encoding="utf-8")))
    runs: dict[str, list[Result]] = {}
    for seed in range(seeds):
        for name, changes in workload.contestants(ranks).items():
            if is_short and name not in SHORT:
                continue
            output = place / f"{name}_{seed}".replace(", ", "_").replace(": ", "_").replace(" ", "_")
            saved = output / "result.json"
            if not saved.exists():
                shared = {"dataset": workload.dataset, "template": workload.template, "cutoff_len": workload.cutoff_len}
                config = sft_config(model, data, output, **shared) | changes | {"seed": seed}
                run = train(config, ranks=ranks)
                if name == FIXED:
                    real_tokens = sum(sum(batch["lengths"]) for mine in run.batches for batch in mine)
                else:
                    real_tokens = runs[FIXED][seed]["real_tokens"]
                found = result(name, run, samples, real_tokens, validation_loss(config, run))
                saved.write_text(json.dumps(found, indent=2), encoding="utf-8")
                for weights in output.glob("**/*.safetensors"):
                    weights.unlink()
                print(f"{workload.name}, {ranks} rank(s), {name}, seed {seed}: {run.seconds:.1f} s", file=sys.stderr)
            runs.setdefault(name, []).append(json.loads(saved.read_text(encoding="utf-8")))
    return [mean_of(mine) for mine in runs.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, default=Path("saves/benchmark_train"), help="(%(default)s)")
    parser.add_argument("--short", action="store_true", help="text on one rank, a few samples: shows that it works")
    parser.add_argument("--picture", action="store_true", help="draw the losses")
    given = parser.parse_args()
    if given.short:
        given.workloads, given.ranks, given.seeds = ["text"], [1], 1
    folder = given.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [workload for workload in WORKLOADS if workload.name in given.workloads]
    sizes = "; ".join(f"{one.name} {one.rows} x {one.row:,} = {one.token_budget:,}" for one in chosen)
    tables = [
        f"One epoch, {GLOBAL_BATCH_SIZE} samples an optimizer step, mean of {given.seeds} seed(s); rows of a fixed "
        f"batch and token_budget: {sizes}."
    ]
    trainings: dict[str, list[Result]] = {}
    for workload in chosen:
        for ranks in given.ranks:
            title = f"{workload.name}, {ranks} rank{'s' * (ranks > 1)}"
            results = trainings[title] = compare(workload, folder, ranks, given.seeds, given.short)
            of = {result["name"]: result for result in results}
            said = []
            for name in (name for name in ("odb", "odb, padded") if name in of):
                said.append(same_training(of[FIXED], of[name]))
                said += [overhead(of[FIXED], of[name])] if workload.alike else []
            tables += [table(title, results), " ".join([*said, ahead_of_odb(results)])]
    if given.picture:
        draw_losses(trainings, folder / "losses.png")
    page.write(folder, {"trainings": trainings}, tables)


def draw_losses(trainings: dict[str, list[Result]], path: Path) -> None:
    """Save a PNG: the training losses over optimizer steps and over time, of contestants that keep the batch."""
    figure, panels = pyplot.subplots(len(trainings), 2, figsize=(10, 3 * len(trainings)), squeeze=False)
    for (title, results), (steps, times) in zip(trainings.items(), panels):
        for result in results:
            if result["name"] in (FIXED, "length-grouped", "odb"):
                losses, ends = (result["runs"][0][key] for key in ("losses", "ends"))
                style = {"label": result["name"], "linestyle": "--" if result["name"] == "odb" else "-"}
                steps.plot(range(1, len(losses) + 1), losses, **style)
                times.plot(ends, losses, **style)
        steps.set(xlabel="optimizer step", ylabel="training loss", title=title)
        times.set(xlabel="seconds of training")
        steps.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
