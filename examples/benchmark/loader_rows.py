"""The samples of the `loader` benchmark: text rows, image rows, and their collator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import Qwen2VLImageProcessor

Item = dict[str, Any]

FILLERS = {"input_ids": 0, "attention_mask": 0, "labels": -100}
PIXEL_KEYS = ("pixel_values", "image_grid_thw")
VOCABULARY = 32000
IMAGE_TOKEN = VOCABULARY
PATCH_SIZE, MERGE_SIZE = 16, 2
"""Pixels of a patch's edge, patches of an image token's edge."""
PICTURE_PIXELS = {"shortest_edge": 64 * 64, "longest_edge": 384 * 384}


class TextRows(Dataset):
    """Rows as a tokenizer gives them: lists of ints, lengths lognormal, the first third not supervised."""

    def __init__(self, num_rows: int, *, median: float, longest: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(np.log(median), 0.9, num_rows), 8, longest).astype(int)
        self.ends = np.cumsum(lengths)
        self.ids = rng.integers(0, VOCABULARY, self.ends[-1], dtype=np.int32)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Item:
        return self.row(index)

    def row(self, index: int, image_tokens: int = 0) -> Item:
        start = self.ends[index - 1] if index else 0
        ids = [IMAGE_TOKEN] * image_tokens + self.ids[start : self.ends[index]].tolist()
        prompt = image_tokens + (len(ids) - image_tokens) // 3
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * prompt + ids[prompt:]}


class ImageRows(TextRows):
    """A picture and some text: light items, in which the picture is its path and its patches are counted."""

    def __init__(self, num_rows: int, pictures: Sequence[Path], **kwargs: Any):
        super().__init__(num_rows, **kwargs)
        self.pictures = pictures
        self.processor = make_processor()
        process(self.processor, [self[0]])  # what it imports at its first use, it imports before workers are forked

    def __getitem__(self, index: int) -> Item:
        path = self.pictures[index % len(self.pictures)]
        with Image.open(path) as picture:  # the header is read, no pixel
            width, height = picture.size
        patches = self.processor.get_number_of_image_patches(height, width, {})
        return self.row(index, patches // MERGE_SIZE**2) | {"image": str(path), "odb_n_patches": patches}


class ProcessedRows(Dataset):
    """The same rows as finished samples: every value a tensor, the pixels made."""

    def __init__(self, rows: TextRows):
        self.rows, self.processor = rows, getattr(rows, "processor", None)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        row = self.rows[index]
        item = {key: torch.tensor(row[key]) for key in FILLERS}
        if self.processor is not None:
            item |= process(self.processor, [row]) | {"odb_n_patches": row["odb_n_patches"]}
        return item


class Collator:
    """Pad a group; make its pixels, or put together those that its items bring."""

    def __init__(self, rows: TextRows):
        self.processor = getattr(rows, "processor", None)

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> Item:
        batch = {
            key: pad_sequence([torch.as_tensor(item[key]) for item in items], batch_first=True, padding_value=filler)
            for key, filler in FILLERS.items()
        }
        if "image" in items[0]:
            batch |= process(self.processor, items)
        elif "pixel_values" in items[0]:
            batch |= {key: torch.cat([item[key] for item in items]) for key in PIXEL_KEYS}
        return batch


def make_processor() -> Qwen2VLImageProcessor:
    """Qwen-VL's own, made from its configuration."""
    return Qwen2VLImageProcessor(patch_size=PATCH_SIZE, merge_size=MERGE_SIZE, size=PICTURE_PIXELS)


def process(processor: Qwen2VLImageProcessor, items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Decode the pictures of `items` and make their patches: `pixel_values` [patches, values of a patch]."""
    pictures = [Image.open(item["image"]).convert("RGB") for item in items]
    made = processor(images=pictures, return_tensors="pt")
    return {key: made[key] for key in PIXEL_KEYS}


def write_pictures(folder: Path, count: int, seed: int = 0) -> list[Path]:
    """Smooth coloured pictures of 128 to 448 pixels an edge, PNG and JPEG in turn."""
    rng = np.random.default_rng(seed)
    paths = [folder / f"{number}.{'jpg' if number % 2 else 'png'}" for number in range(count)]
    for path in paths:
        size = tuple(int(edge) for edge in rng.integers(128, 448, 2))
        Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize(size).save(path)
    return paths
