"""Trainings of a real Trainer on rows of unequal length: stock's, with odb, or stock's on given optimizer steps.

`train_all` runs them on every rank; `same_training.read` reads their output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import math
import os
import random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from distributed.ranks import run_ranks
from distributed.shims.training_record import TrainingRecord
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from training import toy_training
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Trainer, set_seed
from transformers.integrations import unset_hf_deepspeed_config

from odb_factory import ODBError, enable_odb

IGNORE = -100
STOCK, ODB = "stock", "odb"
BLOCK = {"token_budget": 96, "max_patches": 120, "buffer_size": 12, "audit": True}
NUM_EVAL_ROWS = 5
LIMIT_S = 400
PATCH_VALUES = 3 * 2 * 16 * 16
TEXT_IDS = 4000
"""Ids of text are below, ids of special tokens are not."""
SGD = {"optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "max_grad_norm": 1e9}
"""The weights show the gradient itself."""


@dataclass(frozen=True)
class Training:
    """The settings of a training of any kind.

    rows: of the training set, over all ranks. batch: rows of a micro-batch of stock. unequal: number of ranks; rank r
    has rows 1 / (2r + 1) as long, in their order, so that with `fill` all ranks but the first end early.
    loss: a `compute_loss_func`, by its name in `LOSSES`. zero: the stage of DeepSpeed. memory: tokens that each rank
    holds in the `phase` (none: any number).
    """

    model: str = "text"
    rows: int = 42
    batch: int = 1
    accumulation: int = 2
    unequal: int = 0
    loss: str = ""
    lora: bool = False
    zero: int = 0
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    block: dict[str, Any] = field(default_factory=dict, hash=False)
    memory: Sequence[int] = ()
    phase: str = "forward"
    kinds: Sequence[str] = (STOCK, ODB)


# Rows and models


def make_row(number: int, training: Training, config: Any) -> dict[str, Any]:
    """Rows differ in length and in their share of supervised tokens, from one token to all."""
    rng, shorter = random.Random(number), 1 + 2 * (number % max(training.unequal, 1))
    ids = [rng.randrange(TEXT_IDS) for _ in range(max((10 + number * 37 % 40) // shorter, 2))]
    # ZeRO-3 gathers parameters, so all its micro-batches need an image.
    images = rng.choice((1, 1, 2, int(training.zero > 0))) if training.model == "vl" else 0
    grids = [[1, 2 * rng.randint(1, 2), 2 * rng.randint(1, 3)] for _ in range(images)]
    for _, height, width in grids:
        image = [config.image_token_id] * (height * width // 4)
        ids = [*ids[:2], config.vision_start_token_id, *image, config.vision_end_token_id, *ids[2:]]
    supervised = max(1, int(rng.random() ** 2 * len(ids)))
    labels = [IGNORE] * (len(ids) - supervised) + ids[-supervised:]
    row = {"input_ids": ids, "labels": [IGNORE if label >= TEXT_IDS else label for label in labels]}
    row["labels"][-1] = ids[-1]
    if grids:
        generator = torch.Generator().manual_seed(sum(ids))
        patches = sum(height * width for _, height, width in grids)
        row["pixel_values"] = torch.randn(patches, PATCH_VALUES, generator=generator)
        row["image_grid_thw"] = torch.tensor(grids)
    return row


class Collator:
    """Makes a padded batch for the model."""

    def __init__(self, model: torch.nn.Module, config: Any):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        can_mark = "mm_token_type_ids" in inspect.signature(base.forward).parameters
        self.image_token = config.image_token_id if can_mark else None

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = toy_training.collate(rows)
        if self.image_token is not None:
            batch["mm_token_type_ids"] = (batch["input_ids"] == self.image_token).int()
        return batch


def load_model(training: Training, path: str | Path) -> Any:
    """The model that every process starts from; with LoRA, both adapter matrices are random."""
    loader = AutoModelForImageTextToText if training.model == "vl" else AutoModelForCausalLM
    model = loader.from_pretrained(path, dtype=torch.float32)
    if training.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        config = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(model, config)
    return model


def means(outputs: Any, labels: Tensor, num_items_in_batch: Any = None, reduction: str = "mean") -> Tensor:
    """The mean over the supervised tokens of a batch, like LLaMA-Factory's `asft_loss_func`."""
    logits, labels = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(logits, labels, ignore_index=IGNORE, reduction=reduction)


