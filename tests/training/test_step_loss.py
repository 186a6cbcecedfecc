"""What is logged as the loss of an optimizer step whose micro-batches have losses in bfloat16, or one of NaN."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from toy import Rows, item, pad
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from odb_factory import enable_odb

STEPS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 3}


def losses(model: Path, folder: Path, loss_of: Any, dtype: torch.dtype, odb: bool, **changes: Any) -> list[float]:
    """As the Trainer logs them. loss_of: its `compute_loss_func`."""
    dataset = changes.pop("dataset", Rows())
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=dtype),
        args=TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            **STEPS | changes,
        ),
        train_dataset=dataset,
        data_collator=pad,
        compute_loss_func=loss_of,
    )
    if odb:
        enable_odb(trainer, token_budget=64)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def token_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """In the dtype of the logits."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def test_losses_in_bfloat16_add_up_in_float32(tiny_text: Path, tmp_path: Path) -> None:
    """Stock adds every micro-batch to a float32 number; a sum in bfloat16 would have 8 bits."""
    stock, ours = (losses(tiny_text, tmp_path, token_mean, torch.bfloat16, odb) for odb in (False, True))
    assert ours == pytest.approx(stock, rel=4e-3)
    assert any(float(torch.tensor(loss).bfloat16()) != loss for loss in ours)


def test_one_loss_that_is_nan_leaves_the_others_in_the_log(tiny_text: Path, tmp_path: Path) -> None:
    """Stock leaves a micro-batch of NaN out of the logged loss, unless `logging_nan_inf_filter` is false."""

    def nan_where_row_0_is(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = token_mean(outputs, labels, num_items_in_batch)
        return loss + math.nan if (labels == item(0)["input_ids"][0]).any() else loss

    def logged(loss_of: Any, **changes: Any) -> float:
        one_step = {"max_steps": 1, "dataset": Rows(num_rows=8)}
        (loss,) = losses(tiny_text, tmp_path, loss_of, torch.float32, odb=True, **one_step | changes)
        return loss

    assert 0.2 < logged(nan_where_row_0_is) / logged(token_mean) < 0.98
    assert math.isnan(logged(nan_where_row_0_is, logging_nan_inf_filter=False))
