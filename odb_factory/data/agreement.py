"""What ranks tell each other to agree on a round, and the ways they may do so."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from odb_factory.batching import CostModel, Window
from odb_factory.errors import DataError


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank tells the others in a round: what it holds, and counts of this epoch.

    rejected: rows that are not trained on, by reason. overlong: samples that break a budget alone and are.
    model: the cost model it proposes; that of the first rank is taken.
    order: a checksum of the order in which all ranks together draw, to be sure that it is the same order.
    """

    window: Window
    rejected: Counter[str]
    overlong: int = 0
    order: int = 0
    model: CostModel = CostModel()


class Exchange(Protocol):
    """How ranks agree: everybody's report to everybody, once a round, by the planning threads."""

    timeout_s: float
    """How long a rank may have to wait for the others (seconds)."""

    def start(self) -> None:
        """The worker processes of the loader have been started: threads may be."""

    def check(self) -> None:
        """Raises `AgreedError` if a rank has said farewell; for the main thread while it waits for a plan."""

    def __call__(self, report: Report, round_index: int) -> list[Report]:
        """The reports of all ranks in rank order. Raises `AgreedError` if there is none of some rank."""

    def trade(self, parcels: list[bytes]) -> list[bytes]:
        """Hand one parcel to each rank, itself included; those meant for this one, in rank order. All ranks call it."""

    def leave(self) -> None:
        """Tell the others, in place of the next report, that this rank leaves the epoch."""

    def fail(self, message: str) -> None:
        """Tell the others, in place of the next report, why this rank cannot go on."""

    def farewell(self, message: str) -> None:
        """Tell the others that the training itself has failed here (main thread)."""

    def close(self) -> None:
        """No more rounds."""


class Alone:
    """The exchange of a single rank: nobody to wait for, nobody to tell."""

    timeout_s = 30.0

    def start(self) -> None: ...

    def check(self) -> None: ...

    def __call__(self, report: Report, round_index: int) -> list[Report]:
        return [report]

    def trade(self, parcels: list[bytes]) -> list[bytes]:
        return parcels

    def leave(self) -> None: ...

    def fail(self, message: str) -> None: ...

    def farewell(self, message: str) -> None: ...

    def close(self) -> None: ...


class AgreedError(DataError):
    """An error of the planning, which every rank knows of and raises: nobody is left waiting."""
