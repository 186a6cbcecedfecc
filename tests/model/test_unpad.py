"""Log-probabilities of labels in the place of logits: a preference loss and its gradient are stock's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llamafactory.train.trainer_utils import get_batch_logps
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from odb_factory.data.flat import UNPADDED, beside_rows, flatten
from odb_factory.model import attention
from odb_factory.model.chunked import AfterHead, Sizes, log_probs_of
from odb_factory.model.flat_row import flat_row
from odb_factory.model.unpad import FlatRows, LabelLogProbs, UnpadDoor, positions_of_samples
from odb_factory.planning import Collation

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


@pytest.fixture
def model(tiny_text: Path) -> Any:
    found = AutoModelForCausalLM.from_pretrained(tiny_text, dtype=torch.float64).train()
    found.config.use_cache = False
    undo = attention.install(found)
    yield found
    undo()


def rows_of(side: str) -> dict[str, Tensor]:
    """Two pairs as a collator makes them: chosen answers, then rejected ones; padded on that side."""
    torch.manual_seed(1)
    longest = max(LENGTHS) + 3
    batch = {name: torch.zeros(len(LENGTHS), longest, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    batch["labels"] = torch.full_like(batch["input_ids"], IGNORED)
    for row, length in enumerate(LENGTHS):
        at = slice(0, length) if side == "right" else slice(longest - length, longest)
        batch["input_ids"][row, at] = torch.randint(5, 90, (length,))
        batch["attention_mask"][row, at] = 1
        answer = slice(at.start + length // 3, at.stop)
        batch["labels"][row, answer] = batch["input_ids"][row, answer]
    return batch


def scores(model: nn.Module, batch: dict[str, Tensor], ld_alpha: float | None) -> tuple[Tensor, Tensor]:
    """As LLaMA-Factory's DPO trainer: sums of log-probabilities, and the mean of the chosen logits."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, return_dict=True, use_cache=False).logits.to(torch.float64)
    sums, _ = get_batch_logps(logits=logits, labels=batch["labels"], ld_alpha=ld_alpha)
    return sums, logits.split(len(LENGTHS) // 2, dim=0)[0].mean()


def gradient(model: nn.Module, sums: Tensor) -> Tensor:
    model.zero_grad()
    nn.functional.logsigmoid(sums[:2] - sums[2:]).sum().backward()
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


@pytest.mark.parametrize("ld_alpha", [None, 0.5])
@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_go_flat_through_the_model(model: Any, side: str, ld_alpha: float | None) -> None:
    """Sums, gradient and the mean of logits at labels, with gradient checkpointing as without odb."""
    batch = rows_of(side)
    stock, _ = scores(model, batch, ld_alpha)
    expected = gradient(model, stock)
    door = UnpadDoor(model)
    assert door.reason is None
    laid_out, segments = beside_rows(batch, 2, Collation(rows=2, batches=("",)), flatten)
    assert segments == LENGTHS
    model.gradient_checkpointing_enable({"use_reentrant": False})
    seen: list[int] = []
    hook = model.model.layers[0].register_forward_hook(lambda _, __, output: seen.append(output.shape[:2]))
    with door.flat(FlatRows(**laid_out.pop(UNPADDED))), flat_row(segments):
        sums, mean = scores(model, laid_out, ld_alpha)
        found = gradient(model, sums)
    hook.remove()
    assert set(seen) == {(1, sum(LENGTHS))}, "nothing is padded, and nothing is computed twice but by checkpoints"
    torch.testing.assert_close(sums, stock, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    assert "forward" not in vars(model)
    logits = model(input_ids=batch["input_ids"][:2], attention_mask=batch["attention_mask"][:2]).logits
    supervised = (batch["labels"][:2, 1:] != IGNORED).nonzero().T
    assert float(mean) == pytest.approx(float(logits[:, :-1][tuple(supervised)].mean()), rel=1e-6)


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
