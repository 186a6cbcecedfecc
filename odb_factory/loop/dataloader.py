"""`ODBDataLoader`: a DataLoader that forms its batches online, for people with a training loop of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from odb_factory.config import ODBConfig
from odb_factory.data.items import check_dataset
from odb_factory.errors import ConfigError
from odb_factory.loop.accelerated import FixedBatchesRefused
from odb_factory.loop.iteration import Iteration
from odb_factory.loop.online import Online, State, T_co, check_sampler, loop_config
from odb_factory.planning import Collation, Cost

if TYPE_CHECKING:
    from odb_factory.loop.keys import LoopKeys


class ODBDataLoader(Online[T_co], State, DataLoader[T_co]):
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
        loader and has one, else the default group as it is when the first batch (or state) is asked for.

    Every batch is a mapping with one key more than the collator's: take it out with `pop_step_info(batch)` before
    `model(**batch)`. Samples whose labels are all -100 are left out and counted. Make and iterate it on all ranks at
    the same place of the program: they agree over a gloo group of their own. `accelerator.prepare(loader)` returns the
    loader itself, which then moves its batches; for Lightning there is `odb_factory.integrations.lightning`.
    Use it as a context manager, or call `close()`: until then its workers live.
    Raises `ConfigError` for a bad value.

    Example::

        with ODBDataLoader(dataset, token_budget=8192, shuffle=True, collate_fn=collate, num_workers=4) as loader:
            for batch in loader:
                info = pop_step_info(batch)
                (model(**batch).loss * info.loss_scale).backward()
                if info.ends_optimizer_step:
                    optimizer.step()
                    optimizer.zero_grad()

    Flat micro-batches (`input_ids`, `labels` and `position_ids` [1, total], no `attention_mask`) need a model of
    transformers that `unpad` has set up, and tried on a few rows::

        with ODBDataLoader(dataset, token_budget=8192, layout="flat", collate_fn=collate) as loader:
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
        audit_dir: str | Path | None = None,
        gradient_accumulation_steps: int = 1,
        cost_fn: Callable[[Any], Cost | int] | None = None,
        collation: Collation | None = None,
        process_group: dist.ProcessGroup | None = None,
        already_split: bool = False,
        config: ODBConfig | None = None,
        **block: Unpack[LoopKeys],
    ):
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(
                f"batch_size: {batch_size!r} is not a whole number of at least 1: the rows that a micro-batch would "
                "have without odb."
            )
        if batch_sampler is not None:
            raise ConfigError(
                f"batch_sampler: a {type(batch_sampler).__name__} decides which samples meet in a batch, "
                "as odb does; give the order alone, as sampler= or shuffle=."
            )
        if not in_order:
            raise ConfigError(
                "in_order: False would let batches overtake each other; odb keeps their order, leave it out."
            )
        if collate_fn is None:
            raise ConfigError("collate_fn: missing; samples of one batch have different lengths, so it must pad them.")
        config = loop_config(config, block)
        check_sampler(sampler)
        check_dataset(dataset, sampler)
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
        self._odb = Iteration(
            self,
            config,
            gradient_accumulation_steps,
            cost_fn=cost_fn,
            collation=collation,
            audit_dir=audit_dir,
            process_group=process_group,
            already_split=already_split,
        )
        self.collate_fn = FixedBatchesRefused()

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]  # torch's own iterators are what it declares
        return super().__iter__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.dataset).__name__}, {self._odb})"

    @property
    def use_stateful_dataloader(self) -> bool:
        """`accelerator.save_state` asks for it, and then keeps one state for all ranks."""
        if self._odb.is_checkpointed:
            return False
        if self._odb.loader.world_size > 1:
            raise ConfigError(
                "accelerator.save_state would keep one state for all ranks of this ODBDataLoader; call "
                "loader.checkpoint_with(accelerator) once, after prepare."
            )
        return True
