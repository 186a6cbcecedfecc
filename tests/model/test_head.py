"""The loss without logits equals the loss by logits, with all gradients, in any model, and makes no logits.

Reference: the logits of the same model in its own dtype, then a weighted sum of token losses.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from model.check_families import class_and_config
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, pad
from torch.utils._python_dispatch import TorchDispatchMode
from training.flat_models import COMMON, HEAD, MOE
from transformers import AutoConfig, AutoModelForCausalLM

from odb_factory.model import chunked
from odb_factory.model.chunked import AfterHead, log_probs_of, weighted_loss_of
from odb_factory.model.head import WithoutLogits, own_loss
from odb_factory.model.tiny_copy import tiny_copy

VOCABULARY = COMMON["vocab_size"]
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen2", {"tie_word_embeddings": False}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "bias of the head": ("phi", {}),
    "soft cap": ("gemma2", HEAD | {"final_logit_softcapping": 1.5}),
    "factor": ("granite", {"logits_scaling": 4.0}),
    "router loss": ("qwen3_moe", HEAD | MOE | ROUTERS),
    "own loss code": ("mamba", {"state_size": 4}),
}


def in_chunks(patch: pytest.MonkeyPatch, tokens: int) -> None:
    """Chunks of `tokens` tokens; plain operations on 3 tokens at a time."""
    patch.setattr(chunked, "ON_CPU", chunked.Sizes(chunk=0, rows=tokens, tile=3 * VOCABULARY))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The few tokens of these models make several chunks. Memory that is never written holds NaN."""
    in_chunks(monkeypatch, 5)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def text_model(name: str, dtype: torch.dtype = torch.float64) -> Any:
    kind, changes = MODELS[name]
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **COMMON | changes))
    if name == "router loss":
        model.set_experts_implementation("eager")  # the grouped kernel does not support float64
    with torch.no_grad():
        for parameter in model.parameters():  # large logits, and no bias is zero
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype).train()


def batch_of(rows: int = 3, length: int = 11, vocabulary: int = VOCABULARY) -> tuple[dict[str, Tensor], Tensor]:
    """Rows of several lengths, in which few tokens have no label, and a weight for each position."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:, 7:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    weights = torch.rand(rows, length, generator=generator, dtype=torch.float64) / 10
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, weights


def by_logits(model: Any, batch: dict[str, Tensor], weights: Tensor) -> Tensor:
    output = model(**{name: value for name, value in batch.items() if name != "labels"})
    targets = pad(batch["labels"], (0, 1), value=-100)[:, 1:].flatten()
    logits = output.logits.flatten(0, 1)
    losses = cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets, reduction="none")
    loss = (losses * weights.flatten()).sum()
    if output.get("aux_loss") is not None:
        loss = loss + ROUTERS["router_aux_loss_coef"] * output.aux_loss
    return loss


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: value.grad.double() for name, value in model.named_parameters() if value.grad is not None}


def check(model: Any, batch: dict[str, Tensor], weights: Tensor, rtol: float = 1e-11) -> None:
    """weights: also one number, or one for each row."""
    expected = by_logits(model, batch, weights.expand(batch["labels"].shape))
    expected_gradients = gradients(model, expected)
    door = WithoutLogits(model)
    with door.weighing(weights if weights.dim() else weights.item()):
        output = model(**batch)
    assert door.acted, door.reason
    assert output.get("logits") is None
    assert output.loss.item() == pytest.approx(expected.item(), rel=rtol)
    actual = gradients(model, output.loss)
    assert actual.keys() == expected_gradients.keys() != set()
    for name, value in expected_gradients.items():
        torch.testing.assert_close(actual[name], value, rtol=100 * rtol, atol=rtol * float(value.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_by_logits(name: str) -> None:
    in_float32 = name == "own loss code"  # its forward rounds logits
    check(text_model(name), *batch_of(), rtol=5e-7 if in_float32 else 1e-11)


def test_a_micro_batch_without_labels_has_a_loss_of_zero() -> None:
    model, (batch, weights) = text_model("plain"), batch_of()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with WithoutLogits(model).weighing(weights):
        loss = model(**batch).loss
    assert loss.item() == 0
    assert all(not gradient.any() for gradient in gradients(model, loss).values())


# Precision


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained head", "frozen head"])
@pytest.mark.parametrize("kind", ["autocast", "bfloat16"])
def test_gradients_in_low_precision_are_no_worse_than_by_logits(
    kind: str, is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several chunks are added up, and bfloat16 has 8 bits."""
    in_chunks(monkeypatch, 64)
    model = text_model("plain", torch.bfloat16 if kind == "bfloat16" else torch.float32)
    model.lm_head.requires_grad_(not is_frozen)
    batch, weights = batch_of(rows=8, length=64)
    exact_model = copy.deepcopy(model).double()
    exact = gradients(exact_model, by_logits(exact_model, batch, weights))

    def loss_and_error(with_logits: bool) -> tuple[float, float]:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            if with_logits:
                loss = by_logits(model, batch, weights)
            else:
                with WithoutLogits(model).weighing(weights):
                    loss = model(**batch).loss
        assert loss.dtype in (torch.float32, torch.float64)
        actual = gradients(model, loss)
        assert ("lm_head.weight" in actual) != is_frozen
        return loss.item(), float(torch.cat([(actual[name] - exact[name]).flatten() for name in exact]).norm())

    (expected, error_by_logits), (loss, error) = loss_and_error(True), loss_and_error(False)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert error <= 1.1 * error_by_logits


