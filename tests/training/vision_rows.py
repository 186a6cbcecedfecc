"""A tiny vision-language model with three rows of positions (mrope), and samples for it."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from training.flat_models import COMMON

IGNORE = -100
VOCABULARY, IMAGE, VIDEO, OPENS, CLOSES = 200, 150, 151, 152, 153
WORDS = (3, 140)
"""Ids of plain tokens, from and up to."""
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2]}


def picture_row(k: int) -> dict[str, Any]:
    """Every other row has a picture of 4 tokens (4 x 4 patches). Only the answer has labels."""
    generator = torch.Generator().manual_seed(k)

    def words(count: int) -> list[int]:
        return torch.randint(*WORDS, (count,), generator=generator).tolist()

    question = [*words(2), OPENS, *[IMAGE] * 4, CLOSES] if k % 2 else []
    question += words(2 + k % 7)
    answer = words(3 + k * 5 % 20)
    ids = question + answer
    row = {"k": k, "input_ids": ids, "labels": [IGNORE] * len(question) + answer, "attention_mask": [1] * len(ids)}
    if k % 2:
        row["pixel_values"] = torch.randn(16, 3 * 2 * 14 * 14, generator=generator)
        row["image_grid_thw"] = torch.tensor([[1, 4, 4]])
    return row


def vision_model() -> Any:
    """The weights are larger than transformers makes them: with small weights attention would hardly matter."""
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "num_heads": 2}
    vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(
        text_config=COMMON
        | {"vocab_size": VOCABULARY, "attention_dropout": 0.0}
        | {"rope_scaling": MROPE | {"type": "mrope"}, "rope_parameters": MROPE | {"rope_theta": 10000.0}},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=OPENS,
        vision_end_token_id=CLOSES,
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    for part in (model.config, model.config.get_text_config()):
        part.use_cache = False
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15, generator=generator)
    return model.train()
