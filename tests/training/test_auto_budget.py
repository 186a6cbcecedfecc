"""`token_budget: auto` and the rehearsal, on a CPU whose tensors are counted: trials leave nothing behind."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_meter import CPUMeter
from distributed.ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from plan_checks import budgets, costs, flat_budgets, within
from toy import NUM_ROWS, Stream, pad
from training.toy_training import audit, check_same, ids, losses, make
from training.trainings import deepspeed_forgotten, zero
from transformers import Trainer

from odb_factory import ConfigError, ODBDataLoader, enable_odb
from odb_factory.data.samples import Sample
from odb_factory.errors import ODBError, OutOfMemoryError
from odb_factory.planner import Budget, Cost, make_metadata, plan_optimizer_step
from odb_factory.training import budgets as trials
from odb_factory.training.budgets import heaviest, most_samples_of

MIB = 2**20
CAPACITY = 40 * MIB
"""A training of the tiny model needs about 10 MiB, and each token some 60 KiB."""
BLOCK = {"buffer_size": 16, "audit": True}
AUTO: dict[str, Any] = {"token_budget": "auto", "layout": "flat"}
LONGEST = 40
"""Tokens of the longest row of `Rows`."""
LARGE_STEPS = {"gradient_accumulation_steps": 8}
"""Memory does not hold all samples of an optimizer step at once."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A busy machine ends no search."""
    monkeypatch.setattr(trials, "LIMIT_S", 600)
    caplog.set_level(logging.INFO, "odb_factory")


def trained(folder: Path, model: Any, capacity: int | None, block: dict[str, Any], **changes: Any) -> Trainer:
    trainer = make(model, folder, **{"gradient_accumulation_steps": 2} | changes)
    enable_odb(trainer, memory_meter=None if capacity is None else CPUMeter(capacity), **BLOCK | block)
    trainer.train(resume_from_checkpoint=changes.get("resume_from_checkpoint"))
    return trainer


def budget_of(trainer: Trainer) -> int:
    """The budget that the training has chosen."""
    return trainer.odb.resolved.token_budget


def check_same_audit(ours: Trainer, other: Trainer) -> None:
    check_same(ours, other)
    audits = [audit(Path(trainer.args.output_dir), trainer.args.process_index) for trainer in (ours, other)]
    assert audits[0] == audits[1]


