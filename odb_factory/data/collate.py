"""Collate: a group of light samples through the framework's own collator, in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from odb_factory.data.layout import FlatLayout, LayoutError, PaddedLayout, beside_rows, flatten, pad_to_sizes
from odb_factory.data.measure import Measure, batch_shape, count_patches, describe_batch, measure_batch
from odb_factory.data.samples import Measured, MicroBatch, Sample, Task
from odb_factory.data.serialize import unpack
from odb_factory.data.step_agreement import CollateNotes
from odb_factory.data.worker import BusyRows, WorkerDataset, retried
from odb_factory.errors import DataError, one_line
from odb_factory.planning import Budget


@dataclass(frozen=True, slots=True)
class Failure:
    """A micro-batch that could not be collated. Handed over as a value, so that it reaches the user in one line.

    ids: the one sample that cannot be collated, or all of them where each can alone.
    concerns_rows: it is a matter of these rows; else of the collator, and the cause says what to do.
    """

    ids: tuple[int, ...]
    cause: str
    concerns_rows: bool = True

    def message(self, describe: Callable[[int], str], on_error: str) -> str:
        """describe: where a row comes from. Called in the main process, which has the dataset."""
        if not self.concerns_rows:
            return self.cause
        if len(self.ids) == 1:
            skips = " (`on_error: skip` leaves out media that cannot be decoded)" if on_error == "raise" else ""
            return f"{describe(self.ids[0])}: cannot be collated: {self.cause}; fix or remove the row{skips}."
        rows = ", ".join(map(str, self.ids))
        return f"rows {rows} cannot be collated together (each can alone): {self.cause}"


Collated = tuple[MicroBatch, Measured, Any]
"""A micro-batch, its shape, and what the collator returned: a mapping with `input_ids`, unless a `cost_fn` of a loop
tells the shape."""


@dataclass(frozen=True, slots=True)
class Salvaged:
    """A micro-batch as planned, and the batch of those of its rows that can be collated (`on_error: skip`).

    lost: the causes of the others by their place in the micro-batch. measured, batch: None where no row is left; of an
    idle micro-batch where its row cannot be collated.
    """

    micro_batch: MicroBatch
    lost: Mapping[int, str]
    measured: Measured | None = None
    batch: Mapping[str, Any] | None = None


class NotCollated(DataError):
    """Samples cannot be collated. ids: the one that cannot, or all of them where each can alone."""

    def __init__(self, failure: Failure):
        super().__init__(failure.cause)
        self.ids = failure.ids


class GroupDataset(WorkerDataset):
    """The dataset of the collating workers: `self[task]` is the collated batch of that task, the index itself.

    layout: how batches are laid flat, or padded further; None: they stay as the collator returns them. notes: where
    workers tell which micro-batches they have collated. skips: rows that cannot be collated are left out.
    budget: of samples whose units are not counted from labels: a batch without `input_ids` has the shape that its
        samples were planned with.
    """

    sends_dataset = False

    def __init__(
        self,
        collate_fn: Callable[[list[Any]], Any],
        patch_size: int,
        dataset: Any,
        layout: FlatLayout | PaddedLayout | None = None,
        measure: Measure = measure_batch,
        busy: BusyRows | None = None,
        budget: Budget | None = None,
        *,
        skips: bool = False,
    ):
        self.collate_fn, self.patch_size, self.dataset, self.layout = collate_fn, patch_size, dataset, layout
        self.measure, self.budget, self.skips = measure, budget, skips
        self.notes: CollateNotes | None = None
        self.busy = busy or BusyRows()

    def padded(self) -> GroupDataset:
        """The same, with batches as the collator returns them."""
        return GroupDataset(self.collate_fn, self.patch_size, self.dataset, measure=self.measure, budget=self.budget)

    def __getitem__(self, task: Task | None) -> Collated | Salvaged | Failure | None:
        if task is None:
            return None
        item = self._made(*task)
        worker = get_worker_info()
        if worker is not None and self.notes is not None:
            self.notes.tell(worker.id, task[0], tuple(item.lost) if isinstance(item, Salvaged) else ())
        return item

    def collate(self, samples: list[Sample]) -> tuple[Measured, Mapping[str, Any]]:
        """The batch of these samples, made in this process. Raises `NotCollated`, `LayoutError`."""
        made, lost = self._salvage(samples)
        if lost or isinstance(made, Exception):
            raise NotCollated(_failure(samples, lost, made))
        assert made is not None
        return made

    def _made(self, micro_batch: MicroBatch, samples: list[Sample]) -> Collated | Salvaged | Failure:
        try:
            with self.busy.at(samples[0].id if samples else 0):
                made, lost = self._salvage(samples)
        except LayoutError as error:
            return Failure(tuple(sample.id for sample in samples), str(error), concerns_rows=False)
        if isinstance(made, Exception) or (lost and not self.skips):
            return _failure(samples, lost, made)
        if lost:
            return Salvaged(micro_batch, {} if micro_batch.idle else lost, *(made or ()))
        assert made is not None
        return micro_batch, *made

    def _salvage(self, samples: list[Sample]) -> tuple[tuple[Measured, Any] | Exception | None, dict[int, str]]:
        """The batch of the samples that can be collated, and why the others cannot, by their place among these.

        None where there is none left; an error where they can alone and not together. Every try is made twice.
        """
        try:
            return retried(lambda: self._collate(samples), (LayoutError,)), {}
        except LayoutError:
            raise
        except Exception:
            lost = {}
            for number, sample in enumerate(samples):
                try:
                    retried(lambda sample=sample: self._collate([sample]))  # type: ignore[misc]
                except Exception as error:
                    lost[number] = one_line(error)
        kept = [sample for number, sample in enumerate(samples) if number not in lost]
        try:
            return self._collate(kept) if kept else None, lost
        except Exception as error:
            return error, lost

    def _collate(self, samples: list[Sample]) -> tuple[Measured, Any]:
        batch = self.collate_fn([unpack(sample.features) for sample in samples])
        if self.layout is None:
            return self._measured(batch, samples), batch
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            raise LayoutError(
                "layout: flat, length_buckets and row_multiple need batches with `input_ids` [rows, length], and "
                f"collate_fn returned {describe_batch(batch)}; leave these keys out"
            )
        if isinstance(self.layout, PaddedLayout):
            padded, filler_rows = pad_to_sizes(batch, self.layout)
            return replace(self._measured(padded, samples), filler_rows=filler_rows), padded
        costs = [sample.cost for sample in samples]
        has_media, has_audio = any(cost.has_media for cost in costs), any(cost.has_audio for cost in costs)
        flat: Mapping[str, Any]
        if self.layout.batches:
            flat, segments = beside_rows(batch, len(samples), has_media, self.layout, has_audio)
        else:
            flat, segments = flatten(batch, [cost.tokens for cost in costs], has_media, self.layout, has_audio)
        return self._measured(flat, samples, segments), flat

    def _measured(self, batch: Any, samples: list[Sample], segments: tuple[int, ...] = ()) -> Measured:
        if self.budget is None:
            return self.measure(batch, self.patch_size, segments)
        costs = [sample.cost for sample in samples]
        rows, length, patches = self.budget.shape(costs)
        if isinstance(batch, Mapping) and np.ndim(batch.get("input_ids", ())) == 2:
            (rows, length), patches = batch_shape(batch), count_patches(batch, self.patch_size)
        return Measured(rows, length, patches, sum(cost.units for cost in costs), segments)


def _failure(samples: Sequence[Sample], lost: Mapping[int, str], error: object) -> Failure:
    """Names the first sample that cannot be collated, or all of them where each one can alone."""
    for number, cause in lost.items():
        return Failure((samples[number].id,), cause)
    assert isinstance(error, Exception)
    return Failure(tuple(sample.id for sample in samples), one_line(error))
