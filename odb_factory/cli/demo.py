"""`odb-factory demo`: fixed batches, length-grouped batches and odb on the same data, side by side.

Makes a tiny random Qwen3-VL and the built-in MM-Mix, runs LLaMA-Factory's own training on them
three times at equal epochs and equal peak of padded tokens, and shows what came of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from odb_factory.errors import ODBError

CUTOFF_LEN = 2048
TOKEN_BUDGET = 2 * (CUTOFF_LEN + 8)
"""The peak of fixed batches of two: rows of CUTOFF_LEN tokens and the 8 of a fake image in a text-only batch."""
POLL_S = 0.5
LAUNCHES_ELSEWHERE = ("FORCE_TORCHRUN", "NNODES", "NPROC_PER_NODE", "USE_MCA", "USE_RAY", "USE_V1")
"""Settings of LLaMA-Factory's launcher that would take the training out of the process that is recorded."""


@dataclass(frozen=True)
class Result:
    """What one training came to. Rates count from the begin of the first step to the end of the last."""

    name: str
    samples_per_second: float
    tokens_per_second: float
    padding: float
    steps: int
    peak_padded_tokens: int
    seconds_to_first_step: float
    train_loss: float
    validation_loss: float


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="odb-factory demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("odb_demo"), help="folder for models, data and results")
    parser.add_argument("--short", action="store_true", help="a fifth of the data, to see that everything works")
    arguments = parser.parse_args(argv)
    folder = arguments.output.resolve()

    from rich.console import Console

    console = Console()
    console.print("[bold]1/3[/] tiny random Qwen3-VL and the built-in MM-Mix (OCR, questions about pictures, captions)")
    model, data, num_samples = _prepare(folder, 120 if arguments.short else 600)
    console.print(f"[bold]2/3[/] LLaMA-Factory trains {num_samples} samples for one epoch, three times")
    runs = {
        "fixed": {"per_device_train_batch_size": TOKEN_BUDGET // CUTOFF_LEN},
        "length-grouped": {"per_device_train_batch_size": TOKEN_BUDGET // CUTOFF_LEN} | _grouping_by_length(),
        "odb": {"per_device_train_batch_size": 1, "odb": {"token_budget": TOKEN_BUDGET, "buffer_size": 256}},
    }
    results, batches = [], {}
    for name, changes in runs.items():
        output = folder / name
        started = time.time()
        batches[name] = _train(_config(model, data, output) | changes, output, num_samples, console, name)
        results.append(_result(name, output, batches[name], started))
    console.print("[bold]3/3[/] results")
    console.print(_table(results))
    console.print(
        "Equal epochs, equal peak of padded tokens, equal learning rate. Fewer and larger optimizer steps get less far "
        "from random weights; on a CPU a full step costs what its tokens cost, so only padding shows in the speed."
    )
    (folder / "demo.json").write_text(json.dumps([asdict(result) for result in results], indent=2), encoding="utf-8")
    from odb_factory.cli.figure import draw_batches

    draw_batches(batches, TOKEN_BUDGET, folder / "demo.png")
    console.print(f"The batches as they were: {folder / 'demo.png'}; the figures: {folder / 'demo.json'}")
    return 0


def _prepare(folder: Path, samples: int) -> tuple[Path, Path, int]:
    from odb_factory.cli.mm_mix_builtin import build_builtin_mix
    from odb_factory.cli.tiny_model import build_tiny_qwen3_vl

    model = build_tiny_qwen3_vl(folder / "tiny_qwen3_vl")
    data = folder / "mm_mix_data"
    build_builtin_mix(data, samples=samples)
    return model, data, len(json.loads((data / "mm_mix.json").read_text(encoding="utf-8")))


def _config(model: Path, data: Path, output: Path) -> dict[str, Any]:
    """The configuration that all three runs share."""
    return {
        "model_name_or_path": str(model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "template": "qwen3_vl_nothink",
        "dataset_dir": str(data),
        "media_dir": str(data),
        "dataset": "mm_mix",
        "eval_dataset": "mm_mix_val",
        "cutoff_len": CUTOFF_LEN,
        "eval_strategy": "epoch",
        "per_device_eval_batch_size": 1,
        "num_train_epochs": 1,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.05,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "dataloader_num_workers": 1,
        "use_cpu": True,
        "seed": 0,
        "output_dir": str(output),
    }


def _grouping_by_length() -> dict[str, Any]:
    """How this transformers release spells grouping by length."""
    from transformers import TrainingArguments

    if "group_by_length" in TrainingArguments.__dataclass_fields__:
        return {"group_by_length": True}
    return {"train_sampling_strategy": "group_by_length"}


def _train(config: dict[str, Any], output: Path, num_samples: int, console: Any, name: str) -> list[dict[str, Any]]:
    """Run the real command line in a process of its own and return the micro-batches it trained on."""
    import yaml
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    settings, record, log = output / "train.yaml", output / "batches.jsonl", output / "train.log"
    settings.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHES_ELSEWHERE}
    environment = kept | {
        # One CPU process, whatever the machine has: with several devices LLaMA-Factory would start torchrun.
        "CUDA_VISIBLE_DEVICES": "",
        "ASCEND_RT_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "DISABLE_VERSION_CHECK": "1",
        # Each run preprocesses from scratch, as with new data; nobody profits from the run before.
        "HF_DATASETS_CACHE": str(output / "cache"),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) - 1)),
    }
    command = [sys.executable, "-m", "odb_factory.cli.recorder", str(record), "train", str(settings)]
    label = TextColumn(f"    {name:<15}")
    columns = (label, BarColumn(), MofNCompleteColumn(), TextColumn("samples"), TimeElapsedColumn())
    with log.open("w") as lines, Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=num_samples)
        process = subprocess.Popen(command, stdout=lines, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                progress.update(bar, completed=sum(len(batch["lengths"]) for batch in _read(record)))
        finally:
            if process.poll() is None:
                process.terminate()
        progress.update(bar, completed=sum(len(batch["lengths"]) for batch in _read(record)))
    shutil.rmtree(output / "cache", ignore_errors=True)
    if process.returncode != 0:
        tail = log.read_text(errors="replace").rstrip().splitlines()[-1:]
        raise ODBError(f"the {name} run ended with exit code {process.returncode}: {' '.join(tail)} (all of it: {log})")
    if not (batches := _read(record)):
        raise ODBError(f"the {name} run trained on no batch; see {log}")
    return batches


def _read(record: Path) -> list[dict[str, Any]]:
    if not record.exists():
        return []
    lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written


def _result(name: str, output: Path, batches: list[dict[str, Any]], started: float) -> Result:
    history = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    seconds = batches[-1]["end"] - batches[0]["begin"]
    padded = [len(batch["lengths"]) * batch["length"] for batch in batches]
    real = sum(sum(batch["lengths"]) for batch in batches)
    return Result(
        name=name,
        samples_per_second=sum(len(batch["lengths"]) for batch in batches) / seconds,
        tokens_per_second=real / seconds,
        padding=1 - real / sum(padded),
        steps=len(batches),
        peak_padded_tokens=max(padded),
        seconds_to_first_step=batches[0]["begin"] - started,
        train_loss=[entry["loss"] for entry in history if "loss" in entry][-1],
        validation_loss=[entry["eval_loss"] for entry in history if "eval_loss" in entry][-1],
    )


def _table(results: list[Result]) -> Any:
    from rich.table import Table

    table = Table()
    rows: dict[str, Any] = {
        "samples/s": lambda result: f"{result.samples_per_second:.1f}",
        "real tokens/s": lambda result: f"{result.tokens_per_second:,.0f}",
        "padding": lambda result: f"{result.padding:.1%}",
        "steps": lambda result: str(result.steps),
        "peak padded tokens": lambda result: f"{result.peak_padded_tokens:,}",
        "seconds to first step": lambda result: f"{result.seconds_to_first_step:.1f}",
        "final training loss": lambda result: f"{result.train_loss:.3f}",
        "validation loss": lambda result: f"{result.validation_loss:.3f}",
    }
    table.add_column("")
    for result in results:
        table.add_column(result.name, justify="right")
    for label, show in rows.items():
        table.add_row(label, *(show(result) for result in results))
    return table
