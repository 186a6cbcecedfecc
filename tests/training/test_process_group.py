"""`enable_odb(process_group=)`: the ranks of the group share samples, and their number weighs the losses."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist
from distributed.ranks import run_ranks
from toy import NUM_ROWS
from training.test_lifetime import held, make_odb
from training.toy_training import BLOCK, audit, ids, losses, make, train

from odb_factory import ConfigError, enable_odb

ACCUMULATION = 2


def train_all(rank: int, model: str, output_dir: str) -> tuple[list[float], list[tuple[int, ...]]]:
    """Returns the losses of a training in groups of one rank, and what the process holds after each of three trainings
    of both ranks."""
    os.environ["LOCAL_RANK"] = str(rank)
    # Two ranks, each the only one of its group: the engine averages two equal gradients.
    groups = [dist.new_group([other]) for other in range(dist.get_world_size())]
    trainer = make(Path(model), Path(output_dir, str(rank)), gradient_accumulation_steps=ACCUMULATION)
    assert trainer.accelerator.num_processes == 2
    enable_odb(trainer, process_group=groups[rank], loss_scaling="exact", **BLOCK)
    trainer.train()
    counts = []
    for k in range(3):
        make_odb(Path(model), Path(output_dir, f"world{k}")).train()
        gc.collect()
        counts.append(held())
    return losses(trainer), counts


def test_ranks_of_different_groups_do_not_share_samples(tiny_text, tmp_path) -> None:
    options = {"model": str(tiny_text), "output_dir": str(tmp_path)}
    outcomes = run_ranks("training.test_process_group:train_all", tmp_path, limit_s=120, **options)
    for rank in range(2):
        folder = tmp_path / str(rank)
        assert ids(folder) == Counter(range(NUM_ROWS))
        weights: Counter[int] = Counter()
        for line in audit(folder):
            weights[line["optimizer_step"]] += line["weight"]
        assert list(weights.values()) == pytest.approx([1.0] * len(weights))
    # The same training by one process
    exact = BLOCK | {"loss_scaling": "exact"}
    alone = train(tiny_text, tmp_path / "alone", block=exact, gradient_accumulation_steps=ACCUMULATION)
    for outcome in outcomes:
        of_group, counts = outcome.value
        assert of_group == pytest.approx(losses(alone), rel=1e-4)
        # Processes, threads, files and groups. The first training starts what a process has once.
        assert all(later <= before for before, later in zip(counts[1], counts[2], strict=True)), counts
    for k in range(3):
        assert ids(tmp_path / f"world{k}") + ids(tmp_path / f"world{k}", rank=1) == Counter(range(NUM_ROWS))


def test_a_mesh_is_no_process_group(tiny_text, tmp_path) -> None:
    with pytest.raises(ConfigError, match="^process_group: expected the torch.distributed.ProcessGroup"):
        enable_odb(make(tiny_text, tmp_path), process_group="dp", **BLOCK)
