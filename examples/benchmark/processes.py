"""Whole loaders on real ranks, for the `planning` benchmark: a process each, gloo between them."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

TIMEOUT = timedelta(minutes=5)
Batch = dict[str, torch.Tensor]
Epoch = Iterator[tuple[int, int]]
"""(padded tokens, samples) of every batch of a rank; a batch that counts nothing in the loss has no samples."""


class Rows(Dataset):
    """Rows of these lengths; what they hold does not matter."""

    def __init__(self, lengths: np.ndarray):
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = [1] * int(self.lengths[index])
        return {"input_ids": ids, "attention_mask": ids, "labels": ids}


def collate(items: Sequence[dict[str, list[int]]]) -> Batch:
    rows = [torch.ones(len(item["input_ids"]), dtype=torch.int8) for item in items]
    labels = pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": pad_sequence(rows, batch_first=True), "labels": labels}


def odb_factory(lengths: Sequence[np.ndarray], rank: int, token_budget: int, window: int) -> Epoch:
    """The loader deals the rows to the ranks in turn."""
    from odb_factory import ODBDataLoader, pop_step_info

    rows = Rows(np.stack(lengths, axis=1).reshape(-1))
    with ODBDataLoader(
        rows,
        collate_fn=collate,
        num_workers=1,
        token_budget=token_budget,
        global_batch_size="fill",
        balance=False,
        buffer_size=window,
        collate_workers=1,
    ) as loader:
        for batch in loader:
            yield batch["labels"].numel(), pop_step_info(batch).samples


def published(
    lengths: Sequence[np.ndarray], rank: int, token_budget: int, window: int, no_warmup: bool = False
) -> Epoch:
    """Samples wait in the order in which they are drawn, as with ours. no_warmup: its windows do not grow slowly."""
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


PUBLISHED: dict[str, Callable[..., Epoch]] = {}
if importlib.util.find_spec("odb") is not None:
    _name = f"online-dynamic-batching {importlib.metadata.version('online-dynamic-batching')}"
    PUBLISHED = {_name: published, f"{_name}, `no_warmup`": functools.partial(published, no_warmup=True)}
OURS = "odb, fill, `balance: false`"
LOADERS = {OURS: odb_factory} | PUBLISHED


def make_processes(count: int) -> ProcessPoolExecutor:
    """Processes of their own that do what they are given."""
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_settle)


def _settle() -> None:
    """A spawned process would spawn its workers, too; a training script on Linux forks them."""
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)


def run(name: str, samples: Sequence[np.ndarray], **settings: int) -> np.ndarray:
    """One epoch on all ranks: the padded tokens of each rank and micro-step, [ranks, micro-steps].

    samples: of each rank, as `ROW`. settings: token_budget and window. Raises `RuntimeError` if samples are lost.
    """
    lengths = [rows["tokens"] for rows in samples]
    with tempfile.TemporaryDirectory() as folder, make_processes(len(samples)) as processes:
        jobs = [
            processes.submit(_epoch, LOADERS[name], lengths, rank, str(Path(folder) / "store"), settings)
            for rank in range(len(samples))
        ]
        for failed in (job for job in wait(jobs, return_when=FIRST_EXCEPTION).done if job.exception()):
            raise failed.exception()  # and not what it means for rank 0
        epochs = [job.result() for job in jobs]
    drawn, emitted = sum(map(len, samples)), sum(emitted for steps in epochs for _, emitted in steps)
    if emitted != drawn:
        raise RuntimeError(f"{name}: {emitted} samples came out of {drawn}")
    padded = np.zeros((len(samples), max(map(len, epochs))), int)
    for mine, steps in zip(padded, epochs):
        mine[: len(steps)] = [tokens for tokens, _ in steps]
    return padded


def _epoch(
    loader: Callable[..., Epoch], lengths: Sequence[np.ndarray], rank: int, store: str, settings: dict[str, Any]
) -> list[tuple[int, int]]:
    store = dist.FileStore(store, len(lengths))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(lengths), timeout=TIMEOUT)
    try:
        return list(loader(lengths, rank, **settings))
    finally:
        dist.destroy_process_group()
