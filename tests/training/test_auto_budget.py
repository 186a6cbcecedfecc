"""`token_budget: auto`: the search on a CPU, by torch's own tracking of memory, leaves nothing behind."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training.test_enable import audit, make
from transformers import Trainer

from odb_factory import enable_odb
from odb_factory.memory.meters import CPUMeter
from odb_factory.training import mixin

MIB = 2**20
CAPACITY = 40 * MIB
"""Of which a training of the tiny model needs about 10, and each token some 60 KiB."""
BLOCK = {"buffer_size": 16, "audit": True}
LONGEST = 40
"""Tokens of the longest row of `Rows`."""


def state_of(trainer: Any) -> dict[str, Any]:
    """All that a search could leave behind."""
    model = trainer.model_wrapped
    numpy = np.random.get_state()
    return {
        "weights and buffers": {name: one.detach().clone() for name, one in model.state_dict().items()},
        "gradients": {name: one.grad for name, one in model.named_parameters()},
        "modes": [module.training for module in model.modules()],
        "optimizer": str(trainer.optimizer.state_dict()),
        "random": (random.getstate(), torch.get_rng_state(), numpy[1], numpy[2:]),
        "sync": (trainer.accelerator.sync_gradients, getattr(model, "require_forward_param_sync", None)),
        "attributes": sorted(vars(trainer)),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor | np.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Watch:
    """In the place of the search: what it chose, and what it left behind."""

    def __init__(self) -> None:
        self.chosen: list[Any] = []
        self.changed: list[str] = []
        self._search = mixin.choose_budgets

    def __call__(self, trainer: Any, *args: Any) -> Any:
        before = state_of(trainer)
        self.chosen.append(self._search(trainer, *args))
        after = state_of(trainer)
        self.changed += [key for key in before if not same(before[key], after[key])]
        return self.chosen[-1]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    found = Watch()
    monkeypatch.setattr(mixin, "choose_budgets", found)
    return found


def trained(folder: Path, model: Path, capacity: int | None, block: dict[str, Any], **changes: Any) -> Trainer:
    trainer = make(Trainer, model, folder, gradient_accumulation_steps=2, **changes)
    enable_odb(trainer, memory_meter=None if capacity is None else CPUMeter(capacity), **BLOCK | block)
    trainer.train(resume_from_checkpoint=changes.get("resume_from_checkpoint"))
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("block", [{"layout": "padded"}, {"layout": "flat", "global_batch_size": "fill"}])
def test_the_training_is_that_of_the_number_that_was_found(tiny_text, tmp_path, watch, caplog, block) -> None:
    """To the last bit, and so it is as if nothing had been tried; a fraction of the memory is a part of the budget."""
    caplog.set_level(logging.INFO, "odb_factory")
    auto = trained(tmp_path / "auto", tiny_text, CAPACITY, block | {"token_budget": "auto"})
    (found,) = watch.chosen
    assert watch.changed == []
    number = trained(tmp_path / "number", tiny_text, None, block | {"token_budget": found.token_budget})
    assert losses(auto) == losses(number)
    assert same(dict(auto.model.state_dict()), dict(number.model.state_dict()))
    assert audit(tmp_path / "auto") == audit(tmp_path / "number")
    (line,) = [one.getMessage() for one in caplog.records if "token_budget: auto is" in one.getMessage()]
    assert f"token_budget: auto is {found.token_budget} (as much as memory_fraction allows): the heaviest" in line
    rows, tokens = (int(line.split(" x ")[part].split()[-1 + part]) for part in (0, 1))
    assert found.token_budget - LONGEST < rows * tokens <= found.token_budget
    used, limit = (float(line.split(" MiB")[part].split()[-1]) for part in (0, 1))
    assert 0.85 * limit < used <= limit == pytest.approx(0.9 * CAPACITY / MIB, abs=0.1)
    trained(tmp_path / "half", tiny_text, CAPACITY, block | {"token_budget": "auto", "memory_fraction": 0.45})
    assert watch.chosen[1].token_budget < 0.5 * found.token_budget
