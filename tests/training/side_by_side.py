"""The same training by the stock Trainer and by one with `enable_odb`, and how far they are apart.

`train_all` runs on every rank and writes what each training did; `compare` reads that (as of `same_training`), and what
other callbacks saw and checkpoints hold.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.shims.training_record import TrainingRecord
from same_training import RELATIVE, Deviation, check_same_training, read
from training.cases import TEXT_IDS, Case, Collator, labelled, load_model, precision, with_images
from transformers import AutoConfig, Trainer, TrainerCallback, TrainingArguments, set_seed

from odb_factory import enable_odb

TOKEN_BUDGET, MAX_PATCHES = 120, 200
NUM_EVAL_ROWS = 5
EVERY = 2
"""Optimizer steps between two evaluations, and between two checkpoints."""
STOCK, ODB = "stock", "odb"
RESUMED = (1, 4, 6)
"""Optimizer steps of two epochs of four: in the middle of either, and between them."""
EXACT = (
    "global_step",
    "max_steps",
    "num_train_epochs",
    "epoch",
    "total_flos",
    "num_input_tokens_seen",
    "train_batch_size",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "best_global_step",
)
"""Fields of a `trainer_state.json` that must be the same to the last digit."""


@dataclass(frozen=True)
class Training:
    """What both do. rows: `text`; `leading`, the first label of a row carries loss; `mixed`, some rows have images and
    some have none. more: samples of the last optimizer step of an epoch.
    """

    model: str = "text"
    rows: str = "text"
    batch: int = 2
    accumulation: int = 2
    steps_an_epoch: int = 3
    more: int = 0
    dtype: str = "float32"
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    block: dict[str, Any] = field(default_factory=dict, hash=False)

    def global_batch_size(self, world_size: int) -> int:
        return self.batch * self.accumulation * world_size

    def num_rows(self, world_size: int) -> int:
        return self.steps_an_epoch * self.global_batch_size(world_size) + self.more

    @property
    def case(self) -> Case:
        return Case(self.model, self.dtype, self.accumulation)


# The rows


def make_row(training: Training, config: Any, number: int) -> dict[str, Any]:
    """Each with its own length, and its own share of supervised tokens."""
    rng = random.Random(number)
    ids = [rng.randrange(TEXT_IDS) for _ in range(4 + number * 37 % 40)]
    images = rng.choice((0, 0, 1, 2)) if training.rows == "mixed" else 0
    ids, media = with_images(ids, images, rng, config)
    supervised = len(ids) if training.rows == "leading" and number % 2 else max(1, int(rng.random() * (len(ids) - 1)))
    return labelled(ids, supervised) | media


# A training


class Recorder(TrainerCallback):
    """What other callbacks see of the training at its begin."""

    begin: dict[str, Any]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        keys = ("gradient_accumulation_steps", "per_device_train_batch_size")
        self.begin = {key: getattr(args, key) for key in keys} | {
            "max_steps": state.max_steps,
            "num_train_epochs": state.num_train_epochs,
        }


def train_all(rank: int, trainings: list[dict[str, Any]], models: dict[str, str], output_dir: str) -> int:
    """Both kinds of every training; their files are in `output_dir`/number/kind. Returns how many trainings."""
    if dist.get_world_size() > 1:
        os.environ["LOCAL_RANK"] = str(rank)
    for number, fields in enumerate(trainings):
        training = Training(**fields)
        for kind in (STOCK, ODB):
            train(training, models[training.model], Path(output_dir, str(number), kind), odb=kind == ODB)
            gc.collect()
    return len(trainings)


def resume_all(rank: int, training: dict[str, Any], model: str, source: str, output_dir: str) -> list[int]:
    """Go on with odb from the checkpoints RESUMED of `source`; those of step k into `output_dir`/k."""
    if dist.get_world_size() > 1:
        os.environ["LOCAL_RANK"] = str(rank)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # not cpu:0, as which torch cannot load the optimizer
    return resume_from_each(Training(**training), model, Path(source), Path(output_dir))


def resume_from_each(training: Training, model: str, source: Path, output_dir: Path) -> list[int]:
    """The first of these saves checkpoints of its own."""
    steps = [step for step in RESUMED if (source / f"checkpoint-{step}").exists()]
    for step in steps:
        saves = "steps" if step == steps[0] else "no"
        again = dataclasses.replace(training, arguments=training.arguments | {"save_strategy": saves})
        train(again, model, output_dir / str(step), odb=True, resume=source / f"checkpoint-{step}")
        gc.collect()
    return steps


def train(training: Training, path: str, folder: Path, *, odb: bool, resume: Path | None = None) -> Trainer:
    """One training in this process, which may be one of several ranks."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    set_seed(0)
    model, config, recorder = load_model(training.case, path), AutoConfig.from_pretrained(path), Recorder()
    rows = [make_row(training, config, number) for number in range(training.num_rows(world_size) + NUM_EVAL_ROWS)]
    with precision(training.dtype):
        arguments = {
            "use_cpu": True,
            "per_device_train_batch_size": training.batch,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": training.accumulation,
            "num_train_epochs": 3,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": EVERY,
            "save_strategy": "steps",
            "save_steps": EVERY,
            "load_best_model_at_end": True,
            "include_num_input_tokens_seen": "all",
            "report_to": "none",
            "disable_tqdm": True,
            "remove_unused_columns": False,
            "dataloader_pin_memory": False,
        }
        trainer = Trainer(
            model=model,
            args=TrainingArguments(output_dir=str(folder), **arguments | training.arguments),
            train_dataset=rows[:-NUM_EVAL_ROWS],
            eval_dataset=rows[-NUM_EVAL_ROWS:],
            data_collator=Collator(model, config),
            callbacks=[recorder, TrainingRecord(f"{folder}_record")],
        )
        if odb:
            block = {"token_budget": TOKEN_BUDGET, "audit": True}
            if training.model == "vl":
                block["max_patches"] = MAX_PATCHES
            enable_odb(trainer, **block | training.block)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    seen = {"begin": recorder.begin, "after": trainer.args.gradient_accumulation_steps}
    folder.with_name(f"{folder.name}_seen.{rank}").write_text(json.dumps(seen))
    trainer.save_state()
    trainer.save_model()
    return trainer


