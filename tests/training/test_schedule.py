"""With `fill` the learning rate follows the data: it never falls to its end because an estimate was low."""

from __future__ import annotations

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


def train_short_then_long(
    model: Path, folder: Path, block: dict[str, Any], *, in_order: bool = True, rates: Rates, **changes: Any
) -> None:
    """Rows in their order, the short ones first: the first window does not represent the rest."""
    rows = Rows(short_then_long, len(SHORT_THEN_LONG))
    kind = Sequential if in_order else Trainer
    train(model, folder, rows, block=block, trainer_class=kind, callbacks=[rates], **changes)


def test_a_warmup_beyond_the_estimate_ramps_over_its_steps_and_decays_over_the_rest(tiny_text, tmp_path) -> None:
    """As in stock training: up to step 8 of the real steps, then down over all that are left."""
    rates, warmup_steps = Rates(), 8
    changes = {"warmup_steps": warmup_steps, "lr_scheduler_type": "linear"}
    train_short_then_long(tiny_text, tmp_path, FILL | {"buffer_size": 64}, rates=rates, **changes)
    found = rates.rates
    assert len(found) > 2 * warmup_steps
    assert found[: warmup_steps + 1] == pytest.approx([1e-3 * k / warmup_steps for k in range(warmup_steps + 1)])
    assert all(after < before for before, after in zip(found[warmup_steps:], found[warmup_steps + 1 :]))
    assert all(rate > 0 for rate in found[warmup_steps:])


@pytest.mark.parametrize("case", ["in order", "small window"])
def test_lr_scale_is_refused_where_the_first_window_need_not_be_like_the_rest(tiny_text, tmp_path, case: str) -> None:
    rates = Rates()
    block = FILL | {"buffer_size": 64, "lr_scale": "linear"}
    with pytest.raises(ConfigError, match=r"^odb.lr_scale: 'linear' .* buffer_size") as refused:
        train_short_then_long(tiny_text, tmp_path, block, in_order=case == "in order", rates=rates)
    assert "\n" not in str(refused.value)
    assert rates.rates == []


@pytest.mark.parametrize("name", ["GreedyLR", "ReduceLROnPlateau"])
def test_a_schedule_that_goes_by_a_metric_is_not_told_to_count_steps(name: str, caplog) -> None:
    kind = getattr(optimization, name)
    schedule = FillSchedule(None, None, is_shuffled=True, is_estimated=True)
    assert schedule.steps_of_schedule(100, 0) == 100
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    schedule.follow(kind(optimizer))
    assert not caplog.messages
    schedule.follow(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    assert caplog.messages == ["StepLR counts optimizer steps, which are estimated as 100"]
