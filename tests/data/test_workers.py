"""What a wrapped DataLoader says of its workers holds for ours: options, seeds, start method, pinned memory."""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from distributed.ranks import run_ranks
from torch.utils.data import DataLoader, SubsetRandomSampler, get_worker_info
from toy import NUM_ROWS, Rows, item, pad
from transformers.trainer_utils import seed_worker

from odb_factory import DataError
from odb_factory.config import ODBConfig
from odb_factory.data.loader import ODBLoader
from odb_factory.data.observe import ItemObserver
from odb_factory.data.order import OptimizerStepRule, dismantle
from odb_factory.data.ranks import Ranks
from odb_factory.data.serialize import Picklable

BLOCK = {"token_budget": 128, "buffer_size": 16, "global_batch_size": "fill"}


@contextmanager
def wrapped(dataset: Any = None, collate_fn: Any = pad, **options: Any) -> Iterator[ODBLoader]:
    """Ours for the DataLoader with these options."""
    options = {"num_workers": 1} | options
    stock = DataLoader(Rows() if dataset is None else dataset, collate_fn=collate_fn, **options)
    parts = dismantle(stock, seed=0)
    rule = OptimizerStepRule(batch_size=parts.batch_size, drop_last=parts.drop_last)
    observer = ItemObserver(Picklable(collate_fn, "collate_fn"))
    loader = ODBLoader(parts, ODBConfig(**BLOCK), observer=observer, rule=rule, ranks=Ranks(None, 60))
    try:
        yield loader
    finally:
        loader.close()


def drawing(items: list[dict[str, Any]]) -> dict[str, Any]:
    """A collator that draws random numbers of all three kinds."""
    worker = get_worker_info()
    seed = None if worker is None else worker.seed
    return pad(items) | {"drawn": (torch.rand(1).item(), random.random(), float(np.random.rand())), "seed": seed}


def drawn(**options: Any) -> list[tuple[float, ...]]:
    with wrapped(collate_fn=drawing, **options) as loader:
        return [batch["drawn"] for epoch in range(2) for _, _, batch in an_epoch(loader, epoch)]


def an_epoch(loader: ODBLoader, epoch: int = 0) -> list[Any]:
    loader.set_epoch(epoch)
    return list(loader)


# Options


class Opened(Rows):
    """A dataset whose file is to be opened in each worker."""

    opened_by = 0

    def __getitem__(self, k: int) -> Any:
        assert self.opened_by == os.getpid()
        return item(k)


begun: list[int] = []


def open_file(worker_id: int) -> None:
    worker = get_worker_info()
    assert worker is not None and worker.id == worker_id
    worker.dataset.opened_by = os.getpid()
    begun.append(worker_id)


def tell_begun(items: list[dict[str, Any]]) -> dict[str, Any]:
    return pad(items) | {"begun": list(begun)}


def test_worker_init_fn_runs_in_every_worker_and_finds_the_dataset() -> None:
    with wrapped(Opened(), tell_begun, worker_init_fn=open_file, multiprocessing_context="fork") as loader:
        assert {tuple(batch["begun"]) for _, _, batch in loader} == {(0,)}
    assert not begun, "not in this process"


class Changing(Rows):
    """Its owner changes it between epochs."""

    shift = 0

    def __getitem__(self, k: int) -> Any:
        return {key: [id + self.shift for id in ids] for key, ids in item(k).items()}


@pytest.mark.parametrize("persistent", [False, True])
def test_a_dataset_that_changes_between_epochs_is_seen_as_in_torch(persistent: bool) -> None:
    dataset = Changing()
    with wrapped(dataset, persistent_workers=persistent) as loader:
        an_epoch(loader)
        dataset.shift = 1000
        first_ids = {int(batch["input_ids"][0, 0]) for _, _, batch in an_epoch(loader, 1)}
    assert (min(first_ids) > 1000) is not persistent


class Slow(Rows):
    def __getitem__(self, k: int) -> Any:
        time.sleep(30)


def sleeping(items: list[dict[str, Any]]) -> Any:
    time.sleep(30)


@pytest.mark.parametrize(("dataset", "collate_fn"), [(Slow(), pad), (Rows(), sleeping)], ids=["observes", "collates"])
def test_timeout_bounds_the_wait_for_a_worker(dataset: Rows, collate_fn: Any) -> None:
    started = time.monotonic()
    with pytest.raises(Exception, match="timeout: 1 s.*row ") as error:
        with wrapped(dataset, collate_fn, timeout=1) as loader:
            list(loader)
    assert "\n" not in str(error.value)
    assert time.monotonic() - started < 25


