"""Lay a collated micro-batch flat: in one row without padding."""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from odb_factory.data.observe import AUDIO_KEYS, GRID_KEYS, IGNORE_INDEX, PIXEL_KEYS, batch_shape
from odb_factory.errors import LayoutError
from odb_factory.planner import Collation

# The segments of a flat row: where the tokens of each sample are in a collated batch.


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of a flat row, in order: the samples, dummy media, filler.

    index: int64[tokens without filler], the position of each token of the flat row in the flattened batch.
    lengths: tokens of each segment. samples: number of segments that are samples. filled: tokens of the filler.
    """

    index: Tensor
    lengths: tuple[int, ...]
    samples: int
    filled: int

    def pack(self, tensor: Tensor, fill: int = 0) -> Tensor:
        """[rows, length, ...] -> [1, total, ...]"""
        packed = tensor.flatten(0, 1).index_select(0, self.index)
        if self.filled:
            packed = torch.cat([packed, packed.new_full((self.filled, *packed.shape[1:]), fill)])
        return packed[None]


def _find_segments(batch: Mapping[str, Any], tokens: Sequence[int], num_dummy: int, multiple: int) -> Segments:
    rows, length = batch_shape(batch)
    mask = batch.get("attention_mask")
    real = mask != 0 if isinstance(mask, Tensor) and mask.shape == (rows, length) else None
    if rows == len(tokens):
        if real is None:
            real = torch.arange(length) < torch.tensor(tokens)[:, None]
            if max(tokens) > length:
                row = tokens.index(max(tokens))
                raise LayoutError(f"the collator cut a sample of {tokens[row]} tokens to {length}", row)
        index, lengths = real.flatten().nonzero().flatten(), real.sum(1).tolist()
        for row, places in enumerate(index.split(lengths)):
            if not len(places):
                raise LayoutError("the collator made a row without tokens", row)
            if int(places[-1] - places[0]) >= len(places):
                raise LayoutError("its `attention_mask` has zeros between its tokens", row)
        if num_dummy:  # dummy media are in the first row, where its padding would begin
            start, end = int(index[0]), int(index[lengths[0] - 1]) + 1
            place = end if start == 0 else start - num_dummy
            if place < 0 or place + num_dummy > length:
                raise LayoutError(
                    f"the collator made a first row of {length} tokens, too short for the {end - start} of its sample "
                    f"and the {num_dummy} of the dummy media that it adds to samples without media (collation)"
                )
            index = torch.cat([index, torch.arange(place, place + num_dummy)])
            lengths.append(num_dummy)
    elif rows == 1:  # laid flat by the collator; the tokens after the samples are a segment, too
        index, lengths, total = torch.arange(length), list(tokens), sum(tokens)
        if total > length or (real is not None and not bool(real[0, :total].all())):
            raise LayoutError(
                f"the collator laid {len(tokens)} samples of {total} tokens into one row of {length} tokens"
            )
        lengths += [length - total] if total < length else []
    else:
        raise LayoutError(
            f"the collator made {rows} rows of {len(tokens)} samples, and the flat layout needs one row a sample, or "
            "all samples in one row"
        )
    filled = -len(index) % multiple
    return Segments(index, (*lengths, filled) if filled else tuple(lengths), samples=len(tokens), filled=filled)


def pads_left(batch: Any) -> list[bool]:
    """Whether padding precedes the tokens, for each row of a collated batch; empty without a mask of tokens."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return []
    is_left: list[bool] = ((mask[:, 0] == 0) & (mask[:, -1] != 0)).tolist()
    return is_left


# The flat layout: the collated batch as one row, sample after sample.
# A flat micro-batch has `input_ids` and `labels` [1, total], `position_ids` that restart with each segment, and no
# `attention_mask`: models of transformers then keep attention within a segment. After the samples follow segments of
# dummy media, and of filler up to a multiple. Media tensors stay unchanged: they are in the order of the samples. The
# collate worker packs the row, on integers of the host. Logits are flat as the labels are, so no padded rows travel to
# the device. If a trainer reads rows (preferences, rewards), they stay in the batch, and the model gets the flat row in
# addition (`with_flat_rows`, `model/unpad.py`).

BOUNDARY_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_DROPPED = ("attention_mask", "rope_deltas", *BOUNDARY_KEYS)
_PER_ROW = ("cross_attention_mask", "aspect_ratio_ids", "aspect_ratio_mask", "image_bound", "audio_bounds", "tgt_sizes")
"""Media inputs of mllama and MiniCPM-V that are padded to the rows of a batch, or hold positions of media in a row."""
_MEDIA = (
    *(*GRID_KEYS, *PIXEL_KEYS, *AUDIO_KEYS, "input_features", "image_sizes", "pixel_attention_mask"),
    *("second_per_grid_ts", "video_second_per_grid"),
)
"""Tensors with one entry a medium, whatever their shape: 3 clips of 128 bands look like 3 rows of 128 tokens."""
_MEDIA_WORDS = ("pixel", "image", "video", "audio", "feature", "grid", "tile", "vision", "media")
"""Parts of names: such a tensor has one entry a medium, not one a row, unless it has the shape of tokens."""
_OF_PAIRS = ("prompt_", "chosen_", "rejected_", "ref_")
"""Prefixes of the columns that TRL's trainer for pairs makes its rows from."""
UNPADDED = "odb_unpadded"
"""The key, after the prefix of the rows, of the flat row that `with_flat_rows` adds to a batch."""


