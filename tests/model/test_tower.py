"""Images and videos of a micro-batch go through the vision tower together, patch embeddings are products, and nothing
else changes."""

from __future__ import annotations

import contextlib
import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from model.flash_on_cpu import flash_on_cpu
from support import Convolutions, need

from odb_factory.errors import DataError
from odb_factory.model.tower import FAMILIES, check_batch, images_at_once, one_pass, patch_products

Grid = tuple[int, int, int]
KEYS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
IMAGE, VIDEO = 90, 91
TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "layer_types": ["full_attention"] * 4,
}
ROPE = {
    "partial_rotary_factor": 1.0,
    "rope_type": "default",
    "type": "default",
    "mrope_section": [2, 1, 1],
    "rope_theta": 1e4,
}
TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
    "image_size": 16,
}
AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "output_dim": 32}
IMAGES: list[Grid] = [(1, 4, 6), (1, 2, 2), (1, 8, 2)]
VIDEOS: list[Grid] = [(3, 4, 4), (1, 6, 2)]
"""Grids of patches: frames, height, width."""
CLASSES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    model_class = getattr(transformers, CLASSES[family])
    config = model_class.config_class(
        text_config=TEXT | {"rope_scaling": ROPE, "rope_parameters": ROPE},
        vision_config=TOWER,
        audio_config=AUDIO,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    model = model_class._from_config(config, attn_implementation="eager").float()
    if "moe" in family:
        model.set_experts_implementation("eager")  # torch 2.8 has no grouped kernel for a CPU
    return model


def make_batch(images: list[Grid], videos: list[Grid]) -> dict[str, Any]:
    """One row: some text, the images, some text, the videos, some text."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(3, 80, (3, 5), generator=generator)
    places = [torch.full((count(grids) // 4,), token) for grids, token in ((images, IMAGE), (videos, VIDEO))]
    ids = torch.cat([text[0], places[0], text[1], places[1], text[2]])[None]
    width = 3 * TOWER["temporal_patch_size"] * TOWER["patch_size"] ** 2
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.where(ids < 80, -100),
        "position_ids": torch.arange(ids.shape[1]).expand(3, 1, -1),
    }
    for grids, pixels, grid in ((images, *KEYS[:2]), (videos, *KEYS[2:])):
        if grids:
            batch |= {pixels: torch.randn(count(grids), width, generator=generator), grid: torch.tensor(grids)}
    return batch


def count(grids: list[Grid]) -> int:
    """Number of patches."""
    return sum(math.prod(grid) for grid in grids)


def train(model: Any, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss, gradients, and the number of runs of the tower."""
    runs = []
    tower = next(part for name, part in model.named_modules() if name.rpartition(".")[2] == "visual")
    hook = tower.register_forward_pre_hook(lambda *_: runs.append(1))
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    hook.remove()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return loss.item(), gradients, len(runs)


@pytest.mark.versions
@pytest.mark.parametrize("family", [family for family in CLASSES if family in FAMILIES])
def test_one_pass_equals_two(family: str) -> None:
    """Loss and the gradient of every weight, in float32."""
    model = make_model(family)
    batch = make_batch(IMAGES, VIDEOS)
    loss, gradients, runs = train(model, batch)
    assert runs == 2
    with one_pass(model):
        merged_loss, merged_gradients, runs = train(model, batch)
        again, _, _ = train(model, batch)
    assert runs == 1
    assert merged_loss == again == pytest.approx(loss, abs=1e-6)
    assert merged_gradients.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert torch.allclose(merged_gradients[name], gradient, rtol=1e-4, atol=1e-6 * largest), name
    assert float(sum(merged_gradients[name].abs().sum() for name in merged_gradients if "visual" in name)) > 0


def test_an_error_leaves_the_model_unchanged() -> None:
    model = make_model("qwen3_vl")
    before = [(name, set(vars(part)), len(part._forward_pre_hooks)) for name, part in model.named_modules()]
    with pytest.raises(KeyError), one_pass(model, None, torch.nn.Linear(1, 1)):
        raise KeyError
    assert [(name, set(vars(part)), len(part._forward_pre_hooks)) for name, part in model.named_modules()] == before


def test_every_family_is_tested() -> None:
    """The tower of an omni model is in its thinker, the part that is trained."""
    assert set(FAMILIES) <= {*CLASSES, "qwen2_5_omni", "qwen3_omni_moe"}


@pytest.mark.versions
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_each_layer_calls_the_kernel_once_for_all_images(family: str) -> None:
    """In bfloat16, about as close to float32 as sdpa image by image; images do not attend to each other."""
    model, batch = make_model(family), make_batch(IMAGES, [])
    model.set_attn_implementation({"vision_config": "sdpa"})
    blocks = model.model.visual.blocks
    states: list[torch.Tensor] = []
    blocks[-1].register_forward_hook(lambda block, inputs, output: states.append(output.detach().float()))
    model(**batch, use_cache=False)
    model.bfloat16()
    model(**batch, use_cache=False)
    with flash_on_cpu() as kernel, images_at_once(model):
        model(**batch, use_cache=False).loss.backward()
        assert kernel.count("forward") == kernel.count("backward") == len(blocks)
    exact, stock, at_once = states
    error = (stock - exact).norm() / exact.norm()
    assert 0 < (at_once - exact).norm() / exact.norm() <= 1.5 * error < 0.05
    assert blocks[0].attn.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["qwen3_vl", "llava_next_video"])