@pytest.mark.parametrize("num_workers", [0, 1])
def test_pinned_memory_is_not_warned_of_where_there_is_none(num_workers: int) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine can pin")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with wrapped(pin_memory=True, num_workers=num_workers) as loader:
            list(loader)


# Seeds


@pytest.mark.parametrize("by_generator", [False, True])
def test_random_numbers_follow_the_seed_of_the_dataloader(by_generator: bool) -> None:
    """The global seed, or that of its own generator."""

    def numbers(seed: int) -> list[Any]:
        torch.manual_seed(77 if by_generator else seed)
        return drawn(generator=torch.Generator().manual_seed(seed) if by_generator else None)

    with_5 = numbers(5)
    assert numbers(5) == with_5 and not set(numbers(1005)) & set(with_5)


def seeds_of(rank: int) -> list[int]:
    torch.manual_seed(5)  # on both ranks the same, as trainers do
    # As the Trainer of transformers gives it, which adds the rank itself.
    init_fn = None if rank < 0 else lambda worker_id: seed_worker(worker_id, num_workers=1, rank=rank)
    with wrapped(collate_fn=drawing, worker_init_fn=init_fn, multiprocessing_context="fork") as loader:
        return sorted({batch["seed"] for _, _, batch in loader}) + [batch["drawn"][0] for _, _, batch in loader]


def test_ranks_draw_other_random_numbers(tmp_path: Any) -> None:
    here, there = (outcome.value for outcome in run_ranks("data.test_workers:seeds_of", tmp_path))
    assert here and there and not set(here) & set(there)


# Start methods


class WithModel:
    """A collator that holds the model, as that of LLaMA-Factory does; the model, functions that cannot be pickled."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1000, 1000)
        self.model.scale = 3
        self.model.forward = lambda x: x  # engines do that
        self.extra_repr = self.model.extra_repr

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        told = (self.model.weight.device.type, self.model.scale, self.extra_repr())
        return pad(items) | {"told": told, "sent": len(get_worker_info().dataset)}


def test_a_model_in_the_collator_is_sent_without_weights() -> None:
    with wrapped(collate_fn=WithModel(), multiprocessing_context="forkserver") as loader:
        batches = [batch for _, _, batch in loader]
    assert {batch["told"] for batch in batches} == {("meta", 3, "in_features=1000, out_features=1000, bias=True")}
    assert all(batch["sent"] == NUM_ROWS for batch in batches)


def unsendable(items: list[dict[str, Any]]) -> dict[str, Any]:
    return pad(items) | {"made_by": lambda: None}


@pytest.mark.timeout(60)
def test_a_batch_that_cannot_be_sent_to_the_trainer_is_named() -> None:
    """A queue of torch would lose it, and the trainer wait for ever."""
    with wrapped(collate_fn=unsendable) as loader, pytest.raises(DataError) as caught:
        list(loader)
    message = str(caught.value)
    assert message.startswith("rows ") and "cannot be sent to the training process" in message and "\n" not in message


# Idle micro-batches


def test_a_sample_for_idle_micro_batches_is_the_smallest_of_the_first_that_can_be_collated() -> None:
    """One of the sampler, whose next order stays what it was. Where none can, a line counts them."""
    subset = SubsetRandomSampler(range(40, NUM_ROWS), generator=torch.Generator().manual_seed(1))
    with wrapped(sampler=subset, num_workers=0) as loader:
        before = subset.generator.get_state()
        assert loader.stand_in().id >= 40
        assert torch.equal(subset.generator.get_state(), before)
    lengths = {number: len(Rows()[number]["input_ids"]) for number in range(16)}
    smallest, second = sorted(lengths, key=lambda number: (lengths[number], number))[:2]
    broken = {smallest}

    def collate(items: list[dict[str, Any]]) -> Any:
        if any(len(item["input_ids"]) in {lengths[number] for number in broken} for item in items):
            raise ValueError("a picture is broken")
        return pad(items)

    with wrapped(collate_fn=collate, num_workers=0) as loader:
        assert loader.stand_in().id == second
        broken |= set(lengths)
        assert loader.stand_in().id == second
    with wrapped(dataset=Rows(num_rows=16), collate_fn=collate, num_workers=0) as loader:
        with pytest.raises(DataError, match="16 that cannot be collated"):
            loader.stand_in()
