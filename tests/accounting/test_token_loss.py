"""The weighted token loss, from logits and through the forward of real models; float64 throughout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.functional import cross_entropy, log_softmax
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2MoeConfig, Qwen2MoeForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from odb_factory.accounting.losses import TokenLoss, weighted_token_loss
from odb_factory.errors import ConfigError, DataError

ROW_WEIGHTS = (0.07, 0.3)


def _text(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def _vision(folder: Path) -> nn.Module:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)


def _experts() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )
    model = Qwen2MoeForCausalLM(config).double()
    model.set_experts_implementation("eager")  # the grouped kernel knows no float64
    return model


def _batch(rows: int = 2) -> dict[str, Tensor]:
    """Rows of 9 and 6 tokens; the first three of each, and the padding, without loss."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 100, (rows, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:, 6:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _defined(logits: Tensor, labels: Tensor) -> Tensor:
    """Token by token."""
    losses = -log_softmax(logits, -1)
    total = logits.new_zeros(())
    for row, weight in enumerate(ROW_WEIGHTS):
        for t in range(labels.shape[1] - 1):
            if labels[row, t + 1] != -100:
                total = total + weight * losses[row, t, labels[row, t + 1]]
    return total


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def _is_as_defined(model: nn.Module, wrapped: nn.Module | None = None) -> Any:
    """The loss of a forward with weights, and its gradient, are those of the definition; gives the output."""
    batch = _batch()
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    expected = _defined(logits, batch["labels"])
    wanted = _gradients(model, expected)
    with TokenLoss(wrapped or model, "stock").weighing(ROW_WEIGHTS):
        output = (wrapped or model)(**batch)
    aux = getattr(output, "aux_loss", None)
    aux = 0.0 if aux is None else 0.1 * aux
    assert (output.loss - aux).item() == pytest.approx(expected.item(), rel=1e-12)
    found = _gradients(model, output.loss - aux)
    assert found.keys() == wanted.keys() != set()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-14)
    return output


def test_models_compute_it_in_their_own_forward(tiny_text: Path, tiny_vl: Path) -> None:
    """What a mixture of experts adds for its routers stays in."""
    _is_as_defined(_text(tiny_text))
    _is_as_defined(_vision(tiny_vl))
    assert _is_as_defined(_experts()).aux_loss.item() > 0.5


def test_peft_and_ddp_are_looked_through(tiny_text: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = _text(tiny_text)
    peft = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).double()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        _is_as_defined(peft, nn.parallel.DistributedDataParallel(peft))
    finally:
        torch.distributed.destroy_process_group()


def test_afterwards_the_model_has_its_own_loss_again(tiny_text: Path) -> None:
    model, batch = _text(tiny_text), _batch()
    before = model(**batch).loss.item()
    token_loss = TokenLoss(model, "stock")
    with token_loss.weighing(ROW_WEIGHTS):
        assert model(**batch).loss.item() != before
    assert model(**batch).loss.item() == before
    with pytest.raises(KeyError), token_loss.weighing(ROW_WEIGHTS):
        raise KeyError
    assert model(**batch).loss.item() == before
    assert model.loss_function is ForCausalLMLoss


