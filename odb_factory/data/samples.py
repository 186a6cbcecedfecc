"""What travels through the loader: light samples in, steps out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from odb_factory.planning import Cost, MicroStepTotals


@dataclass(slots=True)
class Sample:
    """One observed row: its index in the training dataset, its cost and its light features (see `serialize.pack`).

    content: a checksum of what it says (see `content.checksum`); 0 if unknown.
    """

    id: int
    cost: Cost
    features: bytes
    content: int = 0


@dataclass(slots=True)
class Rejection:
    """One row that will not be trained on. `fatal`: the policy says to stop with `message`."""

    id: int
    reason: str
    message: str
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of this rank and what all ranks know about it before the first forward.

    epoch, index: position; index counts the steps of the epoch from 0. round_index: the round it was planned in.
    ids: rows of the training dataset, in batch order; empty on an idle step. draws: their numbers in this
    rank's draws of the epoch. contents: checksums of the rows of `ids`.
    tokens, supervised_tokens: of this rank's group (0 on an idle step).
    totals: the step over all ranks.
    done: samples of the epoch emitted or rejected on all ranks once this step is taken.
    rejected: rows of the epoch rejected on all ranks, by reason, when the step was planned.
    overlong: samples of the epoch that break a budget alone, on all ranks, seen when the step was planned.
    left_out: on the last step, rows neither emitted nor rejected (`join: false` only); 0 before.
    epoch_steps: steps of the whole epoch, estimated when the step was planned; exact in the last round.
    last: no step follows in this epoch.
    """

    epoch: int
    index: int
    ids: tuple[int, ...]
    tokens: int
    supervised_tokens: int
    totals: MicroStepTotals
    done: int
    rejected: Counter[str]
    overlong: int
    left_out: int
    epoch_steps: int
    last: bool
    round_index: int = 0
    draws: tuple[int, ...] = ()
    contents: tuple[int, ...] = ()

    @property
    def idle(self) -> bool:
        return not self.ids


@dataclass(frozen=True, slots=True)
class Measured:
    """The collated tensors of a step: rows, padded row length (tokens), patches, supervised tokens."""

    rows: int
    length: int
    patches: int
    supervised_tokens: int
