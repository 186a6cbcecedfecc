"""The same few samples laid out in several ways, for the check of a flat layout (I10)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from odb_factory.data.collate import GroupDataset
from odb_factory.data.layout import BOUNDARY_KEYS, UNPADDED, FlatLayout, model_keys
from odb_factory.data.samples import Sample
from odb_factory.errors import DataError
from odb_factory.planning import VIDEO

NUM_SAMPLES = 3
TEXT_KEYS = {"input_ids", "labels", "position_ids", *BOUNDARY_KEYS}
"""What a flat batch of text has: it can be cut apart again."""
FURTHER = 8
"""Tokens by which the second padded layout of a batch that was cut apart is longer."""


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A batch without labels, and where in it each sample is: number of the sample -> (row, first token, end)."""

    batch: dict[str, Any]
    spans: dict[int, tuple[int, int, int]]
    segments: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """Samples by their number: each alone, padded in two ways, flat. As many batches whatever the samples, so that
    ranks run the model equally often. ids: rows of the dataset. has_logits: else a flat micro-batch has none."""

    alone: tuple[LaidOut, ...]
    padded: tuple[LaidOut, ...]
    flat: LaidOut
    ids: tuple[int, ...] = ()
    has_logits: bool = True


def choose(samples: Sequence[Sample]) -> list[Sample]:
    """`NUM_SAMPLES` short ones, one with media in between if any has some; the same one again where there are too few.

    Samples that share no micro-batch with others (see `Cost.modality`) only where there is nothing else.
    """
    usable = [one for one in samples if one.cost.modality != VIDEO] or list(samples)
    by_length = sorted(usable, key=lambda one: (one.cost.tokens + one.cost.patches, one.id))
    with_media = [one for one in by_length if one.cost.has_media]
    without = [one for one in by_length if not one.cost.has_media]
    chosen = [*with_media[:1], *(without or with_media[1:])][:NUM_SAMPLES]
    if len(chosen) > 1 and with_media:
        chosen[0], chosen[1] = chosen[1], chosen[0]
    return list(itertools.islice(itertools.cycle(chosen), NUM_SAMPLES)) if chosen else []


def of_samples(samples: Sequence[Sample], padded: GroupDataset, flat: GroupDataset) -> Trial:
    """Through the run's own collator. padded, flat: what collates in either layout. Raises `DataError` if it fails."""
    ids = tuple(one.id for one in samples)
    row, segments = _collate(flat, samples)
    together, _ = _collate(padded, samples)
    if len(together["input_ids"]) < len(samples):  # the collator lays them into one row itself
        if not is_text(row):
            raise DataError("the collator lays samples with media into one row, which cannot be taken apart to compare")
        return of_flat_batch(row, segments[: len(samples)], ids)
    alone = [_collate(padded, [one])[0] for one in samples]
    # The same samples in a batch of another shape, in another order.
    other, _ = _collate(padded, [samples[-1], samples[0]])
    total = len(samples)
    assert isinstance(flat.layout, FlatLayout)
    inputs = functools.partial(_inputs, batches=flat.layout.batches)
    return Trial(
        tuple(LaidOut(inputs(batch), _rows(batch, samples, [number])) for number, batch in enumerate(alone)),
        (
            LaidOut(inputs(together), _rows(together, samples, range(total))),
            LaidOut(inputs(other), _rows(other, samples, [total - 1, 0])),
        ),
        LaidOut(inputs(row), _behind_each_other(segments[: len(together["input_ids"])]), segments),
        ids,
        has_logits=UNPADDED not in row,
    )


def is_text(batch: Mapping[str, Any]) -> bool:
    """Whether a flat batch holds text alone."""
    return set(batch) <= TEXT_KEYS and batch["position_ids"].dim() == 2


def of_flat_batch(batch: Mapping[str, Any], segments: Sequence[int], ids: tuple[int, ...] = ()) -> Trial:
    """A flat batch of text, cut apart again. segments: those of its samples, the first of the row.

    Of many samples `NUM_SAMPLES` are taken, of a single one twice and more.
    """
    spans = _behind_each_other(segments)
    pieces = [batch["input_ids"][0, start:end] for _, start, end in spans.values()]
    pieces = list(itertools.islice(itertools.cycle(pieces), NUM_SAMPLES))
    lengths = tuple(len(piece) for piece in pieces)
    row = {
        "input_ids": torch.cat(pieces)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).to(pieces[0].device)[None],
    }
    return Trial(
        tuple(LaidOut(_padded([piece]), {number: (0, 0, len(piece))}) for number, piece in enumerate(pieces)),
        tuple(
            LaidOut(_padded(pieces, more), {number: (number, 0, length) for number, length in enumerate(lengths)})
            for more in (0, FURTHER)
        ),
        LaidOut(row, _behind_each_other(lengths), lengths),
        ids,
    )


def _collate(group: GroupDataset, samples: Sequence[Sample]) -> tuple[Mapping[str, Any], tuple[int, ...]]:
    measured, batch = group.collate(list(samples))
    return batch, measured.segments


def _inputs(batch: Mapping[str, Any], batches: Sequence[str]) -> dict[str, Any]:
    """Of the model. Without labels it computes logits, whatever its loss is computed by. batches: of `Collation`."""
    own = {key: batch[key] for key in model_keys(batch, batches) if key != UNPADDED}
    inputs = own | batch.get(UNPADDED, {}).get("inputs", {})
    return {key: value for key, value in inputs.items() if key != "labels" and value is not None}


def _rows(
    batch: Mapping[str, Any], samples: Sequence[Sample], numbers: Sequence[int]
) -> dict[int, tuple[int, int, int]]:
    """Of a padded batch of the samples of these numbers: padding is on either side, and dummy media are masked like it.

    Where samples have several rows each row is one here: the first ones of all samples, then the second ones.
    """
    mask = batch.get("attention_mask")
    spans = {}
    for row in range(len(batch["input_ids"])):
        turn, place = divmod(row, len(numbers))
        number = numbers[place]
        start = 0 if mask is None else int(mask[row].argmax())
        tokens = samples[number].cost.tokens if mask is None else int((mask[row] != 0).sum())
        spans[turn * len(samples) + number] = (row, start, start + tokens)
    return spans


def _behind_each_other(segments: Sequence[int]) -> dict[int, tuple[int, int, int]]:
    ends = [0, *itertools.accumulate(segments)]
    return {number: (0, start, end) for number, (start, end) in enumerate(itertools.pairwise(ends))}


def _padded(pieces: Sequence[Tensor], more: int = 0) -> dict[str, Any]:
    length = max(map(len, pieces)) + more
    ids = pieces[0].new_zeros(len(pieces), length)
    mask = torch.zeros_like(ids)
    for row, piece in enumerate(pieces):
        ids[row, : len(piece)], mask[row, : len(piece)] = piece, 1
    return {"input_ids": ids, "attention_mask": mask}
