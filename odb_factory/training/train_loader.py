"""What the Trainer sees as its train dataloader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from odb_factory.training.run import ODBRun


class TrainLoader:
    """Its items, (`MicroBatch`, `Measured`, batch), are taken by the run.

    The Trainer sizes its loops by `len`, the most steps an epoch can have, and would cut an epoch short at a lower
    figure; there is none if it counts `max_steps`.
    stock: the DataLoader that the Trainer would have used. Callbacks are given that one, which they may iterate.
    """

    def __init__(self, run: ODBRun, stock: Any):
        self.run, self.dataset, self.stock = run, run.loader.dataset, stock
        self._offset: int | None = None

    def __len__(self) -> int:
        if self.run.max_steps is not None or self.run.loader.num_samples is None:
            raise TypeError("the number of steps of an epoch is not known ahead")
        # A step emits a sample on some rank, but for the idle steps that fill the last optimizer step.
        return -(-self.run.loader.num_samples // self.run.accumulation) * self.run.accumulation

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if self.run.finished else iter(self.run.loader)

    def set_epoch(self, epoch: int) -> None:
        """After a resume the Trainer counts epochs from a bound; the first is the one where the loader stands."""
        if self._offset is None:
            self._offset = self.run.loader.epoch - epoch
        self.run.loader.set_epoch(epoch + self._offset)
