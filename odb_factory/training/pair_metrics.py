"""Figures of preference trainers (rewards, accuracies, log-probabilities), averaged over the samples trained on.

Stock takes the mean of the figures of all micro-batches and ranks. Micro-batches of odb differ in size and some are
idle, so each counts by its samples, and idle ones not at all.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from odb_factory.accounting import Computing
from odb_factory.data.samples import OptimizerStep
from odb_factory.training.arguments import replaced


class PreferenceMetrics(ABC):
    """Averages the figures that a trainer's `get_batch_loss_metrics` returns for micro-batches during a run.

    After each micro-batch `trainer._stored_metrics` has the figures of the logging interval so far; `trainer.log` takes
    and removes them. Evaluations are stock's.
    sums: of the figures of this logging interval. counts: their divisors, or numbers of samples.
    """

    METHOD, STORED = "get_batch_loss_metrics", "_stored_metrics"
    """Names of the trainer: the method that computes figures, and the figures that it logs next."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.sums, self.counts = defaultdict[str, float](float), Counter[str]()
        self._begun: OptimizerStep | None = None
        self._before = self.sums, self.counts

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the figures of this trainer are averaged."""
        compute = functools.partial(self._compute, getattr(self.trainer, self.METHOD))
        with replaced(self.trainer, **{self.METHOD: compute}):
            yield

    @property
    def stored(self) -> dict[str, list[float]]:
        """The figures that the trainer logs next."""
        figures: dict[str, list[float]] = getattr(self.trainer, self.STORED)["train"]
        return figures

    def _compute(self, stock: Callable, *args: Any, **kwargs: Any) -> Any:
        """Replaces the method `METHOD` of the trainer."""
        loss, metrics = stock(*args, **kwargs)
        odb = self.trainer.odb
        if odb.computing is None or odb.evaluation is not None:
            return loss, metrics
        self.count(odb.computing, metrics)
        return loss, {}

    def count(self, computing: Computing, metrics: dict[str, Any]) -> None:
        """Add the figures of a micro-batch to those that the trainer logs."""
        stored = self.stored
        if not stored:  # the trainer has logged
            self.sums.clear()
            self.counts.clear()
            self._begun = None
        if computing.micro_batch.begins_optimizer_step:
            if (step := computing.micro_batch.step) is not self._begun:
                self._begun, self._before = step, (self.sums, self.counts)
            # The figures of a restarted step (`oom: split`) do not count.
            self.sums, self.counts = self._before[0].copy(), self._before[1].copy()
        self.add(computing, metrics)
        stored.clear()
        stored.update({key: [value] for key, value in self.figures().items()})

    @abstractmethod
    def add(self, computing: Computing, metrics: dict[str, Any]) -> None:
        """Add the figures of a micro-batch of this rank. An idle one adds no figures, but its step counts."""

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """This rank's part of the sum or mean over ranks: the same keys in the same order on all ranks."""


class PairMetrics(PreferenceMetrics):
    """Figures of DPO and its variants: means over pairs. The mean of `figures` over ranks is the mean over all pairs.

    A pair has its weight in the loss of its optimizer step. A step counts by the number of stock's micro-batches
    or of pairs, whichever the loss is a mean over.
    """

    def add(self, computing: Computing, metrics: dict[str, Any]) -> None:
        step = computing.micro_batch.step
        is_stock = self.trainer.odb.config.loss_scaling == "stock"
        of_step = int(step.num_stock_means) if is_stock else step.units
        if computing.micro_batch.begins_optimizer_step:
            self.counts["pairs"] += of_step
        for key, value in metrics.items():
            self.sums[key] += 0.0 if computing.micro_batch.idle else value * computing.scale * of_step

    def divisor(self, key: str) -> str:
        """The key in `counts` of what this figure is a mean over."""
        return "pairs"

    def figures(self) -> dict[str, float]:
        return {key: value / max(self.counts[self.divisor(key)], 1) for key, value in self.sums.items()}
