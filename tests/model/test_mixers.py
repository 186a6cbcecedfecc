"""Mixers that carry state along a flat row: each sample has the same results as alone (I10)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training.flat_models import (
    LENGTHS,
    MIXERS,
    OF_A_CLASS,
    flat_batch,
    gradients,
    largest_difference,
    make_model,
    padded_batch,
    samples,
    sum_of_losses,
)

from odb_factory import ConfigError
from odb_factory.model import attention, mixers
from odb_factory.model.flat_row import call_all
from odb_factory.model.mixers import EQUAL_GROUPS, SMALL, WASTE, PaddedGroups

ROUNDING = 2e-7
"""Allowed difference of gradients: some families compute a part of their mixer in float32, whatever the weights are. If
a processor rounds more (Zamba: 3e-6), padded rows differ too, and flat rows may differ twice as much as padded rows."""


def install_both(model: Any) -> Callable[[], None]:
    undo = [mixers.install(model)]
    if model.config._attn_implementation == "sdpa" and attention.why_unusable(model) is None:
        undo.append(attention.install(model))
    return functools.partial(call_all, undo)


def alone(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of the samples one by one."""
    total, summed = 0.0, {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    for row in samples():
        total += float(sum_of_losses(model, flat_batch([row])))
        for name, gradient in gradients(model).items():
            summed[name] += gradient
    return total, summed


def check_flat_is_alone(model: Any) -> None:
    loss, gradient = alone(model)
    sum_of_losses(model, padded_batch(samples()))
    padded = largest_difference(gradients(model), gradient)
    assert padded < 1e-5
    limit = max(ROUNDING, 2 * padded)
    undo = install_both(model)
    assert float(sum_of_losses(model, flat_batch(samples()), LENGTHS)) == pytest.approx(loss, rel=limit)
    flat_gradient = gradients(model)
    assert largest_difference(flat_gradient, {name: gradient[name] for name in flat_gradient}) < limit
    undo()


@pytest.mark.parametrize("kind", MIXERS)
def test_a_flat_row_is_its_samples_alone(kind: str) -> None:
    """Loss and gradient, I10."""
    model = make_model(kind, torch.float64)
    check_flat_is_alone(model)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1", "lfm2", "granitemoehybrid", "recurrent_gemma"])
def test_gradient_checkpointing(kind: str, reentrant: bool) -> None:
    model = make_model(kind, torch.float64)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    check_flat_is_alone(model)


def test_lora_in_a_mixer_under_autocast() -> None:
    """Flat rows differ from samples alone by no more than padded rows do; both round to bfloat16."""
    model = make_model("qwen3_5_text")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["in_proj_qkv", "out_proj", "q_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.2)
    with torch.autocast("cpu", torch.bfloat16):
        _, expected = alone(adapted)
        expected = {name: gradient for name, gradient in expected.items() if "lora" in name}
        sum_of_losses(adapted, padded_batch(samples()))
        rounding = largest_difference(gradients(adapted), expected)
        install_both(model)
        sum_of_losses(adapted, flat_batch(samples()), LENGTHS)
    assert largest_difference(gradients(adapted), expected) < max(2 * rounding, 0.02)


# The groups


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.booleans())
def test_groups_hold_each_token_once_within_their_bound(lengths: list[int], ranks_are_alike: bool) -> None:
    """If ranks must be alike, every row has EQUAL_GROUPS groups."""
    groups = PaddedGroups(lengths, EQUAL_GROUPS) if ranks_are_alike else PaddedGroups(lengths)
    row = torch.arange(1, sum(lengths) + 1)[None]
    blocks = groups.unpack(row)
    assert torch.equal(groups.pack(blocks), row)
    rows = {tuple(ids[: int(ids.count_nonzero())].tolist()) for block in blocks for ids in block if ids.any()}
    assert rows == {tuple(ids.tolist()) for ids in row[0].split(lengths)}, "whole samples, padded on the right"
    if ranks_are_alike:
        assert len(blocks) == EQUAL_GROUPS
        return
    for block in blocks:
        tokens = int(block.count_nonzero())
        assert block.numel() - tokens <= max(WASTE * tokens, SMALL)
    assert len(blocks) <= 2 + math.log(max(lengths) / min(lengths)) / math.log(1 / (1 - WASTE)) * 2


@pytest.mark.parametrize("kind", OF_A_CLASS)
def test_rows_with_a_fixed_number_of_groups(kind: str) -> None:
    """Loss and gradient, I10; the backward, in which ranks wait for each other, includes all calls of a mixer."""
    model = make_model(kind, torch.float64)
    for parameter in model.parameters():
        parameter.ds_id = 0  # the mark of ZeRO-3 on sharded parameters, however ZeRO-3 is started
    check_flat_is_alone(model)
    undo = mixers.install(model)
    calls: list[str] = []
    for mixer in mixers.find(model):
        part = next(part for part in mixer.modules() if isinstance(part, torch.nn.Linear))
        part.register_forward_hook(lambda module, args, output: calls.append("forward"))
        part.register_full_backward_hook(lambda module, before, after: calls.append("backward"))
    sum_of_losses(model, flat_batch(samples()), LENGTHS)
    assert calls.count("forward") == calls.count("backward") == EQUAL_GROUPS * len(mixers.find(model))
    undo()


# Install and undo


@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba", "lfm2"])
def test_generation_is_as_before(kind: str) -> None:
    model = make_model(kind).eval()
    ids, _ = samples()[1]
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    expected = model.generate(ids[None], **options)
    undo = install_both(model)
    assert torch.equal(model.generate(ids[None], **options), expected)
    undo()


def test_tokens_that_the_row_does_not_have_are_refused() -> None:
    model = make_model("mamba2")
    mixers.install(model)
    with pytest.raises(ConfigError, match=r"flat row of 66 tokens.*`layout: padded`"):
        sum_of_losses(model, flat_batch(samples()), (*LENGTHS[:-1], LENGTHS[-1] - 1))
