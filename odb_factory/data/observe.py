"""Observe: turn dataset rows into light samples with a known cost, in worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from odb_factory.config import ODBConfig
from odb_factory.data.content import checksum
from odb_factory.data.samples import Rejection, Sample
from odb_factory.data.serialize import pack
from odb_factory.data.worker import BusyRows, WorkerDataset, retried
from odb_factory.errors import DataError, one_line
from odb_factory.planning import Budget, Cost


class RowDropped(Exception):
    """The framework itself would drop this row; `reason` is the word it is counted under."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class MediaCut(Exception):
    """Truncation cut visual placeholders, so the sample cannot be trained on in any group."""


class ItemError(DataError):
    """An item is not of the kind that the observer reads, as most likely all are; the message says what to do."""


class Observer(Protocol):
    """Runs the framework's template, tokenizer and multimodal plugin on one row."""

    def __call__(self, dataset: Any, index: int) -> tuple[Mapping[str, Any], Cost]:
        """The light features of a row and its cost. May raise `RowDropped`, `MediaCut` or anything else."""

    def describe(self, dataset: Any, index: int) -> str:
        """Where the row comes from, for messages: dataset, row, files."""


def where(observer: Observer, dataset: Any, index: int) -> str:
    """Where a row comes from; its number alone if even that cannot be read."""
    try:
        return observer.describe(dataset, index)
    except Exception:
        return f"row {index} of the training dataset"


class ObservedDataset(WorkerDataset):
    """`dataset[i]` as `Sample`, or as `Rejection` where the row cannot be used. Never raises for a row."""

    def __init__(
        self, dataset: Any, observer: Observer, config: ODBConfig, budget: Budget, busy: BusyRows | None = None
    ):
        self.dataset, self.observer, self.config, self.budget = dataset, observer, config, budget
        self.busy = busy or BusyRows()

    def __getitem__(self, index: int) -> Sample | Rejection:
        try:
            with self.busy.at(index):
                features, cost = retried(lambda: self.observer(self.dataset, index), (RowDropped, MediaCut, ItemError))
            sample = Sample(index, cost, pack(features), checksum(features, cost))
        except RowDropped as error:
            return Rejection(index, error.reason, f"{self._where(index)}: {error}")
        except MediaCut as error:
            return self._reject(
                index,
                "media_cut",
                str(error),
                "such a sample cannot travel as a singleton either: "
                "raise cutoff_len, shrink the media (image_max_pixels, video_maxlen), or set `overlong: drop`",
                fatal=self.config.overlong != "drop",
            )
        except Exception as error:
            is_item = isinstance(error, ItemError)
            return self._reject(
                index,
                "unreadable",
                str(error) if is_item else one_line(error),
                "" if is_item else "mend or remove the row, or set `on_error: skip` to go on without such rows",
                fatal=self.config.on_error == "raise",
            )
        if cost.units == 0:
            return self._reject(index, "unsupervised", "no label carries loss (truncation may have cut them off)")
        if self.config.overlong != "singleton" and self.budget.overlong(cost):
            found, budget = f"{cost.tokens} tokens", f"{self.budget.token_budget} tokens"
            if self.budget.max_patches is not None:
                found, budget = f"{found} and {cost.patches} patches", f"{budget} and {self.budget.max_patches} patches"
            return self._reject(
                index,
                "overlong",
                f"{found} break the budget of {budget} alone",
                "raise the budget, or set `overlong: singleton` or `drop`",
                fatal=self.config.overlong == "error",
            )
        return sample

    def _reject(self, index: int, reason: str, what: str, way_out: str = "", fatal: bool = False) -> Rejection:
        """way_out: said where the policy is to stop; elsewhere what it advises has been done."""
        message = f"{self._where(index)}: {what.rstrip('.')}"
        return Rejection(index, reason, f"{message}; {way_out}." if fatal and way_out else f"{message}.", fatal)

    def _where(self, index: int) -> str:
        return where(self.observer, self.dataset, index)
