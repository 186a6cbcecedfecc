"""Who is compared by gpu.py: each makes the loader of one epoch from its one setting, rows or a token budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from gpu_models import Batch, Collator, Sample
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import LengthGroupedSampler

from odb_factory import ODBDataLoader, pop_step_info

PUBLISHED = "online-dynamic-batching"
WINDOW = 256
"""Samples that odb and the published package may hold: 4 workers x prefetch_factor 64, as the README of the latter."""


@contextmanager
def fixed_batch(samples: Sequence[Sample], rows: int, collate: Collator, workers: int) -> Iterator[Any]:
    shuffled = {"shuffle": True, "generator": seeded()}
    yield DataLoader(samples, batch_size=rows, collate_fn=collate, num_workers=workers, **shuffled)


@contextmanager
def length_grouped(samples: Sequence[Sample], rows: int, collate: Collator, workers: int) -> Iterator[Any]:
    """All lengths are known beforehand here; in a training that takes a pass over the data first."""
    lengths = [len(sample["input_ids"]) for sample in samples]
    order = LengthGroupedSampler(rows, lengths=lengths, generator=seeded())
    yield DataLoader(samples, batch_size=rows, sampler=order, collate_fn=collate, num_workers=workers)


@contextmanager
def published(samples: Sequence[Sample], token_budget: int, collate: Collator, workers: int) -> Iterator[Any]:
    """As its README has it. Its window does not grow slowly from one sample on: an epoch is short here."""
    import odb

    workers = max(1, workers)
    yield odb.ODBDataLoader(
        samples,
        token_budget=token_budget,
        batch_size=1,
        shuffle=True,
        num_workers=workers,
        prefetch_factor=WINDOW // workers,
        collate_fn=collate,
        loss_scaling="exact",
        no_warmup=True,
        generator=seeded(),
    )


@contextmanager
def online(samples: Sequence[Sample], token_budget: int, collate: Collator, workers: int) -> Iterator[Any]:
    with ODBDataLoader(
        samples,
        token_budget=token_budget,
        global_batch_size="fill",
        buffer_size=WINDOW,
        shuffle=True,
        collate_fn=collate,
        num_workers=workers,
        generator=seeded(),
    ) as loader:
        yield loader


CONTESTANTS: dict[str, Callable] = {
    "fixed batch": fixed_batch,
    "length-grouped": length_grouped,
    PUBLISHED: published,
    "odb": online,
}
IN_TOKENS = (PUBLISHED, "odb")
"""Their setting is a token budget; that of the others, rows."""


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def pop_loss_scale(name: str, batch: Batch) -> float:
    if name == "odb":
        return pop_step_info(batch).loss_scale
    if name == PUBLISHED:
        import odb

        return float(odb.pop_step_info(batch, loss_scaling="exact").loss_scale)
    return 1.0
