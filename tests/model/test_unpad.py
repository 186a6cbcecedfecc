"""Log-probabilities of labels in the place of logits. Trainings: tests/llamafactory, tests/integrations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from odb_factory.model import attention
from odb_factory.model.flat_row import flat_row
from odb_factory.model.unpad import LabelLogProbs, UnpadDoor, positions_of_samples

LENGTHS = (9, 4, 17, 6)


def test_a_model_that_is_given_token_ids_alone_takes_the_positions_of_samples() -> None:
    """Of a table, where it shows whether they restart."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    model = GPT2LMHeadModel(config).double().eval()
    samples = [torch.randint(0, 99, (1, length)) for length in LENGTHS]
    alone = torch.cat([model(input_ids=sample).logits for sample in samples], 1)
    undo = attention.install(model)
    with flat_row(LENGTHS), positions_of_samples(model):
        flat = model(input_ids=torch.cat(samples, 1)).logits
    undo()
    torch.testing.assert_close(flat, alone)
    assert "forward" not in vars(model)


def test_what_needs_logits_says_so() -> None:
    stand_in = torch.zeros(2, 5, 2).as_subclass(LabelLogProbs)
    with pytest.raises(TypeError, match="argmax needs logits, and the layout is flat.*set `layout: padded`"):
        stand_in.argmax(-1)


def test_a_head_that_is_no_linear_layer_is_refused(tiny_text: Path) -> None:
    """Its weight is not what it computes by."""
    lora = LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_text), lora)
    assert "not a plain torch.nn.Linear" in str(UnpadDoor(model).reason)
