"""Padded micro-batches are filled up to the sizes that were planned, and the model computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from odb_factory import ODBDataLoader, pop_step_info, weighted_loss
from odb_factory.data.collate import CollatedDataset
from odb_factory.data.flat import pad_to_sizes
from odb_factory.data.samples import Sample
from odb_factory.data.serialize import pack
from odb_factory.planning import Budget, Cost, Sizes

SIZED = Budget(96, sizes=Sizes(buckets=(16, 32), limit=96), row_multiple=4)
LENGTHS = (3, 11, 7, 25, 1, 18, 9, 30, 5, 14, 22, 40, 90)


def rows_of(lengths: tuple[int, ...], left: bool = False) -> dict[str, torch.Tensor]:
    longest = max(lengths)
    batch = torch.zeros(3, len(lengths), longest, dtype=torch.int64)
    for row, length in enumerate(lengths):
        span = slice(longest - length, longest) if left else slice(length)
        batch[0, row, span] = 5 + torch.arange(length)
        batch[1, row, span] = 1
    ids, mask = batch[:2]
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


@pytest.mark.parametrize(
    ("attention", "left", "close"), [("sdpa", False, 1e-12), ("sdpa", True, 1e-12), ("eager", False, 1e-6)]
)
def test_the_model_computes_the_same(tiny_text: Path, attention: str, left: bool, close: float) -> None:
    """Loss and gradient; the rows that are added have finite logits, as attention to nothing has not.

    The weights are float64; the softmax of eager attention is not.
    """
    model = AutoModelForCausalLM.from_pretrained(tiny_text, dtype=torch.float64, attn_implementation=attention).train()
    batch = rows_of((9, 4, 13), left)
    longer, added = pad_to_sizes(batch, SIZED)
    assert longer["input_ids"].shape == (4, 16) and added == 1 and batch["input_ids"].shape == (3, 13)
    gradients = []
    for one in (batch, longer):
        output = model(**one)
        assert output.logits.isfinite().all()
        output.loss.backward()
        gradients.append([value.grad.clone() for value in model.parameters()])
        model.zero_grad()
    for before, after in zip(*gradients):
        torch.testing.assert_close(after, before, rtol=0, atol=close)


def test_positions_of_several_kinds() -> None:
    """Three rows of rotary positions go on counting; media tensors stay as they are."""
    heads = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    rotary = {"type": "mrope", "mrope_section": [1, 1, 2]}
    config = Qwen2VLConfig(
        text_config={"vocab_size": 64, "intermediate_size": 16, "rope_scaling": rotary, **heads},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 1},
    )
    model = Qwen2VLForConditionalGeneration(config).double()
    batch = rows_of((9, 4, 13)) | {"pixel_values": torch.zeros(3, 13)}
    batch["position_ids"] = torch.arange(13).expand(3, 3, 13)
    longer, _ = pad_to_sizes(batch, SIZED)
    assert longer["pixel_values"] is batch["pixel_values"]
    assert torch.equal(longer["position_ids"], torch.arange(16).expand(3, 4, 16))
    del batch["pixel_values"], longer["pixel_values"]
    torch.testing.assert_close(model(**longer).loss, model(**batch).loss, rtol=1e-6, atol=0)


def test_a_mask_of_another_kind_is_refused() -> None:
    batch = rows_of((9, 4, 13))
    batch["attention_mask"] = torch.ones(3, 1, 13, 13)
    groups = CollatedDataset(lambda rows: batch, 14, None, SIZED)
    outcome = groups.outcome((None, [Sample(0, Cost(9), pack({}))]))  # type: ignore[arg-type]  # the micro-batch is handed through
    assert outcome.problem.startswith("odb.length_buckets: ") and not outcome.failed


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return rows_of(tuple(len(item["input_ids"]) for item in items))


@pytest.mark.parametrize("mode", ["keep", "fill"])
@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_an_epoch_has_few_shapes(layout: Any, mode: Any) -> None:
    """Without the keys nearly every micro-batch has its own."""
    lengths = [2 + (7 * k + k * k // 9) % 61 for k in range(400)]
    rows = [{"input_ids": [7] * length, "labels": [7] * length} for length in lengths]
    shapes: dict[bool, set[tuple[int, ...]]] = {}
    for sized in (False, True):
        keys: Any = {"length_buckets": [16, 32, 64]} | ({"row_multiple": 4} if layout == "padded" else {})
        if layout == "flat":
            keys["length_buckets"] = [128, 192]
        with ODBDataLoader(
            rows,
            batch_size=24,
            token_budget=256,
            collate_fn=collate,
            layout=layout,
            global_batch_size=mode,
            **(keys if sized else {}),
        ) as loader:
            seen, batches = [], []
            for batch in loader:
                info = pop_step_info(batch)
                seen += info.ids
                batches.append(tuple(batch["input_ids"].shape))
                assert batch["input_ids"].numel() <= 256
                assert info.filler_rows == (len(batch["input_ids"]) - len(info.ids) if layout == "padded" else 0)
            assert sorted(seen) == list(range(400)) and loader.stats()["odb/over_budget"] == 0
            padding = 1 - sum(lengths) / sum(rows * length for rows, length in batches)
            assert loader.stats()["odb/padding_ratio"] == pytest.approx(padding, abs=1e-4), "the plan knows of it"
        shapes[sized] = set(batches)
    # Padded: 4, 8, 12, 16 rows of 16 tokens, 4 and 8 of 32, and 4 of 64.
    assert len(shapes[True]) <= {"padded": 7, "flat": 3}[layout], shapes
    assert len(shapes[True]) < len(shapes[False]), shapes


def test_rows_that_were_added_weigh_nothing(tiny_text: Path) -> None:
    """In float64."""
    model = AutoModelForCausalLM.from_pretrained(tiny_text, dtype=torch.float64)
    rows = [{"input_ids": [5 + k] * length, "labels": [5 + k] * length} for k, length in enumerate(LENGTHS)]
    losses = []
    for keys in ({}, {"length_buckets": [16, 32], "row_multiple": 4}):
        total, added = 0.0, 0
        with ODBDataLoader(rows[3:], batch_size=10, token_budget=96, collate_fn=collate, **keys) as loader:
            for batch in loader:
                info = pop_step_info(batch)
                added += info.filler_rows
                with torch.no_grad():
                    total += float(weighted_loss(model(**batch).logits, batch["labels"], info))
        assert bool(added) == bool(keys)
        losses.append(total)
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
