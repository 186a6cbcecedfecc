"""A tiny vision-language model whose positions have three rows, and samples for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from training.flat_models import COMMON

IGNORE = -100
VOCABULARY, IMAGE, VIDEO, OPENS, CLOSES = 200, 150, 151, 152, 153
WORDS = (3, 140)
"""Ids of tokens that mean nothing in particular, from and up to."""
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2]}


@dataclass(frozen=True)
class Vision:
    """tokens: of an image. pixels: of so many images of 4 x 4 patches."""

    tokens: int
    config: Callable[[], Any]
    model: str
    pixels: Callable[[int], dict[str, Tensor]]


def _patches(count: int) -> dict[str, Tensor]:
    pixels = torch.randn(count * 16, 3 * 2 * 14 * 14, dtype=torch.float64)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(count, 1)}


VISION = {
    "qwen2_5_vl": Vision(
        4,
        lambda: transformers.Qwen2_5_VLConfig(
            text_config=COMMON
            | {"vocab_size": VOCABULARY, "attention_dropout": 0.0}
            | {"rope_scaling": MROPE | {"type": "mrope"}, "rope_parameters": MROPE | {"rope_theta": 10000.0}},
            vision_config={
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 24,
                "out_hidden_size": 32,
                "patch_size": 14,
                "window_size": 56,
                "fullatt_block_indexes": [1],
                "num_heads": 2,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=OPENS,
            vision_end_token_id=CLOSES,
        ),
        "Qwen2_5_VLForConditionalGeneration",
        _patches,
    )
}


@dataclass(frozen=True)
class Sample:
    """A sample: its tokens, its labels, and its images."""

    ids: list[int]
    labels: list[int]
    images: int = 0


@dataclass
class Drawn:
    """Draws samples, the same for the same seed."""

    seed: int = 0
    rng: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(self.seed)

    def words(self, count: int) -> list[int]:
        return torch.randint(*WORDS, (count,), generator=self.rng).tolist()

    def sample(self, question: int, answer: int, images: int = 0, tokens: int = 0) -> Sample:
        """images: pictures of so many tokens each between words, before the answer, which alone has labels."""
        asked = [token for _ in range(images) for token in (*self.words(2), OPENS, *[IMAGE] * tokens, CLOSES)]
        asked += self.words(question)
        said = self.words(answer)
        return Sample(asked + said, [IGNORE] * len(asked) + said, images)


def vision_model(family: str, attention: str) -> Any:
    """In float64, without dropout, its weights drawn anew: as made, attention would hardly matter."""
    vision = VISION[family]
    model = getattr(transformers, vision.model)._from_config(vision.config(), attn_implementation=attention)
    model = model.double().train()
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15, generator=generator)
    return model
