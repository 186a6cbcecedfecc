"""I10: `flatten`, a pure function, lays a collated batch flat; real collators at the end."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import llamafactory.extras.packages  # noqa: F401  (must be imported before trl's other trainers)
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, BatchEncoding, DataCollatorForSeq2Seq, DataCollatorWithFlattening
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as TRLCollator

from odb_factory.data.collate import CollatedDataset
from odb_factory.data.flat import flatten
from odb_factory.data.samples import Sample, pack
from odb_factory.errors import LayoutError
from odb_factory.planner import Budget, Collation, Cost

IGNORE = -100
DUMMY = 90


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


def test_the_type_of_the_mapping_and_tensors_of_media_stay() -> None:
    """A clip for each row, with as many bands and frames as the rows have tokens."""
    kept = {"input_features": torch.rand(2, 5, 7), "feature_attention_mask": torch.ones(2, 5), "note": "kept"}
    batch = BatchEncoding(collate(items([5, 3])) | kept)
    flat, _ = flatten(batch, [5, 3])
    assert type(flat) is BatchEncoding and all(flat[name] is value for name, value in kept.items())
    assert batch["input_ids"].shape == (2, 5) and "attention_mask" in batch


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


# Real collators


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