# Comparison


def compare(folder: Path, training: Training, world_size: int) -> Deviation:
    """Asserts that what must be equal is, and measures the rest. folder: with both kinds in it."""
    ours, stock = (read(folder / kind, world_size) for kind in (ODB, STOCK))
    sizes = [training.global_batch_size(world_size)] * training.steps_an_epoch + [training.more] * (training.more > 0)
    assert [len(rows) for rows in stock.rows] == (sizes * 3)[: len(stock.rows)]
    for mine, its in zip(seen(folder / ODB, world_size), seen(folder / STOCK, world_size)):
        assert mine == its
        assert mine["after"] == training.accumulation
    for name in stock.folders:
        check_checkpoint(folder / ODB / name, folder / STOCK / name)
    return check_same_training(ours, stock)


def compare_resumed(folder: Path, step: int, stock: Path, world_size: int) -> Deviation:
    """What odb did in `folder`, from optimizer step `step` on, beside the whole of stock's training in one process."""
    ours, whole = read(folder, world_size), read(stock, 1)
    for one in (ours, whole):  # the Trainer takes `train_loss` of what it has trained since it began
        one.log[-1].pop("train_loss")
    rest = {"rows": whole.rows[step:], "learning_rates": whole.learning_rates[step:], "folders": ours.folders}
    return check_same_training(ours, dataclasses.replace(whole, **rest))


def seen(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """By other callbacks, on each rank."""
    return [json.loads(folder.with_name(f"{folder.name}_seen.{rank}").read_text()) for rank in range(world_size)]


def check_checkpoint(odb: Path, stock: Path) -> None:
    ours, theirs = (json.loads((path / "trainer_state.json").read_text()) for path in (odb, stock))
    assert {key: ours[key] for key in EXACT} == {key: theirs[key] for key in EXACT}
    assert ours["best_metric"] == pytest.approx(theirs["best_metric"], rel=RELATIVE)
    assert [entry["step"] for entry in ours["log_history"]] == [entry["step"] for entry in theirs["log_history"]]
    arguments = [torch.load(path / "training_args.bin", weights_only=False) for path in (odb, stock)]
    changed = {key for key, value in vars(arguments[0]).items() if vars(arguments[1]).get(key) != value}
    assert "gradient_accumulation_steps" not in changed and "ignore_data_skip" not in changed
