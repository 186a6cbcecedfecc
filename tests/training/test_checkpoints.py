"""Folders that are not whole checkpoints are refused in one line, on all ranks."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from thread_ranks import run_ranks
from toy import NUM_ROWS
from training.test_resume import BLOCK, train
from training.toy_training import ids
from transformers import Trainer

from odb_factory.errors import CollectiveError, DataError, ODBError
from odb_factory.training.checkpoint import CURSOR, TRAINER_STATE_NAME, find_checkpoint

STEPS = 4


@pytest.fixture(scope="module")
def run(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after optimizer step 4 of its epoch, with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("run")
    train(tiny_text, folder, block=BLOCK, stop=STEPS, num_train_epochs=1)
    return folder


def copied(run: Path, to: Path, *steps: int) -> Path:
    """A copy of the checkpoints of these steps; returns the last."""
    for step in steps:
        shutil.copytree(run / f"checkpoint-{step}", to / f"checkpoint-{step}")
    return to / f"checkpoint-{steps[-1]}"


def find(
    asked: Any,
    *,
    output_dir: Path | str = "",
    by_deepspeed: bool = False,
    gather: Any = lambda message: [message],  # of one rank
) -> Path | None:
    """The folder that `find_checkpoint` returns."""
    trainer = SimpleNamespace(args=SimpleNamespace(output_dir=output_dir), is_deepspeed_enabled=by_deepspeed)
    checkpoint = find_checkpoint(trainer, asked, gather)
    return checkpoint and checkpoint.folder


def refused(asked: Any, **options: Any) -> str:
    """The message of the refusal."""
    with pytest.raises(ODBError) as caught:
        find(asked, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: path.unlink(),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "binary": lambda path: path.write_bytes(bytes(range(128, 256))),
    "another entry": lambda path: path.write_text(
        json.dumps(json.loads(path.read_text()) | {"stateful_callbacks": {CURSOR: 1}})
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_without_a_trainer_state_is_refused(run: Path, tmp_path, damage: str) -> None:
    """Also if it is the newest of several: no other checkpoint is chosen silently."""
    asked = copied(run, tmp_path, 2, 4)
    DAMAGES[damage](asked / TRAINER_STATE_NAME)
    assert str(asked) in refused(str(asked))
    assert str(asked) in refused(True, output_dir=tmp_path)


def test_other_arguments_than_a_checkpoint(run: Path, tmp_path) -> None:
    for asked in (tmp_path / "nowhere", 5, True, run):
        assert refused(asked, output_dir=tmp_path).startswith("resume_from_checkpoint: ")
    assert find(None) is find(False) is find("") is None
    assert find(run / "checkpoint-3") == run / "checkpoint-3"


def test_a_checkpoint_without_an_optimizer_is_refused(run: Path, tiny_text, tmp_path) -> None:
    """The Trainer would continue with a fresh optimizer. The state of another engine does not count."""
    train(tiny_text, tmp_path, block=BLOCK, stop=2, num_train_epochs=1, save_only_model=True)
    with pytest.raises(DataError, match="save_only_model"):
        train(tiny_text, tmp_path, block=BLOCK, resume=True, num_train_epochs=1)
    assert "optimizer" in refused(run / "checkpoint-4", by_deepspeed=True)


class TrialTrainer(Trainer):
    """Saves to the folder of a trial, as in a hyper-parameter search."""

    def _get_output_dir(self, trial: Any) -> str:
        return os.path.join(super()._get_output_dir(trial), "run-7")


def test_a_trial_and_restored_callbacks(tiny_text, tmp_path) -> None:
    """The Trainer recreates callbacks. None of ours is left in it, and no file of ours in a checkpoint."""
    train(tiny_text, tmp_path, block=BLOCK, stop=STEPS, num_train_epochs=1, trainer_class=TrialTrainer)
    options = {"num_train_epochs": 1, "restore_callback_states_from_checkpoint": True}
    trainer = train(tiny_text, tmp_path, resume=str(tmp_path / "run-7" / "checkpoint-4"), block=BLOCK, **options)
    assert ids(tmp_path) == Counter(range(NUM_ROWS))
    last = tmp_path / f"checkpoint-{trainer.state.global_step}"
    saved = json.loads((last / TRAINER_STATE_NAME).read_text())["stateful_callbacks"][CURSOR]["args"]
    assert saved["optimizer_steps"] == trainer.state.global_step
    assert not [path for path in last.iterdir() if "odb" in path.name]
    kinds = [type(callback).__module__ for callback in trainer.callback_handler.callbacks]
    assert not [module for module in kinds if module.startswith("odb_factory")]


def on_ranks(asked: list[Any]) -> list[Any]:
    """The result or error of `find_checkpoint` on ranks that are threads. asked: the argument of each rank."""

    def drive(seat: Any) -> Any:
        try:
            return find(asked[seat.rank], gather=lambda message: seat.ring.main.gather(message, "checkpoint"))
        except ODBError as error:
            return error

    return run_ranks(len(asked), drive)


def test_all_ranks_resume_the_same_checkpoint(run: Path, tmp_path) -> None:
    """Nodes may have their own disks."""
    here, there = (copied(run, tmp_path / name, 3, 4) for name in ("here", "there"))
    for asked in (here, there), (None, None):
        assert on_ranks(list(asked)) == list(asked)
    for other in (None, there.with_name("checkpoint-3")):
        errors = on_ranks([here, other])
        assert all(isinstance(error, CollectiveError) and "resume_from_checkpoint" in str(error) for error in errors)
    (there / TRAINER_STATE_NAME).unlink()
    for other in (there, 5):
        errors = on_ranks([here, other])
        assert {str(error) for error in errors} == {str(errors[1])}