class Counts(Trainer):
    """Collects figures in `compute_loss`, as trl's trainers do."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._total_train_tokens = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self._total_train_tokens += inputs["input_ids"].numel()
        self._metrics["train"]["num_tokens"].append(self._total_train_tokens)
        return loss


@pytest.mark.parametrize("block", [{"layout": "padded"}, {"layout": "flat", "global_batch_size": "fill"}])
def test_trials_leave_nothing_behind(tiny_text, tmp_path, caplog, block) -> None:
    """`auto`, and a rehearsal of its number, train to the last bit as that number without one: gradients, modes,
    buffers and random numbers (dropout) are restored."""
    changes = LARGE_STEPS | {"trainer_class": Counts, "dropout": 0.1}
    auto = trained(tmp_path / "auto", tiny_text, CAPACITY, block | {"token_budget": "auto"}, **changes)
    budget = budget_of(auto)
    (line,) = [message for message in caplog.messages if f"token_budget: auto is {budget}" in message]
    used, limit = (float(line.split(" MiB")[part].split()[-1]) for part in (0, 1))
    assert 0.85 * limit < used <= limit == pytest.approx(0.9 * CAPACITY / MIB, abs=0.1)
    number = block | {"token_budget": budget}
    caplog.clear()
    rehearsed = trained(tmp_path / "rehearsed", tiny_text, 10 * CAPACITY, number, **changes)
    without = trained(tmp_path / "without", tiny_text, None, number, **changes)
    (line,) = rehearsals(caplog)  # `without` has no meter
    weights = sum(weight.numel() * weight.element_size() for weight in without.model.parameters())
    assert float(line.split("peak ")[1].split()[0]) * MIB > 4 * weights, "with gradients and two moments"
    for trainer in (auto, rehearsed):
        check_same_audit(trainer, without)
        assert trainer._metrics == without._metrics
    half = block | {"token_budget": "auto", "memory_fraction": 0.45}
    assert budget_of(trained(tmp_path / "half", tiny_text, CAPACITY, half, max_steps=1, **changes)) < 0.5 * budget


def test_a_resume_keeps_what_was_chosen_unless_a_number_is_given(tiny_text, tmp_path, caplog) -> None:
    block = AUTO | {"max_patches": "auto"}
    saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    budget = budget_of(trained(tmp_path, tiny_text, CAPACITY, block, **saves))
    assert any("max_patches: auto is none" in message for message in caplog.messages)
    rest = {"resume_from_checkpoint": str(tmp_path / "checkpoint-2"), "max_steps": 3}
    kept = trained(tmp_path / "kept", tiny_text, 2 * CAPACITY, block, **rest)
    assert budget_of(kept) == budget
    number = {"token_budget": budget, "layout": "flat"}
    assert losses(kept) == losses(trained(tmp_path / "number", tiny_text, None, number, **rest))
    trained(tmp_path / "other", tiny_text, None, number | {"token_budget": LONGEST}, **rest)
    assert max(line["length"] for line in audit(tmp_path / "other")) <= LONGEST


@pytest.mark.parametrize(
    ("key", "block", "capacity", "changes"),
    [
        ("token_budget", {"token_budget": "auto"}, None, {}),
        ("max_patches", {"token_budget": 64, "max_patches": "auto"}, None, {}),
        ("token_budget", {"token_budget": "auto"}, CAPACITY, {"dataset": Stream(), "max_steps": 1}),
        ("token_budget", {"token_budget": "auto"}, 9 * MIB, {}),  # not even one row fits
    ],
)
def test_auto_without_a_trial_is_refused(tiny_text, tmp_path, key, block, capacity, changes) -> None:
    with pytest.raises(ConfigError, match=f"^odb.{key}: 'auto' ") as refused:
        trained(tmp_path, tiny_text, capacity, block, **changes)
    assert "\n" not in str(refused.value)


def test_a_loop_has_no_auto() -> None:
    with pytest.raises(ConfigError, match="^odb.token_budget: 'auto' "):
        ODBDataLoader([], token_budget="auto", collate_fn=pad)


def test_a_search_ends_in_time_with_what_memory_held(tiny_text, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(trials, "LIMIT_S", 0)
    assert budget_of(trained(tmp_path, tiny_text, CAPACITY, AUTO, max_steps=1)) == LONGEST


def test_ranks_that_cannot_continue_do_not_run_out_of_memory(tiny_text, tmp_path, monkeypatch) -> None:
    """FSDP: no trial begins that the two trials before it show to be too large."""
    monkeypatch.setattr(trials, "engine_of", lambda model: "sharded")
    monkeypatch.setattr(trials, "why_not_split", lambda args: "FSDP")
    assert budget_of(trained(tmp_path, tiny_text, CAPACITY, AUTO, max_steps=1, **LARGE_STEPS)) > 300
    with pytest.raises(ConfigError, match="^odb.token_budget: 'auto' ran out of memory"):
        trained(tmp_path, tiny_text, 7 * MIB, AUTO, max_steps=1)


# The rehearsal

SMALL = 18 * MIB
HEAVY: dict[str, Any] = {"token_budget": 1000, "layout": "flat"}
"""More tokens than `SMALL` holds; an optimizer step of 16 rows has at most 640 on a rank."""
AT_ONCE = LARGE_STEPS | {"per_device_train_batch_size": 2}


def rehearsals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("rehearsal: ")]


@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_a_rehearsal_out_of_memory_ends_before_the_first_step(tiny_text, tmp_path, caplog, layout: str) -> None:
    """`oom: raise`: in one line with a lower budget. `oom: split`: the training begins."""
    block = HEAVY | {"layout": layout}
    with pytest.raises(OutOfMemoryError, match="^rehearsal: .* `token_budget: 480` or less") as caught:
        trained(tmp_path / "heavy", tiny_text, SMALL, block, **AT_ONCE)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "heavy" / "odb_audit_rank0.jsonl").exists()
    trained(tmp_path / "split", tiny_text, SMALL, block | {"oom": "split"}, **AT_ONCE)
    (failed,) = rehearsals(caplog)
    assert failed.endswith("oom: split: training begins nevertheless")
    assert ids(tmp_path / "split").total() == NUM_ROWS


def samples_of(drawn: list[Cost]) -> list[Sample]:
    return [Sample(number, cost, b"") for number, cost in enumerate(drawn)]


@given(st.lists(costs(num_modalities=2), min_size=1, max_size=8), flat_budgets | budgets, st.integers(1, 9))
def test_the_heaviest_micro_batches_are_within_the_budgets_and_full(
    drawn: list[Cost], budget: Budget, most_samples: int
) -> None:
    groups = [[sample.cost for sample in group] for group in heaviest(samples_of(drawn), budget, most_samples)]
    assert max(budget.shape(group)[2] for group in groups) >= max(cost.patches for cost in drawn)
    for group in groups:
        assert len({cost.modality for cost in group}) == 1
        assert len(group) <= most_samples
        assert len(group) == 1 or within(group, budget)
        for text in (cost for cost in drawn if not cost.patches and cost.modality == group[0].modality):
            assert len(group) == most_samples or not within([*group, text], budget)


@given(st.lists(costs(), min_size=1, max_size=24), flat_budgets | budgets, st.integers(1, 6), st.booleans())
def test_no_plan_has_more_samples_in_a_micro_batch(
    drawn: list[Cost], budget: Budget, ranks: int, balance: bool
) -> None:
    of_ranks = [drawn[rank::ranks] for rank in range(ranks)]
    buffers = [make_metadata(of_rank, exhausted=False) for of_rank in of_ranks]
    plan = plan_optimizer_step(buffers, budget, balance=balance)
    most = max(len(group) for groups in plan.groups for group in groups)
    assert most <= most_samples_of(len(drawn), ranks, balance=balance)


@pytest.mark.parametrize(("max_patches", "tried"), [(200, [160]), (100, [160, 90]), (50, [160])])
def test_the_densest_image_that_fits_is_tried_and_larger_ones_alone(max_patches: int, tried: list[int]) -> None:
    drawn = [Cost(60), Cost(40, 160, has_media=True), Cost(30, 90, has_media=True), Cost(20, 0)]
    for layout in ("padded", "flat"):
        groups = heaviest(samples_of(drawn), Budget(60, max_patches, layout=layout), 100)
        patches = [[sample.cost.patches for sample in group if sample.cost.patches] for group in groups]
        assert [group for group in patches if group] == [[count] for count in tried]


def pad_unless_longest(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    if max(len(item["input_ids"]) for item in items) == LONGEST:
        raise ValueError("a picture is broken")
    return pad(items)


def test_a_rehearsal_without_a_trial(tiny_text, tmp_path, caplog) -> None:
    trained(tmp_path / "stream", tiny_text, CAPACITY, {"token_budget": 64}, dataset=Stream(), max_steps=1)
    broken = {"token_budget": 64, "on_error": "skip", "layout": "padded"}
    trained(tmp_path / "broken", tiny_text, CAPACITY, broken, collate=pad_unless_longest)
    assert [word in line for word, line in zip(("stream", "a picture is broken"), rehearsals(caplog))] == [True, True]
    assert 0 < ids(tmp_path / "broken").total() < NUM_ROWS
    with pytest.raises(OutOfMemoryError, match="^rehearsal: .* lower cutoff_len"):
        trained(tmp_path / "row", tiny_text, 6 * MIB, {"token_budget": 40})


# Several ranks


def on_two_ranks(rank: int, model: str, output_dir: str) -> dict[str, Any]:
    """One rank has less memory than the other. Returns the budget of `auto`, the refusal of a rehearsal, and the losses
    under ZeRO-1 with a rehearsal that runs out of memory and without a rehearsal."""
    os.environ["LOCAL_RANK"] = str(rank)
    trials.LIMIT_S = 600
    folder, refused = Path(output_dir, str(rank)), ""
    with deepspeed_forgotten():
        auto = trained(folder / "auto", Path(model), CAPACITY - rank * 10 * MIB, AUTO)
        budget = budget_of(auto)
        check_same_audit(auto, trained(folder / "number", Path(model), None, AUTO | {"token_budget": budget}))
        try:
            trained(folder / "heavy", Path(model), SMALL if rank else 10 * SMALL, HEAVY, **AT_ONCE)
        except ODBError as error:
            refused = str(error)
    engine = {"deepspeed": zero(1), "use_cpu": False, "max_steps": 1} | AT_ONCE
    under_zero = []
    for name, capacity in (("rehearsed", SMALL // 2 if rank else 10 * SMALL), ("without", None)):
        with deepspeed_forgotten():
            split = HEAVY | {"oom": "split"}
            under_zero.append(losses(trained(folder / name, Path(model), capacity, split, **engine)))
    return {"budget": budget, "refused": refused, "under zero": under_zero}


def test_two_ranks_take_the_budget_of_the_smaller_memory(tiny_text, tmp_path) -> None:
    arguments = {"model": str(tiny_text), "output_dir": str(tmp_path)}
    outcomes = run_ranks("training.test_auto_budget:on_two_ranks", tmp_path, limit_s=300, **arguments)
    first, second = (outcome.value for outcome in outcomes)
    assert first["budget"] > 100
    assert first["refused"] == second["refused"]
    assert first["refused"].startswith("rehearsal: out of memory in ")
    for outcome in outcomes:
        rehearsed, without = outcome.value["under zero"]
        assert rehearsed == without != []
        assert "rehearsal: out of memory in the heaviest" in outcome.output, "under ZeRO-1 ranks continue"
    assert any("of the 27.0 MiB that 90% of the memory are" in outcome.output for outcome in outcomes)
