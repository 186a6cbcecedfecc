"""Log-probabilities of labels in the place of logits. Trainings: tests/llamafactory, tests/integrations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from odb_factory.model import attention
from odb_factory.model.chunked import AfterHead, Sizes, log_probs_of
from odb_factory.model.flat_row import flat_row
from odb_factory.model.unpad import LabelLogProbs, UnpadDoor, positions_of_samples

LENGTHS = (9, 4, 17, 6)
IGNORED = -100


@pytest.mark.parametrize("after", [AfterHead(), AfterHead(0.25), AfterHead(0.5, 3.0)], ids=["plain", "scale", "cap"])
def test_log_probs_and_their_gradient(after: AfterHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer with a bias, by logits of seven tokens at a time, against autograd on all logits."""
    monkeypatch.setattr("odb_factory.model.chunked.ON_CPU", Sizes(chunk=0, tile=3 * 50, block=16 * 20, rows=7))
    torch.manual_seed(0)
    linear = nn.Linear(16, 50).double()
    hidden = torch.randn(1, 40, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 50, (1, 40)).masked_fill(torch.rand(1, 40) < 0.4, IGNORED)
    supervised = int((labels[:, 1:] != IGNORED).sum())
    weights = torch.randn(supervised, dtype=torch.float64)

    places, found, means = log_probs_of(linear, hidden, labels, supervised, after)
    (found * weights).sum().backward()
    gradients = [one.grad.clone() for one in (hidden, linear.weight, linear.bias)]  # type: ignore[union-attr]
    for one in (hidden, linear.weight, linear.bias):
        one.grad = None

    logits = linear(hidden[0, :-1]) * after.scale
    logits = logits if after.cap is None else after.cap * torch.tanh(logits / after.cap)
    kept = labels[0, 1:] != IGNORED
    expected = logits.log_softmax(-1)[kept].gather(1, labels[0, 1:][kept][:, None])[:, 0]
    (expected * weights).sum().backward()
    assert places.tolist() == kept.nonzero()[:, 0].tolist() and not means.requires_grad
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(means, logits[kept].mean(1))
    for gradient, one in zip(gradients, (hidden, linear.weight, linear.bias)):
        torch.testing.assert_close(gradient, one.grad)


def test_a_model_that_is_given_token_ids_alone_takes_the_positions_of_samples() -> None:
    """Of a table, where it shows whether they restart."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    model = GPT2LMHeadModel(config).double().eval()
    samples = [torch.randint(0, 99, (1, length)) for length in LENGTHS]
    alone = torch.cat([model(input_ids=sample).logits for sample in samples], 1)
    undo = attention.install(model)
    with flat_row(LENGTHS), positions_of_samples(model):
        flat = model(input_ids=torch.cat(samples, 1)).logits
    undo()
    torch.testing.assert_close(flat, alone)
    assert "forward" not in vars(model)


def test_what_needs_logits_says_so() -> None:
    stand_in = torch.zeros(2, 5, 2).as_subclass(LabelLogProbs)
    with pytest.raises(TypeError, match="argmax needs logits, and the layout is flat.*set `layout: padded`"):
        stand_in.argmax(-1)


def test_a_head_that_is_no_linear_layer_is_refused(tiny_text: Path) -> None:
    """Its weight is not what it computes by."""
    lora = LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_text), lora)
    assert "not a plain torch.nn.Linear" in str(UnpadDoor(model).reason)
