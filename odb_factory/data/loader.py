"""`ODBLoader`: two ordinary torch DataLoaders with the planner between them.

The first observes: rows become light samples in its workers. The second collates: its sampler
yields whole micro-batches, its workers run the framework's collator. Between them one background
thread plans, ahead of what is being collated (`passes.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from odb_factory.comm.agreement import of_block, releases
from odb_factory.comm.coordinator import Coordinator, SingleProcessCoordinator
from odb_factory.config import ResolvedConfig
from odb_factory.data.budget import make_budget
from odb_factory.data.collate import Collated, GroupDataset
from odb_factory.data.epoch import EpochContext
from odb_factory.data.left_out import LeftOut
from odb_factory.data.loader_workers import LoaderWorkers
from odb_factory.data.observe import Observer
from odb_factory.data.passes import ABORT_S, Passes
from odb_factory.data.resume.progress import Progress
from odb_factory.data.resume.state import DataState
from odb_factory.data.samples import MicroBatch, OptimizerStep, Sample
from odb_factory.data.step_agreement import Lost
from odb_factory.data.step_rule import Layout, OptimizerStepRule, progress_for
from odb_factory.data.step_times import StepTimes
from odb_factory.data.task_sampler import Pass
from odb_factory.planning import Collation, CostModel, Limits

KEYS_OF_ROWS = ("overlong", "token_budget", "max_patches", "loss_scaling")
"""Keys of the block on which it depends what a row is, and what it weighs."""


class ODBLoader:
    """Iterate over the collated micro-batches of one epoch on this rank: (`MicroBatch`, `Measured`, batch).

    dataset: what `observer` reads rows from; sampler: row indices of one epoch over all ranks, with
    `set_epoch` if the order changes, None for a dataset that is iterated; collate_fn: the framework's
    collator, unchanged. layout: in which the micro-batches come, whatever the config asks for. rule: what makes an
    optimizer step. agree_on: settings, beside the config's, that all ranks must have in common. rows_from: what rows
    are made with; a state keeps it. workers: what else `LoaderWorkers` takes.
    counts_labels: units are counted from the labels of batches; else a `cost_fn` tells them.
    budget: as configured. lowered: to what the training has lowered it since (see `lower`).
    left_out: rows that this rank leaves out.
    Call `close` when done; it ends the worker processes.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        sampler: Any,
        observer: Observer,
        collate_fn: Callable,
        config: ResolvedConfig,
        collation: Collation = Collation(),
        layout: Layout = "padded",
        rule: OptimizerStepRule,
        seed: int = 0,
        coordinator: Coordinator | None = None,
        agree_on: Mapping[str, object] | None = None,
        rows_from: Mapping[str, object] | None = None,
        **workers: Any,
    ):
        self.dataset, self.config, self.layout = dataset, config, layout
        self.counts_labels = bool(getattr(observer, "counts_labels", True))
        self._coordinator = coordinator or SingleProcessCoordinator()
        self.rank, self.world_size = rank, world_size = self._coordinator.rank, self._coordinator.world_size
        self.times = StepTimes()
        self.budget = budget = make_budget(config, collation, layout)
        self.lowered: Limits | None = None
        self.left_out = LeftOut()
        self._workers = LoaderWorkers(
            dataset,
            sampler=sampler,
            observer=observer,
            collate_fn=collate_fn,
            config=config,
            budget=budget,
            rank=rank,
            world_size=world_size,
            **workers,
        )
        self._order = self._workers.order
        # The length of a stream that is split is that of this rank's part, or of the whole; nobody says which.
        is_split = getattr(self._order, "is_split", False)
        self.num_samples: int | None = None if is_split else _length(dataset if sampler is None else sampler)
        context = EpochContext(
            budget=budget,
            num_samples=self.num_samples,
            balance=bool(config.balance),
            group_size=config.balance_group_size,
            seed=seed,
            rank=rank,
            coordinator=self._coordinator,
            find_dummy_sample=self._workers.find_dummy_sample,
            leave_out=self.left_out.leave_out,
            compare_orders=self._order.compare,
            propose=self.times.fitting() if config.cost_model == "time" else CostModel,
            lowered=lambda: self.lowered,
        )
        self._progress: Progress = progress_for(
            config,
            rule,
            budget=budget,
            rank=rank,
            world_size=world_size,
            data={"samples": self.num_samples, "seed": seed, "split": is_split},
            read_row=self._workers.read_row,
        )
        named = {key: getattr(config, key) for key in KEYS_OF_ROWS} | dict(rows_from or {})
        self._progress.rows_from = {name: str(value) for name, value in named.items()}
        settings = {
            **releases(),
            **of_block(config),
            **rule.settings,
            "seed": seed,
            "collation": collation,
            "layout of the micro-batches": layout,
            "number of samples": self.num_samples,
            **(agree_on or {}),
        }
        self._passes = Passes(
            self._workers,
            context,
            self._progress,
            self.times,
            self.left_out,
            config=config,
            settings=settings,
            # What stock divides by a number of its own, and what cannot weigh samples, keeps its weights as planned.
            reweighs=config.loss_scaling != "stock" or (rule.stock_mean.divisor is None and not rule.equal_weights),
        )

    @property
    def global_batch_size(self) -> int | None:
        """Samples of an optimizer step on all ranks; None with `fill`."""
        return self._progress.global_batch_size

    @property
    def num_optimizer_steps(self) -> int | None:
        """Optimizer steps of an epoch; None where nobody knows (`fill`, no length)."""
        return self._progress.steps_an_epoch

    @property
    def epoch(self) -> int:
        """Of the iteration under way, or of the next."""
        return self._passes.epoch

    @property
    def rejected(self) -> Counter[str]:
        """Rows of the epoch that cannot be used, as counted until the optimizer step handed on last, by reason."""
        return self._passes.rejected

    @property
    def under_way(self) -> Pass | None:
        """The pass that has begun and is not over."""
        return self._passes.under_way

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; a new order every epoch."""
        self._passes.turn_to(epoch)

    def consume(self, step: OptimizerStep) -> None:
        """Note that this optimizer step, and all before it, has been trained on: a state is taken from there."""
        mine = self._passes.handed_out.take_through(step)
        if self.under_way is not None or step.last:  # or asked for what comes behind the last
            self._progress.consume(step, mine, None if self.under_way is None else self.under_way.planner)

    def weigh_by(self, weights: Callable[[MicroBatch], Sequence[float]]) -> None:
        """weights: of each sample of a micro-batch the share of the loss of its optimizer step."""
        self._passes.weights = weights

    def take_lost(self) -> Lost:
        """What all ranks have told since the last call."""
        lost, self._passes.lost = self._passes.lost, Lost()
        return lost

    def leave(self) -> None:
        """Leave the epoch, on all ranks at the same optimizer step."""
        self._passes.leave()

    def lower(self, limits: Limits) -> None:
        """Plans to come are made with budgets no higher than these, on all ranks."""
        self.lowered = limits.least(self.lowered)

    def samples_of(self, micro_batch: MicroBatch) -> list[Sample]:
        """What a micro-batch was collated from, of an optimizer step that is not yet consumed (with `oom: split`)."""
        return self._passes.handed_out.samples_of(micro_batch)

    def collate(self, micro_batch: MicroBatch, samples: list[Sample]) -> Collated:
        """These samples by the collator of the workers, in this process."""
        item = self.groups[micro_batch, samples]
        assert item is not None
        return self._passes.collated(item)

    def check(self) -> None:
        """Raise `CollectiveError` if another rank has failed."""
        self._coordinator.check()

    def state(self) -> DataState:
        """Where this rank stands after the last optimizer step consumed; it does not change with later ones."""
        return self._progress.state(self._fingerprint(self._progress.epoch))

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON types.

        Some kilobytes; with `fill`, after settings were changed in the middle of an epoch, also a bit for each row.
        """
        return self.state().to_dict()

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from the states of all ranks, or from this one's alone unless `needs_all`.

        Raises `DataError` where the data are not those of the states (see the key `resume`).
        """
        self._passes.leave()
        self._progress.load(states, self._fingerprint, ignore_data=self.config.resume == "ignore_data")
        self._passes.epoch = self._progress.epoch

    def needs_all(self, state: DataState) -> bool:
        """Whether `load_state_dict` needs the states of all ranks, to deal out the rest of an epoch anew."""
        return self._progress.needs_all(state)

    def skip(self, *, optimizer_steps: int, epochs: float) -> int | None:
        """Stand where a stock training stands that has taken so many optimizer steps and epochs.

        Exact with kept optimizer steps (returns None); else the samples of the last epoch that are taken for done.
        """
        self._passes.leave()
        skipped = self._progress.skip(optimizer_steps, epochs)
        self._passes.epoch = self._progress.epoch
        return skipped

    def estimate_optimizer_steps(self) -> int:
        """Optimizer steps of an epoch. With `fill` it begins the epoch and is an estimate; 0 where nobody can say."""
        if self._progress.steps_an_epoch is not None:
            return self._progress.steps_an_epoch
        return self._passes.begun().epoch_steps

    @property
    def has_rows(self) -> bool:
        """Whether rows can be read by their number; those of a stream cannot."""
        return self._workers.read_row is not None

    def first_samples(self) -> Iterator[Sample]:
        """The first samples in the order of all ranks, the same on each, observed here; of an epoch that has begun."""
        if self._workers.read_row is not None:
            rows = map(self._workers.read_row, dict.fromkeys(self._order.first))
            yield from (row for row in rows if isinstance(row, Sample))

    @property
    def groups(self) -> GroupDataset:
        """What collates its micro-batches, in its layout."""
        return self._workers.groups

    def begin(self) -> None:
        """Begin the epoch, unless begun, and wait for its first plan. Collective."""
        self._passes.begun()

    @property
    def first_planned(self) -> OptimizerStep | None:
        """The optimizer step that comes first in the pass that has begun, if it has not been handed on yet."""
        tasks = () if self.under_way is None else self.under_way.tasks
        return tasks[0][0].step if tasks else None

    def __iter__(self) -> Iterator[Collated]:
        """Begin the epoch, or go on with one that `begin` has begun; an iterator handed out before is over."""
        return self._passes.micro_batches()

    def close(self, timeout_s: float | None = None) -> None:
        """Leave the epoch, end the worker processes, give the coordinator back.

        timeout_s: how long planning that is stuck is waited for (default: that of the coordinator).
        """
        self._passes.leave(timeout_s)
        self._workers.close()
        self._coordinator.close()

    def abort(self, message: str) -> None:
        """Tell the other ranks why this one ends, then end as `close` does, without waiting for them."""
        self._coordinator.abort(message)
        self.close(ABORT_S)

    def release(self) -> None:
        """End what this process alone needs, for garbage collection: calls no collective and waits for no rank."""
        self._passes.release()

    def _fingerprint(self, epoch: int) -> int:
        """That of the order of an epoch; drawing it anew is what a sampler can do while another pass is under way."""
        if self.under_way is not None and epoch == self.epoch:
            return self._order.fingerprint
        self._order.set_epoch(epoch)
        return self._order.peek()


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:
        return None
