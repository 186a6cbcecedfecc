"""The weighted token loss from logits. With the forward of real models: tests/model/test_head.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from odb_factory.accounting import TokenLoss, weighted_token_loss
from odb_factory.errors import ConfigError, DataError

ROW_WEIGHTS = (0.07, 0.3)


def _batch() -> dict[str, Tensor]:
    """Rows of 9 and 6 tokens. The first three tokens of each, and the padding, have no loss."""
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class FusedLoss(nn.Module):
    """A model that computes its loss in another way, like a fused kernel."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor, **inputs: Any) -> Any:
        logits = self.model(input_ids=input_ids, **inputs).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("kind", ["fused", "own function", "not of transformers"])
def test_a_loss_made_elsewhere_is_refused_by_name(tiny_text: Path, kind: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_text)
    if kind == "own function":
        model.loss_function = lambda logits, labels, vocab_size, **_: ForCausalLMLoss(logits, labels, vocab_size)
    called: Any = FusedLoss(model) if kind == "fused" else model
    if kind == "not of transformers":
        model, called = nn.Linear(1, 1), lambda **_: None
    with pytest.raises(ConfigError) as refused, TokenLoss(model, "stock").weighing(ROW_WEIGHTS):
        called(**_batch())
    assert str(refused.value).startswith("odb.loss_scaling: 'stock' ") and "\n" not in str(refused.value)


@pytest.mark.parametrize(("shape", "segments"), [((1, 17, 5), (9, 6, 3)), ((2, 9, 5), (9, 6, 3)), ((1, 4, 5), ())])
def test_logits_of_other_rows_are_refused(shape: tuple[int, ...], segments: tuple[int, ...]) -> None:
    with pytest.raises(DataError):
        weighted_token_loss(torch.zeros(shape), torch.zeros(shape[:2]).long(), ROW_WEIGHTS, segments=segments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_token_losses_are_those_of_the_model(dtype: torch.dtype) -> None:
    """Upcast and shift as in transformers, times the weight of the row; float64 stays."""
    logits, labels = torch.randn(2, 9, 100, dtype=dtype), _batch()["labels"]
    own = sum(
        weight * ForCausalLMLoss(logits[row : row + 1], labels[row : row + 1], 100, num_items_in_batch=1)
        for row, weight in enumerate(ROW_WEIGHTS)
    )
    own = own.to(torch.promote_types(dtype, torch.float32))
    torch.testing.assert_close(weighted_token_loss(logits, labels, ROW_WEIGHTS), own, rtol=1e-6, atol=0)
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    loss = weighted_token_loss(logits, None, ROW_WEIGHTS, shift_labels=shifted)
    torch.testing.assert_close(loss, own, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("segments", [(), (9, 6, 3)], ids=["padded", "flat"])
def test_autocast_does_not_round_the_loss(dtype: torch.dtype, segments: tuple[int, ...]) -> None:
    """I8: loss and gradient within autocast are bit for bit those outside."""
    torch.manual_seed(0)
    labels = _batch()["labels"] if not segments else torch.randint(0, 100, (1, 18))
    logits = torch.randn(*labels.shape, 100)

    def loss_and_gradient() -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        loss = weighted_token_loss(leaf, labels, ROW_WEIGHTS, segments=segments)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient

    expected = loss_and_gradient()
    assert not segments or not expected[1][:, 15:].any(), "the filling of a flat row weighs 0"
    with torch.autocast("cpu", dtype):
        loss, gradient = loss_and_gradient()
    assert loss.dtype == torch.float32 and torch.equal(loss, expected[0]) and torch.equal(gradient, expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_second_copy_of_the_logits_is_made(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 256, 512, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 512, (2, 256))

    def peak(loss_of: Any) -> int:
        """Peak of live bytes in forward and backward, by torch's own tracker."""
        tracker = MemTracker()
        tracker.track_external(logits, labels)
        logits.grad = None
        with tracker:
            loss_of(logits * 1).backward()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]

    own = peak(lambda x: ForCausalLMLoss(x, labels, 512))
    assert own > 3 * logits.numel() * logits.element_size(), "the tracker sees them"
    vector = labels.numel() * 8
    assert peak(lambda x: weighted_token_loss(x, labels, ROW_WEIGHTS)) <= own + vector
    row, segments = labels.view(1, -1), (300, 200, 12)
    assert peak(lambda x: weighted_token_loss(x.view(1, 512, 512), row, ROW_WEIGHTS, segments=segments)) <= own + vector
