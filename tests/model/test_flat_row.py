"""I10: forward and backward compute the right flat row, whatever runs in between.

Recomputation (reentrant or not), reference passes, two models, other rows before the backward, other threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError
from training.flat_models import (
    flat_batch,
    gradients,
    largest_difference,
    make_model,
    padded_batch,
    samples,
    sum_of_losses,
)
from transformers import GPT2Config, GPT2LMHeadModel

from odb_factory.model import attention, mixers
from odb_factory.model.flat_row import begin_row, flat_row, row_in_progress, row_of_backward
from odb_factory.model.unpad import LabelLogProbs, positions_of_samples

FIRST, SECOND = (3, 17, 9), (17, 4, 8)
"""Rows of the same total: only their samples differ."""
ROWS = {lengths: samples(lengths) for lengths in (FIRST, SECOND)}


def installed(kind: str, *, reentrant: bool | None = None) -> Any:
    model = make_model(kind, torch.float64)
    mixers.install(model)
    if mixers.has_attention(model):
        attention.install(model)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model


@pytest.fixture(autouse=True)
def no_row_is_left() -> Iterator[None]:
    yield
    begin_row(())


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits, targets = model(**inputs).logits[:, :-1], batch["labels"][:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def gradient_of(model: Any, *rows: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The gradient of these rows, computed one after the other."""
    parts = []
    for lengths in rows:
        sum_of_losses(model, flat_batch(ROWS[lengths]), lengths)
        parts.append(gradients(model))
    model.zero_grad()
    return {name: sum(part[name] for part in parts) for name in parts[0]}


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "reentrant"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text", "mamba2", "gpt_oss"])
def test_another_row_before_the_backward(kind: str, reentrant: bool | None) -> None:
    """A loop adds up the losses of two micro-batches. Without `row_of_backward` recomputation is silently wrong, or
    raises an error."""
    model = installed(kind, reentrant=reentrant)
    expected = gradient_of(model, FIRST, SECOND)
    for remembered in (True, False):
        losses = []
        for lengths in (FIRST, SECOND):
            begin_row(lengths)
            losses.append(loss_of(model, flat_batch(ROWS[lengths])))
            row = row_in_progress()
            assert row is not None
            if remembered:
                row_of_backward((losses[-1], losses[-1] * 2), row)  # a model may return several tensors
        # Without it non-reentrant checkpoints recompute tensors of other shapes.
        with contextlib.nullcontext() if remembered else contextlib.suppress(CheckpointError):
            torch.stack(losses).sum().backward()
        assert row_in_progress() is row, "the last row is in progress again"
        actual = gradients(model)
        is_right = actual.keys() == expected.keys() and largest_difference(actual, expected) < 1e-6
        model.zero_grad()
        assert is_right == (remembered or reentrant is None)


@pytest.mark.parametrize("reentrant", [False, True], ids=["recomputed", "reentrant"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text"])
def test_passes_between_forward_and_backward(kind: str, reentrant: bool) -> None:
    """A reference model on the same row, a model with padded rows, and an evaluation."""
    model, other = installed(kind, reentrant=reentrant), installed(kind)
    expected = gradient_of(model, FIRST)
    batch, rows = flat_batch(ROWS[FIRST]), padded_batch(ROWS[SECOND])
    with torch.no_grad():
        alone = loss_of(other, rows)
    with flat_row(FIRST):
        loss = loss_of(model, batch)
        with torch.no_grad():
            torch.testing.assert_close(loss_of(other, batch), loss.detach())
            with flat_row(()):
                torch.testing.assert_close(loss_of(other, rows), alone)
        loss.backward()
    assert largest_difference(gradients(model), expected) < 1e-9


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text"])
def test_a_forward_of_another_thread(kind: str) -> None:
    """A forward without a row leaves the row of this thread alone. If the thread does not say so, attention refuses."""
    model = installed(kind)
    rows = {"input_ids": torch.arange(5, 12)[None]}
    with torch.no_grad():
        expected = model(**rows).logits

    def forward(within: Any) -> Any:
        with torch.no_grad(), within:
            return model(**rows).logits, row_in_progress()

    with flat_row(FIRST), ThreadPoolExecutor(1) as thread:
        inside = contextlib.ExitStack()
        thread.submit(inside.enter_context, flat_row(())).result()
        row = row_in_progress()
        assert row is not None and row.segments == FIRST, "another thread is within a forward of no row"
        thread.submit(inside.close).result()
        logits, of_thread = thread.submit(forward, flat_row(())).result()
        error = thread.submit(forward, contextlib.nullcontext()).exception()
        assert row_in_progress() is row and of_thread is None
    torch.testing.assert_close(logits, expected)
    assert "not the flat row of 29 tokens" in str(error)


def test_a_model_that_gets_only_token_ids_uses_positions_of_samples() -> None:
    """Learned positions show whether they restart."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    model = GPT2LMHeadModel(config).double().eval()
    rows = [torch.randint(0, 99, (1, length)) for length in FIRST]
    alone = torch.cat([model(input_ids=sample).logits for sample in rows], 1)
    undo = attention.install(model)
    with flat_row(FIRST), positions_of_samples(model):
        flat = model(input_ids=torch.cat(rows, 1)).logits
    undo()
    torch.testing.assert_close(flat, alone)
    assert "forward" not in vars(model)


def test_a_function_that_needs_logits_is_refused() -> None:
    with pytest.raises(TypeError, match="layout"):
        torch.zeros(2, 5, 2).as_subclass(LabelLogProbs).argmax(-1)
