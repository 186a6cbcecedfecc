"""A Trainer that was stopped is resumed from its checkpoint: the same steps, the same losses to the last digit."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from toy import NUM_ROWS, Rows
from training import toy_training
from training.toy_training import Sequential, audit, history
from transformers import Trainer, TrainerCallback

from odb_factory import DataError

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
    defaults = {"save_strategy": "steps", "save_steps": 1, "warmup_steps": 2, "num_train_epochs": 2}
    callbacks = [StopAfter(stop)] if stop else []
    return toy_training.train(
        model, folder, Rows(num_rows=num_rows), dropout=0.1, callbacks=callbacks, **defaults | changes
    )


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
        summary = json.loads((folder / "odb_summary.json").read_text())
        assert (summary["optimizer_steps"], summary["epochs"]) == (steps, 2.0)


def test_a_run_can_be_made_longer(tiny_text, tmp_path) -> None:
    train(tiny_text, tmp_path, block=BLOCK, num_train_epochs=1)
    train(tiny_text, tmp_path, resume=True, block=BLOCK, num_train_epochs=2)
    assert [rows_of(tmp_path, epoch) for epoch in range(2)] == [EVERY_ROW] * 2


def test_a_checkpoint_of_stock_continues_with_the_same_optimizer_steps_alone(tiny_text, tmp_path) -> None:
    """Also if stock has resumed a checkpoint of odb and keeps the cursor of an older optimizer step."""
    train(tiny_text, tmp_path, block=BLOCK, stop=2, num_train_epochs=1)
    stock = train(tiny_text, tmp_path, resume=True, stop=5, num_train_epochs=1)
    trainer = train(tiny_text, tmp_path, resume=True, block=BLOCK, stop=6, num_train_epochs=1)
    assert (stock.state.global_step, trainer.state.global_step) == (5, 6)
    assert audit(tmp_path)[-1]["optimizer_step"] == 6 and len(audit(tmp_path)) == 2 + 1
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
