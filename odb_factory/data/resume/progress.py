"""Where the training stands in an epoch: kept as optimizer steps are consumed, written as a state, read from one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from odb_factory.data.epoch import EpochContext, EpochPlanner
from odb_factory.data.resume.state import DataState, read_state
from odb_factory.data.sampler import Start
from odb_factory.data.samples import MicroBatch, OptimizerStep, Rejection, Sample
from odb_factory.errors import DataError
from odb_factory.log import get_logger

logger = get_logger(__name__)

NUM_PROBES = 8
"""So many of the rows that a rank has trained on last are read again when it goes on, to see that they are the same."""
BUDGETS = {"token_budget", "max_patches"}
"""Settings that may change at any time: rows depend on them where overlong ones are dropped or cut."""
WAY_OUT = "take an older state, or set `resume: ignore_data` to begin the epoch anew"


class Progress(ABC):
    """One for each mode (`KeepProgress`, `FillProgress`), which also makes the planner of its epochs.

    data: what must be as it was for a state to mean anything here; `order` in it is filled in for each epoch.
    read_row: observes a row of the dataset by its number (None where that cannot be: a stream).
    is_loaded: a state has been loaded, and no step been taken since.
    order: the fingerprint that the order of the epoch must have, if a state has said so.
    rows_from: what rows are made with, as text by name; a state keeps it, so that a change is named.
    """

    mode: str
    global_batch_size: int | None = None
    """Samples of an optimizer step on all ranks; None with `fill`."""
    steps_an_epoch: int | None = None
    """Optimizer steps of an epoch, where they are known ahead."""

    def __init__(
        self, rank: int, world_size: int, data: dict[str, Any], read_row: Callable[[int], Sample | Rejection] | None
    ):
        self.rank, self.world_size, self.data, self.read_row = rank, world_size, data, read_row
        self.probes: deque[tuple[int, int]] = deque(maxlen=NUM_PROBES)
        self.rows_from: dict[str, str] = {}
        self.open(0)

    def open(self, epoch: int) -> None:
        """Stand before the first optimizer step of an epoch."""
        self.epoch = epoch
        self.order: int | None = None
        self.has_moved = self.is_loaded = False

    def turn_to(self, epoch: int) -> None:
        """The next pass is over this epoch; from where a loaded state left it if it is that one."""
        if epoch != self.epoch or self.has_moved:
            self.open(epoch)

    @property
    @abstractmethod
    def place(self) -> dict[str, int]:
        """Where the pass begins, in words of which all ranks must have the same."""

    @abstractmethod
    def start(self) -> Start:
        """Where this rank begins to draw."""

    @abstractmethod
    def planner(self, observed: Iterator[Sample | Rejection], context: EpochContext) -> EpochPlanner:
        """The planner of the epoch from there on."""

    def consume(self, step: OptimizerStep, micro_batches: Sequence[MicroBatch], planner: EpochPlanner | None) -> None:
        """Stand behind `step`. micro_batches: those of this rank since the last call. planner: None behind the last."""
        for one in micro_batches:
            self.probes.extend(zip(one.ids, one.contents))
        if step.last:
            self.open(step.epoch + 1)
        else:
            self.has_moved, self.is_loaded = True, False
            assert planner is not None
            self._move(step, micro_batches, planner)

    @abstractmethod
    def state(self, order: int) -> DataState:
        """order: the fingerprint of the epoch's."""

    def load(
        self, saved: Sequence[Mapping[str, Any]], fingerprint: Callable[[int], int], *, ignore_data: bool = False
    ) -> None:
        """Go on from the states of all ranks, or from one alone where that tells all (see `needs_all`).

        fingerprint: that of the order of an epoch, here. Raises `DataError` with what differs or is damaged.
        """
        if ignore_data:
            self._begin_epoch_of(saved)
            return
        try:
            states = [read_state(one) for one in saved]
        except DataError as error:
            raise DataError(f"the data state cannot be read: {error}; {WAY_OUT}") from None
        mine = next((state for state in states if state.rank == self.rank), states[0])
        changed = self._changed_settings(mine)
        self._check_data(mine, fingerprint(mine.epoch), changed)
        are_same = self._rows_are_as_they_were(mine, changed)
        if changed.keys() - BUDGETS:
            logger.warning(
                "%s since the checkpoint; the rows to come are made with what is set now", ", ".join(changed.values())
            )
        self.open(mine.epoch)
        self.is_loaded = True
        self.probes = deque(mine.probes, maxlen=NUM_PROBES)
        self._restore(mine, states, rows_are_same=are_same)

    @abstractmethod
    def skip(self, optimizer_steps: int, epochs: float) -> int | None:
        """Stand where stock training stands after so many optimizer steps and epochs (see `ODBLoader.skip`)."""

    def plans_ahead(self, buffer_size: int) -> int:
        """Plans made ahead of the one that is handed on."""
        return 2

    def needs_all(self, state: DataState) -> bool:
        """Whether going on from it needs the states of all ranks."""
        return False

    @abstractmethod
    def _move(self, step: OptimizerStep, micro_batches: Sequence[MicroBatch], planner: EpochPlanner) -> None: ...

    @abstractmethod
    def _restore(self, mine: DataState, states: Sequence[DataState], *, rows_are_same: bool) -> None: ...

    def _begin_epoch_of(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Of a state that may be damaged, or of another version: 0 where even that is not in it."""
        epoch = saved[0].get("epoch") if saved and isinstance(saved[0], Mapping) else None
        self.open(epoch if isinstance(epoch, int) and epoch >= 0 else 0)
        self.is_loaded = True
        logger.warning("resume: ignore_data: epoch %d begins anew, whatever was done of it", self.epoch)

    def _changed_settings(self, state: DataState) -> dict[str, str]:
        """By name, in words: what rows are made with now and were not made with then."""
        then = state.rows_from
        changed = {
            name: f"{name} was {then[name]}, is {now}"
            for name, now in self.rows_from.items()
            if then.get(name, now) != now
        }
        scaling = changed.pop("loss_scaling", None)
        if scaling is not None:
            logger.warning("%s since the checkpoint; the losses to come are weighed with what is set now", scaling)
        return changed

    def _check_data(self, state: DataState, order: int, changed: Mapping[str, str]) -> None:
        mode = state.to_dict()["mode"]
        if mode != self.mode:
            raise DataError(
                f"global_batch_size: the state was written with `{mode}`, so where it stands among the steps of "
                f"`{self.mode}` cannot be told; go on with what it was, or set `resume: ignore_data` to begin the "
                "epoch anew"
            )
        differs = [
            f"{key} was {then!r}, is {now!r}"
            for key, then, now in differences(state.data, self.data | {"order": order})
            if key != "order"
        ]
        if not differs and state.data.get("order") == order:
            return
        differs = [*changed.values(), *differs] or ["rows come in another order: another shuffling or other data sets"]
        raise DataError(
            f"the training data or their order are not those of the checkpoint ({'; '.join(differs)}), so what is left "
            "of the epoch cannot be told; bring them back, or set `resume: ignore_data` to begin it anew"
        )

    def _rows_are_as_they_were(self, state: DataState, changed: Mapping[str, str]) -> bool:
        """Read a few trained rows again. False if rows are not the same each time they are read (drawn at random).

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
            found = "it says something else" if isinstance(now, Sample) else now.message.rstrip(".;")
            if changed:
                raise DataError(
                    f"{', '.join(changed.values())}: row {row} of the training dataset was trained on, and now: "
                    f"{found}; set it back, or set `resume: ignore_data` to begin the epoch anew"
                )
            raise DataError(
                f"the training data have changed since the checkpoint: row {row} of the training dataset was trained "
                f"on, and now: {found}; bring it back, or set `resume: ignore_data` to begin the epoch anew"
            )
        return True


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, then, now) of what is not as it was."""
    return [(key, then.get(key), value) for key, value in now.items() if then.get(key) != value]
