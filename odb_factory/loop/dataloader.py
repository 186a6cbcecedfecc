"""`ODBDataLoader` and `apply_odb`: DataLoaders that form their batches online, for custom training loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar, Unpack

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import DataLoader, Sampler

from odb_factory.data.order import IN_ORDER, check_source, unwrap
from odb_factory.ending import ending
from odb_factory.errors import ConfigError, one_line
from odb_factory.loop.iteration import Iteration, LoopOptions, check_whole, refuse_fixed_batches

T_co = TypeVar("T_co", covariant=True)


class Controls(Generic[T_co]):
    """What can be asked of an online DataLoader. Generic as `DataLoader` is: only then may an object become one."""

    _odb: Iteration

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. Without it every iteration is the epoch after the last one."""
        self._odb.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way or over; of the next one after `set_epoch` or `load_state_dict`."""
        return self._odb.epoch

    @property
    def num_optimizer_steps(self) -> int | None:
        """Optimizer steps of an epoch; None if not known (`global_batch_size: fill`, a dataset without a length).

        With several ranks, all ask.
        """
        return self._odb.loader.num_optimizer_steps

    def estimate_optimizer_steps(self) -> int:
        """Optimizer steps of an epoch: `num_optimizer_steps`, or an estimate with `global_batch_size: fill`.

        The estimate is of the next epoch, or of the one under way, and takes all samples to be as long as those seen
        until now: with sorted data it can be wrong by a factor. It begins the epoch and waits for its first plan: with
        several ranks, all call it. Raises `TypeError` for a dataset without a length.
        """
        return self._odb.estimate_optimizer_steps()

    def stats(self) -> dict[str, float]:
        """Padding, balance, waiting and throughput since the first batch, of all ranks, to be logged.

        Names and meanings are those of the Trainer's `odb/...` figures, with odb/left_out: rows that were left out, and
        odb/over_budget: micro-batches of all ranks that the collator made larger than the budget.
        Before the first batch: with several ranks, all ask.
        """
        return self._odb.accounting.stats()

    def close(self) -> None:
        """End the worker processes and release the process group of the planning (on all ranks)."""
        self._odb.close()

    def _end(self) -> None:
        """The `with` block is left."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error this rank reports to the others why it leaves. Raises the cause of the error, if known."""
        cause = None if error is None else ending(error)
        # A generator that yields the batches may be closed, and a program may end.
        is_end = isinstance(cause, GeneratorExit) or (isinstance(cause, SystemExit) and not cause.code)
        if cause is not None and not is_end:
            self._odb.abort(one_line(cause))
        self._end()
        if cause is not None and cause is not error:
            raise cause from error


class Stateful:
    """Not part of `Online`: accelerate would add counts of its own to the state of a DataLoader it has wrapped."""

    _odb: Iteration

    def state_dict(self) -> dict[str, Any]:
        """Where the training stands after the last optimizer step whose batches were all yielded: JSON types, the same
        on all ranks.

        Micro-batches of an unfinished optimizer step come again. `accelerator.register_for_checkpointing(loader)` keeps
        it, and so does `accelerator.save_state` for a loader that was prepared.
        """
        return self._odb.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, whichever rank wrote it, with any number of ranks, budgets and workers.

        Call it before the first batch of an iteration. The state's epoch is the next to be iterated, and `set_epoch`
        with that epoch keeps the place in it. Raises `DataError` for a value that is no state, and if the data are not
        those of the state.
        """
        self._odb.load(state)


class Online(Controls[T_co]):
    """Base before a `DataLoader` class: the same object, iterated online. T_co: what its `collate_fn` returns."""

    def __iter__(self) -> Iterator[T_co]:
        return self._odb.batches()

    def __len__(self) -> NoReturn:
        raise TypeError(
            "the number of batches is not known before they are formed; num_optimizer_steps says how many optimizer "
            "steps an epoch has, and the step info where one ends and how much of the epoch is done (progress)"
        )

    @property
    def _is_accelerate_prepared(self) -> bool:
        """True: `accelerator.prepare` leaves prepared loaders alone, and would build one of fixed batches otherwise."""
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """`accelerator.prepare` sets it: now batches are moved, and the ranks are those of accelerate's mesh."""
        self._odb.is_prepared = self._odb.moves_batches = value


