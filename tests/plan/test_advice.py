"""What is recommended, and what people are warned of, by looks whose outcome is known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from test_docs import first_column

from odb_factory.config import ODBConfig
from odb_factory.plan.arguments import Asked, ParsedArguments, ranks_of
from odb_factory.plan.look import Advice, Look, advise, budgets_around
from odb_factory.plan.rows import ObservedRow, Sample, Step, parts_of
from odb_factory.plan.show import to_dict
from odb_factory.plan.simulate import Figures
from odb_factory.planning import ROW, Cost


class Arguments:
    cutoff_len, per_device_train_batch_size, gradient_accumulation_steps, data_seed, seed = 512, 2, 4, None, 7


def asked(ranks: int = 1, **block: Any) -> Asked:
    parsed = ParsedArguments(*[Arguments()] * 4)
    config = ODBConfig.from_block({"token_budget": 1024} | block)
    return Asked(
        path=Path("my.yaml"), parsed=parsed, config=config, has_block=True, auto=(), ranks=ranks, uses_cpu=True
    )


def outcome(budget: int, speed: float, **figures: Any) -> Figures:
    plain = {"name": "odb", "layout": "flat", "max_patches": None, "optimizer_steps": 4, "micro_steps": 8}
    plain |= {"micro_batches": 2.0, "least_micro_batches": 2, "most_micro_batches": 2, "samples_per_micro_step": 4.0}
    plain |= dict.fromkeys(("padding_ratio", "balance", "patch_balance", "step_efficiency"), 0.8)
    plain |= {
        "budget_use": 0.9,
        "limit": 0.9,
        "share_of_limit": 0.9,
        "overlong": 0,
        "most_tokens": 9,
        "most_patches": 0,
    }
    return Figures(token_budget=budget, speed=speed, **(plain | figures))


def a_look(asked_for: Asked, budgets: list[Figures], seen: list[ObservedRow] | None = None, **figures: Any) -> Look:
    seen = seen or [ObservedRow(index=0, source="texts", cost=Cost(8, units=1))]
    sample = Sample(seen=seen, steps=[Step(start=0, rows=np.zeros(1, ROW))], population=64, resampled="", seconds=1.0)
    plain: dict[str, Any] = {"layout": "flat", "layout_reason": "it is right", "step_size": 8}
    plain["bound_by_longest"] = 0.0
    own = next(one for one in budgets if one.token_budget == 1024)
    plain |= {"own": own, "other_layout": own}
    examples = {one.reason: one.message for one in seen if one.cost is None}
    plain |= {"fixed": outcome(0, 1.0), "examples": examples}
    parts = parts_of(seen, ["texts"])
    return Look(asked=asked_for, sample=sample, parts=parts, budgets=budgets, **(plain | figures))


BUDGETS = [outcome(512, 1.2, overlong=3), outcome(1024, 1.9), outcome(2048, 1.99), outcome(4096, 2.0)]


def test_the_smallest_budget_that_is_about_as_fast_as_any() -> None:
    assert advise(a_look(asked(), BUDGETS)).token_budget == 2048
    slow = [outcome(512, 1.999, overlong=3), *BUDGETS[1:]]
    assert advise(a_look(asked(), slow)).token_budget == 2048, "not one that samples break"
    assert "`token_budget: auto` tries what fits" in advise(a_look(asked(), BUDGETS)).sentence


def test_max_patches_grows_with_the_budget() -> None:
    budgets = [dataclasses.replace(one, max_patches=(one.token_budget or 0) // 8) for one in BUDGETS]
    advice = advise(a_look(asked(max_patches=128), budgets))
    assert (advice.token_budget, advice.max_patches) == (2048, 256)
    assert advice.sentence.startswith("token_budget: 2048, max_patches: 256, layout: auto: ")
    assert "max_patches" not in advise(a_look(asked(), BUDGETS)).sentence
    assert "1024" not in advice.sentence, "one budget in one sentence"


def warned(found: Look, *words: str) -> Advice:
    advice = advise(found)
    assert any(all(word in line for word in words) for line in advice.warnings), advice.warnings
    return advice


def test_warnings() -> None:
    assert advise(a_look(asked(), BUDGETS)).warnings == []
    warned(a_look(asked(4), BUDGETS, bound_by_longest=0.8), "in 80%", "the longest sample", "fewer ranks")
    empty = [outcome(1024, 1.9, budget_use=0.2, micro_batches=1.0)]
    warned(a_look(asked(2), empty), "fills 20%", "of 2 ranks")
    few = a_look(asked(2), empty)
    few = dataclasses.replace(few, sample=dataclasses.replace(few.sample, population=5))
    warned(few, "there are 5 rows", f"{few.step_size} samples")
    rows = [ObservedRow(index=0, source="texts", cost=Cost(8, units=1), uncut=700)]
    for reason in ("media_cut", "unsupervised", "unreadable"):
        rows.append(ObservedRow(index=1, source="texts", reason=reason, message=f"row of {reason}"))
    found = a_look(asked(), BUDGETS, rows)
    warned(found, "1 of 1 samples are cut off at cutoff_len 512", "700")
    pictures = [ObservedRow(index=0, source="texts", cost=Cost(8, 40, units=1))]
    warned(a_look(asked(), BUDGETS, pictures), "without max_patches", "up to ")
    capped = [dataclasses.replace(one, max_patches=64) for one in BUDGETS]
    assert advise(a_look(asked(max_patches=64), capped, pictures)).warnings == []
    warned(found, "1 of 4 rows have no supervised token", "left out", "row of unsupervised")
    warned(found, "opened and then cut off", "the training would end", "row of media_cut")
    warned(found, "cannot be read", "the training would end", "row of unreadable")
    dropping = a_look(asked(overlong="drop", on_error="skip"), BUDGETS, rows)
    assert not any("would end" in line for line in advise(dropping).warnings)


def test_budgets_around_are_powers_of_two() -> None:
    assert budgets_around(asked().config, 1) == [128, 256, 512, 1024, 2048, 4096, 8192]
    assert budgets_around(asked(token_budget=3000).config, 600) == [1024, 2048, 3000, 4096, 8192, 16384]
    assert budgets_around(asked(pad_to_multiple_of=1024).config, 1)[0] == 1024


def test_ranks_of_a_training_that_is_started_here() -> None:
    assert ranks_of({}) == max(torch.cuda.device_count(), 1)
    assert ranks_of({"WORLD_SIZE": "6"}) == 6
    assert ranks_of({"FORCE_TORCHRUN": "1", "NNODES": "2", "NPROC_PER_NODE": "8"}) == 16


def test_figures_are_json() -> None:
    found = a_look(asked(), BUDGETS)
    content = json.loads(json.dumps(to_dict(found, advise(found))))
    assert content["budgets"][1] == content["own"] and content["data"][0]["tokens"]["most"] == 8
    options = {"key=value", "--ranks N", "--samples N", "--json FILE", "--png FILE"}
    assert content.keys() | content["own"].keys() == first_column("Plan") - options
