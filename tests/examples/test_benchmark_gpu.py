"""examples/benchmark/gpu.py: its word without a GPU, and the numbers it builds on."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "benchmark"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(FOLDER / "gpu.py"), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.full_grid
def test_without_cuda_it_says_what_it_needs() -> None:
    ended = run()
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("gpu.py: ")]
    assert "no CUDA device" in line and "75 GiB" in line and "qwen3-vl-2b" in line and "--device cpu --short" in line


def test_a_cpu_is_for_the_short_run() -> None:
    ended = run("--device", "cpu")
    assert ended.returncode == 2
    assert "--device cpu is for --short" in ended.stderr


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu_models

    return gpu_models


def test_models_are_of_the_size_they_are_called_after(models: Any) -> None:
    for name, size in (("qwen3-vl-2b", 2.128e9), ("text-0.5b", 0.494e9)):
        model = models.build_model(name, torch.device("meta"), is_short=False)
        assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(size, rel=1e-3)


def test_positions_are_those_of_the_model(models: Any) -> None:
    model = models.build_model("qwen3-vl-2b", torch.device("cpu"), is_short=True)
    samples = models.make_samples("MM-Mix", 5, model.config, seed=0, is_short=True)
    batch = models.Collator(has_grid_positions=True)(samples)
    inputs = {key: batch[key] for key in ("input_ids", "image_grid_thw", "attention_mask")}
    if "mm_token_type_ids" in inspect.signature(model.model.get_rope_index).parameters:
        inputs["mm_token_type_ids"] = (batch["input_ids"] == model.config.image_token_id).int()
    expected, _ = model.model.get_rope_index(**inputs)
    real = batch["attention_mask"].bool()
    assert torch.equal(batch["position_ids"][:, real], expected[:, real])


def test_the_search_survives_running_out_of_memory(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA way with a device that is full above 1,500 padded tokens."""
    import gpu
    from gpu_bench import Bench, Task

    class Full(Bench):
        def step(self, batch: Any, loss_scale: float = 1.0) -> torch.Tensor:
            if models.padded_tokens(batch) > 1500:
                raise torch.OutOfMemoryError("full")
            return torch.zeros(())

        def limit_memory(self, share: float) -> None:
            pass

        def synchronize(self) -> None:
            pass

    bench = Full("text-0.5b", torch.device("cpu"), cap=0, is_short=True)
    bench.is_cuda = True
    samples = models.make_samples("MM-Mix", 24, bench.model.config, seed=0, is_short=True)
    task = Task(samples, samples, models.Collator(False), flops=1.0, peak_flops=None, workers=0)
    longest = max(-(-len(sample["input_ids"]) // 8) * 8 for sample in samples)
    rows, hard = gpu.largest_setting("fixed batch", bench, task)
    assert rows == 1500 // longest
    assert models.padded_tokens(hard) == rows * longest
    budget, hard = gpu.largest_setting("odb", bench, task)
    assert 1400 < budget < 1600
    assert models.padded_tokens(hard) <= 1500
