"""With `fill` the learning rate follows the samples done, so a low estimate of the steps does not end it early."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Rows
from training.toy_training import FILL, Rates, Sequential, train
from transformers import Trainer, optimization

from odb_factory import ConfigError
from odb_factory.training.run import FillSchedule

SHORT_THEN_LONG = [3] * 200 + [60] * 60


def short_then_long(k: int) -> dict[str, Any]:
    ids = [k % 60 + 1] * SHORT_THEN_LONG[k]
    return {"input_ids": ids, "labels": ids}


def rates_of(model: Path, folder: Path, kind: type = Sequential, lr_scale: str = "none", **changes: Any) -> list[float]:
    """The short rows come first, so the first window differs from the rest."""
    rows, rates = Rows(short_then_long, len(SHORT_THEN_LONG)), Rates()
    block = FILL | {"buffer_size": 64, "lr_scale": lr_scale}
    train(model, folder, rows, block=block, trainer_class=kind, callbacks=[rates], **changes)
    return rates.rates


def test_a_warmup_beyond_the_estimate_ramps_over_its_steps_and_decays_over_the_rest(tiny_text, tmp_path) -> None:
    """The rate rises to real step 8 and falls over all other steps."""
    warmup_steps = 8
    rates = rates_of(tiny_text, tmp_path, warmup_steps=warmup_steps, lr_scheduler_type="linear")
    assert len(rates) > 2 * warmup_steps
    assert rates[: warmup_steps + 1] == pytest.approx([1e-3 * k / warmup_steps for k in range(warmup_steps + 1)])
    assert all(before > after > 0 for before, after in itertools.pairwise(rates[warmup_steps:]))


@pytest.mark.parametrize("kind", [Sequential, Trainer], ids=["in order", "small window"])
def test_lr_scale_is_refused_if_the_first_window_may_differ_from_the_rest(tiny_text, tmp_path, kind: type) -> None:
    with pytest.raises(ConfigError, match=r"^odb.lr_scale: 'linear' .* buffer_size") as refused:
        rates_of(tiny_text, tmp_path, kind, lr_scale="linear")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "odb_audit_rank0.jsonl").exists(), "no step is taken"


@pytest.mark.parametrize("name", ["GreedyLR", "ReduceLROnPlateau"])
def test_only_a_schedule_that_counts_steps_is_warned_about(name: str, caplog) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    schedule = FillSchedule(is_shuffled=True, is_estimated=True)
    schedule.create(lambda _: getattr(optimization, name)(optimizer), 100, 0)
    assert not caplog.messages
    schedule.create(lambda steps: torch.optim.lr_scheduler.StepLR(optimizer, steps), 100, 0)
    assert caplog.messages == ["StepLR counts optimizer steps, which are estimated as 100"]
