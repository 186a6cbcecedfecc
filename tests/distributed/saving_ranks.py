"""Two ranks of a real Trainer that are stopped while they save, or made to save, and started again."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from training.test_resume import train
from training.test_saving import KEEP, Signalled, terminate
from training.toy_training import history

from odb_factory import ODBError

EPOCH = {"num_train_epochs": 2, "disable_tqdm": True, "ddp_backend": "gloo"}


class Lines(logging.Handler):
    """What this rank logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def as_rank(rank: int) -> Lines:
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # torch cannot load an optimizer of cpu:0
    lines = Lines()
    logging.getLogger("odb_factory").addHandler(lines)
    return lines


class SignalledTwice(Signalled):
    """Once more while it saves."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_training_stop:
            terminate()
        super()._save_checkpoint(*args, **kwargs)


def preempted(rank: int, *, model: str, out_dir: str, cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What each cell left, how its run ended, and the history of the run that was started again.

    cells: `at`: for each rank the event and the optimizer steps done when SIGTERM comes (None: never); `twice`: once
    more during the save; the rest are training arguments.
    """
    lines = as_rank(rank)
    found: dict[str, Any] = {"": history(train(Path(model), Path(out_dir, "whole"), block=KEEP, **EPOCH))}
    for name, cell in cells.items():
        out = Path(out_dir, name)
        changes = EPOCH | {"enable_jit_checkpoint": True, "save_steps": 100} | cell
        at, twice = changes.pop("at")[rank], changes.pop("twice", False)
        event, steps = at or ("on_step_end", -1)
        kind = type("Stopped", (SignalledTwice if twice else Signalled,), {"event": event, "steps": steps})
        lines.lines.clear()
        stopped = train(Path(model), out, block=KEEP, trainer_class=kind, **changes)
        dist.barrier()
        left = sorted(path.name for path in out.glob("checkpoint-*"))
        said = [line for line in lines.lines if "SIGTERM" in line]
        again = train(Path(model), out, block=KEEP, resume=True, **changes)
        found[name] = {"steps": stopped.state.global_step, "left": left, "said": said, "history": history(again)}
        dist.barrier()
    return found


def resumed_with_other_rows(rank: int, *, model: str, out_dir: str) -> str:
    """What the resume ends with."""
    as_rank(rank)
    train(Path(model), Path(out_dir), block=KEEP, stop=2, **EPOCH)
    dist.barrier()
    try:
        train(Path(model), Path(out_dir), block=KEEP, resume=True, num_rows=50, **EPOCH)
    except ODBError as error:
        return str(error)
    return "trained"
