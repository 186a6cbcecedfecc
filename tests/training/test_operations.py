"""`odb/model_tflops_per_s` and `odb/mfu`: the operations that torch counts, and peaks of data sheets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from odb_factory.accounting.statistics import StepStatistics
from odb_factory.training.run import Operations, peak_of

TOKENS = 96
SMALL = {"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16}


def text(tiny_text: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_text, attn_implementation="eager")


def lora(tiny_text: Path) -> Any:
    return get_peft_model(text(tiny_text), LoraConfig(r=4, target_modules="all-linear"))


def frozen(tiny_text: Path) -> Any:
    """The first layers, as `finetuning_type: freeze` leaves them."""
    model = text(tiny_text)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f"layers.{model.config.num_hidden_layers - 1}." in name)
    return model


def experts(_: Path) -> Any:
    config = Qwen3MoeConfig(
        **SMALL, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64
    )
    return Qwen3MoeForCausalLM._from_config(config, attn_implementation="eager", experts_implementation="eager")


@pytest.mark.parametrize(("make", "within"), [(text, 0.01), (experts, 0.01), (lora, 0.1), (frozen, 0.1)])
def test_needed_operations_are_those_that_torch_counts(make: Any, within: float, tiny_text: Path) -> None:
    model = make(tiny_text)
    ids = torch.randint(20, 400, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    found = Operations.of(model, "cpu, 2 cores")
    in_32_bits = Operations.of(model, "NVIDIA H100 80GB HBM3", has_peak=False)
    assert in_32_bits is not None and in_32_bits.peak is None, "peaks are those of 16 bits"
    assert found is not None and found.patch == 0
    all_pairs = 2 * found.square * TOKENS**2  # eager attention computes the masked ones, too
    assert (found.token + found.unit) * TOKENS + all_pairs == pytest.approx(counter.get_total_flops(), rel=within)


@pytest.mark.parametrize("trains_tower", [False, True])
def test_a_vision_tower_counts_by_its_patches(trains_tower: bool, tiny_vl: Path) -> None:
    """Its attention is not counted, and the figure is low rather than high."""
    model = AutoModelForImageTextToText.from_pretrained(tiny_vl, attn_implementation="eager")
    model.model.visual.requires_grad_(trains_tower)
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is this"}]}]
    processor = AutoProcessor.from_pretrained(tiny_vl)
    batch = processor(
        text=[processor.apply_chat_template(asked)], images=[Image.new("RGB", (128, 128))], return_tensors="pt"
    )
    with FlopCounterMode(display=False) as counter:
        model(**batch, labels=batch["input_ids"]).loss.backward()
    found, tokens = Operations.of(model, "cpu"), batch["input_ids"].shape[1]
    assert found is not None and found.patch > 0
    needed = (found.token + found.unit) * tokens + 2 * found.square * tokens**2
    needed += found.patch * int(batch["image_grid_thw"].prod())
    assert 0.8 < needed / counter.get_total_flops() <= 1.01


def test_a_peak_is_told_only_of_a_whole_device_that_is_known() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 989.5e12,
        "NVIDIA H100 PCIe": 756.5e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H200": 989.5e12,
        "NVIDIA L4": 121e12,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
        "NVIDIA A10G": None,
        "NVIDIA GH200 480GB": None,
        "NVIDIA GeForce RTX 4090": None,
        "cpu, 2 cores": None,
    }
    assert {name: peak_of(name) for name in names} == names


def test_the_share_of_the_peak() -> None:
    done = StepStatistics(tokens=1000, units=400, squares=50_000, patches=10, seconds=2.0)
    needed = 6 * 1000 + 4 * 400 + 2 * 10 + 3 * 50_000
    known = Operations(token=6, unit=4, patch=2, square=3, peak=1e5)
    assert known.metrics(done, world_size=2) == {
        "odb/model_tflops_per_s": float(f"{needed / 4 / 1e12:.4g}"),
        "odb/mfu": pytest.approx(needed / 4 / 1e5, abs=1e-4),
    }
    assert known.metrics(StepStatistics(), world_size=2) == {}
