"""The same training by the stock Trainer and by one with `enable_odb`, and how far they are apart.

`train_all` runs on every rank and writes what each training did; `compare` reads that.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import read_jsonl
from training.cases import IGNORE, PATCH_VALUES, Case, Collator, load_model, precision
from transformers import AutoConfig, Trainer, TrainerCallback, TrainingArguments, set_seed

from odb_factory import enable_odb

TOKEN_BUDGET, MAX_PATCHES = 120, 200
NUM_EVAL_ROWS = 5
EVERY = 2
"""Optimizer steps between two evaluations, and between two checkpoints."""
STOCK, ODB = "stock", "odb"
TIMED = ("_runtime", "_per_second", "odb/")
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
    """What both do. rows: `text`; `leading`, the first label of a row carries loss; `images`; `mixed`, some rows have
    images and some have none.

    more: samples of the last optimizer step of an epoch. loss_scaling: of odb. engine: "", or "zero1" to "zero3".
    """

    model: str = "text"
    rows: str = "text"
    batch: int = 2
    accumulation: int = 2
    steps_an_epoch: int = 3
    more: int = 0
    dtype: str = "float32"
    loss_scaling: str = "stock"
    lora: bool = False
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    block: dict[str, Any] = field(default_factory=dict, hash=False)

    def global_batch_size(self, world_size: int) -> int:
        return self.batch * self.accumulation * world_size

    def num_rows(self, world_size: int) -> int:
        return self.steps_an_epoch * self.global_batch_size(world_size) + self.more

    @property
    def case(self) -> Case:
        return Case(self.model, self.dtype, self.accumulation, lora=self.lora)


# The rows


def make_rows(training: Training, config: Any, count: int, first: int = 0) -> list[dict[str, Any]]:
    return [make_row(training, config, number) for number in range(first, first + count)]


def make_row(training: Training, config: Any, number: int) -> dict[str, Any]:
    """Each with its own length, and its own share of supervised tokens."""
    rng = random.Random(number)
    ids = [rng.randrange(4000) for _ in range(4 + number * 37 % 40)]
    images = {"images": rng.choice((1, 2)), "mixed": rng.choice((0, 0, 1, 2))}.get(training.rows, 0)
    grids = [[1, 2 * rng.randint(1, 2), 2 * rng.randint(1, 3)] for _ in range(images)]
    for _, height, width in grids:
        image = [config.image_token_id] * (height * width // 4)
        ids = [*ids[:2], config.vision_start_token_id, *image, config.vision_end_token_id, *ids[2:]]
    supervised = len(ids) if training.rows == "leading" and number % 2 else max(1, int(rng.random() * (len(ids) - 1)))
    labels = [IGNORE] * (len(ids) - supervised) + ids[-supervised:]
    labels = [IGNORE if label >= 4000 else label for label in labels]
    row: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if grids:
        generator = torch.Generator().manual_seed(number)
        patches = sum(height * width for _, height, width in grids)
        row["pixel_values"] = torch.randn(patches, PATCH_VALUES, generator=generator, dtype=torch.float32)
        row["image_grid_thw"] = torch.tensor(grids)
    return row


# A training


class ReadsRows(Trainer):
    """Notes which rows of the dataset each optimizer step was given on this rank."""

    seen: dict[int, list[int]]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        known = {tuple(row["input_ids"]): number for number, row in enumerate(self.train_dataset)}
        if "attention_mask" in inputs:
            samples = [ids[mask.bool()] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"])]
        else:  # flat: positions restart with every sample
            starts = (inputs["position_ids"][0] == 0).nonzero().flatten().tolist()
            samples = inputs["input_ids"][0].tensor_split(starts[1:])
        for ids in samples:
            self.seen.setdefault(self.state.global_step, []).append(known[tuple(ids.tolist())])
        return super().training_step(model, inputs, *args, **kwargs)


class Recorder(TrainerCallback):
    """What other callbacks see: of the training at its begin, and at every optimizer step."""

    def __init__(self) -> None:
        self.begin: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        keys = ("gradient_accumulation_steps", "per_device_train_batch_size")
        self.begin = {key: getattr(args, key) for key in keys} | {
            "max_steps": state.max_steps,
            "num_train_epochs": state.num_train_epochs,
        }

    def on_step_begin(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any) -> None:
        self.steps.append({"learning_rate": lr_scheduler.get_last_lr()})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps[-1] |= {
            "step": state.global_step,
            "epoch": state.epoch,
            "num_input_tokens_seen": state.num_input_tokens_seen,
            "stops": (control.should_epoch_stop, control.should_training_stop),
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
    """Go on with odb from every checkpoint of `source` but the last; those of step k into `output_dir`/k."""
    if dist.get_world_size() > 1:
        os.environ["LOCAL_RANK"] = str(rank)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # not cpu:0, as which torch cannot load the optimizer
    return resume_from_each(Training(**training), model, Path(source), Path(output_dir))


def resume_from_each(training: Training, model: str, source: Path, output_dir: Path) -> list[int]:
    """The first of these saves checkpoints of its own."""
    steps = sorted(int(path.name.rpartition("-")[2]) for path in source.glob("checkpoint-*"))[:-1]
    for step in steps:
        saves = "steps" if step == steps[0] else "no"
        again = dataclasses.replace(training, arguments=training.arguments | {"save_strategy": saves})
        train(again, model, output_dir / str(step), odb=True, resume=source / f"checkpoint-{step}")
        gc.collect()
    return steps


def train(
    training: Training,
    path: str,
    folder: Path,
    *,
    odb: bool,
    resume: Path | None = None,
    trainer_class: type[Trainer] = ReadsRows,
    callbacks: Sequence[TrainerCallback] = (),
) -> Trainer:
    """One training in this process, which may be one of several ranks."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    set_seed(0)
    model, config, recorder = load_model(training.case, path), AutoConfig.from_pretrained(path), Recorder()
    rows = make_rows(training, config, training.num_rows(world_size) + NUM_EVAL_ROWS)
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
        trainer = trainer_class(
            model=model,
            args=TrainingArguments(output_dir=str(folder), **arguments | training.arguments),
            train_dataset=rows[:-NUM_EVAL_ROWS],
            eval_dataset=rows[-NUM_EVAL_ROWS:],
            data_collator=Collator(model, config),
            callbacks=[recorder, *callbacks],
        )
        trainer.seen = {}
        if odb:
            block = {"token_budget": TOKEN_BUDGET, "loss_scaling": training.loss_scaling, "audit": True}
            if training.model == "vl":
                block["max_patches"] = MAX_PATCHES
            enable_odb(trainer, **block | training.block)
        metrics = trainer.train(resume_from_checkpoint=None if resume is None else str(resume)).metrics
    record = {
        "begin": recorder.begin,
        "steps": recorder.steps,
        "seen": [trainer.seen.get(step, []) for step in range(trainer.state.global_step)],
        "metrics": untimed(metrics),
        "history": [untimed(entry) for entry in trainer.state.log_history],
        "accumulation_after": trainer.args.gradient_accumulation_steps,
    }
    (folder / f"record{rank}.json").write_text(json.dumps(record))
    if rank == 0:
        torch.save({name: tensor.double() for name, tensor in model.state_dict().items()}, folder / "weights.pt")
    return trainer


