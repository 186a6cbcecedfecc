"""A checkpoint that is saved at any moment resumes with the losses of an unbroken run."""

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
    assert json.loads((tmp_path / "out" / "odb_summary.json").read_text())["dataset_samples"] == 60


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
