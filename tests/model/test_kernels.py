"""I10: every kernel, called as in a training, has the results of each sample alone.

Without a GPU, real numbers come from a CPU kernel in place of torch's, and shapes from a forward on fake CUDA tensors,
in which reading a value back from the device raises.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model.flash_on_cpu import flash_on_cpu
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
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
from odb_factory.model.attention import FLASH, RUNS
from odb_factory.model.check import resolve_layout
from odb_factory.model.flat_row import flat_row

SAMPLES = (5, 9, 9, 3, 20, 1)
HEADS = 4
ROUNDING = {torch.bfloat16: 2**-6, torch.float16: 2**-8}
"""Largest rounding difference, relative to the largest value. A wrong mask, scale or end causes more than 0.1."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"key_heads": 2},
    "scale": {"scale": 0.4},
    "window": {"window": 4},
    "window of one": {"window": 1, "key_heads": 1, "scale": 0.4},
    "window longer than samples": {"window": 20},
    "size 20": {"size": 20},
    "values of another size": {"size": 24, "value_size": 16, "key_heads": 2},
    "largest": {"size": 256, "value_size": 256},
    "fp16": {"dtype": torch.float16, "window": 4},
    "not causal": {"causal": False},
}


def states(
    key_heads: int = HEADS, size: int = 16, value_size: int | None = None, dtype: torch.dtype = torch.bfloat16, **_: Any
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(HEADS, size), (key_heads, size), (key_heads, value_size or size)]
    return [torch.randn(1, heads, sum(SAMPLES), n).to(dtype).requires_grad_() for heads, n in shapes]


def attend(
    states: list[Tensor], window: int | None = None, scale: float | None = None, causal: bool = True, **_: Any
) -> Tensor:
    module = torch.nn.Module()
    module.num_key_value_groups = states[0].shape[1] // states[1].shape[1]
    module.is_causal = causal
    with flat_row(SAMPLES):
        return attention.attend(module, *states, None, scaling=scale, sliding_window=window, dropout=0.0)[0]


