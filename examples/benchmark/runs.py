"""Real trainings by LLaMA-Factory's command line on a CPU, in separate processes, every micro-batch recorded."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recorder import record_of

from odb_factory.errors import ODBError

# ----------------------------------------------------------------------------------------------------------------------
# Real trainings by LLaMA-Factory's command line on a CPU, in separate processes, every micro-batch recorded.

POLL_S = 0.5
SAY_S = 30
"""Without a terminal: seconds from one line of progress to the next."""
LAUNCHES_ELSEWHERE = ("FORCE_TORCHRUN", "NNODES", "NPROC_PER_NODE", "USE_MCA", "USE_RAY", "USE_V1")
"""Settings of LLaMA-Factory's launcher that would take the training out of the processes that are recorded."""

RECORDER = (str(Path(__file__).with_name("recorder.py")),)
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
