"""What gpu.py trains: models made from their configurations, and samples made to a profile of lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from simulation import LONGEST, SHORTEST, WORKLOADS
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2Config, Qwen3VLConfig

VOCABULARY = 151936  # tokens, of the real models
WORDS = 997  # tokens that the samples are made of
SHORT_SCALE = 16  # lengths of `--short` are so much shorter
IMAGE_SHARE = 0.5  # of the tokens of a sample that has a picture
PROFILES_WITH_IMAGES = ("LLaVA", "ShareGPT4o", "MM-Mix")
MERGE_SIZE = 2  # a picture's token is MERGE_SIZE x MERGE_SIZE patches
PATCH_VALUES = 3 * 2 * 16 * 16  # colours, frames, height, width

Batch = dict[str, torch.Tensor]
Sample = dict[str, torch.Tensor]
"""input_ids [length], labels [length], and of a sample with a picture image_grid_thw [1, 3] (patches)."""


def _qwen3_vl(is_short: bool) -> Qwen3VLConfig:
    text, vision = (
        {
            "hidden_size": 2048,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 6144,
            "vocab_size": VOCABULARY,
            "rope_theta": 5e6,
            "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        },
        {
            "depth": 24,
            "hidden_size": 1024,
            "num_heads": 16,
            "intermediate_size": 4096,
            "out_hidden_size": 2048,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    )
    ids = {}
    if is_short:
        small = {"hidden_size": 64, "intermediate_size": 128}
        text |= small | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        text |= {"vocab_size": 1024, "rope_scaling": text["rope_scaling"] | {"mrope_section": [4, 2, 2]}}
        vision |= small | {"depth": 2, "num_heads": 4, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        ids = dict(zip(names, range(1020, 1024)))
    # The tied head is that of the outer configuration in some releases and of the inner one in others.
    text |= {"tie_word_embeddings": True}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)


def _text(is_short: bool) -> Qwen2Config:
    large = {"hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864, "vocab_size": VOCABULARY}
    small = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 1024}
    heads = {"num_attention_heads": 4 if is_short else 14, "num_key_value_heads": 2}
    return Qwen2Config(**(small if is_short else large), **heads, rope_theta=1e6, tie_word_embeddings=True)


MODELS = {
    "qwen3-vl-2b": (_qwen3_vl, AutoModelForImageTextToText),
    "text-0.5b": (_text, AutoModelForCausalLM),
}
"""Qwen3-VL-2B, and Qwen2.5-0.5B; their weights are random."""


def build_model(name: str, device: torch.device, is_short: bool) -> nn.Module:
    """In bfloat16, with gradient checkpointing."""
    make_config, auto_class = MODELS[name]
    torch.manual_seed(0)
    with device:
        model = auto_class.from_config(make_config(is_short), dtype=torch.bfloat16, attn_implementation="sdpa")
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def make_samples(profile: str, count: int, config: Any, seed: int, is_short: bool) -> list[Sample]:
    """Lengths after the profile; text that a model can learn, behind a picture where profile and model have one."""
    rng, scale = np.random.default_rng(seed), SHORT_SCALE if is_short else 1
    lengths = np.clip(WORKLOADS[profile](rng, count), SHORTEST, LONGEST).astype(int)
    lengths = np.maximum(lengths // scale, SHORTEST)
    has_images = hasattr(config, "vision_config") and profile in PROFILES_WITH_IMAGES
    samples = []
    for length in lengths:
        before, sample = [], {}
        if has_images:
            height = int((length * IMAGE_SHARE) ** 0.5)
            width = int(length * IMAGE_SHARE) // height
            before = [
                config.vision_start_token_id,
                *[config.image_token_id] * (height * width),
                config.vision_end_token_id,
            ]
            sample["image_grid_thw"] = torch.tensor([[1, height * MERGE_SIZE, width * MERGE_SIZE]])
        # A word tells the next one, but for one time in ten.
        words, surprises = rng.integers(WORDS, size=length - len(before)), rng.random(length - len(before)) < 0.1
        for k in range(1, len(words)):
            if not surprises[k]:
                words[k] = (5 * words[k - 1] + 7) % WORDS
        ids = torch.tensor([*before, *words.tolist()])
        labels = ids.clone()
        labels[: len(before)] = -100
        samples.append(sample | {"input_ids": ids, "labels": labels})
    return samples


class Collator:
    """Pads to the longest row, rounded up to eight tokens; with three-dimensional positions for a model of pictures."""

    pad_to_multiple_of = 8

    def __init__(self, has_grid_positions: bool):
        self.has_grid_positions = has_grid_positions

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        multiple = self.pad_to_multiple_of
        length = -(-max(len(sample["input_ids"]) for sample in samples) // multiple) * multiple
        batch = {
            "input_ids": torch.zeros(len(samples), length, dtype=torch.long),
            "labels": torch.full((len(samples), length), -100),
            "attention_mask": torch.zeros(len(samples), length, dtype=torch.long),
        }
        if self.has_grid_positions:
            batch["position_ids"] = torch.ones(3, len(samples), length, dtype=torch.long)
        for row, sample in enumerate(samples):
            own = len(sample["input_ids"])
            batch["input_ids"][row, :own] = torch.as_tensor(sample["input_ids"])
            batch["labels"][row, :own] = torch.as_tensor(sample["labels"])
            batch["attention_mask"][row, :own] = 1
            if self.has_grid_positions:
                batch["position_ids"][:, row, :own] = grid_positions(own, sample.get("image_grid_thw"))
        grids = [torch.as_tensor(sample["image_grid_thw"]) for sample in samples if "image_grid_thw" in sample]
        if grids:
            batch["image_grid_thw"] = torch.cat(grids)
        return batch


def grid_positions(length: int, grid: Any) -> torch.Tensor:
    """[3, length]: time, height and width of each token; behind its picture text goes on from the larger side."""
    if grid is None:
        return torch.arange(length).expand(3, -1)
    height, width = (int(side) // MERGE_SIZE for side in grid[0][1:])
    picture = torch.stack(
        [
            torch.zeros(height * width, dtype=torch.long),
            torch.arange(height).repeat_interleave(width),
            torch.arange(width).repeat(height),
        ]
    )
    after = torch.arange(length - 1 - height * width) + 1 + max(height, width)
    return torch.cat([torch.zeros(3, 1, dtype=torch.long), picture + 1, after.expand(3, -1)], dim=1)


def padded_tokens(batch: Batch) -> int:
    return batch["input_ids"].numel()


def num_patches(batch: Batch) -> int:
    return int(batch["image_grid_thw"].prod(-1).sum()) if "image_grid_thw" in batch else 0


def training_flops(model: nn.Module, samples: Sequence[Sample]) -> float:
    """Floating-point operations of forward and backward of these samples without padding or recomputation.

    Forward: two for each weight of a linear layer and each token (patch, in the vision tower) that passes it, the head
    included and the embedding not; attention four for each pair of positions and each value of all heads, of which a
    causal one has half. Backward: twice the forward.
    """
    weights = {"text": 0, "vision": 0, "merger": 0}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv3d):
            part = "merger" if "merger" in name else "vision" if "visual" in name else "text"
            weights[part] += module.weight.numel()
    text = model.config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    lengths = np.array([len(sample["input_ids"]) for sample in samples], float)
    patches = np.array([num_patches(sample) for sample in samples], float)
    forward = 2 * weights["text"] * lengths.sum()
    forward += 2 * text.num_hidden_layers * text.num_attention_heads * head_dim * (lengths**2).sum()
    if patches.any():
        vision = model.config.vision_config
        forward += 2 * (weights["vision"] + weights["merger"] / MERGE_SIZE**2) * patches.sum()
        forward += 4 * vision.depth * vision.hidden_size * (patches**2).sum()
    return 3 * forward