@pytest.mark.parametrize("kind", ["autocast", "bfloat16"])
def test_gradients_of_confident_tokens_are_no_worse_than_by_logits(kind: str) -> None:
    """If a label has nearly all probability, the rows of the head cancel, up to the probability of the others."""
    torch.manual_seed(0)
    linear, labels = nn.Linear(16, 200, bias=False), torch.randint(0, 200, (1, 64))
    linear.weight.data = functional.normalize(linear.weight.data, dim=-1)
    hidden = 12 * linear.weight.data[labels.roll(-1, 1)]
    if kind == "bfloat16":
        hidden, linear = hidden.bfloat16(), linear.bfloat16()

    def gradient(is_exact: bool, with_logits: bool) -> Tensor:
        head = copy.deepcopy(linear).double() if is_exact else linear
        states = hidden.detach().to(head.weight.dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast" and not is_exact):
            if with_logits:
                logits = head(states)[0, :-1]
                loss = cross_entropy(logits if is_exact else logits.float(), labels[0, 1:], reduction="sum")
            else:
                loss = weighted_loss_of(head, states, labels, 1.0)
        assert loss < 0.05 * 63, "the tokens are confident"
        loss.backward()
        return states.grad.double()

    exact = gradient(is_exact=True, with_logits=True)
    error_by_logits, error = ((gradient(False, with_logits) - exact).norm() for with_logits in (True, False))
    assert error <= 1.1 * error_by_logits < 0.1 * exact.norm()


def test_small_weights_do_not_vanish_in_float16() -> None:
    """The gradient of hidden states is computed in forward, before a loss scale is known."""
    torch.manual_seed(0)
    linear, hidden = nn.Linear(16, 512, dtype=torch.float16), torch.randn(1, 20, 16).half()
    labels = torch.randint(0, 512, (1, 20))
    tiny = weighted_loss_of(linear, hidden, labels, 1e-9) * 1e9
    tiny.backward()
    actual, linear.weight.grad = linear.weight.grad, None
    weighted_loss_of(linear, hidden, labels, 1.0).backward()
    torch.testing.assert_close(actual, linear.weight.grad, rtol=1e-2, atol=1e-6)


def test_nothing_is_read_back_if_the_host_knows_the_number_of_supervised_tokens() -> None:
    """The device "meta" has no values to read."""
    linear, hidden = nn.Linear(8, 50, device="meta"), torch.zeros(3, 11, 8, device="meta", requires_grad=True)
    weighted_loss_of(linear, hidden, torch.zeros(3, 11, device="meta", dtype=torch.long), 0.1, 30).backward()


# Speed


class Products(TorchDispatchMode):
    """Shapes of all matrix products, and row strides of their factors and results."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int, int]] = []
        self.strides: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = args[-2:]
            self.shapes.append((*a.shape, b.shape[1]))
            self.strides += [max(matrix.stride()) for matrix in (a, b, result)]
        return result


@pytest.mark.parametrize(("trained", "vocabulary"), [(True, 1000), (True, 1003), (False, 1000)])
def test_a_chunk_takes_three_products_of_aligned_sizes(
    trained: bool, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All strides are aligned, also if the vocabulary is odd: otherwise cuBLAS runs kernels that are several times
    slower. A frozen head takes two products."""
    monkeypatch.setattr(chunked, "ON_CPU", chunked.ELSEWHERE)
    linear = nn.Linear(16, vocabulary, bias=False).requires_grad_(trained)
    hidden = torch.randn(2, 50, 16, requires_grad=True)
    with Products() as products:
        weighted_loss_of(linear, hidden, torch.randint(0, 1000, (2, 50)), 0.1).backward()
    tokens = 128  # 2 x 49 supervised tokens, padded
    expected = [(tokens, 16, vocabulary), (tokens, vocabulary, 16), (vocabulary, tokens, 16)]
    assert products.shapes == expected[: 2 + trained]
    assert all(stride % 8 == 0 for stride in products.strides)


def compare_with_float64(vocabulary: int, after: AfterHead) -> None:
    """Log-probabilities of labels, means of logits, the weighted loss, and all gradients of both."""
    torch.manual_seed(0)
    linear, labels = nn.Linear(8, vocabulary), torch.randint(0, vocabulary, (2, 5))
    hidden, weights = 3 * torch.randn(2, 5, 8), torch.randn(8)
    with torch.no_grad():
        linear.bias[labels[0, 1]] = 40.0  # all tokens with this label are confident
    labels[1, 0] = -100  # nothing predicts it
    results: list[list[Tensor]] = []
    for dtype in (torch.float32, torch.float64):
        head = copy.deepcopy(linear).to(dtype)
        states = hidden.to(dtype).requires_grad_()
        operands = (states, head.weight, head.bias)
        if dtype == torch.float64:
            logits = after.scale * head(states)[:, :-1].flatten(0, 1)
            logits = logits if after.cap is None else after.cap * torch.tanh(logits / after.cap)
            values, means = logits.log_softmax(1).gather(1, labels[:, 1:].reshape(-1, 1))[:, 0], logits.mean(1)
            loss = -0.1 * values.sum()
        else:
            places, values, means = log_probs_of(head, states, labels, 8, after)
            assert places.tolist() == [0, 1, 2, 3, 5, 6, 7, 8] and not means.requires_grad
            loss = weighted_loss_of(head, states, labels, 0.1, 8, after)
        of_values = torch.autograd.grad((values * weights.to(dtype)).sum(), operands, retain_graph=True)
        results.append([loss, values, means, *of_values, *torch.autograd.grad(loss, operands)])
    for actual, exact in zip(*results):
        assert (actual - exact).norm() <= 4e-6 * exact.norm(), (vocabulary, after, actual, exact)


COMPARED = [(1000, AfterHead()), (9001, AfterHead(0.5)), (1003, AfterHead(2.0, 3.0))]
KERNEL = """
import torch
from model.test_head import COMPARED, chunked, compare_with_float64

chunked._may_use_kernel = lambda logits, values: values.dtype == torch.float32
for case in COMPARED:
    compare_with_float64(*case)
kinds = [(has_cap, with_gradient) for has_cap in (False, True) for with_gradient in (False, True)]
assert all(chunked._kernel(torch.device("cpu"), torch.float32, *kind) is not None for kind in kinds)
"""


@pytest.mark.parametrize(("vocabulary", "after"), COMPARED, ids=str)
def test_plain_operations_compute_what_float64_does(vocabulary: int, after: AfterHead) -> None:
    compare_with_float64(vocabulary, after)


def test_the_kernel_computes_what_float64_does() -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    changes = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = os.environ | changes
    run = subprocess.run([sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("has_cap", [True, False])
def test_the_kernel_compiles_for_a_gpu(
    has_cap: bool, with_gradient: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute capability 9.0. The interpreter accepts code that the compiler refuses."""
    triton = pytest.importorskip("triton")
    pytest.importorskip("triton.backends.nvidia")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from odb_factory.model import kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"HAS_CAP": has_cap, "GRADIENT": with_gradient, "BLOCK": kernel.BLOCK, "STAGES": kernel.NUM_STAGES}
    pointers = {"logits": "*bf16", "targets": "*i64", "weights": "*fp32", "values": "*fp32", "means": "*fp32"}
    numbers = {"stride": "i32", "size": "i32", "scale": "fp32", "cap": "fp32"}
    types = pointers | numbers | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel._rows, {name: types[name] for name in kernel._rows.arg_names}, constants)
    options = {"num_warps": kernel.NUM_WARPS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]


def test_plain_operations_replace_a_kernel_that_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel does not compile for a CPU, and is tried once."""
    caplog.set_level("INFO")
    monkeypatch.setattr(chunked, "_may_use_kernel", lambda logits, values: True)
    chunked._kernel.cache_clear()
    try:
        check(text_model("soft cap", torch.float32), *batch_of(), rtol=2e-6)
    finally:
        chunked._kernel.cache_clear()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "odb_factory.model.chunked"]
    assert "Triton" in line and "\n" not in line


# Other forwards


def state(model: nn.Module) -> list[tuple[set[str], int]]:
    return [(set(vars(module)), len(module._forward_hooks)) for module in model.modules()]


def test_other_forwards_and_the_model_stay_as_they_were(tiny_text: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_text).eval()
    batch, weights = batch_of()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    before, own = state(model), model(**batch)
    tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    door = WithoutLogits(model)
    with door.weighing(weights):
        assert torch.equal(model(**inputs).logits, own.logits)
        assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), tokens)
        assert model(**inputs, logits_to_keep=2).logits.shape[1] == 2
        assert not door.acted
        assert model(**batch).loss != own.loss
    with pytest.raises(KeyError), door.weighing(weights):
        raise KeyError
    assert torch.equal(model(**batch).logits, own.logits) and torch.equal(model(**batch).loss, own.loss)
    assert state(model) == before


# Adapters and engines


def with_lora(model: Any, **changes: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "lora_dropout": 0.0} | changes
    return get_peft_model(model, LoraConfig(**config)).double().train()


@pytest.mark.parametrize("saved", [[], ["lm_head"], ["embed_tokens", "lm_head"]], ids=["lora", "head", "both"])
def test_lora(saved: list[str]) -> None:
    peft = with_lora(text_model("plain"), modules_to_save=saved or None)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    check(peft, *batch_of())
    with peft.disable_adapter():
        batch, weights = batch_of()
        expected = by_logits(peft, batch, weights)
        with WithoutLogits(peft).weighing(weights):
            assert peft(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-11)


# Custom loss code, and heads of other kinds


@pytest.mark.parametrize("kind", ["gemma3", "voxtral"])
def test_families_with_their_own_loss_code(kind: str) -> None:
    model = tiny_copy(*class_and_config(kind), None).float()
    before = state(model)
    assert isinstance(own_loss(model), AfterHead)
    assert state(model) == before
    batch, weights = batch_of()
    if kind == "gemma3":
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
    check(model, batch, weights, rtol=2e-6)


def another_loss(kind: str) -> Callable[..., Any]:
    """A forward of remote code."""

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


class Linear4bit(nn.Linear):
    """The name of layers in libraries for quantized weights."""


OTHER_LOSSES = ("not shifted", "a further term", "needs its layers", "loss_function is replaced")


@pytest.mark.parametrize("kind", [*OTHER_LOSSES, "LoRA", "quantized", "forward is replaced"])
def test_another_loss_or_head_keeps_its_logits(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    run, (batch, weights) = text_model("plain"), batch_of()
    if kind == "loss_function is replaced":
        run.loss_function = lambda logits, labels, **_: logits.square().mean()
    elif kind == "quantized":
        run.lm_head.__class__ = Linear4bit
    elif kind == "forward is replaced":
        own = run.lm_head.forward
        run.lm_head.forward = lambda hidden: 2 * own(hidden)
    elif kind == "LoRA":
        run = with_lora(run, target_modules=["q_proj", "lm_head"])
    else:
        run.forward = MethodType(another_loss(kind), run)
        batch["output_hidden_states"] = True
    expected = run(**batch)
    caplog.set_level("INFO")
    with WithoutLogits(run).weighing(weights):
        output = run(**batch)
    assert torch.equal(output.loss, expected.loss) and torch.equal(output.logits, expected.logits)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "odb_factory.model.head"]
    what = "its loss" if kind in OTHER_LOSSES else "output embedding"
    assert "Qwen2ForCausalLM: " in line and what in line and "\n" not in line
