"""`token_budget: auto` and `rehearse`: what is tried on a CPU, by tracking of tensors, leaves nothing behind."""

from __future__ import annotations

import logging
import os
import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from distributed.ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from planning_strategies import budgets, costs, flat_budgets, within
from support import need, read_audit
from toy import NUM_ROWS, Stream, pad
from training.gradient_ranks import zero
from training.toy_training import audit, ids, losses, make
from transformers import Trainer

from odb_factory import ConfigError, ODBConfig, ODBDataLoader, enable_odb
from odb_factory.data.samples import Sample
from odb_factory.errors import ODBError, OutOfMemoryError
from odb_factory.memory import CPUMeter, find_meter
from odb_factory.planning import Budget, Cost, make_metadata, plan_optimizer_step
from odb_factory.training import session
from odb_factory.training.auto_budget import Search

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
        self._search = session.choose_budgets

    def __call__(self, trainer: Any, *args: Any) -> Any:
        before = state_of(trainer)
        self.chosen.append(self._search(trainer, *args))
        after = state_of(trainer)
        self.changed += [key for key in before if not same(before[key], after[key])]
        return self.chosen[-1]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    found = Watch()
    monkeypatch.setattr(session, "choose_budgets", found)
    return found


def trained(folder: Path, model: Path, capacity: int | None, block: dict[str, Any], **changes: Any) -> Trainer:
    trainer = make(model, folder, **{"gradient_accumulation_steps": 2} | changes)
    enable_odb(trainer, memory_meter=None if capacity is None else CPUMeter(capacity), **BLOCK | block)
    trainer.train(resume_from_checkpoint=changes.get("resume_from_checkpoint"))
    return trainer


@pytest.mark.parametrize("block", [{"layout": "padded"}, {"layout": "flat", "global_batch_size": "fill"}])
def test_the_training_is_that_of_the_number_that_was_found(tiny_text, tmp_path, watch, caplog, block) -> None:
    """To the last bit, and so it is as if nothing had been tried; a fraction of the memory is a part of the budget."""
    caplog.set_level(logging.INFO, "odb_factory")
    large = {"gradient_accumulation_steps": 8}  # an optimizer step that the memory does not hold at once
    auto = trained(tmp_path / "auto", tiny_text, CAPACITY, block | {"token_budget": "auto"}, **large)
    (found,) = watch.chosen
    assert watch.changed == []
    number = trained(tmp_path / "number", tiny_text, None, block | {"token_budget": found.token_budget}, **large)
    assert losses(auto) == losses(number)
    assert same(dict(auto.model.state_dict()), dict(number.model.state_dict()))
    assert read_audit(tmp_path / "auto") == read_audit(tmp_path / "number")
    (line,) = [one.getMessage() for one in caplog.records if "token_budget: auto is" in one.getMessage()]
    assert f"token_budget: auto is {found.token_budget} (as much as memory_fraction allows): the heaviest" in line
    rows, tokens = (int(line.split(" x ")[part].split()[-1 + part]) for part in (0, 1))
    assert found.token_budget - LONGEST < rows * tokens <= found.token_budget
    used, limit = (float(line.split(" MiB")[part].split()[-1]) for part in (0, 1))
    assert 0.85 * limit < used <= limit == pytest.approx(0.9 * CAPACITY / MIB, abs=0.1)
    half = {"token_budget": "auto", "memory_fraction": 0.45}
    trained(tmp_path / "half", tiny_text, CAPACITY, block | half, **large)
    assert watch.chosen[1].token_budget < 0.5 * found.token_budget


def test_a_resume_keeps_what_was_chosen_unless_a_number_is_given(tiny_text, tmp_path, watch, caplog) -> None:
    caplog.set_level(logging.INFO, "odb_factory")
    auto, keys = {"token_budget": "auto", "max_patches": "auto", "layout": "flat"}, {"save_strategy": "steps"}
    trained(tmp_path, tiny_text, CAPACITY, auto, save_steps=2, max_steps=2, **keys)
    (found,) = watch.chosen
    assert found.max_patches is None
    assert any("max_patches: auto is none, as the samples have no media" in one.getMessage() for one in caplog.records)
    checkpoint = str(tmp_path / "checkpoint-2")

    def resumed(folder: str, capacity: int | None, block: dict[str, Any]) -> Trainer:
        trainer = make(tiny_text, tmp_path / folder, gradient_accumulation_steps=2, max_steps=3)
        enable_odb(trainer, memory_meter=None if capacity is None else CPUMeter(capacity), **BLOCK | block)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    kept = resumed("kept", 2 * CAPACITY, auto)
    assert len(watch.chosen) == 1
    assert any(f"token_budget: auto is {found.token_budget}, max" in one.getMessage() for one in caplog.records)
    number = resumed("number", None, {"token_budget": found.token_budget, "layout": "flat"})
    assert losses(kept) == losses(number)
    resumed("other", None, {"token_budget": LONGEST, "layout": "flat"})
    assert max(line["length"] for line in audit(tmp_path / "other")) <= LONGEST


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


