"""Custom loops on several ranks: which share samples, streams, states, leaving early, replicas of several ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import random
import re
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
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from distributed.ranks import run_ranks
from packaging.version import Version
from support import need, read_jsonl
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset
from toy import NUM_ROWS, Opening, Rows, Stream, item, pad
from training.flat_models import make_model
from training.toy_training import collate
from transformers import AutoModelForCausalLM

from odb_factory import ODBDataLoader, ODBError, apply_odb, pop_step_info, unpad
from odb_factory.refusals import SUMS_OFFLOADED_GRADIENTS

SETTINGS = {"token_budget": 128, "batch_size": 8, "collate_fn": pad}


def rows_of(loader: Any) -> list[int]:
    return [row for batch in loader for row in pop_step_info(batch).ids]


def outcome(call: Callable[[], Any]) -> Any:
    """The result of the call, or the message of its error."""
    try:
        return call()
    except ODBError as error:
        return str(error)


def every_row_once(*ranks: list[int]) -> bool:
    return Counter(row for rows in ranks for row in rows) == Counter(range(NUM_ROWS))


# In each rank. kept: the folder of the test.


def of_all(value: Any) -> list[Any]:
    """The values of the ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def made_before_the_process_group(rank: int, kept: str) -> None:
    """I2: rank and world size are those at the first batch, or those of `process_group`."""
    dist.destroy_process_group()
    loader = ODBDataLoader(Rows(), shuffle=True, **SETTINGS)
    early = outcome(lambda: iter(loader))
    assert early.startswith("WORLD_SIZE: 2 processes were started") and "\n" not in early, early
    dist.init_process_group("gloo", init_method=f"file://{kept}/store", rank=rank, world_size=2)
    with loader:
        shared = of_all(rows_of(loader))
        assert every_row_once(*shared), shared
        infos = [pop_step_info(batch) for batch in loader]
    assert sum(info.samples_all_ranks for info in infos) == NUM_ROWS and infos[-1].progress == 1.0
    assert all((info.is_idle, info.samples, info.loss_scale) == (True, 0, 0.0) for info in infos if not info.ids)
    # Each rank is alone in one of these groups: it has all samples, and waits for no other rank.
    alone = [dist.new_group([0]), dist.new_group([1])]
    stranger = outcome(lambda: ODBDataLoader(Rows(), process_group=alone[1 - rank], **SETTINGS))
    assert stranger.startswith("process_group: this rank is not in it"), stranger
    with ODBDataLoader(Rows(), process_group=alone[rank], **SETTINGS) as loader:
        if rank == 0:
            dist.barrier()
        assert every_row_once(rows_of(loader))
        if rank == 1:
            dist.barrier()


class PartOfAStream(IterableDataset):
    """Splits itself between the ranks, as webdataset's do."""

    def __iter__(self) -> Iterator[Any]:
        return map(item, range(dist.get_rank(), NUM_ROWS, 2))


REFUSED = {
    "part of a stream": "iterate different streams.* already_split=True",
    "stream, said to be a part": "ranks iterate the same stream",
    # Each rank would take its share of that part alone, and the rest would be lost.
    "part of the rows": "the ranks differ in checksums of the first and the last row of the dataset",
    "own order": "different orders",
}


def shares(rank: int, kept: str, num_workers: int) -> None:
    """I1, I2, I11: no row is lost or trained on twice: streams, samplers and datasets that are the same on all ranks,
    or of which each rank has a part."""
    os.environ["LOCAL_RANK"] = str(rank)  # without it accelerate takes each process for a single one
    accelerator = Accelerator(cpu=True)
    own_order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(rank)).tolist()

    def masked(k: int) -> Any:
        """An item with a random mask, different on each rank."""
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
        "distributed sampler": lambda: of_torch(sampler=DistributedSampler(Rows(), shuffle=True)),
        "accelerate": lambda: of_torch(accelerator.prepare, shuffle=True),
        "part of a stream": lambda: ours(PartOfAStream()),
        "stream, said to be a part": lambda: ours(Stream(), already_split=True),
        "part of the rows": lambda: ours(Subset(Rows(), range(rank, NUM_ROWS, 2))),
        "own order": lambda: of_torch(sampler=own_order),
    }
    if num_workers:  # workers must not inherit the file that was opened to compare rows
        loaders["opened file"] = lambda: ours(Opening())

    def rows(make: Callable[[], Any]) -> list[int]:
        with make() as loader:
            return rows_of(loader)

    for name, make in loaders.items():
        ranks = of_all(outcome(functools.partial(rows, make)))
        if name in REFUSED:
            assert all(re.search(REFUSED[name], message) for message in ranks), (name, ranks)
        else:
            assert every_row_once(*ranks), (name, ranks)


