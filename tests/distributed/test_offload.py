"""DeepSpeed with optimizer or parameters on the CPU: the training is stock's (I9), whatever K, or refused.

The grid: `pytest -s -m full_grid tests/distributed/test_offload.py`.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from distributed.ranks import Outcome, run_ranks
from distributed.test_engines import deepspeed_config
from packaging.version import Version
from same_training import Config, check_same_training, configurations, read, report, write_rows
from tiny_models import TinyModels

from odb_factory.version import SUMS_OFFLOADED_GRADIENTS

OFFLOADED = {"nothing": (), "optimizer": ("optimizer",), "parameters": ("optimizer", "param")}
BUDGETS = {"one": 4096, "several": 200}
"""Tokens, by how many micro-batches an optimizer step has."""
DEFAULT = [(2, "optimizer")]
GRID = [(1, "nothing"), (1, "optimizer"), (2, "nothing"), (3, "nothing"), (3, "optimizer"), (3, "parameters")]
LIMIT_S = 280


@pytest.fixture(scope="module")
def config_of(tiny_text: Path, tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("offload")
    return configurations(TinyModels(tiny_text, tiny_vl, folder), write_rows(folder / "rows"))


def offloading(stage: int, offloaded: str, folder: Path) -> str:
    """torch's own AdamW in place of DeepSpeed's for a CPU, which takes minutes to compile."""
    path = Path(deepspeed_config(stage, folder))
    config = json.loads(path.read_text(encoding="utf-8")) | {"zero_force_ds_cpu_optimizer": False}
    for part in OFFLOADED[offloaded]:
        config["zero_optimization"][f"offload_{part}"] = {"device": "cpu"}
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def on_two_ranks(stage: int, offloaded: str, config_of: Config, folder: Path) -> list[Outcome]:
    """Trained with both budgets, and by stock."""
    common: dict[str, Any] = {
        "deepspeed": offloading(stage, offloaded, folder),
        "use_cpu": False,
        "max_samples": 24,
        "val_size": 0,
        "eval_strategy": "no",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    }
    blocks = {name: {"odb": {"token_budget": tokens, "audit": True}} for name, tokens in BUDGETS.items()}
    configs = [config_of("sft", folder / name, **common | block) for name, block in (blocks | {"stock": {}}).items()]
    return run_ranks("same_training:train_all", folder, limit_s=LIMIT_S, configs=configs)


def check(stage: int, offloaded: str, config_of: Config, folder: Path) -> None:
    outcomes = on_two_ranks(stage, offloaded, config_of, folder)
    if (stage, offloaded) == (2, "optimizer") and Version(metadata.version("deepspeed")) < Version(
        SUMS_OFFLOADED_GRADIENTS
    ):
        for outcome in outcomes:
            assert outcome.returncode != 0
            assert "loses the gradients of micro-batches with ZeRO-2 and offload_optimizer" in outcome.said
        assert not (folder / "one").exists(), "refused before a file is written"
        return
    assert all(outcome.returncode == 0 for outcome in outcomes), "\n".join(one.said[-3000:] for one in outcomes)
    one, several, stock = (read(folder / name, 2) for name in (*BUDGETS, "stock"))
    assert max(one.num_micro_batches) == 1 < min(several.num_micro_batches)
    for name, ours in (("one", one), ("several", several)):
        found = check_same_training(ours, stock, shards_parameters=stage == 3)
        report(f"ZeRO-{stage}, {offloaded} offloaded, {name} micro-batches", found)


@pytest.mark.versions
@pytest.mark.timeout(600)  # DeepSpeed may have to build its optimizer first
@pytest.mark.parametrize(("stage", "offloaded"), DEFAULT)
def test_offload(stage: int, offloaded: str, config_of: Config, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("deepspeed_op")
    check(stage, offloaded, config_of, tmp_path)


@pytest.mark.full_grid
@pytest.mark.parametrize(("stage", "offloaded"), GRID)
def test_grid(stage: int, offloaded: str, config_of: Config, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("deepspeed_op")
    check(stage, offloaded, config_of, tmp_path)
