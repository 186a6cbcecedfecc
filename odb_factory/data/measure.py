"""Count what a mapping of model inputs costs: one processed sample or one collated batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from odb_factory.data.samples import Measured
from odb_factory.errors import DataError

IGNORE_INDEX = -100
GRID_KEYS = ("image_grid_thw", "video_grid_thw", "image_grid_hws", "spatial_shapes")
PIXEL_KEYS = ("pixel_values", "pixel_values_videos", "pixel_values_images")
AUDIO_KEYS = ("feature_attention_mask", "input_features_mask")
"""Masks [clips, frames] of the spectrograms of audio."""
FRAMES_PER_PATCH = 2
"""Spectrogram frames (10 ms each) that count as one patch: what the encoders make a position of, or fewer."""
DEFAULT_PATCH_SIZE = 14
Measure = Callable[[Mapping[str, Any], int, tuple[int, ...]], Measured]
"""`measure_batch`, or what counts other units."""


def count_patches(inputs: Mapping[str, Any], patch_size: int = DEFAULT_PATCH_SIZE) -> int:
    """Vision-tower input patches in `inputs`, and for audio a patch for each two frames of its spectrogram.

    From the patch grids where there are any ([media, 2 or 3], their products); else from the size of the pixel
    tensors, one patch being 3 x patch_size x patch_size values, without what towers leave out of them: where there
    are `image_sizes`, the padding of images to the largest, and of their tiles to the most.
    """
    grids = [inputs[key] for key in GRID_KEYS if inputs.get(key) is not None]
    if grids:
        patches = sum(
            int(np.asarray(grid).reshape(-1, np.shape(grid)[-1]).prod(-1).sum()) for grid in grids if len(grid)
        )
    else:
        present = {key: inputs[key] for key in PIXEL_KEYS if inputs.get(key) is not None}
        sizes = inputs.get("image_sizes")
        values = sum(_numel(pixels) - _num_padding(key, pixels, sizes) for key, pixels in present.items())
        patches = values // (3 * patch_size * patch_size)
    return patches + _count_audio(inputs, is_packed=bool(grids))


def _num_padding(key: str, pixels: Any, sizes: Any) -> int:
    """Values of a tensor of images that the tower does not see."""
    if key != "pixel_values" or sizes is None or not isinstance(pixels, Tensor):
        return 0
    if pixels.dim() == 4:  # [images, 3, height, width], of which `sizes` [images, 2] are real
        return pixels.numel() - 3 * int(np.asarray(sizes).reshape(-1, 2).prod(-1).sum())
    if pixels.dim() == 5:  # [images, tiles, 3, height, width]: tiles that are not there are all zeros
        suspects = pixels[pixels[:, :, 0, 0, 0] == 0]
        return sum(not tile.any() for tile in suspects) * math.prod(pixels.shape[2:])
    return 0


def _count_audio(inputs: Mapping[str, Any], is_packed: bool) -> int:
    """is_packed: the model takes media without padding, as those with patch grids do; others compute it."""
    for key in AUDIO_KEYS:
        if inputs.get(key) is not None:
            mask = np.asarray(inputs[key])
            frames = mask.sum(-1) if is_packed else np.full(len(mask), mask.shape[-1])
            return int((-(-frames // FRAMES_PER_PATCH)).sum())
    return 0


def count_supervised(labels: Any) -> int:
    """Labels that carry loss in `labels` ([length] or [rows, length]): the first of a row predicts nothing."""
    if is_ints(labels):
        return len(labels) - 1 - labels.count(IGNORE_INDEX) + (labels[0] == IGNORE_INDEX)
    array = np.asarray(labels)
    _check_labels(array.shape, 1)
    return int((array[..., 1:] != IGNORE_INDEX).sum())


def has_leading_label(labels: Any) -> bool:
    """Whether the first of the labels ([length] or [1, length]) is one, though nothing predicts it."""
    first = labels[0] if is_ints(labels) else np.asarray(labels).reshape(-1)[:1]
    return bool(np.any(np.asarray(first) != IGNORE_INDEX)) and np.size(first) > 0


def is_ints(values: Any) -> bool:
    """Whether this is a list of ints as a tokenizer gives it, to be counted as it is: as an array it takes longer."""
    return isinstance(values, list) and bool(values) and isinstance(values[0], int)


def batch_shape(batch: Any) -> tuple[int, int]:
    """(rows, length) of a collated batch. Raises `TypeError` where it is none."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise TypeError(
            f"collate_fn must return a mapping with `input_ids` [rows, length], it returned {describe_batch(batch)}"
        )
    rows, length = batch["input_ids"].shape[:2]
    return rows, length


def describe_batch(batch: Any) -> str:
    """What a collator returned, for messages."""
    return f"the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"


def measure_batch(
    batch: Mapping[str, Any], patch_size: int = DEFAULT_PATCH_SIZE, segments: tuple[int, ...] = ()
) -> Measured:
    """Measure a collated batch with `input_ids` [rows, length] and, if any, `labels` of the same shape.

    segments: of a flat one.
    """
    rows, length = batch_shape(batch)
    labels = batch.get("labels")
    if labels is not None:
        _check_labels(np.shape(labels), 2)
    return Measured(
        rows=rows,
        length=length,
        patches=count_patches(batch, patch_size),
        units=0 if labels is None else count_supervised(labels),
        segments=segments,
    )


def _check_labels(shape: tuple[int, ...], least: int) -> None:
    if len(shape) < least:
        raise DataError(
            f"labels of shape {list(shape)}: odb trains causal language models, with one label for each token of "
            "`input_ids` (-100 where no loss is wanted); another loss needs a loop of its own with cost_fn=..."
        )


def _numel(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_numel, value))
    return int(np.prod(np.shape(value)))