@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_batch_that_would_block_other_ranks_is_refused(family: str, is_sharded: bool) -> None:
    trainer = SimpleNamespace(
        args=SimpleNamespace(world_size=2),
        is_fsdp_enabled=is_sharded,
        model=SimpleNamespace(config=SimpleNamespace(model_type=family)),
        model_wrapped=torch.nn.Linear(1, 1),
    )
    batch = {"pixel_values": torch.zeros(1), "pixel_values_videos": torch.zeros(1)}
    refused = family == "llava_next_video" and is_sharded
    expected = pytest.raises(DataError, match="the micro-batch of rows 3, 4 has both.*llava_next_video.*ZeRO-2 or DDP")
    with expected if refused else contextlib.nullcontext():
        check_batch(trainer, batch, (3, 4))
    check_batch(trainer, {"pixel_values": torch.zeros(1)}, (3,))


# Patch embeddings as products


def siglip() -> tuple[Any, dict[str, Any]]:
    """Two pixels on two sides belong to no patch, as in SigLIP's 384 pixels with patches of 14."""
    torch.manual_seed(0)
    sizes = {name: TEXT[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    config = transformers.SiglipVisionConfig(image_size=18, patch_size=4, num_hidden_layers=2, **sizes)
    return transformers.SiglipVisionModel(config), {"pixel_values": torch.randn(3, 3, 18, 18)}


def qwen(family: str) -> tuple[Any, dict[str, Any]]:
    batch = make_batch(IMAGES, []) | {"use_cache": False}
    return make_model(family), batch


@pytest.mark.versions
@pytest.mark.parametrize("make", [siglip, functools.partial(qwen, "qwen2_vl"), functools.partial(qwen, "qwen3_vl")])
def test_a_patch_embedding_equals_its_product(make: Any) -> None:
    """Outputs, and the gradient of every weight, in float32; 3-D and 2-D, with bias and without."""
    model, batch = make()

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        model.zero_grad()
        with Convolutions() as convolutions:
            output = model(**batch)
            result = output.last_hidden_state if hasattr(output, "last_hidden_state") else output.logits
            result.square().mean().backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        return result.detach(), gradients, convolutions.count

    expected, gradients, convolutions = run()
    assert convolutions == 2
    with patch_products(model):
        product, grads, convolutions = run()
    assert convolutions == 0
    assert run()[2] == 2, "the undo restores"
    assert torch.allclose(product, expected, atol=4e-6)
    assert grads.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert all(torch.allclose(grads[name], gradients[name], rtol=1e-4, atol=1e-6 * largest) for name in grads)


def test_an_input_that_needs_a_gradient_gets_it() -> None:
    """The merger of GLM-4V is such a convolution after other layers."""
    layer = torch.nn.Conv2d(6, 5, (2, 3), (2, 3)).double()
    pixels = torch.randn(2, 6, 4, 8, dtype=torch.double, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(pixels).square().sum(), pixels)
    with patch_products(layer), Convolutions() as convolutions:
        (gradient,) = torch.autograd.grad(layer(pixels).square().sum(), pixels)
    assert convolutions.count == 0 and torch.allclose(gradient, expected)


class Subclass(torch.nn.Conv2d):
    """A subclass may compute something else."""


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.Conv2d(4, 4, 2, 1),
        torch.nn.Conv2d(4, 4, 2, 2, padding=1),
        torch.nn.Conv2d(4, 4, 2, 2, dilation=2),
        torch.nn.Conv2d(4, 4, 2, 2, groups=2),
        torch.nn.Conv2d(4, 4, 1),
        torch.nn.Conv1d(4, 4, 2, 2),
        torch.nn.ConvTranspose2d(4, 4, 2, 2),
        Subclass(4, 4, 2, 2),
    ],
)
def test_other_convolutions_stay_as_they_are(layer: Any) -> None:
    with patch_products(layer, None), Convolutions() as convolutions:
        layer(torch.randn(1, 4, *[6] * (layer.weight.dim() - 2)))
    assert convolutions.count == 1


def test_adapters_and_layers_with_another_forward_stay_as_they_are() -> None:
    need("peft")
    from peft import LoraConfig, get_peft_model

    model = make_model("qwen3_vl")
    wrapped = get_peft_model(model, LoraConfig(target_modules=["proj"], r=2))
    hooked = torch.nn.Conv2d(4, 4, 2, 2)
    forward = vars(hooked)["forward"] = functools.partial(hooked.forward)
    before = {name for name, part in wrapped.named_modules() if "forward" in vars(part)}
    with patch_products(wrapped, hooked):
        assert vars(hooked)["forward"] is forward
        assert {name for name, part in wrapped.named_modules() if "forward" in vars(part)} == before
        with patch_products(torch.nn.Sequential(layer := torch.nn.Conv2d(4, 4, 2, 2))):
            assert "forward" in vars(layer)
