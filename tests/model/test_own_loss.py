"""Which loss a model computes itself is found out without its weights; the loss without logits replaces only the mean.

Families: two of docs/families.md, whose forward does not call `loss_function`, or calls it without num_items.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from model.test_head import batch_of, check, state, text_model
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from training.flat_models import COMMON

from odb_factory.model.chunked import AfterHead
from odb_factory.model.head import WithoutLogits, own_loss

TEXT = COMMON | {"vocab_size": 200, "head_dim": 8}
SIDE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGES = SIDE | {"image_size": 32, "patch_size": 8}
SOUNDS = {"num_mel_bins": 8, "max_source_positions": 48}
MEDIUM = 150


def gemma3() -> Any:
    text = TEXT | {"model_type": "gemma3_text", "sliding_window": 48, "query_pre_attn_scalar": 8}
    vision = IMAGES | {"model_type": "siglip_vision_model", "vision_use_head": False}
    return transformers.Gemma3Config(
        text_config=text, vision_config=vision, image_token_index=MEDIUM, mm_tokens_per_image=4
    )


def voxtral() -> Any:
    audio = SIDE | SOUNDS | {"model_type": "voxtral_encoder", "intermediate_size": 128}
    text = TEXT | {"model_type": "llama"}
    return transformers.VoxtralConfig(text_config=text, audio_config=audio, audio_token_id=MEDIUM)


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Tensor]], int]] = {
    "Gemma3": (
        gemma3,
        lambda: {"pixel_values": torch.randn(2, 3, 32, 32), "token_type_ids": torch.zeros(3, 11, dtype=torch.long)},
        4,
    ),
    "Voxtral": (voxtral, lambda: {"input_features": torch.randn(1, 8, 96)}, 12),
}
"""Configuration, media of a batch, tokens of a medium."""


@pytest.mark.parametrize("name", FAMILIES)
def test_families_with_loss_code_of_their_own(name: str) -> None:
    configure, media, tokens = FAMILIES[name]
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{name}ForConditionalGeneration")(configure()).train()
    before = state(model)
    after = own_loss(model)
    assert isinstance(after, AfterHead)
    assert state(model) == before
    batch, weights = batch_of(length=11 if tokens < 8 else 14)
    given = media()
    for row in range(2 if tokens < 8 else 1):
        batch["input_ids"][row, 1 : 1 + tokens] = MEDIUM
    assert (batch["attention_mask"][batch["input_ids"] == MEDIUM] == 1).all()
    check(model, batch | given, weights, rtol=2e-6)
    expected = model(**batch | given).loss
    with WithoutLogits(model).weighing(1 / int((batch["labels"][:, 1:] != -100).sum())):
        assert model(**batch | given).loss.item() == pytest.approx(expected.item(), rel=1e-6), "its own mean"


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
