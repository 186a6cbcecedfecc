"""Trainers compute the loss of their micro-batches without logits, unless somebody reads these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llamafactory.train.trainer_utils import dft_loss_func
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy import Rows
from training.toy_training import losses, make
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

from odb_factory.model.chunked import Sizes


class LargestLogits(TorchDispatchMode):
    """The most elements of a tensor whose last dimension is the vocabulary, made inside."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary, self.largest = vocabulary, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [
            one.numel()
            for one in tree_leaves(result)
            if isinstance(one, Tensor) and one.shape[-1:] == (self.vocabulary,)
        ]
        self.largest = max([self.largest, *sizes])
        return result


class ReadsLogits(Trainer):
    """As TRL's SFTTrainer, which logs the entropy of its logits."""

    seen = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self.seen += outputs.logits.shape[:2] == inputs["labels"].shape
        return (loss, outputs) if return_outputs else loss


def trained(
    model: Path, folder: Path, kind: type[Trainer] = Trainer, loss: Any = None, **odb: Any
) -> tuple[Any, list[float], int]:
    """The trainer, its losses and the elements of the largest logits."""
    network = AutoModelForCausalLM.from_pretrained(model)
    arguments = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "max_steps": 3,
        "learning_rate": 5e-5,
    }
    trainer = make(network, folder, block=odb or None, trainer_class=kind, compute_loss_func=loss, **arguments)
    with LargestLogits(network.config.vocab_size) as logits:
        trainer.train()
    return trainer, losses(trainer), logits.largest


@pytest.mark.parametrize("loss", [None, dft_loss_func])
def test_nobody_makes_logits_of_all_tokens(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: Any
) -> None:
    """Of the model's own loss, and of a loss of LLaMA-Factory."""
    config = AutoConfig.from_pretrained(tiny_text)
    vocabulary = config.vocab_size
    monkeypatch.setattr("odb_factory.model.chunked.ON_CPU", Sizes(chunk=0, tile=16 * vocabulary, rows=16))
    stock, expected, of_stock = trained(tiny_text, tmp_path, loss=loss)
    ours, found, largest = trained(tiny_text, tmp_path, loss=loss, token_budget=160)
    assert of_stock > 100 * vocabulary
    assert largest <= config.hidden_size * vocabulary, "the head's own weight"
    assert found == pytest.approx(expected, rel=1e-5)
    for one, other in zip(ours.model.parameters(), stock.model.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-6)
    assert ours.evaluate(Rows(num_rows=4))["eval_loss"] > 0


def test_a_trainer_that_reads_logits_gets_them(
    tiny_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trainer, found, _ = trained(tiny_text, tmp_path, ReadsLogits, token_budget=160)
    assert trainer.seen > 3
    assert found == pytest.approx(trained(tiny_text, tmp_path)[1], rel=1e-5)
    (line,) = [text for text in caplog.messages if text.startswith("loss: with logits")]
    assert "ReadsLogits may read its outputs" in line
