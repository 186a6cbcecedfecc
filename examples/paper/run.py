"""The experiments of arXiv 2606.19989 as one command: its baselines, packing and odb, by LLaMA-Factory's `run_exp`.

    python examples/paper/run.py --profile ultrachat --device cpu --scale tiny        # five cells, minutes on two cores
    python examples/paper/run.py --profile ultrachat --device cpu --scale tiny --all  # all cells and the sweeps
    torchrun --nproc-per-node 8 examples/paper/run.py --profile llava --device cuda --scale 8b

Each cell is one epoch of the same samples. *Standard*: fixed batches in random order. *Sorted*, *GMT* and *BMT*: our
samplers (samplers.py) in the stock trainer. *HFG*: the trainer's grouping by length. Packing: LLaMA-Factory's
`neat_packing` (text). odb: `keep` and `fill`. All have the same workers and prefetch factor. "Same N": every cell has
about the samples an optimizer step of Standard, by gradient accumulation (odb's `keep`: exactly). "Own N": no
accumulation, as in the paper. Scale `tiny` makes a random model and data (data.py); `2b` and `8b` take
yaml_configs/paper/. One process imports LLaMA-Factory and forks a process for each cell; with torchrun each rank does,
and the ranks of all nodes share `--output-dir`.

Writes tables.md, figures.json and paper.png to the output folder. Step efficiency: examples/benchmark/simulation.py.
Validation losses are means over supervised tokens; evaluations do not count as time. CPU seconds are those of the
busiest training process: other work on the machine changes them less than the seconds of the clock.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RANK, RANKS = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # no CUDA context before the forks
    # glibc would give freed tensors back and fault their pages in again: see benchmark/runs.py.
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
}
FIVE = ("Standard", "HFG", "GMT", "odb, keep", "odb, fill")
ALL = ("Standard", "Sorted", "HFG", "GMT", "BMT", "packing", "odb, keep", "odb, fill")
OUR_SAMPLERS = ("Sorted", "GMT", "BMT")
WORKERS, PREFETCH = 1, 8
MEGA_BUCKET = {"tiny": 256, "2b": 4096, "8b": 4096}
"""The paper's is 4,096, which the tiny data would not fill."""
VALIDATION = 512
"""Samples of a real data set that are held out."""
EVALUATED = frozenset(2**k for k in range(24))
"""Optimizer steps after which the validation loss is taken, beside the last one."""
BUDGETS = (4096, 8192, 16384, 32768)
DEPTHS = ((1, 2), (1, 16), (2, 16), (2, 64))
BUFFERS = (64, 256, 1024, 4096)
Result = dict[str, Any]


class Cell(NamedTuple):
    """changes: of the base configuration. sampler: the arguments of `samplers.make` where it is one of ours."""

    name: str
    changes: dict[str, Any]
    sampler: dict[str, Any] | None = None


# ----------------------------------------------------------------------------------------------------------------------
# In the child.


