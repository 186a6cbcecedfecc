"""One rank of the gradient tests: real `transformers.Trainer`s with `enable_odb`, one after the other.

Rank 0 writes what each optimizer step did: the gradient, the parameters after it, the logged figures.
"""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import SequentialSampler
from training.cases import (
    BUFFER_SIZE,
    EPOCHS,
    IGNORE,
    LEARNING_RATE,
    MAX_PATCHES,
    TOKEN_BUDGET,
    Case,
    Collator,
    load_model,
    make_rows,
    precision,
)
from transformers import AutoConfig, Trainer, TrainerCallback, TrainingArguments, set_seed

from odb_factory import enable_odb
from odb_factory.planner import Cost

RECORD = "record.pt"


class InOrder(Trainer):
    """Rows in their order, as LLaMA-Factory's `disable_shuffling` has it, so that a rank's shard is known."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Observer:
    def __call__(self, row: dict[str, Any]) -> tuple[dict[str, Any], Cost]:
        supervised = sum(label != IGNORE for label in row["labels"][1:])
        patches = len(row.get("pixel_values", []))
        return dict(row), Cost(len(row["input_ids"]), patches, supervised, has_media=patches > 0)

    def describe(self, dataset: Any, index: int) -> str:
        return f"row {index}"


class Recorder(TrainerCallback):
    """Writes what each optimizer step did. Under DeepSpeed gradients are gone by then and only parameters are kept."""

    def __init__(self, zero: int = 0):
        self.zero = zero
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.parameters: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.zero:
            self.gradients.append(
                {
                    name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                    for name, parameter in trained(model)
                }
            )

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        whole = contextlib.nullcontext()
        if self.zero == 3:
            import deepspeed

            whole = deepspeed.zero.GatheredParameters(list(model.parameters()))
        with whole:
            self.parameters.append({name: parameter.detach().clone() for name, parameter in trained(model)})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = [entry for entry in state.log_history if "loss" in entry]
        if state.is_world_process_zero:
            record = {"gradients": self.gradients, "parameters": self.parameters, "logs": logs}
            torch.save(record, Path(args.output_dir, RECORD))


def divides(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """As functions for the Trainer are: the sum over all supervised tokens, over what they are told is their number."""
    logits, labels = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / num_items_in_batch


def means(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """As LLaMA-Factory's `asft_loss_func` is."""
    logits, labels = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE)


OWN_LOSSES = {"divides": divides, "means": means}


def trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Named parameters that are trained, by the names they have without a wrapper."""
    return [
        (name.removeprefix("module."), parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def train_all(rank: int, cases: list[dict[str, Any]], models: dict[str, str], output_dir: str) -> int:
    """Train every case; the files of case k are in `output_dir`/k. Returns how many."""
    if dist.get_world_size() > 1:
        os.environ["LOCAL_RANK"] = str(rank)
    for number, fields in enumerate(cases):
        case = Case(**fields)
        model = load_model(case, models[case.model])
        with precision(case.dtype):
            train(case, model, models[case.model], Path(output_dir, str(number)))
        gc.collect()
    return len(cases)


def zero(stage: int, **options: Any) -> dict[str, Any]:
    """A configuration of DeepSpeed."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage} | options,
    }


def training_arguments(output_dir: Path, **changes: Any) -> TrainingArguments:
    defaults = {
        "use_cpu": True,
        "num_train_epochs": EPOCHS,
        "optim": "sgd",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "data_seed": 1,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(output_dir), **defaults | changes)


def make(case: Case, model: torch.nn.Module, path: str, output_dir: Path, world_size: int, **changes: Any) -> InOrder:
    """A Trainer of stock. changes: to its arguments."""
    set_seed(0)
    steps = {"per_device_train_batch_size": case.keep or 1, "gradient_accumulation_steps": case.accumulation}
    return InOrder(
        model=model,
        args=training_arguments(output_dir, **steps | case.arguments | changes),
        train_dataset=make_rows(case, path, world_size),
        data_collator=Collator(model, AutoConfig.from_pretrained(path)),
        callbacks=[Recorder(case.zero or int("deepspeed" in changes))],
        compute_loss_func=OWN_LOSSES.get(case.own_loss),
    )


def switch_on(trainer: InOrder, case: Case, **block: Any) -> InOrder:
    config = {
        "token_budget": TOKEN_BUDGET,
        "max_patches": MAX_PATCHES,
        "buffer_size": BUFFER_SIZE,
        "loss_scaling": case.loss_scaling,
        "global_batch_size": "keep" if case.keep else "fill",
        "layout": case.layout,
        "audit": True,
    }
    return enable_odb(trainer, observer=Observer(), **config | block)


def train(case: Case, model: torch.nn.Module, path: str, output_dir: Path) -> None:
    engine: dict[str, Any] = {}
    if case.zero:  # with `use_cpu` transformers leaves DeepSpeed out of the process group
        config = zero(case.zero, overlap_comm=False, contiguous_gradients=True)
        engine = {"use_cpu": False, "deepspeed": config}
    trainer = make(case, model, path, output_dir, dist.get_world_size(), **engine)
    args = trainer.args
    switch_on(trainer, case, balance=bool(case.keep)).train()
    # What was asked for was in use.
    assert ("liger" in model.forward.__module__) == bool(args.use_liger_kernel)
    wrapped = trainer.model_wrapped
    if case.zero:
        assert wrapped.zero_optimization_stage() == case.zero
    elif dist.get_world_size() > 1:
        assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
    else:
        assert wrapped is model
