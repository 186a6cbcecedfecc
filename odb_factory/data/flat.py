"""Pack a collated micro-batch into one flat row."""

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

# Where the tokens of each sample stand in what a collator returned: the segments of a flat row.


@dataclass(frozen=True, slots=True)
class Segments:
    """The parts of a flat row, in their order: the samples, dummy media, filler.

    index: int64[tokens], the place of each token of the row in the rows of the batch laid end to end; without filler.
    lengths: of each segment (tokens). samples: number of segments that are samples. filled: tokens of the filler.
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
        if num_dummy:  # dummy media stand where the first row's padding would begin
            start, end = int(index[0]), int(index[lengths[0] - 1]) + 1
            place = end if start == 0 else start - num_dummy
            if place < 0 or place + num_dummy > length:
                raise LayoutError(
                    f"the collator made a first row of {length} tokens, too short for {end - start} of its sample and "
                    f"{num_dummy} of the dummy media that it was seen to add to samples without media (collation)"
                )
            index = torch.cat([index, torch.arange(place, place + num_dummy)])
            lengths.append(num_dummy)
    elif rows == 1:  # laid flat by the collator; what stands behind the samples is a segment too
        index, lengths, total = torch.arange(length), list(tokens), sum(tokens)
        if total > length or (real is not None and not bool(real[0, :total].all())):
            raise LayoutError(
                f"the collator laid {len(tokens)} samples of {total} tokens into one row of {length} tokens"
            )
        lengths += [length - total] if total < length else []
    else:
        raise LayoutError(
            f"the collator made {rows} rows of {len(tokens)} samples, and a flat row takes one row a sample or all in "
            "one row"
        )
    filled = -len(index) % multiple
    return Segments(index, (*lengths, filled) if filled else tuple(lengths), samples=len(tokens), filled=filled)


def pads_left(batch: Any) -> list[bool]:
    """Of each row of a collated batch, whether padding stands before its tokens; empty if no mask of tokens says so."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return []
    is_left: list[bool] = ((mask[:, 0] == 0) & (mask[:, -1] != 0)).tolist()
    return is_left


# The flat layout: what the framework's collator returned, as one row in which the samples follow each other.
# A flat micro-batch has `input_ids` and `labels` [1, total], `position_ids` that restart with each segment, and no
# `attention_mask`: models of transformers then keep attention within a segment. A segment is a sample or, after the
# samples, dummy media and what fills up to a multiple. Media tensors stay as they are: their order is that of the
# samples. The row is packed in the collate worker, on integers of the host: what reads logits reads flat labels, so
# the batch has no rows that would have to travel to the device. If a trainer reads rows (preferences, rewards), they
# stay in the batch, and the model gets the row beside them (`beside_rows`, `model/unpad.py`).

BOUNDARY_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_DROPPED = ("attention_mask", "rope_deltas", *BOUNDARY_KEYS)
_PER_ROW = ("cross_attention_mask", "aspect_ratio_ids", "aspect_ratio_mask", "image_bound", "audio_bounds", "tgt_sizes")
"""Media inputs of mllama and MiniCPM-V that are padded to the rows of a batch, or hold places of media in a row."""
_MEDIA = (
    *(*GRID_KEYS, *PIXEL_KEYS, *AUDIO_KEYS, "input_features", "image_sizes", "pixel_attention_mask"),
    *("second_per_grid_ts", "video_second_per_grid"),
)
"""Tensors that go by media, whatever their shape: 3 clips of 128 bands may stand beside 3 rows of 128 tokens."""
_MEDIA_WORDS = ("pixel", "image", "video", "audio", "feature", "grid", "tile", "vision", "media")
"""A tensor of such a name whose shape is not that of tokens goes by media, not by rows."""


_OF_PAIRS = ("prompt_", "chosen_", "rejected_", "ref_")
"""What TRL's trainer for pairs makes its rows from."""
UNPADDED = "odb_unpadded"
"""The key of what `beside_rows` adds to a batch, behind the prefix of the rows."""