def saved_by_accelerate(rank: int, kept: str) -> None:
    """I2 over stop and resume; the state is the same on all ranks."""
    os.environ["LOCAL_RANK"] = str(rank)

    def made(keeps: str) -> tuple[Accelerator, ODBDataLoader]:
        accelerator, loader = Accelerator(cpu=True), ODBDataLoader(Rows(), shuffle=True, num_workers=1, **SETTINGS)
        if keeps == "prepared":
            loader = accelerator.prepare(loader)
        else:
            accelerator.register_for_checkpointing(loader)
        return accelerator, loader

    before: list[int] = []
    accelerator, loader = made("prepared")
    with loader:
        for batch in loader:
            info = pop_step_info(batch)
            before += info.ids
            if info.ends_optimizer_step and info.optimizer_step == 2:
                break
        accelerator.save_state(f"{kept}/prepared")
        accelerator.register_for_checkpointing(loader)
        accelerator.save_state(f"{kept}/registered")
        states = of_all(loader.state_dict())
    resumed = []
    for keeps in ("prepared", "registered"):
        accelerator, loader = made(keeps)
        with loader:
            accelerator.load_state(f"{kept}/{keeps}")
            resumed.append(rows_of(loader))
            loader.load_state_dict(states[1 - rank])
            resumed.append(rows_of(loader))
    assert resumed == [resumed[0]] * 4 != [[]] * 4, resumed
    assert every_row_once(*of_all(before), *of_all(resumed[0]))


def under_deepspeed(rank: int, kept: str) -> None:
    """I9: under accelerate DeepSpeed steps in `backward`, by default after every micro-batch."""
    os.environ["LOCAL_RANK"] = str(rank)
    config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    config |= {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    accelerator, model = Accelerator(deepspeed_plugin=DeepSpeedPlugin(config)), make_model("qwen2")
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), ODBDataLoader(Rows(), **SETTINGS)
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps, most = [], 0
    with loader:
        for batch in loader:
            info = pop_step_info(batch)
            accelerator.backward(engine(**batch).loss * info.loss_scale)
            if info.ends_optimizer_step:
                optimizer.step()
                optimizer.zero_grad()
                steps.append((info.optimizer_step, engine.global_steps))
                most = max(most, info.micro_batches)
    assert steps == [(k, k) for k in range(1, 5)] and most > 1, steps
    AcceleratorState().deepspeed_plugin.deepspeed_config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    is_lost = Version(metadata.version("deepspeed")) < Version(SUMS_OFFLOADED_GRADIENTS)
    with ODBDataLoader(Rows(), **SETTINGS) as loader:
        assert ("loses the gradients" in str(outcome(lambda: iter(loader)))) == is_lost


def flat_in_a_group(rank: int, kept: str) -> None:
    """Only the ranks of the process group check the model; the third rank does something else."""
    group, started = dist.new_group([0, 1]), time.monotonic()
    if rank < 2:
        settings = SETTINGS | {"collate_fn": collate, "layout": "flat"}
        with ODBDataLoader(Rows(), process_group=group, **settings) as loader:
            unpad(make_model("qwen2"), loader)
            rows_of(loader)
    dist.barrier()
    assert time.monotonic() - started < 45


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (made_before_the_process_group, {}),
        (shares, {"num_workers": 0}),
        (shares, {"num_workers": 1}),
        (saved_by_accelerate, {}),
        (under_deepspeed, {}),
        (flat_in_a_group, {"world_size": 3}),
    ],
)
def test_several_ranks(function: Callable[..., None], options: dict[str, Any], tmp_path: Path) -> None:
    """See the docstring of the function."""
    if function is under_deepspeed:
        need("deepspeed")
    name = f"loop.test_own_loop_ranks:{function.__name__}"
    run_ranks(name, tmp_path, limit_s=120, kept=str(tmp_path), **options)


# Leaving


def leaves_early(rank: int, how: str) -> Any:
    in_loop = how in ("break", "exit in a step")
    options = {"num_workers": 0, "exchange_timeout_s": 12} if in_loop else {"num_workers": 1, "exchange_timeout_s": 20}
    loader = ODBDataLoader(Rows(), **SETTINGS | {"batch_size": 2} | options)
    batches = iter(loader)
    pop_step_info(next(batches))
    if rank == 0 and in_loop:  # in a collective of the training, which the other rank never calls
        return outcome(lambda: dist.all_reduce(torch.ones(1)))
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
    elif how == "break":
        with loader:
            del batches
    else:
        with contextlib.suppress(SystemExit), loader:
            sys.exit(0)
    return time.monotonic() - started


def test_a_rank_that_leaves_early_has_not_failed(tmp_path: Path) -> None:
    """It leaves by garbage collection, which waits for no rank and calls no collective, by a closed generator, or by
    `sys.exit(0)`; by `break` and `sys.exit(0)` also while another rank is in a collective of the training."""
    for how in ("garbage", "generator", "exit"):
        first, second = run_ranks("loop.test_own_loop_ranks:leaves_early", tmp_path, may_fail=True, how=how)
        left, ended = "left the epoch before its end", "rank 1 has ended its program while others go on"
        assert left in first.value or (how == "garbage" and ended in first.value), how
        assert "long ago" not in first.output + second.output and "SystemExit" not in first.output + second.output
        assert "GeneratorExit" not in first.value
        assert second.value < 15
    for how, most in (("break", 16), ("exit in a step", 11)):
        _, second = run_ranks("loop.test_own_loop_ranks:leaves_early", tmp_path, may_fail=True, how=how)
        assert second.value < most, how
        assert how != "break" or "rank 1 has left the epoch before its end" in second.output


