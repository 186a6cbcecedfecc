"""I10: `odb_varlen` in a flat row computes what sdpa computes padded; elsewhere it is sdpa.

More model classes, with images too: `tests/data/test_layout_models.py`.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training.flat_models import (
    ALLOWED,
    LENGTHS,
    MOE,
    SLIDING,
    flat_batch,
    gradients,
    largest_difference,
    make_model,
    padded_batch,
    samples,
    sum_of_losses,
)
from transformers import AutoModelForImageTextToText

from odb_factory import ConfigError
from odb_factory.model import attention
from odb_factory.model.check import resolve_layout
from odb_factory.model.flat_row import FlatRow, flat_row

LOSS, GRADIENT = 1e-14, 1e-13


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpointing", "reentrant"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_it_is_what_sdpa_computes_padded(kind: str, checkpointing: bool | None) -> None:
    model, rows = make_model(kind, torch.float64), samples()
    expected = sum_of_losses(model, padded_batch(rows)), gradients(model)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    undo = attention.install(model)
    again = sum_of_losses(model, padded_batch(rows)), gradients(model)
    assert torch.equal(again[0], expected[0]) and largest_difference(again[1], expected[1]) == 0
    loss = sum_of_losses(model, flat_batch(rows), LENGTHS)
    assert abs(loss / expected[0] - 1) < LOSS
    assert largest_difference(gradients(model), expected[1]) < GRADIENT
    undo()
    assert model.config._attn_implementation == "sdpa"


def test_the_comparison_finds_a_leak() -> None:
    """The same row without `flat_row`, and without position ids that restart, is one long sample."""
    model, rows = make_model("llama", torch.float64), samples()
    expected = sum_of_losses(model, padded_batch(rows)), gradients(model)
    batch = flat_batch(rows)
    del batch["position_ids"]
    assert abs(sum_of_losses(model, batch) / expected[0] - 1) > 1e-3
    assert largest_difference(gradients(model), expected[1]) > 0.1


def test_the_language_model_alone_takes_it(tiny_vl: Any, tmp_path: Any) -> None:
    """The vision tower keeps its own function; neither a checkpoint nor the model afterwards knows of it."""
    model = AutoModelForImageTextToText.from_pretrained(tiny_vl)
    undo = attention.install(model)
    assert model.model.language_model.config._attn_implementation == attention.NAME
    assert model.model.visual.config._attn_implementation == model.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    assert attention.NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    undo()
    assert model.model.language_model.config._attn_implementation == "sdpa"


def test_a_row_of_another_length_is_refused() -> None:
    """It must not attend across samples, and nothing else tells it where they end."""
    model, rows = make_model("llama"), samples()
    attention.install(model)
    with pytest.raises(ConfigError, match="not the flat row of 66 tokens.*`layout: padded`"):
        sum_of_losses(model, flat_batch(rows), (40, 26))
    sum_of_losses(model, padded_batch(rows))  # outside of a flat row it is sdpa again


@pytest.mark.parametrize("checkpointing", [None, False], ids=["", "checkpointing"])
@pytest.mark.parametrize("kind", ["gpt_oss", "gemma2", "mistral"])
def test_eager(kind: str, checkpointing: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sinks, with capped scores, with a window; evaluations are those of the model's own function."""
    monkeypatch.setitem(ALLOWED, "gemma2", SLIDING | {"head_dim": 8, "attn_logit_softcapping": 2.0})
    model, rows = make_model(kind, torch.float64, "eager"), samples()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    alone, gradient = [], {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    for row in rows:  # padded, the masks of eager windows are NaN in float64
        alone.append(sum_of_losses(model, padded_batch([row])))
        for name, of_row in gradients(model).items():
            gradient[name] += of_row
    assert attention.why_unusable(model) is None
    undo = attention.install(model)
    assert attention.text_config(model)._attn_implementation == attention.EAGER_NAME
    assert sum_of_losses(model, padded_batch(rows[:1])) == alone[0]
    loss = sum_of_losses(model, flat_batch(rows), LENGTHS)
    assert abs(loss / sum(alone) - 1) < 1e-6
    assert largest_difference(gradients(model), gradient) < 1e-6
    undo()
    assert attention.text_config(model)._attn_implementation == "eager"


@pytest.mark.parametrize("kind", ["phimoe", "qwen2_moe", "qwen2"])
def test_windows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of Phi-MoE and Qwen2-MoE is not told the window, which only the mask knows: they keep their kernel."""
    window = SLIDING | {"use_sliding_window": True, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
    monkeypatch.setitem(ALLOWED, kind, MOE | window | {"num_local_experts": 4, "shared_expert_intermediate_size": 16})
    model, rows = make_model(kind, torch.float64), samples()
    expected = sum_of_losses(model, padded_batch(rows)), gradients(model)
    layout = resolve_layout([model], "auto", SimpleNamespace(device=torch.device("cpu"), bf16=False, fp16=False))
    assert layout.name == "flat"
    loss = sum_of_losses(model, flat_batch(rows), LENGTHS)
    assert abs(loss / expected[0] - 1) < 1e-6
    assert largest_difference(gradients(model), expected[1]) < 1e-6
    assert (model.config._attn_implementation == "sdpa") == ("moe" in kind)


# On a device


class Synchronisations(TorchDispatchMode):
    """Counts the operations that make the host wait for a CUDA device: what reads a value or a number of values."""

    WAITING = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += function.overloadpacket in self.WAITING
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_flat_row_makes_the_host_wait_no_more_often_than_padding_does(kind: str) -> None:
    """transformers itself looks into the positions of a flat row once, as it does into the mask of a padded batch
    (without sliding windows); the layout, its kernel and its weights add nothing."""
    model, rows = make_model(kind), samples()
    counts = []
    for batch, segments in ((padded_batch(rows), ()), (flat_batch(rows), LENGTHS)):
        with Synchronisations() as found:
            sum_of_losses(model, batch, segments)
        counts.append(found.count)
        attention.install(model)
    assert counts[1] <= max(counts[0], 1)


def test_nothing_is_read_back_to_find_the_segments() -> None:
    """On the meta device, where nothing can be."""
    states = [torch.empty(1, heads, 8, 16, device="meta") for heads in (4, 2, 2)]
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    with flat_row((5, 3)):
        attended, _ = attention.attend(module, *states, None, sliding_window=4)
    assert attended.shape == (1, 8, 4, 16)
    row = FlatRow((5, 3))
    ends = row.ends(torch.device("meta"))
    assert ends.shape == (3,) and ends.dtype == torch.int32 and ends is row.ends(torch.device("meta"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch's kernel runs nowhere else")
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_kernel_of_torch(kind: str) -> None:
    """In bfloat16 it differs from each sample alone by no more than two padded layouts do; no step waits for it."""
    model, rows = make_model(kind, torch.bfloat16).cuda(), samples()

    def on_device(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: value.cuda() for key, value in batch.items()}

    alone = [sum_of_losses(model, on_device(padded_batch([one]))) for one in rows]
    padded = sum_of_losses(model, on_device(padded_batch(rows)))
    expected = gradients(model)
    attention.install(model)
    batch = on_device(flat_batch(rows))
    loss = sum_of_losses(model, batch, LENGTHS)
    assert abs(loss - sum(alone)) <= max(10 * abs(padded - sum(alone)), 0.02 * padded)
    assert largest_difference(gradients(model), expected) < 0.1
    torch.cuda.set_sync_debug_mode("error")
    try:
        sum_of_losses(model, batch, LENGTHS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