def untimed(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if not any(part in key for part in TIMED)}


# Comparison


@dataclass(frozen=True)
class Apart:
    """Largest relative differences: of logged losses, gradient norms and evaluation losses, and of the weights at the
    end (norm of the difference over their norm). steps, micro_batches: of odb on each rank.
    """

    loss: float
    grad_norm: float
    eval_loss: float
    weights: float
    steps: int
    micro_batches: int

    @property
    def most(self) -> float:
        return max(self.loss, self.grad_norm, self.eval_loss, self.weights)

    def __str__(self) -> str:
        figures = (self.loss, self.grad_norm, self.eval_loss, self.weights)
        return " | ".join([str(self.steps), str(self.micro_batches), *(f"{figure:.1e}" for figure in figures)])


def compare(folder: Path, training: Training, world_size: int) -> Apart:
    """Asserts that what must be equal is, and measures the rest. folder: with both kinds in it."""
    stock, odb = (folder / kind for kind in (STOCK, ODB))
    theirs, ours = (read_records(kind, world_size) for kind in (stock, odb))
    expected = sorted_rows([record["seen"] for record in theirs])
    assert ids_of_audits(odb, world_size) == expected, "I9: the rows of each optimizer step"
    sizes = [training.global_batch_size(world_size)] * training.steps_an_epoch + [training.more] * (training.more > 0)
    assert [len(ids) for ids in expected] == (sizes * 3)[: len(expected)]
    for mine, other in zip(ours, theirs):
        assert mine["begin"] == other["begin"]
        assert mine["steps"] == other["steps"], "learning rate, epoch, tokens and what stops, at every optimizer step"
        assert mine["accumulation_after"] == training.accumulation
    losses: dict[str, float] = {}
    check_history(ours[0]["history"], theirs[0]["history"], losses)
    close(ours[0]["metrics"], theirs[0]["metrics"], losses)
    check_checkpoints(odb, stock, losses)
    return Apart(
        loss=max(losses.get("loss", 0.0), losses.get("train_loss", 0.0)),
        grad_norm=losses.get("grad_norm", 0.0),
        eval_loss=max(losses.get("eval_loss", 0.0), losses.get("best_metric", 0.0)),
        weights=apart(torch.load(odb / "weights.pt"), torch.load(stock / "weights.pt")),
        steps=len(expected),
        micro_batches=len(read_jsonl(odb / "odb_audit_rank0.jsonl")),
    )


