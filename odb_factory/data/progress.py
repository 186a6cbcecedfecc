"""Where the training stands in an epoch: kept as optimizer steps are consumed, written as a state, read from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from odb_factory.config import BUDGETS, ODBConfig
from odb_factory.data.order import OF_STEP, Share, Start, StockMean, StockSteps
from odb_factory.data.samples import MicroBatch, OptimizerStep, Rejection, Sample
from odb_factory.data.saved import VERSION, AnyInt, Positive, check_version, dump, load, require
from odb_factory.errors import ConfigError, DataError
from odb_factory.log import get_logger

logger = get_logger(__name__)

# ----------------------------------------------------------------------------------------------------------------------
# What makes an optimizer step without odb.


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

    def stock_steps(
        self, config: ODBConfig, world_size: int, num_samples: int | None, *, is_split: bool
    ) -> StockSteps | None:
        """The optimizer steps that the config keeps; None where it fills them. Raises `ConfigError`."""
        if not config.keeps:
            if self.drop_last:
                raise ConfigError(
                    "drop_last: True (dataloader_drop_last) would leave out the samples of a last, smaller batch, and "
                    "`global_batch_size: fill` trains on every sample; set it to False, or keep the optimizer steps."
                )
            return None
        of_all_ranks = self.batch_size * world_size
        size = of_all_ranks * self.accumulation
        if isinstance(config.global_batch_size, int):
            size = config.global_batch_size
        if is_split and size % of_all_ranks:
            raise ConfigError(
                f"odb.global_batch_size: {size} is no multiple of {self.batch_size} rows x {world_size} ranks, and "
                "each rank has a stream of its own to take them from; choose a multiple."
            )
        not_trained = num_samples % of_all_ranks if self.drop_last and num_samples is not None else 0
        return StockSteps(
            global_batch_size=size,
            batch_size=self.batch_size,
            world_size=world_size,
            num_samples=None if num_samples is None else num_samples - not_trained,
            not_trained=not_trained,
            mean=self.stock_mean,
            equal_weights=self.equal_weights and config.loss_scaling == "stock",
            is_split=is_split,
        )


# ----------------------------------------------------------------------------------------------------------------------
# What a stopped epoch needs to be resumed: what the training has consumed, not what was planned ahead.


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What must be as it was for a state to mean anything.

    samples: of an epoch, on all ranks; None where nobody knows. split: a stream that gives each rank its own part.
    order: a checksum of the order of the epoch. global_batch_size, left_out_by_drop_last: where steps are kept.
    """

    samples: int | None
    seed: AnyInt
    split: bool
    order: int = 0
    global_batch_size: Positive | None = None
    left_out_by_drop_last: int = 0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where all ranks stand in an epoch.

    optimizer_steps: done. trained, rejected (by reason), overlong: samples of these steps, on all ranks.
    """

    epoch: int = 0
    optimizer_steps: int = 0
    trained: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    overlong: int = 0

    @property
    def done(self) -> int:
        """Samples trained on or rejected."""
        return self.trained + sum(self.rejected.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class DataState(Place):
    """Where one rank stands in an epoch. `rank`, `share` and `probes` are its own; the rest is alike on all ranks.

    share: None with kept optimizer steps, where the place says all. probes: (row of the dataset, checksum) of some rows
    that were trained on last. rows_from: what rows were made with, as text by name.
    """

    rank: int
    world_size: Positive
    data: TrainingData
    share: Share | None
    probes: tuple[tuple[int, int], ...]
    rows_from: dict[str, str]

    @property
    def mode(self) -> Literal["keep", "fill"]:
        return "fill" if self.data.global_batch_size is None else "keep"

    @property
    def is_at_begin(self) -> bool:
        """Whether nothing of the epoch is done."""
        share = self.share or Share()
        return not self.optimizer_steps and share.done_before is None and not share.drawn

    def to_dict(self) -> dict[str, Any]:
        """JSON types; one or two kilobytes, with `fill` after a change of ranks also a bit a row."""
        return {"version": VERSION, **dump(self)}

    def check(self) -> None:
        """Raise `DataError`, a clause that names the field, where it contradicts itself."""
        require(self.rank < self.world_size, "rank", self.rank, f"not 0 to {self.world_size - 1}")
        require((self.mode == "fill") == (self.share is not None), "share", self.share, f"but `mode` is {self.mode}")
        samples = self.data.samples
        if self.share is None:
            drawn = self.optimizer_steps * (self.data.global_batch_size or 0)
            require(self.done <= drawn, "trained", self.trained, f"but {drawn} samples were drawn")
            require(
                samples is None or drawn == 0 or drawn < samples,  # after the last step the next epoch begins
                "optimizer_steps",
                self.optimizer_steps,
                f"but an epoch has {samples} samples",
            )
            return
        before, drawn, waiting = self.share.done_before, self.share.drawn, self.share.waiting
        rule = f"but these must be of the {drawn} rows that were drawn, ascending"
        require(sorted({one for one in waiting if one < drawn}) == list(waiting), "share.waiting", waiting, rule)
        if samples is None:
            return
        if before is not None and (len(before) != -(-samples // 8) * 8 or before[samples:].any()):
            raise DataError(f"`share.done_before` marks {len(before)} positions of an order of {samples}")
        left = samples - (0 if before is None else int(before.sum()))
        require(drawn <= left, "share.drawn", drawn, f"but {left} samples were to be drawn")
        require(self.done <= samples, "trained", self.trained, f"but an epoch has {samples} samples")


def read_state(saved: Any) -> DataState:
    """Undo `DataState.to_dict`. Raises `DataError`, a clause without a way out, where it is damaged."""
    check_version(saved)
    state: DataState = load(DataState, saved)
    return state


def done_positions(states: Sequence[DataState]) -> np.ndarray:
    """bool a position of the epoch's order: done by these states, one a rank, of one moment of one run.

    Of an order of unknown length as many positions are marked as were looked at. Raises `DataError` where these are not
    the states of all ranks, or do not belong together.
    """
    first, world_size = states[0], states[0].world_size
    ranks = [state.rank for state in states]
    if ranks != list(range(world_size)):
        raise DataError(
            f"the data state was written by {world_size} ranks, and of these {ranks} were found; all are needed to go "
            "on with other ranks (are the checkpoint's files of all nodes in one place?)"
        )
    if len({(state.epoch, state.optimizer_steps, state.done, str(state.data)) for state in states}) > 1:
        raise DataError("the data states of the ranks are of different moments")
    shares = [state.share for state in states if state.share is not None]
    before = shares[0].done_before
    looked_at = (0 if before is None else len(before)) + max(share.drawn for share in shares) * world_size
    done = np.zeros(looked_at if first.data.samples is None else first.data.samples, dtype=bool)
    if before is not None:
        done[: len(before)] = before[: len(done)]
    left = np.flatnonzero(~done)
    for rank, share in enumerate(shares):
        mine = left[rank::world_size]
        if share.drawn > len(mine):
            raise DataError(f"the state of rank {rank} has drawn more samples than its share of the order has")
        done[mine[: share.drawn]] = True
        done[mine[list(share.waiting)]] = False
    return done


# ----------------------------------------------------------------------------------------------------------------------

NUM_PROBES = 8
"""The rows that a rank has trained on last and reads again when it resumes, to see that they are the same."""
WAY_OUT = "take an older state, or set `resume: ignore_data` to begin the epoch anew"


class Progress:
    """Follows the optimizer steps that are consumed, writes states and reads them.

    begin: the state before the first step of the first epoch. stock: the kept optimizer steps, of which a state is a
    cursor, the same on all ranks: budget, workers and (but for a stream that is split beforehand) ranks may change at
    any optimizer step. None: they are filled; a rank resumes with what is left of its share, and where there are other
    ranks, what is left of all shares is dealt out anew.
    read_row: observes a row of the dataset by its number (None where that cannot be: a stream).
    now: the state after the optimizer step consumed last. is_loaded: a state has been loaded, and no step taken since.
    order: the fingerprint that the order of the epoch must have, if a state was loaded.
    """

    def __init__(
        self, begin: DataState, stock: StockSteps | None, read_row: Callable[[int], Sample | Rejection] | None = None
    ):
        self._begin, self.stock, self.read_row = begin, stock, read_row
        self.now = begin
        self.open(0)

    @property
    def place(self) -> dict[str, int]:
        """Where the pass begins, in words of which all ranks must have the same."""
        now = self.now
        return {
            "epoch": now.epoch,
            "optimizer steps done in it": now.optimizer_steps,
            "samples done in it": now.done,
        }

    @property
    def start(self) -> Start:
        """Where this rank begins to draw."""
        stock, now = self.stock, self.now
        if stock is None:
            assert now.share is not None
            return Start(done=now.share)
        return Start(
            done=Share(drawn=stock.first_number(now.rank, now.optimizer_steps)),
            stop=stock.num_samples if stock.not_trained else None,
            block=stock.global_batch_size,
        )

    def open(self, epoch: int, **place: Any) -> None:
        """Stand before the first optimizer step of an epoch, or at `place` (fields of `DataState`)."""
        self.order: int | None = None
        self.has_moved = self.is_loaded = False
        place.setdefault("probes", self.now.probes)
        self.now = replace(self._begin, epoch=epoch, **place)

    def turn_to(self, epoch: int) -> None:
        """The next pass is over this epoch; from where a loaded state left it if it is that one."""
        if epoch != self.now.epoch or self.has_moved:
            self.open(epoch)

    def consume(self, step: OptimizerStep, micro_batches: Sequence[MicroBatch], share: Share | None) -> None:
        """Stand after `step`. micro_batches: those of this rank since the last call. share: with `fill`, after it."""
        trained_on = [(sample.id, sample.content) for one in micro_batches for sample in one.samples]
        probes = (*self.now.probes, *trained_on)[-NUM_PROBES:]
        if step.last:
            self.open(step.epoch + 1, probes=probes)
            return
        self.has_moved, self.is_loaded = True, False
        rejected = dict(step.rejected)
        self.now = replace(
            self.now,
            optimizer_steps=step.index + 1,
            trained=step.done - sum(rejected.values()),  # of steps that were passed over, too
            rejected=rejected,
            overlong=step.overlong,
            share=share,
            probes=probes,
        )

    def state(self, order: int) -> DataState:
        """order: the fingerprint of the epoch's."""
        return replace(self.now, data=replace(self.now.data, order=order))

    def skip(self, optimizer_steps: int, epochs: float) -> int | None:
        """Stand where stock training stands after these optimizer steps and epochs (see `ODBLoader.skip`).

        Raises `DataError` with kept steps of a dataset without a length.
        """
        if self.stock is None:
            num_samples = self.now.data.samples or 0
            done = round((epochs - int(epochs)) * num_samples)
            share = Share(done_before=np.arange(num_samples) < done if done else None)
            self.open(int(epochs), trained=done, share=share)
            self.is_loaded = True
            return done
        an_epoch = self.stock.steps_an_epoch
        if an_epoch is None:
            raise DataError(
                "the checkpoint was written without odb, and where its optimizer steps end in a dataset without a "
                "length is not known; set `resume: ignore_data` to begin an epoch anew"
            )
        epoch, steps = divmod(optimizer_steps, max(an_epoch, 1))
        self.open(epoch, optimizer_steps=steps, trained=steps * self.stock.global_batch_size)
        self.is_loaded = True
        return None

    def load(
        self, saved: Sequence[Mapping[str, Any]], fingerprint: Callable[[int], int], *, ignore_data: bool = False
    ) -> None:
        """Resume from the states of all ranks, or from one alone if that is enough: with kept steps, or if it is this
        rank's and there are as many ranks as before.

        fingerprint: that of the order of an epoch, here. Raises `DataError` with what differs or is damaged.
        """
        if ignore_data:
            epoch = saved[0].get("epoch") if saved and isinstance(saved[0], Mapping) else None
            self.open(epoch if isinstance(epoch, int) and epoch >= 0 else 0)  # the state may be damaged
            self.is_loaded = True
            logger.warning("resume: ignore_data: epoch %d begins anew, whatever was done of it", self.now.epoch)
            return
        try:
            states = [read_state(one) for one in saved]
        except DataError as error:
            raise DataError(f"the data state cannot be read: {error}; {WAY_OUT}") from None
        begin = self._begin
        mine = next((state for state in states if state.rank == begin.rank), states[0])
        changed = self._changed_settings(mine)
        self._check_data(mine, fingerprint(mine.epoch), changed)
        self._check_rows(mine, changed)
        if changed.keys() - BUDGETS:  # budgets may change: rows depend on them where overlong ones are dropped or cut
            logger.warning(
                "%s since the checkpoint; the rows to come are made with what is set now", ", ".join(changed.values())
            )
        change = f"ranks {mine.world_size} -> {begin.world_size}" if mine.world_size != begin.world_size else ""
        if not change and self.stock is None and mine.rank != begin.rank:
            change = f"the state of rank {mine.rank} for rank {begin.rank}"
        if change and mine.data.split and not mine.is_at_begin:
            raise DataError(
                f"{change}: a stream that was split between the ranks beforehand cannot be dealt out anew; go on as "
                "before, give the ranks the whole stream, or set `resume: ignore_data`"
            )
        share = mine.share
        if self.stock is None and change and not mine.is_at_begin:
            share = self._deal_out_anew(states, change)
        self.open(mine.epoch)
        self.now = replace(
            mine,
            rank=begin.rank,
            world_size=begin.world_size,
            data=begin.data,
            share=share,
            probes=mine.probes[-NUM_PROBES:],
            rows_from=begin.rows_from,
        )
        self.order = None if mine.is_at_begin else mine.data.order
        self.is_loaded = True

    def _changed_settings(self, state: DataState) -> dict[str, str]:
        """By name, in words: what rows are made with now and were not made with then."""
        then = state.rows_from
        changed = {
            name: f"{name} was {then[name]}, is {now}"
            for name, now in self._begin.rows_from.items()
            if then.get(name, now) != now
        }
        scaling = changed.pop("loss_scaling", None)
        if scaling is not None:
            logger.warning("%s since the checkpoint; the losses to come are weighed with what is set now", scaling)
        return changed

    def _check_data(self, state: DataState, order: int, changed: Mapping[str, str]) -> None:
        mode = self._begin.mode
        if state.mode != mode:
            raise DataError(
                f"global_batch_size: the state was written with `{state.mode}`, so where it stands among the steps of "
                f"`{mode}` cannot be told; go on with what it was, or set `resume: ignore_data` to begin the "
                "epoch anew"
            )
        then, now = asdict(state.data), asdict(replace(self._begin.data, order=order))
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

    def _deal_out_anew(self, states: Sequence[DataState], change: str) -> Share:
        """The share of any rank in what all ranks have left. change: of the ranks."""
        try:
            done = done_positions(states)
        except DataError as error:
            raise DataError(f"{error}; {WAY_OUT}") from None
        left = "other samples" if self._begin.data.samples is None else f"{int((~done).sum())} samples left"
        logger.info("epoch %d goes on with %s: its %s are dealt out anew", states[0].epoch, change, left)
        return Share(done_before=done)
