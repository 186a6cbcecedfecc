"""I10: the check of a tiny copy decides about flat rows as in the table of docs/families.md.

`python -m model.check_families` prints the table; the nightly tests run all its families.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from model.check_families import ALL, FEW, class_and_config, look_at
from training.flat_models import make_model
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from odb_factory.model.check import check, compare_copy

_PADDED = "bloom doge falcon glm_moe_dsa llama4 llama4_text mllama mpt openai-gpt xglm"
PADDED = set(_PADDED.split())
"""Families whose flat rows are wrong."""


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.nightly) for name in ALL if name not in FEW)]
)
def test_families(name: str) -> None:
    """With ignored lengths every family fails by far: attention and positions of the copy matter."""
    family = look_at(name)
    assert isinstance(family.difference, float), family
    assert (family.why is None) == (name not in PADDED), family
    assert isinstance(family.ignored, str) or family.ignored > 100, family


def test_a_model_without_positions_is_refused() -> None:
    class WithoutPositions(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, attention_mask: Any = None) -> Any:
            return super().forward(input_ids=input_ids, attention_mask=attention_mask)

    _, config = class_and_config("llama")
    why = check(WithoutPositions, config, "sdpa", installs=True)
    assert "fails on a flat row" in (why or "") and "position_ids" in (why or "")


def test_the_check_changes_no_state_and_depends_on_none() -> None:
    """Random state, default device, autocast and gradient mode."""
    model = make_model("qwen3", torch.bfloat16)
    config, state = model.config.to_dict(), torch.get_rng_state()
    expected = compare_copy(type(model), model.config, "sdpa", installs=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.to_dict() == config and model.config._attn_implementation == "sdpa"
    torch.manual_seed(5)
    with torch.no_grad(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert compare_copy(type(model), model.config, "sdpa", installs=True) == expected
    assert expected[0] < expected[1] and torch.get_default_dtype() == torch.float32


def test_a_model_with_a_small_vocabulary() -> None:
    config = make_model("qwen3").config
    config.vocab_size, config.pad_token_id = 40, 39
    difference, allowed = compare_copy(transformers.Qwen3ForCausalLM, config, "sdpa", installs=True)
    assert difference < allowed


def test_zero3_does_not_partition_the_copy() -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    zero3 = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    try:
        assert transformers.integrations.is_deepspeed_zero3_enabled()
        # transformers partitions the vision tower in the constructor
        difference, allowed = compare_copy(*class_and_config("qwen2_5_vl"), "sdpa", installs=True)
        assert difference < allowed
        assert transformers.integrations.is_deepspeed_zero3_enabled()
    finally:
        unset_hf_deepspeed_config()
        del zero3


def test_a_copy_that_would_be_large_is_not_made(caplog: pytest.LogCaptureFixture) -> None:
    class Large(transformers.LlamaForCausalLM):
        def __init__(self, config: Any):
            super().__init__(config)
            self.more = torch.nn.Linear(30_000, 1_000)

    _, config = class_and_config("llama")
    with caplog.at_level("INFO", "odb_factory"):
        assert check(Large, config, "sdpa", installs=True) is None
    assert "weights" in caplog.text
