"""Loops of one's own on two ranks: who shares samples with whom, streams, states, leaving early."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from distributed.ranks import run_ranks
from packaging.version import Version
from support import need
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset
from toy import NUM_ROWS, Opening, Rows, Stream, item, pad
from training.flat_models import make_model
from training.toy_training import collate

from odb_factory import ODBDataLoader, ODBError, apply_odb, pop_step_info, unpad
from odb_factory.refusals import SUMS_OFFLOADED_GRADIENTS

SETTINGS = {"token_budget": 128, "batch_size": 8, "collate_fn": pad}


def rows_of(loader: Any) -> list[int]:
    return [row for batch in loader for row in pop_step_info(batch).ids]


def outcome(call: Callable[[], Any]) -> Any:
    """What it returns, or the message of the error."""
    try:
        return call()
    except ODBError as error:
        return str(error)


def rows_with(make: Callable[[], Any]) -> list[int]:
    with make() as loader:
        return rows_of(loader)


def every_row_once(*ranks: list[int]) -> bool:
    return Counter(row for rows in ranks for row in rows) == Counter(range(NUM_ROWS))


def made_before_the_process_group(rank: int, store: str) -> dict[str, Any]:
    dist.destroy_process_group()
    loader = ODBDataLoader(Rows(), shuffle=True, **SETTINGS)
    early = outcome(lambda: iter(loader))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    with loader:
        shared = rows_of(loader)
        infos = [pop_step_info(batch) for batch in loader]
    # Of these groups each rank is in one: it has all samples to itself, and asks nobody.
    alone = [dist.new_group([0]), dist.new_group([1])]
    stranger = outcome(lambda: ODBDataLoader(Rows(), process_group=alone[1 - rank], **SETTINGS))
    with ODBDataLoader(Rows(), process_group=alone[rank], **SETTINGS) as loader:
        if rank == 0:
            dist.barrier()
        whole = rows_of(loader)
        if rank == 1:
            dist.barrier()
    return {
        "early": early,
        "shared": shared,
        "all ranks": sum(info.samples_all_ranks for info in infos),
        "idle": [[info.is_idle, info.samples, info.loss_scale] for info in infos if not info.ids],
        "progress": infos[-1].progress,
        "stranger": stranger,
        "whole": whole,
    }


def test_rank_and_world_size_are_those_of_the_first_batch(tmp_path: Path) -> None:
    """I2: also for a loader made before `init_process_group`, and for a process group of one's own."""
    function = "loop.test_own_loop_ranks:made_before_the_process_group"
    first, second = (run.value for run in run_ranks(function, tmp_path, store=str(tmp_path / "store")))
    assert every_row_once(first["shared"], second["shared"])
    for rank in (first, second):
        assert rank["early"].startswith("WORLD_SIZE: 2 processes were started") and "\n" not in rank["early"]
        assert rank["all ranks"] == NUM_ROWS and rank["progress"] == 1.0
        assert all(idle == [True, 0, 0.0] for idle in rank["idle"])
        assert rank["stranger"].startswith("process_group: this rank is not in it")
        assert every_row_once(rank["whole"])


class PartOfAStream(IterableDataset):
    """Splits itself between the ranks, as webdataset's do."""

    def __iter__(self) -> Iterator[Any]:
        return map(item, range(dist.get_rank(), NUM_ROWS, 2))


