"""What a stopped epoch of kept optimizer steps needs to go on: a cursor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from odb_factory.data.resume.fields import VERSION, Fields, pack_probes


@dataclass(frozen=True, kw_only=True)
class KeepState:
    """Where all ranks stand in an epoch, as one of them says it; only `rank` and `probes` are its own.

    data: what must be as it was for the state to mean anything. optimizer_steps: of the epoch that are done.
    trained, rejected, overlong: samples of these steps, of all ranks.
    probes: (row of the dataset, checksum) of a few samples that were trained on last.
    rows_from: what the rows were made with, as text by name.
    """

    rank: int
    world_size: int
    data: Mapping[str, Any]
    epoch: int
    optimizer_steps: int
    trained: int
    rejected: Mapping[str, int]
    overlong: int
    probes: tuple[tuple[int, int], ...] = ()
    rows_from: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON types; one or two kilobytes."""
        return {
            "version": VERSION,
            "mode": "keep",
            "rank": self.rank,
            "world_size": self.world_size,
            "data": dict(self.data),
            "epoch": self.epoch,
            "optimizer_steps": self.optimizer_steps,
            "trained": self.trained,
            "rejected": dict(self.rejected),
            "overlong": self.overlong,
            "probes": pack_probes(self.probes),
            "rows_from": dict(self.rows_from),
        }

    @classmethod
    def from_dict(cls, saved: Any) -> KeepState:
        """Undo `to_dict`. Raises `DataError`, a clause without a way out, where it is damaged."""
        fields = Fields(saved)
        world_size = fields.whole("world_size", 1)
        data = fields.part("data")
        num_samples = None if data.value("samples") is None else data.whole("samples")
        global_batch_size = data.whole("global_batch_size", 1)
        state = cls(
            rank=fields.whole("rank", 0, world_size - 1),
            world_size=world_size,
            data=fields.mapping("data"),
            epoch=fields.whole("epoch"),
            optimizer_steps=fields.whole("optimizer_steps"),
            trained=fields.whole("trained"),
            rejected=fields.counts("rejected"),
            overlong=fields.whole("overlong"),
            probes=fields.probes("probes"),
            rows_from=fields.mapping("rows_from"),
        )
        most = state.optimizer_steps * global_batch_size
        fields.require(state.trained + sum(state.rejected.values()) <= most, "trained", f"{most} samples were drawn")
        fields.require(
            num_samples is None or most == 0 or most < num_samples,  # behind the last stands the next epoch
            "optimizer_steps",
            f"an epoch has {num_samples} samples",
        )
        return state
