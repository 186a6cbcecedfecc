"""Lightning: a train dataloader that yields whole optimizer steps, and a callback that runs their micro-batches.

Lightning counts batches; optimizer steps, prefetching and checkpoints follow this count. So a Lightning batch is one
optimizer step, and `accumulate_grad_batches` stays 1: `global_step`, schedules, gradient clipping, validation intervals
and checkpoints need no change. The module's `training_step` still gets one micro-batch per call. Needs
`pip install lightning`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from odb_factory.accounting import in_float32
from odb_factory.errors import ConfigError
from odb_factory.loader import ODBDataLoader, ODBStepInfo, pop_step_info
from odb_factory.model.flat_row import begin_row


class OptimizerStep:
    """The micro-batches of one optimizer step on this rank, each with its step info, on the CPU.

    Lightning must not treat this object as a container: each micro-batch moves to the device just before it runs.
    """

    def __init__(self, micro_batches: list[tuple[Any, ODBStepInfo]], state: dict[str, Any]):
        self.micro_batches = micro_batches
        self._state = state

    @property
    def samples(self) -> int:
        """Number of samples of the optimizer step on all ranks."""
        return self.micro_batches[0][1].optimizer_step_samples

    def _not_a_batch(self, *_: object) -> Any:
        raise ConfigError(
            "the batch is a whole optimizer step of odb: give the Trainer the callback OnlineBatching, which calls "
            "training_step for each of its micro-batches, and give other dataloaders to validation and tests."
        )

    keys = __getitem__ = _not_a_batch


class OptimizerSteps:
    """A train dataloader for Lightning: the optimizer steps of an `ODBDataLoader` (or of the loader from `apply_odb`).

    The dataloader has no length: Lightning's batches are optimizer steps, and `loader.num_optimizer_steps` is their
    number per epoch if known. Lightning saves the dataloader's state in every checkpoint and resumes from it, also with
    another number of ranks. Requires the callback `OnlineBatching`.

    Example::

        with ODBDataLoader(dataset, batch_size=32, token_budget=8192, ...) as loader:
            trainer = Trainer(max_epochs=1, callbacks=[OnlineBatching()])
            trainer.fit(module, OptimizerSteps(loader))
    """

    def __init__(self, loader: ODBDataLoader[Any]):
        self._loader = loader
        self._state: dict[str, Any] | None = None
        self._is_unused = False

    def __iter__(self) -> Iterator[OptimizerStep]:
        if self._state is None:
            self._state = self._loader.state_dict()
        elif self._is_unused:
            # Lightning dropped the previous iterator after a fetch, for example when it reloads dataloaders.
            self._loader.load_state_dict(self._state)
        self._is_unused = True
        micro_batches = []
        for batch in self._loader:
            info = pop_step_info(batch)
            micro_batches.append((batch, info))
            if info.ends_optimizer_step:
                yield OptimizerStep(micro_batches, self._loader.state_dict())
                micro_batches = []

    def trained_on(self, step: OptimizerStep) -> None:
        """Record the state after this step: Lightning prefetches, so the loader itself is one step ahead."""
        self._state, self._is_unused = step._state, False

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the last trained optimizer step; equal on all ranks."""
        return self._loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from this state. Raises `DataError` if the dataset does not match the state."""
        self._loader.load_state_dict(state)
        self._state = None


class OnlineBatching(Callback):
    """Runs the micro-batches of each optimizer step through the module's own `training_step`.

    `training_step` gets one micro-batch (a mapping on the device) and returns the mean loss over its supervised tokens
    (or a dict with `loss`). The callback weights the micro-batches and synchronizes gradients once per optimizer step.
    Supports automatic optimization on one device or with DDP. Logs `odb/loss`, the loss of the optimizer step over all
    ranks; values that `training_step` logs itself come from the last micro-batch.
    Raises `ConfigError` for incompatible trainer settings.
    """

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._module: LightningModule | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        _check(trainer, pl_module)
        self._trainer, self._module = trainer, pl_module
        self._step_of_module: Callable[..., Any] = pl_module.training_step
        self._zero_grad: Callable[..., None] = pl_module.optimizer_zero_grad
        # Same rule as in Lightning: a second argument is the batch index, whatever its name.
        self._takes_batch_idx = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)
        # Patches this object only; `teardown` restores it.
        vars(pl_module).update(training_step=self._training_step, optimizer_zero_grad=_leave_gradients)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(trainer.train_dataloader, OptimizerSteps):
            raise ConfigError(
                f"train_dataloaders: a {type(trainer.train_dataloader).__name__} does not yield optimizer steps, which "
                "the callback OnlineBatching runs; give OptimizerSteps(loader), or leave the callback out."
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: OptimizerStep, batch_idx: int
    ) -> None:
        """Update the dataloader's state before Lightning calls its checkpoint callbacks, which come last."""
        begin_row(())
        loader: Any = trainer.train_dataloader
        loader.trained_on(batch)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._module is not None:
            del self._module.training_step, self._module.optimizer_zero_grad
            self._trainer = self._module = None

    def _training_step(self, batch: OptimizerStep, batch_idx: int) -> Any:
        """Run all forward and backward passes except the last backward: Lightning runs it, and DDP syncs there."""
        trainer, module = self._trainer, self._module
        assert trainer is not None and module is not None
        _check_accumulation(trainer)  # a callback may have changed the setting
        (optimizer,) = trainer.optimizers
        self._zero_grad(trainer.current_epoch, batch_idx, optimizer)
        total = torch.zeros((), device=module.device)
        last = len(batch.micro_batches) - 1
        for number, (micro_batch, info) in enumerate(batch.micro_batches):
            begin_row(info.segments)  # `pop_step_info` has already run for this step and the next
            output = self._forward(micro_batch, batch_idx)
            loss = in_float32(output["loss"] if isinstance(output, dict) else output) * info.loss_scale
            total += loss.detach()
            if number < last:
                # This code runs inside Lightning's forward: autocast is on, and DDP does not sync gradients yet.
                with torch.autocast(module.device.type, enabled=False):
                    trainer.strategy.backward(loss, optimizer)
        module.log("odb/loss", total, on_step=True, on_epoch=False, sync_dist=True, batch_size=batch.samples)
        return output | {"loss": loss} if isinstance(output, dict) else loss

    def _forward(self, micro_batch: Any, batch_idx: int) -> Any:
        assert self._trainer is not None
        moved = self._trainer.strategy.batch_to_device(self._trainer.precision_plugin.convert_input(micro_batch))
        output = self._step_of_module(moved, batch_idx) if self._takes_batch_idx else self._step_of_module(moved)
        if output is None:
            raise ConfigError(
                "training_step returned None for a micro-batch, and every one of an optimizer step is needed for its "
                "gradient; return its loss."
            )
        return output


def _leave_gradients(epoch: int, batch_idx: int, optimizer: Any) -> None:
    """Do nothing: Lightning calls this before the last backward and would clear the other micro-batches' gradients."""


def _check_accumulation(trainer: Trainer) -> None:
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"accumulate_grad_batches: {trainer.accumulate_grad_batches} would put that many optimizer steps of odb "
            "into one; leave it out of the Trainer (and GradientAccumulationScheduler out of its callbacks), and give "
            "it to ODBDataLoader as gradient_accumulation_steps."
        )


def _check(trainer: Trainer, module: LightningModule) -> None:
    _check_accumulation(trainer)
    if not module.automatic_optimization:
        raise ConfigError(
            "automatic_optimization: False leaves backward and optimizer to the module; set it to True, or leave the "
            "callback OnlineBatching out and run `batch.micro_batches` in training_step."
        )
    strategy = trainer.strategy
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy) or strategy.handles_gradient_accumulation:
        raise ConfigError(
            f"strategy: {type(strategy).__name__} does not let several micro-batches run in one batch of "
            "Lightning; use one device or 'ddp' (the transformers Trainer with enable_odb does ZeRO and FSDP)."
        )