def shares(rank: int, num_workers: int) -> dict[str, Any]:
    """The rows that this rank has of each dataset, or why there are none."""
    os.environ["LOCAL_RANK"] = str(rank)  # without it accelerate takes each process for one alone
    accelerator = Accelerator(cpu=True)
    own_order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(rank)).tolist()

    def masked(k: int) -> Any:
        """As a dataset that draws its masks at random, on each rank others."""
        return item(k) | {"mask": [random.randrange(1000 * (rank + 1)) for _ in range(9)]}

    def ours(dataset: Any, **options: Any) -> Any:
        return ODBDataLoader(dataset, num_workers=num_workers, **SETTINGS | options)

    def of_torch(prepare: Any = lambda loader: loader, **options: Any) -> Any:
        loader = prepare(DataLoader(Rows(), 4, collate_fn=pad, num_workers=num_workers, **options))
        return apply_odb(loader, token_budget=128, gradient_accumulation_steps=2)

    loaders: dict[str, Callable[[], Any]] = {
        "stream": lambda: ours(Stream()),
        "part of a stream, said": lambda: ours(PartOfAStream(), already_split=True),
        "random masks": lambda: ours(Rows(masked)),
        # The workers of the epochs would inherit what this process had opened to compare rows.
        "opened file": lambda: ours(Opening()),
        "distributed sampler": lambda: of_torch(sampler=DistributedSampler(Rows(), shuffle=True)),
        "accelerate": lambda: of_torch(accelerator.prepare, shuffle=True),
        "part of a stream": lambda: ours(PartOfAStream()),
        "stream, said to be a part": lambda: ours(Stream(), already_split=True),
        "part of the rows": lambda: ours(Subset(Rows(), range(rank, NUM_ROWS, 2))),
        "own order": lambda: of_torch(sampler=own_order),
    }

    names = [name for name in loaders if num_workers or name != "opened file"]
    return {name: outcome(lambda make=loaders[name]: rows_with(make)) for name in names}


REFUSED = {
    "part of a stream": "iterate different streams",
    "stream, said to be a part": "ranks iterate the same stream",
    # Each rank would take its share of that part alone, and the rest would be lost without a word.
    "part of the rows": "the ranks differ in what the first and the last row of the dataset say",
    "own order": "different orders",
}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_no_row_is_lost_or_trained_on_twice_because_of_who_shares_it_out(num_workers: int, tmp_path: Path) -> None:
    """I1, I2, I11: streams, samplers and datasets that all ranks have alike, or of which each has a part."""
    runs = run_ranks("loop.test_own_loop_ranks:shares", tmp_path, limit_s=120, num_workers=num_workers)
    first, second = (run.value for run in runs)
    for name, rows in first.items():
        if name in REFUSED:
            assert REFUSED[name] in rows and REFUSED[name] in second[name], (name, rows)
        else:
            assert every_row_once(rows, second[name]), (name, rows)
    assert "already_split=True" in first["part of a stream"]


def saved_by_accelerate(rank: int, kept: str) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = str(rank)
    found: dict[str, Any] = {"before": []}

    def made(keeps: str) -> tuple[Accelerator, ODBDataLoader]:
        accelerator, loader = Accelerator(cpu=True), ODBDataLoader(Rows(), shuffle=True, num_workers=1, **SETTINGS)
        if keeps == "prepared":
            loader = accelerator.prepare(loader)
        else:
            accelerator.register_for_checkpointing(loader)
        return accelerator, loader

    accelerator, loader = made("prepared")
    with loader:
        for batch in loader:
            info = pop_step_info(batch)
            found["before"] += info.ids
            if info.ends_optimizer_step and info.optimizer_step == 2:
                break
        accelerator.save_state(f"{kept}/prepared")
        accelerator.register_for_checkpointing(loader)
        accelerator.save_state(f"{kept}/registered")
        states: list[Any] = [None, None]
        dist.all_gather_object(states, loader.state_dict())
    for keeps in ("prepared", "registered"):
        accelerator, loader = made(keeps)
        with loader:
            accelerator.load_state(f"{kept}/{keeps}")
            found[keeps] = rows_of(loader)
            loader.load_state_dict(states[1 - rank])
            found["of the other rank"] = rows_of(loader)
    return found


def test_accelerate_keeps_the_state(tmp_path: Path) -> None:
    """I2 over stop and resume; it is the same on all ranks."""
    runs = run_ranks("loop.test_own_loop_ranks:saved_by_accelerate", tmp_path, kept=str(tmp_path))
    first, second = (run.value for run in runs)
    assert every_row_once(first["before"], first["prepared"], second["before"], second["prepared"])
    for rank in (first, second):
        assert rank["prepared"] == rank["registered"] == rank["of the other rank"] != []


