"""`unpad`: let the model of a loop of one's own compute flat micro-batches (I10)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from odb_factory.comm.gloo import gather_once
from odb_factory.errors import ConfigError
from odb_factory.log import get_logger
from odb_factory.model.flat_row import FlatRow, flat_row, row_in_progress
from odb_factory.training.checks import unwrapped
from odb_factory.training.layout_check import LayoutCheck
from odb_factory.training.layout_choice import not_right, resolve_layout

logger = get_logger(__name__)


def unpad(model: nn.Module, dataloader: Any) -> Callable[[], None]:
    """Let a model of transformers compute flat micro-batches, and check it on a few rows; before the first batch.

    Its attention and its recurrent layers then keep samples apart by the lengths in the step info that was taken out
    last: call `pop_step_info(batch)` right before the forward of that batch. Whatever else the model is given is
    computed as before: in eval mode, with an `attention_mask`, of several rows. Its cache of keys and values is
    switched off, for beside it transformers does not look for samples in a row.

    model: as the loop calls it, wrapped or not, where it will be trained. dataloader: an `ODBDataLoader` (or what
    `apply_odb` has changed) with `layout="flat"`, not yet iterated. It begins the epoch. With several ranks, all call
    it. Returns a function that puts the model back as it was. A model may be set up for several dataloaders.
    Raises `ConfigError` on all ranks where the losses of tokens depend on what shares their row.

    Example::

        with ODBDataLoader(dataset, token_budget=8192, layout="flat", collate_fn=collate) as loader:
            unpad(model, loader)
            for batch in loader:
                info = pop_step_info(batch)
                (model(**batch).loss * info.loss_scale).backward()
    """
    iteration = getattr(dataloader, "_odb", None)
    if iteration is None or iteration.config.layout != "flat":
        raise ConfigError("unpad: give the ODBDataLoader that the loop iterates, made with layout='flat'.")
    if not iteration.loader.has_rows:
        raise ConfigError(
            "unpad: the rows of a stream cannot be read by their number; try the model with a dataset of a few such "
            "rows first, and let its `unpad` stand."
        )
    loop = _Loop(model, iteration.config.exchange_timeout_s)
    is_first = loop.model not in _undone_by
    if is_first:
        layout = resolve_layout(loop, iteration.config)
        door = _Door(loop.model)

        def undo() -> None:
            del _undone_by[loop.model]
            door.leave()
            layout.undo()

        _undone_by[loop.model] = undo
        logger.info("layout: %s (%s)", layout.name, layout.reason)
    iteration.loader.begin()
    why = LayoutCheck(iteration.loader).of_rows(loop)
    if why is not None:
        if is_first:
            _undone_by[loop.model]()
        raise not_right(why)
    iteration.is_checked = True
    return _undone_by[loop.model]


_undone_by: WeakKeyDictionary[nn.Module, Callable[[], None]] = WeakKeyDictionary()
"""Of each model that is set up, what puts it back."""


class _Loop:
    """What the choice of a layout and its check ask of a trainer."""

    def __init__(self, model: nn.Module, timeout_s: float):
        self.model_wrapped, self.model = model, unwrapped(model)
        self.args = SimpleNamespace(device=next(model.parameters()).device, bf16=False, fp16=False)
        self._timeout_s = timeout_s

    def _odb_gather(self, message: bytes) -> list[bytes]:
        return gather_once(message, self._timeout_s)

    def _prepare_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        device = self.args.device
        return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _Door:
    """The forward of a model whose loop says by `pop_step_info` which row it computes."""

    def __init__(self, model: nn.Module):
        self._model, self._before = model, vars(model).get("forward")
        self._added = model.forward = functools.partial(self._forward, model.forward)
        self._computed: int | None = None
        """The number of the last row that the model has computed."""

    def leave(self) -> None:
        if vars(self._model).get("forward") is not self._added:
            return  # somebody has wrapped it since; where no row is in progress it has no effect
        del self._model.forward
        if self._before is not None:
            self._model.forward = self._before

    def _forward(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        row, positions = row_in_progress(), kwargs.get("position_ids")
        if _is_flat(positions) and kwargs.get("attention_mask") is None:
            if row is not None and self._is_of(positions, row):
                return own(*args, **kwargs)
            if self._model.training:
                in_progress = "of no flat row" if row is None else f"of another row, of {row.tokens}"
                raise ConfigError(
                    f"unpad: {type(self._model).__name__} is given a row of {positions.shape[-1]} tokens, and the step "
                    f"info taken out last is {in_progress}; call pop_step_info(batch) right before its forward."
                )
        with flat_row(()):
            return own(*args, **kwargs)

    def _is_of(self, positions: Tensor, row: FlatRow) -> bool:
        """Whether these are the positions of the row in progress. They are looked at, for which the host waits for the
        device, only in evaluations and where infos of several batches were taken out since the last forward."""
        if positions.shape[-1] != row.tokens:
            return False
        is_next = self._computed is not None and row.number <= self._computed + 1
        if not (self._model.training and is_next) and not torch.equal(
            positions.flatten(0, -2)[0].cpu(), row.positions()
        ):
            return False
        self._computed = row.number
        return True


def _is_flat(positions: Any) -> TypeGuard[Tensor]:
    return isinstance(positions, Tensor) and positions.dim() > 1 and positions.shape[-2] == 1
