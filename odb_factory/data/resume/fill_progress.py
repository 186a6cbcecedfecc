"""Progress in an epoch of filled optimizer steps: done samples, buffers, and the round under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from odb_factory.data.epoch import EpochContext, EpochPlanner
from odb_factory.data.fill_epoch import FillEpoch
from odb_factory.data.resume.done_bitmap import mark_done
from odb_factory.data.resume.fill_state import FillState, check_states
from odb_factory.data.resume.progress import WAY_OUT, Progress, differences
from odb_factory.data.resume.snapshot import Snapshot
from odb_factory.data.resume.state import DataState
from odb_factory.data.sampler import Start
from odb_factory.data.samples import MicroBatch, OptimizerStep, Rejection, Sample
from odb_factory.errors import DataError
from odb_factory.log import get_logger

logger = get_logger(__name__)


class FillProgress(Progress):
    """settings: of `FillEpoch`. plan: what must be as it was for the epoch to go on with the same micro-batches; else
    its rest is dealt out anew."""

    mode = "fill"

    def __init__(
        self,
        rank: int,
        world_size: int,
        settings: dict[str, Any],
        data: dict[str, Any],
        plan: dict[str, Any],
        read_row: Callable[[int], Sample | Rejection] | None = None,
    ):
        self.plan, self.settings = plan | settings, settings
        super().__init__(rank, world_size, data, read_row)

    def open(self, epoch: int) -> None:
        super().open(epoch)
        self.done: np.ndarray | None = None
        self.resume: tuple[Snapshot, int] | None = None
        self.draws: list[int] = []

    def skip(self, optimizer_steps: int, epochs: float) -> int:
        """Returns how many samples of the order are taken for done."""
        num_samples = self.data["samples"] or 0
        done = round((epochs - int(epochs)) * num_samples)
        self.open(int(epochs))
        if done:
            self.done = np.arange(num_samples) < done
        self.is_loaded = True
        return done

    @property
    def place(self) -> dict[str, int]:
        round_index, consumed = (self.resume[0].round_index, self.resume[1]) if self.resume else (-1, 0)
        return {
            "epoch": self.epoch,
            "plans made in it": round_index + 1,
            "micro-batches done of the last plan": consumed,
            "samples done before": -1 if self.done is None else int(self.done.sum()),
        }

    def start(self) -> Start:
        if self.resume is None:
            return Start(done=self.done)
        snapshot = self.resume[0]
        return Start(done=self.done, replay=tuple(held.draw for held in snapshot.waiting), first=snapshot.drawn)

    def planner(self, observed: Iterator[Sample | Rejection], context: EpochContext) -> EpochPlanner:
        return FillEpoch(
            observed,
            context,
            epoch=self.epoch,
            done_before=0 if self.done is None else int(self.done.sum()),
            resume=self.resume,
            emitted_before=self.draws,
            **self.settings,
        )

    def state(self, order: int) -> FillState:
        snapshot, consumed = self.resume or (None, 0)
        return FillState(
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
            rows_from=self.rows_from,
        )

    def needs_all(self, state: DataState) -> bool:
        """The epoch is under way, and its plan will change."""
        return isinstance(state, FillState) and bool(
            (state.snapshot is not None or state.done is not None) and self._changed(state)
        )

    def _move(self, step: OptimizerStep, micro_batches: Sequence[MicroBatch], planner: EpochPlanner) -> None:
        assert isinstance(planner, FillEpoch)
        snapshots = planner.snapshots
        for one in micro_batches:
            while snapshots[0].round_index < one.round_index:
                snapshots.popleft()
            if self.resume is None or one.round_index != self.resume[0].round_index:
                self.draws = []
            self.draws += one.positions
            self.resume = (snapshots[0], one.number + 1 - snapshots[0].steps)

    def _restore(self, mine: DataState, states: Sequence[DataState], *, rows_are_same: bool) -> None:
        assert isinstance(mine, FillState)
        snapshot = mine.snapshot
        if snapshot is not None and not rows_are_same:
            snapshot = snapshot.without_contents()
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
            of_all = [state for state in states if isinstance(state, FillState)]
            check_states(of_all)
            self.done = mark_done(of_all, self.data["samples"])
        except DataError as error:
            raise DataError(f"{error}; {WAY_OUT}") from None
        logger.info(
            "epoch %d goes on with other micro-batches (%s): its %s are dealt out anew",
            self.epoch,
            ", ".join(changed),
            "other samples" if self.data["samples"] is None else f"{int((~self.done).sum())} samples left",
        )

    def _changed(self, state: FillState) -> list[str]:
        """What keeps this rank from going on with the same micro-batches."""
        changed = [f"{key} {then!r} -> {now!r}" for key, then, now in differences(state.plan, self.plan)]
        if state.world_size != self.world_size:
            changed.append(f"ranks {state.world_size} -> {self.world_size}")
        elif state.rank != self.rank:
            changed.append(f"the state of rank {state.rank} for rank {self.rank}")
        return changed
