"""Set a run to where a checkpoint left it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from odb_factory.errors import CollectiveError, DataError, one_line
from odb_factory.log import get_logger
from odb_factory.training.checkpoint_files import check_optimizer
from odb_factory.training.checkpoint_status import WAY_OUT, check_consistent, is_stock, read_states
from odb_factory.training.run import ODBRun
from odb_factory.training.state_files import RankState, TrainerRecord, read_trainer_state

logger = get_logger(__name__)

EPOCHS_ROUNDING = 1e-6


def load(run: ODBRun, folder: Path, gather: Callable[[Any], list[Any]]) -> None:
    """Load a checkpoint on all ranks, or raise on all of them what the first one cannot load. Collective.

    gather: what each rank says (JSON types), to all ranks, in rank order.
    """
    problem: Exception | None = None
    try:
        _load(run, folder)
    except Exception as error:
        problem = error
    said = gather(None if problem is None else one_line(problem))
    if problem is not None and len(said) == 1:
        raise problem
    for rank, reason in enumerate(said):
        if reason is not None:
            raise CollectiveError(reason if len(set(said)) == 1 else f"rank {rank}: {reason}") from problem


def _load(run: ODBRun, folder: Path) -> None:
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
        check_optimizer(folder)
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
