"""`apply_odb`: let a DataLoader that somebody else has built form its batches online."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import torch.distributed as dist
from torch.utils.data import DataLoader

from odb_factory.config import ODBConfig
from odb_factory.data.components import unwrap
from odb_factory.data.items import check_dataset
from odb_factory.errors import ConfigError
from odb_factory.loop.accelerated import FixedBatchesRefused
from odb_factory.loop.iteration import Iteration
from odb_factory.loop.online import Controls, Online, State, check_sampler, loop_config
from odb_factory.planning import Collation, Cost

if TYPE_CHECKING:
    from odb_factory.loop.keys import LoopKeys


class ODBHandle(Controls[Any], State):
    """What `apply_odb` has done to a DataLoader; iterates it, and `remove()` undoes it.

    Example::

        with apply_odb(dataloader, token_budget=8192) as loader:
            for batch in loader:
                info = pop_step_info(batch)
    """

    def __init__(self, dataloader: Any, loader: DataLoader[Any], stock: type[DataLoader[Any]], odb: Iteration):
        self.dataloader, self._loader, self._stock, self._odb = dataloader, loader, stock, odb
        self._collate_fn = loader.collate_fn

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.dataloader).__name__}, {self._odb})"

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataloader)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error the other ranks are told why this one leaves."""
        super().__exit__(kind, error, trace)
        self.remove()

    def remove(self) -> None:
        """End the worker processes and let the DataLoader form its batches as before (on all ranks)."""
        self.close()
        if self._loader.__dict__.pop("_odb", None) is not None:
            self._loader.__class__ = self._stock
            self._loader.collate_fn = self._collate_fn


def apply_odb(
    dataloader: Any,
    *,
    gradient_accumulation_steps: int = 1,
    cost_fn: Callable[[Any], Cost | int] | None = None,
    collation: Collation | None = None,
    audit_dir: str | Path | None = None,
    process_group: dist.ProcessGroup | None = None,
    already_split: bool = False,
    config: ODBConfig | None = None,
    **block: Unpack[LoopKeys],
) -> ODBHandle:
    """Let a DataLoader that a framework has built form its batches online: in place, this one object only.

    dataloader: torch's, or one that accelerate has prepared (leave accelerate's own gradient_accumulation_steps at 1).
    Its dataset, order, collator and workers are kept, and so is the number of samples in an optimizer step: its batch
    size x gradient_accumulation_steps x ranks. The other arguments are those of `ODBDataLoader`.
    Raises `ConfigError` where its order cannot be told, or if it was applied before.

    Example::

        handle = apply_odb(dataloader, token_budget=8192)  # dataloader now forms its batches online
        handle.remove()
    """
    loader = unwrap(dataloader)
    if hasattr(loader, "_odb"):
        raise ConfigError("apply_odb: this DataLoader forms its batches online already; call it once.")
    if getattr(dataloader, "use_stateful_dataloader", False):
        raise ConfigError(
            "use_stateful_dataloader: True would keep the state of fixed batches; leave it out of accelerate's "
            "DataLoaderConfiguration, and use state_dict() or checkpoint_with(accelerator) of what apply_odb returns."
        )
    config = loop_config(config, block)
    check_sampler(loader.sampler)
    check_dataset(loader.dataset, loader.sampler)
    iteration = Iteration(
        loader,
        config,
        gradient_accumulation_steps,
        cost_fn=cost_fn,
        collation=collation,
        audit_dir=audit_dir,
        process_group=process_group,
        already_split=already_split,
        is_fetched_ahead=loader is not dataloader,  # accelerate asks for a batch before it hands over the last
    )
    stock = type(loader)
    loader.__class__ = type(stock.__name__, (Online, stock), {"__module__": stock.__module__})
    loader._odb = iteration
    handle = ODBHandle(dataloader, loader, stock, iteration)
    loader.collate_fn = FixedBatchesRefused()
    return handle
