"""What a stopped epoch of filled optimizer steps needs to go on: what is done, what is buffered, what was planned.

A state belongs to what the training has consumed, not to what was fetched or planned ahead. It does not
list the samples that are done: every rank draws its share in order, so the number of draws and the few that
were drawn and are not done tell them all. Continued with the same ranks and settings, the round under way is
planned again from what the buffer held before it, and its consumed steps are passed over: the same groups in
the same order. Otherwise what is done is marked in a bitmap over the order, and the rest is dealt out anew.

Checksums of what the rows said make sure that they say the same when they are read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from odb_factory.data.resume.done_bitmap import pack_done, unpack_done
from odb_factory.data.resume.fields import VERSION, Fields, pack_probes
from odb_factory.data.resume.snapshot import Snapshot
from odb_factory.errors import DataError


@dataclass(frozen=True)
class FillState:
    """Where one rank stands in an epoch.

    data: what must be as it was for the state to mean anything; plan: what must be for the same groups to come.
    done: bool a position of the epoch's order (None: nothing is done), rounded up to whole bytes.
    snapshot: of the round under way, of which `consumed` steps are done and have emitted the draws `emitted`.
    probes: (row of the dataset, checksum) of a few samples that were consumed.
    rows_from: what the rows were made with, as text by name.
    """

    rank: int
    world_size: int
    data: dict[str, Any]
    plan: dict[str, Any]
    epoch: int
    done: np.ndarray | None
    snapshot: Snapshot | None
    consumed: int
    emitted: tuple[int, ...]
    probes: tuple[tuple[int, int], ...] = ()
    rows_from: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON types; some kilobytes, whatever the dataset, unless it was dealt out anew."""
        return {
            "version": VERSION,
            "mode": "fill",
            "rank": self.rank,
            "world_size": self.world_size,
            "data": self.data,
            "plan": self.plan,
            "epoch": self.epoch,
            "done": None if self.done is None else pack_done(self.done),
            "snapshot": None if self.snapshot is None else self.snapshot.to_dict(),
            "consumed": self.consumed,
            "emitted": list(self.emitted),
            "probes": pack_probes(self.probes),
            "rows_from": dict(self.rows_from),
        }

    @classmethod
    def from_dict(cls, saved: Any) -> FillState:
        """Undo `to_dict`. Raises `DataError`, a clause without a way out, where it is damaged or of another version."""
        fields = Fields(saved)
        world_size = fields.whole("world_size", 1)
        data = fields.part("data")
        num_samples = None if data.value("samples") is None else data.whole("samples")
        data.whole("seed", None)
        data.whole("order")
        data.flag("split")
        state = cls(
            rank=fields.whole("rank", 0, world_size - 1),
            world_size=world_size,
            data=fields.mapping("data"),
            plan=fields.mapping("plan"),
            epoch=fields.whole("epoch"),
            done=None if fields.value("done") is None else unpack_done(fields.bytes("done"), num_samples),
            snapshot=None if fields.value("snapshot") is None else Snapshot.from_dict(fields.part("snapshot")),
            consumed=fields.whole("consumed"),
            emitted=tuple(fields.wholes("emitted")),
            probes=fields.probes("probes"),
            rows_from=fields.mapping("rows_from"),
        )
        state._check(fields, num_samples)
        return state

    def _check(self, fields: Fields, num_samples: int | None) -> None:
        emitted, snapshot = set(self.emitted), self.snapshot
        fields.require(len(emitted) == len(self.emitted), "emitted", "a sample is in it twice")
        if snapshot is None:
            fields.require(not self.consumed and not emitted, "consumed", "no round is under way")
            return
        fields.require(self.consumed > 0, "consumed", "a round is under way")
        held = {one.draw for one in snapshot.undone}
        fields.require(
            all(draw in held or draw >= snapshot.drawn for draw in emitted),
            "emitted",
            "these samples were not in the buffer",
        )
        fields.require(
            sum(draw >= snapshot.drawn for draw in emitted) <= len(snapshot.filled),
            "emitted",
            f"{len(snapshot.filled)} samples were drawn for the round",
        )
        if num_samples is not None:
            before = 0 if self.done is None else int(self.done.sum())
            total = before + snapshot.emitted + sum(snapshot.rejected.values()) + len(held)
            fields.require(
                total <= num_samples and snapshot.drawn + before <= num_samples,
                "snapshot",
                f"an epoch has {num_samples} samples, and these are more",
            )


def check_states(states: Sequence[FillState]) -> None:
    """Raise `DataError` unless these are the states of all ranks at one moment of one run."""
    world_size = states[0].world_size
    ranks = [state.rank for state in states]
    if ranks != list(range(world_size)):
        raise DataError(
            f"the data state was written by {world_size} ranks, and of these {ranks} were found; all are needed to go "
            "on with other ranks or settings (are the checkpoint's files of all nodes in one place?)"
        )
    if len({_moment(state) for state in states}) > 1:
        raise DataError("the data states of the ranks are of different moments")


def _moment(state: FillState) -> tuple[Any, ...]:
    round_index = None if state.snapshot is None else state.snapshot.round_index
    data = sorted((key, value) for key, value in state.data.items())
    return state.epoch, round_index, state.consumed, state.world_size, str(data)
