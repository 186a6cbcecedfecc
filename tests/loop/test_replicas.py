"""Replicas of several ranks (tensor parallel), and shards with replicas, in a custom loop: a mesh of 2 x 2."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from distributed.ranks import run_ranks
from support import read_jsonl
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from toy import NUM_ROWS, Rows, pad
from transformers import AutoModelForCausalLM

from odb_factory import ODBDataLoader, ODBError, pop_step_info

SETTINGS = {"token_budget": 128, "batch_size": 4, "global_batch_size": 16, "collate_fn": pad, "shuffle": True}
RELATIVE = 1e-5
HALVES = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
"""The halves of a layer's MLP, for the two ranks of a replica."""
REFUSED = (({"tp_size": 4}, "process_group="), ({"dp_shard_size": 2, "cp_size": 2}, "context or sequence parallel"))
"""Meshes without data-parallel ranks, or whose ranks share the tokens of a sample."""


def on_mesh(**sizes: int) -> Any:
    # accelerate builds such a mesh itself, but not on a CPU.
    AcceleratorState().device_mesh = mesh = ParallelismConfig(**sizes).build_device_mesh("cpu")
    return mesh


def losses(accelerator: Accelerator, model: Any, group: Any, audit_dir: Path) -> list[float]:
    """The loss of each optimizer step, over the data-parallel ranks."""
    step_losses, total, optimizer = [], torch.zeros(()), torch.optim.SGD(model.parameters(), lr=0.1)
    with accelerator.prepare(ODBDataLoader(Rows(), audit_dir=audit_dir, **SETTINGS)) as loader:
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
    for sizes, words in REFUSED:
        on_mesh(**sizes)
        with pytest.raises(ODBError, match=words):
            iter(accelerator.prepare(ODBDataLoader(Rows(), **SETTINGS)))
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
        ended = run_ranks("loop.test_replicas:trains", tmp_path, **arguments)
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
