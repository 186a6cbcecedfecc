"""The epochs of a `DataLoader` that forms its batches online: what is handed over, and when it counts as trained on."""

from __future__ import annotations

import atexit
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from odb_factory.accounting.step_accounting import StepAccounting, log_first_step
from odb_factory.comm.gloo import check_process_group, find_process_group, gather_once, world_size_of
from odb_factory.comm.lifeline import lifeline_of
from odb_factory.comm.process_group import make_coordinator
from odb_factory.config import ResolvedConfig
from odb_factory.data.collate import Collated
from odb_factory.data.dataloader_parts import dismantle
from odb_factory.data.loader import ABORT_S, ODBLoader, Pass
from odb_factory.data.observe import ItemObserver, check_first_item
from odb_factory.data.progress import OptimizerStepRule
from odb_factory.data.state import Positive, load_fields, read_checked, require, write_checked
from odb_factory.data.trial import TrialBatches, trial_batches
from odb_factory.data.worker import Picklable
from odb_factory.ending import ending
from odb_factory.errors import ConfigError, DataError, one_line
from odb_factory.log import get_logger
from odb_factory.loop.step_info import Receipts, make_step_info, put_step_info
from odb_factory.model.flat_row import begin_row
from odb_factory.planning import Collation

# ----------------------------------------------------------------------------------------------------------------------
# What accelerate does for a DataLoader it has prepared, done for one whose batches are formed online.


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None: ...


class FixedBatchesRefused:
    """In the place of a DataLoader's `collate_fn`: nobody calls it while the batches are formed online.

    Who does has built another DataLoader from the attributes of this one, as `accelerate.skip_first_batches` does.
    """

    def __call__(self, items: Any) -> Any:
        raise ConfigError(
            "a DataLoader was built from the parts of one whose batches odb forms online, as "
            "accelerate.skip_first_batches does, and would yield fixed batches; to go on in the middle of an epoch use "
            "state_dict() and load_state_dict(), and else the online loader itself."
        )


def to_device(batch: Any, *, pin_memory: bool) -> Any:
    """Where accelerate puts the batches of the DataLoaders it has prepared."""
    return send_to_device(batch, AcceleratorState().device, non_blocking=pin_memory)


def check_accumulation() -> None:
    """Raise `ConfigError` where accelerate would end optimizer steps by a count of its own."""
    theirs = GradientState().num_steps
    if theirs != 1:
        raise ConfigError(
            f"gradient_accumulation_steps: {theirs} in the Accelerator, which would end its optimizer steps by that "
            "count, and odb cuts each into as many micro-batches as it needs; leave it at 1 there (give it to "
            "ODBDataLoader or apply_odb), and step where the step info says ends_optimizer_step."
        )


def checkpoint_with(accelerator: Accelerator, loader: Stateful, name: str) -> None:
    """Write the loader's state with `accelerator.save_state`, one file a rank, and read it with `load_state`.

    Loading raises `DataError` where a file is missing or damaged.
    """

    def save(models: Any, weights: Any, folder: str) -> None:
        state = loader.state_dict()
        path = _file(folder, name, state["rank"])
        try:
            write_checked(path, {"state": state})
        except OSError as error:
            raise DataError(f"{path}: cannot be written ({one_line(error)}); the checkpoint is not whole.") from None

    def load(models: Any, folder: str) -> None:
        if not _file(folder, name, 0).exists():
            raise DataError(
                f"{folder}: holds no {name}_rank0.json, so nobody knows which samples were trained on; it was saved "
                "without checkpoint_with(accelerator). Load it without that call to begin the epoch anew."
            )
        # A folder that was written before, by more ranks, has files of ranks that are no more.
        states = [_read(folder, name, 0)]
        states += [_read(folder, name, rank) for rank in range(1, states[0]["world_size"])]
        loader.load_state_dict(states)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _file(folder: str, name: str, rank: int) -> Path:
    return Path(folder, f"{name}_rank{rank}.json")


def _read(folder: str, name: str, rank: int) -> dict[str, Any]:
    path = _file(folder, name, rank)
    try:
        state: dict[str, Any] = read_checked(path, state=dict[str, Any])["state"]
        own = load_fields(state, "state", rank=int, world_size=Positive)["rank"]
        require(own == rank, "state.rank", own, "but the file is of another rank")
    except DataError as error:
        raise DataError(
            f"{path}: {error}; load another checkpoint, or load this one without checkpoint_with(accelerator) to begin "
            "the epoch anew."
        ) from None
    return state


# ----------------------------------------------------------------------------------------------------------------------
# End a loader that nobody has closed: when it is garbage-collected, or when the program ends.


