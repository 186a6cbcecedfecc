"""The epochs of a `DataLoader` that forms its batches online: their weights, their audit, what has been consumed."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from odb_factory.accounting.batch_checks import BatchChecks
from odb_factory.accounting.statistics import Audit, StepStatistics
from odb_factory.comm.data_parallel import check_process_group, find_process_group, world_size_of
from odb_factory.config import ODBConfig
from odb_factory.data.collate import Collated
from odb_factory.data.components import dismantle
from odb_factory.data.loader import ODBLoader
from odb_factory.data.make_loader import make_loader
from odb_factory.data.samples import Measured, MicroBatch
from odb_factory.data.task_sampler import Pass
from odb_factory.errors import ConfigError
from odb_factory.log import get_logger
from odb_factory.loop.accelerated import check_accumulation, to_device
from odb_factory.loop.last_resort import LastResort
from odb_factory.loop.step_info import ODBStepInfo, Receipt, put_step_info, step_infos
from odb_factory.planning import Collation

OVER = (
    "this iteration is over before its end: its loader has since been iterated anew, set to another epoch or state, or "
    "closed; finish one iteration before the next, or make two loaders."
)
NOT_TAKEN = (
    "a batch was dropped with its step info in it, so its loss was not weighed: call pop_step_info(batch) before "
    "model(**batch), which may swallow the key, and multiply the mean loss by loss_scale (said once)."
)
MOST_WATCHED = 64
"""Batches whose step info may still be taken out; a loop that collects more of them is not watched."""
logger = get_logger(__name__)


class Iteration:
    """One DataLoader's. The `ODBLoader` behind it is made when it is first needed, for the ranks there are then.

    is_fetched_ahead: a framework asks it for a batch before it hands over the one before.
    is_prepared: accelerate has prepared the DataLoader. moves_batches: and leaves it to us to move them.
    """

    def __init__(
        self,
        dataloader: DataLoader[Any],
        config: ODBConfig,
        accumulation: int,
        *,
        cost_fn: Callable[[Any], Any] | None,
        collation: Collation | None,
        audit_dir: str | Path | None,
        process_group: dist.ProcessGroup | None,
        already_split: bool,
        is_fetched_ahead: bool = False,
    ):
        check_process_group(process_group)
        if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
            raise ConfigError(f"gradient_accumulation_steps: {accumulation!r} is not a whole number of at least 1.")
        generator = dataloader.generator
        seed = next(s for s in (config.seed, generator and generator.initial_seed(), 0) if s is not None)
        parts = dismantle(dataloader, seed)
        if already_split and parts.sampler is not None:
            raise ConfigError(
                "already_split: this dataset has an index, of which every rank takes its own share; give each rank the "
                "whole dataset (an order that is split, as DistributedSampler's, is put together again)."
            )
        self.config, self.accumulation = config, accumulation
        self.is_prepared = self._is_fetched_ahead = is_fetched_ahead
        self.moves_batches = self.is_checkpointed = False
        self.tally, self.checks = StepStatistics(), BatchChecks(config)
        self._process_group, self._pin_memory = process_group, parts.pin_memory
        self._make = partial(
            make_loader,
            parts,
            config,
            cost_fn=cost_fn,
            collation=collation,
            accumulation=accumulation,
            seed=seed,
            already_split=already_split,
            agree_on={"already_split": already_split},
        )
        self._audit_dir, self._audit_goes_on = audit_dir, False
        self._audit: Audit | None = None
        self._loader: ODBLoader | None = None
        self._last_resort: LastResort | None = None
        self._is_closed = self._begun = self._has_warned = False
        self._epoch = self._optimizer_steps = 0
        self._current: Pass | None = None
        self._handed_over: list[tuple[weakref.ref[ODBStepInfo], Receipt]] = []

    def __repr__(self) -> str:
        ranks = "not begun" if self._loader is None else f"rank {self._loader.rank} of {self._loader.world_size}"
        return f"token_budget={self.config.token_budget}, epoch={self.epoch}, {ranks}"

    @property
    def epoch(self) -> int:
        """Of the iteration under way, or of the next one if `set_epoch` has chosen it."""
        return self._epoch if self._loader is None else self._loader.epoch

    @property
    def loader(self) -> ODBLoader:
        """Made by the first to ask; on all ranks at the same place of the program."""
        if self._loader is None:
            if self._is_closed:
                raise ConfigError("odb: this loader has been closed; make another one.")
            group = find_process_group(self._process_group, is_prepared=self.is_prepared)
            self._loader = self._make(process_group=group)
            self._loader.set_epoch(self._epoch)
            self._last_resort = LastResort(self, self._loader)
        return self._loader

    def stats(self) -> dict[str, float]:
        world_size = 1 if self._loader is None else self._loader.world_size
        figures = self.tally.metrics(self.config.token_budget, world_size)
        return figures | {"odb/over_budget": self.checks.num_over_budget}

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if self._loader is not None:
            self._loader.set_epoch(epoch)
        self._begun = False

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        if self._current is not None:
            raise ConfigError(
                "load_state_dict: batches of this iteration have been taken; load before the first batch, or leave the "
                "loop (and drop its iterator) before."
            )
        self.loader.load_state_dict(states)
        self._begun, self._audit_goes_on = False, True

    def estimate_num_batches(self) -> int:
        loader = self.loader
        if loader.num_samples is None:
            raise TypeError("the dataset has no length, so the number of its batches cannot be estimated")
        if loader.under_way is None and self._begun:
            self.set_epoch(loader.epoch + 1)
        return loader.start()

    def batches(self) -> Iterator[MutableMapping[str, Any]]:
        loader = self.loader
        self._check_ranks(loader)
        if self.moves_batches:
            check_accumulation(self.accumulation)
        if self._begun:
            self.set_epoch(loader.epoch + 1)
        self._begun = True
        steps = iter(loader)
        assert loader.under_way is not None
        return self._batches(loader, steps, loader.under_way)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._last_resort is not None:
            self._last_resort.cancel()
        if self._loader is not None:
            self._loader.close()
        if self._audit is not None:
            self._audit.close()

    def abort(self, message: str) -> None:
        """Tell the other ranks why this one ends; `close` comes next."""
        if self._loader is not None and not self._is_closed:
            self._loader.abort(message)

    def _batches(
        self, loader: ODBLoader, steps: Iterator[Collated], current: Pass
    ) -> Iterator[MutableMapping[str, Any]]:
        before = step = None
        self._handed_over = []  # the one before may have been broken off with a batch in hand
        try:
            for items in self._optimizer_step_at_a_time(steps):
                self._optimizer_steps += 1
                micro_batches = [one for one, _, _ in items]
                infos = deque(
                    step_infos(micro_batches, self.config.loss_scaling, loader.world_size, loader.num_samples)
                )
                while items:
                    self._check_goes_on(loader, current)
                    step, measured, collated = items.popleft()
                    info = infos.popleft()
                    self.checks(step, measured)
                    batch = put_step_info(self._moved(collated), info)
                    self._write_audit(loader, step, measured, info)
                    self.tally.add(step, loader.world_size)
                    if info.ends_optimizer_step and not self._is_fetched_ahead:
                        self._consume(loader, micro_batches)
                    # What was fetched ahead is trained on while the next is asked for.
                    loader.times.begin((before if before and self._is_fetched_ahead else step).totals)
                    before, self._current = step, current
                    self._handed_over.append((weakref.ref(info), info.receipt))
                    del info, collated  # the batch alone holds the info
                    yield batch
                    del batch
                    self._check_receipts()
                if self._is_fetched_ahead:
                    self._check_goes_on(loader, current)
                    self._consume(loader, micro_batches)
            if step is None or not step.last:
                raise ConfigError(OVER)
        finally:
            if self._current is current:
                self._current = None

    def _optimizer_step_at_a_time(self, steps: Iterator[Collated]) -> Iterator[deque[Collated]]:
        items: deque[Collated] = deque()
        asked = time.perf_counter()
        if not self.tally.steps:
            self.tally.started = asked
        for item in steps:
            items.append(item)
            if (item[0].index + 1) % self.accumulation == 0:
                self.tally.data_wait_s += time.perf_counter() - asked
                yield items
                items = deque()
                asked = time.perf_counter()

    def _check_ranks(self, loader: ODBLoader) -> None:
        group = find_process_group(self._process_group, is_prepared=self.is_prepared)
        if not self._is_closed and loader.world_size != world_size_of(group):
            raise ConfigError(
                f"this loader has begun with {loader.world_size} ranks, there are {world_size_of(group)} now; make "
                "another one after torch.distributed has been initialised."
            )

    def _check_goes_on(self, loader: ODBLoader, current: Pass) -> None:
        if loader.under_way is not current:
            raise ConfigError(OVER)

    def _moved(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        return to_device(batch, pin_memory=self._pin_memory) if self.moves_batches else batch

    def _check_receipts(self) -> None:
        """Say, once, that a step info has gone with its batch and was never taken out."""
        open_ones = [(info, receipt) for info, receipt in self._handed_over if not receipt.taken]
        if not self._has_warned and any(info() is None for info, _ in open_ones):
            self._has_warned = True
            logger.warning(NOT_TAKEN)
        self._handed_over = [(info, receipt) for info, receipt in open_ones if info() is not None][-MOST_WATCHED:]

    def _consume(self, loader: ODBLoader, micro_batches: Sequence[MicroBatch]) -> None:
        for step in micro_batches:
            loader.consume(step)

    def _write_audit(self, loader: ODBLoader, step: MicroBatch, measured: Measured, info: ODBStepInfo) -> None:
        if self._audit_dir is not None:
            if self._audit is None:
                self._audit = Audit(Path(self._audit_dir), loader.rank)
                self._audit.goes_on = self._audit_goes_on
            self._audit.write(step, measured, info.loss_scale, self.tally.steps, self._optimizer_steps)
            self._audit.flush()
