"""Count what a mapping of model inputs costs: one processed sample or one collated batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from odb_factory.data.samples import Measured
from odb_factory.errors import DataError

IGNORE_INDEX = -100
GRID_KEYS = ("image_grid_thw", "video_grid_thw", "image_grid_hws", "spatial_shapes")
PIXEL_KEYS = ("pixel_values", "pixel_values_videos", "pixel_values_images")
DEFAULT_PATCH_SIZE = 14


def count_patches(inputs: Mapping[str, Any], patch_size: int = DEFAULT_PATCH_SIZE) -> int:
    """Vision-tower input patches in `inputs`.

    From the patch grids where there are any ([media, 2 or 3], their products); else from the size
    of the pixel tensors, one patch being 3 x patch_size x patch_size values.
    """
    grids = [inputs[key] for key in GRID_KEYS if inputs.get(key) is not None]
    if grids:
        return sum(int(np.asarray(grid).reshape(-1, np.shape(grid)[-1]).prod(-1).sum()) for grid in grids if len(grid))
    values = sum(_numel(inputs[key]) for key in PIXEL_KEYS if inputs.get(key) is not None)
    return values // (3 * patch_size * patch_size)


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
        found = f"the keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        raise TypeError(f"collate_fn must return a mapping with `input_ids` [rows, length], it returned {found}")
    rows, length = batch["input_ids"].shape[:2]
    return rows, length


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
            "`input_ids` (-100 where no loss is wanted); a classification head is not supported"
        )


def _numel(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_numel, value))
    return int(np.prod(np.shape(value)))