# Replicas of several ranks (tensor parallel), and shards with replicas: a mesh of 2 x 2

ON_A_MESH = {"token_budget": 128, "batch_size": 4, "global_batch_size": 16, "collate_fn": pad, "shuffle": True}
RELATIVE = 1e-5
HALVES = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
"""The halves of a layer's MLP, for the two ranks of a replica."""
NO_MESHES = (({"tp_size": 4}, "process_group="), ({"dp_shard_size": 2, "cp_size": 2}, "context or sequence parallel"))
"""Meshes without data-parallel ranks, or whose ranks share the tokens of a sample."""


def on_mesh(**sizes: int) -> Any:
    # accelerate builds such a mesh itself, but not on a CPU.
    AcceleratorState().device_mesh = mesh = ParallelismConfig(**sizes).build_device_mesh("cpu")
    return mesh


def losses(accelerator: Accelerator, model: Any, group: Any, audit_dir: Path) -> list[float]:
    """The loss of each optimizer step, over the data-parallel ranks."""
    step_losses, total, optimizer = [], torch.zeros(()), torch.optim.SGD(model.parameters(), lr=0.1)
    with accelerator.prepare(ODBDataLoader(Rows(), audit_dir=audit_dir, **ON_A_MESH)) as loader:
        for batch in loader:
            info = pop_step_info(batch)
            loss = model(**batch).loss * info.loss_scale
            loss.backward()  # DDP averages the gradients of each
            total += loss.detach()
            if info.ends_optimizer_step:
                dist.all_reduce(total, group=group)
                step_losses.append(total.item() / dist.get_world_size(group))
                optimizer.step()
                optimizer.zero_grad()
                total.zero_()
    return step_losses


def trains(rank: int, model: str, audits: str) -> dict[str, list[float]]:
    """On two ranks of DDP; on four of two replicas, then of two times two shards."""
    os.environ["LOCAL_RANK"] = str(rank)
    accelerator, made = Accelerator(cpu=True), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    sharded, audit_of = copy.deepcopy(made), Path(audits).joinpath
    if dist.get_world_size() == 2:
        return {"2 ranks": losses(accelerator, DistributedDataParallel(made), None, audit_of("2 ranks"))}
    for sizes, words in NO_MESHES:
        on_mesh(**sizes)
        with pytest.raises(ODBError, match=words):
            iter(accelerator.prepare(ODBDataLoader(Rows(), **ON_A_MESH)))
    mesh = on_mesh(dp_shard_size=2, tp_size=2)
    for layer in made.model.layers:
        parallelize_module(layer.mlp, mesh["tp"], HALVES)
    assert made.model.layers[0].mlp.up_proj.weight.to_local().shape[0] == made.config.intermediate_size // 2
    replicas, group = DistributedDataParallel(made, device_mesh=mesh["dp"]), mesh["dp"].get_group()
    by_mesh = {"2 x 2": losses(accelerator, replicas, group, audit_of("2 x 2"))}
    mesh = on_mesh(dp_replicate_size=2, dp_shard_size=2)
    for layer in (*sharded.model.layers, sharded):
        fully_shard(layer, mesh=mesh["dp_replicate", "dp_shard"])
    return by_mesh | {"shards": losses(accelerator, sharded, None, audit_of("shards"))}


def test_losses_are_those_of_two_ranks(tiny_text: Path, tmp_path: Path) -> None:
    """The plan, the weights of the loss and the audit follow the data-parallel group."""
    audits, by_rank = tmp_path / "audits", []
    for world_size in (2, 4):
        arguments = {"world_size": world_size, "limit_s": 120, "model": str(tiny_text), "audits": str(audits)}
        ended = run_ranks("loop.test_own_loop_ranks:trains", tmp_path, **arguments)
        by_rank += [rank.value for rank in ended]
    expected = by_rank[0]["2 ranks"]
    assert len(expected) > 3 and expected[0] > expected[-1]
    for rank in by_rank:
        for name, found_losses in rank.items():
            assert found_losses == pytest.approx(expected, rel=RELATIVE), name
    for name, count in {"2 x 2": 2, "shards": 4}.items():
        files = sorted((audits / name).iterdir())
        assert [path.name for path in files] == [f"odb_audit_rank{rank}.jsonl" for rank in range(count)]
        assert sorted(row for path in files for line in read_jsonl(path) for row in line["ids"]) == list(
            range(NUM_ROWS)
        )
