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
from pathlib import Path
from typing import Any

import numpy as np
from report import (
    COLUMNS,
    PADDING,
    SAMPLES,
    SECONDS,
    VALIDATION,
    Column,
    Result,
    ahead_of_odb,
    balance,
    draw,
    draw_losses,
    furthest_loss,
    markdown,
    shares,
    whole,
)
from train_workloads import FIXED, GLOBAL_BATCH_SIZE, WORKLOADS, Workload

from odb_factory.demo.demo import Run, padded_tokens, run_llamafactory, sft_config, train

SHORT = (FIXED, "odb")
SHORT_SAMPLES = 64
OPTIMIZER_STEPS = Column("optimizer_steps", "optimizer steps", whole)
CPU_SECONDS = Column("cpu_seconds", "CPU seconds", "{:.1f}".format, "least")
"""Of the busiest training process: other work on the machine changes them less than the seconds of the clock."""
SPREAD = Column("seconds_spread", "its spread", "{0[0]:.1f} to {0[1]:.1f}".format)
VALIDATION_SPREAD = Column("validation_loss_spread", "its spread", "{0[0]:.3f} to {0[1]:.3f}".format)
TRAIN_COLUMNS = [OPTIMIZER_STEPS]
for known in COLUMNS:
    TRAIN_COLUMNS.append(known)
    TRAIN_COLUMNS += [SPREAD, CPU_SECONDS] if known is SECONDS else [VALIDATION_SPREAD] if known is VALIDATION else []


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
    seconds = shares(fixed, ours, lambda run: run["seconds"])
    cpu = statistics.median(shares(fixed, ours, lambda run: run["cpu_seconds"]))
    return (
        f"{ours['name']} and fixed batches: {len(fixed['losses'])} optimizer steps each, whose training losses differ "
        f"by {furthest_loss(fixed, ours):.1e} at most, relatively; in {statistics.median(seconds):.1%} of the time "
        f"({min(seconds):.1%} to {max(seconds):.1%}; {cpu:.1%} of the CPU time)."
    )


def overhead(fixed: Result, ours: Result) -> str:
    """What odb costs where nothing can be won: an optimizer step, and all of it with what stock does before them."""

    def of_a_step(run: Result) -> float:
        return statistics.median(np.diff(run["ends"])[1:])

    def in_all(run: Result) -> float:
        return run["seconds_to_first_step"] + run["seconds"]

    said = []
    for found in (shares(fixed, ours, of_a_step), shares(fixed, ours, in_all)):
        said.append(f"{statistics.median(found):.1%} ({min(found):.1%} to {max(found):.1%})")
    return (
        f"{ours['name']}: from the third on, an optimizer step takes {said[0]} of the time of fixed batches; from the "
        f"start of the process to the end of the last optimizer step it takes {said[1]}."
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
    given = parser.parse_args()
    if given.short:
        given.workloads, given.ranks, given.seeds = ["text"], [1], 1
    folder = given.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [workload for workload in WORKLOADS if workload.name in given.workloads]
    print(f"One epoch, {GLOBAL_BATCH_SIZE} samples an optimizer step, mean of {given.seeds} seed(s);", end=" ")
    print("rows of a fixed batch and token_budget:", end=" ")
    print("; ".join(f"{w.name} {w.rows} x {w.row:,} = {w.token_budget:,}" for w in chosen))
    tables: dict[str, list[Result]] = {}
    for workload in chosen:
        for ranks in given.ranks:
            title = f"{workload.name}, {ranks} rank{'s' * (ranks > 1)}"
            results = tables[title] = compare(workload, folder, ranks, given.seeds, given.short)
            of = {result["name"]: result for result in results}
            print(f"\n{markdown(title, results, TRAIN_COLUMNS)}\n")
            for name in ("odb", "odb, padded"):
                if name in of:
                    print(same_training(of[FIXED], of[name]), end=" ")
                if name in of and workload.alike:
                    print(overhead(of[FIXED], of[name]), end=" ")
            print(f"{ahead_of_odb(results, TRAIN_COLUMNS)}", flush=True)
    (folder / "train.json").write_text(json.dumps(tables, indent=2), encoding="utf-8")
    draw(tables, [SAMPLES, CPU_SECONDS, PADDING, VALIDATION], folder / "train.png")
    draw_losses(tables, folder / "losses.png")


if __name__ == "__main__":
    main()
