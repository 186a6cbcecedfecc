"""Every save of the Trainer, whoever asks for it and at whatever moment, becomes a checkpoint that can be resumed.

`Trainer._save_checkpoint` writes weights and the number of optimizer steps that are done (`state.global_step`). What a
run knows of the data is ahead of that number from the last backward of an optimizer step to its end. So a run is noted
down at the begin of each optimizer step, with the state of its random numbers, and a save in the middle of a step
writes what was noted.

The order in which a checkpoint is written: the states of all ranks, the Trainer's files, of which `trainer_state.json`
is the last (then the Trainer deletes older checkpoints), our marker. So a checkpoint that was cut off after the
Trainer's last file is complete but for the marker, also where it is the only one (`save_total_limit: 1`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from odb_factory.comm.exchange import Exchange
from odb_factory.log import get_logger
from odb_factory.training.checkpoint_hashes import HASHES, Hashing, hash_file
from odb_factory.training.state_files import (
    MARKER,
    RANK_FILE,
    TRAINER_STATE,
    by_rank,
    write_marker,
    write_rank_state,
)
from odb_factory.training.untouched import random_states, set_random_states

if TYPE_CHECKING:
    from odb_factory.data.resume.state import DataState

logger = get_logger(__name__)


class CheckpointMark(TrainerCallback, ExportableState):
    """An entry of `trainer_state.json`: the checkpoint of this optimizer step was written with odb.

    It knows no trainer, so that the Trainer can make it anew (`restore_callback_states_from_checkpoint`).
    """

    def __init__(self, optimizer_steps: int = 0):
        self.optimizer_steps = optimizer_steps

    def state(self) -> dict[str, Any]:
        return {"args": {"optimizer_steps": self.optimizer_steps}, "attributes": {}}

    def mark(self, state: Any) -> None:
        self.optimizer_steps = state.global_step
        state.stateful_callbacks[type(self).__name__] = self.state()


class _StepBegin(NamedTuple):
    """A run at the begin of an optimizer step. optimizer_steps: done by then."""

    optimizer_steps: int
    data: DataState
    run: dict[str, Any]
    random: tuple[Any, ...]


class CheckpointSaver:
    """Saves the run of one `train()`. Made by all ranks at the same place: it opens an exchange.

    trainer: an `ODBTrainerMixin`. silence_s: how long a rank may give no sign of life.
    """

    def __init__(self, trainer: Any, silence_s: float):
        self._trainer = trainer
        self.exchange = Exchange(None, silence_s)
        self._step: _StepBegin | None = None
        self._hashing = Hashing(trainer.args.process_index, writes_common=trainer.args.should_save)

    def begin_hashing(self) -> None:
        """Callbacks have seen the checkpoint that was saved last."""
        self._hashing.begin()

    def step_is_asked_for(self) -> None:
        """This rank leaves the end of the optimizer step before; it may wait for the others from here on."""
        self.exchange.step(f"the begin of optimizer step {self._trainer.odb_run.optimizer_steps + 1}")

    def step_begins(self) -> None:
        """Note the run as it is now. The Trainer's `global_step` stays until `step_ends`."""
        run = self._trainer.odb_run
        self.exchange.step(f"optimizer step {run.optimizer_steps + 1}")
        self._step = _StepBegin(
            run.optimizer_steps, run.loader.state(), run.state_dict(), random_states(self._trainer.args.device)
        )

    def step_ends(self) -> None:
        self._step = None

    @contextlib.contextmanager
    def saving(self, folder: Path) -> Iterator[None]:
        """Within it the Trainer writes its files to `folder`. Collective."""
        trainer, step = self._trainer, self._step
        self._hashing.stop()
        self._begin(folder)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, CheckpointMark):
                callback.mark(trainer.state)
        self.exchange.gather(b"1", f"the begin of saving {folder.name}")
        with contextlib.nullcontext() if step is None else _random_numbers_of(step, trainer.args.device):
            yield
        self.exchange.gather(b"1", f"the end of saving {folder.name}")
        if not folder.is_dir():
            # Folders of an older run with higher numbers can make the Trainer take the new one for the oldest.
            if self._marks:
                logger.warning("%s has been deleted by the Trainer after it was written (save_total_limit)", folder)
            return
        if self._marks:
            write_marker(folder, trainer.odb_run.loader.world_size, trainer.state.global_step)
        self._hashing.after(folder)

    def close(self, *, failed: bool = False) -> None:
        """failed: the training ends by an error, so other ranks may wait."""
        if failed:
            self._hashing.stop()
        else:
            self._hashing.wait()
        self.exchange.close(failed=failed)

    def _begin(self, folder: Path) -> None:
        """Write this rank's state."""
        run = self._trainer.odb_run
        folder.mkdir(parents=True, exist_ok=True)
        hash_file(folder, self._trainer.args.process_index).unlink(missing_ok=True)
        if self._marks:  # a checkpoint of this step that is written again is not whole until all is there
            (folder / MARKER).unlink(missing_ok=True)
            (folder / TRAINER_STATE).unlink(missing_ok=True)
            for name, ranks in ((RANK_FILE, run.loader.world_size), (HASHES, self._trainer.args.world_size)):
                for rank, path in by_rank(folder, name).items():
                    if rank >= ranks:  # of a run with more of them
                        path.unlink(missing_ok=True)
        now = self._step or _StepBegin(run.optimizer_steps, run.loader.state(), run.state_dict(), ())
        write_rank_state(folder, run.loader.rank, now.optimizer_steps, now.data.to_dict(), now.run)

    @property
    def _marks(self) -> bool:
        """Whether this rank writes the marker: one of each node does."""
        return bool(self._trainer.args.local_process_index == 0)


@contextlib.contextmanager
def _random_numbers_of(step: _StepBegin, device: Any) -> Iterator[None]:
    now = random_states(device)
    set_random_states(device, step.random)
    try:
        yield
    finally:
        set_random_states(device, now)
