"""Samples that a rank has drawn and that no optimizer step has had yet, and how they are found again after a stop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from odb_factory.data.resume.snapshot import BufferedSample
from odb_factory.data.samples import Rejection, Sample
from odb_factory.errors import DataError

ROW_CHANGED = (
    "the training data have changed since the checkpoint: a row{before} that waited or had just been trained on is "
    "now: {now}; bring it back, or set `resume: ignore_data` to begin the epoch anew."
)


@dataclass(slots=True)
class Drawn:
    """A sample in the buffer. draw: its number in this rank's draws; age: rounds it was kept back."""

    sample: Sample
    draw: int
    age: int = 0

    def as_saved(self) -> BufferedSample:
        return BufferedSample(self.draw, self.age, self.sample.cost.tokens, self.sample.content)


def found_again(waiting: Sequence[BufferedSample], observed: Iterator[Sample | Rejection]) -> Iterator[Drawn]:
    """What waited at a stop, observed again. Raises `DataError` with a row that is another than it was."""
    for held in waiting:
        item = next(observed, None)
        before = f" ({held.tokens} tokens)"
        if not isinstance(item, Sample):
            raise DataError(ROW_CHANGED.format(before=before, now=getattr(item, "message", "no row")))
        if item.cost.tokens != held.tokens or (held.content and item.content != held.content):
            now = f"row {item.id}, of {item.cost.tokens} tokens and with other content"
            raise DataError(ROW_CHANGED.format(before=before, now=now))
        yield Drawn(item, held.draw, held.age)


def check_filled(filled: Sequence[Drawn], before: Sequence[int]) -> None:
    """Raise `DataError` if the rows drawn for a round are others than before a stop. before: their checksums then."""
    for one, content in zip(filled, before):
        if content and one.sample.content != content:
            now = f"row {one.sample.id}, which says something else"
            raise DataError(ROW_CHANGED.format(before="", now=now))
    if len(filled) != len(before):
        now = f"one of {len(filled)} usable rows drawn at this place, where there were {len(before)}"
        raise DataError(ROW_CHANGED.format(before="", now=now))
