"""What a rank's buffer holds before it plans a round, and how far its epoch is: from it the round is planned again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from odb_factory.data.resume.fields import Fields, pack_checksums
from odb_factory.planning import CostModel, Limits


@dataclass(frozen=True, slots=True)
class BufferedSample:
    """A drawn sample that is not done.

    draw: its number in this rank's draws; age: rounds it was kept back; content: a checksum of the row, 0 if unknown.
    """

    draw: int
    age: int
    tokens: int
    content: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank before it fills its buffer and plans a round. steps, emitted, tokens_emitted: of the epoch, on all ranks.

    drawn, rejected, overlong: of this rank. next: drawn beyond the buffer; dummy: what idle steps are run with.
    model, limits: the cost model it proposes, and to what it has lowered its budgets. filled: checksums of the samples
    that were drawn for this round, in order.
    """

    round_index: int
    steps: int
    emitted: int
    tokens_emitted: int
    drawn: int
    rejected: dict[str, int]
    overlong: int
    held: tuple[BufferedSample, ...]
    next: BufferedSample | None
    dummy: BufferedSample | None
    model: CostModel
    limits: Limits | None = None
    filled: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON types; about 20 characters a sample."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {
            "rejected": dict(self.rejected),
            "held": _columns(self.held),
            "next": _columns(() if self.next is None else (self.next,)),
            "dummy": _columns(() if self.dummy is None else (self.dummy,)),
            "model": dataclasses.asdict(self.model),
            "limits": None if self.limits is None else dataclasses.asdict(self.limits),
            "filled": pack_checksums(self.filled),
        }

    @classmethod
    def from_dict(cls, fields: Fields) -> Snapshot:
        """Undo `to_dict`. Raises `DataError` with what contradicts itself."""
        model = fields.part("model")
        snapshot = cls(
            round_index=fields.whole("round_index"),
            steps=fields.whole("steps"),
            emitted=fields.whole("emitted"),
            tokens_emitted=fields.whole("tokens_emitted"),
            drawn=fields.whole("drawn"),
            rejected=fields.counts("rejected"),
            overlong=fields.whole("overlong"),
            held=_samples(fields.part("held")),
            next=_one(fields, "next"),
            dummy=_one(fields, "dummy"),
            model=CostModel(*(model.whole(field.name) for field in dataclasses.fields(CostModel))),
            limits=None if fields.value("limits") is None else _limits(fields.part("limits")),
            filled=fields.checksums("filled"),
        )
        draws = [one.draw for one in snapshot.undone]
        fields.require(len(set(draws)) == len(draws), "held", "a sample is in it twice")
        fields.require(
            all(one.draw < snapshot.drawn for one in snapshot.waiting), "drawn", "samples of later draws are held"
        )
        fields.require(
            len(draws) + sum(snapshot.rejected.values()) <= snapshot.drawn, "drawn", "more samples are held or rejected"
        )
        # Steps without a sample only fill up the last optimizer step of an epoch, behind which no state is taken.
        fields.require(snapshot.steps <= snapshot.emitted, "steps", f"only {snapshot.emitted} samples were emitted")
        return snapshot

    @property
    def undone(self) -> list[BufferedSample]:
        """What was drawn and waits to be trained on."""
        return [*self.held, *([] if self.next is None else [self.next])]

    @property
    def waiting(self) -> list[BufferedSample]:
        """All that was drawn and is to be observed again, in the order of the draws, each once."""
        by_draw = {} if self.dummy is None else {self.dummy.draw: self.dummy}
        by_draw |= {one.draw: one for one in self.undone}  # the buffer's ages
        return [by_draw[draw] for draw in sorted(by_draw)]

    def without_contents(self) -> Snapshot:
        """Itself, for rows that are not the same each time they are read."""

        def blank(one: BufferedSample | None) -> BufferedSample | None:
            return None if one is None else dataclasses.replace(one, content=0)

        return dataclasses.replace(
            self,
            held=tuple(dataclasses.replace(one, content=0) for one in self.held),
            next=blank(self.next),
            dummy=blank(self.dummy),
            filled=(0,) * len(self.filled),
        )


def _limits(fields: Fields) -> Limits:
    unlimited = fields.value("max_patches") is None
    return Limits(fields.whole("token_budget", 1), None if unlimited else fields.whole("max_patches", 1))


def _columns(samples: Sequence[BufferedSample]) -> dict[str, Any]:
    return {
        "draw": [one.draw for one in samples],
        "age": [one.age for one in samples],
        "tokens": [one.tokens for one in samples],
        "content": pack_checksums([one.content for one in samples]),
    }


def _samples(columns: Fields) -> tuple[BufferedSample, ...]:
    draws, ages, tokens = columns.wholes("draw"), columns.wholes("age"), columns.wholes("tokens")
    contents = columns.checksums("content")
    columns.require(len(draws) == len(ages) == len(tokens) == len(contents), "draw", "its columns differ in length")
    return tuple(BufferedSample(*values) for values in zip(draws, ages, tokens, contents))


def _one(fields: Fields, key: str) -> BufferedSample | None:
    samples = _samples(fields.part(key))
    fields.require(len(samples) <= 1, key, "there is one at most")
    return samples[0] if samples else None
