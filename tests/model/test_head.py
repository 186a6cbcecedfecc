"""The loss without logits: that of the logits, with all gradients, in any model; and no logits.

Reference: the same model's logits in its own dtype, then a weighted sum of token losses in float64.
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

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
    "loss code of its own": ("mamba", {"state_size": 4}),
}


def in_chunks(patch: pytest.MonkeyPatch, tokens: int) -> None:
    """Chunks of so many tokens, and plain operations on 3 of them."""
    patch.setattr(chunked, "ON_CPU", chunked.Sizes(chunk=0, rows=tokens, tile=3 * VOCABULARY))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also the few tokens of these models make several. Memory that nothing is written to is NaN."""
    in_chunks(monkeypatch, 5)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def text_model(name: str, dtype: torch.dtype = torch.float64) -> Any:
    kind, changes = MODELS[name]
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **COMMON | changes))
    if name == "router loss":
        model.set_experts_implementation("eager")  # the grouped kernel knows no float64
    with torch.no_grad():
        for parameter in model.parameters():  # so that logits are large, and no bias is zero
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype).train()


def batch_of(rows: int = 3, length: int = 11, vocabulary: int = VOCABULARY) -> tuple[dict[str, Tensor], Tensor]:
    """Rows of several lengths, in which few tokens have no loss, and a weight for each position."""
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