def beside_rows(
    batch: Mapping[str, Any],
    num_samples: int,
    collation: Collation,
    lay_flat: Callable[..., tuple[Mapping[str, Any], Segments]],
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The batch, whose rows a trainer reads, with the same in one row for the model; the lengths of its segments.

    batch: of `flatten`, with the collation's rows a sample and an `attention_mask`; segments are rows, in their order.
    lay_flat: `flatten` with its options.
    For each of the collation's batches it has, under its prefix and `UNPADDED`, what `model.unpad.FlatRows` is made of.
    The segments returned are those of the first.
    """
    keys = model_keys(batch, collation.batches)
    unpadded: dict[str, dict[str, Any]] = {}
    for prefix in collation.batches:
        rows = {key: batch.get(prefix + key, batch[key]) for key in keys}
        (num_rows, length), mask = batch_shape(rows), rows.get("attention_mask")
        if num_rows != num_samples * collation.rows or not isinstance(mask, Tensor) or mask.shape != (num_rows, length):
            raise LayoutError(
                f"the collator made {num_rows} rows of {num_samples} samples with the `attention_mask` {_shape(mask)}, "
                f"and a flat micro-batch takes {collation.rows} rows a sample with a mask of tokens"
            )
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
    """What the model is given of a batch. batches: of `Collation`; if there are several, what each of them has, and
    media, which they share. Raises `LayoutError` if they would need positions of media, which they do not share."""
    if len(batches) < 2:
        return [key for key in batch if not key.startswith(_OF_PAIRS)]
    positions = batch.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 3:
        raise LayoutError(
            f"the trainer hands the model no `position_ids`, and of those that the collator made, {_shape(positions)}, "
            f"none belong to `{batches[-1]}input_ids`"
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
    """The batch in one row, a mapping of the same kind, and the segments of that row.

    batch: what the collator returned: one row a sample, padded left or right, or all of them in one row already.
    tokens: of each sample, in batch order; of a padded row what a two-dimensional `attention_mask` says counts.
    num_dummy: tokens of dummy media, behind those of the first row (padded left: before them), which become a segment
    of their own. pad_to_multiple_of: the total is filled up to a multiple of this (tokens). with_boundaries: the row
    carries what `varlen_arguments` returns. positions: makes `position_ids` of a batch that has none.

    Every tensor [rows, length, ...] becomes [1, total, ...]; the first label of each segment is -100; `position_ids`
    restart, and of three or four rows of them (mrope) the first is such a row and the others are the collator's.
    Raises `LayoutError` if the flat row would not be computed as the batch is: it has what depends on its rows,
    masked tokens or positions of its own, or other tokens than these samples.

        batch, segments = flatten(collator(items), [5, 3])  # segments.lengths: (5, 3)
    """
    rows, length = batch_shape(batch)
    segments = _find_segments(batch, tokens, num_dummy, pad_to_multiple_of)
    flat: MutableMapping[str, Any] = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
    filler = int(batch["input_ids"][0, -1])
    labels = batch.get("labels")
    if segments.filled and isinstance(labels, Tensor) and bool((labels != IGNORE_INDEX).any()):
        filler = int(labels[labels != IGNORE_INDEX][0])  # of the text: a placeholder of media would be one too many
    for key, value in batch.items():
        if key in _DROPPED:
            del flat[key]
        elif key == "labels":
            flat[key] = _labels(value, segments, rows, length)
        elif key == "input_ids":
            flat[key] = segments.pack(value, filler)
        elif key != "position_ids" and is_per_token(key, value, rows, length):
            flat[key] = segments.pack(value)
    position_ids = batch.get("position_ids")
    if position_ids is None and positions is not None:
        position_ids = positions(batch)
    flat["position_ids"] = _position_ids(position_ids, segments, rows, length)
    if with_boundaries or any(key in batch for key in BOUNDARY_KEYS):
        flat.update(varlen_arguments(segments.lengths))
    return flat, segments


def varlen_arguments(segments: Sequence[int]) -> dict[str, Any]:
    """Where the segments of a flat row begin and end, under the names by which transformers hands it to kernels.

    segments: lengths (tokens). cu_seq_lens_q, cu_seq_lens_k: int32[segments + 1]; max_length_q, max_length_k: int.

        varlen_arguments((5, 3))["cu_seq_lens_q"]  # tensor([0, 5, 8], dtype=torch.int32)
    """
    ends = torch.tensor([0, *itertools.accumulate(segments)], dtype=torch.int32)
    longest = max(segments)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def _labels(labels: Any, segments: Segments, rows: int, length: int) -> Tensor:
    if not isinstance(labels, Tensor) or labels.shape != (rows, length):
        raise LayoutError(
            f"the collator's `labels` {_shape(labels)} are not of the shape of `input_ids` {[rows, length]}"
        )
    packed = segments.pack(labels, IGNORE_INDEX)
    packed[0, [0, *itertools.accumulate(segments.lengths[:-1])]] = IGNORE_INDEX
    # A padded row predicts all of its labels but the first.
    predicted = torch.full_like(labels, IGNORE_INDEX).flatten()
    predicted[segments.index] = packed[0, : len(segments.index)]
    loses = (predicted.view_as(labels) != labels)[:, 1:].any(1)
    if bool(loses.any()):
        raise LayoutError(
            "it has labels that a flat row does not predict: on masked tokens, or on a first token behind padding",
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
            f"the collator's `position_ids` {_shape(ids)} are of no known kind beside `input_ids` {[rows, length]}"
        )
    ends = [*itertools.accumulate(segments.lengths[: segments.samples])]
    packed = segments.pack(ids.expand(rows, length))[0, : ends[-1]]
    differ = packed != restarting[0, : ends[-1]]
    if bool(differ.any()):
        row = bisect.bisect_right(ends, int(differ.int().argmax()))
        raise LayoutError("its `position_ids` do not count its tokens from 0", row)
    return restarting


def is_per_token(key: str, value: Any, rows: int, length: int) -> bool:
    """Whether it is a tensor [rows, length, ...]. Raises `LayoutError` for what goes by rows in another way."""
    if key in _PER_ROW or isinstance(value, Mapping):
        raise _depends_on_rows(key, value)
    if not isinstance(value, Tensor) or not value.dim():
        return False
    if key == "pixel_attention_mask" and value.dim() == 4:  # the images of a row, padded to the most of any
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
        f"the collator's `{key}` {_shape(value)} depends on the rows of the batch, and a flat micro-batch has one"
    )


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else f"({type(value).__name__})"
