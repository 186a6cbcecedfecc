"""`ODBDataLoader`, `apply_odb`, `pop_step_info`: batches that are formed online, for custom training loops."""

from __future__ import annotations

import dataclasses
import json
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, Unpack

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import AcceleratorState, GradientState, is_initialized
from accelerate.utils import DistributedType, send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from odb_factory.accounting import StepAccounting, TokenLoss, in_float32, log_first_step, weighted_token_loss
from odb_factory.config import LOSS_SCALINGS, ODBConfig, ODBKeys, make_config, refusals_of_auto
from odb_factory.data.collate import Collated, trial_batches
from odb_factory.data.loader import ABORT_S, ODBLoader, Pass
from odb_factory.data.observe import ItemObserver, count_supervised
from odb_factory.data.order import (
    IN_ORDER,
    MEAN_OF_STEP,
    OptimizerStepRule,
    StockMean,
    check_source,
    dismantle,
    unwrap,
)
from odb_factory.data.pool import why_not_observed
from odb_factory.data.ranks import Ranks, check_process_group, find_process_group, gather_once, ring_of, world_size_of
from odb_factory.data.samples import Measured, MicroBatch, Picklable
from odb_factory.ending import ending
from odb_factory.errors import ConfigError, DataError, one_line
from odb_factory.log import get_logger
from odb_factory.model.flat_row import FlatRow, begin_row, end_row, row_in_progress
from odb_factory.planner import Collation, Cost
from odb_factory.refusals import GRADIENTS_LOST, Refusal, refuse

T_co = TypeVar("T_co", covariant=True)
logger = get_logger(__name__)


class LoopOptions(ODBKeys, total=False):
    """Options of `ODBDataLoader` and `apply_odb` in addition to the arguments of a DataLoader."""

    gradient_accumulation_steps: int
    cost_fn: Callable[[Any], Cost | int] | None
    collation: Collation | None
    audit_dir: str | Path | None
    process_group: dist.ProcessGroup | None
    already_split: bool
    config: ODBConfig | None


def _only_in_a_trainer(key: str, why: str, way_out: str = "leave it out") -> Refusal:
    default = getattr(ODBConfig, key)
    return Refusal(f"odb.{key}", lambda s: getattr(s.odb, key) not in (default, False), why, way_out)


LOOP = (
    Refusal("odb.loss_scaling", lambda s: s.given.get("loss_scaling") == "stock",
        "is the loss of a trainer, and a custom loop computes its own",
        f"leave it out (exact), or choose one of {', '.join(name for name in LOSS_SCALINGS if name != 'stock')}"),
    *refusals_of_auto(lambda _: True, "runs the model before training, which a custom loop does by itself",
        "set a number"),
    _only_in_a_trainer("audit", "does not say where to", "give audit_dir= instead"),
    _only_in_a_trainer("oom",
        "takes the micro-batches of an optimizer step once more, which a custom loop does by itself",
        "leave it out, and lower token_budget if memory is short"),
    _only_in_a_trainer("balance_encoder", "acts in the forwards of a trainer"),
    _only_in_a_trainer("recompute", "switches gradient checkpointing of a trainer's model"),
    _only_in_a_trainer("lr_scale", "has no effect in a custom loop, which sets its learning rate",
        "leave it out, and scale by optimizer_step_samples of the step info"),
)  # fmt: skip


