"""The callback of a run: the Trainer's figures where it cannot know them, and the first lines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from odb_factory.accounting.expectation import say_what_to_expect
from odb_factory.data.resume.checked_file import remove_unfinished
from odb_factory.errors import ConfigError
from odb_factory.log import get_logger
from odb_factory.training.run_arguments import RunArguments

logger = get_logger(__name__)


class ODBCallback(TrainerCallback):
    """Runs before the other callbacks."""

    def __init__(self, trainer: Any, arguments: RunArguments):
        self.trainer, self.arguments = trainer, arguments

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self.trainer.odb_run
        if args.local_process_index == 0:
            for folder in Path(args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
                remove_unfinished(folder)
        handler = self.trainer.callback_handler
        handler.train_dataloader = handler.train_dataloader.stock  # ordinary batches, for callbacks that look at them
        self.arguments.show()  # until `HideArguments`: trackers of experiments read them now
        if run.finished:
            logger.info("nothing is left to train: the checkpoint has all %s optimizer steps", run.optimizer_steps)
            return
        if run.fill is not None:
            state.max_steps = run.fill.estimated_steps()
            an_epoch = run.loader.estimate_optimizer_steps()
            state.num_train_epochs = math.ceil(run.length.epochs or run.length.max_steps / max(an_epoch, 1))
            state.compute_steps(args, state.max_steps)
        elif run.taken_anew and run.total_steps is not None:
            state.max_steps = run.total_steps
            state.compute_steps(args, state.max_steps)
        if not self.trainer.odb_start.lacks_budgets:
            say_what_to_expect(run.loader, run.config, run.loader.first_planned)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.odb_saver.begin_hashing()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self.trainer.odb_run
        self.trainer.odb_saver.step_ends()
        if run.optimizer_steps != state.global_step:
            raise ConfigError(
                "training_step: an override of it does not come to the one of odb, so the loss would not be weighed; "
                "let it call super(), or train without odb."
            )
        state.epoch = run.epoch
        if run.fill is None:
            return
        # The Trainer's loop is sized by a bound; this ends it in time.
        state.max_steps = run.fill.expected_steps(run.epoch, run.optimizer_steps)
        control.should_epoch_stop = control.should_epoch_stop or run.step.last
        for callback in self.trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None:
                bar.total = state.max_steps
