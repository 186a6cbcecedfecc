"""Collate: a group of light samples through the framework's own collator, in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from odb_factory.data.measure import measure_batch
from odb_factory.data.rounds import Task
from odb_factory.data.samples import Measured, Sample, Step, unpack
from odb_factory.errors import one_line


@dataclass(frozen=True, slots=True)
class Failure:
    """A group that could not be collated. Handed over as a value: the message reaches the user in one line."""

    message: str


Collated = tuple[Step, Measured, Mapping[str, Any]]


class GroupDataset(Dataset):
    """`dataset[task]` is the collated batch of that task: the index is the group itself."""

    def __init__(self, collate_fn: Callable, patch_size: int, describe: Callable[[int], str], on_error: str = "raise"):
        self.collate_fn, self.patch_size, self.describe = collate_fn, patch_size, describe
        self.on_error = on_error

    def __getitem__(self, task: Task | None) -> Collated | Failure | None:
        if task is None:
            return None
        step, samples = task
        try:
            batch = self._collate(samples)
            return step, measure_batch(batch, self.patch_size), batch
        except Exception as error:
            return Failure(self._blame(samples, error))

    def _collate(self, samples: list[Sample]) -> Mapping[str, Any]:
        return self.collate_fn([unpack(sample.features) for sample in samples])

    def _blame(self, samples: list[Sample], error: Exception) -> str:
        """Find the sample that cannot be collated, or name the whole group where each one can alone."""
        for sample in samples:
            try:
                self._collate([sample])
            except Exception as alone:
                skips = (
                    " (`on_error: skip` leaves out media that cannot be decoded)" if self.on_error == "raise" else ""
                )
                return (
                    f"{self.describe(sample.id)}: cannot be collated: {one_line(alone)}; mend or remove the row{skips}."
                )
        ids = ", ".join(str(sample.id) for sample in samples)
        return f"rows {ids} cannot be collated together (each can alone): {one_line(error)}"
