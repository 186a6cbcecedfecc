"""A Trainer that was stopped at any moment is resumed from its checkpoint: the same steps, the same losses to the last
digit. Folders that are not whole checkpoints are refused in one line, on all ranks."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from thread_ranks import run_ranks
from toy import NUM_ROWS, Rows
from training import toy_training
from training.toy_training import Sequential, audit, history, losses, make
from transformers import Trainer, TrainerCallback

from odb_factory import DataError
from odb_factory.errors import CollectiveError, ODBError
from odb_factory.training.checkpoint import CURSOR, TRAINER_STATE_NAME, find_checkpoint

BLOCK = {"token_budget": 512, "buffer_size": 16, "audit": True}
"""Eight rows are within the budget: an optimizer step is one line of the audit."""
FILL = {"token_budget": 128, "buffer_size": 16, "audit": True, "global_batch_size": "fill"}


class StopAfter(TrainerCallback):
    def __init__(self, steps: int):
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.steps


def train(model: Path, folder: Path, *, stop: int | None = None, num_rows: int = NUM_ROWS, **changes: Any) -> Trainer:
    """With dropout and a checkpoint of every optimizer step. stop: after this many."""
    defaults = {"save_strategy": "steps", "save_steps": 1, "warmup_steps": 2, "num_train_epochs": 2, "dropout": 0.1}
    callbacks = [StopAfter(stop)] if stop else []
    return toy_training.train(model, folder, Rows(num_rows=num_rows), callbacks=callbacks, **defaults | changes)


def copy_of(folder: Path, step: int, to: Path) -> Path:
    """A copy of the checkpoint and the audit of a run that ended at this step."""
    shutil.copytree(folder / f"checkpoint-{step}", to / f"checkpoint-{step}")
    lines = [line for line in audit(folder) if line["optimizer_step"] <= step]
    (to / "odb_audit_rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return to / f"checkpoint-{step}"


def rows_of(folder: Path, epoch: int) -> list[int]:
    """The rows trained on in this epoch, sorted."""
    return sorted(row for line in audit(folder) if line["epoch"] == epoch for row in line["ids"])


EVERY_ROW = list(range(NUM_ROWS))
WORKERS = {"gradient_accumulation_steps": 2, "dataloader_num_workers": 2}


@pytest.mark.parametrize("block", [BLOCK | {"token_budget": 128}, FILL], ids=["keep", "fill"])
def test_the_same_run_from_any_checkpoint(tiny_text, tmp_path, block: dict[str, Any]) -> None:
    """I2: every row of an epoch once. Steps, losses, gradient norms, learning rates and audit equal those of the run
    that was not stopped; with `fill` later optimizer steps may differ."""
    whole = train(tiny_text, tmp_path / "whole", block=block, **WORKERS)
    steps = whole.state.global_step
    for step in (1, steps // 2, steps - 1):
        folder = tmp_path / f"from{step}"
        again = train(tiny_text, folder, resume=str(copy_of(tmp_path / "whole", step, folder)), block=block, **WORKERS)
        assert [*dict.fromkeys(line["optimizer_step"] for line in audit(folder))] == [
            *range(1, again.state.global_step + 1)
        ]
        assert [rows_of(folder, epoch) for epoch in range(2)] == [EVERY_ROW] * 2
        assert again.state.epoch == whole.state.epoch
        if block is FILL:
            assert history(again)[:step] == history(whole)[:step]
            continue
        assert history(again) == history(whole), step
        assert again.state.global_step == again.state.max_steps == steps
        assert audit(folder) == audit(tmp_path / "whole")
        summary = summary_of(folder)
        assert (summary["optimizer_steps"], summary["epochs"]) == (steps, 2.0)


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "odb_summary.json").read_text())


def test_a_finished_run_is_resumed_without_a_step_or_made_longer(tiny_text, tmp_path) -> None:
    summaries = []
    for epochs in (1, 1, 2):
        train(tiny_text, tmp_path, resume=summaries != [], block=BLOCK, num_train_epochs=epochs)
        summaries.append(summary_of(tmp_path))
    first, again, longer = ([summary[key] for key in ("samples", "optimizer_steps", "epochs")] for summary in summaries)
    assert first == [NUM_ROWS, math.ceil(NUM_ROWS / 8), 1.0] and again == [0, *first[1:]] and longer[0] == NUM_ROWS
    assert [rows_of(tmp_path, epoch) for epoch in range(2)] == [EVERY_ROW] * 2


def test_a_checkpoint_of_stock_continues_with_the_same_optimizer_steps_alone(tiny_text, tmp_path) -> None:
    """Its losses are stock's, also if stock has resumed a checkpoint of odb and keeps the cursor of an older step."""
    options: dict[str, Any] = {"num_train_epochs": 1, "dropout": 0.0}
    whole = losses(train(tiny_text, tmp_path / "whole", **options))
    train(tiny_text, tmp_path, block=BLOCK, stop=2, **options)
    stock = train(tiny_text, tmp_path, resume=True, stop=5, **options)
    trainer = train(tiny_text, tmp_path, resume=True, block=BLOCK, **options)
    assert stock.state.global_step == 5 and losses(trainer) == pytest.approx(whole, rel=1e-5)
    assert [line["optimizer_step"] for line in audit(tmp_path)] == [1, 2, 6, 7, 8]
    train(tiny_text, tmp_path / "other", stop=10, num_train_epochs=1, per_device_train_batch_size=4)
    for block in (BLOCK, FILL):
        with pytest.raises(DataError, match="checkpoint-10.*ignore_data_skip"):
            train(tiny_text, tmp_path / "other", resume=True, block=block, num_train_epochs=1)


