"""What a training of the gradient tests is made of: its case, its model, its rows. The same for ranks and reference."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

IGNORE = -100
LEARNING_RATE = 0.05
EPOCHS = 2
TOKEN_BUDGET, MAX_PATCHES, BUFFER_SIZE = 96, 120, 12
PATCH_VALUES = 3 * 2 * 16 * 16
TEXT_IDS = 4000
"""Ids of special tokens are not below it."""


@dataclass(frozen=True)
class Case:
    """One training. `arguments`: changes to the `TrainingArguments`; `zero`: the stage of DeepSpeed, 0 for none.

    `own_loss`: a `compute_loss_func` that divides by the `num_items_in_batch` that it is given ("divides"), or does not
    look at it ("means"). keep: rows of a micro-batch of stock, whose optimizer steps are kept; 0: they are filled.
    """

    model: str
    dtype: str
    accumulation: int
    zero: int = 0
    loss_scaling: str = "exact"
    lora: bool = False
    own_loss: str = ""
    keep: int = 0
    layout: str = "padded"
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        changes = "-".join(f"{key}={value}" for key, value in self.arguments.items())
        options = ("-lora" if self.lora else "") + self.own_loss
        options += f"-keep{self.keep}" if self.keep else ""
        options += "-flat" if self.layout == "flat" else ""
        return f"{self.model}-{self.dtype}-ga{self.accumulation}-zero{self.zero}-{self.loss_scaling}{options}-{changes}"


# The model


def load_model(case: Case, path: str | Path) -> torch.nn.Module:
    """The model as every process starts from it; with LoRA, both adapter matrices are random."""
    loader = AutoModelForImageTextToText if case.model == "vl" else AutoModelForCausalLM
    model = loader.from_pretrained(path, dtype=torch.float32)
    if case.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        config = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(model, config)
    return model.to(getattr(torch, case.dtype))


class _Widened(TorchFunctionMode):
    """Every cast to float32 in the model's Python code is one to float64."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in (torch.Tensor.view, torch.empty):  # of bytes as numbers; a tensor is copied or unpickled
            return function(*args, **(kwargs or {}))
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        widen = {torch.float32: torch.float64}
        args = tuple(widen.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args)
        kwargs = {
            key: widen.get(arg, arg) if isinstance(arg, torch.dtype) else arg for key, arg in (kwargs or {}).items()
        }
        return function(*args, **kwargs)


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Under "float64" norms, softmax and loss, which transformers computes in float32, are in float64 as well."""
    if dtype != "float64":
        yield
        return
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


# The rows


def make_rows(case: Case, path: str | Path, world_size: int) -> list[dict[str, Any]]:
    """Rows in training order; row i goes to rank i % world_size.

    Each has its own length and its own share of supervised tokens, from one to all. The rows of rank r are 1 / (2r + 1)
    as long, so all ranks but rank 0 have given out their rows while rank 0 still fills micro-steps.
    """
    config = AutoConfig.from_pretrained(path)
    per_rank = 8 * case.accumulation + 6 if case.model == "vl" else 10 * case.accumulation + 1
    return [_row(i, 1 + 2 * (i % world_size), case, config) for i in range(per_rank * world_size)]


def _row(number: int, shorter: int, case: Case, config: Any) -> dict[str, Any]:
    rng = random.Random(number)
    ids = [rng.randrange(TEXT_IDS) for _ in range((10 + number * 37 % 40) // shorter)]
    # Without ZeRO some rows have no image. ZeRO-3 gathers parameters, so there all groups need one.
    images = rng.choice((1, 1, 2, int(case.zero > 0))) if case.model == "vl" else 0
    ids, media = with_images(ids, images, rng, config)
    row = labelled(ids, max(1, int(rng.random() ** 2 * len(ids))))
    row["labels"][-1] = ids[-1]
    return row | media


def with_images(ids: list[int], images: int, rng: random.Random, config: Any) -> tuple[list[int], dict[str, Any]]:
    """The row with so many images of random sizes in it, and what the model takes beside its ids."""
    grids = [[1, 2 * rng.randint(1, 2), 2 * rng.randint(1, 3)] for _ in range(images)]
    for _, height, width in grids:
        image = [config.image_token_id] * (height * width // 4)
        ids = [*ids[:2], config.vision_start_token_id, *image, config.vision_end_token_id, *ids[2:]]
    if not grids:
        return ids, {}
    patches = sum(height * width for _, height, width in grids)
    generator = torch.Generator().manual_seed(sum(ids))
    pixels = torch.randn(patches, PATCH_VALUES, generator=generator, dtype=torch.float32)
    return ids, {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def labelled(ids: list[int], supervised: int) -> dict[str, Any]:
    """The last `supervised` tokens have labels, those of images none."""
    labels = [IGNORE] * (len(ids) - supervised) + ids[-supervised:]
    return {"input_ids": ids, "labels": [IGNORE if label >= TEXT_IDS else label for label in labels]}


class Collator:
    """Rows to one padded batch for the model."""

    def __init__(self, model: torch.nn.Module, config: Any):
        self.image_token = getattr(config, "image_token_id", None)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.wants_types = "mm_token_type_ids" in inspect.signature(base.forward).parameters

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)

        def pad(lists: list[list[int]], filler: int) -> torch.Tensor:
            return torch.tensor([items + [filler] * (length - len(items)) for items in lists])

        batch = {
            "input_ids": pad([row["input_ids"] for row in rows], 0),
            "attention_mask": pad([[1] * len(row["input_ids"]) for row in rows], 0),
            "labels": pad([row["labels"] for row in rows], IGNORE),
        }
        if self.image_token is not None and self.wants_types:
            batch["mm_token_type_ids"] = (batch["input_ids"] == self.image_token).int()
        for key in ("pixel_values", "image_grid_thw"):
            values = [row[key] for row in rows if key in row]
            if values:
                batch[key] = torch.cat(values)
        return batch