class ODBDataLoader(Online[T_co], Stateful, DataLoader[T_co]):
    """A DataLoader that forms its batches online, under budgets; yields what `collate_fn` returns.

    dataset: map-style or an `IterableDataset`; an item is a mapping with `input_ids` (list, array or tensor of shape
        [length] or [1, length]), `labels`, and what else the model takes. Patches are read from `odb_n_patches`, or
        counted from `image_grid_thw`, `pixel_values` and their video twins. All ranks iterate the same stream, and
        each takes its own share of it; already_split=True: the stream gives each rank a part of its own.
    batch_size, gradient_accumulation_steps: as they would be without odb: an optimizer step has batch_size x
        gradient_accumulation_steps x ranks samples (unless `global_batch_size` says otherwise), cut into as many
        micro-batches as the budgets need. drop_last: as in torch, counted in batches of all ranks.
    token_budget, max_patches, loss_scaling, buffer_size and every other key of `ODBConfig`: see there. loss_scaling is
        `exact` unless given: what the loop's loss would be without odb (`stock`) only its author knows. With `sample`
        and `square` call `weighted_loss` in place of the model's own.
    layout: `padded` (which `auto` is here), as `collate_fn` returns the batches; `flat`: the samples of each in one
        row, without padding, for models of transformers (below).
    cost_fn: item -> `Cost` or tokens, for items of any other kind or cost. collation: what `collate_fn` adds to a
        group (default: its `pad_to_multiple_of`).
    shuffle, sampler: an order over the *whole* dataset, the same on every rank; each rank takes its own share, without
        padding. The order of `shuffle=True` comes from the seed of `generator`, from the key `seed`, or from 0.
    audit_dir: write `odb_audit_rank{r}.jsonl` there. The other arguments are those of `DataLoader`.
    process_group: the data-parallel ranks; default: those of accelerate's mesh if `accelerator.prepare` was given this
        loader and has one, otherwise the default group as it is when the first batch (or state) is asked for.

    Every batch is a mapping with one key more than the collator's: take it out with `pop_step_info(batch)` before
    `model(**batch)`. Samples whose labels are all -100 are left out and counted. Make and iterate it on all ranks at
    the same place of the program: they agree over a gloo group of their own. `accelerator.prepare(loader)` returns the
    loader itself, which then moves its batches; for Lightning there is `odb_factory.integrations.lightning`.
    Use it as a context manager, or call `close()`: until then its workers live.
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
    transformers that `unpad` has set up, and tried on a few rows::

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
        check_whole("batch_size", batch_size, ": the rows that a micro-batch would have without odb")
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
        self._odb = Iteration(self, **options)
        self.collate_fn = refuse_fixed_batches

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]  # torch's own iterators are what it declares
        return super().__iter__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.dataset).__name__}, {self._odb})"

    use_stateful_dataloader = True
    """To accelerate: `save_state` keeps the state of the loader, `load_state` loads it."""


class ODBHandle(Controls[Any], Stateful):
    """The result of `apply_odb`: iterates the DataLoader, and `remove()` restores it.

    Example::

        with apply_odb(dataloader, token_budget=8192) as loader:
            for batch in loader:
                info = pop_step_info(batch)
    """

    def __init__(self, dataloader: Any, loader: DataLoader[Any], stock: type[DataLoader[Any]], odb: Iteration):
        self.dataloader, self._loader, self._stock, self._odb = dataloader, loader, stock, odb
        self._collate_fn = loader.collate_fn
        self._drop_last = getattr(dataloader, "_drop_last", None)  # of one that accelerate has prepared
        if self._drop_last is not None:  # else `gather_for_metrics` cuts the last micro-batch as a last fixed one
            dataloader._drop_last = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.dataloader).__name__}, {self._odb})"

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataloader)

    def remove(self) -> None:
        """End the worker processes and let the DataLoader form its batches as before (on all ranks)."""
        self.close()
        if self._loader.__dict__.pop("_odb", None) is not None:
            self._loader.__class__ = self._stock
            self._loader.collate_fn = self._collate_fn
            if self._drop_last is not None:
                self.dataloader._drop_last = self._drop_last

    _end = remove


def apply_odb(dataloader: Any, **options: Unpack[LoopOptions]) -> ODBHandle:
    """Let an existing DataLoader form its batches online: in place, this one object only.

    dataloader: torch's, or one that accelerate has prepared (leave accelerate's own gradient_accumulation_steps at 1).
    Its dataset, order, collator and workers are kept, and so is the number of samples in an optimizer step: its batch
    size x gradient_accumulation_steps x ranks. options: those of `ODBDataLoader`, and the keys of `ODBConfig`.
    Raises `ConfigError` if its order cannot be found out, if its class has an `__iter__` of its own, or if it was
    applied before.

    Example::

        handle = apply_odb(dataloader, token_budget=8192)  # dataloader now forms its batches online
        handle.remove()
    """
    loader = unwrap(dataloader)
    if hasattr(loader, "_odb"):
        raise ConfigError("apply_odb: this DataLoader forms its batches online already; call it once.")
    if isinstance(dataloader, DataLoaderDispatcher):
        raise ConfigError(
            "dispatch_batches: accelerate lets one rank read for all (by default where a dataset is iterated), and "
            "with odb every rank forms its own batches; apply odb before `prepare`, or set it to False in accelerate's "
            "DataLoaderConfiguration."
        )
    if getattr(dataloader, "skip_batches", 0):
        raise ConfigError(
            "accelerate.skip_first_batches: it would pass over micro-batches of odb; to resume in the middle of an "
            "epoch use state_dict() and load_state_dict() of what apply_odb returns."
        )
    if getattr(dataloader, "use_stateful_dataloader", False):
        raise ConfigError(
            "use_stateful_dataloader: True would keep the state of fixed batches; leave it out of accelerate's "
            "DataLoaderConfiguration, and use state_dict(), or register_for_checkpointing, of what apply_odb returns."
        )
    stock = type(loader)
    if stock.__iter__ is not DataLoader.__iter__ and not stock.__module__.startswith("torchdata."):
        raise ConfigError(
            f"apply_odb: {stock.__name__} has an `__iter__` of its own, and what that does to batches would be left "
            "out; do it in collate_fn or in the loop, and give a torch DataLoader."
        )
    check_source(loader.dataset, loader.sampler)
    # accelerate asks for a batch before it hands over the last
    iteration = Iteration(loader, is_fetched_ahead=loader is not dataloader, **options)
    # The state of a torchdata loader would be that of fixed batches.
    kinds = (Online, Stateful, stock) if hasattr(stock, "state_dict") else (Online, stock)
    loader.__class__ = type(stock.__name__, kinds, {"__module__": stock.__module__})
    loader._odb = iteration
    handle = ODBHandle(dataloader, loader, stock, iteration)
    loader.collate_fn = refuse_fixed_batches
    return handle