def check_whole(name: str, value: object, meaning: str = "") -> None:
    """Raise `ConfigError` for anything but a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: {value!r} is not a whole number of at least 1{meaning}.")


def refuse_fixed_batches(items: Any) -> NoReturn:
    """The `collate_fn` of a DataLoader whose batches are formed online: only another DataLoader calls it, which was
    built from the attributes of this one."""
    raise ConfigError(
        "a DataLoader was built from the parts of an online loader of odb, as accelerate.skip_first_batches does, and "
        "would yield fixed batches; use the online loader itself, and to resume in the middle of an epoch its "
        "state_dict() and load_state_dict()."
    )


def _is_deepspeed() -> bool:
    """Whether this is a training by DeepSpeed through accelerate."""
    is_training = is_initialized() and torch.is_grad_enabled()
    return is_training and AcceleratorState().distributed_type == DistributedType.DEEPSPEED


STALE = (
    "this iterator is stale: its loader was iterated again, given another epoch or state, or closed; finish one "
    "iteration before the next, or make two loaders."
)
UNCHECKED = (
    "layout: flat in a custom loop, and it is unknown whether the model keeps the samples of a row apart (a model with "
    "its cache switched on does not); call odb_factory.unpad(model, loader) before the first batch"
)
NOT_TAKEN = (
    "a batch was dropped with its step info in it, so its loss was not weighed: call pop_step_info(batch) before "
    "model(**batch), which may swallow the key, and multiply the mean loss by loss_scale (logged once)."
)
STEP_OPEN = (
    "the last iteration ended in the middle of an optimizer step: if it computed gradients, call "
    "optimizer.zero_grad() before the next backward, or they become part of the next optimizer step."
)
ACCUMULATES = (
    "accelerator.accumulate: it counts batches, and lets the optimizer step after each micro-batch of an optimizer "
    "step that odb has cut; leave it out, and step where the step info says ends_optimizer_step."
)


class ODBDataLoader(DataLoader[T_co]):
    """A DataLoader that forms its batches online, under budgets; yields the batches that `collate_fn` returns.

    dataset: map-style or an `IterableDataset`; an item is a mapping with `input_ids` (list, array or tensor of shape
        [length] or [1, length]), `labels`, and other inputs of the model. Patches are read from `odb_n_patches`, or
        counted from `image_grid_thw`, `pixel_values` and their video twins. All ranks iterate the same stream, and
        each takes its share of it; already_split=True: the stream gives each rank another part.
    batch_size, gradient_accumulation_steps: as they would be without odb: an optimizer step has batch_size x
        gradient_accumulation_steps x ranks samples (unless `global_batch_size` says otherwise), cut into as many
        micro-batches as the budgets need. drop_last: as in torch, counted in batches of all ranks.
    token_budget, max_patches, loss_scaling, buffer_size and every other key of `ODBConfig`: see there. loss_scaling:
        default `exact`; the loss of the loop without odb (`stock`) is known to its author alone.
    layout: `padded` (here also `auto`): batches as `collate_fn` returns them; `flat`: the samples of a batch in one
        row, without padding, for models of transformers (below).
    cost_fn: item -> `Cost` or tokens, for items of any other kind or cost. collation: what `collate_fn` adds to a
        group (default: its `pad_to_multiple_of`).
    shuffle, sampler: an order over the *whole* dataset, the same on every rank; each rank takes its share, without
        padding. The order of `shuffle=True` comes from the seed of `generator`, or from 0.
    audit_dir: folder for `odb_audit_rank{r}.jsonl`. The other arguments are those of `DataLoader`.
    process_group: the data-parallel ranks. Default: the ranks of accelerate's mesh, if `accelerator.prepare` was given
        this loader and has a mesh; otherwise the default group at the time of the first batch (or state).

    Every batch is a mapping with one key more than the collator's: take it out with `pop_step_info(batch)` before
    `model(**batch)`. Samples whose labels are all -100 are left out and counted. Make and iterate the loader on all
    ranks at the same place of the program: the ranks communicate over a separate gloo group.
    `accelerator.prepare(loader)` returns the loader itself, which then moves its batches; for Lightning there is
    `odb_factory.integrations.lightning`. Use the loader as a context manager, or call `close()` to end its workers.
    Raises `ConfigError` for a bad value.

    Example::

        with ODBDataLoader(dataset, batch_size=32, token_budget=8192, shuffle=True, collate_fn=collate) as loader:
            for batch in loader:
                info = pop_step_info(batch)
                (model(**batch).loss * info.loss_scale).backward()
                if info.ends_optimizer_step:
                    optimizer.step()
                    optimizer.zero_grad()

    Flat micro-batches (`input_ids`, `labels` and `position_ids` [1, total], no `attention_mask`) need a model of
    transformers that `unpad` has set up and tried on a few rows::

        with ODBDataLoader(dataset, batch_size=32, token_budget=8192, layout="flat", collate_fn=collate) as loader:
            unpad(model, loader)
            for batch in loader:
                info = pop_step_info(batch)  # info.segments: the lengths of its samples
                (model(**batch).loss * info.loss_scale).backward()
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool | None = None,
        sampler: Sampler[int] | Sequence[int] | None = None,
        batch_sampler: object = None,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], T_co] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        in_order: bool = True,
        **options: Unpack[LoopOptions],
    ):
        check_whole("batch_size", batch_size, ": the rows of a micro-batch without odb")
        if batch_sampler is not None:
            raise ConfigError(
                f"batch_sampler: a {type(batch_sampler).__name__} decides which samples share a batch, "
                "as odb does; give the order alone, as sampler= or shuffle=."
            )
        if not in_order:
            raise ConfigError(IN_ORDER)
        if collate_fn is None:
            raise ConfigError("collate_fn: missing; samples of one batch have different lengths, so it must pad them.")
        check_source(dataset, sampler)
        super().__init__(
            dataset,
            batch_size,
            shuffle=shuffle,
            sampler=sampler,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            persistent_workers=persistent_workers and num_workers > 0,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=worker_init_fn,
            generator=generator,
        )
        self._set_up(self, **options)

    @classmethod
    def from_dataloader(
        cls, dataloader: Any, *, stock_mean: StockMean = MEAN_OF_STEP, **options: Unpack[LoopOptions]
    ) -> Self:
        """The online loader of an existing DataLoader's dataset, order, collator and workers.

        dataloader: a DataLoader of torch or prepared by accelerate (leave accelerate's own gradient_accumulation_steps
        at 1); it is not changed. An optimizer step has its batch size x gradient_accumulation_steps x ranks samples.
        stock_mean: the mean that a trainer's loss is made of, for trainers that weigh samples by it. options: those of
        `ODBDataLoader`, and the keys of `ODBConfig`.
        Raises `ConfigError` if its order is unknown, or if its class has a custom `__iter__`.

        Example::

            with ODBDataLoader.from_dataloader(dataloader, token_budget=8192) as loader:
                for batch in loader:
                    info = pop_step_info(batch)
        """
        source = unwrap(dataloader)
        if hasattr(dataloader, "_odb"):
            raise ConfigError("apply_odb: this DataLoader forms its batches online already; call it once.")
        if isinstance(dataloader, DataLoaderDispatcher):
            raise ConfigError(
                "dispatch_batches: accelerate lets one rank read for all (by default if a dataset is iterated), and "
                "with odb every rank forms its own batches; apply odb before `prepare`, or set it to False in "
                "accelerate's DataLoaderConfiguration."
            )
        if getattr(dataloader, "skip_batches", 0):
            raise ConfigError(
                "accelerate.skip_first_batches: it would pass over micro-batches of odb; to resume in the middle of an "
                "epoch use state_dict() and load_state_dict() of the online loader."
            )
        kind = type(source)
        if kind.__iter__ is not DataLoader.__iter__ and not kind.__module__.startswith("torchdata."):
            raise ConfigError(
                f"apply_odb: {kind.__name__} has an `__iter__` of its own, whose changes of the batches would be left "
                "out; make them in collate_fn or in the loop, and give a torch DataLoader."
            )
        check_source(source.dataset, source.sampler)
        online = cls.__new__(cls)
        vars(online).update(vars(source))  # the attributes of a DataLoader: dataset, num_workers, ...
        online._set_up(source, stock_mean=stock_mean, **options)
        online._is_prepared = source is not dataloader
        return online

    def _set_up(
        self,
        source: DataLoader[Any],
        *,
        gradient_accumulation_steps: int = 1,
        cost_fn: Callable[[Any], Any] | None = None,
        collation: Collation | None = None,
        audit_dir: str | Path | None = None,
        process_group: dist.ProcessGroup | None = None,
        already_split: bool = False,
        stock_mean: StockMean = MEAN_OF_STEP,
        config: ODBConfig | None = None,
        **keys: Unpack[ODBKeys],
    ) -> None:
        """source: the DataLoader that gives dataset, order, collator and workers."""
        config = make_config(config, keys)
        refuse(LOOP, {"odb": config, "given": keys})
        # `stock` and `auto` are the defaults of a trainer.
        self.config = resolved = dataclasses.replace(
            config,
            loss_scaling="exact" if config.loss_scaling == "stock" else config.loss_scaling,
            layout="padded" if config.layout == "auto" else config.layout,
        ).resolved()
        check_process_group(process_group)
        check_whole("gradient_accumulation_steps", gradient_accumulation_steps)
        generator = source.generator
        seed = 0 if generator is None else generator.initial_seed()
        parts = dataclasses.replace(dismantle(source, seed), already_split=already_split)
        if already_split and parts.sampler is not None:
            raise ConfigError(
                "already_split: this dataset has an index, of which every rank takes its own share; give each rank the "
                "whole dataset (an order that is split, such as DistributedSampler's, is joined again)."
            )
        observer = ItemObserver(
            Picklable(parts.collate_fn, "collate_fn"),
            cost_fn=cost_fn,
            loss_scaling=resolved.loss_scaling,
            takes_any_loss=True,
        )
        if parts.sampler is not None and (why := why_not_observed(parts, observer)):
            raise ConfigError(f"dataset: {observer.describe(parts.dataset, 0)}: {why}.")
        self._make = partial(
            ODBLoader,
            parts,
            resolved,
            observer=observer,
            rule=OptimizerStepRule(
                batch_size=parts.batch_size,
                accumulation=gradient_accumulation_steps,
                drop_last=parts.drop_last,
                stock_mean=stock_mean,
            ),
            collation=collation,
            layout="flat" if resolved.layout == "flat" else "padded",
            seed=seed,
            agree_on={"already_split": already_split},
        )
        ring_of(process_group, resolved.exchange_timeout_s)  # a rank that dies from here on ends the others
        self.collate_fn = refuse_fixed_batches
        self.is_checked = False
        """Whether `unpad` has checked that the model of the loop takes flat rows."""
        self._pins_memory, self._audit_dir, self._process_group = parts.pin_memory, audit_dir, process_group
        self._accounting: StepAccounting | None = None
        self._is_prepared = self._is_closed = False
        self._has_begun = self._has_logged = self._has_warned = self._is_step_open = False
        self._current: Pass | None = None

    # Epochs

    epoch = 0
    """The epoch of the last iteration, or of the next one after `set_epoch` or `load_state_dict`."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; without this call it is the epoch after the last iteration's."""
        self.epoch = epoch
        if self._accounting is not None:
            self.loader.set_epoch(epoch)
        self._has_begun = False

    @property
    def num_optimizer_steps(self) -> int | None:
        """Optimizer steps of an epoch; None if unknown (`global_batch_size: fill`, a dataset without a length).

        Collective: all ranks read it.
        """
        return self.loader.num_optimizer_steps

    def estimate_optimizer_steps(self) -> int:
        """Optimizer steps of an epoch: `num_optimizer_steps`, or an estimate with `global_batch_size: fill`.

        The estimate is for the current epoch, or the next one, which then begins. It takes all samples to be as long as
        the samples seen until now: with sorted data it can be wrong by a factor. Collective. Raises `TypeError` for a
        dataset without a length.
        """
        loader = self.loader
        if loader.num_optimizer_steps is None:
            if loader.num_samples is None:
                raise TypeError("the dataset has no length, so the number of its optimizer steps cannot be estimated")
            if loader.under_way is None and self._has_begun:
                self.set_epoch(self.epoch + 1)
        return loader.estimate_optimizer_steps()

    def __len__(self) -> NoReturn:
        raise TypeError(
            "the number of batches is not known before they are formed; num_optimizer_steps is the number of optimizer "
            "steps of an epoch, and the step info has ends_optimizer_step and progress (share of the epoch)"
        )

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]  # torch's own iterators are what it declares
        loader = self.loader
        ranks = world_size_of(find_process_group(self._process_group, is_prepared=self._is_prepared))
        if loader.world_size != ranks:
            raise ConfigError(
                f"this loader has begun with {loader.world_size} ranks, there are {ranks} now; make another one after "
                "torch.distributed has been initialised."
            )
        if _is_deepspeed():
            refuse([GRADIENTS_LOST], {"deepspeed": AcceleratorState().deepspeed_plugin.deepspeed_config})
        if self._is_prepared and (accumulation := GradientState().num_steps) != 1:
            raise ConfigError(
                f"gradient_accumulation_steps: {accumulation} in the Accelerator, which would end its optimizer steps "
                "by that count, but odb cuts each into as many micro-batches as it needs; leave it at 1 there (give it "
                "to ODBDataLoader or apply_odb), and step where the step info says ends_optimizer_step."
            )
        if self._is_step_open and loader.rank == 0:
            logger.warning(STEP_OPEN)
        self._is_step_open = False
        if self._has_begun:
            self.set_epoch(self.epoch + 1)
        elif self.config.layout == "flat" and not self.is_checked and loader.rank == 0:
            logger.warning(UNCHECKED)
        self._has_begun = True
        items = iter(loader)
        assert loader.under_way is not None
        return self._batches(items, loader.under_way)

    def _batches(self, items: Iterator[Collated], current: Pass) -> Iterator[T_co]:
        accounting, taken = self.accounting, deque[FlatRow | None](maxlen=1)
        micro_batch, first_info = None, None
        state, is_accelerate = GradientState(), is_initialized() and torch.is_grad_enabled()
        before = state.sync_gradients and 1  # not True: another iteration may be under way when this one ends
        end_row()
        try:
            for micro_batch, measured, collated in iter(partial(accounting.next, items), None):
                accounting.begin(micro_batch, measured)
                if not self._has_logged:
                    self._has_logged = True
                    log_first_step(accounting.loader, micro_batch.step, in_loop=True)
                if self._is_prepared:  # as accelerate does
                    collated = send_to_device(collated, AcceleratorState().device, non_blocking=self._pins_memory)
                info = step_info(micro_batch, measured, accounting, taken)
                batch = put_step_info(collated, info)
                if is_accelerate:
                    if first_info is not None and state.sync_gradients is True:
                        raise ConfigError(ACCUMULATES)
                    # False: DeepSpeed does not step in the backward of this micro-batch. Otherwise 1: it is true, so a
                    # prepared optimizer steps and clears gradients when the loop does, and differs from the `True` that
                    # `accelerator.accumulate` sets.
                    state.sync_gradients = False if _is_deepspeed() and not micro_batch.ends_optimizer_step else 1
                first_info = first_info or weakref.ref(info)
                accounting.end()
                self._current = current
                del info, collated  # the batch alone holds the info
                yield batch
                del batch
                if not (self._has_warned or taken or first_info()):
                    self._has_warned = True
                    logger.warning(NOT_TAKEN)
            if not (current.is_empty or (micro_batch and micro_batch.step.last and micro_batch.ends_optimizer_step)):
                raise ConfigError(STALE)
        finally:
            self._is_step_open = micro_batch is not None and not micro_batch.ends_optimizer_step
            end_row(taken)
            if is_accelerate:
                state.sync_gradients = before
            if self._current is current:
                self._current = None

    # Figures and end

    def stats(self) -> dict[str, float]:
        """Throughput, padding, balance and waiting since the first batch, of all ranks, as the Trainer's `odb/...`
        metrics. Collective before the first batch."""
        return self.accounting.metrics()

    def close(self) -> None:
        """End the worker processes and release the process group of the planning (on all ranks)."""
        self._close(None)

    def _close(self, timeout_s: float | None) -> None:
        """timeout_s: how long to wait for ranks that have not left the epoch (default: `exchange_timeout_s`)."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._accounting is not None:
            self._finalizer.detach()
            self.loader.close(timeout_s)
            self._accounting.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error, tell the other ranks why this one leaves. Raises the cause of the error, if known."""
        cause = None if error is None else ending(error)
        # A generator that yields the batches may be closed, and a program may end.
        is_end = isinstance(cause, GeneratorExit) or (isinstance(cause, SystemExit) and not cause.code)
        if cause is not None and not is_end and self._accounting is not None and not self._is_closed:
            self.loader.abort(one_line(cause))
        self._close(ABORT_S if isinstance(cause, SystemExit) else None)
        if cause is not None and cause is not error:
            raise cause from error

    # State

    def state_dict(self) -> dict[str, Any]:
        """The position after the last optimizer step whose batches were all yielded: JSON types, the same on all ranks.

        Micro-batches of an unfinished optimizer step come again. `accelerator.register_for_checkpointing(loader)` saves
        the state, and so does `accelerator.save_state` for a prepared loader.
        """
        # `optimizer_steps_of_run` is for the audit alone.
        return self.loader.state_dict() | {"optimizer_steps_of_run": self.accounting.optimizer_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of any rank, with any number of ranks, budgets and workers.

        Call it before the first batch of an iteration. The next iteration is the epoch of the state, and `set_epoch`
        with this epoch keeps the position. Raises `DataError` for a value that is not a state, and if the data differ
        from those of the state.
        """
        if self._current is not None:
            raise ConfigError(
                "load_state_dict: batches of this iteration have been taken; load before the first batch, or leave the "
                "loop (and drop its iterator) before."
            )
        self.loader.load_state_dict(state)
        self.epoch = self.loader.epoch
        self.accounting.resume_at(state["optimizer_steps_of_run"])
        self._has_begun = False

    use_stateful_dataloader = True
    """Makes accelerate's `save_state` save the state of the loader, and `load_state` load it."""

    @property
    def _is_accelerate_prepared(self) -> bool:
        """True: otherwise `accelerator.prepare` would build a loader of fixed batches."""
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Set by `accelerator.prepare`: batches are moved from now on, and the ranks are those of accelerate's mesh."""
        self._is_prepared = value

    # For `unpad` and trainers

    @property
    def _odb(self) -> ODBDataLoader[T_co]:
        """The online loader of a DataLoader that has one."""
        return self

    @property
    def accounting(self) -> StepAccounting:
        """Made at the first read, with the loader; on all ranks at the same place of the program."""
        if self._accounting is None:
            if self._is_closed:
                raise ConfigError("odb: this loader has been closed; make another one.")
            group = find_process_group(self._process_group, is_prepared=self._is_prepared)
            loader = self._make(ranks=Ranks(group, self.config.exchange_timeout_s))
            loader.set_epoch(self.epoch)
            mesh: Any = getattr(AcceleratorState(), "device_mesh", None) if self._is_prepared else None
            # The tensor-parallel ranks of a replica compute the same samples: one of them writes the audit.
            has_replica = mesh is not None and "tp" in (mesh.mesh_dim_names or ()) and self._process_group is None
            writes = not has_replica or mesh["tp"].get_local_rank() == 0
            self._accounting = StepAccounting(loader, self._audit_dir if writes else None)
            self._finalizer = weakref.finalize(self, loader.release, os.getpid())
        return self._accounting

    @property
    def loader(self) -> ODBLoader:
        """Made at the first read, like `accounting`."""
        return self.accounting.loader

    def trial_batches(self, count: int) -> tuple[Any, ...]:
        """`count` samples of the epoch under way, to check the model: the fields of `model.check.Trial`."""
        return trial_batches(self.loader.first_samples(), self.loader.groups, count)

    def gather(self, content: Any) -> list[Any]:
        """Gather the content (JSON types) of each rank of the process group, in rank order."""
        answers = gather_once(json.dumps(content).encode(), self.config.exchange_timeout_s, parent=self._process_group)
        return [json.loads(answer) for answer in answers]


class ODBHandle(ODBDataLoader[Any]):
    """The result of `apply_odb`: the online loader of a DataLoader; `remove()` lets that form its own batches.

    Example::

        with apply_odb(dataloader, token_budget=8192) as handle:
            for batch in dataloader:
                info = pop_step_info(batch)
    """

    dataloader: Any = None
    """The DataLoader given to `apply_odb`."""

    def _close(self, timeout_s: float | None) -> None:
        super()._close(timeout_s)
        if self.dataloader is not None:
            _set_class(self.dataloader, type(self.dataloader).__base__)
            self.dataloader = None

    def remove(self) -> None:
        """End the worker processes and let the DataLoader form its batches as before (on all ranks)."""
        self.close()


def _set_class(dataloader: Any, kind: Any) -> None:
    """Set `__class__`, which accelerate's loaders hide behind a property."""
    vars(object)["__class__"].__set__(dataloader, kind)


def apply_odb(dataloader: Any, **options: Unpack[LoopOptions]) -> ODBHandle:
    """Let an existing DataLoader form its batches online: in place, this one object only.

    dataloader, options, errors: as in `ODBDataLoader.from_dataloader`, which does not change the DataLoader.

    Example::

        handle = apply_odb(dataloader, token_budget=8192)  # dataloader now forms its batches online
        handle.remove()
    """
    online = ODBHandle.from_dataloader(dataloader, **options)
    stock = type(dataloader)

    def value(name: str) -> Any:
        return property(lambda _: getattr(online, name), lambda _, new: setattr(online, name, new))

    of_online = ("__iter__", "__len__", "set_epoch", "state_dict", "load_state_dict")
    methods = {name: staticmethod(getattr(online, name)) for name in of_online}
    values = {name: value(name) for name in ("collate_fn", "use_stateful_dataloader", "_is_accelerate_prepared")}
    attributes = {"__module__": stock.__module__, "_odb": online} | methods | values
    _set_class(dataloader, type(stock.__name__, (stock,), attributes))
    online.dataloader = dataloader
    return online


# ----------------------------------------------------------------------------------------------------------------------
# The step info of a batch, and the loss that is computed with it.

STEP_INFO_KEY = "odb_step_info"


@dataclass(frozen=True, kw_only=True)
class ODBStepInfo:
    """A micro-batch of this rank, and its optimizer step.

    loss_scaling: how tokens are weighed. token_weight: the weight of each unit of this micro-batch, for gradients that
        are averaged over ranks and summed over micro-batches; 0 if idle.
    is_idle: this rank has no sample left for this micro-batch, others have. The batch is a sample that is trained on
        elsewhere, and runs with loss_scale 0: every rank takes part in every exchange of gradients.
    ids: samples of this micro-batch in the order of its rows (flat: in the row), as indices of the dataset; () if idle.
    segments: the lengths (tokens) of the parts of a flat row: the samples, in the order of `ids`, then filling (dummy
        media, `pad_to_multiple_of`); () if the micro-batch is padded.
    samples, tokens, units: of this micro-batch on this rank, without padding; 0 if idle.
    samples_all_ranks: samples of this micro-batch on all ranks.
    optimizer_step: number of the optimizer step in the run, from 1, as in the audit. optimizer_step_samples: samples of
        all its micro-batches on all ranks.
    micro_batch, micro_batches: number of this micro-batch in its optimizer step, from 0, and their count.
    ends_optimizer_step: this micro-batch is the last of its optimizer step: call `optimizer.step()` after its backward.
    epoch: from 0. progress: share of the epoch's samples that all ranks have done after this optimizer step, 0 to 1;
        None if the dataset has no length.

    Example::

        for batch in loader:
            info = pop_step_info(batch)
            (model(**batch).loss * info.loss_scale).backward()
            if info.ends_optimizer_step:
                optimizer.step()
                optimizer.zero_grad()
    """

    loss_scaling: str
    token_weight: float
    is_idle: bool
    ids: tuple[int, ...]
    segments: tuple[int, ...]
    samples: int
    tokens: int
    units: int
    samples_all_ranks: int
    optimizer_step: int
    optimizer_step_samples: int
    micro_batch: int
    micro_batches: int
    ends_optimizer_step: bool
    epoch: int
    progress: float | None
    planned: MicroBatch = field(repr=False, compare=False)
    num_supervised: int | None = field(default=None, repr=False, compare=False)
    taken: deque[FlatRow | None] = field(default_factory=deque, repr=False, compare=False)
    """The flat row of the last info of this iteration that `pop_step_info` has returned; empty before."""

    @property
    def loss_scale(self) -> float:
        """The factor of the mean loss of this micro-batch before `backward()`; 0 if idle.

        For gradients that are averaged over ranks (as DDP, ZeRO and FSDP do) and summed over the micro-batches of an
        optimizer step: do not divide by their number (if `accelerator.backward` does, multiply by it).
        """
        return self.token_weight * self.units

    def to(self, *args: Any, **kwargs: Any) -> ODBStepInfo:
        """Return this object: code that moves all values of a batch to a device calls it."""
        return self


def step_info(
    micro_batch: MicroBatch, measured: Measured, accounting: StepAccounting, taken: deque[FlatRow | None]
) -> ODBStepInfo:
    """The info of the micro-batch that `accounting` has begun."""
    step, num_samples, progress = micro_batch.step, accounting.loader.num_samples, None
    if num_samples is not None:
        progress = 1.0 if step.last else min(step.done / max(num_samples, 1), 1.0)
    return ODBStepInfo(
        loss_scaling=accounting.loader.config.loss_scaling,
        token_weight=next(iter(micro_batch.weights), 0.0),  # all are the same
        is_idle=micro_batch.idle,
        ids=micro_batch.ids,
        segments=measured.segments,
        samples=len(micro_batch.ids),
        tokens=micro_batch.tokens,
        units=micro_batch.num_units,
        samples_all_ranks=micro_batch.totals.samples,
        optimizer_step=accounting.optimizer_steps + 1,
        optimizer_step_samples=step.samples,
        micro_batch=micro_batch.index,
        micro_batches=step.num_micro_batches,
        ends_optimizer_step=micro_batch.ends_optimizer_step,
        epoch=step.epoch,
        progress=progress,
        planned=micro_batch,
        num_supervised=measured.num_supervised,
        taken=taken,
    )


def put_step_info(batch: Any, info: ODBStepInfo) -> Any:
    """The batch with the step info in it: under a key of a mapping, otherwise as an attribute.

    A tuple or list becomes an object of a subclass that can have attributes. Raises `DataError` for a batch that takes
    neither key nor attribute.
    """
    if not isinstance(batch, Mapping):
        if isinstance(batch, tuple | list):
            kind = _subclass(type(batch))
            # `tuple.__new__` also takes a named tuple.
            batch = tuple.__new__(kind, batch) if isinstance(batch, tuple) else kind(batch)
        try:
            setattr(batch, STEP_INFO_KEY, info)
        except AttributeError:
            raise DataError(
                f"collate_fn returned a {type(batch).__name__}, which takes no further attribute; odb adds the step "
                "info to each batch, so return a dict, a tuple, a list, a tensor or a custom object."
            ) from None
        return batch
    if STEP_INFO_KEY in batch or not isinstance(batch, MutableMapping):
        raise DataError(
            f"collate_fn returned a {type(batch).__name__} that takes no key {STEP_INFO_KEY!r}, under which odb adds "
            "the step info to each batch; return a dict or a BatchEncoding without that key."
        )
    batch[STEP_INFO_KEY] = info
    return batch


@cache
def _subclass(kind: Any) -> Any:
    """A subclass whose objects can have attributes."""
    return type(kind.__name__, (kind,), {"__module__": kind.__module__})


def pop_step_info(batch: object) -> ODBStepInfo:
    """Take the step info out of a batch of an `ODBDataLoader`; do so right before `model(**batch)`.

    A model that `unpad` has set up takes the lengths of a flat row from the last info that was taken out.

    batch: as the loader yields it: a mapping, or another type that `collate_fn` returns (a tuple, a tensor, an object).
    Raises `DataError` if the batch has no info.
    """
    holder = batch if isinstance(batch, MutableMapping) else getattr(batch, "__dict__", {})
    info: ODBStepInfo | None = holder.pop(STEP_INFO_KEY, None)
    if info is None:
        raise DataError(
            f"this batch has no {STEP_INFO_KEY!r}: it does not come from an ODBDataLoader, or the info was taken out "
            "before; call pop_step_info once for each batch, before anything else drops the key."
        )
    begin_row(info.segments)
    info.taken.append(row_in_progress())
    return info


def weighted_loss(logits: Tensor, labels: Tensor, info: ODBStepInfo) -> Tensor:
    """A micro-batch's part of the loss of its optimizer step; call `backward()` on it.

    logits: [rows, length, vocabulary]; labels: [rows, length], -100 if no loss is wanted; padded or flat, as the
    micro-batch is. Shifted and in float32 as in transformers' causal models, without losses that a model adds (for the
    routers of a mixture of experts).

    Example::

        info = pop_step_info(batch)
        weighted_loss(model(**batch).logits, batch["labels"], info).backward()
    """
    return weighted_token_loss(logits, labels, (info.token_weight,) * len(logits))


def without_logits(model: nn.Module) -> Callable[[Mapping[str, Any], ODBStepInfo], Tensor]:
    """`weighted_loss`, computed in the forward of a transformers model without a matrix of logits, if possible.

    model: as trained, also wrapped by PEFT, DDP, FSDP or DeepSpeed. Losses that the model adds (for the routers of a
    mixture of experts) are included, by the micro-batch's share. If the model needs its logits, the log says why, and
    the loss is computed from them.
    Returns a function of the model's inputs, with the labels that the loader has collated, and of the step info.

    Example::

        loss_of = without_logits(model)
        for batch in loader:
            info = pop_step_info(batch)
            loss_of(batch, info).backward()
    """
    token_loss: TokenLoss | None = None

    def compute(batch: Mapping[str, Any], info: ODBStepInfo) -> Tensor:
        nonlocal token_loss
        if token_loss is None:  # by now engines have wrapped the model
            token_loss = TokenLoss(model, info.loss_scaling)
        labels = batch.get("labels")
        # Labels on an accelerator are not counted once more: the host would wait for the device.
        on_host = isinstance(labels, Tensor) and labels.device.type == "cpu"
        num_supervised = count_supervised(labels) if on_host else info.num_supervised
        with token_loss.weighing(None, info.segments, max(info.units, 1), num_supervised):
            output = model(**batch)
        return in_float32(output["loss"] if isinstance(output, dict) else output[0]) * info.loss_scale

    return compute
