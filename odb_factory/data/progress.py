"""Where the training stands in an epoch: kept as optimizer steps are consumed, written as a state, read from one."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from odb_factory.config import ODBConfig
from odb_factory.data.epoch import EpochContext, EpochPlanner, KeepEpoch
from odb_factory.data.fill_epoch import FillEpoch
from odb_factory.data.order import OF_STEP, Start, StockMean, StockSteps
from odb_factory.data.samples import MicroBatch, OptimizerStep, Rejection, Sample
from odb_factory.data.state import DataState, FillState, KeepState, Snapshot, check_states, mark_done, read_state
from odb_factory.errors import ConfigError, DataError
from odb_factory.log import get_logger
from odb_factory.planning import Budget

# ----------------------------------------------------------------------------------------------------------------------
# Where the training stands in an epoch: kept as optimizer steps are consumed, written as a state, read from one.

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


# ----------------------------------------------------------------------------------------------------------------------
# Progress in an epoch of kept optimizer steps: a cursor, the same on all ranks.


class KeepProgress(Progress):
    """Budget, workers and (but for a stream that is split beforehand) ranks may change at any optimizer step."""

    mode = "keep"

    def __init__(
        self,
        rank: int,
        stock: StockSteps,
        data: dict[str, Any],
        read_row: Callable[[int], Sample | Rejection] | None = None,
    ):
        self.stock = stock
        steps = {"global_batch_size": stock.global_batch_size, "rows left out by drop_last": stock.not_trained}
        super().__init__(rank, stock.world_size, data | steps, read_row)
        self.global_batch_size, self.steps_an_epoch = stock.global_batch_size, stock.steps_an_epoch

    def plans_ahead(self, buffer_size: int) -> int:
        """As many optimizer steps as the buffer holds of a rank's samples: with the one handed on, one more is held."""
        return max(1, buffer_size * self.stock.world_size // self.stock.global_batch_size)

    def open(self, epoch: int) -> None:
        super().open(epoch)
        self.optimizer_steps = self.trained = self.overlong = 0
        self.rejected: Counter[str] = Counter()

    def skip(self, optimizer_steps: int, epochs: float) -> None:
        """Raises `DataError` for a dataset without a length."""
        an_epoch = self.stock.steps_an_epoch
        if an_epoch is None:
            raise DataError(
                "the checkpoint was written without odb, and where its optimizer steps end in a dataset without a "
                "length is not known; set `resume: ignore_data` to begin an epoch anew"
            )
        epoch, done = divmod(optimizer_steps, max(an_epoch, 1))
        self.open(epoch)
        self.optimizer_steps, self.trained = done, done * self.stock.global_batch_size
        self.is_loaded = True

    @property
    def place(self) -> dict[str, int]:
        return {"epoch": self.epoch, "optimizer steps done in it": self.optimizer_steps}

    def start(self) -> Start:
        stock = self.stock
        return Start(
            first=stock.first_number(self.rank, self.optimizer_steps),
            stop=stock.num_samples if stock.not_trained else None,
            block=stock.global_batch_size,
        )

    def planner(self, observed: Iterator[Sample | Rejection], context: EpochContext) -> EpochPlanner:
        return KeepEpoch(
            observed,
            context,
            stock=self.stock,
            epoch=self.epoch,
            first_step=self.optimizer_steps,
            trained=self.trained,
            rejected=self.rejected,
            overlong=self.overlong,
        )

    def state(self, order: int) -> KeepState:
        return KeepState(
            rank=self.rank,
            world_size=self.world_size,
            data=self.data | {"order": order},
            epoch=self.epoch,
            optimizer_steps=self.optimizer_steps,
            trained=self.trained,
            rejected=self.rejected,
            overlong=self.overlong,
            probes=tuple(self.probes),
            rows_from=self.rows_from,
        )

    def _move(self, step: OptimizerStep, micro_batches: Sequence[MicroBatch], planner: EpochPlanner) -> None:
        self.optimizer_steps = step.index + 1
        self.trained = step.done - step.rejected.total()  # of steps that were passed over unsaid, too
        self.rejected, self.overlong = step.rejected, step.overlong

    def _restore(self, mine: DataState, states: Sequence[DataState], *, rows_are_same: bool) -> None:
        assert isinstance(mine, KeepState)
        if mine.data["split"] and mine.world_size != self.world_size:
            raise DataError(
                f"ranks {mine.world_size} -> {self.world_size}: a stream that was split between the ranks beforehand "
                "cannot be dealt out anew; go on as before, give the ranks the whole stream, or set "
                "`resume: ignore_data`"
            )
        if mine.optimizer_steps:
            self.order = mine.data["order"]
        self.optimizer_steps, self.trained = mine.optimizer_steps, mine.trained
        self.rejected, self.overlong = Counter(mine.rejected), mine.overlong


# ----------------------------------------------------------------------------------------------------------------------
# Progress in an epoch of filled optimizer steps: done samples, buffers, and the round under way.


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


# ----------------------------------------------------------------------------------------------------------------------
# What makes an optimizer step, and the `Progress` that follows from it.

Layout = Literal["padded", "flat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStepRule:
    """The optimizer steps of the training as it would be without odb.

    batch_size: rows of a micro-batch; accumulation: micro-batches of an optimizer step (with `fill`, ours too).
    drop_last: samples that do not fill a micro-batch on every rank are left out.
    stock_mean: what the loss is made of.
    equal_weights: samples that stock weighs differently must not share a micro-batch.
    """

    batch_size: int = 1
    accumulation: int = 1
    drop_last: bool = False
    stock_mean: StockMean = OF_STEP
    equal_weights: bool = False

    @property
    def settings(self) -> dict[str, object]:
        """What ranks compare."""
        return {
            "per_device_train_batch_size": self.batch_size,
            "gradient_accumulation_steps": self.accumulation,
            "drop_last": self.drop_last,
            "what stock's loss is the mean of": self.stock_mean.over,
        }


def progress_for(
    config: ODBConfig,
    rule: OptimizerStepRule,
    *,
    budget: Budget,
    rank: int,
    world_size: int,
    data: dict[str, Any],
    read_row: Callable[[int], Sample | Rejection] | None,
) -> Progress:
    """data: what must be as it was for a state to mean anything; read_row: see `Progress`."""
    if config.keeps:
        stock = _stock_steps(config, rule, world_size, data["samples"], is_split=data["split"])
        return KeepProgress(rank, stock, data, read_row)
    if rule.drop_last:
        raise ConfigError(
            "drop_last: True (dataloader_drop_last) would leave out the samples of a last, smaller batch, and "
            "`global_batch_size: fill` trains on every sample; set it to False, or keep the optimizer steps."
        )
    settings = {"buffer_size": config.buffer_size, "accumulation": rule.accumulation, "join": config.join}
    plan = {
        "token_budget": config.token_budget,
        "max_patches": config.max_patches,
        "balance": config.balance,
        "cost_model": config.cost_model,
        "overlong": config.overlong,
        "on_error": config.on_error,
        "collation": [str(value) for value in dataclasses.astuple(budget.collation)],  # of tuples JSON makes lists
        "layout": budget.layout,
        "pad_to_multiple_of": budget.sizes.multiple,
        "length_buckets": list(budget.sizes.buckets),
        "row_multiple": budget.row_multiple,
    }
    return FillProgress(rank, world_size, settings, data, plan, read_row)


def _stock_steps(
    config: ODBConfig, rule: OptimizerStepRule, world_size: int, num_samples: int | None, *, is_split: bool
) -> StockSteps:
    of_all_ranks = rule.batch_size * world_size
    size = of_all_ranks * rule.accumulation
    if isinstance(config.global_batch_size, int):
        size = config.global_batch_size
    if is_split and size % of_all_ranks:
        raise ConfigError(
            f"odb.global_batch_size: {size} is no multiple of {rule.batch_size} rows x {world_size} ranks, and each "
            "rank has a stream of its own to take them from; choose a multiple."
        )
    not_trained = num_samples % of_all_ranks if rule.drop_last and num_samples is not None else 0
    return StockSteps(
        global_batch_size=size,
        batch_size=rule.batch_size,
        world_size=world_size,
        num_samples=None if num_samples is None else num_samples - not_trained,
        not_trained=not_trained,
        mean=rule.stock_mean,
        equal_weights=rule.equal_weights and config.loss_scaling == "stock",
        is_split=is_split,
    )
