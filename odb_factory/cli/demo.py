"""`odb-factory demo`: compare stock LLaMA-Factory and odb on the same samples, with a tiny model on a CPU.

The demo makes a tiny random Qwen3-VL and the built-in MM-Mix (drawn shapes and generated text), runs `llamafactory-cli
train` once without and once with odb, for one epoch each, and shows both trainings like `odb-factory compare`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odb_factory.cli import compare
from odb_factory.cli.mm_mix import build_builtin_mix
from odb_factory.cli.tiny_model import build_tiny_qwen3_vl
from odb_factory.errors import ConfigError, ODBError

if TYPE_CHECKING:
    from rich.progress import Progress

POLL_S = 0.5
CUTOFF_LEN, ROWS, STEP_SIZE = 2048, 2, 32
TOKEN_BUDGET = ROWS * CUTOFF_LEN
"""Tokens of the largest micro-batch of stock LLaMA-Factory: two rows of CUTOFF_LEN tokens."""
SAMPLES, SHORT_SAMPLES = 384, 96  # multiples of STEP_SIZE
CONTESTANTS: dict[str, dict[str, Any]] = {"stock": {}, "odb": {"odb": {"token_budget": TOKEN_BUDGET}}}
LAUNCHER = ("FORCE_TORCHRUN", "NNODES", "NPROC_PER_NODE", "USE_MCA", "USE_RAY", "USE_V1")
"""Environment variables that would change what LLaMA-Factory's launcher starts."""


def run(arguments: argparse.Namespace) -> int:
    """Train without and with odb, and show the comparison. Raises `ODBError` if a training fails."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    folder, ranks = arguments.output.resolve(), arguments.ranks
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output: {folder} is a file; name a folder.")
    console = Console(stderr=True)
    samples = SHORT_SAMPLES if arguments.short else SAMPLES
    console.print(f"{samples} samples, {STEP_SIZE} an optimizer step; stock: {ROWS} rows; odb: {TOKEN_BUDGET} tokens")
    with contextlib.redirect_stdout(sys.stderr):  # transformers imports DeepSpeed, which logs to stdout
        model = build_tiny_qwen3_vl(folder / "model")
    build_builtin_mix(folder / "data", samples=samples)
    config = config_of(model, folder / "data") | {"gradient_accumulation_steps": STEP_SIZE // (ROWS * ranks)}
    columns = (TextColumn("{task.description:6}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    for name, changes in CONTESTANTS.items():
        with Progress(*columns, console=console) as progress:
            train(config | changes | {"output_dir": str(folder / name)}, ranks, progress, samples // STEP_SIZE)
    namespace = argparse.Namespace(a=folder / "odb", b=folder / "stock", html=folder / "demo.html", json=arguments.json)
    return compare.run(namespace)


def config_of(model: Path, data: Path) -> dict[str, Any]:
    """LLaMA-Factory's configuration for one epoch of full fine-tuning on the built-in MM-Mix."""
    return {
        "model_name_or_path": str(model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "template": "qwen3_vl_nothink",
        "dataset_dir": str(data),
        "media_dir": str(data),
        "dataset": "mm_mix",
        "cutoff_len": CUTOFF_LEN,
        "per_device_train_batch_size": ROWS,
        "num_train_epochs": 1,
        "learning_rate": 6e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "dataloader_num_workers": 1,
        "overwrite_cache": True,
        "use_cpu": True,
        "seed": 0,
        # LLaMA-Factory 0.9.5's checkpointing fails with transformers 5.18 and newer.
        "disable_gradient_checkpointing": True,
    }


def train(config: dict[str, Any], ranks: int, progress: Progress, steps: int) -> None:
    """Run `llamafactory-cli train` on a CPU in a new `output_dir`. Raises `ODBError` with the last line of its log."""
    import yaml

    output = Path(config["output_dir"])
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    log, steps_log = output / "train.log", output / "trainer_log.jsonl"
    (output / "train.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER} | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",  # folder of torchrun
        "CUDA_VISIBLE_DEVICES": "",  # with several devices LLaMA-Factory would start torchrun
        "ASCEND_RT_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // ranks - 1)),
        **({"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(ranks)} if ranks > 1 else {}),
    }
    command = [sys.executable, "-m", "odb_factory.cli.main", "train", str(output / "train.yaml")]
    bar = progress.add_task(output.name, total=steps)
    with log.open("w") as lines:
        process = subprocess.Popen(
            command, stdout=lines, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                with contextlib.suppress(OSError, ValueError, IndexError, KeyError):  # last line partial or missing
                    progress.update(bar, completed=json.loads(steps_log.read_text().splitlines()[-1])["current_steps"])
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # ends the launcher and torchrun; torchrun ends its ranks
                process.wait()
    if process.returncode != 0:
        last_line = log.read_text(errors="replace").rstrip().splitlines()[-1:]
        raise ODBError(f"{output.name}: exit code {process.returncode}: {' '.join(last_line)} (all of it: {log})")
