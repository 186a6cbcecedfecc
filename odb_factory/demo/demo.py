"""`odb-factory demo`: fixed batches, length-grouped batches and odb on the same data, side by side.

Makes a tiny random Qwen3-VL and the built-in MM-Mix, runs LLaMA-Factory's own training on them, each time for one epoch
with the same peak of padded tokens, and shows the result: a table, the micro-batches and the loss curves.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odb_factory.demo.mm_mix import build_builtin_mix
from odb_factory.demo.recorder import record_of
from odb_factory.demo.tiny_model import build_tiny_qwen3_vl
from odb_factory.errors import ConfigError, ODBError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table


# ----------------------------------------------------------------------------------------------------------------------
# Real trainings by LLaMA-Factory's command line on a CPU, in separate processes, every micro-batch recorded.

POLL_S = 0.5
SAY_S = 30
"""Without a terminal: seconds from one line of progress to the next."""
LAUNCHES_ELSEWHERE = ("FORCE_TORCHRUN", "NNODES", "NPROC_PER_NODE", "USE_MCA", "USE_RAY", "USE_V1")
"""Settings of LLaMA-Factory's launcher that would take the training out of the processes that are recorded."""

RECORDER = ("-m", "odb_factory.demo.recorder")
"""Arguments of Python that start the recorder; its own arguments come after them."""
Batch = dict[str, Any]
"""A micro-batch as `recorder.py` writes it."""


