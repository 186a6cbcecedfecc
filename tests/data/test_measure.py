"""Counts are those of the model: patches of the vision tower, labels after the causal shift."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_factory.data.observe import IGNORE_INDEX, VIDEO_KEYS, count_media, count_supervised, measure_batch
from odb_factory.data.samples import Measured
from odb_factory.errors import DataError
from odb_factory.planner import Media

GRIDS = [[1, 4, 6], [2, 4, 4]]  # 24 + 32 patches
PIXELS = torch.zeros(2, 3, 28, 42)
"""Two images of 2 x 3 patches."""
NESTED = [PIXELS, PIXELS.numpy(), PIXELS[None], list(PIXELS), [[image.numpy()] for image in PIXELS], tuple(PIXELS)]


@pytest.mark.parametrize(
    ("inputs", "patches"),
    [
        ({}, 0),
        *(({"image_grid_thw": none}, 0) for none in (None, [], torch.empty(0, 3, dtype=torch.long))),
        *(({"image_grid_thw": kind(GRIDS)}, 56) for kind in (list, torch.tensor, np.array)),
        *(({"image_grid_thw": [kind(grid) for grid in GRIDS]}, 56) for kind in (torch.tensor, np.array)),
        ({"image_grid_thw": torch.tensor(GRIDS[0])}, 24),
        ({"image_grid_thw": torch.tensor(GRIDS), "video_grid_thw": torch.tensor([[8, 2, 2]])}, 88),
        ({"image_grid_thw": torch.empty(0, 3, dtype=torch.long), "video_grid_thw": [[8, 2, 2]]}, 32),
        ({"image_grid_hws": torch.tensor([[4, 6], [2, 2]])}, 28),
        ({"spatial_shapes": torch.tensor([[4, 6], [2, 2]])}, 28),
        ({"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 3)}, 0),
        *(({"pixel_values": none}, 0) for none in (None, [], [[]], (), torch.zeros(0, 3, 28, 42))),
        *(({"pixel_values": pixels}, 12) for pixels in NESTED),
        *(({"pixel_values_videos": pixels}, 12) for pixels in NESTED),
        ({"pixel_values_images": PIXELS}, 12),
        ({"pixel_values": torch.zeros(1, 3, 14, 14), "pixel_values_videos": torch.zeros(1, 4, 3, 14, 14)}, 5),
        # Flattened pixels carry a temporal axis twice; the grid is exact.
        ({"image_grid_thw": torch.tensor([[1, 4, 6]]), "pixel_values": torch.zeros(24, 3 * 2 * 14 * 14)}, 24),
    ],
)
def test_patches_of_grids_or_pixels(inputs: dict[str, Any], patches: int) -> None:
    """Patches are the product of the grid, whatever holds the grids; without a grid they are counted from pixels."""
    count = count_media(inputs)
    assert count.patches == patches
    assert (count.video_patches > 0) == any(inputs.get(key) is not None for key in VIDEO_KEYS)
    assert all(type(size) is int for size in count)


def test_padding_of_images_is_not_counted() -> None:
    """Pixtral: the tower takes 28 x 42 and 14 x 28 pixels of two images."""
    inputs = {"pixel_values": torch.ones(2, 3, 28, 42), "image_sizes": torch.tensor([[28, 42], [14, 28]])}
    assert count_media(inputs) == Media(6 + 2)
    assert count_media(inputs | {"pixel_values_videos": torch.ones(1, 4, 3, 14, 14)}) == Media(8, 4)


def test_padding_of_tiles_is_not_counted() -> None:
    """LLaVA-NeXT: three tiles of the first image, one of the second; a tile may be black in part."""
    pixels = torch.zeros(2, 3, 3, 28, 14)
    pixels[0, :, 0, 0, 0] = pixels[1, 0, 2, 27, 13] = 1
    assert count_media({"pixel_values": pixels, "image_sizes": torch.tensor([[50, 60], [20, 20]])}) == Media(4 * 2)
    assert count_media({"pixel_values": pixels}) == Media(6 * 2)


@pytest.mark.parametrize("make", [torch.as_tensor, np.asarray, torch.Tensor.bool])
def test_frames_of_audio_are_counted_in_pairs(make: Any) -> None:
    """With padding, except for models with patch grids, which take media without padding."""
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    assert count_media({"feature_attention_mask": make(mask)}) == Media(audio_frames=10 + 10)
    assert count_media({"input_features_mask": make(mask), "pixel_values": torch.ones(1, 3, 14, 14)}).patches == 11
    packed = {"feature_attention_mask": make(mask), "image_grid_thw": torch.zeros(0, 3, dtype=torch.long)}
    assert count_media(packed) == Media(audio_frames=10 + 4)
    assert count_media(packed | {"image_grid_thw": torch.tensor([[1, 4, 6]])}) == Media(24, 0, 14)
    assert count_media({"feature_attention_mask": None}) == Media()


@given(st.lists(st.sampled_from([IGNORE_INDEX, 0, 7]), min_size=1, max_size=12))
def test_units_are_the_labels_that_the_mean_loss_counts(labels: list[int]) -> None:
    """I8: in torch's cross entropy, the sum of the losses over their mean is the count."""
    logits = torch.randn(len(labels), 8, generator=torch.Generator().manual_seed(0))
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(labels)[1:], reduction=reduction).item()
        for reduction in ("sum", "mean")
    ]
    count = count_supervised(labels)
    assert count == count_supervised(np.array(labels)) == count_supervised(torch.tensor([labels]))
    assert losses[0] == pytest.approx(count * losses[1]) if count else losses[0] == 0


def test_a_collated_batch_is_measured_as_it_is() -> None:
    batch = {
        "input_ids": torch.ones(2, 5, dtype=torch.long),
        "labels": torch.tensor([[1, 1, 1, -100, -100], [-100, 1, 1, 1, 1]]),
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
    }
    assert measure_batch(batch) == Measured(rows=2, length=5, media=Media(24), units=6, units_by_row=(2, 4))
    assert measure_batch(batch).num_supervised == 6
    row = torch.tensor([[-100, 1, -100, 1, 1, -100, -100]])
    assert measure_batch({"input_ids": row, "labels": row}, segments=(2, 3, 2)).units_by_row == (1, 2, 0)
    batch = {"input_ids": torch.ones(1, 5), "pixel_values": torch.zeros(1, 3, 16, 16)}
    assert measure_batch(batch, patch_size=8) == Measured(rows=1, length=5, media=Media(4), units=0)
    row = torch.tensor([[-100, 5, -1, 7]])
    with pytest.raises(DataError):  # stock's loss has no class -1; the loss without logits would take it for a token
        measure_batch({"input_ids": row, "labels": row})