class Jumps(Trainer):
    """Above a number of tokens it takes much more memory than below, as no small micro-batch shows."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if inputs["input_ids"].numel() > 300:
            torch.zeros(CAPACITY, dtype=torch.uint8)
        return loss


def test_running_out_of_memory_is_a_bound(tiny_text, tmp_path, watch) -> None:
    trainer = make(tiny_text, tmp_path, gradient_accumulation_steps=2, trainer_class=Jumps)
    enable_odb(trainer, memory_meter=CPUMeter(CAPACITY), token_budget="auto", layout="flat", **BLOCK)
    trainer.train()
    (found,) = watch.chosen
    assert watch.changed == []
    assert 200 < found.token_budget <= 300 + LONGEST
    assert ids(tmp_path).total() == NUM_ROWS


def test_a_row_that_does_not_fit_ends_in_one_line(tiny_text, tmp_path) -> None:
    with pytest.raises(ConfigError, match="not even one row of 40 tokens fits into .* MiB .*; lower cutoff_len"):
        trained(tmp_path, tiny_text, 9 * MIB, {"token_budget": "auto"})


def test_where_nothing_can_be_tried(tiny_text, tmp_path) -> None:
    def refused(message: str, block: dict[str, Any], capacity: int | None = None, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            trained(tmp_path, tiny_text, capacity, block, **changes)
        assert len(str(caught.value).splitlines()) == 1

    refused("odb.token_budget: 'auto' tries .* on an accelerator.*set a number", {"token_budget": "auto"})
    refused("odb.max_patches: 'auto' tries", {"token_budget": 64, "max_patches": "auto"})
    refused("those of a stream", {"token_budget": "auto"}, CAPACITY, dataset=Stream(), max_steps=1)
    with pytest.raises(ConfigError, match=r"odb.token_budget: 'auto' runs the model .* give a number"):
        ODBDataLoader([], token_budget="auto", collate_fn=pad)


# The rehearsal

SMALL = 18 * MIB
HEAVY = {"token_budget": 1000, "rehearse": True}
"""More tokens than `SMALL` holds; an optimizer step of 16 rows has at most 640 on a rank."""
AT_ONCE = {"gradient_accumulation_steps": 8, "per_device_train_batch_size": 2}


def said_of_rehearsal(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("rehearse: ")]


@pytest.mark.parametrize("capacity", [None, 10 * CAPACITY])
@pytest.mark.parametrize("block", [{"layout": "padded"}, {"layout": "flat", "global_batch_size": "fill"}])
def test_a_rehearsal_leaves_nothing_behind(tiny_text, tmp_path, caplog, block, capacity) -> None:
    """To the last bit; without a meter, as on a CPU, and with one, which counts the optimizer's state."""
    caplog.set_level(logging.INFO, "odb_factory")
    block = block | {"token_budget": 300}
    rehearsed = trained(tmp_path / "rehearsed", tiny_text, capacity, block | {"rehearse": True}, trainer_class=Counts)
    (line,) = said_of_rehearsal(caplog)
    assert line.startswith("rehearse: the heaviest micro-batch, ") and "went through in" in line
    assert 300 - LONGEST < int(line.split(" tokens")[0].split()[-1]) <= 300
    if capacity is not None:
        weights = sum(one.numel() * one.element_size() for one in rehearsed.model.parameters())
        assert float(line.split("peak ")[1].split()[0]) * MIB > 4 * weights, "with gradients and two moments"
    without = trained(tmp_path / "without", tiny_text, None, block, trainer_class=Counts)
    assert len(said_of_rehearsal(caplog)) == 1, "a CPU does none by default"
    assert losses(rehearsed) == losses(without)
    assert rehearsed._metrics == without._metrics
    assert same(dict(rehearsed.model.state_dict()), dict(without.model.state_dict()))
    assert read_audit(tmp_path / "rehearsed") == read_audit(tmp_path / "without")


