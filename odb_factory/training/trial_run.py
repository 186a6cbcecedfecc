"""Forward and backward of the wrapped model on micro-batches that are made up, to see how much memory they need."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from odb_factory.data.collate import NotCollated
from odb_factory.data.loader import ODBLoader
from odb_factory.data.samples import Measured, Sample
from odb_factory.errors import ConfigError, DataError, one_line
from odb_factory.memory.meters import PeakMeter
from odb_factory.memory.states import update_bytes
from odb_factory.model.flat_row import flat_row


class TrialRuns:
    """Micro-batches of samples of `loader`, on all ranks alike: each runs the same, and hears of the others' peaks.

    While it is there the state that the optimizer will have takes its place in memory.
    """

    def __init__(self, trainer: Any, loader: ODBLoader, meter: PeakMeter):
        self._trainer, self._loader, self._meter = trainer, loader, meter
        size = state_bytes(trainer)
        try:
            self._state = torch.empty(size, dtype=torch.uint8, device=trainer.args.device)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"odb.token_budget: 'auto' found no room for the {size / 2**30:.1f} GiB of state that the optimizer "
                "will have; train fewer weights (LoRA), or share them out (ZeRO, FSDP)."
            ) from None
        self.count = 0

    def limits(self, fraction: float) -> tuple[int, ...]:
        """Bytes that each rank may use."""
        return tuple(self._of_all_ranks(self._meter.limit(fraction)))

    def peaks(self, samples: Sequence[Sample]) -> tuple[Measured, tuple[int | None, ...]]:
        """What the samples are as collated, and the peak of each rank in bytes; None where it ran out of memory.

        Raises `DataError` where they cannot be collated, and `ConfigError` where ranks cannot go on after an error.
        """
        self.count += 1
        try:
            measured, batch = self._loader.groups.collate(list(samples))
        except NotCollated as error:
            raise DataError(f"rows cannot be tried for a budget: {error}") from None
        peaks = self._of_all_ranks(self._meter.peak(lambda: self._run(batch, measured), self._held()))
        if None in peaks and (self._trainer.is_deepspeed_enabled or self._trainer.is_fsdp_enabled):
            raise ConfigError(
                f"odb.token_budget: 'auto' ran out of memory at {measured.rows * measured.length} tokens and "
                f"{measured.patches} patches, and where weights or gradients are shared out among ranks no rank can go "
                f"on after that; set `token_budget: {max(measured.rows * measured.length // 2, 1)}`, and max_patches."
            )
        return measured, tuple(peaks)

    def _run(self, batch: Any, measured: Measured) -> None:
        """As a micro-batch is computed that does not end its optimizer step; its gradients are zeros."""
        trainer = self._trainer
        trainer.odb_trial_units = max(measured.units, 1)
        try:
            with (
                flat_row(measured.segments),
                trainer._odb_gradients_summed(trainer.model_wrapped, is_last=False),
            ):
                trainer.training_step(trainer.model_wrapped, dict(batch))
        finally:
            trainer.odb_trial_units = None

    def _held(self) -> Iterator[Tensor]:
        yield self._state
        for parameter in self._trainer.model_wrapped.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self._trainer.model_wrapped.buffers()

    def _of_all_ranks(self, mine: int | None) -> list[Any]:
        return [json.loads(answer) for answer in self._trainer._odb_gather(json.dumps(mine).encode())]


def state_bytes(trainer: Any) -> int:
    """What the optimizer of a training that has not begun will keep on this rank, beyond what it has."""
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, DeepSpeed's
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        return 0  # one of DeepSpeed's, which has made its state when it was made
    weights = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    new = [_local(one) for one in weights if not optimizer.state.get(one)]
    try:
        return sum(
            update_bytes(type(optimizer), optimizer.defaults, dtype, device).of(group)
            for (dtype, device), group in _by_kind(new).items()
        )
    except Exception as error:
        raise ConfigError(
            f"odb.token_budget: 'auto' cannot tell how much memory {type(optimizer).__name__} will need "
            f"({one_line(error)}); set a number."
        ) from error


def _by_kind(weights: Sequence[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for one in weights:
        groups.setdefault((one.dtype, one.device), []).append(one)
    return groups


def _local(weight: Tensor) -> Tensor:
    """The part of a sharded weight that is on this rank."""
    to_local = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()
