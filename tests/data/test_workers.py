"""Options of a loop for its workers: seeds, start methods, pinned memory. Failures: test_pool.py."""

from __future__ import annotations

import functools
import os
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from distributed.ranks import run_ranks
from loop.loops import make
from torch.utils.data import get_worker_info
from toy import NUM_ROWS, Rows, item, pad
from transformers.trainer_utils import seed_worker

from odb_factory import pop_step_info


def batches_of(loader: Any) -> list[Any]:
    batches = []
    for batch in loader:
        pop_step_info(batch)
        batches.append(batch)
    return batches


def drawing(items: list[dict[str, Any]]) -> dict[str, Any]:
    """A collator that draws random numbers of all three kinds."""
    drawn = torch.rand(1).item(), random.random(), float(np.random.rand())
    return pad(items) | {"drawn": drawn, "seed": get_worker_info().seed}


# Options


class Opened(Rows):
    """A dataset whose file is opened in each worker."""

    opened_by = 0

    def __getitem__(self, k: int) -> Any:
        assert self.opened_by == os.getpid()
        return item(k)


def open_file(worker_id: int) -> None:
    worker = get_worker_info()
    assert worker is not None and worker.id == worker_id
    worker.dataset.opened_by = os.getpid()


def test_worker_init_fn_runs_in_every_worker_and_finds_the_dataset() -> None:
    dataset = Opened()
    with make(dataset, worker_init_fn=open_file, multiprocessing_context="fork", num_workers=1) as loader:
        assert batches_of(loader)
    assert not dataset.opened_by, "not in this process"


class Changing(Rows):
    """A dataset that changes between epochs."""

    shift = 0

    def __getitem__(self, k: int) -> Any:
        return {key: [id + self.shift for id in ids] for key, ids in item(k).items()}


@pytest.mark.parametrize("persistent", [False, True])
def test_a_dataset_that_changes_between_epochs_is_seen_as_in_torch(persistent: bool) -> None:
    dataset = Changing()
    with make(dataset, num_workers=1, persistent_workers=persistent) as loader:
        batches_of(loader)
        dataset.shift = 1000
        first_ids = {int(batch["input_ids"][0, 0]) for batch in batches_of(loader)}
    assert (min(first_ids) > 1000) is not persistent


@pytest.mark.parametrize("num_workers", [0, 1])
def test_pinned_memory_is_not_warned_of_where_there_is_none(num_workers: int) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine can pin")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make(pin_memory=True, num_workers=num_workers) as loader:
            batches_of(loader)


# Seeds


@pytest.mark.parametrize("by_generator", [False, True])
def test_random_numbers_follow_the_seed_of_the_dataloader(by_generator: bool) -> None:
    """The global seed, or the seed of the generator."""

    def numbers(seed: int) -> list[Any]:
        torch.manual_seed(77 if by_generator else seed)
        generator = torch.Generator().manual_seed(seed) if by_generator else None
        with make(collate_fn=drawing, num_workers=1, generator=generator) as loader:
            return [batch["drawn"] for _ in range(2) for batch in batches_of(loader)]

    with_5 = numbers(5)
    assert numbers(5) == with_5 and not set(numbers(1005)) & set(with_5)


def seeds_of(rank: int) -> list[int]:
    torch.manual_seed(5)  # the same on both ranks, as in trainers
    # As the Trainer of transformers sets it, with the rank.
    init_fn = functools.partial(seed_worker, num_workers=1, rank=rank)
    with make(collate_fn=drawing, worker_init_fn=init_fn, num_workers=1) as loader:
        batches = batches_of(loader)
    return sorted({batch["seed"] for batch in batches}) + [batch["drawn"][0] for batch in batches]


def test_ranks_draw_other_random_numbers(tmp_path: Any) -> None:
    here, there = (outcome.value for outcome in run_ranks("data.test_workers:seeds_of", tmp_path))
    assert here and there and not set(here) & set(there)


# Start methods


class WithModel:
    """A collator that holds the model, as LLaMA-Factory's does; the model holds functions that cannot be pickled."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1000, 1000)
        self.model.scale = 3
        self.model.forward = lambda x: x  # as set by engines
        self.extra_repr = self.model.extra_repr

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        told = (self.model.weight.device.type, self.model.scale, self.extra_repr())
        return pad(items) | {"told": told, "sent": len(get_worker_info().dataset)}


def test_a_model_in_the_collator_is_sent_without_weights() -> None:
    with make(collate_fn=WithModel(), multiprocessing_context="forkserver", num_workers=1) as loader:
        batches = batches_of(loader)
    assert {batch["told"] for batch in batches} == {("meta", 3, "in_features=1000, out_features=1000, bias=True")}
    assert all(batch["sent"] == NUM_ROWS for batch in batches)
