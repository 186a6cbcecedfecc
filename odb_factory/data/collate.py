"""Collate: a group of light samples through the framework's own collator, in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import get_worker_info

from odb_factory.data.layout import FlatLayout, LayoutError, beside_rows, flatten, pad_to_sizes
from odb_factory.data.measure import Measure, batch_shape, count_patches, describe_batch, measure_batch
from odb_factory.data.samples import Measured, MicroBatch, Sample, Task
from odb_factory.data.serialize import unpack
from odb_factory.data.step_agreement import CollateNotes
from odb_factory.data.worker import BusyRows, WorkerDataset, retried
from odb_factory.errors import DataError, one_line
from odb_factory.planning import Budget

Collated = tuple[MicroBatch, Measured, Any]
"""A micro-batch, its shape, and what the collator returned: a mapping with `input_ids`, unless a `cost_fn` of a loop
gives the shape."""


class Outcome(NamedTuple):
    """What a task has become. A tuple, so that torch pins the batch in it.

    micro_batch: as planned. lost: by its id why a sample cannot be collated. measured, batch: of the other samples;
    None where none is left. problem: why the task failed whatever `on_error` says, or "".
    """

    micro_batch: MicroBatch
    lost: Mapping[int, str]
    measured: Measured | None = None
    batch: Any = None
    problem: str = ""

    @property
    def lost_places(self) -> list[int]:
        """The places in the micro-batch of the rows that are lost; the sample of an idle one is in none."""
        return [number for number, id in enumerate(self.micro_batch.ids) if id in self.lost]


class NotCollated(DataError):
    """Samples cannot be collated. ids: the one that cannot, or all of them where each can alone."""

    def __init__(self, ids: Sequence[int], cause: str):
        super().__init__(cause)
        self.ids = tuple(ids)


class GroupDataset(WorkerDataset):
    """The dataset of the collating workers: `self[task]` is the outcome of that task, the index itself.

    layout: how batches are laid flat, or the budget whose sizes they are padded to; None: they stay as the collator
        returns them. notes: where workers report which micro-batches they have collated. skips: rows that cannot be
        collated are left out.
    budget: of samples whose units are not counted from labels: a batch without `input_ids` has the shape that its
        samples were planned with.
    """

    sends_dataset = False

    def __init__(
        self,
        collate_fn: Callable[[list[Any]], Any],
        patch_size: int,
        dataset: Any,
        layout: FlatLayout | Budget | None = None,
        measure: Measure = measure_batch,
        budget: Budget | None = None,
        *,
        skips: bool = False,
    ):
        self.collate_fn, self.patch_size, self.dataset, self.layout = collate_fn, patch_size, dataset, layout
        self.measure, self.budget, self.skips = measure, budget, skips
        self.notes: CollateNotes | None = None
        self.busy = BusyRows()

    def padded(self) -> GroupDataset:
        """The same, with batches as the collator returns them."""
        return GroupDataset(self.collate_fn, self.patch_size, self.dataset, measure=self.measure, budget=self.budget)

    def __getitem__(self, task: Task | None) -> Outcome | None:
        if task is None:
            return None
        micro_batch, samples = task
        try:
            with self.busy.at(samples[0].id):
                outcome = Outcome(micro_batch, *self._salvage(samples))
        except LayoutError as error:
            outcome = Outcome(micro_batch, {}, problem=str(error))
        except NotCollated as error:
            rows = ", ".join(map(str, error.ids))
            problem = f"rows {rows} cannot be collated together (each can alone): {error}"
            outcome = Outcome(micro_batch, {}, problem=problem)
        worker = get_worker_info()
        if worker is not None and self.notes is not None:
            self.notes.tell(worker.id, micro_batch, outcome.lost_places if self.skips else ())
        return outcome

    def collate(self, samples: list[Sample]) -> tuple[Measured, Any]:
        """The batch of these samples, made in this process. Raises `NotCollated`, `LayoutError`."""
        lost, measured, batch = self._salvage(samples)
        for id, cause in lost.items():
            raise NotCollated([id], cause)
        assert measured is not None
        return measured, batch

    def _salvage(self, samples: list[Sample]) -> tuple[dict[int, str], Measured | None, Any]:
        """Why samples cannot be collated, by id, and the batch of the others, None where there is none left.

        Each collation that fails is tried again. Raises `NotCollated` for samples that can alone and not together.
        """
        try:
            return {}, *retried(lambda: self._collate(samples), (LayoutError,))
        except LayoutError:
            raise
        except Exception:
            lost = {}
            for sample in samples:
                try:
                    retried(lambda sample=sample: self._collate([sample]))  # type: ignore[misc]
                except Exception as error:
                    lost[sample.id] = one_line(error)
        kept = [sample for sample in samples if sample.id not in lost]
        try:
            return lost, *(self._collate(kept) if kept else (None, None))
        except Exception as error:
            raise NotCollated([sample.id for sample in kept], one_line(error)) from error

    def _collate(self, samples: list[Sample]) -> tuple[Measured, Any]:
        batch = self.collate_fn([unpack(sample.features) for sample in samples])
        if self.layout is None:
            return self._measured(batch, samples), batch
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            raise LayoutError(
                "layout: flat, length_buckets and row_multiple need batches with `input_ids` [rows, length], and "
                f"collate_fn returned {describe_batch(batch)}; leave these keys out"
            )
        if isinstance(self.layout, Budget):
            padded, filler_rows = pad_to_sizes(batch, self.layout)
            return replace(self._measured(padded, samples), filler_rows=filler_rows), padded
        costs = [sample.cost for sample in samples]
        has_media, has_audio = any(cost.has_media for cost in costs), any(cost.has_audio for cost in costs)
        flat: Mapping[str, Any]
        if self.layout.collation.batches:
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
