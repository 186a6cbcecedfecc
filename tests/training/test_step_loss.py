"""The logged loss of an optimizer step with losses in bfloat16, of routers, or of NaN."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Rows, item
from training.flat_models import COMMON, HEAD, MOE
from training.toy_training import losses, make, train
from training.trainings import divides
from transformers import AutoConfig, AutoModelForCausalLM

from odb_factory import enable_odb

STEPS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 3, "learning_rate": 5e-5}


def logged(model: Path, folder: Path, loss_of: Any, dtype: torch.dtype, odb: bool, **changes: Any) -> list[float]:
    """loss_of: the `compute_loss_func` of the Trainer."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    changes = STEPS | {"compute_loss_func": loss_of} | changes
    return losses(train(network, folder, block={"token_budget": 64} if odb else None, **changes))


def test_losses_in_bfloat16_add_up_in_float32(tiny_text: Path, tmp_path: Path) -> None:
    """Like stock's; a sum in bfloat16 would have 8 bits."""
    stock, ours = (logged(tiny_text, tmp_path, divides, torch.bfloat16, odb) for odb in (False, True))
    assert ours == pytest.approx(stock, rel=4e-3)
    assert any(float(torch.tensor(loss).bfloat16()) != loss for loss in ours)


@pytest.mark.parametrize("counts_tokens", [True, False], ids=["text", "as with a processor"])
def test_losses_of_routers_weigh_as_in_stock(counts_tokens: bool, tmp_path: Path) -> None:
    """Within 5 %, because they depend on which samples share a micro-batch. Stock divides them by the accumulation
    only if it divides the loss by the accumulation."""

    def first_loss(odb: bool, coefficient: float) -> float:
        torch.manual_seed(0)
        routers = {"output_router_logits": True, "router_aux_loss_coef": coefficient}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **COMMON | HEAD | MOE | routers))
        trainer = make(model, tmp_path, **STEPS)
        trainer.model_accepts_loss_kwargs = counts_tokens
        if odb:
            enable_odb(trainer, token_budget=64)
        trainer.train()
        return losses(trainer)[0]

    stock, ours = ([first_loss(odb, coefficient) for coefficient in (0.0, 0.5)] for odb in (False, True))
    assert ours[0] == pytest.approx(stock[0], rel=1e-6)
    assert ours[1] - ours[0] == pytest.approx(stock[1] - stock[0], rel=0.05)


def test_a_loss_of_nan_is_left_out_of_the_log(tiny_text: Path, tmp_path: Path) -> None:
    """As in stock, unless `logging_nan_inf_filter` is false."""

    def nan_with_row_0(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = divides(outputs, labels, num_items_in_batch)
        return loss + math.nan if (labels == item(0)["input_ids"][0]).any() else loss

    def of_one_step(loss_of: Any, **changes: Any) -> float:
        one_step = {"max_steps": 1, "dataset": Rows(num_rows=8)}
        (loss,) = logged(tiny_text, tmp_path, loss_of, torch.float32, odb=True, **one_step | changes)
        return loss

    assert 0.2 < of_one_step(nan_with_row_0) / of_one_step(divides) < 0.98
    assert math.isnan(of_one_step(nan_with_row_0, logging_nan_inf_filter=False))