def check(model: Any, batch: dict[str, Tensor], weights: Tensor, run: Any = None, rtol: float = 1e-11) -> None:
    expected = by_logits(model, batch, weights)
    wanted = gradients(model, expected)
    door = WithoutLogits(run or model)
    with door.weighing(weights):
        output = (run or model)(**batch)
    assert door.acted, door.reason
    assert output.get("logits") is None
    assert output.loss.item() == pytest.approx(expected.item(), rel=rtol)
    found = gradients(model, output.loss)
    assert found.keys() == wanted.keys() != set()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=100 * rtol, atol=rtol * float(value.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_by_logits(name: str) -> None:
    in_float32 = name == "loss code of its own"  # its forward rounds logits
    check(text_model(name), *batch_of(), rtol=5e-7 if in_float32 else 1e-11)


def test_vision_language_models_too(tiny_vl: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(tiny_vl, dtype=torch.float64)
    check(model, *batch_of())


@pytest.mark.parametrize("num_supervised", [None, 19])
def test_one_weight_for_all_and_one_for_each_row(num_supervised: int | None) -> None:
    model, (batch, weights) = text_model("plain"), batch_of()
    assert (batch["labels"][:, 1:] != -100).sum() == 19
    door = WithoutLogits(model)
    for given in (torch.full((3, 1), 0.25), weights[:, :1]):
        with door.weighing(given, num_supervised):
            loss = model(**batch).loss
        assert loss.item() == pytest.approx(by_logits(model, batch, given.expand(weights.shape)).item(), rel=1e-11)
    with door.weighing(0.25, num_supervised):
        loss = model(**batch).loss
    assert loss.item() == pytest.approx(by_logits(model, batch, torch.full_like(weights, 0.25)).item(), rel=1e-11)


def test_a_micro_batch_without_labels_has_a_loss_of_zero() -> None:
    model, (batch, weights) = text_model("plain"), batch_of()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with WithoutLogits(model).weighing(weights):
        loss = model(**batch).loss
    assert loss.item() == 0
    assert all(not gradient.any() for gradient in gradients(model, loss).values())


# Precision


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    squares = sum(float((found[name] - value).square().sum()) for name, value in exact.items())
    return (squares / sum(float(value.square().sum()) for value in exact.values())) ** 0.5


@pytest.mark.parametrize("head", ["trained", "frozen"])
@pytest.mark.parametrize("kind", ["autocast", "bfloat16"])
def test_gradients_in_low_precision_are_no_worse_than_by_logits(
    kind: str, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where several chunks are added up: bfloat16 has 8 bits."""
    frozen = head == "frozen"
    in_chunks(monkeypatch, 64)
    model = text_model("plain", torch.float32)
    model.lm_head.requires_grad_(not frozen)
    if kind == "bfloat16":
        model = model.bfloat16()
    batch, weights = batch_of(rows=8, length=64)
    exact_model = copy.deepcopy(model).double()
    exact = gradients(exact_model, by_logits(exact_model, batch, weights))

    def computed(loss_of: Callable[[], Tensor]) -> tuple[float, float]:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = loss_of()
        assert loss.dtype in (torch.float32, torch.float64)
        return loss.item(), distance(gradients(model, loss), exact)

    def ours() -> Tensor:
        with WithoutLogits(model).weighing(weights):
            return model(**batch).loss

    (expected, theirs), (found, mine) = computed(lambda: by_logits(model, batch, weights)), computed(ours)
    assert found == pytest.approx(expected, rel=1e-5)
    assert mine <= 1.1 * theirs
    grads = {name for name, value in model.named_parameters() if value.grad is not None}
    assert ("lm_head.weight" in grads) != frozen


@pytest.mark.parametrize("kind", ["autocast", "bfloat16"])
def test_gradients_of_confident_tokens_are_no_worse_than_by_logits(kind: str) -> None:
    """Of a token whose label has nearly all probability, rows of the head cancel, but for what the others have."""
    torch.manual_seed(0)
    linear, labels = nn.Linear(16, 200, bias=False), torch.randint(0, 200, (1, 64))
    linear.weight.data = functional.normalize(linear.weight.data, dim=-1)
    hidden = 12 * linear.weight.data[labels.roll(-1, 1)]
    if kind == "bfloat16":
        hidden, linear = hidden.bfloat16(), linear.bfloat16()
    hidden.requires_grad_()

    def gradient(double: bool, in_blocks: bool) -> Tensor:
        head, states = (copy.deepcopy(one).double() if double else one for one in (linear, hidden))
        states = states.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast" and not double):
            if in_blocks:
                loss = weighted_loss_of(head, states, labels, 1.0)
            else:
                logits = head(states)[0, :-1]
                loss = cross_entropy(logits if double else logits.float(), labels[0, 1:], reduction="sum")
        assert loss < 0.05 * 63, "the tokens are confident"
        loss.backward()
        return states.grad.double()

    exact = gradient(double=True, in_blocks=False)
    theirs, ours = ((gradient(False, in_blocks) - exact).norm() / exact.norm() for in_blocks in (False, True))
    assert ours <= 1.1 * theirs < 0.1


def test_small_weights_do_not_vanish_in_float16() -> None:
    """The gradient of hidden states is computed in forward, before a loss scale is known."""
    torch.manual_seed(0)
    linear, hidden = nn.Linear(16, 512, dtype=torch.float16), torch.randn(1, 20, 16).half()
    labels = torch.randint(0, 512, (1, 20))
    tiny = weighted_loss_of(linear, hidden, labels, 1e-9) * 1e9
    tiny.backward()
    found = linear.weight.grad.clone()
    linear.weight.grad = None
    weighted_loss_of(linear, hidden, labels, 1.0).backward()
    torch.testing.assert_close(found, linear.weight.grad, rtol=1e-2, atol=1e-6)


def test_nothing_is_read_back_where_the_host_knows_the_number_of_supervised_tokens() -> None:
    """The device "meta" has no values to read."""
    linear, hidden = nn.Linear(8, 50, device="meta"), torch.zeros(3, 11, 8, device="meta", requires_grad=True)
    weighted_loss_of(linear, hidden, torch.zeros(3, 11, device="meta", dtype=torch.long), 0.1, 30).backward()


# Speed


class Products(TorchDispatchMode):
    """The shapes of all products of matrices, and the distances of the rows of their factors and results."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int, int]] = []
        self.strides: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = args[-2:]
            self.shapes.append((*a.shape, b.shape[1]))
            self.strides += [max(one.stride()) for one in (a, b, result)]
        return result


@pytest.mark.parametrize(("trained", "vocabulary"), [(True, 1000), (True, 1003), (False, 1000)])
def test_a_chunk_takes_three_products_of_aligned_sizes(
    trained: bool, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sizes but the number of tokens, and a vocabulary that is odd: cuBLAS takes kernels that are several times
    slower otherwise. A frozen head takes two products."""
    monkeypatch.setattr(chunked, "ON_CPU", chunked.ELSEWHERE)
    linear = nn.Linear(16, vocabulary, bias=False).requires_grad_(trained)
    hidden = torch.randn(2, 50, 16, requires_grad=True)
    with Products() as products:
        weighted_loss_of(linear, hidden, torch.randint(0, 1000, (2, 50)), 0.1).backward()
    tokens = 128  # 2 x 49 supervised tokens, padded
    wanted = [(tokens, 16, vocabulary), (tokens, vocabulary, 16), (vocabulary, tokens, 16)]
    assert products.shapes == wanted[: 2 + trained]
    assert all(stride % 8 == 0 for stride in products.strides)


def compare_with_float64(vocabulary: int, after: AfterHead) -> None:
    """Log-probabilities of labels, means of logits, the weighted loss, and all gradients of both."""
    torch.manual_seed(0)
    linear, labels = nn.Linear(8, vocabulary), torch.randint(0, vocabulary, (2, 5))
    hidden, weights = 3 * torch.randn(2, 5, 8), torch.randn(8)
    with torch.no_grad():
        linear.bias[labels[0, 1]] = 40.0  # all tokens with this label are confident
    labels[1, 0] = -100  # nothing predicts it
    found: list[list[Tensor]] = []
    for dtype in (torch.float32, torch.float64):
        head = copy.deepcopy(linear).to(dtype)
        states, by = hidden.to(dtype).requires_grad_(), weights.to(dtype)
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
        of_values = torch.autograd.grad((values * by).sum(), operands, retain_graph=True)
        found.append([loss, values, means, *of_values, *torch.autograd.grad(loss, operands)])
    for ours, exact in zip(*found):
        assert (ours - exact).norm() <= 2e-6 * exact.norm(), (vocabulary, after, ours, exact)


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
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run([sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("has_cap", [True, False])
def test_the_kernel_compiles_for_a_gpu(
    has_cap: bool, with_gradient: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of compute capability 9.0; the interpreter accepts what the compiler does not."""
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


@pytest.mark.parametrize("name", ["plain", "soft cap"])
def test_without_triton_plain_operations_take_its_place(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here it cannot compile, for a CPU. That is tried once."""
    caplog.set_level("INFO")
    monkeypatch.setattr(chunked, "_may_use_kernel", lambda logits, values: True)
    chunked._kernel.cache_clear()
    try:
        check(text_model(name, torch.float32), *batch_of(), rtol=2e-6)
    finally:
        chunked._kernel.cache_clear()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "odb_factory.model.chunked"]
    assert "Triton" in line and "\n" not in line


# Where it acts


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


def test_a_forward_that_somebody_has_wrapped_stays_wrapped() -> None:
    """As accelerate does for autocast."""
    model, (batch, weights) = text_model("plain"), batch_of()
    own, calls = model.forward, []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return own(*args, **kwargs)

    model.forward = wrapped
    check(model, batch, weights)
    assert model.forward is wrapped and calls


def test_a_second_backward_adds_the_same_gradients() -> None:
    model, (batch, weights) = text_model("plain"), batch_of()
    with WithoutLogits(model).weighing(weights):
        loss = model(**batch).loss
    loss.backward(retain_graph=True)
    once = {name: value.grad.clone() for name, value in model.named_parameters()}
    loss.backward()
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.grad, 2 * once[name])


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


# Loss code of a model, and heads of other kinds


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


class Linear4bit(nn.Linear):
    """As the layers of libraries for quantised weights are called."""


OTHER_LOSSES = ("not shifted", "a further term", "needs its layers", "a function that was set")


@pytest.mark.parametrize("kind", [*OTHER_LOSSES, "LoRA", "quantised", "its own function"])
def test_another_loss_or_head_keeps_its_logits(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    run, (batch, weights) = text_model("plain"), batch_of()
    if kind == "a function that was set":
        run.loss_function = lambda logits, labels, **_: logits.square().mean()
    elif kind == "quantised":
        run.lm_head.__class__ = Linear4bit
    elif kind == "its own function":
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
