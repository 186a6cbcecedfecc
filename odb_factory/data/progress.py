"""Where the training stands in an epoch: kept as optimizer steps are consumed, written as a state, read from one."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from odb_factory.config import BUDGETS, ODBConfig
from odb_factory.data.epoch import EpochContext, EpochPlanner, KeepEpoch
from odb_factory.data.fill_epoch import FillEpoch
from odb_factory.data.order import OF_STEP, Start, StockMean, StockSteps
from odb_factory.data.samples import MicroBatch, OptimizerStep, Rejection, Sample
from odb_factory.data.state import DataState, Share, TrainingData, done_positions, read_state
from odb_factory.errors import ConfigError, DataError
from odb_factory.log import get_logger

logger = get_logger(__name__)

NUM_PROBES = 8
"""The rows that a rank has trained on last and reads again when it resumes, to see that they are the same."""
ReadRow = Callable[[int], Sample | Rejection]
WAY_OUT = "take an older state, or set `resume: ignore_data` to begin the epoch anew"


class Progress(ABC):
    """One for each mode (`KeepProgress`, `FillProgress`), which also makes the planner of its epochs.

    now: the state after the optimizer step consumed last.
    read_row: observes a row of the dataset by its number (None where that cannot be: a stream).
    is_loaded: a state has been loaded, and no step been taken since.
    order: the fingerprint that the order of the epoch must have, if a state was loaded.
    rows_from: what rows are made with, as text by name; a state keeps it, so that a change is named.
    """

    mode: Literal["keep", "fill"]
    share: Share | None
    """Of a rank before the first step of an epoch."""
    global_batch_size: int | None = None
    """Samples of an optimizer step on all ranks; None with `fill`."""
    steps_an_epoch: int | None = None
    """Optimizer steps of an epoch, where they are known ahead."""

    def __init__(self, rank: int, world_size: int, data: TrainingData, read_row: ReadRow | None):
        self.rank, self.world_size, self.data, self.read_row = rank, world_size, data, read_row
        self.probes: deque[tuple[int, int]] = deque(maxlen=NUM_PROBES)
        self.rows_from: dict[str, str] = {}
        self.open(0)

    @property
    def epoch(self) -> int:
        return self.now.epoch

    @property
    def place(self) -> dict[str, int]:
        """Where the pass begins, in words of which all ranks must have the same."""
        now = self.now
        return {
            "epoch": now.epoch,
            "optimizer steps done in it": now.optimizer_steps,
            "samples done in it": now.done,
        }

    def open(self, epoch: int, **place: Any) -> None:
        """Stand before the first optimizer step of an epoch, or at `place` (fields of `DataState`)."""
        self.order: int | None = None
        self.has_moved = self.is_loaded = False
        self.now = DataState(
            mode=self.mode,
            rank=self.rank,
            world_size=self.world_size,
            data=self.data,
            epoch=epoch,
            probes=(),
            rows_from={},
            **{"share": self.share} | place,
        )

    def turn_to(self, epoch: int) -> None:
        """The next pass is over this epoch; from where a loaded state left it if it is that one."""
        if epoch != self.epoch or self.has_moved:
            self.open(epoch)

    @abstractmethod
    def start(self) -> Start:
        """Where this rank begins to draw."""

    @abstractmethod
    def planner(self, observed: Iterator[Sample | Rejection], context: EpochContext) -> EpochPlanner:
        """The planner of the epoch from there on."""

    def consume(self, step: OptimizerStep, micro_batches: Sequence[MicroBatch], planner: EpochPlanner | None) -> None:
        """Stand after `step`. micro_batches: those of this rank since the last call. planner: None after the last."""
        for one in micro_batches:
            self.probes.extend((sample.id, sample.content) for sample in one.samples)
        if step.last:
            self.open(step.epoch + 1)
            return
        assert planner is not None
        self.has_moved, self.is_loaded = True, False
        rejected = dict(step.rejected)
        self.now = replace(
            self.now,
            optimizer_steps=step.index + 1,
            trained=step.done - sum(rejected.values()),  # of steps that were passed over, too
            rejected=rejected,
            overlong=step.overlong,
            share=self._share_after(micro_batches, planner),
        )

    def state(self, order: int) -> DataState:
        """order: the fingerprint of the epoch's."""
        return replace(
            self.now,
            data=replace(self.data, order=order),
            probes=tuple(self.probes),
            rows_from=self.rows_from,
        )

    def load(
        self, saved: Sequence[Mapping[str, Any]], fingerprint: Callable[[int], int], *, ignore_data: bool = False
    ) -> None:
        """Resume from the states of all ranks, or from one alone if that is enough: with kept steps, or if it is this
        rank's and there are as many ranks as before.

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
        self._check_rows(mine, changed)
        if changed.keys() - BUDGETS:  # budgets may change: rows depend on them where overlong ones are dropped or cut
            logger.warning(
                "%s since the checkpoint; the rows to come are made with what is set now", ", ".join(changed.values())
            )
        change = f"ranks {mine.world_size} -> {self.world_size}" if mine.world_size != self.world_size else ""
        if not change and self.share is not None and mine.rank != self.rank:
            change = f"the state of rank {mine.rank} for rank {self.rank}"
        if change and mine.data.split and not _is_at_begin(mine):
            raise DataError(
                f"{change}: a stream that was split between the ranks beforehand cannot be dealt out anew; go on as "
                "before, give the ranks the whole stream, or set `resume: ignore_data`"
            )
        share = self._share_of(mine, states, change)
        self.open(mine.epoch)
        self.now = replace(mine, rank=self.rank, world_size=self.world_size, data=self.data, share=share)
        self.order = None if _is_at_begin(mine) else mine.data.order
        self.is_loaded = True
        self.probes = deque(mine.probes, maxlen=NUM_PROBES)

    @abstractmethod
    def skip(self, optimizer_steps: int, epochs: float) -> int | None:
        """Stand where stock training stands after so many optimizer steps and epochs (see `ODBLoader.skip`)."""

    def plans_ahead(self, buffer_size: int) -> int:
        """Plans made ahead of the one that is handed on."""
        return 2

    def _share_after(self, micro_batches: Sequence[MicroBatch], planner: EpochPlanner) -> Share | None:
        """What this rank has done once these are consumed."""
        return None

    def _share_of(self, mine: DataState, states: Sequence[DataState], change: str) -> Share | None:
        """What this rank has done by these states. change: of the ranks; "": there is none."""
        return None

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
        if state.mode != self.mode:
            raise DataError(
                f"global_batch_size: the state was written with `{state.mode}`, so where it stands among the steps of "
                f"`{self.mode}` cannot be told; go on with what it was, or set `resume: ignore_data` to begin the "
                "epoch anew"
            )
        then, now = asdict(state.data), asdict(replace(self.data, order=order))
        if then == now:
            return
        differs = [
            f"{key} was {then[key]!r}, is {now[key]!r}" for key in now if then[key] != now[key] and key != "order"
        ]
        differs = [*changed.values(), *differs] or ["rows come in another order: another shuffling or other data sets"]
        raise DataError(
            f"the training data or their order are not those of the checkpoint ({'; '.join(differs)}), so what is left "
            "of the epoch cannot be told; bring them back, or set `resume: ignore_data` to begin it anew"
        )

    def _check_rows(self, state: DataState, changed: Mapping[str, str]) -> None:
        """Read a few trained rows again. Raises `DataError` where one has changed; warns where rows are random."""
        if self.read_row is None:
            return
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
                return
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


def _is_at_begin(state: DataState) -> bool:
    """Whether nothing of the epoch is done."""
    return not state.optimizer_steps and (state.share is None or state.share.is_untouched)


# ----------------------------------------------------------------------------------------------------------------------


class KeepProgress(Progress):
    """With kept optimizer steps: a cursor, the same on all ranks.

    Budget, workers and (but for a stream that is split beforehand) ranks may change at any optimizer step.
    """

    mode = "keep"
    share = None

    def __init__(self, rank: int, stock: StockSteps, data: TrainingData, read_row: ReadRow | None = None):
        self.stock = stock
        data = replace(data, global_batch_size=stock.global_batch_size, left_out_by_drop_last=stock.not_trained)
        super().__init__(rank, stock.world_size, data, read_row)
        self.global_batch_size, self.steps_an_epoch = stock.global_batch_size, stock.steps_an_epoch

    def plans_ahead(self, buffer_size: int) -> int:
        """As many optimizer steps as the buffer holds of a rank's samples: with the one handed on, one more is held."""
        return max(1, buffer_size * self.stock.world_size // self.stock.global_batch_size)

    def skip(self, optimizer_steps: int, epochs: float) -> None:
        """Raises `DataError` for a dataset without a length."""
        an_epoch = self.stock.steps_an_epoch
        if an_epoch is None:
            raise DataError(
                "the checkpoint was written without odb, and where its optimizer steps end in a dataset without a "
                "length is not known; set `resume: ignore_data` to begin an epoch anew"
            )
        epoch, done = divmod(optimizer_steps, max(an_epoch, 1))
        self.open(epoch, optimizer_steps=done, trained=done * self.stock.global_batch_size)
        self.is_loaded = True

    def start(self) -> Start:
        stock = self.stock
        return Start(
            done=Share(drawn=stock.first_number(self.rank, self.now.optimizer_steps)),
            stop=stock.num_samples if stock.not_trained else None,
            block=stock.global_batch_size,
        )

    def planner(self, observed: Iterator[Sample | Rejection], context: EpochContext) -> EpochPlanner:
        return KeepEpoch(observed, context, self.now, stock=self.stock)


class FillProgress(Progress):
    """With filled optimizer steps: what each rank has done of its share of the order.

    A rank goes on with what is left of its share; where there are other ranks, what is left of all shares is dealt out
    anew. settings: of `FillEpoch`.
    """

    mode = "fill"
    share = Share()

    def __init__(
        self,
        rank: int,
        world_size: int,
        settings: dict[str, Any],
        data: TrainingData,
        read_row: ReadRow | None = None,
    ):
        self.settings = settings
        super().__init__(rank, world_size, data, read_row)

    def skip(self, optimizer_steps: int, epochs: float) -> int:
        """Returns how many samples of the order are taken for done."""
        num_samples = self.data.samples or 0
        done = round((epochs - int(epochs)) * num_samples)
        self.open(int(epochs), trained=done, share=Share(done_before=np.arange(num_samples) < done if done else None))
        self.is_loaded = True
        return done

    def start(self) -> Start:
        assert self.now.share is not None
        return Start(done=self.now.share)

    def planner(self, observed: Iterator[Sample | Rejection], context: EpochContext) -> EpochPlanner:
        assert self.now.share is not None
        return FillEpoch(observed, context, self.now, share=self.now.share, **self.settings)

    def _share_after(self, micro_batches: Sequence[MicroBatch], planner: EpochPlanner) -> Share | None:
        share = self.now.share
        assert isinstance(planner, FillEpoch) and share is not None
        if not micro_batches:
            return share
        drawn = micro_batches[-1].drawn
        given = {draw for one in micro_batches for draw in one.given}
        waiting = (draw for draw in itertools.chain(share.waiting, range(share.drawn, drawn)) if draw not in given)
        return replace(
            share, drawn=drawn, waiting=tuple(draw for draw in waiting if draw not in planner.rejected_draws)
        )

    def _share_of(self, mine: DataState, states: Sequence[DataState], change: str) -> Share | None:
        if not change or _is_at_begin(mine):
            return mine.share
        try:
            done = done_positions(states)
        except DataError as error:
            raise DataError(f"{error}; {WAY_OUT}") from None
        left = "other samples" if self.data.samples is None else f"{int((~done).sum())} samples left"
        logger.info("epoch %d goes on with %s: its %s are dealt out anew", mine.epoch, change, left)
        return Share(done_before=done)


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
    rank: int,
    world_size: int,
    data: TrainingData,
    read_row: ReadRow | None,
) -> Progress:
    """read_row: see `Progress`."""
    if config.keeps:
        stock = _stock_steps(config, rule, world_size, data.samples, is_split=data.split)
        return KeepProgress(rank, stock, data, read_row)
    if rule.drop_last:
        raise ConfigError(
            "drop_last: True (dataloader_drop_last) would leave out the samples of a last, smaller batch, and "
            "`global_batch_size: fill` trains on every sample; set it to False, or keep the optimizer steps."
        )
    settings = {"buffer_size": config.buffer_size, "accumulation": rule.accumulation, "join": config.join}
    return FillProgress(rank, world_size, settings, data, read_row)


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
