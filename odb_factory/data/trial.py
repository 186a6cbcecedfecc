"""A few short samples of a run in several layouts, for the check of a flat one (I10)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from odb_factory.data.collate import GroupDataset, NotCollated
from odb_factory.data.layout import UNPADDED, FlatLayout, model_keys
from odb_factory.data.samples import Sample
from odb_factory.errors import DataError
from odb_factory.log import get_logger
from odb_factory.planning import VIDEO

if TYPE_CHECKING:
    from odb_factory.data.loader import ODBLoader

logger = get_logger(__name__)

NUM_SAMPLES = 3
ROWS_TRIED, TOKENS_TRIED = 16, 16384
"""The rows to choose from: at most this number, and no more once they have this number of tokens. The main process
reads them."""


class TrialBatches(NamedTuple):
    """Model inputs of the same samples. alone: padded, of each sample. padded: of all, and of the last and the first.
    flat: of all; segments: of it. tokens, ids: of the samples. alone and padded are empty where the collator lays
    samples into one row itself. has_logits: else a flat micro-batch is trained without."""

    alone: list[dict[str, Any]]
    padded: list[dict[str, Any]]
    flat: dict[str, Any]
    segments: tuple[int, ...]
    tokens: tuple[int, ...]
    ids: tuple[int, ...]
    has_logits: bool


def trial_batches(loader: ODBLoader) -> TrialBatches:
    """Of the first rows of an epoch that has begun, through the run's own collator. Rows that cannot be collated are
    passed over. Raises `DataError` if none is left."""
    logger.info("the check of the layout reads rows before the first step, at most %d", ROWS_TRIED)
    samples = list(rows_to_choose_from(loader.first_samples()))
    while chosen := choose(samples):
        try:
            return collated(chosen, loader.groups)
        except NotCollated as error:
            if len(error.ids) > 1:
                raise
            logger.warning(
                "the check of the layout passes over row %d, which cannot be collated: %s", *error.ids, error
            )
            samples = [sample for sample in samples if sample.id not in error.ids]
    raise DataError(f"none of the first {ROWS_TRIED} rows can be used to compare the layouts with")


def rows_to_choose_from(samples: Iterator[Sample]) -> Iterator[Sample]:
    """The first samples: long ones take long to tokenize, and there are short enough ones among few of them."""
    tokens = 0
    for number, sample in enumerate(itertools.islice(samples, ROWS_TRIED), start=1):
        yield sample
        tokens += sample.cost.tokens
        if number >= NUM_SAMPLES and tokens >= TOKENS_TRIED:
            return


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


def collated(samples: list[Sample], flat: GroupDataset) -> TrialBatches:
    """flat: what collates flat micro-batches. Raises `DataError` if it fails."""
    layout, padded = flat.layout, flat.padded()
    assert isinstance(layout, FlatLayout)

    def inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the model. Without labels it computes logits, whatever its loss is computed from."""
        own = {key: batch[key] for key in model_keys(batch, layout.collation.batches) if key != UNPADDED}
        own |= batch.get(UNPADDED, {}).get("inputs", {})
        return {key: value for key, value in own.items() if key != "labels" and value is not None}

    measured, row = flat.collate(samples)
    tokens, ids = tuple(one.cost.tokens for one in samples), tuple(one.id for one in samples)
    rest = inputs(row), measured.segments, tokens, ids, not layout.collation.batches
    together = padded.collate(samples)[1]
    if len(together["input_ids"]) < len(samples):
        return TrialBatches([], [], *rest)
    alone = [inputs(padded.collate([one])[1]) for one in samples]
    other = padded.collate([samples[-1], samples[0]])[1]
    return TrialBatches(alone, [inputs(together), inputs(other)], *rest)
