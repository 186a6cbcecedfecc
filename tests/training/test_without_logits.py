"""Trainers compute the loss of their micro-batches without logits. A trainer that reads logits: `test_trl.py`."""

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
from transformers import AutoConfig, AutoModelForCausalLM

from odb_factory.model.chunked import Sizes


class LargestLogits(TorchDispatchMode):
    """largest: elements of the largest tensor made within whose last dimension is the vocabulary."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary, self.largest = vocabulary, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.shape[-1:] == (self.vocabulary,):
                self.largest = max(self.largest, leaf.numel())
        return result


def trained(model: Path, folder: Path, loss: Any, **odb: Any) -> tuple[Any, list[float], int]:
    """Returns the trainer, its losses and the elements of the largest logits."""
    network = AutoModelForCausalLM.from_pretrained(model)
    arguments = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "max_steps": 3,
        "learning_rate": 5e-5,
    }
    trainer = make(network, folder, block=odb or None, compute_loss_func=loss, **arguments)
    with LargestLogits(network.config.vocab_size) as logits:
        trainer.train()
    return trainer, losses(trainer), logits.largest


@pytest.mark.parametrize("loss", [None, dft_loss_func])
def test_logits_of_all_tokens_are_never_made(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: Any
) -> None:
    """With the model's own loss and with a loss of LLaMA-Factory."""
    config = AutoConfig.from_pretrained(tiny_text)
    vocabulary = config.vocab_size
    monkeypatch.setattr("odb_factory.model.chunked.ON_CPU", Sizes(chunk=0, tile=16 * vocabulary, rows=16))
    stock, expected, of_stock = trained(tiny_text, tmp_path, loss)
    ours, our_losses, largest = trained(tiny_text, tmp_path, loss, token_budget=160)
    assert of_stock > 100 * vocabulary
    assert largest <= config.hidden_size * vocabulary, "the head's own weight"
    assert our_losses == pytest.approx(expected, rel=1e-5)
    for weight, expected_weight in zip(ours.model.parameters(), stock.model.parameters()):
        torch.testing.assert_close(weight, expected_weight, rtol=1e-3, atol=2e-6)
    assert ours.evaluate(Rows(num_rows=4))["eval_loss"] > 0
