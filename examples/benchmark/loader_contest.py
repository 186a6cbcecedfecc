"""The loaders of the `loader` benchmark, and what is measured while one epoch of theirs is taken."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from loader_rows import Collator, ImageRows, ProcessedRows, TextRows
from torch.utils.data import DataLoader

from odb_factory import ODBDataLoader, pop_step_info

Batches = Iterator[tuple[dict[str, torch.Tensor], int, int]]
"""What a training step takes, its samples, and their tokens without padding."""

BATCH_SIZE = 8
"""Of the plain DataLoader; the online loaders have a token budget of about what its largest batches take."""
WATCH_S = 0.5
"""The memory is looked at this often; it takes the time of the consumer, not of the loader."""


@dataclass(frozen=True)
class Workload:
    """median, longest: tokens of the text of a row. pictures: files that its rows take in turn."""

    name: str
    num_rows: int
    median: int
    longest: int
    token_budget: int
    max_patches: int | None = None
    pictures: tuple[Path, ...] = ()

    @functools.cached_property
    def rows(self) -> TextRows:
        lengths = {"median": self.median, "longest": self.longest}
        return (
            ImageRows(self.num_rows, self.pictures, **lengths) if self.pictures else TextRows(self.num_rows, **lengths)
        )


@dataclass(frozen=True)
class Contestant:
    """workers: `num_workers` of the loader; collating: worker processes beside them. window: samples, None: default.
    layout: of its micro-batches.
    """

    name: str
    run: Callable[[Workload, Contestant], Batches]
    workers: int
    collating: int = 0
    window: int | None = None
    layout: str = "padded"


def plain(workload: Workload, how: Contestant) -> Batches:
    for batch in DataLoader(
        workload.rows,
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=how.workers,
        collate_fn=Collator(workload.rows),
    ):
        yield _counted(batch)


def _counted(batch: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int, int]:
    return batch, len(batch["input_ids"]), int(batch["attention_mask"].sum())


def odb_factory(workload: Workload, how: Contestant) -> Batches:
    """Light items: a picture is its path, the collator makes its pixels."""
    with ODBDataLoader(
        workload.rows,
        token_budget=workload.token_budget,
        max_patches=workload.max_patches,
        shuffle=True,
        num_workers=how.workers,
        collate_workers=how.collating,
        collate_fn=Collator(workload.rows),
        layout=how.layout,
        global_batch_size="fill",
        **{} if how.window is None else {"buffer_size": how.window},
    ) as loader:
        for batch in loader:
            info = pop_step_info(batch)
            yield batch, info.samples, info.tokens


def published(workload: Workload, how: Contestant, *, light: bool = False) -> Batches:
    """As its README has it: items are finished samples, 64 a worker are prefetched. light: the items that ours gets."""
    import odb

    for batch in odb.ODBDataLoader(
        workload.rows if light else ProcessedRows(workload.rows),
        token_budget=workload.token_budget,
        max_patches=workload.max_patches,
        shuffle=True,
        num_workers=how.workers,
        prefetch_factor=64,
        buffer_size=how.window,
        collate_fn=Collator(workload.rows),
        loss_scaling="exact",
    ):
        odb.pop_step_info(batch, loss_scaling="exact")
        yield _counted(batch)


published_light = functools.partial(published, light=True)


def consume(how: Contestant, workload: Workload, pace: float = 0.0, watched: bool = False) -> dict[str, float]:
    """Take one epoch, `pace` seconds a sample. watched: note the peak of memory, too."""
    len(workload.rows)  # made before the clock starts
    samples = real = padded = 0
    waited = peak = looked = 0.0
    cpu, started = _cpu_s(), time.perf_counter()
    batches = how.run(workload, how)
    asked = started
    while (item := next(batches, None)) is not None:
        batch, own, tokens = item
        last = time.perf_counter()
        if samples == 0:
            first = last
        else:
            waited += last - asked
        samples, real, padded = samples + own, real + tokens, padded + batch["input_ids"].numel()
        if watched and last - looked > WATCH_S:
            peak, looked = max(peak, memory_mib()), last
        time.sleep(max(0.0, last + pace * own - time.perf_counter()))
        asked = time.perf_counter()
    if samples != workload.num_rows:
        raise RuntimeError(f"{how.name} gave {samples} samples of {workload.num_rows}")
    return {
        "seconds": last - started,
        "samples_per_second": samples / (last - started),
        "real_tokens_per_second": real / (last - started),
        "padded_tokens_per_second": padded / (last - started),
        "padding": 1 - real / padded,
        "first_batch_s": first - started,
        "blocked": waited / (asked - first),
        "cpu_ms_a_sample": (_cpu_s() - cpu) / samples * 1000,
        "peak_mib": peak,
    }


def _cpu_s() -> float:
    """Processor time of this process and those of its workers that have ended."""
    return sum(os.times()[:4])


def memory_mib() -> float:
    """Of this process and its workers: anonymous and file pages by their share in them, shared memory once.

    Tensors wait in shared memory that no process has mapped while they are on their way; whoever sent or holds them
    has a file open.
    """
    pages, shared = 0, {}
    me = psutil.Process()
    for pid in (me.pid, *(child.pid for child in me.children(recursive=True))):
        try:
            fields = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
            pages += sum(int(kib) for name, kib, _ in fields if name in ("Pss_Anon:", "Pss_File:")) * 1024
            for link in os.scandir(f"/proc/{pid}/fd"):
                if os.readlink(link.path).startswith("/dev/shm/"):
                    found = link.stat()
                    shared[found.st_dev, found.st_ino] = found.st_blocks * 512
        except OSError:  # ended, or closed, in the meantime
            continue
    return (pages + sum(shared.values())) / 2**20