@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_what_would_not_fit_ends_before_the_first_step_with_the_largest_budget_that_passed(
    tiny_text, tmp_path, caplog, layout: str
) -> None:
    with pytest.raises(OutOfMemoryError, match="rehearse: out of memory in .* before the first optimizer") as caught:
        trained(tmp_path / "heavy", tiny_text, SMALL, HEAVY | {"layout": layout}, **AT_ONCE)
    message = str(caught.value)
    assert message.endswith("; set this, `oom: split`, or `rehearse: false` to begin without.")
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "heavy" / "odb_audit_rank0.jsonl").exists()
    found = int(message.split("`token_budget: ")[1].split("`")[0])
    assert 40 < found < 640
    caplog.set_level(logging.INFO, "odb_factory")
    trained(tmp_path / "found", tiny_text, SMALL, HEAVY | {"token_budget": found, "layout": layout}, **AT_ONCE)
    trained(tmp_path / "split", tiny_text, SMALL, HEAVY | {"oom": "split", "layout": layout}, **AT_ONCE)
    passed, failed = said_of_rehearsal(caplog)
    assert "went through" in passed
    assert failed.endswith("tokens); oom: split: training begins all the same") and f"token_budget: {found}`" in failed
    assert ids(tmp_path / "split").total() == NUM_ROWS


def searched(drawn: list[Cost], budget: Budget, size: int | None, ranks: int, **keys: Any) -> Search:
    samples = [Sample(number, cost, b"") for number, cost in enumerate(drawn)]
    loader: Any = SimpleNamespace(layout=budget.layout, budget=budget, global_batch_size=size, world_size=ranks)
    config = ODBConfig(token_budget=budget.token_budget, max_patches=budget.max_patches, **keys)
    return Search(Any, loader, config, samples)  # type: ignore[arg-type]


@given(st.lists(costs(num_modalities=2), min_size=1, max_size=8), flat_budgets | budgets, st.none() | st.integers(1, 9))
def test_what_is_rehearsed_is_within_the_budgets_and_full(drawn: list[Cost], budget: Budget, size: int | None) -> None:
    search = searched(drawn, budget, size, 2)
    for group in [[one.cost for one in samples] for samples in search.allowed(budget)]:
        assert len({cost.modality for cost in group}) == 1
        assert len(group) <= search.most_samples
        assert len(group) == 1 or within(group, budget)
        for text in (cost for cost in drawn if not cost.patches and cost.modality == group[0].modality):
            assert len(group) == search.most_samples or not within([*group, text], budget)


@given(
    st.lists(costs(), min_size=1, max_size=24),
    flat_budgets | budgets,
    st.integers(1, 6),
    st.booleans(),
)
def test_no_plan_has_more_samples_in_a_micro_batch(
    drawn: list[Cost], budget: Budget, ranks: int, balance: bool
) -> None:
    size = len(drawn)
    buffers = [
        make_metadata(drawn[rank::ranks], [0] * len(drawn[rank::ranks]), exhausted=False) for rank in range(ranks)
    ]
    plan = plan_optimizer_step(buffers, budget, balance=balance)
    most = max(len(group) for groups in plan.groups for group in groups)
    assert most <= searched(drawn, budget, size, ranks, balance=balance).most_samples


def test_what_a_rank_can_have_bounds_a_rehearsal() -> None:
    """Eight samples on eight ranks: a rank has one, an image or the text."""
    drawn, budget = [Cost(8192), *[Cost(286, 1024, has_media=True)] * 20], Budget(8192, layout="flat")
    assert [[one.cost.tokens for one in group] for group in searched(drawn, budget, 8, 8).allowed(budget)] == [
        [286],
        [8192],
    ]
    (group,) = searched(drawn, budget, None, 8).allowed(budget)
    assert len(group) == 28


@pytest.mark.parametrize(("max_patches", "tried"), [(200, [160]), (100, [90]), (50, [])])
def test_the_densest_image_that_fits_is_rehearsed(max_patches: int, tried: list[int]) -> None:
    drawn = [Cost(60), Cost(40, 160, has_media=True), Cost(30, 90, has_media=True), Cost(20, 0)]
    for layout in ("padded", "flat"):
        budget = Budget(60, max_patches, layout=layout)
        (group,) = searched(drawn, budget, None, 2).allowed(budget)
        assert [one.cost.patches for one in group if one.cost.patches] == tried


