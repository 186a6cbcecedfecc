"""`ODBDataLoader` and `apply`: online dynamic batching for people with a training loop of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from odb_factory.batching import Collation
from odb_factory.config import ODBConfig
from odb_factory.data.make_loader import make_config
from odb_factory.data.take_apart import innermost
from odb_factory.errors import ConfigError, one_line
from odb_factory.iteration import Iteration


class _Online:
    """Goes before a `DataLoader` class: the same object, iterated online."""

    _is_accelerate_prepared = True
    """`accelerator.prepare` would build another DataLoader, without this class; it leaves prepared ones alone."""

    def __iter__(self) -> Iterator[Any]:
        return self._odb.batches()

    def __len__(self) -> int:
        return self._odb.num_batches()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. Without it every iteration is the epoch after the last one."""
        self._odb.set_epoch(epoch)

    def close(self) -> None:
        """End the worker processes and give the process group of the planning back (on all ranks)."""
        self._odb.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        """After an error the other ranks are told why this one leaves."""
        if error is not None:
            self._odb.loader.abort(one_line(error))
        self.close()


class ODBDataLoader(_Online, DataLoader):
    """A DataLoader that forms its batches online, under budgets; yields what `collate_fn` returns.

    dataset: map-style or iterable; an item is a mapping with `input_ids` (list, array or tensor of shape [length]
    or [1, length]), `labels`, and what else the model takes. Patches are read from `odb_n_patches`, or counted from
    `image_grid_thw`, `pixel_values` and their video twins; `cost_fn` (item -> `Cost` or tokens) may say it instead.
    token_budget, max_patches, loss_scaling, join, buffer_size and every other key of `ODBConfig`: see there.
    shuffle, sampler: an order over the *whole* dataset, the same on every rank; each rank takes its own share, without
    padding. `generator`: its seed is that of the order.
    gradient_accumulation_steps: micro-batches of an optimizer step; an epoch has a multiple of them.
    audit_dir: write `odb_audit_rank{r}.jsonl` there. collation: what `collate_fn` adds to a group (default: its
    `pad_to_multiple_of`).

    With torch.distributed initialised, make it on all ranks at the same place of the program: they agree over a gloo
    group of their own. Every batch is a mapping with one key more than the collator's; take it out with
    `pop_step_info(batch)` before `model(**batch)`. Use it as a context manager, or call `close()`.
    Raises `ConfigError` for a bad value.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        collate_fn: Callable | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = True,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable | None = None,
        generator: Any = None,
        audit_dir: str | Path | None = None,
        gradient_accumulation_steps: int = 1,
        cost_fn: Callable | None = None,
        collation: Collation | None = None,
        config: ODBConfig | None = None,
        **block: Any,
    ):
        if batch_size != 1:
            raise ConfigError(f"batch_size: {batch_size!r} has no meaning here; leave it at 1 and choose token_budget.")
        if collate_fn is None:
            raise ConfigError("collate_fn: missing; samples of one batch have different lengths, so it must pad them.")
        super().__init__(
            dataset,
            shuffle=shuffle,
            sampler=sampler,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers and num_workers > 0,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=worker_init_fn,
            generator=generator,
        )
        self._odb = Iteration(
            self,
            make_config(config, block),
            gradient_accumulation_steps,
            cost_fn=cost_fn,
            collation=collation,
            audit_dir=audit_dir,
        )

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands, behind the last optimizer step whose batches were all yielded (JSON types).

        On the contract of torchdata's loaders; micro-batches of an unfinished optimizer step come again.
        """
        return self._odb.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on from this rank's state, or with other ranks or settings than before from a list of all ranks' states.

        Before the first batch; its epoch is the next to be iterated. Raises `DataError` where the data are not those
        of the state.
        """
        self._odb.load(state)


class ODBHandle:
    """What `apply` has done to a DataLoader; `remove()` undoes it."""

    def __init__(self, dataloader: DataLoader, stock: type):
        self.dataloader, self._stock = dataloader, stock

    def set_epoch(self, epoch: int) -> None:
        """See `ODBDataLoader.set_epoch`."""
        self.dataloader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """See `ODBDataLoader.state_dict`."""
        return self.dataloader._odb.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """See `ODBDataLoader.load_state_dict`."""
        self.dataloader._odb.load(state)

    def __enter__(self) -> ODBHandle:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        """After an error the other ranks are told why this one leaves."""
        self.dataloader.__exit__(kind, error, trace)
        self.remove()

    def remove(self) -> None:
        """End the worker processes and let the DataLoader form its batches as before (on all ranks)."""
        self.dataloader.close()
        self.dataloader.__class__ = self._stock
        del self.dataloader.__dict__["_odb"]


def apply(
    dataloader: Any,
    *,
    gradient_accumulation_steps: int = 1,
    cost_fn: Callable | None = None,
    collation: Collation | None = None,
    audit_dir: str | Path | None = None,
    config: ODBConfig | None = None,
    **block: Any,
) -> ODBHandle:
    """Let a DataLoader that a framework has built form its batches online: in place, this one object only.

    dataloader: torch's, or one that accelerate has prepared. Its dataset, order, collator and workers are kept, its
    batch size is not. (`accelerator.backward` divides by accelerate's own gradient_accumulation_steps: with more than 1
    multiply the loss by it.) The other arguments are those of `ODBDataLoader`.
    Raises `ConfigError` where its order cannot be told, or if it was applied before.
    """
    loader = innermost(dataloader)
    if hasattr(loader, "_odb"):
        raise ConfigError("apply: this DataLoader forms its batches online already; call it once.")
    iteration = Iteration(
        loader,
        make_config(config, block),
        gradient_accumulation_steps,
        cost_fn=cost_fn,
        collation=collation,
        audit_dir=audit_dir,
        is_fetched_ahead=loader is not dataloader,  # accelerate asks for a batch before it hands over the last
    )
    stock = type(loader)
    # Not `_Online` as a second base: Python lets an object change its class only to one of the same layout.
    online = {name: value for name, value in vars(_Online).items() if name not in ("__dict__", "__weakref__")}
    loader.__class__ = type(stock.__name__, (stock,), online | {"__module__": stock.__module__})
    loader._odb = iteration
    return ODBHandle(loader, stock)
