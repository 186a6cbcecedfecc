"""Collate light samples with the framework's collator, in a worker process.

At the end: short samples for the check of a flat layout (I10)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from odb_factory.data.flat import UNPADDED, flatten, model_keys, with_flat_rows
from odb_factory.data.observe import Measure, batch_shape, count_media, describe_batch, measure_batch, retried
from odb_factory.data.samples import Measured, MicroBatch, Sample, name_rows, unpack
from odb_factory.errors import ConfigError, DataError, LayoutError, one_line
from odb_factory.log import get_logger
from odb_factory.planner import VIDEO, Budget, Media

logger = get_logger(__name__)

Collated = tuple[MicroBatch, Measured, Any]
"""A micro-batch, its size, and its batch: a mapping with `input_ids`, unless the size comes from a `cost_fn`."""

Salvaged = tuple[dict[int, str], Measured | None, Any]
"""Why samples cannot be collated, by id; the size and the batch of the others, None if none is left."""


class NotCollated(DataError):
    """Samples cannot be collated. ids: the sample at fault, or all samples if each can be collated alone."""

    def __init__(self, ids: Sequence[int], cause: str):
        super().__init__(cause)
        self.ids = tuple(ids)


@dataclass(eq=False)
class CollatedDataset:
    """Collates samples.

    budget: of micro-batches; its layout says whether they are laid flat or stay as collated.
    with_boundaries, positions: of `flatten`.
    counts_labels: units are counted from labels. Otherwise the samples have units, and a batch without `input_ids` has
        the size that was planned.
    falls_back: samples that cannot be laid flat are padded, whatever the budget (`Measured.why_padded`): all ranks have
        the same plan, so it is not changed.
    """

    collate_fn: Callable[[list[Any]], Any]
    patch_size: int
    budget: Budget
    measure: Measure = measure_batch
    counts_labels: bool = True
    with_boundaries: bool = False
    falls_back: bool = False
    positions: Callable[[Mapping[str, Any]], Tensor] | None = None

    def collate(self, samples: Sequence[Sample]) -> tuple[Measured, Any]:
        """The size and the batch of these samples. Raises `NotCollated`, `ConfigError`."""
        failed, measured, batch = self.salvage(samples)
        for id, cause in failed.items():
            raise NotCollated([id], cause)
        assert measured is not None
        return measured, batch

    def salvage(self, samples: Sequence[Sample]) -> Salvaged:
        """The batch of the samples that can be collated.

        A collation that fails is repeated once. Raises `NotCollated` if each sample can be collated alone, but not all
        together.
        """
        try:
            return {}, *retried(lambda: self._collate(samples), (ConfigError,))
        except ConfigError:  # not the fault of a row
            raise
        except Exception as error:
            cause = one_line(error)
        if len(samples) == 1:
            return {samples[0].id: cause}, None, None
        failed = {id: why for sample in samples for id, why in self.salvage([sample])[0].items()}
        collatable = [sample for sample in samples if sample.id not in failed]
        if not failed:
            ids = [sample.id for sample in samples]
            named = f"{name_rows(ids)} cannot be collated together, and each can alone; a collator must pad"
            raise NotCollated(ids, f"{named}: {cause}")
        return (failed, *self.salvage(collatable)[1:]) if collatable else (failed, None, None)

    def _collate(self, samples: Sequence[Sample]) -> tuple[Measured, Any]:
        batch = self.collate_fn([unpack(sample.features) for sample in samples])
        if self.budget.layout == "padded":
            return self._measured(batch, samples), batch
        try:
            if not isinstance(batch, Mapping) or "input_ids" not in batch:
                raise LayoutError(f"the collator returned {describe_batch(batch)}, not `input_ids` [rows, length]")
            return self._lay_flat(batch, samples)
        except LayoutError as error:
            # A batch of pairs has the first rows of all samples, then the second rows.
            at_fault = samples if error.row is None else [samples[error.row % len(samples)]]
            why = f"{name_rows([sample.id for sample in at_fault])}: {error.reason}"
            if not self.falls_back:
                raise LayoutError(why) from None
            return replace(self._measured(batch, samples), why_padded=why), batch

    def _lay_flat(self, batch: Mapping[str, Any], samples: Sequence[Sample]) -> tuple[Measured, Any]:
        """Raises `LayoutError`."""
        budget, collation = self.budget, self.budget.collation
        costs = [sample.cost for sample in samples]
        num_dummy, _ = collation.dummies(sum(cost.has_media for cost in costs), sum(cost.has_audio for cost in costs))
        lay_flat = partial(
            flatten,
            num_dummy=num_dummy,
            pad_to_multiple_of=budget.pad_to_multiple_of,
            with_boundaries=self.with_boundaries,
        )
        if collation.batches:
            rows, lengths = with_flat_rows(batch, len(samples), collation, lay_flat)
            return self._measured(rows, samples, lengths), rows
        flat, segments = lay_flat(batch, [cost.tokens for cost in costs], positions=self.positions)
        return self._measured(flat, samples, segments.lengths), flat

    def _measured(self, batch: Any, samples: Sequence[Sample], segments: tuple[int, ...] = ()) -> Measured:
        if self.counts_labels:
            return self.measure(batch, self.patch_size, segments)
        costs = [sample.cost for sample in samples]
        if isinstance(batch, Mapping) and np.ndim(batch.get("input_ids", ())) == 2:
            rows, length = (1, sum(segments)) if segments else batch_shape(batch)
            media = count_media(batch, self.patch_size)
        else:
            rows, length, _ = self.budget.shape(costs)
            media = Media(*map(sum, zip(*(cost.by_modality for cost in costs))))
        return Measured(rows, length, media, sum(cost.units for cost in costs), segments)


# The samples of the check of a flat layout.
ROWS_TRIED = 16
"""Samples to choose from. The main process reads them, and lays those without media flat together."""


def trial_batches(first_samples: Iterator[Sample], groups: CollatedDataset, count: int) -> tuple[Any, ...]:
    """Model inputs of `count` short samples in several layouts: the fields of `model.check.Trial`.

    first_samples: of an epoch. groups: collates flat micro-batches. Samples that cannot be collated are skipped.
    Raises `DataError` if no sample is left, `LayoutError` if the samples cannot be laid flat.
    """
    logger.info("the check of the layout reads rows before the first step, at most %d", ROWS_TRIED)
    samples, groups = list(itertools.islice(first_samples, ROWS_TRIED)), replace(groups, falls_back=False)
    while samples:
        try:
            if text := [sample for sample in samples if not sample.cost.has_media]:
                groups.collate(text)
            return _collate_trial(_choose(samples, count), groups)
        except NotCollated as error:
            if len(error.ids) > 1:
                raise
            logger.warning(
                "the check of the layout passes over row %d, which cannot be collated: %s", *error.ids, error
            )
            samples = [sample for sample in samples if sample.id not in error.ids]
    raise DataError(f"none of the first {ROWS_TRIED} rows can be used to compare the layouts with")


def _choose(samples: Sequence[Sample], count: int) -> list[Sample]:
    """`count` short samples, the second with media if any sample has some; repeated if there are too few.

    Samples that share no micro-batch with others (see `Cost.modality`) are chosen only if there are no others.
    """
    usable = [sample for sample in samples if sample.cost.modality != VIDEO] or samples
    by_length = sorted(usable, key=lambda sample: (sample.cost.tokens + sample.cost.patches, sample.id))
    with_media = [sample for sample in by_length if sample.cost.has_media]
    others = [sample for sample in by_length if not sample.cost.has_media] or with_media[1:]
    chosen = [*others[:1], *with_media[:1], *others[1:]][:count]
    return list(itertools.islice(itertools.cycle(chosen), count))


def _collate_trial(samples: list[Sample], flat: CollatedDataset) -> tuple[Any, ...]:
    batches, padded = flat.budget.collation.batches, replace(flat, budget=replace(flat.budget, layout="padded"))

    def inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of the model, without labels: then it computes logits, whatever its loss is computed from."""
        model_inputs = {key: batch[key] for key in model_keys(batch, batches) if key != UNPADDED}
        model_inputs |= batch.get(UNPADDED, {}).get("inputs", {})
        return {key: value for key, value in model_inputs.items() if key != "labels" and value is not None}

    measured, row = flat.collate(samples)
    alone, together = [], padded.collate(samples)[1]
    if len(together["input_ids"]) >= len(samples):  # else the collator itself lays samples into one row
        alone = [inputs(padded.collate([sample])[1]) for sample in samples]
    tokens, ids = tuple(sample.cost.tokens for sample in samples), tuple(sample.id for sample in samples)
    return alone, inputs(together), inputs(row), measured.segments, tokens, ids, not batches