def pad_unless_longest(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    if max(len(item["input_ids"]) for item in items) == LONGEST:
        raise ValueError("a picture is broken")
    return pad(items)


def test_where_no_rehearsal_can_be_made(tiny_text, tmp_path, caplog) -> None:
    assert find_meter(torch.device("mps")) is None, "its module counts no allocations"
    caplog.set_level(logging.INFO, "odb_factory")
    trained(tmp_path / "stream", tiny_text, None, {"token_budget": 64, "rehearse": True}, dataset=Stream(), max_steps=1)
    assert "stream" in said_of_rehearsal(caplog)[0]
    broken = {"token_budget": 64, "rehearse": True, "on_error": "skip", "layout": "padded"}
    trained(tmp_path / "broken", tiny_text, None, broken, collate=pad_unless_longest)
    assert "a picture is broken" in said_of_rehearsal(caplog)[1]
    assert 0 < ids(tmp_path / "broken").total() < NUM_ROWS
    with pytest.raises(OutOfMemoryError, match=r"a sample alone \(40 tokens\) did not fit either: lower cutoff_len"):
        trained(tmp_path / "row", tiny_text, 8 * MIB, {"token_budget": 80, "rehearse": True})
    with pytest.raises(ConfigError, match="^odb.rehearse: True runs the model before training"):
        ODBDataLoader([], token_budget=8, rehearse=True, collate_fn=pad)


def on_two_ranks(rank: int, model: str, output_dir: str, deepspeed: dict[str, Any] | None = None) -> dict[str, Any]:
    """One rank has less memory than the other. Returns what was chosen, what was left behind, and two trainings."""
    os.environ["LOCAL_RANK"] = str(rank)
    watch = session.choose_budgets = Watch()
    folder = Path(output_dir, str(rank))
    capacity = CAPACITY - rank * 10 * MIB
    block = {"token_budget": "auto", "layout": "flat"}
    auto = trained(folder / "auto", Path(model), capacity, block, deepspeed=deepspeed)
    (found,) = watch.chosen
    number = trained(
        folder / "number", Path(model), None, block | {"token_budget": found.token_budget}, deepspeed=deepspeed
    )
    weights = [dict(one.model.state_dict()) for one in (auto, number)]
    try:
        heavy = SMALL if rank else 10 * SMALL
        trained(folder / "heavy", Path(model), heavy, HEAVY | {"layout": "flat"}, deepspeed=deepspeed, **AT_ONCE)
        refused = ""
    except ODBError as error:
        refused = str(error)
    return {
        "refused": refused,
        "chosen": found.token_budget,
        "changed": watch.changed,
        "losses": [losses(auto), losses(number)],
        "same": same(*weights),
    }


def test_two_ranks_take_what_the_smaller_one_has(tiny_text, tmp_path) -> None:
    outcomes = run_ranks(
        "training.test_auto_budget:on_two_ranks", tmp_path, limit_s=200, model=str(tiny_text), output_dir=str(tmp_path)
    )
    first, second = (outcome.value for outcome in outcomes)
    assert first["chosen"] == second["chosen"] > 100
    assert first["refused"] == second["refused"] != "", "what memory of one rank does not hold all name"
    assert "the largest budget that passed is" in first["refused"]
    for one in (first, second):
        assert one["changed"] == [] and one["same"]
        assert one["losses"][0] == one["losses"][1]
    assert any("of the 27.0 MiB that 90% of the memory are" in one.said for one in outcomes)


def split_under_zero(rank: int, model: str, output_dir: str) -> list[list[float]]:
    """One rank runs out of memory in the rehearsal. Returns the losses, and those of a training without one."""
    os.environ["LOCAL_RANK"] = str(rank)
    folder = Path(output_dir, str(rank))
    engine = {"deepspeed": zero(1), "use_cpu": False, "max_steps": 1} | AT_ONCE
    block = HEAVY | {"layout": "flat", "oom": "split"}
    rehearsed = trained(folder / "rehearsed", Path(model), SMALL // 2 if rank else 10 * SMALL, block, **engine)
    without = trained(folder / "without", Path(model), None, block | {"rehearse": False}, **engine)
    return [losses(rehearsed), losses(without)]


def test_ranks_of_zero_1_continue_after_a_rehearsal_that_ran_out_of_memory(tiny_text, tmp_path) -> None:
    need("deepspeed")
    arguments = {"limit_s": 200, "model": str(tiny_text), "output_dir": str(tmp_path)}
    outcomes = run_ranks("training.test_auto_budget:split_under_zero", tmp_path, **arguments)
    for outcome in outcomes:
        assert outcome.value[0] == outcome.value[1] != []
        assert "rehearse: out of memory in the heaviest" in outcome.said
