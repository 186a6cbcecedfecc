"""`ODBLoader`: two ordinary torch DataLoaders with the planner between them.

The first observes: rows become light samples in its workers. The second collates: its sampler
yields whole groups, its workers run the framework's collator. Between them one background thread
fills the window and plans, a round ahead of what is being collated.

A trap of torch shapes this module: a DataLoader asks its sampler for the next index before it
hands over a batch that is ready. So the sampler here never waits, it yields None while no group
is planned, and the worker's answer to None is passed over.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy

import odb_factory
from odb_factory.comm.coordinator import CollectiveError, Coordinator, SingleProcessCoordinator
from odb_factory.config import ODBConfig
from odb_factory.data.collate import Collated, Failure
from odb_factory.data.epoch_progress import EpochProgress
from odb_factory.data.fill_epoch import FillEpoch
from odb_factory.data.loader_workers import END, LoaderWorkers, take
from odb_factory.data.observe import Observer
from odb_factory.data.prefetch import BackgroundPrefetcher, InlinePrefetcher
from odb_factory.data.samples import MicroBatch, Rejection
from odb_factory.data.state import EpochState
from odb_factory.data.step_times import StepTimes
from odb_factory.data.task_sampler import Pass
from odb_factory.errors import ConfigError, DataError, one_line
from odb_factory.log import get_logger
from odb_factory.planning import Budget, Collation, CostModel

MAX_REJECTIONS_LOGGED = 10
LOCAL_KEYS = ("audit", "collate_workers", "exchange_timeout_s")
"""Keys of the block in which ranks may differ: no plan and no weight depends on them."""
PLACE = ("epoch", "round of the plan", "micro-batches done in it", "samples done before")
"""Where an epoch goes on: what `EpochProgress.place` says."""
ABORT_S = 7.0
"""After a failure planning is given this long to end; a DataLoader looks for dead workers every 5 s."""

logger = get_logger(__name__)


class ODBLoader:
    """Iterate over the collated steps of one epoch on this rank: (`MicroBatch`, `Measured`, batch).

    dataset: what `observer` reads rows from; sampler: row indices of one epoch over all ranks, with
    `set_epoch` if the order changes, None for a dataset that is iterated; collate_fn: the framework's
    collator, unchanged. accumulation: an epoch has a multiple of this many steps. agree_on: settings, beside the
    config's, that all ranks must have in common. stages: what else `LoaderWorkers` takes.
    Call `close` when done; it ends the worker processes.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        sampler: Any,
        observer: Observer,
        collate_fn: Callable,
        config: ODBConfig,
        collation: Collation = Collation(),
        accumulation: int = 1,
        seed: int = 0,
        coordinator: Coordinator | None = None,
        agree_on: Mapping[str, object] | None = None,
        **stages: Any,
    ):
        self.dataset, self.config = dataset, config
        self._coordinator = coordinator or SingleProcessCoordinator()
        self.rank, self.world_size = rank, world_size = self._coordinator.rank, self._coordinator.world_size
        self.epoch = 0
        self.times = StepTimes()
        self._num_rejected = 0
        budget = Budget(config.token_budget, config.max_patches, collation)
        self._stages = LoaderWorkers(
            dataset,
            sampler=sampler,
            observer=observer,
            collate_fn=collate_fn,
            config=config,
            budget=budget,
            rank=rank,
            world_size=world_size,
            **stages,
        )
        self._order = self._stages.order
        # The length of a stream that is split is that of this rank's part, or of the whole; nobody says which.
        is_split = getattr(self._order, "is_split", False)
        self.num_samples: int | None = None if is_split else _length(dataset if sampler is None else sampler)
        self._plan = functools.partial(
            FillEpoch,
            budget=budget,
            buffer_size=config.buffer_size,
            num_samples=self.num_samples,
            accumulation=accumulation,
            join=config.join,
            balance=config.balance,
            propose=self.times.fitting() if config.cost_model == "time" else CostModel,
            seed=seed,
            rank=rank,
            coordinator=self._coordinator,
            find_dummy_sample=self._stages.find_dummy_sample,
            on_reject=self._on_reject,
        )
        self._progress = EpochProgress(
            rank,
            world_size,
            data={"samples": self.num_samples, "seed": seed, "split": is_split},
            plan={
                "token_budget": config.token_budget,
                "max_patches": config.max_patches,
                "buffer_size": config.buffer_size,
                "join": config.join,
                "balance": config.balance,
                "cost_model": config.cost_model,
                "overlong": config.overlong,
                "on_error": config.on_error,
                "accumulation": accumulation,
                "collation": list(dataclasses.astuple(collation)),
            },
            read_row=self._stages.read_row,
        )
        self._settings = {
            **{f"odb.{key}": value for key, value in config.to_dict().items() if key not in LOCAL_KEYS},
            "seed": seed,
            "gradient_accumulation_steps": accumulation,
            "collation": collation,
            "number of samples": self.num_samples,
            "odb_factory": odb_factory.__version__,
            "numpy": numpy.__version__,
            **(agree_on or {}),
        }
        self._pass: Pass | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; a new order every epoch."""
        if epoch != self.epoch:
            if self._progress.is_loaded:
                logger.warning(
                    "epoch %d begins and the state that was loaded is dropped: it stands in epoch %d, begin with that",
                    epoch,
                    self.epoch,
                )
            self._leave()
            self.epoch = epoch
            self._progress.turn_to(epoch)

    def consume(self, step: MicroBatch) -> None:
        """Note that this step, and all before it, has been trained on: a state is taken from there."""
        self._progress.consume(step, self._pass.plan.snapshots if self._pass is not None else deque())

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands behind the last step consumed: JSON types, some kilobytes whatever the dataset."""
        return self._progress.state(self._fingerprint(self._progress.epoch))

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from the states of all ranks. This rank's alone is enough if ranks and settings are as they were.

        Raises `DataError` where the data are not those of the states (see the key `resume`).
        """
        self._leave()
        self._progress.load(states, self._fingerprint, ignore_data=self.config.resume == "ignore_data")
        self.epoch = self._progress.epoch

    def deals_anew(self, state: EpochState) -> bool:
        """Whether `load_state_dict` needs the states of all ranks, to deal out the rest of an epoch anew."""
        return self._progress.deals_anew(state)

    def pass_over(self, epochs: float) -> int:
        """Take this many epochs for done, the last in part, by the order of draws; returns the samples of that part."""
        self._leave()
        self.epoch = int(epochs)
        done = round((epochs - self.epoch) * (self.num_samples or 0))
        self._progress.pass_over(self.epoch, done)
        return done

    def start(self) -> int:
        """Begin the epoch, unless begun, and wait for its first round. Returns the estimated steps of the epoch."""
        return self._begun().epoch_steps

    def _begun(self) -> Pass:
        if self._pass is None:
            try:
                self._pass = self._begin()
            except BaseException as error:
                self._abandon(error)
                raise
        return self._pass

    @property
    def under_way(self) -> Pass | None:
        """The pass that has begun and is not over."""
        return self._pass

    def __iter__(self) -> Iterator[Collated]:
        """Begin the epoch, or go on with one that `start` has begun; an iterator handed out before is over."""
        if self._pass is not None and self._pass.taken:
            self._leave()
        current = self._begun()
        current.taken = True
        return self._steps(current)

    def close(self, timeout_s: float | None = None) -> None:
        """Leave the epoch (see `_leave`), end the worker processes, give the coordinator back."""
        self._leave(timeout_s)
        self._stages.close()
        self._coordinator.close()

    def abort(self, message: str) -> None:
        """Tell the other ranks why this one ends, then end as `close` does, without waiting for them."""
        self._coordinator.abort(message)
        self.close(ABORT_S)

    def release(self) -> None:
        """End what this process alone needs, for garbage collection: calls no collective and waits for no rank.

        A thread gives the rest back, the planning thread and the coordinator.
        """
        current, self._pass = self._pass, None
        if current is not None:
            current.rounds.stop()
            current.batches = None
        self._stages.close()

        def close_rest() -> None:
            if current is not None:
                current.close(ABORT_S)
            self._coordinator.close()

        threading.Thread(target=close_rest, name="odb-release", daemon=True).start()

    def _begin(self) -> Pass:
        if self._stages.is_closed:
            raise ConfigError("odb: this loader has been closed; make another one.")
        self._progress.turn_to(self.epoch)
        done, resume, place = self._progress.done, self._progress.resume, self._progress.place
        self._order.set_epoch(self.epoch)
        self._order.share.done = done
        if resume is not None:
            self._order.share.again = [held.draw for held in resume[0].waiting]
            self._order.share.begin = resume[0].drawn
        plan = self._plan(
            self._stages.observe(self.epoch),
            epoch=self.epoch,
            order=functools.partial(self._checked_order, place, self._progress.order),
            compare_orders=self._order.compare,
            done_before=0 if done is None else int(done.sum()),
            resume=resume,
            emitted_before=self._progress.draws,
        )
        rounds = iter(plan)
        current = Pass(plan, BackgroundPrefetcher(rounds) if self._stages.threaded else InlinePrefetcher(rounds))
        self._pass = self._stages.feed.current = current
        current.batches = self._stages.collate(self.epoch)
        self._coordinator.start()
        self._coordinator.agree({**self._settings, **dict(zip(PLACE, place))})
        current.rounds.start()
        while not current.tasks:
            try:
                current.tasks.extend(current.rounds.poll())
            except queue.Empty:
                self._coordinator.check()
            except StopIteration:  # nothing is left of a resumed epoch but rows that cannot be used
                self._progress.turn_to(self.epoch + 1)
                self.set_epoch(self.epoch + 1)
                return self._begin()
        current.epoch_steps = current.tasks[0][0].epoch_steps
        return current

    def _steps(self, current: Pass) -> Iterator[Collated]:
        try:
            # No reference to the iterator but the pass's own: leaving must end the worker processes.
            while current.batches is not None:
                asked = time.perf_counter()
                item = take(current.batches, "collates")
                self.times.wait(time.perf_counter() - asked)
                if item is END:
                    break
                if isinstance(item, Failure):
                    raise DataError(item.message(self._stages.describe, self.config.on_error))
                if item is not None:
                    current.in_flight -= 1
                    yield item
                else:
                    self._coordinator.check()
            if current.error is not None:
                error, current.error = current.error, None
                try:
                    raise error
                finally:
                    del error
        except GeneratorExit:
            # Not waited for: the loop may have ended by an exception, of which the others must hear first.
            current.rounds.stop()
            raise
        except BaseException as error:
            self._abandon(error)
            raise
        if self._pass is current:
            self._leave()

    def _abandon(self, error: BaseException) -> None:
        """Leave after an error. The others know of an agreed one; of any other they are told, for they do not leave."""
        if not isinstance(error, CollectiveError):
            self._coordinator.abort(str(error) if isinstance(error, DataError) else one_line(error))
        self._leave(ABORT_S)

    def _leave(self, timeout_s: float | None = None) -> None:
        """End the pass; within `timeout_s` (default: that of the coordinator) if the planning is stuck."""
        current, self._pass = self._pass, None
        if current is not None:
            current.close(self._coordinator.timeout_s if timeout_s is None else timeout_s)

    def _on_reject(self, rejection: Rejection) -> None:
        self._num_rejected += 1
        if self._num_rejected <= MAX_REJECTIONS_LOGGED:
            logger.warning("left out (%s): %s", rejection.reason, rejection.message)
        if self._num_rejected == MAX_REJECTIONS_LOGGED:
            logger.warning("further rows that are left out are counted, not logged")

    def _fingerprint(self, epoch: int) -> int:
        """That of the order of an epoch; drawing it anew is what a sampler can do while another pass is under way."""
        if self._pass is not None and epoch == self.epoch:
            return self._order.fingerprint
        self._order.set_epoch(epoch)
        return self._order.peek()

    def _checked_order(self, place: tuple[int, ...], expected: int | None) -> int:
        """A number made of order and place, by which the ranks compare them (planning thread)."""
        if expected is not None and self._order.fingerprint != expected:
            raise DataError(
                "the sampler has drawn another order than before the stop, so what is left of the epoch cannot be "
                "told; give one whose order depends on its seed and epoch alone, or set `resume: ignore_data`"
            )
        return self._order.common(place)


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:
        return None
