"""The data's part of a checkpoint: written beside the Trainer's files, found again, read back.

Every rank writes a file of its own; when all have, one more says that the checkpoint is whole. Each is
written under another name and then takes its place, so a crash leaves the older checkpoint as it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from odb_factory.errors import ConfigError, DataError
from odb_factory.log import get_logger
from odb_factory.training.run import ODBRun

logger = get_logger(__name__)

MARKER = "odb_state.json"
RANK_FILE = "odb_state_rank{rank}.json"
TRAINER_STATE = "trainer_state.json"


def save(run: ODBRun, folder: Path, *, barrier: Callable[[], None], marks: bool) -> None:
    """Write this rank's state. barrier: waits for all ranks; marks: this rank writes the last file (one a node)."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {"data": run.loader.state_dict(), "run": run.state_dict()}
    _write(folder / RANK_FILE.format(rank=run.rank), state)
    barrier()
    if marks:
        _write(folder / MARKER, {"world_size": run.world_size, "optimizer_steps": run.optimizer_steps})


def find(asked: str | Path) -> Path:
    """The checkpoint to go on from: `asked`, or the one before if saving it was cut off."""
    folder = Path(asked)
    if not folder.is_dir():
        raise ConfigError(f"resume_from_checkpoint: {str(asked)!r} is no folder; name a checkpoint of this training.")
    if (folder / MARKER).exists() or _is_stock(folder):
        return folder
    older = [other for other in folder.parent.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if (other / MARKER).exists()]
    before = [other for other in older if _number(other) < _number(folder)]
    if not before:
        return folder
    newest = max(before, key=_number)
    logger.warning("%s is not whole (no %s): its saving was cut off; going on from %s", folder, MARKER, newest.name)
    return newest


def load(run: ODBRun, folder: Path) -> None:
    """Set `run` and its loader to where the checkpoint left them; warns where it is one of stock training."""
    if not (folder / MARKER).exists():
        _load_stock(run, folder)
        return
    world_size = json.loads((folder / MARKER).read_text(encoding="utf-8"))["world_size"]
    files = [folder / RANK_FILE.format(rank=rank) for rank in range(world_size)]
    saved = [json.loads(path.read_text(encoding="utf-8")) for path in files if path.exists()]
    if not saved:
        raise DataError(f"{folder}: {MARKER} is there, but none of the files {files[0].name} and so on; copy them too.")
    try:
        run.loader.load_state_dict([one["data"] for one in saved])
    except DataError as error:
        raise DataError(f"{folder}: {error}.") from None
    mine = next((one for one in saved if one["data"]["rank"] == run.rank), saved[0])
    run.load_state_dict(mine["run"])


def _load_stock(run: ODBRun, folder: Path) -> None:
    """A checkpoint of stock training knows no more than its share of an epoch."""
    path = folder / TRAINER_STATE
    if not path.exists():
        raise ConfigError(
            f"resume_from_checkpoint: {str(folder)!r} has no {TRAINER_STATE}, so it is not whole; name an older one."
        )
    state = TrainerState.load_from_json(str(path))
    done = run.loader.pass_over(state.epoch or 0.0)
    logger.warning(
        "%s was written without odb, so nobody knows which rows were trained on: the first %d samples of epoch %d are "
        "taken for done; as the order may be another, some rows may come twice in this epoch and some not at all",
        folder.name,
        done,
        int(state.epoch or 0),
    )
    run.begin_at(state.global_step, state.epoch or 0.0)


def _is_stock(folder: Path) -> bool:
    """Whether it is whole, and was written by a training without odb."""
    if not (folder / TRAINER_STATE).exists():
        return False
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE))
    ours = state.stateful_callbacks.get("ODBCallback", {"attributes": {}})
    return ours["attributes"].get("optimizer_steps") != state.global_step  # stock training carries an old entry along


def _number(folder: Path) -> int:
    end = folder.name.rpartition("-")[2]
    return int(end) if end.isdigit() else -1


def _write(path: Path, content: Any) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
