"""Tiny vision-language models in float64, and padded batches for them as LLaMA-Factory's collator makes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from training.flat_models import COMMON, HEAD, SLIDING

IGNORE = -100
VOCABULARY, IMAGE, VIDEO, OPENS, CLOSES = 200, 150, 151, 152, 153
WORDS = (3, 140)
"""Ids of tokens that mean nothing in particular, from and up to."""

_TEXT: dict[str, Any] = COMMON | HEAD | {"vocab_size": VOCABULARY, "attention_dropout": 0.0}


@dataclass(frozen=True)
class Vision:
    """A vision-language family. tokens: of an image. rows_of_positions: of mrope; 0 where the collator gives none."""

    tokens: int
    config: Callable[[], Any]
    model: str
    pixels: Callable[[int], dict[str, Tensor]]
    rows_of_positions: int = 0
    marks_images: bool = False


def _images(count: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, 28, 28, dtype=torch.float64)}


def _patches(size: int) -> Callable[[int], dict[str, Tensor]]:
    """Of images of 4 x 4 patches of `size` pixels, in frames of two."""

    def make(count: int) -> dict[str, Tensor]:
        pixels = torch.randn(count * 16, 3 * 2 * size * size, dtype=torch.float64)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(count, 1)}

    return make


_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "num_channels": 3,
}
_NO_HEAD = {key: value for key, value in _TEXT.items() if key != "head_dim"}
_MROPE = {
    "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]},
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
}
_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": OPENS, "vision_end_token_id": CLOSES}
_GRID = {"num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}

# One family for each way to tell a model where images stand: positions of three rows and of four, none, marks.
VISION: dict[str, Vision] = {
    "qwen2_5_vl": Vision(
        4,
        lambda: transformers.Qwen2_5_VLConfig(
            text_config=_NO_HEAD | _MROPE,
            vision_config={
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 24,
                "out_hidden_size": 32,
                "patch_size": 14,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            }
            | _GRID,
            **_IDS,
        ),
        "Qwen2_5_VLForConditionalGeneration",
        _patches(14),
        rows_of_positions=3,
    ),
    "qwen3_vl": Vision(
        4,
        lambda: transformers.Qwen3VLConfig(
            text_config=_TEXT | _MROPE,
            vision_config={
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 24,
                "out_hidden_size": 32,
                "patch_size": 16,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            }
            | _GRID,
            **_IDS,
        ),
        "Qwen3VLForConditionalGeneration",
        _patches(16),
        rows_of_positions=4,
    ),
    "llava": Vision(
        4,
        lambda: transformers.LlavaConfig(
            text_config={"model_type": "llama"} | _TEXT,
            vision_config={"model_type": "clip_vision_model"} | _TOWER,
            image_token_id=IMAGE,
            image_token_index=IMAGE,
            vision_feature_select_strategy="default",
            vision_feature_layer=-1,
        ),
        "LlavaForConditionalGeneration",
        _images,
    ),
    "gemma3": Vision(
        4,
        lambda: transformers.Gemma3Config(
            text_config={"query_pre_attn_scalar": 8} | SLIDING | _TEXT,
            vision_config={"model_type": "siglip_vision_model"} | _TOWER,
            mm_tokens_per_image=4,
            image_token_id=IMAGE,
            image_token_index=IMAGE,
        ),
        "Gemma3ForConditionalGeneration",
        _images,
        marks_images=True,
    ),
}


@dataclass(frozen=True)
class Sample:
    """A sample: its tokens, its labels, and its images."""

    ids: list[int]
    labels: list[int]
    images: int = 0


@dataclass(frozen=True)
class Case:
    """A padded batch, and what `flatten` is told of it. dummy: tokens of the dummy image that the first row holds."""

    batch: dict[str, Tensor]
    tokens: list[int]
    has_media: bool
    dummy: int = 0


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


def prepared(model: Any, attention: str) -> Any:
    """In float64, for training, without dropout, its weights drawn anew: as made, attention would hardly matter."""
    model = model.double().train()
    for config in {id(one): one for one in (model.config, model.config.get_text_config())}.values():
        config.use_cache = False
        config._experts_implementation = "eager"  # the grouped kernel knows no float64
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15, generator=generator)
    set_attention(model, attention)
    return model


def set_attention(model: Any, attention: str) -> None:
    """Of the language model, by the name of an attention function."""
    model.config.get_text_config()._attn_implementation = attention


def vision_model(family: str, attention: str) -> Any:
    vision = VISION[family]
    made = getattr(transformers, vision.model)._from_config(vision.config(), attn_implementation="sdpa")
    return prepared(made, attention)


def vision_case(family: str, model: Any, samples: Sequence[Sample]) -> Case:
    """As LLaMA-Factory does it: where no sample has an image, the first row is given one, masked, behind its tokens."""
    vision = VISION[family]
    images = sum(sample.images for sample in samples)
    dummy = [] if images else [OPENS, *[IMAGE] * vision.tokens, CLOSES]
    torch.manual_seed(1)
    batch = _padded(samples, dummy) | vision.pixels(images or 1)
    marks = (batch["input_ids"] == IMAGE).long()
    if vision.marks_images:
        batch["token_type_ids"] = marks
    if vision.rows_of_positions:
        get_rope_index = model.model.get_rope_index
        known = inspect.signature(get_rope_index).parameters
        given = {key: batch.get(key) for key in ("input_ids", "image_grid_thw", "attention_mask")}
        positions, _ = get_rope_index(**given, **({"mm_token_type_ids": marks} if "mm_token_type_ids" in known else {}))
        if vision.rows_of_positions == 4:  # 0.9.5 puts the temporal row in front
            positions = torch.cat([positions[:1], positions])
        batch["position_ids"] = positions
        batch["rope_deltas"] = torch.zeros(len(samples), 1)
    return Case(batch, [len(sample.ids) for sample in samples], bool(images), len(dummy))


def _padded(samples: Sequence[Sample], dummy: Sequence[int] = ()) -> dict[str, Tensor]:
    """Right, to a multiple of 8; one sample alone not at all."""
    length = max(len(sample.ids) + (len(dummy) if k == 0 else 0) for k, sample in enumerate(samples))
    if len(samples) > 1:
        length = -(-length // 8) * 8
    shape = (len(samples), length)
    ids, mask, labels = torch.zeros(shape).long(), torch.zeros(shape).long(), torch.full(shape, IGNORE)
    for k, sample in enumerate(samples):
        count = len(sample.ids)
        ids[k, :count], labels[k, :count] = torch.tensor(sample.ids), torch.tensor(sample.labels)
        mask[k, :count] = 1
    if dummy:
        first = len(samples[0].ids)
        ids[0, first : first + len(dummy)] = torch.tensor(dummy)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
