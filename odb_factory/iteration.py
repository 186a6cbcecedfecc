"""The epochs of a `DataLoader` that forms its batches online: their weights, their audit, what has been consumed."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from odb_factory.batching import Collation
from odb_factory.config import ODBConfig
from odb_factory.data.collate import Collated
from odb_factory.data.loader import ABORT_S, ODBLoader
from odb_factory.data.make_loader import make_loader
from odb_factory.data.take_apart import take_apart
from odb_factory.errors import ConfigError, one_line
from odb_factory.step_info import STEP_INFO_KEY, make_records
from odb_factory.training.loss import check_supervised
from odb_factory.training.metrics import Audit


class Iteration:
    """One DataLoader's. is_fetched_ahead: a framework asks it for a batch before it hands over the one before."""

    def __init__(
        self,
        dataloader: DataLoader,
        config: ODBConfig,
        accumulation: int,
        *,
        cost_fn: Callable | None,
        collation: Collation | None,
        audit_dir: str | Path | None,
        is_fetched_ahead: bool = False,
    ):
        if config.audit and audit_dir is None:
            raise ConfigError("odb.audit: True does not say where to; give audit_dir= instead.")
        self.config, self.accumulation = config, accumulation
        self._is_fetched_ahead = is_fetched_ahead
        generator = dataloader.generator
        seed = next(s for s in (config.seed, generator and generator.initial_seed(), 0) if s is not None)
        self.loader: ODBLoader = make_loader(
            take_apart(dataloader, seed),
            config,
            cost_fn=cost_fn,
            collation=collation,
            accumulation=accumulation,
            seed=seed,
        )
        self.world_size = self.loader.world_size
        self._audit = Audit(Path(audit_dir), self.loader.rank) if audit_dir is not None else None
        self._begun = False
        self._last_estimate: int | None = None
        self._micro_steps = self._optimizer_steps = 0
        self._end = weakref.finalize(self, _end, self.loader)

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)
        self._begun = False

    def load(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        self.loader.load_state_dict([state] if isinstance(state, dict) else state)
        self._begun = False
        if self._audit is not None:
            self._audit.goes_on = True

    def num_batches(self) -> int:
        """Batches of an epoch, estimated from its first round (waits for it)."""
        if self.loader.num_samples is None:
            raise TypeError("the dataset has no length, so the number of its batches is not known ahead")
        if self.loader.under_way is None and self._begun:
            return self._last_estimate  # an epoch is over; a new one is begun by iterating
        self._last_estimate = self.loader.start()
        return self._last_estimate

    def batches(self) -> Iterator[Any]:
        if self._begun:
            self.loader.set_epoch(self.loader.epoch + 1)
        self._begun = True
        steps = iter(self.loader)
        self._last_estimate = self.loader.start()
        return self._batches(steps)

    def _batches(self, steps: Iterator[Collated]) -> Iterator[Any]:
        current, before = self.loader.under_way, None
        for items in self._optimizer_step_at_a_time(steps):
            self._optimizer_steps += 1
            records = make_records([step for step, _, _ in items], self.config.loss_scaling, self.world_size)
            for (step, measured, batch), record in zip(items, records):
                if self.loader.under_way is not current:
                    return  # another iteration has begun
                if self.config.loss_scaling == "exact":
                    check_supervised(step, measured)
                batch[STEP_INFO_KEY] = record
                if self._audit is not None:
                    weight = record.scales[self.config.loss_scaling]
                    self._audit.write(step, measured, weight, self._micro_steps, self._optimizer_steps)
                    self._audit.flush()
                self._micro_steps += 1
                if step is items[-1][0] and not self._is_fetched_ahead:
                    self._consume(items)
                # What was fetched ahead is trained on while the next is asked for.
                self.loader.times.begin((before if before and self._is_fetched_ahead else step).totals)
                before = step
                yield batch
            if self._is_fetched_ahead:
                self._consume(items)

    def _consume(self, items: list[Collated]) -> None:
        for step, _, _ in items:
            self.loader.consume(step)

    def _optimizer_step_at_a_time(self, steps: Iterator[Collated]) -> Iterator[list[Collated]]:
        items = []
        for item in steps:
            items.append(item)
            if (item[0].index + 1) % self.accumulation == 0:
                yield items
                items = []

    def close(self) -> None:
        if self._end.detach() is None:
            return
        self.loader.close()
        if self._audit is not None:
            self._audit.close()


def _end(loader: ODBLoader) -> None:
    """Nobody closed the loader: the program has ended, or let it go. Other ranks are told of an error that ended it."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        loader.abort(one_line(error))
    else:
        loader.close(ABORT_S)