def train(config: dict[str, Any], sampler: dict[str, Any] | None, port: int) -> None:
    """One cell on this rank; micro-batches and evaluations are recorded in `output_dir`."""
    import recorder
    import yaml
    from llamafactory.train import tuner
    from transformers import TrainerCallback

    output = Path(config["output_dir"])
    if RANKS > 1:
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    settings_file = output / f"train.{RANK}.yaml"
    settings_file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")

    class Evaluate(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            control.should_evaluate = state.global_step in EVALUATED

    record_evaluations(recorder.record_of(output / "evaluations.jsonl", RANK))
    if sampler:
        import samplers

        samplers.install(**sampler)
    tuner.run_exp = functools.partial(tuner.run_exp, callbacks=[Evaluate()])
    sys.argv = [sys.argv[0], str(output / "batches.jsonl"), str(settings_file)]
    recorder.main()


def record_evaluations(path: Path) -> None:
    """One line for each: optimizer step, begin and end (Unix and CPU time), sum of token losses, number of tokens."""
    from transformers import Trainer

    evaluate, prediction_step = Trainer.evaluate, Trainer.prediction_step
    sums = {"loss": 0.0, "tokens": 0}

    def counted(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = int((inputs["labels"][..., 1:] != -100).sum())
        found = prediction_step(self, model, inputs, *args, **kwargs)
        sums["loss"] += float(found[0]) * tokens
        sums["tokens"] += tokens
        return found

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        sums.update(loss=0.0, tokens=0)
        line = {"step": self.state.global_step, "begin": time.time(), "cpu_begin": time.process_time()}
        found = evaluate(self, *args, **kwargs)
        line |= sums | {"end": time.time(), "cpu_end": time.process_time()}
        with path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
        return found

    Trainer.prediction_step, Trainer.evaluate = counted, recorded


# ----------------------------------------------------------------------------------------------------------------------
# The cells, one after another.


class Kit:
    """base: a configuration with an `odb:` block. lengths: tokens of all samples, known once Standard has run."""

    def __init__(self, base: dict[str, Any], folder: Path, mega_bucket: int, packs: bool):
        self.base, self.folder, self.mega_bucket, self.packs = base, folder, mega_bucket, packs
        self.lengths: list[int] = []
        self.count = 0

    def cell(self, name: str, *, same_n: bool, token_budget: int | None = None) -> Cell:
        import samplers
        from runs import grouping_by_length

        block = self.base["odb"] | ({"token_budget": token_budget} if token_budget else {})
        budget, rows = block["token_budget"], self.base["per_device_train_batch_size"]
        samples_a_token = len(self.lengths) / max(1, sum(self.lengths))
        changes: dict[str, Any] = {}
        held: float = rows  # samples of a micro-batch
        sampler = None
        if name in OUR_SAMPLERS:
            sampler = {"kind": name, "rows": rows, "token_budget": budget, "mega_bucket": self.mega_bucket}
            held = len(self.lengths) / len(samplers.make(lengths=self.lengths, **sampler))
        elif name == "HFG":
            changes = grouping_by_length()
        elif name == "packing":
            changes = {"packing": True, "neat_packing": True}
            held = rows * self.base["cutoff_len"] * samples_a_token
        elif name == "odb, keep":
            changes = {"odb": block}
        elif name == "odb, fill":
            changes = {"odb": block | {"global_batch_size": "fill"}}
            held = budget * samples_a_token
        of_a_rank = rows * self.base["gradient_accumulation_steps"]
        changes["gradient_accumulation_steps"] = max(1, round(of_a_rank / held)) if same_n else 1
        return Cell(name, changes, sampler)

    def run(self, names: tuple[str, ...], **how: Any) -> list[Any]:
        """Results of rank 0. how: arguments of `cell`. Standard first: it shows the lengths."""
        return [self._train(self.cell(name, **how)) for name in names if name != "packing" or self.packs]

    def _train(self, cell: Cell) -> Result | None:
        from recorder import record_of

        output = self.folder / "runs" / f"{self.count:02d}_{cell.name.replace(', ', '_')}"
        output.mkdir(parents=True, exist_ok=True)
        self.count += 1
        for file in ("batches.jsonl", "evaluations.jsonl"):
            record_of(output / file, RANK).unlink(missing_ok=True)
        config = {key: value for key, value in self.base.items() if key != "odb"} | {"output_dir": str(output)}
        port = int(os.environ.get("MASTER_PORT", 0)) + 1 + self.count
        _in_child(lambda: train(config | cell.changes, cell.sampler, port), output / f"train.{RANK}.log")
        records = [_lines(record_of(output / "batches.jsonl", rank)) for rank in range(RANKS)]
        if not self.lengths:
            self.lengths = [length for mine in records for batch in mine for length in batch["lengths"]]
        if RANK:
            return None
        for weights in output.glob("*.safetensors"):  # LLaMA-Factory saves the model of every cell
            weights.unlink()
        evaluations = [_lines(record_of(output / "evaluations.jsonl", rank)) for rank in range(RANKS)]
        name = f"{cell.name} (our sampler)" if cell.sampler else cell.name
        found = figures(name, output, records, evaluations, self.lengths)
        print(f"{name}: {found['samples_per_second']:.1f} samples/s in {found['seconds']:.1f} s", flush=True)
        return found


def _in_child(work: Callable[[], None], log: Path) -> None:
    from workloads import forked  # data.py has put its folder on the path

    if failed := forked(work, log):
        sys.exit(f"the cell failed: {failed} (all of it: {log})")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def figures(name: str, output: Path, records: list[Any], evaluations: list[Any], lengths: list[int]) -> Result:
    """records, evaluations: the lines of each rank. lengths: what else was computed is padding."""
    import numpy as np
    from runs import Run, padded_tokens
    from simulation import Cut

    run = Run(output, records, 0.0)
    first, last = run.first_begin, run.first_begin + run.seconds
    within = [one for one in evaluations[0] if first < one["begin"] and one["end"] < last]
    seconds, cpu_seconds = (
        spent - sum(one[f"{of}end"] - one[f"{of}begin"] for one in within)
        for spent, of in ((run.seconds, ""), (run.cpu_seconds, "cpu_"))
    )
    samples, steps = len(lengths), run.num_optimizer_steps
    padded = np.array([[padded_tokens(batch) for batch in mine] for mine in records])
    cut = Cut(len(records), padded.sum(axis=0), padded.max(axis=0), sum(lengths), samples, steps).figures()
    held = np.zeros(steps + 1)
    for batch in (batch for mine in records for batch in mine):
        held[batch["optimizer_step"] + 1] += len(batch["lengths"])
    seen = held.cumsum() / held.sum() * samples
    losses = [
        (one[0]["step"], float(seen[one[0]["step"]]), sum(r["loss"] for r in one) / sum(r["tokens"] for r in one))
        for one in zip(*evaluations)  # another rank may still write the one that repeats the last
    ]
    return {
        "name": name,
        "samples_per_step": samples / steps,
        "optimizer_steps": steps,
        "micro_steps": padded.shape[1],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "samples_per_second": samples / seconds,
        "efficiency": cut["efficiency"],
        "padding": cut["padding"],
        "peak": cut["peak"],
        "losses": losses,
    }


# ----------------------------------------------------------------------------------------------------------------------
# What is shown.


def table(title: str, results: list[Result]) -> str:
    """A row for each cell, the best of a column in bold, and in which columns a baseline is ahead of odb."""
    import page

    common = set.intersection(*({step for step, _, _ in one["losses"]} for one in results))
    at = max(common)
    standard = results[0]["samples_per_second"]
    for one in results:
        one["speed"] = one["samples_per_second"] / standard
        one["last_loss"] = one["losses"][-1][2]
        one["loss_at"] = next(loss for step, _, loss in one["losses"] if step == at)
    columns: list[tuple[str, str, Callable[[Any], str], Any]] = [
        ("samples_per_step", "N", "{:.0f}".format, None),
        ("optimizer_steps", "optimizer steps", "{}".format, None),
        ("samples_per_second", "samples/s", "{:.1f}".format, max),
        ("speed", "of Standard", "{:.2f} x".format, max),
        ("cpu_seconds", "CPU seconds", "{:.1f}".format, min),
        ("efficiency", "step efficiency", "{:.2f}".format, max),
        ("padding", "padding", "{:.1%}".format, min),
        ("micro_steps", "micro-steps", "{}".format, min),
        ("peak", "peak padded tokens", "{:,.0f}".format, None),
        ("last_loss", "loss at equal samples", "{:.3f}".format, min),
        ("loss_at", f"loss at {at} steps", "{:.3f}".format, min),
    ]
    rows, ahead = [[one["name"]] for one in results], []
    for key, label, show, best in columns:
        shown = [show(one[key]) for one in results]
        winner = show(best(one[key] for one in results)) if best else None
        for row, text in zip(rows, shown):
            row.append(f"**{text}**" if text == winner else text)
        names = [one["name"] for one, text in zip(results, shown) if text == winner]
        if names and not any(name.startswith("odb") for name in names):
            ahead.append(f"{label} ({', '.join(names)}: {winner})")
    said = f"A baseline is ahead of odb: {'; '.join(ahead)}." if ahead else "No baseline is ahead of odb."
    return f"{page.table([title, *(label for _, label, _, _ in columns)], rows)}\n\n{said}"


def sweep_table(title: str, results: dict[str, list[Result]]) -> str:
    """results: by setting. The losses are those after the epoch."""
    import page

    names = [one["name"] for one in next(iter(results.values()))]
    rows = []
    for setting, found in results.items():
        shown = (
            "{samples_per_second:.1f}, {cpu_seconds:.1f} s, {efficiency:.2f}, {padding:.1%}, ".format(**one)
            + f"{one['losses'][-1][2]:.3f}"
            for one in found
        )
        rows.append([setting, *shown])
    return page.table([f"{title}: samples/s, CPU, step efficiency, padding, loss", *names], rows)


def draw(parts: dict[str, list[Result]], path: Path) -> None:
    """Save a PNG, a row for each part: samples/s, validation losses over samples and over optimizer steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(parts), 3, figsize=(13, 3.4 * len(parts)), squeeze=False, layout="constrained")
    for (title, results), (bars, over_samples, over_steps) in zip(parts.items(), panels):
        for k, one in enumerate(results):
            bars.barh(one["name"], one["samples_per_second"], color=f"C{k}")
            steps, samples, losses = zip(*one["losses"])
            style = {"label": one["name"], "color": f"C{k}", "linestyle": "--" if one["name"][:3] == "odb" else "-"}
            over_samples.plot(samples, losses, **style)
            over_steps.plot(steps, losses, **style)
        bars.invert_yaxis()
        bars.set(title=title, xlabel="samples/s")
        over_samples.set(xlabel="samples", ylabel="validation loss")
        over_steps.set(xlabel="optimizer steps", xscale="log")
        over_samples.legend(fontsize=7)
    figure.savefig(path, dpi=90)


def base_config(given: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], bool]:
    """The configuration that cells change, and whether its data can be packed."""
    import yaml
    from data import PROFILE_NAMES

    profile = PROFILE_NAMES[given.profile]
    if given.scale == "tiny":
        samples = given.samples or profile.samples
        if samples % (whole := profile.rows * profile.accumulation) or profile.accumulation % RANKS:
            sys.exit(f"--samples: {samples} on {RANKS} ranks are no whole optimizer steps of {whole}; give a multiple.")
        place = folder / "data.json"
        if not RANK:
            _in_child(lambda: _build(profile, folder, samples, place), folder / "build.log")
        _wait_for_all()
        model, data = map(Path, json.loads(place.read_text(encoding="utf-8")))
        config = profile.config(folder, model, data)
        config["gradient_accumulation_steps"] //= RANKS
    else:
        name = f"{profile.published}_{given.scale}_full"
        config = yaml.safe_load((ROOT / "yaml_configs" / "paper" / f"{name}.yaml").read_text(encoding="utf-8"))
        config |= {"val_size": VALIDATION, "logging_steps": 1}
        config |= {"max_samples": given.samples} if given.samples else {}
    config |= {"eval_strategy": "epoch", "save_strategy": "no", "report_to": "none", "overwrite_output_dir": True}
    config |= {"dataloader_num_workers": WORKERS, "dataloader_prefetch_factor": PREFETCH}
    if given.device == "cpu":
        config |= {"use_cpu": True, "bf16": False} | ({"ddp_backend": "gloo"} if RANKS > 1 else {})
    else:
        config |= {"use_cpu": False, "bf16": True}
    return config, profile.kind == "text"


def _build(profile: Any, folder: Path, samples: int, place: Path) -> None:
    place.write_text(json.dumps([str(path) for path in profile.build(folder, samples)]), encoding="utf-8")


def _wait_for_all() -> None:
    """Returns when every rank has called it."""
    if RANKS > 1:
        from torch.distributed import TCPStore

        TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, RANKS, is_master=not RANK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", choices=("ultrachat", "llava", "sharegpt4o", "mmmix"), default="ultrachat")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--scale", choices=("tiny", "2b", "8b"), default="tiny")
    parser.add_argument("--all", action="store_true", help="all cells, also each at its own N, and the sweeps")
    parser.add_argument("--samples", type=int, help="of the training split (tiny: a multiple of the global batch)")
    parser.add_argument("--output-dir", type=Path, default=Path("saves/paper"), help="(%(default)s)")
    given = parser.parse_args()
    folder = given.output_dir.resolve() / f"{given.profile}_{given.scale}"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = ENVIRONMENT | {"HF_DATASETS_CACHE": str(folder / "cache")}
    wanted |= {"CUDA_VISIBLE_DEVICES": ""} if given.device == "cpu" else {}
    if given.scale != "tiny":
        del wanted["HF_HUB_OFFLINE"], wanted["OMP_NUM_THREADS"]
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)
    import llamafactory.train.tuner  # noqa: F401  # before the forks

    base, packs = base_config(given, folder)
    kit = Kit(base, folder, MEGA_BUCKET[given.scale], packs)

    parts: dict[str, list[Any]] = {}
    sweeps: dict[str, dict[str, list[Any]]] = {}

    def write() -> None:
        if RANK:
            return
        tables = [table(title, results) for title, results in parts.items()]
        tables += [sweep_table(title, results) for title, results in sweeps.items()]
        draw(parts, folder / "paper.png")
        (folder / "figures.json").write_text(json.dumps({"parts": parts, "sweeps": sweeps}, indent=1), encoding="utf-8")
        (folder / "tables.md").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
        print("\n" + "\n\n".join(tables[-max(1, len(sweeps)) :]), flush=True)

    parts[f"{given.profile}, same N"] = kit.run(ALL if given.all else FIVE, same_n=True)
    write()
    if not given.all:
        return
    parts[f"{given.profile}, own N"] = kit.run(ALL, same_n=False)
    write()
    sweeps |= {title: {} for title in ("token budget", "workers x prefetch", "buffer_size")}
    for budget in BUDGETS:
        kept = kit.run(("odb, keep",), same_n=True, token_budget=budget)
        sweeps["token budget"][f"{budget:,}"] = kept + kit.run(("GMT", "odb, fill"), same_n=False, token_budget=budget)
    for workers, prefetch in DEPTHS:
        kit.base = base | {"dataloader_num_workers": workers, "dataloader_prefetch_factor": prefetch}
        sweeps["workers x prefetch"][f"{workers} x {prefetch}"] = kit.run(("Standard", "odb, fill"), same_n=False)
    for size in BUFFERS:
        kit.base = base | {"odb": base["odb"] | {"buffer_size": size}}
        sweeps["buffer_size"][f"{size:,}"] = kit.run(("odb, fill",), same_n=False)
    write()


if __name__ == "__main__":
    main()
