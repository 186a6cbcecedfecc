"""Where the training stands in an epoch: kept as steps are consumed, written as a state, read from one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from odb_factory.data.samples import Step
from odb_factory.data.state import VERSION, Snapshot, check_states, mark_done, pack_done, unpack_done
from odb_factory.errors import DataError
from odb_factory.log import get_logger

logger = get_logger(__name__)


class Bookmark:
    """data: what must be as it was for a state to mean anything here; `order` in it is filled in for each epoch.

    plan: what must be as it was for the epoch to go on with the same groups; else its rest is dealt out anew.
    is_loaded: a state has been loaded, and no step been taken since.
    """

    def __init__(self, rank: int, world_size: int, data: dict[str, Any], plan: dict[str, Any]):
        self.rank, self.world_size, self.data, self.plan = rank, world_size, data, plan
        self._open(0)

    def _open(self, epoch: int) -> None:
        """Stand before the first step of an epoch."""
        self.epoch = epoch
        self.order: int | None = None
        self.done: np.ndarray | None = None
        self.resume: tuple[Snapshot, int] | None = None
        self._has_moved = self.is_loaded = False
        self.draws: list[int] = []

    def turn_to(self, epoch: int) -> None:
        """The next pass is over this epoch; from where a loaded state left it if it is that one."""
        if epoch != self.epoch or self._has_moved:
            self._open(epoch)

    def pass_over(self, epoch: int, num_samples: int) -> None:
        """Stand in `epoch`, behind the first samples of its order."""
        self._open(epoch)
        if num_samples:
            self.done = np.arange(self.data["samples"]) < num_samples

    @property
    def place(self) -> tuple[int, ...]:
        """Where the pass begins, as all ranks must see it alike."""
        round_index, consumed = (self.resume[0].round_index, self.resume[1]) if self.resume else (-1, 0)
        return self.epoch, round_index, consumed, -1 if self.done is None else int(self.done.sum())

    def consume(self, step: Step, snapshots: deque[Snapshot]) -> None:
        """Stand behind `step`. snapshots: those of the pass; older ones than that of its round are dropped."""
        if step.last:
            self._open(step.epoch + 1)
            return
        while snapshots[0].round_index < step.round_index:
            snapshots.popleft()
        if self.resume is None or step.round_index != self.resume[0].round_index:
            self.draws = []
        self.draws += step.draws
        self._has_moved, self.is_loaded = True, False
        self.resume = (snapshots[0], step.index + 1 - snapshots[0].steps)

    def state(self, order: int) -> dict[str, Any]:
        """JSON types. order: the fingerprint of the epoch's."""
        snapshot, consumed = self.resume or (None, 0)
        return {
            "version": VERSION,
            "rank": self.rank,
            "world_size": self.world_size,
            "data": self.data | {"order": order},
            "plan": self.plan,
            "epoch": self.epoch,
            "done": None if self.done is None else pack_done(self.done),
            "snapshot": snapshot and snapshot.to_dict(),
            "consumed": consumed,
            "emitted": list(self.draws),
        }

    def load(self, states: Sequence[dict[str, Any]], fingerprint: Callable[[int], int], *, ignore_data: bool) -> None:
        """Go on from the states of all ranks (of this one alone, where ranks and settings are as they were).

        fingerprint: that of the order of an epoch, here. Raises `DataError` with what differs.
        """
        mine = next((state for state in states if state.get("rank") == self.rank), states[0])
        if mine.get("version") != VERSION:
            check_states(states)
        self._open(mine["epoch"])
        self.is_loaded = True
        if ignore_data:
            logger.warning("resume: ignore_data: epoch %d begins anew, whatever was done of it", self.epoch)
            return
        here = self.data | {"order": fingerprint(self.epoch)}
        differs = [f"{key} {then!r} then, {now!r} now" for key, then, now in _differences(mine["data"], here)]
        if differs:
            raise DataError(
                f"the training data or their order are not those of the checkpoint ({'; '.join(differs)}), so what is "
                "left of the epoch cannot be told; bring them back, or set `resume: ignore_data` to begin it anew"
            )
        if mine["snapshot"] is None and mine["done"] is None:
            return
        self.order = here["order"]
        changed = [f"{key} {then!r} -> {now!r}" for key, then, now in _differences(mine["plan"], self.plan)]
        if mine["world_size"] != self.world_size:
            changed.append(f"ranks {mine['world_size']} -> {self.world_size}")
        positions = self._num_positions(states)
        if not changed and mine["rank"] == self.rank:
            self.done = None if mine["done"] is None else unpack_done(mine["done"], positions)
            if mine["snapshot"] is not None:
                self.resume = (Snapshot.from_dict(mine["snapshot"]), mine["consumed"])
                self.draws = list(mine["emitted"])
            return
        if self.data["split"]:
            raise DataError(
                f"{', '.join(changed)}: a stream that was split between the ranks beforehand cannot be dealt out anew; "
                "go on as before, give the ranks the whole stream, or set `resume: ignore_data`"
            )
        check_states(states)
        self.done = mark_done(states, positions)
        logger.info(
            "epoch %d goes on with other groups (%s): its %s are dealt out anew",
            self.epoch,
            ", ".join(changed),
            "other samples" if self.data["samples"] is None else f"{int((~self.done).sum())} samples left",
        )

    def _num_positions(self, states: Sequence[dict[str, Any]]) -> int:
        """Length of the bitmap: the samples of an epoch, or for a stream as many as were looked at."""
        if self.data["samples"] is not None:
            return self.data["samples"]
        drawn = [max([0, *state["emitted"], (state["snapshot"] or {}).get("drawn", 0)]) + 1 for state in states]
        before = max(len(unpack_done(state["done"], 0)) for state in states)
        return before + max(drawn) * len(states)


def _differences(then: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, then, now) of what is not as it was."""
    return [(key, then.get(key), value) for key, value in now.items() if then.get(key) != value]
