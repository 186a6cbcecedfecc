"""Progress in an epoch of kept optimizer steps: a cursor, the same on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from odb_factory.data.epoch import EpochContext, EpochPlanner
from odb_factory.data.keep_epoch import KeepEpoch
from odb_factory.data.resume.keep_state import KeepState
from odb_factory.data.resume.progress import Progress
from odb_factory.data.resume.state import DataState
from odb_factory.data.sampler import Start
from odb_factory.data.samples import MicroBatch, OptimizerStep, Rejection, Sample
from odb_factory.data.stock_steps import StockSteps
from odb_factory.errors import DataError


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
