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


class ODBCallback(TrainerCallback, ExportableState):
    """Runs before the other callbacks. The Trainer's loop is sized by an upper bound; this one ends it in time."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def state(self) -> dict[str, Any]:
        """Stands in `trainer_state.json`: a checkpoint at this optimizer step was written with odb."""
        return {"args": {}, "attributes": {"optimizer_steps": self.trainer.odb_run.optimizer_steps}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self.trainer.odb_run
        handler = self.trainer.callback_handler
        handler.train_dataloader = handler.train_dataloader.stock  # ordinary batches, for callbacks that look at them
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
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

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        checkpoint.save(
            self.trainer.odb_run,
            Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}",
            barrier=self.trainer.accelerator.wait_for_everyone,
            marks=args.local_process_index == 0,
        )

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
