"""Waits for the GPU in a training of LLaMA-Factory (I14), counted on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
from llamafactory.train.tuner import run_exp
from support import Convolutions, ReadBacks, read_log, training_config
from tiny_models import TinyModels

from odb_factory.model import known
from odb_factory.training.trainer import ODBTrainerMixin

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen3_vl": ("vl", 4, {}),
    "qwen3_vl, LoRA": ("vl", 4, {"finetuning_type": "lora", "bf16": True}),
    "qwen3_5": ("vl_delta", 4, {}),
    "qwen2_5_vl": ("qwen2_5_vl", 4, {}),
}
"""Model, most read-backs of a micro-batch, and changes to the YAML.
Without gradient checkpointing, which in LLaMA-Factory fails with transformers 5.24."""


@pytest.mark.versions
@pytest.mark.parametrize("name", CASES)
def test_a_micro_batch_waits_at_most_four_times(name: str, tiny_vl, tiny_text, data_dir, tmp_path, monkeypatch) -> None:
    """The losses equal those without known integers."""
    kind, most, changes = CASES[name]
    model, losses = TinyModels(tiny_text, tiny_vl, tmp_path)(kind), []
    read_backs, micro_batches = ReadBacks(is_on=False), 0
    step, forward_backward = ODBTrainerMixin.training_step, ODBTrainerMixin.odb_forward_backward

    def counted_step(self: Any, *args: Any) -> Any:
        read_backs.is_on = self.state.global_step == 1  # the second of three, and the Trainer's work after it
        return step(self, *args)

    def counted(self: Any, *args: Any) -> Any:
        nonlocal micro_batches
        micro_batches += read_backs.is_on
        return forward_backward(self, *args)

    for is_known in (False, True):
        monkeypatch.setattr(known, "ON_CPU", is_known)
        out = tmp_path / str(is_known)
        config = training_config(model, data_dir, out, dataset="pictures", max_steps=3, freeze_vision_tower=False)
        config["disable_gradient_checkpointing"] = True
        config |= {"gradient_accumulation_steps": 4, "odb": {"token_budget": 512}} | changes
        config["template"] = "qwen2_vl" if kind == "qwen2_5_vl" else "qwen3_vl"
        if is_known:
            monkeypatch.setattr(ODBTrainerMixin, "training_step", counted_step)
            monkeypatch.setattr(ODBTrainerMixin, "odb_forward_backward", counted)
            with read_backs:
                run_exp(config)
        else:
            with Convolutions() as convolutions:
                run_exp(config)
            # A Gated DeltaNet has convolutions of its own.
            assert kind == "vl_delta" or not convolutions.count, "patches are embedded by a matrix product"
        losses.append([entry["loss"] for entry in read_log(out) if "loss" in entry])
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert read_backs.lines.total() <= most * micro_batches, (micro_batches, read_backs.lines)
    assert micro_batches
