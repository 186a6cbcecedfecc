"""Where the training stands in an epoch: kept as optimizer steps are consumed, written as a state, read from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from odb_factory.config import BUDGETS, ODBConfig
from odb_factory.data.order import MEAN_OF_STEP, ShareProgress, Start, StockMean, StockSteps
from odb_factory.data.samples import MicroBatch, OptimizerStep, ReadRows, Sample
from odb_factory.data.saved import VERSION, AnyInt, Positive, check_version, dump, load, require
from odb_factory.errors import ConfigError, DataError
from odb_factory.log import get_logger
from odb_factory.random_numbers import kept_random_numbers

logger = get_logger(__name__)

# ----------------------------------------------------------------------------------------------------------------------
# What makes an optimizer step without odb.


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStepRule:
    """The optimizer steps of the training as it would be without odb.

    batch_size: rows of a micro-batch; accumulation: micro-batches of an optimizer step (with `fill`, ours too).
    drop_last: samples that do not fill a micro-batch on every rank are the remainder of the epoch: not trained on.
    stock_mean: what the loss is made of.
    equal_weights: samples that stock weighs differently must not share a micro-batch.
    """

    batch_size: int = 1
    accumulation: int = 1
    drop_last: bool = False
    stock_mean: StockMean = MEAN_OF_STEP
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
                    "drop_last: True (dataloader_drop_last) would drop the samples of a last, smaller batch, and "
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
        remainder = num_samples % of_all_ranks if self.drop_last and num_samples is not None else 0
        return StockSteps(
            global_batch_size=size,
            batch_size=self.batch_size,
            world_size=world_size,
            num_samples=None if num_samples is None else num_samples - remainder,
            remainder=remainder,
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
    order: a checksum of the order of the epoch. global_batch_size, drop_last_remainder: where steps are kept.
    """

    samples: int | None
    seed: AnyInt
    split: bool
    order: int = 0
    global_batch_size: Positive | None = None
    drop_last_remainder: int = 0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where all ranks stand in an epoch.

    optimizer_steps: done. planned, rejected (by reason), overlong: samples of these steps, on all ranks.
    """

    epoch: int = 0
    optimizer_steps: int = 0
    planned: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    overlong: int = 0

    @property
    def done(self) -> int:
        """Samples planned or rejected."""
        return self.planned + sum(self.rejected.values())

    @property
    def settings(self) -> dict[str, int]:
        """What ranks compare."""
        return {
            "epoch": self.epoch,
            "optimizer steps done in it": self.optimizer_steps,
            "samples done in it": self.done,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class DataState(Place):
    """Where one rank stands in an epoch. `rank`, `share` and `probes` are its own; the rest is alike on all ranks.

    share: None with kept optimizer steps, where the place says all. probes: (row of the dataset, checksum) of some rows
    that were trained on last. rows_from: what rows were made with, as text by name.
    """

    rank: int
    world_size: Positive
    data: TrainingData
    share: ShareProgress | None
    probes: tuple[tuple[int, int], ...]
    rows_from: dict[str, str]

    @property
    def mode(self) -> Literal["keep", "fill"]:
        return "fill" if self.data.global_batch_size is None else "keep"

    @property
    def is_at_begin(self) -> bool:
        """Whether nothing of the epoch is done."""
        share = self.share or ShareProgress()
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
            require(self.done <= drawn, "planned", self.planned, f"but {drawn} samples were drawn")
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
        require(self.done <= samples, "planned", self.planned, f"but an epoch has {samples} samples")


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
RESTART = "set `resume: ignore_data` to restart the epoch"


class Progress:
    """Follows the optimizer steps that are consumed, writes states and reads them.

    Of kept optimizer steps a state is a cursor, the same on all ranks: budget, workers and (but for a stream that is
    split beforehand) ranks may change at any optimizer step. Of filled ones it has what its rank has done of its share
    of the order: a rank resumes with what is left of its share; where there are other ranks, what is left of all shares
    is dealt out again.

    begin: the state before the first step of the first epoch. read_rows: None where rows have no number (a stream).
    stock: the steps that are kept; None: they are filled.
    now: the state after the optimizer step consumed last. is_loaded: a state has been loaded, and no step taken since.
    order: the fingerprint that the order of the epoch must have, if a state was loaded.
    """

    def __init__(self, begin: DataState, read_rows: ReadRows | None, stock: StockSteps | None):
        self._begin, self._read_rows, self._stock = begin, read_rows, stock
        self.now = begin
        self.open(0)

    @property
    def start(self) -> Start:
        """Where this rank begins to draw."""
        stock, now = self._stock, self.now
        if stock is None:
            assert now.share is not None
            return Start(done=now.share)
        return Start(
            done=ShareProgress(drawn=stock.first_number(now.rank, now.optimizer_steps)),
            stop=stock.num_samples if stock.remainder else None,
            block=stock.global_batch_size,
        )

    def skip(self, optimizer_steps: int, epochs: float) -> int | None:
        """Stand where stock training stands after these optimizer steps and epochs (see `ODBLoader.skip`).

        Exact with kept steps; raises `DataError` for a dataset without a length. Else by the share of the last epoch
        that is done: returns the samples that count as done.
        """
        if self._stock is None:
            num_samples = self.now.data.samples or 0
            done = round((epochs - int(epochs)) * num_samples)
            share = ShareProgress(done_before=np.arange(num_samples) < done if done else None)
            self.open(int(epochs), is_loaded=True, planned=done, share=share)
            return done
        an_epoch = self._stock.steps_an_epoch
        if an_epoch is None:
            raise DataError(
                "the checkpoint was written without odb, and where its optimizer steps end in a dataset without a "
                f"length is not known; {RESTART}"
            )
        epoch, steps = divmod(optimizer_steps, max(an_epoch, 1))
        self.open(epoch, is_loaded=True, optimizer_steps=steps, planned=steps * self._stock.global_batch_size)
        return None

    def open(self, epoch: int, *, is_loaded: bool = False, **place: Any) -> None:
        """Stand before the first optimizer step of an epoch, or at `place` (fields of `DataState`)."""
        self.order: int | None = None
        self.has_moved, self.is_loaded = False, is_loaded
        place.setdefault("probes", self.now.probes)
        self.now = replace(self._begin, epoch=epoch, **place)

    def turn_to(self, epoch: int) -> None:
        """The next pass is over this epoch; from where a loaded state left it if it is that one."""
        if epoch != self.now.epoch or self.has_moved:
            self.open(epoch)

    def consume(self, step: OptimizerStep, micro_batches: Sequence[MicroBatch], share: ShareProgress | None) -> None:
        """Stand after `step`. micro_batches: those of this rank since the last call. share: with `fill`, after it."""
        trained_on = [(sample.id, sample.content) for one in micro_batches for sample in one.samples]
        probes = (*self.now.probes, *trained_on)[-NUM_PROBES:]
        if step.last:
            self.open(step.epoch + 1, probes=probes)
            return
        self.has_moved, self.is_loaded = True, False
        self.now = replace(
            self.now,
            optimizer_steps=step.index + 1,
            planned=step.done - step.rejected.total(),  # of steps that were passed over, too
            rejected=dict(step.rejected),
            overlong=step.overlong,
            share=share,
            probes=probes,
        )

    def state(self, order: int) -> DataState:
        """order: the fingerprint of the epoch's."""
        return replace(self.now, data=replace(self.now.data, order=order))

    def load(self, saved: Sequence[Mapping[str, Any]], fingerprint: Callable[[int], int]) -> None:
        """Resume from the states of all ranks, or from one alone if that is enough: with kept steps, or if it is this
        rank's and there are as many ranks as before.

        fingerprint: that of the order of an epoch, here. Raises `DataError` with what differs or is damaged.
        """
        try:
            states = [read_state(one) for one in saved]
        except DataError as error:
            raise DataError(f"the data state cannot be read: {error}; take an older state, or {RESTART}") from None
        mine = next((state for state in states if state.rank == self._begin.rank), states[0])
        changed = self._changed_settings(mine)
        self._check_data(mine, fingerprint(mine.epoch), changed)
        with kept_random_numbers():
            self._check_rows(mine, changed)
        if changed.keys() - BUDGETS:  # budgets may change: rows depend on them where overlong ones are dropped or cut
            logger.warning(
                "%s since the checkpoint; the rows to come are made with what is set now", ", ".join(changed.values())
            )
        share, change = mine.share, self._change_of_ranks(mine)
        if change and not mine.is_at_begin:
            if mine.data.split:
                raise DataError(
                    f"{change}: a stream that was split between the ranks beforehand cannot be dealt out again; go on "
                    f"as before, give the ranks the whole stream, or {RESTART}"
                )
            if share is not None:
                share = self._deal_out(states, change)
        self.open(
            mine.epoch,
            is_loaded=True,
            optimizer_steps=mine.optimizer_steps,
            planned=mine.planned,
            rejected=mine.rejected,
            overlong=mine.overlong,
            share=share,
            probes=mine.probes[-NUM_PROBES:],
        )
        self.order = None if mine.is_at_begin else mine.data.order

    def _change_of_ranks(self, state: DataState) -> str:
        """What is not as it was, in words; "": nothing."""
        begin = self._begin
        if state.world_size != begin.world_size:
            return f"ranks {state.world_size} -> {begin.world_size}"
        is_other = state.share is not None and state.rank != begin.rank
        return f"the state of rank {state.rank} for rank {begin.rank}" if is_other else ""

    def _deal_out(self, states: Sequence[DataState], change: str) -> ShareProgress:
        """What counts as done of the share of any rank, after this change of the ranks. states: of all ranks."""
        try:
            done = done_positions(states)
        except DataError as error:
            raise DataError(f"{error}; take an older state, or {RESTART}") from None
        left = "other samples" if self._begin.data.samples is None else f"{int((~done).sum())} samples left"
        logger.info("epoch %d goes on with %s: its %s are dealt out again", states[0].epoch, change, left)
        return ShareProgress(done_before=done)

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
                f"`{mode}` cannot be told; go on with what it was, or {RESTART}"
            )
        then, now = asdict(state.data), asdict(replace(self._begin.data, order=order))
        if then == now:
            return
        differs = [
            f"{key} was {then[key]!r}, is {now[key]!r}" for key in now if then[key] != now[key] and key != "order"
        ]
        differs = [*changed.values(), *differs] or [
            "rows come in another order: another shuffling, other data sets, or a sampler whose order does not depend "
            "on its seed and epoch alone"
        ]
        raise DataError(
            f"the training data or their order are not those of the checkpoint ({'; '.join(differs)}), so what is left "
            f"of the epoch cannot be told; bring them back, or {RESTART}"
        )

    def _check_rows(self, state: DataState, changed: Mapping[str, str]) -> None:
        """Read a few trained rows again. Raises `DataError` where one has changed; warns where rows are random."""
        if self._read_rows is None:
            return
        contents = {row: content for row, content in state.probes if content}
        for (row, content), now in zip(contents.items(), list(self._read_rows(contents))):
            if isinstance(now, Sample) and now.content == content:
                continue
            (again,) = self._read_rows([row])
            if isinstance(now, Sample) and isinstance(again, Sample) and now.content != again.content:
                logger.warning(
                    "row %d of the training dataset is another each time it is read, so it is not known whether the "
                    "data are those of the checkpoint",
                    row,
                )
                return
            found = "it says something else" if isinstance(now, Sample) else now.message.rstrip(".;")
            cause = ", ".join(changed.values()) or "the training data have changed since the checkpoint"
            raise DataError(
                f"{cause}: row {row} of the training dataset was trained on, and now: {found}; bring back what it was, "
                f"or {RESTART}"
            )