class LastResort:
    """owner: whose end is waited for. It must not be reachable from `loader`."""

    def __init__(self, owner: object, loader: ODBLoader):
        # The exit of the program is another matter: by then it is known whether an error has ended it.
        self._at_exit = partial(_at_exit, weakref.ref(loader), id(_last_error()), os.getpid())
        atexit.register(self._at_exit)
        self._finalizer = weakref.finalize(owner, _collected, loader, self._at_exit, os.getpid())
        self._finalizer.atexit = False

    def cancel(self) -> None:
        """The loader is closed otherwise."""
        self._finalizer.detach()
        atexit.unregister(self._at_exit)


def _collected(loader: ODBLoader, at_exit: partial[None], pid: int) -> None:
    atexit.unregister(at_exit)
    if os.getpid() == pid and not sys.is_finalizing():
        loader.release()


def _at_exit(loader: weakref.ref[ODBLoader], error_before: int, pid: int) -> None:
    """Tell the other ranks of the error that ends this program; not of one that a notebook's cell has ended with."""
    left, error = loader(), _last_error()
    if left is None or os.getpid() != pid:
        return
    if error is not None and id(error) != error_before:
        left.abort(one_line(ending(error)))
    else:
        left.close(ABORT_S)


def _last_error() -> BaseException | None:
    return getattr(sys, "last_value", None)


# ----------------------------------------------------------------------------------------------------------------------

logger = get_logger(__name__)

OVER = (
    "this iteration is over before its end: its loader has since been iterated anew, set to another epoch or state, or "
    "closed; finish one iteration before the next, or make two loaders."
)
UNCHECKED = (
    "layout: flat in a loop of your own, and nothing has made sure that the model keeps the samples of a row apart "
    "(one with its cache switched on does not); call odb_factory.unpad(model, loader) before the first batch"
)
RUN_STEPS = "optimizer_steps_of_run"
"""The key of a loop's state that the `ODBLoader` has no use for: the audit counts on from it."""


