"""Checkpoints are the Trainer's. The cursor of a run is an entry of `trainer_state.json`, the file written last."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from odb_factory.data.loader import ODBLoader
from odb_factory.data.ranks import Channel, compare
from odb_factory.errors import ConfigError, DataError, ODBError, one_line
from odb_factory.log import get_logger

logger = get_logger(__name__)

CURSOR = "ODBCursor"
"""The entry of `trainer_state.json`, among those of callbacks, from which a run is resumed: `Training.state_dict` at
the end of the optimizer step taken last, the same on all ranks."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to resume. optimizer_steps, epochs: done, as the Trainer counts. saved: its cursor; None: stock has
    written the checkpoint."""

    folder: Path
    optimizer_steps: int
    epochs: float
    saved: Mapping[str, Any] | None


def find_checkpoint(trainer: Any, resume_from: Any, gather: Callable[[bytes], Sequence[bytes]]) -> Checkpoint | None:
    """The checkpoint to resume, None to start from the beginning. Collective: every rank calls it.

    resume_from: the argument `resume_from_checkpoint`: a folder, True for the newest in `output_dir`, None or False for
    none. gather: of `compare`.
    Raises `CollectiveError` on all ranks (one rank: `ConfigError`, `DataError`) if one of them cannot resume it, or if
    they would resume different optimizer steps.
    """
    checkpoint: Checkpoint | None = None
    problem: ODBError | None = None
    try:
        if resume_from is not None and resume_from is not False and resume_from != "":
            checkpoint = _read(resume_from, trainer)
    except ODBError as error:
        problem = error
    steps = checkpoint and checkpoint.optimizer_steps
    compare({"the optimizer step of resume_from_checkpoint": steps}, gather, problem=problem)
    return checkpoint


def _read(resume_from: Any, trainer: Any) -> Checkpoint:
    """Raises `ConfigError` without a checkpoint, `DataError` for a folder that is not a whole one."""
    if resume_from is True:
        output_dir = str(trainer.args.output_dir)
        resume_from = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
        if resume_from is None:
            raise ConfigError(f"resume_from_checkpoint: True, but {output_dir!r} holds no checkpoint; name one.")
    folder = Path(os.path.abspath(str(resume_from)))
    path = folder / TRAINER_STATE_NAME
    try:
        state = TrainerState.load_from_json(str(path))
        entry = (state.stateful_callbacks or {}).get(CURSOR)
        saved = entry and entry["args"]
        # A stock training that has resumed a checkpoint of odb keeps the entry of an older optimizer step.
        saved = saved if saved and saved["optimizer_steps"] == state.global_step else None
    except Exception as error:  # whatever is in the file
        raise DataError(
            f"resume_from_checkpoint: {str(resume_from)!r} is not a whole checkpoint of the Trainer "
            f"({one_line(error)}); name another one, or remove the folder to resume the checkpoint before it."
        ) from None
    # The Trainer would continue with a fresh optimizer and not report it.
    if not any(folder.glob("global_step*" if trainer.is_deepspeed_enabled else "optimizer*")):
        raise DataError(
            f"resume_from_checkpoint: {folder} holds no optimizer state that this training can load (left out by "
            "`save_only_model: true`, or of another engine), so the optimizer would restart; name another checkpoint, "
            "or start from its weights as model_name_or_path."
        )
    return Checkpoint(folder, state.global_step, state.epoch or 0.0, saved)


def go_to_checkpoint(loader: ODBLoader, checkpoint: Checkpoint, *, restarts_epoch: bool) -> float:
    """Set a loader to the place of a checkpoint; returns the epochs done there.

    restarts_epoch: go to the start of its epoch (`ignore_data_skip`). Raises `DataError` that names what differs.
    """
    steps, epochs, an_epoch = checkpoint.optimizer_steps, checkpoint.epochs, loader.num_optimizer_steps
    if restarts_epoch:
        epoch = int(epochs) if an_epoch is None else steps // max(an_epoch, 1)  # as the Trainer counts
        loader.go_to(epoch)
        logger.warning("ignore_data_skip: epoch %d is restarted, whatever was done of it", epoch)
        return float(epoch)
    if checkpoint.saved is not None:
        try:
            loader.load_state_dict(checkpoint.saved["data"])
        except DataError as error:
            raise DataError(f"{checkpoint.folder}: {error}.") from None
        return epochs
    # Stock has written it: its optimizer steps must be those of this run, so kept, and of as many samples.
    num_samples, size = loader.num_samples, loader.global_batch_size
    if an_epoch is None or num_samples is None or size is None:
        raise DataError(
            f"{checkpoint.folder}: it was written without odb, which continues such a checkpoint only with kept "
            "optimizer steps of a dataset with a length; set `ignore_data_skip: true` to restart the epoch."
        )
    epoch, done = divmod(steps, max(an_epoch, 1))
    expected = done * size / num_samples
    # Stock counts epochs in micro-steps, of which the last may have fewer samples, and rounds.
    if abs(epochs - epoch - expected) > expected * size / max(num_samples - size, 1) + 1e-6:
        raise DataError(
            f"{checkpoint.folder}: it was written without odb, and has {epochs:.4g} epochs in {steps} optimizer steps, "
            f"which with {size} samples each are {epoch + expected:.4g}: set global_batch_size to the samples that an "
            "optimizer step had, or `ignore_data_skip: true` to restart the epoch."
        )
    loader.go_to(epoch, done)
    logger.info("%s was written without odb, with the same optimizer steps: training continues", checkpoint.folder.name)
    return epochs


def load_sharded_optimizer(trainer: Any, folder: Path) -> None:
    """Load the state of the optimizer from shards of FSDP, if nothing is loaded yet. Collective.

    accelerate (1.11) loads only the entries that the optimizer has. An optimizer that has taken no step has none, so
    its moments would restart silently.
    """
    from torch.distributed import checkpoint  # takes long to import
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate's wrapper
    shards = next((path for path in folder.glob("optimizer_*") if path.is_dir()), None)
    if shards is None or any(optimizer.state.values()):
        return
    state = {"optimizer": get_optimizer_state_dict(trainer.model, optimizer)}
    checkpoint.load(state, checkpoint_id=shards)
    set_optimizer_state_dict(trainer.model, optimizer, state["optimizer"])


# transformers' `enable_jit_checkpoint`: after SIGTERM all ranks save the same optimizer step, and the training ends.
# Stock saves at the next event in each process. A signal reaches the processes at different moments, or one node only,
# so ranks would save different steps and wait for each other. Here a signal is a request that each rank sends to the
# others at the end of an optimizer step. There the Trainer saves as always, with the weights of `global_step` under
# every engine (DeepSpeed updates them before `on_pre_optimizer_step`, where stock saves).


class Preemption(TrainerCallback):
    """Handles SIGTERM during one `train()`. It replaces stock's callback, whose manager only records signals here, and
    runs after callbacks that request an evaluation.

    manager: of stock's callback. ring: the connections of all ranks.
    """

    def __init__(self, manager: Any, ring: Channel):
        self._manager, self._ring, self._is_over = manager, ring, False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Collective."""
        is_asked = bool(self._manager.is_checkpoint_requested)
        answers = self._ring.gather(b"1" if is_asked else b"0", f"the end of optimizer step {state.global_step}")
        asking = [rank for rank, answer in enumerate(answers) if answer == b"1"]
        if asking:
            self._is_over = control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # the sender of SIGTERM does not wait for long
            logger.warning(
                "SIGTERM on rank %d: all ranks save optimizer step %d, and the training ends",
                asking[0],
                state.global_step,
            )

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_over:
            control.should_evaluate = control.should_save = False