def divides(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The sum over the supervised tokens of a batch, divided by `num_items_in_batch`."""
    return means(outputs, labels, reduction="sum") / num_items_in_batch


LOSSES = {"divides": divides, "means": means}


class Memory:
    """Simulates the memory of an accelerator: raises torch's own error if the embeddings have more tokens than `most`,
    in the forward, or in the backward after all other gradients.

    spares_recomputed: a forward that the backward computes again may have any number of tokens. fails: number of
    errors. leaked: how often the tensors of a failed attempt were in memory when the next forward began.
    """

    def __init__(self, model: Any, most: float, phase: str = "forward", *, spares_recomputed: bool = False):
        self.most, self.phase, self.spares_recomputed = most, phase, spares_recomputed
        self.fails = self.leaked = 0
        self._body = model.get_decoder()
        self._failed: weakref.ref[Tensor] | None = None
        model.get_input_embeddings().register_forward_hook(self._embedded)

    def _embedded(self, module: Any, inputs: Any, output: Tensor) -> None:
        self.leaked += self._failed is not None and self._failed() is not None
        self._failed = None
        is_spared = self.spares_recomputed and self._body.gradient_checkpointing
        if output.shape[:-1].numel() <= self.most or is_spared:
            return
        self._failed = weakref.ref(output)
        if self.phase == "forward":
            self._run_out(output)
        elif torch.is_grad_enabled():
            output.register_hook(self._run_out)

    def _run_out(self, _: Tensor) -> None:
        self.fails += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of ...")


# Trainings


def zero(stage: int) -> dict[str, Any]:
    """The configuration of a stage of DeepSpeed."""
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    engine = {"stage": stage, "overlap_comm": False, "stage3_gather_16bit_weights_on_model_save": stage == 3}
    return dict.fromkeys(auto, "auto") | {"zero_allow_untested_optimizer": True, "zero_optimization": engine}


def make(training: Training, path: str | Path, folder: Path, kind: type = Trainer, **changes: Any) -> Any:
    """Stock's Trainer. changes: to its arguments and callbacks."""
    set_seed(0)
    model, config = load_model(training, path), AutoConfig.from_pretrained(path)
    rows = [make_row(number, training, config) for number in range(training.rows + NUM_EVAL_ROWS)]
    arguments = {
        "use_cpu": not training.zero,  # with `use_cpu` transformers leaves DeepSpeed out of the process group
        "deepspeed": zero(training.zero) if training.zero else None,
        "per_device_train_batch_size": training.batch,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": training.accumulation,
        "num_train_epochs": 2,
        "remove_unused_columns": False,
        "eval_dataset": rows[-NUM_EVAL_ROWS:],
        "compute_loss_func": LOSSES.get(training.loss),
    }
    return toy_training.make(
        model,
        folder,
        rows[:-NUM_EVAL_ROWS],
        trainer_class=kind,
        collate=Collator(model, config),
        **arguments | training.arguments | changes,
    )


def make_odb(training: Training, path: str | Path, folder: Path, kind: type | None = None, **changes: Any) -> Any:
    """A Trainer with odb. changes: as in `make`, and `meter`, a memory meter."""
    meter = changes.pop("meter", None)
    kind = kind or (toy_training.Sequential if training.unequal else Trainer)  # rank r gets its own rows
    trainer = make(training, path, folder, kind, **changes)
    return enable_odb(trainer, memory_meter=meter, **BLOCK | training.block)


def replay(training: Training, path: str, folder: Path, batches: list[list[int]]) -> None:
    """Train in this process, each optimizer step on one batch of these rows, on the mean over its tokens."""

    class InBatches(Trainer):
        def get_train_dataloader(self) -> DataLoader:
            return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)

    once = {"num_train_epochs": 1, "gradient_accumulation_steps": 1, "deepspeed": None, "use_cpu": True}
    trainer = make(dataclasses.replace(training, loss="means"), path, folder, InBatches, **once)
    trainer.train()
    trainer.save_state()
    trainer.save_model()


def train(training: Training, path: str, folder: Path, kind: str, resume: Path | None = None) -> dict[str, Any]:
    """Train in this process, which may be a rank. Returns the error that ended the training, and counts of `Memory`."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    # The record would also count what a restarted step computes again.
    callbacks = [] if training.memory else [TrainingRecord(f"{folder}_record")]
    trainer = (make_odb if kind == ODB else make)(training, path, folder, callbacks=callbacks)
    memory = Memory(trainer.model, training.memory[rank] if training.memory else math.inf, training.phase)
    ended: dict[str, Any] = {"error": None, "cause": None}
    try:
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        trainer.save_state()
        trainer.save_model()
    except ODBError as error:
        ended = {"error": str(error), "cause": type(error.__cause__).__name__}
    return ended | {"fails": memory.fails, "leaked": memory.leaked}


def train_all(rank: int, trainings: list[dict[str, Any]], models: dict[str, str], output_dir: str) -> list[Any]:
    """Train all kinds of every training, into `output_dir`/number/kind. Returns the result of the last kind of each."""
    if dist.get_world_size() > 1:
        os.environ["LOCAL_RANK"] = str(rank)
    ended = []
    for number, fields in enumerate(trainings):
        training = Training(**fields)
        for kind in training.kinds:
            with deepspeed_forgotten():
                result = train(training, models[training.model], Path(output_dir, str(number), kind), kind)
            gc.collect()
        ended.append(result)
    return ended


@contextlib.contextmanager
def deepspeed_forgotten() -> Iterator[None]:
    """Afterwards the process has no DeepSpeed configuration, so that the next Trainer sees none."""
    before = dict(os.environ)
    yield
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(before)


def on_ranks(
    trainings: Mapping[str, Training], models: dict[str, str], folder: Path, world_size: int = 2
) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """Train all in one launch, which takes long. Returns the folder of each, and its results on all ranks."""
    outcomes = run_ranks(
        "training.trainings:train_all",
        folder,
        world_size=world_size,
        limit_s=LIMIT_S,
        may_fail=any(training.memory for training in trainings.values()),
        trainings=[dataclasses.asdict(training) for training in trainings.values()],
        models=models,
        output_dir=str(folder),
    )
    values = zip(*(outcome.value for outcome in outcomes))
    return {name: (folder / str(number), list(ended)) for number, (name, ended) in enumerate(zip(trainings, values))}
