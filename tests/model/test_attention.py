"""I10: `odb_varlen` acts in a flat row of the language model alone; elsewhere attention is the model's own.

What it computes, in all model classes, with images too: `tests/data/test_layout_models.py`.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training.flat_models import (
    ALLOWED,
    LENGTHS,
    MOE,
    SLIDING,
    flat_batch,
    gradients,
    largest_difference,
    make_model,
    padded_batch,
    samples,
    sum_of_losses,
)
from transformers import AutoModelForImageTextToText

from odb_factory import ConfigError
from odb_factory.model import attention
from odb_factory.model.check import resolve_layout


def test_the_language_model_alone_takes_it(tiny_vl: Any, tmp_path: Any) -> None:
    """The vision tower keeps its own function; neither a checkpoint nor the model afterwards knows of it."""
    model = AutoModelForImageTextToText.from_pretrained(tiny_vl)
    undo = attention.install(model)
    assert model.model.language_model.config._attn_implementation == attention.NAME
    assert model.model.visual.config._attn_implementation == model.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    assert attention.NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    undo()
    assert model.model.language_model.config._attn_implementation == "sdpa"


def test_a_row_of_another_length_is_refused() -> None:
    """It must not attend across samples, and nothing else tells it where they end."""
    model, rows = make_model("llama"), samples()
    attention.install(model)
    with pytest.raises(ConfigError, match="not the flat row of 66 tokens.*`layout: padded`"):
        sum_of_losses(model, flat_batch(rows), (40, 26))
    sum_of_losses(model, padded_batch(rows))  # outside of a flat row it is sdpa again


@pytest.mark.parametrize("kind", ["phimoe", "qwen2_moe", "qwen2"])
def test_windows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of Phi-MoE and Qwen2-MoE is not told the window, which only the mask knows: they keep their kernel."""
    window = SLIDING | {"use_sliding_window": True, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
    monkeypatch.setitem(ALLOWED, kind, MOE | window | {"num_local_experts": 4, "shared_expert_intermediate_size": 16})
    model, rows = make_model(kind, torch.float64), samples()
    expected = sum_of_losses(model, padded_batch(rows)), gradients(model)
    layout = resolve_layout([model], "auto", SimpleNamespace(device=torch.device("cpu"), bf16=False, fp16=False))
    assert layout.name == "flat"
    loss = sum_of_losses(model, flat_batch(rows), LENGTHS)
    assert abs(loss / expected[0] - 1) < 1e-6
    assert largest_difference(gradients(model), expected[1]) < 1e-6
    assert (model.config._attn_implementation == "sdpa") == ("moe" in kind)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch's kernel runs nowhere else")
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_kernel_of_torch(kind: str) -> None:
    """In bfloat16 it differs from each sample alone by no more than two padded layouts do; no step waits for it."""
    model, rows = make_model(kind, torch.bfloat16).cuda(), samples()

    def on_device(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: value.cuda() for key, value in batch.items()}

    alone = [sum_of_losses(model, on_device(padded_batch([one]))) for one in rows]
    padded = sum_of_losses(model, on_device(padded_batch(rows)))
    expected = gradients(model)
    attention.install(model)
    batch = on_device(flat_batch(rows))
    loss = sum_of_losses(model, batch, LENGTHS)
    assert abs(loss - sum(alone)) <= max(10 * abs(padded - sum(alone)), 0.02 * padded)
    assert largest_difference(gradients(model), expected) < 0.1
    torch.cuda.set_sync_debug_mode("error")
    try:
        sum_of_losses(model, batch, LENGTHS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