@dataclass(frozen=True)
class Run:
    """batches: the micro-batches of each rank. started: when its process was (Unix time, seconds)."""

    output: Path
    batches: list[list[Batch]]
    started: float

    @property
    def seconds(self) -> float:
        """From the first micro-batch of any rank to the end of the last."""
        return max(mine[-1]["end"] for mine in self.batches) - self.first_begin

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the busiest training process in that time, without worker processes."""
        return max(mine[-1]["cpu_end"] - mine[0]["cpu_begin"] for mine in self.batches)

    @property
    def seconds_to_first_step(self) -> float:
        return self.first_begin - self.started

    @property
    def first_begin(self) -> float:
        return min(mine[0]["begin"] for mine in self.batches)

    @property
    def num_optimizer_steps(self) -> int:
        return 1 + self.batches[0][-1]["optimizer_step"]

    def history(self) -> list[dict[str, float]]:
        """What the Trainer has logged."""
        return json.loads((self.output / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]

    def losses(self) -> list[tuple[int, float, float]]:
        """Of each logged optimizer step its number (from 1), when it ended (seconds of training) and its loss."""
        ends: dict[int, float] = {}
        for batch in (batch for mine in self.batches for batch in mine):
            step = batch["optimizer_step"] + 1
            ends[step] = max(ends.get(step, 0.0), batch["end"] - self.first_begin)
        return [
            (int(entry["step"]), ends[int(entry["step"])], entry["loss"]) for entry in self.history() if "loss" in entry
        ]


def padded_tokens(batch: Batch) -> int:
    return batch["rows"] * batch["length"]


def sft_config(model: Path, data: Path, output: Path, *, dataset: str, template: str, cutoff_len: int) -> Batch:
    """One epoch of full fine-tuning; validation on `{dataset}_val` at its end."""
    return {
        "model_name_or_path": str(model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "template": template,
        "dataset_dir": str(data),
        "media_dir": str(data),
        "dataset": dataset,
        "eval_dataset": f"{dataset}_val",
        "cutoff_len": cutoff_len,
        "eval_strategy": "epoch",
        "per_device_eval_batch_size": 1,
        "num_train_epochs": 1,
        "learning_rate": 6e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "dataloader_num_workers": 1,
        "use_cpu": True,
        "seed": 0,
        "output_dir": str(output),
    }


def grouping_by_length() -> dict[str, Any]:
    """How this transformers release spells grouping by length."""
    from transformers import TrainingArguments

    if "group_by_length" in TrainingArguments.__dataclass_fields__:
        return {"group_by_length": True}
    return {"train_sampling_strategy": "group_by_length"}


def train(
    config: dict[str, Any],
    *,
    ranks: int = 1,
    watch: Callable[[list[Batch]], None] = lambda batches: None,
    recorder: Sequence[str] = RECORDER,
) -> Run:
    """Train in a new `output_dir` until the end; `watch` gets the micro-batches of all ranks so far, now and then.

    recorder: a script that records more may stand for ours.
    Raises `ODBError` where the run fails; its log is in `output_dir`.
    """
    output = Path(config["output_dir"])
    shutil.rmtree(output, ignore_errors=True)
    record, started = output / "batches.jsonl", time.time()

    def recorded() -> list[list[Batch]]:
        batches = [_read(record_of(record, rank)) for rank in range(ranks)]
        watch([batch for mine in batches for batch in mine])
        return batches

    run_llamafactory(config, ranks=ranks, record=record, watch=recorded, recorder=recorder)
    batches = recorded()
    if not all(batches):
        raise ODBError(f"the run trained on nothing; see {output / 'train.log'}")
    return Run(output, batches, started)


def run_llamafactory(
    config: dict[str, Any],
    *,
    record: Path,
    ranks: int = 1,
    watch: Callable[[], object] = lambda: None,
    recorder: Sequence[str] = RECORDER,
) -> None:
    """`llamafactory-cli train` on a CPU; raises `ODBError` with the last line of its log where it fails."""
    import yaml

    output = Path(config["output_dir"])
    output.mkdir(parents=True, exist_ok=True)
    settings, log = output / "train.yaml", output / "train.log"
    if ranks > 1:
        config = config | {"ddp_backend": "gloo"}
    settings.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHES_ELSEWHERE}
    environment = kept | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",  # torchrun is there
        # On the CPU, whatever the machine has: with several devices LLaMA-Factory would start torchrun.
        "CUDA_VISIBLE_DEVICES": "",
        "ASCEND_RT_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        # Each run preprocesses from scratch, as with new data, without the cache of the run before.
        "HF_DATASETS_CACHE": str(output / "cache"),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // ranks - 1)),
        # glibc would give freed tensors back to the system and fault their pages in again: a tenth of the time or
        # nothing, as chance has it, and nothing that an accelerator's memory does.
        "MALLOC_TRIM_THRESHOLD_": str(2**33),
        "MALLOC_MMAP_THRESHOLD_": str(2**25),
    }
    if ranks > 1:
        environment |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(ranks)}
    command = [sys.executable, *recorder, str(record), str(settings)]
    with log.open("w") as lines:
        process = subprocess.Popen(
            command, stdout=lines, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                watch()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # LLaMA-Factory's launcher and torchrun, which ends its ranks
                process.wait()
    shutil.rmtree(output / "cache", ignore_errors=True)
    if process.returncode != 0:
        tail = log.read_text(errors="replace").rstrip().splitlines()[-1:]
        raise ODBError(f"the run ended with exit code {process.returncode}: {' '.join(tail)} (all of it: {log})")


def _read(record: Path) -> list[Batch]:
    if not record.exists():
        return []
    lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written


# ----------------------------------------------------------------------------------------------------------------------
# One picture of several trainings: their micro-batches as they were, and their loss curves.

STEPS_SHOWN = 3
REAL, PADDING, WAITING, BUDGET = "#2a6f97", "#e9c46a", "#e5e5e5", "#9b2226"
STYLES = ("#e9c46a", "-", 4.0), ("#6a994e", "-", 1.5), ("#9b2226", "-", 1.5), ("#8d99ae", "--", 1.2)
"""Colour, line style and width of the loss curves; the first is broad, to be seen under one that equals it."""


def draw(runs: Mapping[str, Run], token_budget: int, path: Path) -> None:
    """Save a PNG: on the left a panel of micro-batches for each run, on the right the losses over time and over steps.

    The panels show the same optimizer steps of each run, from the middle of the first one.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(13, 1.9 * len(runs)), layout="constrained")
    grid = figure.add_gridspec(2 * len(runs), 5)
    first_step = max(0, (next(iter(runs.values())).num_optimizer_steps - STEPS_SHOWN) // 2)
    shown = {name: _steps_of(run, first_step) for name, run in runs.items()}
    width = max(len(mine) for batches in shown.values() for mine in batches)
    for row, (name, batches) in enumerate(shown.items()):
        axes = figure.add_subplot(grid[2 * row : 2 * row + 2, :3])
        _draw_micro_batches(axes, name, batches, token_budget)
        axes.set_xlim(-0.5, width - 0.5)
    axes.set_xlabel(
        "micro-steps, a bar for each rank; blue: rows, yellow: padding, grey: waiting, dashed: token_budget"
    )
    over_time = figure.add_subplot(grid[: len(runs), 3:])
    over_steps = figure.add_subplot(grid[len(runs) :, 3:])
    for (name, run), (color, line, weight) in zip(runs.items(), STYLES):
        steps, seconds, losses = zip(*run.losses())
        over_time.plot(seconds, losses, line, color=color, linewidth=weight, label=name)
        over_steps.plot(steps, losses, line, color=color, linewidth=weight, label=name)
    over_time.set_title("training loss over seconds of training", loc="left", fontsize=10)
    over_steps.set_title("training loss over optimizer steps", loc="left", fontsize=10)
    over_time.legend(fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _steps_of(run: Run, first: int) -> list[list[Batch]]:
    """The micro-batches of each rank in the optimizer steps from `first` on; the last ones if there are fewer."""
    first = min(first, max(0, run.num_optimizer_steps - STEPS_SHOWN))
    return [[b for b in mine if first <= b["optimizer_step"] < first + STEPS_SHOWN] for mine in run.batches]


def _draw_micro_batches(axes: Axes, name: str, batches: list[list[Batch]], token_budget: int) -> None:
    """batches: of each rank, by micro-step. A bar is a micro-batch, a box in it a sample."""
    share = 0.9 / len(batches)
    for step, of_ranks in enumerate(zip(*batches, strict=True)):
        longest = max(map(padded_tokens, of_ranks))
        for rank, batch in enumerate(of_ranks):
            x, bottom = step - 0.45 + share * (rank + 0.5), 0
            for length in batch["lengths"]:
                is_flat = batch["rows"] < len(batch["lengths"])
                rest = 0 if is_flat else batch["length"] - length
                axes.bar(x, length, share, bottom, color=REAL, edgecolor="white", linewidth=0.3)
                axes.bar(x, rest, share, bottom + length, color=PADDING, linewidth=0)
                bottom += length + rest
            axes.bar(x, padded_tokens(batch) - bottom, share, bottom, color=PADDING, linewidth=0)
            bottom = padded_tokens(batch)
            axes.bar(x, longest - bottom, share, bottom, color=WAITING, linewidth=0)
        if step and of_ranks[0]["optimizer_step"] != batches[0][step - 1]["optimizer_step"]:
            axes.axvline(step - 0.5, color="black", linewidth=1)
    axes.axvline(len(batches[0]) - 0.5, color="black", linewidth=1)
    axes.axhline(token_budget, color=BUDGET, linestyle="--", linewidth=1)
    axes.set_ylim(0, token_budget * 1.08)
    axes.set_ylabel("tokens")
    every = [batch for mine in batches for batch in mine]
    padding = 1 - sum(sum(batch["lengths"]) for batch in every) / sum(map(padded_tokens, every))
    steps, samples = len({batch["optimizer_step"] for batch in every}), sum(len(batch["lengths"]) for batch in every)
    axes.set_title(
        f"{name}: {steps} optimizer steps, {samples} samples in {len(batches[0])} micro-steps, {padding:.0%} padding",
        loc="left",
        fontsize=10,
    )


CUTOFF_LEN = 2048
ROWS = 2
TOKEN_BUDGET = ROWS * (CUTOFF_LEN + 8)
"""The peak of fixed batches of two: rows of CUTOFF_LEN tokens and the 8 of a fake image in a text-only batch."""
GLOBAL_BATCH_SIZE = 32
SAMPLES, SHORT_SAMPLES = 512, 96  # multiples of the global batch size: fixed batches repeat no sample at the end

ODB = {"token_budget": TOKEN_BUDGET, "buffer_size": 256}
CONTESTANTS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "length-grouped": grouping_by_length(),
    "odb": {"odb": ODB},
    "odb, fill": {"odb": ODB | {"global_batch_size": "fill"}},
}
FOOTNOTE = "odb, fill"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="odb-factory demo", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("odb_demo"), help="folder for models, data and results (%(default)s)"
    )
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=2, help="processes that train (%(default)s)")
    parser.add_argument(
        "--short",
        action="store_true",
        help="a fifth of the data, to see that everything works (all of it: three minutes on two idle cores)",
    )
    arguments = parser.parse_args(argv)
    folder, ranks = arguments.output.resolve(), arguments.ranks
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output: {folder} is a file; name a folder.")

    from rich.console import Console

    console = Console()
    console.print("[bold]1/3[/] tiny random Qwen3-VL and the built-in MM-Mix (OCR, questions about pictures, captions)")
    samples = SHORT_SAMPLES if arguments.short else SAMPLES
    model = build_tiny_qwen3_vl(folder / "tiny_qwen3_vl")
    data = build_builtin_mix(folder / "mm_mix_data", samples=samples).folder
    accumulation = GLOBAL_BATCH_SIZE // (ROWS * ranks)
    console.print(
        f"[bold]2/3[/] LLaMA-Factory trains {samples} samples for one epoch, {len(CONTESTANTS)} times: {ranks} "
        f"rank{'s' * (ranks > 1)} x {ROWS} rows x gradient_accumulation_steps {accumulation} = {GLOBAL_BATCH_SIZE} "
        "samples an optimizer step"
    )
    runs = {}
    for name, changes in CONTESTANTS.items():
        output = folder / name.replace(", ", "_")
        config = sft_config(model, data, output, dataset="mm_mix", template="qwen3_vl_nothink", cutoff_len=CUTOFF_LEN)
        config |= {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": accumulation}
        runs[name] = _train(config | changes, ranks, samples, console, name)
    results = {name: _result(name, run) for name, run in runs.items()}
    console.print("[bold]3/3[/] results")
    console.print(_table([result for name, result in results.items() if name != FOOTNOTE]))
    console.print(_conclusion(results))
    figures = folder / "demo.json"
    figures.write_text(json.dumps(list(results.values()), indent=2), encoding="utf-8")
    draw(runs, TOKEN_BUDGET, folder / "demo.png")
    console.print(f"The micro-batches and the loss curves: {folder / 'demo.png'}; the figures: {figures}")
    return 0


def _train(config: dict[str, Any], ranks: int, samples: int, console: Console, name: str) -> Run:
    """With a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    label = TextColumn(f"    {name:<15}")
    columns = (label, BarColumn(), MofNCompleteColumn(), TextColumn("samples"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=samples)

        said = began = time.monotonic()

        def watch(batches: list[Batch]) -> None:
            nonlocal said
            done = sum(len(batch["lengths"]) for batch in batches)
            progress.update(bar, completed=done)
            if not console.is_terminal and time.monotonic() > said + SAY_S:  # a log file has no moving bar
                said = time.monotonic()
                console.print(f"    {name}: {done} of {samples} samples after {said - began:.0f} s")

        try:
            return train(config, ranks=ranks, watch=watch)
        except ODBError as error:
            raise ODBError(f"{name}: {error}") from error


def _result(name: str, run: Run) -> dict[str, Any]:
    """What one training came to, over all ranks. Rates count from the first micro-batch to the end of the last."""
    batches, history = [batch for mine in run.batches for batch in mine], run.history()
    padded = [padded_tokens(batch) for batch in batches]
    real = sum(sum(batch["lengths"]) for batch in batches)
    return {
        "name": name,
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "samples_per_second": sum(len(batch["lengths"]) for batch in batches) / run.seconds,
        "tokens_per_second": real / run.seconds,
        "padding_ratio": 1 - real / sum(padded),
        "optimizer_steps": run.num_optimizer_steps,
        "micro_steps": max(map(len, run.batches)),
        "peak_padded_tokens": max(padded),
        "seconds_to_first_step": run.seconds_to_first_step,
        "train_loss": [entry["loss"] for entry in history if "loss" in entry][-1],
        "validation_loss": [entry["eval_loss"] for entry in history if "eval_loss" in entry][-1],
    }


ROWS_OF_TABLE = (
    ("optimizer steps", "optimizer_steps", ""),
    ("final training loss", "train_loss", ".4f"),
    ("validation loss", "validation_loss", ".4f"),
    ("seconds of training", "seconds", ".1f"),
    ("CPU seconds of a rank", "cpu_seconds", ".1f"),
    ("samples/s", "samples_per_second", ".1f"),
    ("real tokens/s", "tokens_per_second", ",.0f"),
    ("padding", "padding_ratio", ".1%"),
    ("micro-steps", "micro_steps", ""),
    ("peak tokens of a micro-batch", "peak_padded_tokens", ","),
    ("seconds to first step", "seconds_to_first_step", ".1f"),
)
"""Label, figure of `_result`, and its format."""


def _table(results: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("")
    for result in results:
        table.add_column(result["name"], justify="right")
    for label, name, form in ROWS_OF_TABLE:
        table.add_row(label, *(format(result[name], form) for result in results))
    return table


def _conclusion(results: dict[str, dict[str, Any]]) -> str:
    fixed, ours, fill = results["fixed"], results["odb"], results[FOOTNOTE]
    difference = abs(ours["validation_loss"] - fixed["validation_loss"])
    losses = f"differ by {difference:.0e}" if difference else "are equal"
    share = ours["seconds"] / fixed["seconds"]
    return (
        f"odb takes the optimizer steps of fixed batches, on the same samples, in {share:.0%} of the time; the "
        f"validation losses {losses}. On a CPU only padding costs time; on a GPU the fewer micro-steps count as well "
        f"({ours['micro_steps']} instead of {fixed['micro_steps']}).\n"
        "Filling every micro-batch (`global_batch_size: fill`) is another training: "
        f"{fill['optimizer_steps']} optimizer step{'s' * (fill['optimizer_steps'] > 1)}, "
        f"{fill['samples_per_second']:.1f} samples/s, validation loss {fill['validation_loss']:.4f}."
    )
