"""I10: forward and backward compute the right flat row, whatever runs in between.

Rows that are recomputed after other rows: tests/loop/test_flat.py. Reference passes: the cells of dpo in
tests/llamafactory/test_same_training.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from training.flat_models import make_model
from transformers import GPT2Config, GPT2LMHeadModel

from odb_factory.model import attention, mixers
from odb_factory.model.flat_row import begin_row, flat_row, row_in_progress
from odb_factory.model.unpad import LabelLogProbs, positions_of_samples

ROW = (3, 17, 9)


@pytest.fixture(autouse=True)
def no_row_is_left() -> Iterator[None]:
    yield
    begin_row(())


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text"])
def test_a_forward_of_another_thread(kind: str) -> None:
    """A forward without a row leaves the row of this thread alone. If the thread does not say so, attention refuses."""
    model = make_model(kind, torch.float64)
    mixers.install(model)
    attention.install(model)
    rows = {"input_ids": torch.arange(5, 12)[None]}
    with torch.no_grad():
        expected = model(**rows).logits

    def forward(within: Any) -> Any:
        with torch.no_grad(), within:
            return model(**rows).logits, row_in_progress()

    with flat_row(ROW), ThreadPoolExecutor(1) as thread:
        inside = contextlib.ExitStack()
        thread.submit(inside.enter_context, flat_row(())).result()
        row = row_in_progress()
        assert row is not None and row.segments == ROW, "another thread is within a forward of no row"
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
    rows = [torch.randint(0, 99, (1, length)) for length in ROW]
    alone = torch.cat([model(input_ids=sample).logits for sample in rows], 1)
    undo = attention.install(model)
    with flat_row(ROW), positions_of_samples(model):
        flat = model(input_ids=torch.cat(rows, 1)).logits
    undo()
    torch.testing.assert_close(flat, alone)
    assert "forward" not in vars(model)


def test_a_function_that_needs_logits_is_refused() -> None:
    with pytest.raises(TypeError, match="layout"):
        torch.zeros(2, 5, 2).as_subclass(LabelLogProbs).argmax(-1)
