"""Rows as bytes, the counts of a batch, which are those of the model, and `flatten`, which lays a batch flat (I10)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import llamafactory.extras.packages  # noqa: F401  (must be imported before trl's other trainers)
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, DataCollatorWithFlattening
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as TRLCollator

from odb_factory.data.collate import CollatedDataset
from odb_factory.data.flat import flatten
from odb_factory.data.observe import VIDEO_KEYS, count_media, count_supervised, measure_batch
from odb_factory.data.samples import Measured, Sample, fingerprint, pack, unpack
from odb_factory.errors import DataError, LayoutError
from odb_factory.planner import Budget, Collation, Cost, Media

IGNORE = -100
DUMMY = 90

# Rows as bytes


class Pair(NamedTuple):
    series: Any
    target: Any


@pytest.mark.parametrize("wrap", [lambda x: {"x": x}, lambda x: {"x": [x], "odd": range(3)}, lambda x: Pair(x, 1)])
def test_a_view_is_sent_without_its_base(wrap: Callable[[Any], Any]) -> None:
    """Also in objects that only pickle can write."""
    whole = torch.arange(1000.0)
    assert len(pack(wrap(whole[:10]))) < len(pack({"x": whole})) / 4
    assert str(unpack(pack(wrap(whole[10:20])))) == str(wrap(whole[10:20]))


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_the_fingerprint_of_a_row_depends_on_whole_numbers_and_texts(kind: Any) -> None:
    def of(ids: list[Any], **more: Any) -> int:
        return fingerprint([3, {"input_ids": kind(ids), **more}])

    row = of([1, 2, 3], text="a", pixels=torch.zeros(2))
    assert of([1, 2, 3], pixels=torch.ones(2), text="a") == row, "augmentation may change pixels"
    assert len({row, of([1, 2, 4], text="a"), of([1, 2, 3], text="b"), of([[1], [2]]), of([1, 2])}) == 5


# Counts

GRIDS = [[1, 4, 6], [2, 4, 4]]  # 24 + 32 patches
PIXELS = torch.zeros(2, 3, 28, 42)
"""Two images of 2 x 3 patches."""
NESTED = [PIXELS, PIXELS.numpy(), PIXELS[None], list(PIXELS), [[image.numpy()] for image in PIXELS], tuple(PIXELS)]

PIXTRAL = {"pixel_values": torch.ones(2, 3, 28, 42), "image_sizes": torch.tensor([[28, 42], [14, 28]])}
TILES = torch.zeros(2, 3, 3, 28, 14)
TILES[0, :, 0, 0, 0] = TILES[1, 0, 2, 27, 13] = 1  # a tile may be black in part
FRAMES = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
MASKS: list[Any] = [torch.as_tensor, np.asarray, torch.Tensor.bool]


@pytest.mark.parametrize(
    ("inputs", "expected"),
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
        # Padding is not counted: Pixtral's tower takes 28 x 42 and 14 x 28 pixels of two images,
        (PIXTRAL, Media(6 + 2)),
        (PIXTRAL | {"pixel_values_videos": torch.ones(1, 4, 3, 14, 14)}, Media(6 + 2, 4)),
        # LLaVA-NeXT's three tiles of the first image and one of the second.
        ({"pixel_values": TILES, "image_sizes": torch.tensor([[50, 60], [20, 20]])}, Media(4 * 2)),
        ({"pixel_values": TILES}, Media(6 * 2)),
        # Frames of audio are counted in pairs, with padding except for models with patch grids.
        *(({"feature_attention_mask": kind(FRAMES)}, Media(audio_frames=20)) for kind in MASKS),
        *(({"input_features_mask": kind(FRAMES), "pixel_values": torch.ones(1, 3, 14, 14)}, 11) for kind in MASKS),
        ({"feature_attention_mask": FRAMES, "image_grid_thw": torch.zeros(0, 3)}, Media(audio_frames=10 + 4)),
        ({"feature_attention_mask": FRAMES, "image_grid_thw": torch.tensor([[1, 4, 6]])}, Media(24, 0, 14)),
        ({"feature_attention_mask": None}, Media()),
    ],
)
def test_media_of_grids_pixels_or_masks(inputs: dict[str, Any], expected: int | Media) -> None:
    """Patches are the product of the grid, whatever holds the grids; without a grid they are counted from pixels."""
    count = count_media(inputs)
    assert expected in (count, count.patches)
    assert (count.video_patches > 0) == any(inputs.get(key) is not None for key in VIDEO_KEYS)
    assert all(type(size) is int for size in count)


@given(st.lists(st.sampled_from([IGNORE, 0, 7]), min_size=1, max_size=12))
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


# The flat layout


def items(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Samples whose tokens are all different; labels begin in the middle of a sample (a single token has its label)."""
    made = []
    for k, length in enumerate(lengths):
        ids = [100 * (k + 1) + t for t in range(length)]
        made.append({"input_ids": ids, "labels": [IGNORE] * (length // 2) + ids[length // 2 :]})
    return made


def collate(
    rows: list[dict[str, list[int]]], *, left: bool = False, dummy: int = 0, multiple: int = 1, mask: bool = True
) -> dict[str, torch.Tensor]:
    """Pad as LLaMA-Factory's collator does: dummy media follow the first row's tokens (padded left: precede them)."""
    length = max(len(row["input_ids"]) + (dummy if k == 0 else 0) for k, row in enumerate(rows))
    length = -(-length // multiple) * multiple

    def padded(values: list[int], extra: list[int], pad: int) -> list[int]:
        fill = [pad] * (length - len(values) - len(extra))
        return fill + extra + values if left else values + extra + fill

    extras = [list(range(DUMMY, DUMMY + dummy))] + [[] for _ in rows[1:]]
    columns = {
        "input_ids": [padded(row["input_ids"], extra, 0) for row, extra in zip(rows, extras)],
        "labels": [padded(row["labels"], [IGNORE] * len(extra), IGNORE) for row, extra in zip(rows, extras)],
        "attention_mask": [padded([1] * len(row["labels"]), [0] * len(extra), 0) for row, extra in zip(rows, extras)],
    }
    if not mask:
        del columns["attention_mask"]
    return {name: torch.tensor(values) for name, values in columns.items()}


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    left=st.booleans(),
    dummy=st.integers(0, 3),
    multiple=st.sampled_from([1, 4]),
    round_to=st.sampled_from([1, 8]),
    num_rotary=st.sampled_from([0, 3, 4]),
    mask=st.booleans(),
    with_boundaries=st.booleans(),
)
def test_a_flat_row_has_the_tokens_without_padding(
    lengths: list[int],
    left: bool,
    dummy: int,
    multiple: int,
    round_to: int,
    num_rotary: int,
    mask: bool,
    with_boundaries: bool,
) -> None:
    """mask: the batch has an `attention_mask`; without it the lengths say where padding begins, on the right."""
    left, rows = left and mask, items(lengths)
    for row in rows if left else ():
        row["labels"][0] = IGNORE  # padding would predict it
    batch: dict[str, Any] = collate(rows, left=left, dummy=dummy, multiple=multiple, mask=mask)
    shape = batch["input_ids"].shape
    batch["token_type_ids"] = batch["input_ids"] % 7
    batch["pixel_values"] = torch.randn(len(rows), shape[1])  # has the shape of tokens
    batch["image_grid_thw"] = torch.ones(shape, dtype=torch.long)
    batch["rope_deltas"] = torch.zeros(len(rows), 1)
    if num_rotary:
        batch["position_ids"] = torch.arange(num_rotary * shape.numel()).view(num_rotary, *shape)
    before = copy.deepcopy(batch)
    flat, segments = flatten(batch, lengths, dummy, round_to, with_boundaries)

    total = sum(lengths) + dummy
    fill = -total % round_to
    assert segments.lengths == tuple(n for n in (*lengths, dummy, fill) if n)
    budget = Budget(1, collation=Collation(1, dummy), layout="flat", pad_to_multiple_of=round_to)
    assert (1, sum(segments.lengths)) == budget.shape([Cost(length, has_media=not dummy) for length in lengths])[:2]
    dummies = list(range(DUMMY, DUMMY + dummy))
    ids = [token for row in rows for token in row["input_ids"]] + dummies
    assert flat["input_ids"].tolist()[0][:total] == ids
    supervised = {token for row in rows for token in row["labels"]} - {IGNORE}
    assert set(flat["input_ids"][0, total:].tolist()) <= (supervised or set(ids))
    labels = [label for row in rows for label in [IGNORE, *row["labels"][1:]]]
    assert flat["labels"].tolist() == [labels + [IGNORE] * (dummy + fill)]
    assert flat["token_type_ids"].tolist() == [[token % 7 for token in ids] + [0] * fill]
    text = torch.tensor([[t for n in segments.lengths for t in range(n)]])
    if num_rotary:
        starts = [shape[1] - n if left else 0 for n in lengths]
        places = [(k, t) for k, (start, n) in enumerate(zip(starts, lengths)) for t in range(start, start + n)]
        places += [(0, starts[0] - dummy + t if left else lengths[0] + t) for t in range(dummy)]
        rotary = [[int(ids[k, t]) for k, t in places] + list(range(fill)) for ids in before["position_ids"][-3:]]
        assert flat["position_ids"].tolist() == [text.tolist(), *[[row] for row in rotary]]
    else:
        assert torch.equal(flat["position_ids"], text)
    assert flat["pixel_values"] is batch["pixel_values"] and flat["image_grid_thw"] is batch["image_grid_thw"]
    assert not {"attention_mask", "rope_deltas"} & flat.keys()
    assert ("cu_seq_lens_q" in flat) == with_boundaries
    for side in "qk" if with_boundaries else "":
        ends = flat[f"cu_seq_lens_{side}"]
        assert ends.dtype == torch.int32 and ends.diff().tolist() == list(segments.lengths) and ends[0] == 0
        assert flat[f"max_length_{side}"] == max(segments.lengths)
    assert batch.keys() == before.keys() and all(torch.equal(batch[key], before[key]) for key in batch), "pure"


def _changed(**values: Any) -> dict[str, Any]:
    return collate(items([3, 5])) | values


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        (_changed(cross_attention_mask=torch.ones(2, 5, 1, 4)), "`cross_attention_mask` [2, 5, 1, 4]"),
        (_changed(aspect_ratio_ids=torch.ones(2, 1)), "`aspect_ratio_ids` [2, 1]"),
        (_changed(image_bound=[[], []]), "`image_bound` (list)"),
        (_changed(pixel_attention_mask=torch.ones(2, 1, 28, 28)), "`pixel_attention_mask` [2, 1, 28, 28]"),
        (_changed(data={"input_ids": torch.ones(2, 5)}), "`data` (dict)"),
        (_changed(kl_weights=torch.ones(2)), "`kl_weights` [2]"),
        (_changed(position_ids=torch.ones(2, 2, 5)), "`position_ids` [2, 2, 5]"),
        (_changed(labels=torch.ones(2)), "`labels` [2]"),
        (_changed(attention_mask=torch.tensor([[1] * 5, [1, 0, 1, 1, 1]])), "row 71: "),
        (_changed(position_ids=torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 9, 10]])), "row 71: "),
        (collate(items([3, 5])[::-1]) | {"attention_mask": torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])}, "row 71: "),
        (collate([{"input_ids": [7], "labels": [7]}, *items([5])], left=True), "row 70: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_samples_that_cannot_be_laid_flat(batch: dict[str, Any], named: str) -> None:
    """`flat` refuses them, and no row is at fault; `auto` keeps the batch as the collator made it."""
    samples = [Sample(70 + k, Cost(n), pack({"input_ids": [1] * n})) for k, n in enumerate((3, 5))]
    groups = CollatedDataset(lambda rows: dict(batch), 14, Budget(1, layout="flat"), counts_labels=False)
    with pytest.raises(LayoutError) as refused:
        groups.salvage(samples)
    failed, measured, collated = replace(groups, falls_back=True).salvage(samples)
    assert not failed and measured is not None
    assert collated == batch and measured.segments == ()
    for message in (str(refused.value), measured.why_padded):
        assert named in message and "\n" not in message


@pytest.mark.parametrize(
    ("batch", "tokens", "dummy", "row"),
    [
        (collate(items([3, 5])), [3, 5, 4], 0, None),
        (collate(items([3, 5]), mask=False), [3, 6], 0, 1),
        (collate(items([3, 5]), mask=False, left=True), [3, 5], 0, 0),
        (collate(items([3, 5]), mask=False), [2, 5], 0, 0),
        (_changed(position_ids=torch.arange(10).view(2, 5)), [3, 5], 0, 1),
        (collate(items([8])), [3, 6], 0, None),
        (collate(items([8]), multiple=16), [3, 6], 0, None),
        (collate(items([8])) | {"position_ids": torch.arange(8)[None]}, [3, 5], 0, 1),
        (collate([{"input_ids": [], "labels": []}, *items([3])]), [1, 3], 0, 0),
        (collate(items([5, 3])), [5, 3], 2, None),
    ],
)
def test_a_batch_of_other_tokens_is_refused(
    batch: dict[str, Any], tokens: list[int], dummy: int, row: int | None
) -> None:
    with pytest.raises(LayoutError) as refused:
        flatten(batch, tokens, dummy)
    assert refused.value.row == row and "\n" not in str(refused.value)


def test_collators_that_lay_flat_themselves_give_the_same_rows(tiny_text: Path) -> None:
    """transformers' `DataCollatorWithFlattening`, TRL's `padding_free=True`, and padded left and right."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_text)
    tokens = [4, 1, 6]
    batches: dict[str, Any] = {}
    for side in ("left", "right"):
        tokenizer.padding_side = side
        rows = items(tokens)
        for row in rows:  # nothing predicts a first label, except padding
            row["labels"][0] = row["input_ids"][0] if side == "right" else IGNORE
        batches[side] = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)(copy.deepcopy(rows))
    batches["transformers"] = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(copy.deepcopy(rows))
    batches["TRL"] = TRLCollator(pad_token_id=0, padding_free=True)(copy.deepcopy(rows))
    assert [len(batch["input_ids"]) for batch in batches.values()] == [3, 3, 1, 1]
    flats = {name: flatten(batch, tokens) for name, batch in batches.items()}
    expected, _ = flats["left"]
    for name, (flat, segments) in flats.items():
        assert segments.lengths == (4, 1, 6), name
        for key in ("input_ids", "labels", "position_ids"):
            assert torch.equal(flat[key], expected[key]), (name, key)
        assert "attention_mask" not in flat
    assert flats["transformers"][0]["cu_seq_lens_q"].tolist() == [0, 4, 5, 11]


def test_tokens_that_a_flat_collator_adds_after_the_samples_are_a_segment() -> None:
    batch = TRLCollator(pad_token_id=0, padding_free=True, pad_to_multiple_of=8)(items([4, 6]))
    flat, segments = flatten(batch, [4, 6], pad_to_multiple_of=10)
    assert segments.lengths == (4, 6, 6, 4) and flat["input_ids"].shape == (1, 20)
    assert flat["position_ids"][0, 10:].tolist() == [*range(6), *range(4)]
    assert (flat["labels"][0, 10:] == IGNORE).all()
