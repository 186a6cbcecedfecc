"""Which loss a model computes itself is found out without its weights; the loss without logits replaces only the mean.

Families: two of docs/families.md, whose forward does not call `loss_function`, or calls it without num_items.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from model.check_families import class_and_config
from model.test_head import batch_of, check, state, text_model
from torch.nn.functional import cross_entropy, pad

from odb_factory.model.chunked import AfterHead
from odb_factory.model.head import WithoutLogits, own_loss
from odb_factory.model.tiny_copy import tiny_copy


@pytest.mark.parametrize("kind", ["gemma3", "voxtral"])
def test_families_with_loss_code_of_their_own(kind: str) -> None:
    model = tiny_copy(*class_and_config(kind), None).float()
    before = state(model)
    assert isinstance(own_loss(model), AfterHead)
    assert state(model) == before
    batch, weights = batch_of()
    if kind == "gemma3":
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    check(model, batch, weights, rtol=2e-6)
    expected = model(**batch).loss
    with WithoutLogits(model).weighing(1 / int((batch["labels"][:, 1:] != -100).sum())):
        assert model(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-6), "its own mean"


def another_loss(kind: str) -> Callable[..., Any]:
    """Forwards of remote code."""

    def forward(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}
        output = type(self).forward(self, input_ids, **kwargs)
        if labels is not None:
            targets = labels if kind == "not shifted" else pad(labels, (0, 1), value=-100)[:, 1:]
            output.loss = cross_entropy(output.logits.flatten(0, 1), targets.flatten())
            if kind == "a further term":
                output.loss = output.loss + 1e-3 * output.logits.logsumexp(-1).square().mean()
            if kind == "needs its layers":
                output.loss = output.loss + self.model.norm(output.hidden_states[-1]).mean()
        return output

    return forward


@pytest.mark.parametrize("kind", ["not shifted", "a further term", "needs its layers", "a function that was set"])
def test_another_loss_stays(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, (batch, weights) = text_model("plain"), batch_of()
    if kind == "a function that was set":
        model.loss_function = lambda logits, labels, **_: logits.square().mean()
    else:
        model.forward = MethodType(another_loss(kind), model)
        batch["output_hidden_states"] = True
    expected = model(**batch)
    caplog.set_level("INFO")
    with WithoutLogits(model).weighing(weights):
        output = model(**batch)
    assert torch.equal(output.loss, expected.loss) and torch.equal(output.logits, expected.logits)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "odb_factory.model.head"]
    assert "Qwen2ForCausalLM: its loss" in line and "\n" not in line