def with_flat_rows(
    batch: Mapping[str, Any],
    num_samples: int,
    collation: Collation,
    lay_flat: Callable[..., tuple[Mapping[str, Any], Segments]],
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A batch whose rows a trainer reads, with the same rows laid flat for the model; the lengths of the segments.

    batch: of `flatten`, with the collation's number of rows a sample and an `attention_mask`; each row is a segment.
    lay_flat: `flatten` with its options.
    The returned batch has, for each of the collation's batches, the arguments of `model.unpad.FlatRows` under the
    prefix and `UNPADDED`. The returned lengths are those of the first.
    """
    keys = model_keys(batch, collation.batches)
    unpadded: dict[str, dict[str, Any]] = {}
    for prefix in collation.batches:
        rows = {key: batch.get(prefix + key, batch[key]) for key in keys}
        (num_rows, length), mask = batch_shape(rows), rows.get("attention_mask")
        if num_rows != num_samples * collation.rows or not isinstance(mask, Tensor) or mask.shape != (num_rows, length):
            raise LayoutError(
                f"the collator made {num_rows} rows of {num_samples} samples with the `attention_mask` {_shape(mask)}, "
                f"and the flat layout needs {collation.rows} rows a sample with a mask of tokens"
            )
        # The model gets what differs from the padded rows.
        flat, segments = lay_flat(rows, (mask != 0).sum(1).tolist())
        changed: dict[str, Any] = {key: flat.get(key) for key in {**rows, **flat} if flat.get(key) is not rows.get(key)}
        labels = changed.pop("labels")
        unpadded[prefix + UNPADDED] = {
            "inputs": changed,
            "labels": labels,
            "index": segments.index,
            "num_supervised": int((labels != IGNORE_INDEX).sum()),
            "segments": segments.lengths,
        }
    return {**batch, **unpadded}, unpadded[collation.batches[0] + UNPADDED]["segments"]


def model_keys(batch: Mapping[str, Any], batches: Sequence[str]) -> list[str]:
    """The keys of the model inputs in a batch.

    batches: of `Collation`. If there are several: the keys that each of them has, and the keys of media, which they
    share. Raises `LayoutError` if the model needs positions of media, which they do not share.
    """
    if len(batches) < 2:
        return [key for key in batch if not key.startswith(_OF_PAIRS)]
    positions = batch.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 3:
        raise LayoutError(
            f"the trainer gives the model no `position_ids`, and the collator's, {_shape(positions)}, do not belong to "
            f"`{batches[-1]}input_ids`"
        )
    prefixes = tuple(filter(None, batches))
    return [
        key
        for key in batch
        if not key.startswith(prefixes)
        and (all(prefix + key in batch for prefix in prefixes) or any(word in key for word in _MEDIA_WORDS))
    ]


def flatten(
    batch: Mapping[str, Any],
    tokens: Sequence[int],
    num_dummy: int = 0,
    pad_to_multiple_of: int = 1,
    with_boundaries: bool = False,
    positions: Callable[[Mapping[str, Any]], Tensor] | None = None,
) -> tuple[MutableMapping[str, Any], Segments]:
    """The batch in one row, a mapping of the same type, and the segments of this row.

    batch: as collated: one row a sample, padded left or right, or all samples in one row already.
    tokens: of each sample, in batch order; a two-dimensional `attention_mask` overrides them.
    num_dummy: tokens of dummy media, after the tokens of the first row (padded left: before them); they become a
        segment. pad_to_multiple_of: filler makes the total a multiple of this number (tokens).
    with_boundaries: the row carries the `varlen_arguments`. positions: makes the `position_ids` of a batch without.

    Every tensor [rows, length, ...] becomes [1, total, ...]; the first label of each segment is -100; `position_ids`
    restart with each segment. From three or four rows of `position_ids` (mrope) four are made: the restarting row and
    the collator's last three. Raises `LayoutError` if the model would compute something else on the flat row: if
    tensors depend on the rows of the batch, on masked tokens or custom positions, or if the tokens are not those of the
    samples.

        batch, segments = flatten(collator(items), [5, 3])  # segments.lengths: (5, 3)
    """
    rows, length = batch_shape(batch)
    segments = _find_segments(batch, tokens, num_dummy, pad_to_multiple_of)
    flat: MutableMapping[str, Any] = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
    # Tokens and labels, then whatever else has one entry a token.
    filler = int(batch["input_ids"][0, -1])
    labels = batch.get("labels")
    if segments.filled and isinstance(labels, Tensor) and bool((labels != IGNORE_INDEX).any()):
        filler = int(labels[labels != IGNORE_INDEX][0])  # a token of the text, not a placeholder of media
    for key, value in batch.items():
        if key in _DROPPED:
            del flat[key]
        elif key == "labels":
            flat[key] = _labels(value, segments, rows, length)
        elif key == "input_ids":
            flat[key] = segments.pack(value, filler)
        elif key != "position_ids" and _is_per_token(key, value, rows, length):
            flat[key] = segments.pack(value)
    position_ids = batch.get("position_ids")
    if position_ids is None and positions is not None:
        position_ids = positions(batch)
    flat["position_ids"] = _position_ids(position_ids, segments, rows, length)
    if with_boundaries or any(key in batch for key in BOUNDARY_KEYS):
        flat.update(varlen_arguments(segments.lengths))
    return flat, segments


def varlen_arguments(segments: Sequence[int]) -> dict[str, Any]:
    """The boundaries of the segments of a flat row, under the names that transformers passes to kernels.

    segments: lengths (tokens). cu_seq_lens_q, cu_seq_lens_k: int32[segments + 1]; max_length_q, max_length_k: int.

        varlen_arguments((5, 3))["cu_seq_lens_q"]  # tensor([0, 5, 8], dtype=torch.int32)
    """
    ends = torch.tensor([0, *itertools.accumulate(segments)], dtype=torch.int32)
    longest = max(segments)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def _labels(labels: Any, segments: Segments, rows: int, length: int) -> Tensor:
    if not isinstance(labels, Tensor) or labels.shape != (rows, length):
        raise LayoutError(
            f"the collator's `labels` {_shape(labels)} do not have the shape of `input_ids` {[rows, length]}"
        )
    packed = segments.pack(labels, IGNORE_INDEX)
    packed[0, [0, *itertools.accumulate(segments.lengths[:-1])]] = IGNORE_INDEX
    # A padded row predicts all labels but the first.
    predicted = torch.full_like(labels, IGNORE_INDEX).flatten()
    predicted[segments.index] = packed[0, : len(segments.index)]
    loses = (predicted.view_as(labels) != labels)[:, 1:].any(1)
    if bool(loses.any()):
        raise LayoutError(
            "it has labels that a flat row does not predict: on masked tokens, or on a first token after padding",
            int(loses.int().argmax()) if rows == segments.samples else None,
        )
    return packed


def _position_ids(ids: Any, segments: Segments, rows: int, length: int) -> Tensor:
    """[1, total], or [4, 1, total] if the collator's are [3 or 4, rows, length]."""
    restarting = torch.cat([torch.arange(count) for count in segments.lengths])[None]
    if ids is None:
        return restarting
    if isinstance(ids, Tensor) and ids.shape in ((3, rows, length), (4, rows, length)):
        rotary = ids[-3:].flatten(1, 2).index_select(1, segments.index)
        tail = torch.arange(segments.filled, dtype=rotary.dtype).expand(3, -1)
        rotary = torch.cat([rotary, tail], 1)[:, None]
        return torch.cat([restarting[None].to(rotary.dtype), rotary])
    if not isinstance(ids, Tensor) or ids.shape not in ((rows, length), (1, length)):
        raise LayoutError(
            f"the collator's `position_ids` {_shape(ids)} have no known shape for `input_ids` {[rows, length]}"
        )
    ends = [*itertools.accumulate(segments.lengths[: segments.samples])]
    packed = segments.pack(ids.expand(rows, length))[0, : ends[-1]]
    differ = packed != restarting[0, : ends[-1]]
    if bool(differ.any()):
        row = bisect.bisect_right(ends, int(differ.int().argmax()))
        raise LayoutError("its `position_ids` do not count its tokens from 0", row)
    return restarting


def _is_per_token(key: str, value: Any, rows: int, length: int) -> bool:
    """Whether `value` is a tensor [rows, length, ...]. Raises `LayoutError` if it depends on rows in another way."""
    if key in _PER_ROW or isinstance(value, Mapping):
        raise _depends_on_rows(key, value)
    if not isinstance(value, Tensor) or not value.dim():
        return False
    if key == "pixel_attention_mask" and value.dim() == 4:  # [rows, most images of a row, height, width]
        raise _depends_on_rows(key, value)
    if key in _MEDIA:
        return False
    if value.shape[:2] == (rows, length):
        return True
    if rows > 1 and len(value) == rows and not any(word in key for word in _MEDIA_WORDS):
        raise _depends_on_rows(key, value)
    return False


def _depends_on_rows(key: str, value: Any) -> LayoutError:
    return LayoutError(
        f"the collator's `{key}` {_shape(value)} depends on the rows of the batch, and a flat micro-batch has one row"
    )


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else f"({type(value).__name__})"
