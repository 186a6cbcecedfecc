"""Where the tokens of each sample stand in what a collator returned: the segments of a flat row."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from odb_factory.data.measure import batch_shape
from odb_factory.errors import DataError
from odb_factory.planning import Sizes


class LayoutError(DataError):
    """A batch that cannot be laid flat, whatever its samples."""


@dataclass(frozen=True, slots=True)
class Segments:
    """What follows each other in a flat row, and where it comes from.

    index: int64[tokens], where each token of the row stands in the rows of the batch laid end to end.
    lengths: of each segment (tokens). samples: the first so many segments are the samples, in batch order.
    filled: tokens of the last segment that come from nowhere, and so are not in `index`; 0 if there is none.
    """

    index: Tensor
    lengths: tuple[int, ...]
    samples: int
    filled: int

    @property
    def starts(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)][:-1]


def find_segments(batch: Mapping[str, Any], tokens: Sequence[int], num_dummy: int, sizes: Sizes) -> Segments:
    """batch, tokens: as `flatten` takes them. num_dummy: tokens of the dummy media in the first row. sizes: of the
    total.

    Raises `DataError` where the batch is not as told, `LayoutError` where its mask has holes.
    """
    rows, length = batch_shape(batch)
    mask = batch.get("attention_mask")
    real = mask != 0 if isinstance(mask, Tensor) and mask.shape == (rows, length) else None
    if rows == len(tokens):
        spans = _padded_rows(real, tokens, rows, length)
        if num_dummy:
            spans.append(_dummy(spans[0], num_dummy, length))
    elif rows == 1:
        spans = _one_row(real, tokens, length)
    else:
        raise DataError(
            f"the collator made {rows} rows of {length} tokens of these {len(tokens)} samples, and a flat micro-batch "
            "takes one row a sample, or all in one row; use a collator that makes them, or set `layout: padded`"
        )
    lengths = tuple(end - start for start, end in spans)
    if min(lengths) < 1:
        raise DataError(f"the collator made a row without tokens: its {len(lengths)} rows have {list(lengths)}")
    index = np.concatenate([np.arange(start, end) for start, end in spans])
    filled = sizes.up(len(index)) - len(index)
    return Segments(
        torch.from_numpy(index), lengths + ((filled,) if filled else ()), samples=len(tokens), filled=filled
    )


def _padded_rows(real: Tensor | None, tokens: Sequence[int], rows: int, length: int) -> list[tuple[int, int]]:
    """Where each row's tokens begin and end in the rows laid end to end."""
    if real is None:
        if max(tokens) > length:
            raise DataError(
                f"the collator made rows of {length} tokens of samples of {list(tokens)}: they are cut; let it keep "
                "every token, or say their length as collated (cost_fn)"
            )
        return [(row * length, row * length + count) for row, count in enumerate(tokens)]
    counts = real.sum(1).tolist()
    spans = []
    for row, (count, from_left) in enumerate(zip(counts, real[:, 0].tolist())):
        start = row * length + (0 if from_left else length - count)
        spans.append((start, start + count))
    flat = real.reshape(-1)
    if not all(bool(flat[start:end].all()) for start, end in spans):
        raise LayoutError(
            "layout: the collator's `attention_mask` has zeros between the tokens of a row, which a flat micro-batch "
            "cannot have; set `layout: padded`."
        )
    return spans


def _dummy(first: tuple[int, int], num_tokens: int, length: int) -> tuple[int, int]:
    """Dummy media stand where the first row's padding would begin."""
    start, end = first
    span = (end, end + num_tokens) if start == 0 else (start - num_tokens, start)
    if span[0] < 0 or span[1] > length:
        raise DataError(
            f"the collator made a first row of {length} tokens, too short for {end - start} of its sample and "
            f"{num_tokens} of the dummy media that it was seen to add to samples without media (collation)"
        )
    return span


def _one_row(real: Tensor | None, tokens: Sequence[int], length: int) -> list[tuple[int, int]]:
    """The collator has laid the samples into one row itself; what stands behind them is a segment too."""
    ends = list(itertools.accumulate(tokens))
    if ends[-1] > length or (real is not None and not bool(real[0, : ends[-1]].all())):
        raise DataError(
            f"the collator laid these {len(tokens)} samples of {ends[-1]} tokens into one row of {length}, so some are "
            "left out; let it keep every token, or say their length as collated (cost_fn)"
        )
    spans = list(itertools.pairwise([0, *ends]))
    return spans if ends[-1] == length else [*spans, (ends[-1], length)]