@pytest.mark.parametrize("block", [BLOCK, FILL], ids=["keep", "fill"])
def test_ignore_data_skip_restarts_the_epoch(tiny_text, tmp_path, block: dict[str, Any]) -> None:
    """With `keep` the run has as many optimizer steps as in stock."""
    stop = 13
    stopped = train(tiny_text, tmp_path, block=block, stop=stop)
    assert 1 < stopped.state.epoch < 2
    again = train(tiny_text, tmp_path, block=block, resume=True, ignore_data_skip=True)
    rows = [row for line in audit(tmp_path) if line["optimizer_step"] > stop for row in line["ids"]]
    assert len(set(rows)) == len(rows)
    if block is BLOCK:
        train(tiny_text, tmp_path / "stock", stop=stop)
        stock = train(tiny_text, tmp_path / "stock", resume=True, ignore_data_skip=True)
        assert again.state.global_step == stock.state.global_step == 16
        assert len(rows) == 3 * 8
    else:
        assert sorted(rows) == EVERY_ROW and again.state.epoch == 2.0


def test_an_epoch_that_was_restarted_is_resumed(tiny_text, tmp_path) -> None:
    """The Trainer computes epochs from optimizer steps, and gets more than were done."""
    train(tiny_text, tmp_path, block=BLOCK, stop=5)
    train(tiny_text, tmp_path, block=BLOCK, resume=True, ignore_data_skip=True, stop=10)
    trainer = train(tiny_text, tmp_path, block=BLOCK, resume=True)
    assert trainer.state.global_step == trainer.state.max_steps == 2 * math.ceil(NUM_ROWS / 8)
    assert sorted(row for line in audit(tmp_path)[5:] if not line["epoch"] for row in line["ids"]) == EVERY_ROW


@pytest.mark.parametrize("epochs", [1, 2])
def test_an_epoch_of_which_nothing_is_left_takes_no_further_step(tiny_text, tmp_path, epochs: int) -> None:
    """The rows that are left break the new budget."""

    def row(k: int) -> dict[str, Any]:
        ids = [k + 1] * (30 if k >= 20 else 5)
        return {"input_ids": ids, "labels": ids}

    def run(token_budget: int, **more: Any) -> None:
        block = FILL | {"buffer_size": 4, "overlong": "drop", "token_budget": token_budget}
        options = {"trainer_class": Sequential, "num_train_epochs": epochs, "save_strategy": "steps", "save_steps": 1}
        toy_training.train(tiny_text, tmp_path, Rows(row, 22), block=block, **options | more)

    run(40, callbacks=[StopAfter(5)])
    run(20, resume=True)
    assert [rows_of(tmp_path, epoch) for epoch in range(epochs + 1)] == [list(range(20))] * epochs + [[]]


# A save at any moment

EVENTS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_step_end")
BUDGET = 128
"""Several micro-batches make an optimizer step."""
STEPS = 3
KEEP = BLOCK | {"token_budget": BUDGET}


