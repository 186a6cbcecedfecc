"""Trainings of a tiny model in this process, on rows that show their id, and what the trainings leave."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from support import read_audit
from torch.nn.utils.rnn import pad_sequence
from toy import Rows, pad
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from odb_factory import enable_odb

BLOCK = {"token_budget": 256, "buffer_size": 16, "audit": True}
FILL = BLOCK | {"global_batch_size": "fill"}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "logging_steps": 1}
    defaults |= {"save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-3, "num_train_epochs": 1}
    return TrainingArguments(**defaults | changes)


def make(
    model: Path | torch.nn.Module,
    folder: Path,
    dataset: Any = None,
    *,
    block: dict[str, Any] | None = None,
    trainer_class: type = Trainer,
    collate: Any = pad,
    dropout: float = 0.0,
    **changes: Any,
) -> Any:
    """A trainer with this block (None: stock's). changes: to the training arguments, or arguments of the Trainer."""
    extra = {
        key: changes.pop(key) for key in ("eval_dataset", "callbacks", "compute_loss_func", "odb") if key in changes
    }
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, attention_dropout=dropout)
    trainer = trainer_class(
        model=model,
        args=arguments(folder, **changes),
        train_dataset=Rows() if dataset is None else dataset,
        data_collator=collate,
        **extra,
    )
    return trainer if block is None else enable_odb(trainer, **block)


def train(*args: Any, resume: Any = None, **changes: Any) -> Any:
    """Make a trainer and train it."""
    trainer = make(*args, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def collate(rows: list[dict[str, Any]], side: str = "right") -> dict[str, torch.Tensor]:
    """A padded batch of rows of `input_ids`, `labels` and pictures. Rows without a mask attend to all their tokens."""
    rows = [{"attention_mask": [1] * len(row["input_ids"])} | row for row in rows]

    def padded(key: str, fill: int) -> torch.Tensor:
        values = [torch.tensor(row[key]) for row in rows]
        return pad_sequence(values, batch_first=True, padding_value=fill, padding_side=side)

    batch = {key: padded(key, -100 if key == "labels" else 0) for key in ("input_ids", "labels", "attention_mask")}
    for key in ("pixel_values", "image_grid_thw"):
        if values := [row[key] for row in rows if key in row]:
            batch[key] = torch.cat(values)
    return batch


audit = read_audit


def ids(folder: Path, rank: int = 0) -> Counter:
    return Counter(row for line in audit(folder, rank) for row in line["ids"])


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def history(trainer: Trainer) -> list[tuple[float, ...]]:
    keys = ("step", "epoch", "loss", "grad_norm", "learning_rate")
    return [tuple(entry[key] for key in keys) for entry in trainer.state.log_history if "loss" in entry]


def check_same(trainer: Trainer, other: Trainer) -> None:
    """The two trainings are equal to the last bit."""
    assert history(trainer) == history(other)
    weights, others = trainer.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in others.items())


class Rates(TrainerCallback):
    """The learning rate of each optimizer step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any) -> None:
        self.rates.append(lr_scheduler.get_last_lr()[0])


class Sequential(Trainer):
    """Rows in their order."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)
