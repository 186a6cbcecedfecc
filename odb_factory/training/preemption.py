"""transformers' `enable_jit_checkpoint`: after SIGTERM all ranks save the same optimizer step, and the training ends.

Stock saves at the event that comes next in each process. A signal reaches the processes at different moments, or one
node only, so ranks would save different steps and wait for each other. Here a signal is a wish that each rank tells the
others at the end of an optimizer step. There the Trainer saves as always, with the weights of `global_step` under every
engine (DeepSpeed updates them before `on_pre_optimizer_step`, where stock saves).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

from odb_factory.comm.agreement import name_ranks
from odb_factory.comm.exchange import Exchange
from odb_factory.log import get_logger

logger = get_logger(__name__)


class Preemption(TrainerCallback):
    """What SIGTERM asks of one `train()`; does nothing without `enable_jit_checkpoint`. It comes after callbacks that
    want to evaluate.

    exchange: of all processes of the training.
    """

    def __init__(self, trainer: Any, exchange: Exchange):
        self._trainer, self._exchange = trainer, exchange
        callbacks = trainer.callback_handler.callbacks
        self._stock: Any = next((one for one in callbacks if getattr(one, "jit_manager", None) is not None), None)
        self._manager: Any = getattr(self._stock, "jit_manager", None)
        self._is_over = False

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it stock's callback notes signals and acts on none."""
        if self._manager is None:
            yield
            return
        self._stock.jit_manager = None
        try:
            yield
        finally:
            self._stock.jit_manager = self._manager
            self._stock.on_train_end(self._trainer.args, self._trainer.state, self._trainer.control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Collective."""
        if self._manager is None:
            return
        is_asked = bool(self._manager.is_checkpoint_requested)
        answers = self._exchange.gather(b"1" if is_asked else b"0", f"the end of optimizer step {state.global_step}")
        asking = [rank for rank, answer in enumerate(answers) if answer == b"1"]
        if asking:
            self._is_over = control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # whoever sends SIGTERM does not wait for long
            logger.warning(
                "SIGTERM on %s: all ranks save optimizer step %d, and the training ends",
                name_ranks(asking),
                state.global_step,
            )

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_over:
            control.should_evaluate = control.should_save = False
