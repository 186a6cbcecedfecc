"""`check_flat`: make sure that the model of a loop of one's own keeps apart the samples of a flat row (I10)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from odb_factory.comm.gloo import gather_once
from odb_factory.errors import ConfigError
from odb_factory.model import mixers
from odb_factory.model.check import check
from odb_factory.training.checks import unwrapped
from odb_factory.training.layout_check import LayoutCheck
from odb_factory.training.layout_choice import not_right, without_cache
from odb_factory.training.layout_rules import why_not_flat


def check_flat(model: nn.Module, dataloader: Any) -> None:
    """Check a model of transformers, before the first batch, on a few rows: flat, padded and each alone.

    model: as the loop calls it, wrapped or not, where it will be trained. Its cache of keys and values is switched off
    for good (`config.use_cache`): beside it transformers does not look for samples in a row.
    dataloader: an `ODBDataLoader` (or what `apply_odb` has changed) with `layout="flat"`, not yet iterated. It begins
    the epoch. With several ranks, all call it.
    Raises `ConfigError` on all ranks where the losses of tokens depend on what shares their row.

    Example::

        with ODBDataLoader(dataset, token_budget=8192, layout="flat", collate_fn=collate) as loader:
            check_flat(model, loader)
            for batch in loader: ...
    """
    iteration = getattr(dataloader, "_odb", None)
    if iteration is None or iteration.config.layout != "flat":
        raise ConfigError("check_flat: give the ODBDataLoader that the loop iterates, made with layout='flat'.")
    loop = _Loop(model, iteration.config.exchange_timeout_s)
    why = why_not_flat(loop)
    if why is None and (found := mixers.describe(loop.model)):
        why = f"{found} carry one sample into the next, which only a Trainer prevents"
    if why is None:
        why = check(loop.model, installs=False).why_wrong
    if why is not None:
        raise not_right(why)
    without_cache(loop.model)
    loader = iteration.loader
    if not loader.has_rows:
        raise ConfigError(
            "check_flat: the rows of a stream cannot be read by their number; check the model with a dataset of a few "
            "such rows."
        )
    loader.begin()
    why = LayoutCheck(loader).of_rows(loop)
    if why is not None:
        raise not_right(why)
    iteration.is_checked = True


class _Loop:
    """What the check asks of a trainer."""

    def __init__(self, model: nn.Module, timeout_s: float):
        self.model_wrapped, self.model = model, unwrapped(model)
        self.args = SimpleNamespace(device=next(model.parameters()).device)
        self._timeout_s = timeout_s

    def _odb_gather(self, message: bytes) -> list[bytes]:
        return gather_once(message, self._timeout_s)

    def _prepare_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        device = self.args.device
        return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
