"""Whoever lets the Trainer save, at whatever moment: the checkpoint resumes as that of a run that was not stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from toy import Rows
from training import toy_training
from training.test_resume import BLOCK, train
from training.toy_training import history, make
from transformers import Trainer, TrainerCallback

EVENTS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_step_end")
BUDGET = 128
"""Several micro-batches make an optimizer step."""
STEPS = 3
KEEP = BLOCK | {"token_budget": BUDGET}


class SaveAt(TrainerCallback):
    """Calls `_save_checkpoint` at one event, with `STEPS` optimizer steps done, and keeps a copy of what it wrote."""

    def __init__(self, trainer: Trainer, event: str):
        self.trainer = trainer
        setattr(self, event, self.save)

    def save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        to = Path(args.output_dir) / "saved" / f"checkpoint-{STEPS}"
        if state.global_step == STEPS and not to.exists():
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            shutil.copytree(Path(args.output_dir) / f"checkpoint-{STEPS}", to)


def saving(event: str) -> type[Trainer]:
    class Saving(Trainer):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.add_callback(SaveAt(self, event))

    return Saving


def test_a_save_at_any_event_resumes_exactly(tiny_text: Path, tmp_path: Path) -> None:
    """The same losses to the last digit. (Random numbers, as of dropout, are saved as they are at that moment.)"""
    options: dict[str, Any] = {"block": KEEP, "num_train_epochs": 1, "save_strategy": "no", "warmup_steps": 2}
    whole = toy_training.train(tiny_text, tmp_path / "whole", **options)
    for event in EVENTS:
        out = tmp_path / event
        saved = toy_training.train(tiny_text, out, trainer_class=saving(event), **options)
        assert history(saved) == history(whole), event
        again = toy_training.train(
            tiny_text, tmp_path / f"{event}_again", resume=str(out / "saved" / f"checkpoint-{STEPS}"), **options
        )
        # At the end of a step stock saves before it logs that step.
        skipped = STEPS if event == "on_step_end" else 0
        assert history(again) == [line for line in history(whole) if line[0] != skipped], event


class Signalled(Trainer):
    """Sends this process SIGTERM at an event with `STEPS` optimizer steps done (`enable_jit_checkpoint`)."""

    event, steps = "on_pre_optimizer_step", STEPS

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        managers = (getattr(one, "jit_manager", None) for one in self.callback_handler.callbacks)
        self.manager = next(manager for manager in managers if manager is not None)
        self.manager.kill_wait = 0
        callback = TrainerCallback()
        setattr(callback, self.event, self.signal)
        self.add_callback(callback)

    def signal(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.steps:
            terminate()


def terminate() -> None:
    """SIGTERM to this process and its workers, as launchers and schedulers send it; returns once its handler's timer
    has run."""
    os.kill(os.getpid(), signal.SIGTERM)
    workers = [str(child.pid) for child in multiprocessing.active_children()]
    if workers:  # to torch a signal from their own parent is another
        subprocess.run(["kill", "-TERM", *workers], check=False)  # one may have ended by now, with nothing left to read
        time.sleep(0.2)  # until torch has heard of those that it ends
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()


def test_a_run_that_sigterm_ends_is_resumed(tiny_text: Path, tmp_path: Path) -> None:
    """With workers; other events, and two ranks: tests/distributed/test_saving_ranks.py."""
    options: dict[str, Any] = {"block": KEEP, "num_train_epochs": 1, "dataloader_num_workers": 1}
    whole = train(tiny_text, tmp_path / "whole", save_strategy="no", **options)
    options |= {"enable_jit_checkpoint": True, "save_steps": 100, "save_total_limit": 1}
    stopped = train(tiny_text, tmp_path / "out", trainer_class=Signalled, **options)
    checkpoints = [path.name for path in (tmp_path / "out").glob("checkpoint-*")]
    assert checkpoints == [f"checkpoint-{stopped.state.global_step}"]
    assert stopped.state.global_step == STEPS + 1
    again = train(tiny_text, tmp_path / "out", resume=True, **options)
    assert history(again) == history(whole)
    assert json.loads((tmp_path / "out" / "odb_summary.json").read_text())["dataset_samples"] == 60


def test_figures_of_numpy_are_saved_with_the_checkpoint(tiny_text: Path, tmp_path: Path) -> None:
    """Of `compute_metrics`, in an evaluation by budget: the Trainer writes them as JSON."""
    each = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    block = BLOCK | {"eval_token_budget": BUDGET}
    trainer = make(tiny_text, tmp_path, block=block, eval_dataset=Rows(num_rows=16), **each)
    trainer.compute_metrics = lambda found: {"rows": np.int64(len(found.label_ids)), "half": np.float32(0.5)}
    trainer.train()
    state = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    (entry,) = [entry for entry in state["log_history"] if "eval_loss" in entry]
    assert (entry["eval_rows"], entry["eval_half"]) == (16, 0.5)


def test_an_evaluation_without_a_whole_batch_has_no_figures(tiny_text: Path, tmp_path: Path) -> None:
    """As in stock, with `dataloader_drop_last`."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "dataloader_drop_last": True}
    for block in (None, BLOCK | {"eval_token_budget": BUDGET}):
        rows = {"eval_dataset": Rows(num_rows=3), "per_device_eval_batch_size": 4}
        trainer = make(tiny_text, tmp_path, block=block, **rows, **options)
        trainer.compute_metrics = lambda found: {"rows": len(found.label_ids)}
        trainer.train()
        assert not any(key in entry for entry in trainer.state.log_history for key in ("eval_loss", "eval_rows"))
