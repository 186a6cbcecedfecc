"""Where the training stands in an epoch: kept as steps are consumed, written as a state, read from one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from odb_factory.data.done_bitmap import mark_done
from odb_factory.data.samples import MicroBatch, Rejection, Sample
from odb_factory.data.snapshot import Snapshot
from odb_factory.data.state import EpochState, check_states, differences
from odb_factory.errors import DataError
from odb_factory.log import get_logger

logger = get_logger(__name__)

NUM_PROBES = 8
"""So many of the rows that a rank has consumed last are read again when it goes on, to see that they are the same."""
WAY_OUT = "take an older state, or set `resume: ignore_data` to begin the epoch anew"


class EpochProgress:
    """data: what must be as it was for a state to mean anything here; `order` in it is filled in for each epoch.

    plan: what must be as it was for the epoch to go on with the same groups; else its rest is dealt out anew.
    read_row: observes a row of the dataset by its number (None where that cannot be: a stream).
    is_loaded: a state has been loaded, and no step been taken since.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        data: dict[str, Any],
        plan: dict[str, Any],
        read_row: Callable[[int], Sample | Rejection] | None = None,
    ):
        self.rank, self.world_size, self.data, self.plan, self.read_row = rank, world_size, data, plan, read_row
        self.probes: deque[tuple[int, int]] = deque(maxlen=NUM_PROBES)
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

    def consume(self, step: MicroBatch, snapshots: deque[Snapshot]) -> None:
        """Stand behind `step`. snapshots: those of the pass; older ones than that of its round are dropped."""
        self.probes.extend(zip(step.ids, step.contents))
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
        """JSON types (see `EpochState`). order: the fingerprint of the epoch's."""
        snapshot, consumed = self.resume or (None, 0)
        return EpochState(
            rank=self.rank,
            world_size=self.world_size,
            data=self.data | {"order": order},
            plan=self.plan,
            epoch=self.epoch,
            done=self.done,
            snapshot=snapshot,
            consumed=consumed,
            emitted=tuple(self.draws),
            probes=tuple(self.probes),
        ).to_dict()

    def deals_anew(self, state: EpochState) -> bool:
        """Whether going on from it needs the states of all ranks: the epoch is under way, and its plan will change."""
        return bool((state.snapshot is not None or state.done is not None) and self._changed(state))

    def load(
        self, saved: Sequence[Mapping[str, Any]], fingerprint: Callable[[int], int], *, ignore_data: bool = False
    ) -> None:
        """Go on from the states of all ranks (of this one alone, where ranks and settings are as they were).

        fingerprint: that of the order of an epoch, here. Raises `DataError` with what differs or is damaged.
        """
        if ignore_data:
            self._begin_epoch_of(saved)
            return
        try:
            states = [EpochState.from_dict(one) for one in saved]
        except DataError as error:
            raise DataError(f"the data state cannot be read: {error}; {WAY_OUT}") from None
        mine = next((state for state in states if state.rank == self.rank), states[0])
        self._check_data(mine, fingerprint(mine.epoch))
        snapshot = mine.snapshot
        if not self._rows_are_as_they_were(mine) and snapshot is not None:
            snapshot = snapshot.without_contents()
        self._open(mine.epoch)
        self.is_loaded = True
        self.probes = deque(mine.probes, maxlen=NUM_PROBES)
        if snapshot is None and mine.done is None:
            return
        self.order = mine.data["order"]
        changed = self._changed(mine)
        if not changed:
            self.done, self.draws = mine.done, list(mine.emitted)
            self.resume = None if snapshot is None else (snapshot, mine.consumed)
            return
        if self.data["split"]:
            raise DataError(
                f"{', '.join(changed)}: a stream that was split between the ranks beforehand cannot be dealt out anew; "
                "go on as before, give the ranks the whole stream, or set `resume: ignore_data`"
            )
        try:
            check_states(states)
            self.done = mark_done(states, self.data["samples"])
        except DataError as error:
            raise DataError(f"{error}; {WAY_OUT}") from None
        logger.info(
            "epoch %d goes on with other groups (%s): its %s are dealt out anew",
            self.epoch,
            ", ".join(changed),
            "other samples" if self.data["samples"] is None else f"{int((~self.done).sum())} samples left",
        )

    def _begin_epoch_of(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Of a state that may be damaged, or of another version: 0 where even that is not in it."""
        epoch = saved[0].get("epoch") if saved and isinstance(saved[0], Mapping) else None
        self._open(epoch if isinstance(epoch, int) and epoch >= 0 else 0)
        self.is_loaded = True
        logger.warning("resume: ignore_data: epoch %d begins anew, whatever was done of it", self.epoch)

    def _changed(self, state: EpochState) -> list[str]:
        """What keeps this rank from going on with the same groups."""
        changed = [f"{key} {then!r} -> {now!r}" for key, then, now in differences(state.plan, self.plan)]
        if state.world_size != self.world_size:
            changed.append(f"ranks {state.world_size} -> {self.world_size}")
        elif state.rank != self.rank:
            changed.append(f"the state of rank {state.rank} for rank {self.rank}")
        return changed

    def _check_data(self, state: EpochState, order: int) -> None:
        differs = [
            f"{key} {then!r} then, {now!r} now"
            for key, then, now in differences(state.data, self.data | {"order": order})
        ]
        if differs:
            raise DataError(
                f"the training data or their order are not those of the checkpoint ({'; '.join(differs)}), so what is "
                "left of the epoch cannot be told; bring them back, or set `resume: ignore_data` to begin it anew"
            )

    def _rows_are_as_they_were(self, state: EpochState) -> bool:
        """Read a few consumed rows again. False if rows are not the same each time they are read (drawn at random).

        Raises `DataError` where one has changed.
        """
        if self.read_row is None:
            return True
        for row, content in state.probes:
            now = self.read_row(row)
            if not content or (isinstance(now, Sample) and now.content == content):
                continue
            again = self.read_row(row)
            if isinstance(now, Sample) and isinstance(again, Sample) and now.content != again.content:
                logger.warning(
                    "row %d of the training dataset is another each time it is read, so it is not known whether the "
                    "data are those of the checkpoint",
                    row,
                )
                return False
            found = "it says something else" if isinstance(now, Sample) else now.message
            raise DataError(
                f"the training data have changed since the checkpoint: row {row} of the training dataset was trained "
                f"on, and now: {found}; bring it back, or set `resume: ignore_data` to begin the epoch anew"
            )
        return True