class Iteration:
    """One DataLoader's. The `ODBLoader` behind it is made when it is first needed, for the ranks there are then.

    accumulation: micro-batches of an optimizer step, as they would be without odb.
    is_fetched_ahead: a framework asks it for a batch before it hands over the one before.
    is_checked: `unpad` has found that the loop's model takes flat rows.
    is_prepared: accelerate has prepared the DataLoader. moves_batches: and leaves it to us to move them.
    """

    def __init__(
        self,
        dataloader: DataLoader[Any],
        config: ResolvedConfig,
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
        parts = dismantle(dataloader, seed, already_split=already_split)
        if already_split and parts.sampler is not None:
            raise ConfigError(
                "already_split: this dataset has an index, of which every rank takes its own share; give each rank the "
                "whole dataset (an order that is split, as DistributedSampler's, is put together again)."
            )
        self.config = config
        self.is_prepared = self._is_fetched_ahead = is_fetched_ahead
        self.moves_batches = self.is_checkpointed = self.is_checked = False
        self._process_group, self._pin_memory, self._audit_dir = process_group, parts.pin_memory, audit_dir
        observer = ItemObserver(
            Picklable(parts.collate_fn, "collate_fn"),
            cost_fn=cost_fn,
            loss_scaling=config.loss_scaling,
            takes_any_loss=True,
        )
        if parts.sampler is not None:
            options = {"worker_init_fn": parts.worker_init_fn, "timeout": parts.timeout}
            options["multiprocessing_context"] = parts.multiprocessing_context
            check_first_item(parts.dataset, observer, num_workers=parts.num_workers, **options)
        self._make = partial(
            ODBLoader,
            parts,
            config,
            observer=observer,
            rule=OptimizerStepRule(batch_size=parts.batch_size, accumulation=accumulation, drop_last=parts.drop_last),
            collation=collation,
            layout="flat" if config.layout == "flat" else "padded",
            seed=seed,
            agree_on={"already_split": already_split},
        )
        if world_size_of(process_group) > 1:  # a rank that dies from here on ends the others
            lifeline_of(process_group, config.exchange_timeout_s).renew()
        self._made: tuple[ODBLoader, StepAccounting] | None = None
        self._last_resort: LastResort | None = None
        self._is_closed = self._begun = self._has_said = False
        self._epoch = 0
        self._current: Pass | None = None
        self._receipts = Receipts()

    def __repr__(self) -> str:
        ranks = "not begun"
        if self._made is not None:
            ranks = f"rank {self.loader.rank} of {self.loader.world_size}"
        return f"token_budget={self.config.token_budget}, epoch={self.epoch}, {ranks}"

    @property
    def epoch(self) -> int:
        """Of the iteration under way, or of the next one if `set_epoch` has chosen it."""
        return self._epoch if self._made is None else self.loader.epoch

    @property
    def loader(self) -> ODBLoader:
        return self._parts[0]

    @property
    def accounting(self) -> StepAccounting:
        return self._parts[1]

    @property
    def _parts(self) -> tuple[ODBLoader, StepAccounting]:
        """Made by the first to ask; on all ranks at the same place of the program."""
        if self._made is None:
            if self._is_closed:
                raise ConfigError("odb: this loader has been closed; make another one.")
            group = find_process_group(self._process_group, is_prepared=self.is_prepared)
            loader = self._make(coordinator=make_coordinator(group, self.config.exchange_timeout_s))
            loader.set_epoch(self._epoch)
            accounting = StepAccounting(
                loader,
                self.config,
                self._audit_dir,
                left_out_dir=self._audit_dir,
                is_fetched_ahead=self._is_fetched_ahead,
            )
            self._made = loader, accounting
            self._last_resort = LastResort(self, loader)
        return self._made

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if self._made is not None:
            self.loader.set_epoch(epoch)
        self._begun = False

    def state(self) -> dict[str, Any]:
        return self.loader.state_dict() | {RUN_STEPS: self.accounting.optimizer_steps}

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        if self._current is not None:
            raise ConfigError(
                "load_state_dict: batches of this iteration have been taken; load before the first batch, or leave the "
                "loop (and drop its iterator) before."
            )
        self.loader.load_state_dict([{key: one[key] for key in one if key != RUN_STEPS} for one in states])
        self.accounting.resume_at(states[0].get(RUN_STEPS, 0))
        self._begun = False

    def estimate_optimizer_steps(self) -> int:
        loader = self.loader
        if loader.num_optimizer_steps is None:
            if loader.num_samples is None:
                raise TypeError("the dataset has no length, so the number of its optimizer steps cannot be estimated")
            if loader.under_way is None and self._begun:
                self.set_epoch(loader.epoch + 1)
        return loader.estimate_optimizer_steps()

    def batches(self) -> Iterator[Any]:
        loader = self.loader
        self._check_ranks(loader)
        if self.is_prepared:
            check_accumulation()
        if self._begun:
            self.set_epoch(loader.epoch + 1)
        elif self.config.layout == "flat" and not self.is_checked and loader.rank == 0:
            logger.warning(UNCHECKED)
        self._begun = True
        items = iter(loader)
        assert loader.under_way is not None
        return self._batches(loader, items, loader.under_way)

    def trial_batches(self) -> TrialBatches:
        """A few rows of the epoch that has begun, by which `unpad` checks the model."""
        return trial_batches(self.loader)

    def gather(self, content: Any) -> list[Any]:
        """What each rank says (JSON types), to all ranks."""
        answers = gather_once(json.dumps(content).encode(), self.config.exchange_timeout_s)
        return [json.loads(answer) for answer in answers]

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._last_resort is not None:
            self._last_resort.cancel()
        if self._made is not None:
            self.loader.close()
            self.accounting.close()

    def abort(self, message: str) -> None:
        """Tell the other ranks why this one ends; `close` comes next."""
        if self._made is not None and not self._is_closed:
            self.loader.abort(message)

    def _batches(self, loader: ODBLoader, items: Iterator[Collated], current: Pass) -> Iterator[Any]:
        micro_batch = None
        self._receipts.begin()
        begin_row(())
        try:
            for micro_batch, measured, collated in iter(partial(self.accounting.next, items), None):
                self._check_goes_on(loader, current)
                labels = collated.get("labels") if isinstance(collated, Mapping) else None
                self.accounting.begin(micro_batch, measured, labels)
                if not self._has_said:
                    self._has_said = True
                    log_first_step(loader, self.config, micro_batch.step, in_loop=True)
                info = make_step_info(
                    micro_batch,
                    self.config.loss_scaling,
                    loader.world_size,
                    measured,
                    loader.num_samples,
                    self.accounting.optimizer_steps + 1,
                )
                batch = put_step_info(self._moved(collated), info)
                if not self._is_fetched_ahead:
                    self.accounting.end()
                self._current = current
                self._receipts.add(info)
                del info, collated, labels  # the batch alone holds the info
                yield batch
                del batch
                self._receipts.check()
                if self._is_fetched_ahead:  # the framework hands it over now, and holds the next one
                    self._check_goes_on(loader, current)
                    self.accounting.end()
            if micro_batch is None or not (micro_batch.step.last and micro_batch.ends_optimizer_step):
                raise ConfigError(OVER)
        finally:
            begin_row(())  # nothing after the loop is of the row whose step info was taken out last
            if self._current is current:
                self._current = None

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

    def _moved(self, batch: Any) -> Any:
        return to_device(batch, pin_memory=self._pin_memory) if self.moves_batches else batch
