"""Integers known on the host: the same results, losses and gradients, without a read from the device.

Most tests use the device "meta", which has no values: a read from it fails, while a read from a GPU would wait.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers
from model.test_tower import IMAGES, TEXT, VIDEOS, make_batch, make_model
from support import ReadBacks

from odb_factory.model import known as module
from odb_factory.model.known import Known, can_know, ordinary, with_known_integers
from odb_factory.model.tower import images_at_once

CPU, META = torch.device("cpu"), torch.device("meta")
GRID = torch.tensor([[1, 4, 6], [2, 2, 2], [1, 8, 2]])
IDS = torch.tensor([[5, 90, 90, 7, 0], [90, 3, 4, 90, 90]])

COMPUTED: dict[str, Callable[[Any, Any], Any]] = {
    "list": lambda grid, ids: grid.prod(-1).tolist(),
    "number": lambda grid, ids: [grid.sum().item(), int(grid[0, 1]), bool((ids == 90).any())],
    "range": lambda grid, ids: list(range(grid[2, 1])),
    "loop": lambda grid, ids: [int(h * w) for _, h, w in grid],
    "numpy": lambda grid, ids: grid.numpy().tolist(),
    "format": lambda grid, ids: f"{grid[0, 2]} {grid[0, 2]:3d}",
    "repeat": lambda grid, ids: torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0]).cumsum(0).tolist(),
    "places": lambda grid, ids: (ids == 90).nonzero().tolist(),
    "selected": lambda grid, ids: ids[ids == 90].shape,
    "unique": lambda grid, ids: torch.unique_consecutive(ids.flatten()).tolist(),
    "equal": lambda grid, ids: torch.equal(ids, ids.clone()),
    "like": lambda grid, ids: (torch.zeros_like(ids) + ids.new_ones(5)).sum().item(),
    "cat": lambda grid, ids: torch.cat([ids.flatten(), grid.flatten()]).tolist(),
    "split": lambda grid, ids: [len(part) for part in torch.zeros(48).split(grid.prod(-1).tolist())],
    "cpu": lambda grid, ids: grid.to("cpu").tolist(),
    "device": lambda grid, ids: ids.to(ids.device, torch.int32).tolist(),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_results_of_known_integers_are_known(name: str) -> None:
    compute = COMPUTED[name]
    assert compute(Known(GRID, META), Known(IDS, META)) == compute(GRID, IDS)


SELECTED: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda values, mask: values[mask],
    "elements": lambda values, mask: values[mask.unsqueeze(-1).expand_as(values)],
    "with a slice": lambda values, mask: values[mask, 1:],
    "of one dimension, with a slice": lambda values, mask: values[0][mask[0], 1:],
    "beside an index": lambda values, mask: values[1, mask[0]],
    "assigned rows": lambda values, mask: _assigned(values, mask, values[mask] * 2),
    "assigned elements": lambda values, mask: _assigned(
        values, mask.unsqueeze(-1).expand_as(values), values[mask].flatten()
    ),
    "masked_scatter": lambda values, mask: (values * 2).masked_scatter(
        mask.unsqueeze(-1).expand_as(values), values.flip(1).flatten(0, 1)[:7]
    ),
    "masked_fill": lambda values, mask: values.masked_fill(mask.unsqueeze(-1), 0.0),
    "embedding": lambda values, mask: torch.nn.functional.embedding(mask.long(), values.flatten(0, 1)),
}


def _assigned(values: torch.Tensor, mask: Any, rows: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    values[mask] = rows
    return values


@pytest.mark.parametrize("name", SELECTED)
def test_known_masks_select_the_same_values_and_gradients(name: str) -> None:
    """Bit for bit on the CPU; the same shapes on "meta", which cannot count the places of a mask."""
    values, mask = torch.randn(2, 5, 3), IDS == 90

    def run(device: torch.device, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = values.to(device).requires_grad_()
        result = SELECTED[name](leaf, mask)
        return result, torch.autograd.grad((result**2).sum(), leaf)[0]

    try:
        run(CPU, mask)
    except IndexError as error:
        pytest.skip(f"this torch cannot do it either: {error}")  # torch 2.8: a slice after a mask of two dimensions
    for result_of_known, expected in zip(run(CPU, Known(mask, CPU)), run(CPU, mask), strict=True):
        assert torch.equal(result_of_known, expected)
    assert [x.shape for x in run(META, Known(mask, META))] == [x.shape for x in run(CPU, mask)]


def test_writes_reach_all_views_on_both_sides() -> None:
    """Known values are written on the host; other values are read from the device."""
    host = IDS.clone()
    ids = Known(host, CPU)
    row, copy_on_device = ids[1], ids.ordinary()
    ids[:, 0] = 1
    row[2:4] += 1
    ids[ids == 90] = -100
    expected = IDS.clone()
    expected[:, 0] = 1
    expected[1, 2:4] += 1
    expected[expected == 90] = -100
    assert ids.tolist() == expected.tolist() and row.tolist() == expected[1].tolist()
    assert torch.equal(ordinary(ids), expected) and torch.equal(ordinary(row), expected[1])
    row.copy_(torch.arange(5))
    assert ids[1].tolist() == list(range(5)) and torch.equal(ordinary(ids)[1], torch.arange(5))
    assert copy_on_device.shape == ids.shape
    with pytest.raises(TypeError):
        ids.unsqueeze_(0)


def test_a_copy_on_the_device_is_made_once_and_again_after_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []

    def copy_to(host: torch.Tensor, device: torch.device) -> torch.Tensor:
        copies.append(host.shape)
        return host.to(device)

    monkeypatch.setattr(module, "copy_to", copy_to)
    ids = Known(IDS.clone(), META)
    others = torch.zeros(2, 5, dtype=torch.long, device="meta")
    assert (ids + others).device == (ids.detach() * others).device == META
    assert len(copies) == 1
    ids[0, 0] = 3
    assert (ids + others).shape == ids.shape and len(copies) == 2
    wide = ids.unsqueeze(-1).expand(2, 5, 1000)
    assert ordinary(wide).shape == wide.shape and copies[-1] == (2, 5, 1)


def test_access_to_the_memory_gives_an_ordinary_tensor() -> None:
    ids = Known(IDS, CPU)
    assert ids.data_ptr() == ids.ordinary().data_ptr() and ordinary(IDS) is IDS
    for duplicate in (copy.deepcopy(ids), pickle.loads(pickle.dumps(ids))):
        assert type(duplicate) is torch.Tensor and torch.equal(duplicate, IDS)


def test_integers_are_known_on_accelerators_and_not_in_compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert can_know(model, META)
    monkeypatch.setattr(module, "ON_CPU", False)
    assert not can_know(model, CPU)
    monkeypatch.setattr(module, "ON_CPU", True)
    assert can_know(model, CPU)
    assert not can_know(torch.nn.Sequential(torch.compile(model)), CPU)
    model[0].compile()
    assert not can_know(model, CPU)


# Whole models


def gemma3() -> tuple[Any, dict[str, Any]]:
    """Two rows, each with an image of 4 tokens; the second is padded."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Gemma3Config(
        text_config=TEXT | {"num_experts": None, "sliding_window": 16},
        vision_config=vision | {"image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=90,
    )
    ids = torch.tensor([[3, 4, 90, 90, 90, 90, 5, 6, 7, 8], [90, 90, 90, 90, 9, 10, 11, 12, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "token_type_ids": (ids == 90).long()}
    batch |= {"labels": ids.where((ids > 0) & (ids < 80), -100), "pixel_values": torch.randn(2, 3, 16, 16)}
    return transformers.Gemma3ForConditionalGeneration(config), batch


def qwen(family: str) -> tuple[Any, dict[str, Any]]:
    model = make_model(family)
    model.set_attn_implementation({"vision_config": "sdpa"})  # as in a training
    return model, make_batch(IMAGES, VIDEOS)


READS = {"qwen2_5_vl": 4}
if find_spec("transformers.vision_utils") is not None:
    READS = {"qwen2_vl": 2, "qwen3_vl": 2, "qwen3_5": 2, "qwen2_5_vl": 2}
"""Read-backs of a forward and backward with two runs of a tower that reads integers which it computes on the device:
windows, or in newer releases of transformers the size of a merged patch."""


@pytest.mark.versions
@pytest.mark.parametrize("family", ["gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_loss_and_gradients_are_the_same_and_nothing_is_read(family: str) -> None:
    """Bit for bit; forward and backward, also with checkpointing, run on a device that cannot be read."""
    torch.manual_seed(0)
    model, batch = gemma3() if family == "gemma3" else qwen(family)
    model.train()

    def run(model: Any, batch: Any) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]

    for is_reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        model.enable_input_require_grads()
        stock = run(model, batch)
        with ReadBacks() as read_backs:
            with images_at_once(model):
                with_known = run(model, with_known_integers(batch, CPU))
        assert read_backs.lines.total() == READS.get(family, 0), read_backs.lines
        assert all(torch.equal(known, expected) for known, expected in zip(with_known, stock, strict=True))
        if family not in READS:
            meta_batch = {key: value if value.dtype == torch.long else value.to(META) for key, value in batch.items()}
            run(copy.deepcopy(model).to(META), with_known_integers(meta_batch, META))