def compare_resumed(folder: Path, step: int, stock: Path, world_size: int) -> float:
    """The largest relative difference of what odb did in `folder`, from optimizer step `step` on, from the whole of
    stock's training in one process."""
    (theirs,), ours = read_records(stock, 1), read_records(folder, world_size)
    assert ids_of_audits(folder, world_size) == sorted_rows([theirs["seen"]])[step:], "I9"
    for mine in ours:
        assert mine["steps"] == theirs["steps"][step:]
    losses: dict[str, float] = {}
    # The Trainer takes `train_loss` of what it has trained since it began.
    histories = [
        [{key: value for key, value in entry.items() if key != "train_loss"} for entry in record["history"]]
        for record in (ours[0], theirs)
    ]
    check_history(*histories, losses)
    weights = apart(torch.load(folder / "weights.pt"), torch.load(stock / "weights.pt"))
    return max(*losses.values(), weights)


def read_records(folder: Path, world_size: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"record{rank}.json").read_text()) for rank in range(world_size)]


def sorted_rows(of_ranks: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(row for rows in ranks for row in rows) for ranks in zip(*of_ranks, strict=True)]


def ids_of_audits(folder: Path, world_size: int) -> list[list[int]]:
    """The rows of each optimizer step, of all ranks; of steps that were taken twice the later ones."""
    steps: dict[int, dict[int, list[int]]] = {}
    for rank in range(world_size):
        before = 0
        for line in read_jsonl(folder / f"odb_audit_rank{rank}.jsonl"):
            number = line["optimizer_step"]
            if number != before:
                steps.setdefault(number, {})[rank] = []
            steps[number][rank].extend(line["ids"])
            before = number
    return [sorted(row for rows in steps[number].values() for row in rows) for number in sorted(steps)]


def check_history(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], losses: dict[str, float]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        close(mine, other, losses)


def close(mine: dict[str, Any], other: dict[str, Any], losses: dict[str, float]) -> None:
    """Everything but losses and norms is equal; of these the largest relative difference is noted."""
    assert mine.keys() == other.keys()
    for key, value in other.items():
        if key.endswith(("loss", "grad_norm", "best_metric")):
            losses[key] = max(losses.get(key, 0.0), abs(mine[key] - value) / abs(value))
        else:
            assert mine[key] == value, key


def check_checkpoints(odb: Path, stock: Path, losses: dict[str, float]) -> None:
    names = sorted(path.name for path in stock.glob("checkpoint-*"))
    assert sorted(path.name for path in odb.glob("checkpoint-*")) == names
    for name in names:
        mine, other = (json.loads((kind / name / "trainer_state.json").read_text()) for kind in (odb, stock))
        check_history([untimed(e) for e in mine["log_history"]], [untimed(e) for e in other["log_history"]], losses)
        close({key: mine[key] for key in EXACT}, {key: other[key] for key in EXACT}, losses)
        arguments = [torch.load(kind / name / "training_args.bin", weights_only=False) for kind in (odb, stock)]
        changed = {key for key, value in vars(arguments[0]).items() if vars(arguments[1]).get(key) != value}
        assert "gradient_accumulation_steps" not in changed and "ignore_data_skip" not in changed


def apart(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert mine.keys() == other.keys()
    difference = torch.stack([(mine[name] - tensor).norm() for name, tensor in other.items()]).norm()
    return float(difference / torch.stack([tensor.norm() for tensor in other.values()]).norm())
