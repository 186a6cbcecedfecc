"""What a run needs to hear of LLaMA-Factory's Trainer: to undo what was changed on it, and to tell its users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llamafactory.train.callbacks import LogCallback
from transformers import TrainerCallback

from odb_factory.llamafactory.dataset import INVALID_ROW
from odb_factory.log import get_logger

logger = get_logger(__name__)


class Prepared(TrainerCallback):
    """What a stage has changed on the trainer, until the training ends."""

    def __init__(self, undo: Callable[[], None]):
        self.undo = undo

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.undo()


class BeginLog(TrainerCallback):
    """Comes before LLaMA-Factory's log callback, and lets it delete the log of the run before when the first optimizer
    step is done or the first entry is written: by then nothing of this training is refused any more."""

    def __init__(self, begin: Callable[[], None]):
        self._begin: Callable[[], None] | None = begin

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin()

    on_log = on_train_end = on_step_end


class MirrorMaxSteps(TrainerCallback):
    """LLaMA-Factory's log callback reads the number of steps once; keep its copy up to date."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, LogCallback):
                callback.max_steps = state.max_steps


class TellDropped(TrainerCallback):
    """Say once where LLaMA-Factory's own preprocessing drops rows, whose number nobody knows without a pass."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.has_told = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        count = self.trainer.odb_run.loader.rejected[INVALID_ROW]
        if count and not self.has_told:
            self.has_told = True
            logger.info(
                "rows are left out (%d by optimizer step %d) that LLaMA-Factory's preprocessing drops; stock does so "
                "before it shuffles and cuts, so its optimizer steps are others (without shuffling: from here on); set "
                "tokenized_path, or remove such rows, to have exactly its steps",
                count,
                state.global_step,
            )