class ActsAt(Trainer):
    """Acts at `event`, with `steps` optimizer steps done."""

    event, steps = "on_pre_optimizer_step", STEPS

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        callback = TrainerCallback()
        setattr(callback, self.event, self.at_event)
        self.add_callback(callback)

    def at_event(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.steps:
            self.act()

    def act(self) -> None:
        """Saves a checkpoint, and keeps a copy."""
        to = Path(self.args.output_dir) / "saved" / f"checkpoint-{STEPS}"
        if not to.exists():
            self._save_checkpoint(self.model, trial=None)
            shutil.copytree(Path(self.args.output_dir) / f"checkpoint-{STEPS}", to)


def test_a_save_at_any_event_resumes_exactly(tiny_text: Path, tmp_path: Path) -> None:
    """The same losses to the last digit, without dropout: its random numbers are saved as they are at that moment."""
    options: dict[str, Any] = {"block": KEEP, "num_train_epochs": 1, "save_strategy": "no", "warmup_steps": 2}
    whole = history(toy_training.train(tiny_text, tmp_path / "whole", **options))
    for event in EVENTS:
        out, kind = tmp_path / event, type("Saves", (ActsAt,), {"event": event})
        assert history(toy_training.train(tiny_text, out, trainer_class=kind, **options)) == whole, event
        checkpoint = str(out / "saved" / f"checkpoint-{STEPS}")
        again = toy_training.train(tiny_text, tmp_path / f"{event}_again", resume=checkpoint, **options)
        # At the end of a step stock saves before it logs that step.
        skipped = STEPS if event == "on_step_end" else 0
        assert history(again) == [line for line in whole if line[0] != skipped], event


class Signalled(ActsAt):
    """Sends this process SIGTERM (`enable_jit_checkpoint`)."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        managers = (getattr(callback, "jit_manager", None) for callback in self.callback_handler.callbacks)
        next(filter(None, managers)).kill_wait = 0

    def act(self) -> None:
        terminate()


def terminate() -> None:
    """Send SIGTERM to this process and its workers, as launchers and schedulers do; returns after the timer of its
    handler has run."""
    os.kill(os.getpid(), signal.SIGTERM)
    workers = [str(child.pid) for child in multiprocessing.active_children()]
    if workers:  # torch handles a signal from the parent process in another way
        subprocess.run(["kill", "-TERM", *workers], check=False)  # a worker may have ended by now
        time.sleep(0.2)  # until torch has noticed the ended workers
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()


def test_a_run_that_sigterm_ends_is_resumed(tiny_text: Path, tmp_path: Path) -> None:
    """With workers. Other events, and two ranks: tests/distributed/test_saving_ranks.py."""
    options: dict[str, Any] = {"block": KEEP, "num_train_epochs": 1, "dataloader_num_workers": 1}
    whole = train(tiny_text, tmp_path / "whole", save_strategy="no", **options)
    options |= {"enable_jit_checkpoint": True, "save_steps": 100, "save_total_limit": 1}
    stopped = train(tiny_text, tmp_path / "out", trainer_class=Signalled, **options)
    checkpoints = [path.name for path in (tmp_path / "out").glob("checkpoint-*")]
    assert checkpoints == [f"checkpoint-{stopped.state.global_step}"]
    assert stopped.state.global_step == STEPS + 1
    again = train(tiny_text, tmp_path / "out", resume=True, **options)
    assert history(again) == history(whole)
    assert summary_of(tmp_path / "out")["dataset_samples"] == 60


def test_figures_of_numpy_are_saved_with_the_checkpoint(tiny_text: Path, tmp_path: Path) -> None:
    """`compute_metrics` in an evaluation by budget: the Trainer writes the figures as JSON. An evaluation without a
    whole batch (`dataloader_drop_last`) has no figures, as in stock."""
    each = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    each |= {"dataloader_drop_last": True, "per_device_eval_batch_size": 4}
    block = BLOCK | {"eval_token_budget": BUDGET}
    for num_rows, keys in ((16, block), (3, block), (3, None)):
        out = tmp_path / f"{num_rows} {keys is None}"
        trainer = make(tiny_text, out, block=keys, eval_dataset=Rows(num_rows=num_rows), **each)
        trainer.compute_metrics = lambda result: {"rows": np.int64(len(result.label_ids)), "half": np.float32(0.5)}
        trainer.train()
        state = json.loads((out / "checkpoint-1" / "trainer_state.json").read_text())
        entries = [entry for entry in state["log_history"] if "eval_loss" in entry or "eval_rows" in entry]
        assert [(entry["eval_rows"], entry["eval_half"]) for entry in entries] == [(16, 0.5)] * (num_rows == 16)


# Folders that are not whole checkpoints


@pytest.fixture(scope="module")
def run(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after optimizer step 4 of its epoch, with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("run")
    train(tiny_text, folder, block=BLOCK, stop=4, num_train_epochs=1)
    return folder


def copied(run: Path, to: Path, *steps: int) -> Path:
    """A copy of the checkpoints of these steps; returns the last."""
    for step in steps:
        shutil.copytree(run / f"checkpoint-{step}", to / f"checkpoint-{step}")
    return to / f"checkpoint-{steps[-1]}"


def refused(model: Path, folder: Path, asked: Any) -> str:
    """The message of the refusal."""
    with pytest.raises(ODBError) as caught:
        train(model, folder, block=BLOCK, resume=asked, num_train_epochs=1)
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
def test_a_folder_without_a_trainer_state_is_refused(run: Path, tiny_text, tmp_path, damage: str) -> None:
    """Also if it is the newest of several: no other checkpoint is chosen silently."""
    asked = copied(run, tmp_path, 2, 4)
    DAMAGES[damage](asked / TRAINER_STATE_NAME)
    for resume in (str(asked), True):
        assert str(asked) in refused(tiny_text, tmp_path, resume)


def test_other_arguments_than_a_checkpoint_are_refused(run: Path, tiny_text, tmp_path) -> None:
    for asked in (tmp_path / "nowhere", 5, True, run):
        assert refused(tiny_text, tmp_path, asked).startswith("resume_from_checkpoint: ")


def test_a_checkpoint_without_an_optimizer_is_refused(tiny_text, tmp_path) -> None:
    """The Trainer would continue with a fresh optimizer."""
    train(tiny_text, tmp_path, block=BLOCK, stop=2, num_train_epochs=1, save_only_model=True)
    assert "save_only_model" in refused(tiny_text, tmp_path, True)


class TrialTrainer(Trainer):
    """Saves to the folder of a trial, as in a hyper-parameter search."""

    def _get_output_dir(self, trial: Any) -> str:
        return os.path.join(super()._get_output_dir(trial), "run-7")


def test_a_trial_and_restored_callbacks(tiny_text, tmp_path) -> None:
    """The Trainer recreates callbacks. None of ours is left in it, and no file of ours in a checkpoint."""
    train(tiny_text, tmp_path, block=BLOCK, stop=4, num_train_epochs=1, trainer_class=TrialTrainer)
    options = {"num_train_epochs": 1, "restore_callback_states_from_checkpoint": True}
    trainer = train(tiny_text, tmp_path, resume=str(tmp_path / "run-7" / "checkpoint-4"), block=BLOCK, **options)
    assert rows_of(tmp_path, 0) == EVERY_ROW
    last = tmp_path / f"checkpoint-{trainer.state.global_step}"
    saved = json.loads((last / TRAINER_STATE_NAME).read_text())["stateful_callbacks"][CURSOR]["args"]
    assert saved["optimizer_steps"] == trainer.state.global_step
    assert not [path for path in last.iterdir() if "odb" in path.name]
    kinds = [type(callback).__module__ for callback in trainer.callback_handler.callbacks]
    assert not [module for module in kinds if module.startswith("odb_factory")]


def on_ranks(*asked: Any) -> list[Any]:
    """The folder or the error of ranks that are threads. asked: the argument of each rank."""
    trainer: Any = SimpleNamespace(args=SimpleNamespace(output_dir=""), is_deepspeed_enabled=False)

    def drive(seat: Any) -> Any:
        found = find_checkpoint(trainer, asked[seat.rank], lambda message: seat.ring.main.gather(message, "checkpoint"))
        return found and found.folder

    return run_ranks(len(asked), drive)


def test_all_ranks_resume_the_same_checkpoint(run: Path, tmp_path) -> None:
    """Nodes may have their own disks."""
    here, there = (copied(run, tmp_path / name, 3, 4) for name in ("here", "there"))
    assert on_ranks(here, there) == [here, there] and on_ranks(None, None) == [None, None]
    for other in (None, there.with_name("checkpoint-3")):
        errors = on_ranks(here, other)
        assert all(isinstance(error, CollectiveError) and "resume_from_checkpoint" in str(error) for error in errors)
    (there / TRAINER_STATE_NAME).unlink()
    for other in (there, 5):
        first, second = on_ranks(here, other)
        assert isinstance(first, ODBError) and str(first) == str(second)