def alone(
    states: list[Tensor], window: int | None = None, scale: float | None = None, causal: bool = True, **_: Any
) -> Tensor:
    """Attention in float64, one sample after the other."""
    outs = []
    for q, k, v in zip(*(state.double().split(SAMPLES, 2) for state in states)):
        k, v = (state.repeat_interleave(HEADS // state.shape[1], 1) for state in (k, v))
        n = q.shape[2]
        visible = torch.ones(n, n, dtype=torch.bool)
        visible = visible.tril() if causal else visible
        visible = visible if window is None else visible.triu(1 - window)
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        outs.append(scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v)
    return torch.cat(outs, 2).transpose(1, 2)


def deviation(case: dict[str, Any]) -> float:
    """Largest difference of the output and of each gradient, relative to its largest value; if a gradient is 0,
    relative to the largest value of all."""
    inputs = states(**case)
    output, expected = attend(inputs, **case), alone(inputs, **case)
    assert output.shape == expected.shape and output.dtype == inputs[0].dtype
    weight = torch.randn_like(expected)
    pairs = [(output, expected)]
    pairs += zip(
        torch.autograd.grad((output * weight).sum(), inputs), torch.autograd.grad((expected * weight).sum(), inputs)
    )
    largest = [float(reference.detach().abs().max()) for _, reference in pairs]
    differences = [float((actual - reference).detach().abs().max()) for actual, reference in pairs]
    return max(difference / (size or max(largest)) for difference, size in zip(differences, largest))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("by_flash", [True, False], ids=["the operator of torch", "runs of equal length"])
def test_each_kernel_computes_samples_alone(by_flash: bool, case: str) -> None:
    """The operator is called once, not once per sample."""
    rounding = ROUNDING[CASES[case].get("dtype", torch.bfloat16)]
    with flash_on_cpu() if by_flash else contextlib.nullcontext([]) as calls:
        assert deviation(CASES[case]) < (rounding if by_flash else 2 * rounding)
    assert calls == ["forward", "backward"] * by_flash


def test_autocast_decides_the_dtype() -> None:
    with flash_on_cpu() as kernel, torch.autocast("cpu", torch.bfloat16):
        inputs = states(dtype=torch.float32)
        assert attend(inputs).dtype == torch.bfloat16
    assert kernel == ["forward"]
    with flash_on_cpu() as kernel:
        assert attend(inputs).dtype == torch.float32
    assert kernel == []


@pytest.mark.integration
@pytest.mark.parametrize("has_flash", [True, False])
def test_only_a_new_row_length_compiles(has_flash: bool) -> None:
    """For any number and lengths of the samples in a row; an uncompiled row comes first, as in the layout check.

    Without flash the graph breaks at every attention, and the first row of each length compiles all parts.
    """
    rows = ((5, 20, 7), (16, 16), (9, 9, 9, 5), (32,), (1, 2, 3, 4, 22)), ((40, 24), (8,) * 8, (60, 4), (64,))
    model = make_model("qwen2", torch.bfloat16 if has_flash else torch.float32)
    graphs: list[Any] = []

    def compiles(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(inputs)
        return graph.forward

    def loss(model: Any, segments: tuple[int, ...]) -> Tensor:
        ids = torch.arange(sum(segments))[None] % 60 + 3
        positions = torch.cat([torch.arange(length) for length in segments])[None]
        with flat_row(segments):
            loss = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss
            loss.backward()
        return loss.detach()

    with contextlib.ExitStack() as stack:
        if has_flash:
            stack.enter_context(flash_on_cpu())
        stack.callback(attention.install(model))
        torch._dynamo.reset()
        stack.callback(torch._dynamo.reset)
        compiled = torch.compile(model, backend=compiles)
        loss(model, (3, 4))
        numbers = []
        for rows_of_length in rows:
            for segments in rows_of_length:
                torch.testing.assert_close(loss(compiled, segments), loss(model, segments))
                numbers.append(len(graphs))
    if has_flash:
        assert numbers == [1] * 5 + [2] * 4
    else:
        assert numbers[0] == numbers[4] and numbers[-1] <= numbers[5] + 1


# Choice of the kernel


CUDA: dict[str, Any] = {"device": torch.device("cuda", 0), "dtype": torch.bfloat16}
HOPPER = {"capability": (9, 0), "built": True, "hip": None}


def fake_gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int], built: bool, hip: str | None) -> None:
    """Make torch report a GPU of this compute capability."""
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    patch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    patch.setattr(torch.version, "hip", hip)


@pytest.mark.parametrize(
    ("gpu", "changes", "reason"),
    [
        ({}, {}, ""),
        ({}, {"dtype": torch.float32}, "float32"),
        ({}, {"size": 264}, "264 values"),
        ({}, {"dropout": 0.1}, "dropout (0.1)"),
        ({}, {"device": torch.device("cpu")}, "cpu"),
        ({"capability": (7, 5)}, {}, "7.5"),
        ({"hip": "6.4"}, {}, "AMD"),
        ({"built": False}, {}, "built without"),
    ],
)
def test_the_choice_and_its_reason(
    gpu: dict[str, Any], changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu(monkeypatch, **HOPPER | gpu)
    kernel = attention.kernel_of(**CUDA | changes)
    assert kernel == FLASH if not reason else kernel.startswith(f"{RUNS}, because ") and reason in kernel


def test_an_operator_with_an_unknown_schema_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A future torch may change the schema: the samples are then computed run by run."""
    fake_gpu(monkeypatch, **HOPPER)
    operator = SimpleNamespace(default=SimpleNamespace(_schema=SimpleNamespace(arguments=())))
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    monkeypatch.setattr(attention, "FLASH_FORWARD", attention.find_flash_forward())
    assert f"{RUNS}, because aten::_flash_attention_forward of this torch has an" in attention.kernel_of(**CUDA)


# Whole models


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpointing", "reentrant"])
@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_whole_models(kind: str, checkpointing: bool | None) -> None:
    """In bfloat16 the flat row is about as far from float64 as padded rows are. Each layer calls the kernel once, and
    once more if it is recomputed."""
    rows = samples()
    exact = make_model(kind, torch.float64)
    with torch.no_grad():
        exact.load_state_dict({name: weight.bfloat16().double() for name, weight in exact.state_dict().items()})
    model = make_model(kind, torch.bfloat16)
    model.load_state_dict(exact.state_dict())
    expected = sum_of_losses(exact, padded_batch(rows)), gradients(exact)
    padded = sum_of_losses(model, padded_batch(rows)), gradients(model)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    attention.install(model)
    with flash_on_cpu() as kernel:
        flat = sum_of_losses(model, flat_batch(rows), LENGTHS), gradients(model)
    assert abs(flat[0] / expected[0] - 1) < max(3 * abs(padded[0] / expected[0] - 1), 1e-3)
    assert largest_difference(flat[1], expected[1]) < 2 * largest_difference(padded[1], expected[1])
    layers = model.config.num_hidden_layers
    assert kernel.count("forward") == layers * (1 if checkpointing is None else 2)
    assert kernel.count("backward") == layers


@contextlib.contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of the device "cuda" have shapes and no values; reading a value back raises."""
    monkeypatch.setattr("odb_factory.model.flat_row._devices", set())  # other tests have no such device
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # has no fake kernel
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            torch.empty(1).cuda()
        except RuntimeError as error:
            pytest.skip(f"this torch has no fake CUDA tensors without a driver: {error}")
        yield


def to_device(model: torch.nn.Module) -> None:
    """Move a model to the device: fake tensors do not support `model.cuda()`."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = torch.nn.Parameter(torch.empty_like(weight, device="cuda"))
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.empty_like(buffer, device="cuda")


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_a_forward_on_fake_cuda_tensors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer calls torch's kernel on the device, and no value is read back."""
    calls, flash = [], attention.flash
    monkeypatch.setattr(attention, "flash", lambda *args: calls.append(args) or flash(*args))
    model = make_model(kind, torch.bfloat16)
    attention.install(model)
    with fake_cuda(monkeypatch):
        to_device(model)
        batch = {name: tensor.cuda() for name, tensor in flat_batch(samples()).items() if name != "labels"}
        with flat_row(LENGTHS):
            logits = model(**batch).logits
        assert logits.device.type == "cuda" and logits.shape[:2] == (1, sum(LENGTHS)) and logits.requires_grad
        with pytest.raises(DataDependentOutputException):
            logits.sum().item()
    assert len(calls) == model.config.num_hidden_layers


# Scope: flat rows of the language model


def test_only_the_language_model_gets_the_attention(tiny_vl: Any, tmp_path: Any) -> None:
    """The vision tower keeps its own function; a checkpoint and the restored model do not name odb's function."""
    model = AutoModelForImageTextToText.from_pretrained(tiny_vl)
    undo = attention.install(model)
    assert model.model.language_model.config._attn_implementation == attention.NAME
    assert model.model.visual.config._attn_implementation == model.config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    assert attention.NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    undo()
    assert model.model.language_model.config._attn_implementation == "sdpa"


def test_a_row_of_another_length_is_refused() -> None:
    """Attention must not cross samples, and their ends come only from `flat_row`."""
    model, rows = make_model("llama"), samples()
    attention.install(model)
    with pytest.raises(ConfigError, match="not the flat row of 66 tokens.*`layout: padded`"):
        sum_of_losses(model, flat_batch(rows), (40, 26))
    sum_of_losses(model, padded_batch(rows))  # outside of a flat row, sdpa computes attention


@pytest.mark.parametrize("kind", ["phimoe", "qwen2_moe", "qwen2"])
def test_windows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-MoE and Qwen2-MoE pass the window only to the mask, not to attention: they keep their kernel."""
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch's kernel runs nowhere else")
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_kernel_of_torch(kind: str) -> None:
    """In bfloat16 the kernel is about as close to samples alone as padded rows are; no step waits for the device."""
    model, rows = make_model(kind, torch.bfloat16).cuda(), samples()

    def on_device(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: value.cuda() for key, value in batch.items()}

    alone = [sum_of_losses(model, on_device(padded_batch([row]))) for row in rows]
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
