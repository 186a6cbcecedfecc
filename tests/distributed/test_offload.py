"""DeepSpeed with optimizer or parameters on the CPU: the training is stock's (I9) for any K, or it is refused.

The grid: `pytest -s -m nightly tests/distributed/test_offload.py`.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from distributed.test_engines import deepspeed_config
from packaging.version import Version
from same_training import Config, check_same_training, launch, read, report

from odb_factory.refusals import SUMS_OFFLOADED_GRADIENTS

OFFLOADED = {"nothing": (), "optimizer": ("optimizer",), "parameters": ("optimizer", "param")}
BUDGETS = {"one": 4096, "several": 200}
"""token_budget by the number of micro-batches of an optimizer step."""
GRID = [(1, "nothing"), (1, "optimizer"), (2, "nothing"), (3, "nothing"), (3, "optimizer"), (3, "parameters")]
LIMIT_S = 280


def offloading(stage: int, offloaded: str, folder: Path) -> str:
    """A configuration with torch's AdamW: DeepSpeed's AdamW for a CPU takes minutes to compile."""
    path = Path(deepspeed_config(stage, folder))
    config = json.loads(path.read_text(encoding="utf-8")) | {"zero_force_ds_cpu_optimizer": False}
    for part in OFFLOADED[offloaded]:
        config["zero_optimization"][f"offload_{part}"] = {"device": "cpu"}
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("stage", "offloaded"),
    [
        pytest.param(2, "optimizer", marks=pytest.mark.versions),
        *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in GRID),
    ],
)
def test_offload(stage: int, offloaded: str, config_of: Config, tmp_path: Path) -> None:
    """On two ranks: odb with both budgets, and stock."""
    common: dict[str, Any] = {
        "deepspeed": offloading(stage, offloaded, tmp_path),
        "use_cpu": False,
        "max_samples": 24,
        "val_size": 0,
        "eval_strategy": "no",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    }
    blocks = {name: {"odb": {"token_budget": tokens, "audit": True}} for name, tokens in BUDGETS.items()}
    configs = [config_of("sft", tmp_path / name, **common | block) for name, block in (blocks | {"stock": {}}).items()]
    release = Version(metadata.version("deepspeed"))
    if (stage, offloaded) == (2, "optimizer") and release < Version(SUMS_OFFLOADED_GRADIENTS):
        for outcome in launch(configs, tmp_path, limit_s=LIMIT_S, may_fail=True):
            assert outcome.returncode != 0
            assert "deepspeed.zero_optimization.offload_optimizer: " in outcome.output
        assert not (tmp_path / "one").exists(), "refused before a file is written"
        return
    launch(configs, tmp_path, limit_s=LIMIT_S)
    with_one, with_several, stock = (read(tmp_path / name, 2) for name in (*BUDGETS, "stock"))
    assert max(with_one.num_micro_batches) == 1 < min(with_several.num_micro_batches)
    for name, ours in (("one", with_one), ("several", with_several)):
        deviation = check_same_training(ours, stock, shards_parameters=stage == 3)
        report(f"ZeRO-{stage}, {offloaded} offloaded, {name} micro-batches", deviation)
