"""Micro-batches that the training has and whose optimizer step it has not ended."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from odb_factory.data.samples import MicroBatch, OptimizerStep, Sample


class _Held(NamedTuple):
    micro_batch: MicroBatch
    samples: list[Sample] | None


class HandedOut:
    """Those of one rank, in order; with what each was collated from, if that is added too."""

    def __init__(self) -> None:
        self._held: deque[_Held] = deque()

    def add(self, micro_batch: MicroBatch, samples: list[Sample] | None) -> None:
        self._held.append(_Held(micro_batch, samples))

    def samples_of(self, micro_batch: MicroBatch) -> list[Sample]:
        """What it was collated from. Raises `LookupError` for one whose samples are not held."""
        for held in self._held:
            if _number(held.micro_batch) == _number(micro_batch) and held.samples is not None:
                return held.samples
        raise LookupError(f"the samples of micro-batch {micro_batch.index} are not held")

    def take_through(self, step: OptimizerStep) -> list[MicroBatch]:
        """Let go of those of this optimizer step and before; a loop may have fetched some of the next one ahead."""
        taken = []
        while self._held and _place(self._held[0].micro_batch.step) <= _place(step):
            taken.append(self._held.popleft().micro_batch)
        return taken


def _number(micro_batch: MicroBatch) -> tuple[int, int, int]:
    return *_place(micro_batch.step), micro_batch.index


def _place(step: OptimizerStep) -> tuple[int, int]:
    return step.epoch, step.index
