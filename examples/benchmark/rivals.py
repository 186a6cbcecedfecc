"""Rivals that need an environment or processes of their own.

Environments are made on request, see the packages of the environment that makes them, and have their own on top.
Whole loaders are run with a process a rank and gloo between them. `batch_rebalance` runs in a child process.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import multiprocessing
import site
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

BESIDE, NEWER = "beside", "newer_transformers"
REQUIREMENTS = {
    BESIDE: ("online-dynamic-batching==0.1.2", "dynabatch==0.2.23"),
    # `train_sampling_strategy: batch_rebalance` came after the releases that LLaMA-Factory allows.
    NEWER: ("transformers==5.23.0",),
}
TIMEOUT = timedelta(minutes=5)
Batches = Sequence[Sequence[int]]
Batch = dict[str, Any]


def python_of(name: str, folder: Path) -> Path | None:
    """The Python of the environment, if it is complete."""
    return folder / name / "bin" / "python" if (folder / name / "complete").exists() else None


def make(name: str, folder: Path) -> None:
    """Make the environment, unless it is there. Raises `subprocess.CalledProcessError` where pip fails."""
    if python_of(name, folder) is not None:
        return
    place = folder / name
    venv.create(place, with_pip=True, clear=True)
    python = place / "bin" / "python"
    where = [python, "-c", "import site; print(site.getsitepackages()[0])"]
    own = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    lines = [f"import site; site.addsitedir({parent!r})" for parent in site.getsitepackages()]
    Path(own, "parent.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    subprocess.run([python, "-m", "pip", "install", "-q", *REQUIREMENTS[name]], check=True, stdout=sys.stderr)
    (place / "complete").touch()


# ----------------------------------------------------------------------------------------------------------------------
# `BatchRebalanceSampler` of a transformers that is newer than LLaMA-Factory allows.


class Rebalancer:
    """Asks a child process, run by the Python of the environment `NEWER`, for the batches of all ranks."""

    def __init__(self, python: str):
        command = [python, str(Path(__file__).resolve())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._answer()

    def __call__(self, lengths: Sequence[int], batch_size: int, ranks: int, accumulation: int) -> list[Batches]:
        """Of each rank its batches. batch_size: of an optimizer step."""
        assert self.process.stdin is not None
        asked = {"lengths": lengths, "effective_batch_size": batch_size, "dp_size": ranks, "grad_accum": accumulation}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"the process that runs batch_rebalance ended with exit code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def rebalance() -> None:
    """The child: writes its release of transformers, then reads a JSON line and writes one, again and again."""
    import transformers
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    print(json.dumps(transformers.__version__), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)  # the samples are drawn at random already: no shuffling
        samplers = [BatchRebalanceSampler(**asked, rank=rank, shuffle=False) for rank in range(asked["dp_size"])]
        print(json.dumps(list(map(list, samplers))), flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# Whole loaders on real ranks.

Steps = Iterator[tuple[int, int]]
"""(padded tokens, samples) of every batch of a rank; a batch that counts nothing in the loss has no samples."""


class Rows:
    """A data set of rows of these lengths; their content does not matter."""

    def __init__(self, lengths: np.ndarray):
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = [1] * int(self.lengths[index])
        return {"input_ids": ids, "attention_mask": ids, "labels": ids}


def collate(items: Sequence[dict[str, list[int]]]) -> Batch:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows = [torch.ones(len(item["input_ids"]), dtype=torch.int8) for item in items]
    labels = pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": pad_sequence(rows, batch_first=True), "labels": labels}


def published(
    lengths: Sequence[np.ndarray], rank: int, token_budget: int, window: int, no_warmup: bool = False
) -> Steps:
    """online-dynamic-batching. no_warmup: its windows do not grow slowly."""
    import odb

    for batch in odb.ODBDataLoader(
        Rows(lengths[rank]),
        token_budget=token_budget,
        buffer_size=window,
        num_workers=1,
        prefetch_factor=window,
        collate_fn=collate,
        loss_scaling="exact",
        no_warmup=no_warmup,
    ):
        info = odb.pop_step_info(batch, loss_scaling="exact")
        yield batch["labels"].numel(), len(batch["labels"]) if info.loss_scale else 0


LOADERS: dict[str, Callable[..., Steps]] = {}
if importlib.util.find_spec("odb") is not None:
    _name = f"online-dynamic-batching {importlib.metadata.version('online-dynamic-batching')}"
    LOADERS = {_name: published, f"{_name}, `no_warmup`": functools.partial(published, no_warmup=True)}


def make_processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_settle)


def _settle() -> None:
    """A spawned process would spawn its workers, too; a training script on Linux forks them."""
    import torch

    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)


def run(name: str, samples: Sequence[np.ndarray], **settings: int) -> np.ndarray:
    """One epoch on all ranks: the padded tokens of each rank and micro-step, [ranks, micro-steps].

    samples: of each rank, as `ROW`. settings: token_budget and window. Raises `RuntimeError` if samples are lost.
    """
    lengths = [rows["tokens"] for rows in samples]
    with tempfile.TemporaryDirectory() as folder, make_processes(len(samples)) as processes:
        store = str(Path(folder) / "store")
        jobs = [processes.submit(_epoch, LOADERS[name], lengths, rank, store, settings) for rank in range(len(samples))]
        for failed in (job for job in wait(jobs, return_when=FIRST_EXCEPTION).done if job.exception()):
            raise failed.exception()  # and not the error that it causes on rank 0
        epochs = [job.result() for job in jobs]
    drawn, emitted = sum(map(len, samples)), sum(emitted for steps in epochs for _, emitted in steps)
    if emitted != drawn:
        raise RuntimeError(f"{name}: {emitted} samples came out of {drawn}")
    padded = np.zeros((len(samples), max(map(len, epochs))), int)
    for mine, steps in zip(padded, epochs):
        mine[: len(steps)] = [tokens for tokens, _ in steps]
    return padded


def _epoch(
    loader: Callable[..., Steps], lengths: Sequence[np.ndarray], rank: int, store: str, settings: dict[str, Any]
) -> list[tuple[int, int]]:
    import torch.distributed as dist

    connected = dist.FileStore(store, len(lengths))
    dist.init_process_group("gloo", store=connected, rank=rank, world_size=len(lengths), timeout=TIMEOUT)
    try:
        return list(loader(lengths, rank, **settings))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    rebalance()