class FusedLoss(nn.Module):
    """A model whose loss comes from somewhere else, as that of a fused kernel does."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor, **inputs: Any) -> Any:
        logits = self.model(input_ids=input_ids, **inputs).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("kind", ["fused", "own function", "not of transformers"])
def test_a_loss_made_elsewhere_is_refused_by_name(tiny_text: Path, kind: str) -> None:
    model = _text(tiny_text)
    if kind == "own function":
        model.loss_function = lambda logits, labels, vocab_size, **_: ForCausalLMLoss(logits, labels, vocab_size)
    called: nn.Module = FusedLoss(model) if kind == "fused" else model
    if kind == "not of transformers":
        model, called = nn.Linear(1, 1), nn.Identity()
    with pytest.raises(ConfigError) as refused, TokenLoss(model, "stock").weighing(ROW_WEIGHTS):
        called(_batch()["labels"]) if isinstance(called, nn.Identity) else called(**_batch())
    assert str(refused.value).startswith("odb.loss_scaling: 'stock' ") and "\n" not in str(refused.value)


def _flat() -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """The rows of `_batch`, and three tokens that fill up, as one row."""
    batch, filling = _batch(), torch.full((1, 3), 7)
    cut = [(batch["input_ids"][0], batch["labels"][0]), (batch["input_ids"][1, :6], batch["labels"][1, :6])]
    ids, labels = (torch.cat([row[column] for row in cut])[None] for column in (0, 1))
    positions = torch.cat([torch.arange(n) for n in (9, 6, 3)])[None]
    flat = {
        "input_ids": torch.cat([ids, filling], 1),
        "labels": torch.cat([labels, filling * 0 - 100], 1),
        "position_ids": positions,
    }
    return flat, (9, 6, 3)


def test_segments_of_a_flat_row_weigh_what_rows_do(tiny_text: Path) -> None:
    model = _text(tiny_text)
    batch = _batch()
    labels = batch.pop("labels")
    expected = _defined(model(**batch).logits, labels)
    wanted = _gradients(model, expected)
    flat, segments = _flat()
    model.config.use_cache = False
    with TokenLoss(model, "stock").weighing(ROW_WEIGHTS, segments):
        loss = model(**flat).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    found = _gradients(model, loss)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("shape", "segments"), [((1, 17, 5), (9, 6, 3)), ((2, 9, 5), (9, 6, 3)), ((1, 4, 5), ())])
def test_logits_of_other_rows_are_refused(shape: tuple[int, ...], segments: tuple[int, ...]) -> None:
    with pytest.raises(DataError):
        weighted_token_loss(torch.zeros(shape), torch.zeros(shape[:2]).long(), ROW_WEIGHTS, segments=segments)


def _nothing_waits(device: str) -> None:
    logits = torch.zeros(1, 18, 11, device=device, requires_grad=True)
    labels = torch.zeros(1, 18, device=device, dtype=torch.long)
    weighted_token_loss(logits, labels, ROW_WEIGHTS, segments=(9, 6, 3)).backward()
    weighted_token_loss(logits.expand(2, 18, 11), labels.expand(2, 18), ROW_WEIGHTS).backward()


def test_no_value_is_read_back_from_the_device() -> None:
    """On torch's device "meta" there are no values: whatever reads one raises."""
    with pytest.raises(RuntimeError):
        torch.zeros(1, device="meta").tolist()
    _nothing_waits("meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_a_cuda_device() -> None:
    _nothing_waits("cuda")  # what is set up once
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _nothing_waits("cuda")
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_losses_are_those_of_the_model(dtype: torch.dtype) -> None:
    """Upcast and shifted in the same way: with equal weights the sum is the model's own mean."""
    logits, labels = torch.randn(2, 9, 100, dtype=dtype), _batch()["labels"]
    own = ForCausalLMLoss(logits, labels, 100)
    n = int((labels[:, 1:] != -100).sum())
    torch.testing.assert_close(weighted_token_loss(logits, labels, [1 / n] * 2), own, rtol=1e-6, atol=0)
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(
        weighted_token_loss(logits, None, [1 / n] * 2, shift_labels=shifted), own, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("segments", [(), (9, 6, 3)], ids=["padded", "flat"])
def test_autocast_does_not_round_the_loss(dtype: torch.dtype, segments: tuple[int, ...]) -> None:
    """I8: a loop may compute the loss within autocast; loss and gradient are bit for bit those of outside."""
    torch.manual_seed(0)
    labels = _batch()["labels"] if not segments else torch.randint(0, 100, (1, 18))
    logits = torch.randn(*labels.shape, 100)

    def loss_and_gradient() -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        loss = weighted_token_loss(leaf, labels, ROW_WEIGHTS, segments=segments)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient

    expected = loss_and_gradient()
    with torch.autocast("cpu", dtype):
        found = loss_and_gradient()
    assert found[0].dtype == torch.float32
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def logits(request: pytest.FixtureRequest) -> Iterator[Tensor]:
    return torch.randn(2, 256, 512, dtype=request.param, requires_grad=True)


def test_no_second_copy_of_the_logits_is_made(logits: Tensor) -> None:
    labels = torch.randint(0, 512, (2, 256))

    def peak(loss_of: Any) -> int:
        """Bytes live at once in forward and backward, by torch's own tracker."""
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
