"""Keep the Trainer's own figures right: step count, epoch, end of epoch, progress bar."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from odb_factory.log import get_logger
from odb_factory.training import checkpoint

logger = get_logger(__name__)


class CheckpointMark(TrainerCallback, ExportableState):
    """Stands in `trainer_state.json`: a checkpoint at this optimizer step was written with odb.

    It knows no trainer, so that the Trainer can make it anew (`restore_callback_states_from_checkpoint`).
    """

    def __init__(self, optimizer_steps: int = 0):
        self.optimizer_steps = optimizer_steps

    def state(self) -> dict[str, Any]:
        return {"args": {"optimizer_steps": self.optimizer_steps}, "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._mark(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._mark(state)

    def _mark(self, state: Any) -> None:
        self.optimizer_steps = state.global_step
        state.stateful_callbacks[type(self).__name__] = self.state()


class ODBCallback(TrainerCallback):
    """Runs before the other callbacks. The Trainer's loop is sized by an upper bound; this one ends it in time."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self._begun: Path | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self.trainer.odb_run
        handler = self.trainer.callback_handler
        handler.train_dataloader = handler.train_dataloader.stock  # ordinary batches, for callbacks that look at them
        if run.finished:
            logger.info("nothing is left to train: the checkpoint has all %s optimizer steps", run.optimizer_steps)
            return
        epoch_steps = run.loader.start() / run.accumulation
        state.max_steps = run.estimated_optimizer_steps()
        state.num_train_epochs = math.ceil(run.target_epochs or run.max_steps / epoch_steps)
        state.compute_steps(args, state.max_steps)
        samples = (
            "a stream of unknown length"
            if run.loader.num_samples is None
            else (f"{run.loader.num_samples} samples in about {round(epoch_steps)} optimizer steps an epoch")
        )
        logger.info(
            "%s (figures of the Trainer above are bounds): "
            "token_budget %d, max_patches %s, buffer_size %d, loss_scaling %s",
            samples,
            run.config.token_budget,
            run.config.max_patches,
            run.config.buffer_size,
            run.config.loss_scaling,
        )

    def begin_save(self, output_dir: str | None) -> None:
        """The Trainer begins to save to this folder; does nothing if that is no checkpoint (an export of the model)."""
        folder = Path(output_dir or "")
        if folder.name == f"{PREFIX_CHECKPOINT_DIR}-{self.trainer.state.global_step}":
            self._begun = folder
            checkpoint.begin_save(self.trainer.odb_run, folder, **self._ranks)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if self._begun is None or self._begun.name != folder.name:  # saved in another way than by `save_model`
            checkpoint.write_state(self.trainer.odb_run, folder)
        else:
            folder = self._begun  # in the folder of a trial, in a hyper-parameter search
        checkpoint.end_save(self.trainer.odb_run, folder, **self._ranks)
        self._begun = None

    @property
    def _ranks(self) -> dict[str, Any]:
        marks = self.trainer.args.local_process_index == 0
        return {"barrier": self.trainer.accelerator.wait_for_everyone, "marks": marks}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self.trainer.odb_run
        state.epoch = run.epoch
        run.end_optimizer_step()
        state.max_steps = run.expected_optimizer_steps()
        control.should_epoch_stop = control.should_epoch_stop or run.epoch_ended
        for callback in self.trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.total = state.max_steps