def under_deepspeed(rank: int) -> Any:
    """After each optimizer step its number, that of the engine, its micro-batches; what is said of offloading."""
    os.environ["LOCAL_RANK"] = str(rank)
    config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    config |= {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    accelerator, model = Accelerator(deepspeed_plugin=DeepSpeedPlugin(config)), make_model("qwen2")
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), ODBDataLoader(Rows(), **SETTINGS)
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = []
    with loader:
        for batch in loader:
            info = pop_step_info(batch)
            accelerator.backward(engine(**batch).loss * info.loss_scale)
            if info.ends_optimizer_step:
                optimizer.step()
                optimizer.zero_grad()
                steps.append([info.optimizer_step, engine.global_steps, info.micro_batches])
    AcceleratorState().deepspeed_plugin.deepspeed_config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    with ODBDataLoader(Rows(), **SETTINGS) as loader:
        return steps, outcome(lambda: str(iter(loader)))


def test_deepspeed_steps_where_an_optimizer_step_ends(tmp_path: Path) -> None:
    """I9: accelerate has it step in `backward`, with every micro-batch unless it is told."""
    need("deepspeed")
    is_lost = Version(metadata.version("deepspeed")) < Version(SUMS_OFFLOADED_GRADIENTS)
    for rank in run_ranks("loop.test_own_loop_ranks:under_deepspeed", tmp_path):
        steps, offloaded = rank.value
        assert [(step, of_engine) for step, of_engine, _ in steps] == [(k, k) for k in range(1, 5)]
        assert max(micro_batches for *_, micro_batches in steps) > 1
        assert ("loses the gradients" in offloaded) == is_lost


def leaves_early(rank: int, how: str) -> Any:
    loader = ODBDataLoader(Rows(), num_workers=1, exchange_timeout_s=20, **SETTINGS | {"batch_size": 2})
    batches = iter(loader)
    pop_step_info(next(batches))
    if rank == 0:
        return outcome(lambda: list(batches))
    sys.last_value = ValueError("of a notebook's cell, long ago")
    started = time.monotonic()
    if how == "garbage":
        del loader, batches
        gc.collect()
    elif how == "generator":

        def rest() -> Any:
            with loader:
                yield from batches

        made = rest()
        next(made)
        made.close()
    else:
        with contextlib.suppress(SystemExit), loader:
            sys.exit(0)
    return time.monotonic() - started


def test_a_rank_that_leaves_early_has_not_failed(tmp_path: Path) -> None:
    """By garbage collection, which waits for no rank and calls no collective, by a generator that is closed, or by
    `sys.exit(0)`."""
    for how in ("garbage", "generator", "exit"):
        first, second = run_ranks("loop.test_own_loop_ranks:leaves_early", tmp_path, may_fail=True, how=how)
        left, ended = "left the epoch before its end", "rank 1 has ended its program while others go on"
        assert left in first.value or (how == "garbage" and ended in first.value), how
        assert "long ago" not in first.said + second.said and "SystemExit" not in first.said + second.said
        assert "GeneratorExit" not in first.value
        assert second.value < 15


def flat_in_a_group(rank: int) -> float:
    group, started = dist.new_group([0, 1]), time.monotonic()
    if rank < 2:
        settings = SETTINGS | {"collate_fn": collate, "layout": "flat"}
        with ODBDataLoader(Rows(), process_group=group, **settings) as loader:
            unpad(make_model("qwen2"), loader)
            rows_of(loader)
    dist.barrier()
    return time.monotonic() - started


def test_a_model_is_tried_by_the_ranks_of_the_process_group_alone(tmp_path: Path) -> None:
    """The third rank does something else."""
    assert max(run.value for run in run_ranks("loop.test_own_loop_ranks:flat_in_a_group", tmp_path, world_size=3)) < 45
