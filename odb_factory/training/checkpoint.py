"""The data's part of a checkpoint: written beside the Trainer's files, read back when it is gone on from.

The order in which a checkpoint comes to be: states of all ranks, the Trainer's files, of which `trainer_state.json`
is the last (then the Trainer deletes older checkpoints), our marker. So a checkpoint that is cut off anywhere behind
the Trainer's last file is complete but for the marker, also where it is the only one (`save_total_limit: 1`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from odb_factory.errors import DataError
from odb_factory.log import get_logger
from odb_factory.training.checkpoint_files import check_optimizer
from odb_factory.training.checkpoint_status import WAY_OUT, check_consistent, is_stock, read_states
from odb_factory.training.run import ODBRun
from odb_factory.training.state_files import (
    MARKER,
    TRAINER_STATE,
    RankState,
    TrainerRecord,
    rank_file,
    ranks_of,
    read_trainer_state,
    write_marker,
    write_rank_state,
)

logger = get_logger(__name__)

EPOCHS_ROUNDING = 1e-6


def begin_save(run: ODBRun, folder: Path, *, barrier: Callable[[], None], marks: bool) -> None:
    """Write this rank's state, before the Trainer writes its files. Collective.

    barrier: waits for all ranks. marks: this rank writes the marker (one of each node does).
    """
    folder.mkdir(parents=True, exist_ok=True)
    if marks:  # of a checkpoint of this step that is written anew: until all is there, it is not whole
        (folder / MARKER).unlink(missing_ok=True)
        (folder / TRAINER_STATE).unlink(missing_ok=True)
        for rank in ranks_of(folder):
            if rank >= run.loader.world_size:  # of a run with more ranks
                rank_file(folder, rank).unlink(missing_ok=True)
    write_state(run, folder)
    barrier()


def write_state(run: ODBRun, folder: Path) -> None:
    """Write this rank's state."""
    write_rank_state(folder, run.loader.rank, run.optimizer_steps, run.loader.state_dict(), run.state_dict())


def end_save(run: ODBRun, folder: Path, *, barrier: Callable[[], None], marks: bool) -> None:
    """Write the marker, when all ranks have written all files. Collective."""
    barrier()
    if marks and not folder.is_dir():
        # Folders of an older run with higher numbers can make the Trainer take the new one for the oldest.
        logger.warning("%s has been deleted by the Trainer right after it was written (save_total_limit)", folder)
    elif marks:
        write_marker(folder, run.loader.world_size, run.optimizer_steps)


def load(run: ODBRun, folder: Path) -> None:
    """Set `run` and its loader to where the checkpoint left them; warns where it is one of stock training.

    Reads this rank's file alone, unless what is left of the epoch has to be dealt out anew. Raises `DataError` that
    says what is damaged or differs.
    """
    record = read_trainer_state(folder)
    if run.config.resume == "ignore_data":
        _load_without_data(run, folder, record)
    elif is_stock(folder, record):
        _load_stock(run, folder, record)
    else:
        _load_ours(run, folder)


def _load_ours(run: ODBRun, folder: Path) -> None:
    try:
        states = read_states(folder, run.loader.rank, run.loader.world_size)
        if len(states) == 1 and run.loader.needs_all(states[0].data):
            states = read_states(folder, run.loader.rank, run.loader.world_size, of_all=True)
    except DataError as error:
        raise DataError(f"{error}; {WAY_OUT}.") from None
    try:
        run.loader.load_state_dict([state.saved for state in states])
    except DataError as error:
        raise DataError(f"{folder}: {error}.") from None
    _load_figures(run, folder, next((one for one in states if one.data.rank == run.loader.rank), states[0]))


def _load_figures(run: ODBRun, folder: Path, state: RankState) -> None:
    try:
        run.load_state_dict(state.run)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder}: the figures of the run in the state of rank {state.data.rank} are not those this "
            f"odb_factory writes ({type(error).__name__}: {error}); {WAY_OUT}."
        ) from None


def _load_without_data(run: ODBRun, folder: Path, record: TrainerRecord) -> None:
    """The model alone, and of our files the figures of the run, if they can be read."""
    try:
        if is_stock(folder, record):
            raise DataError("it was written without odb")
        states = read_states(folder, run.loader.rank, run.loader.world_size)
        check_consistent(folder, states, record)
        _load_figures(run, folder, states[0])
    except DataError as error:
        logger.warning("resume: ignore_data: the figures of the run begin anew as well (%s)", error)
        run.begin_at(record.optimizer_steps, record.epochs)
    try:
        check_optimizer(folder, run.loader.rank)
    except DataError as error:
        logger.warning("resume: ignore_data: %s", error)
    epoch = int(record.epochs)
    run.begin_epoch_anew(epoch)
    logger.warning("resume: ignore_data: epoch %d begins anew, whatever was done of it", epoch)


def _load_stock(run: ODBRun, folder: Path, record: TrainerRecord) -> None:
    """Of a checkpoint of stock training: exactly, where its optimizer steps are kept; else by its share of an epoch."""
    if run.config.keeps:
        _check_stock_steps(run, folder, record)
    done = run.loader.skip(optimizer_steps=record.optimizer_steps, epochs=record.epochs)
    run.begin_at(record.optimizer_steps, record.epochs)
    if done is None:
        logger.info("%s was written without odb, whose optimizer steps are the same: the training goes on", folder.name)
        return
    logger.warning(
        "%s was written without odb, so nobody knows which rows were trained on: the first %d samples of epoch %d are "
        "taken for done; as the order may be another, some rows may come twice in this epoch and some not at all",
        folder.name,
        done,
        int(record.epochs),
    )


def _check_stock_steps(run: ODBRun, folder: Path, record: TrainerRecord) -> None:
    """Raise `DataError` where the epochs of a checkpoint say that its optimizer steps had another number of samples."""
    an_epoch, num_samples, size = run.loader.num_optimizer_steps, run.loader.num_samples, run.loader.global_batch_size
    if an_epoch is None or num_samples is None or size is None:
        return
    epoch, done = divmod(record.optimizer_steps, max(an_epoch, 1))
    expected = done * size / num_samples
    # Stock says epochs in micro-steps of its own, of which the last may have fewer samples.
    if abs(record.epochs - epoch - expected) > expected * size / max(num_samples - size, 1) + EPOCHS_ROUNDING:
        raise DataError(
            f"{folder}: it was written without odb, and says {record.epochs:.4g} epochs in {record.optimizer_steps} "
            f"optimizer steps, which with {size} samples each are {epoch + expected:.4g}: set global_batch_size to the "
            "samples that an optimizer step had, or `resume: ignore_data` to begin the epoch anew."
        )
