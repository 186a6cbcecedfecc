"""`token_budget: auto` and the rehearsal: what is tried on a CPU, by tracking of tensors, leaves nothing behind."""

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
from cpu_meter import CPUMeter
from distributed.ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from planner_strategies import budgets, costs, flat_budgets, within
from support import need, read_audit
from toy import NUM_ROWS, Stream, pad
from training.gradient_ranks import zero
from training.toy_training import audit, ids, losses, make
from transformers import Trainer

from odb_factory import ConfigError, ODBConfig, ODBDataLoader, enable_odb
from odb_factory.data.samples import Sample
from odb_factory.errors import ODBError, OutOfMemoryError
from odb_factory.memory import find_meter
from odb_factory.planner import Budget, Cost, make_metadata, plan_optimizer_step
from odb_factory.training import auto_budget, session
from odb_factory.training.auto_budget import FirstRows

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


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine ends no search."""
    monkeypatch.setattr(auto_budget, "LIMIT_S", 600)


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


def said_of_rehearsal(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("rehearsal: ")]


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
def test_what_is_tried_leaves_nothing_behind(tiny_text, tmp_path, watch, caplog, block) -> None:
    """`auto`, and a rehearsal of the number that it finds, train to the last bit as that number without a rehearsal."""
    caplog.set_level(logging.INFO, "odb_factory")
    changes = {"gradient_accumulation_steps": 8, "trainer_class": Counts}  # the memory does not hold a step at once
    auto = trained(tmp_path / "auto", tiny_text, CAPACITY, block | {"token_budget": "auto"}, **changes)
    (found,) = watch.chosen
    assert watch.changed == []
    (line,) = [one.getMessage() for one in caplog.records if "token_budget: auto is" in one.getMessage()]
    used, limit = (float(line.split(" MiB")[part].split()[-1]) for part in (0, 1))
    assert 0.85 * limit < used <= limit == pytest.approx(0.9 * CAPACITY / MIB, abs=0.1)
    number = block | {"token_budget": found.token_budget}
    caplog.clear()
    rehearsed = trained(tmp_path / "rehearsed", tiny_text, 10 * CAPACITY, number, **changes)
    without = trained(tmp_path / "without", tiny_text, None, number, **changes)
    (line,) = said_of_rehearsal(caplog)  # the memory of a CPU is not counted
    weights = sum(one.numel() * one.element_size() for one in without.model.parameters())
    assert float(line.split("peak ")[1].split()[0]) * MIB > 4 * weights, "with gradients and two moments"
    for name, trainer in (("auto", auto), ("rehearsed", rehearsed)):
        assert losses(trainer) == losses(without) and trainer._metrics == without._metrics, name
        assert same(dict(trainer.model.state_dict()), dict(without.model.state_dict())), name
        assert read_audit(tmp_path / name) == read_audit(tmp_path / "without"), name
    half = {"token_budget": "auto", "memory_fraction": 0.45}
    trained(tmp_path / "half", tiny_text, CAPACITY, block | half, **changes)
    assert watch.chosen[1].token_budget < 0.5 * found.token_budget


def test_a_resume_keeps_what_was_chosen_unless_a_number_is_given(tiny_text, tmp_path, watch, caplog) -> None:
    caplog.set_level(logging.INFO, "odb_factory")
    auto, keys = {"token_budget": "auto", "max_patches": "auto", "layout": "flat"}, {"save_strategy": "steps"}
    trained(tmp_path, tiny_text, CAPACITY, auto, save_steps=2, max_steps=2, **keys)
    (found,) = watch.chosen
    assert found.max_patches is None
    assert any("max_patches: auto is none" in one.getMessage() for one in caplog.records)
    rest = {"resume_from_checkpoint": str(tmp_path / "checkpoint-2"), "max_steps": 3}
    kept = trained(tmp_path / "kept", tiny_text, 2 * CAPACITY, auto, **rest)
    assert len(watch.chosen) == 1
    assert any("max_patches: auto is none, as chosen when" in one.getMessage() for one in caplog.records)
    block = {"token_budget": found.token_budget, "layout": "flat"}
    number = trained(tmp_path / "number", tiny_text, None, block, **rest)
    assert losses(kept) == losses(number)
    trained(tmp_path / "other", tiny_text, None, block | {"token_budget": LONGEST}, **rest)
    assert max(line["length"] for line in audit(tmp_path / "other")) <= LONGEST


class Jumps(Trainer):
    """Above a number of tokens it takes much more memory than below, as no small micro-batch shows."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if inputs["input_ids"].numel() > 300:
            torch.zeros(CAPACITY, dtype=torch.uint8)
        return loss


def test_running_out_of_memory_is_a_bound(tiny_text, tmp_path, watch) -> None:
    trained(tmp_path, tiny_text, CAPACITY, {"token_budget": "auto", "layout": "flat"}, trainer_class=Jumps)
    (found,) = watch.chosen
    assert watch.changed == []
    assert 200 < found.token_budget <= 300 + LONGEST
    assert ids(tmp_path).total() == NUM_ROWS


def test_a_row_that_does_not_fit_ends_in_one_line(tiny_text, tmp_path) -> None:
    with pytest.raises(ConfigError, match="not even 40 tokens fit into .* MiB .*; lower cutoff_len"):
        trained(tmp_path, tiny_text, 9 * MIB, {"token_budget": "auto"})


def test_where_nothing_can_be_tried(tiny_text, tmp_path) -> None:
    def refused(message: str, block: dict[str, Any], capacity: int | None = None, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            trained(tmp_path, tiny_text, capacity, block, **changes)
        assert len(str(caught.value).splitlines()) == 1

    refused("odb.token_budget: 'auto' tries .* on an accelerator.*set a number", {"token_budget": "auto"})
    refused("odb.max_patches: 'auto' tries", {"token_budget": 64, "max_patches": "auto"})
    refused("those of a stream", {"token_budget": "auto"}, CAPACITY, dataset=Stream(), max_steps=1)
    with pytest.raises(ConfigError, match="^odb.token_budget: 'auto' "):
        ODBDataLoader([], token_budget="auto", collate_fn=pad)


def test_a_search_ends_in_time_with_what_memory_held(tiny_text, tmp_path, watch, caplog, monkeypatch) -> None:
    caplog.set_level(logging.INFO, "odb_factory")
    monkeypatch.setattr(auto_budget, "LIMIT_S", 0)
    trained(tmp_path, tiny_text, CAPACITY, {"token_budget": "auto", "layout": "flat"}, max_steps=1)
    assert watch.chosen[0].token_budget == LONGEST
    assert any("the largest that memory held in 0 s of trials" in one.getMessage() for one in caplog.records)


def test_ranks_that_cannot_continue_do_not_run_out_of_memory(tiny_text, tmp_path, watch, monkeypatch) -> None:
    """As with FSDP: no trial begins that the two before it show to be too large."""
    monkeypatch.setattr(auto_budget, "engine_of", lambda model: "sharded")
    monkeypatch.setattr(auto_budget, "why_not_split", lambda args: "FSDP")
    large = {"gradient_accumulation_steps": 8}
    trained(tmp_path, tiny_text, CAPACITY, {"token_budget": "auto", "layout": "flat"}, max_steps=1, **large)
    assert watch.chosen[0].token_budget > 300
    with pytest.raises(ConfigError, match="^odb.token_budget: 'auto' ran out of memory at .* no rank can continue"):
        trained(tmp_path, tiny_text, 9 * MIB, {"token_budget": "auto", "layout": "flat"}, max_steps=1)


# The rehearsal

SMALL = 18 * MIB
HEAVY = {"token_budget": 1000}
"""More tokens than `SMALL` holds; an optimizer step of 16 rows has at most 640 on a rank."""
AT_ONCE = {"gradient_accumulation_steps": 8, "per_device_train_batch_size": 2}


@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_what_does_not_fit_ends_before_the_first_step(tiny_text, tmp_path, caplog, layout: str) -> None:
    """In one line with a lower budget, or, with `oom: split`, it trains."""
    with pytest.raises(OutOfMemoryError, match="^rehearsal: out of memory in .* `token_budget: 480` or less") as caught:
        trained(tmp_path / "heavy", tiny_text, SMALL, HEAVY | {"layout": layout}, **AT_ONCE)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "heavy" / "odb_audit_rank0.jsonl").exists()
    caplog.set_level(logging.INFO, "odb_factory")
    trained(tmp_path / "split", tiny_text, SMALL, HEAVY | {"oom": "split", "layout": layout}, **AT_ONCE)
    (failed,) = said_of_rehearsal(caplog)
    assert failed.endswith("oom: split: training begins all the same")
    assert ids(tmp_path / "split").total() == NUM_ROWS


def first_rows(drawn: list[Cost], budget: Budget, size: int | None, ranks: int, **keys: Any) -> FirstRows:
    samples = [Sample(number, cost, b"") for number, cost in enumerate(drawn)]
    loader: Any = SimpleNamespace(budget=budget, global_batch_size=size, world_size=ranks)
    return FirstRows(samples, loader, ODBConfig(token_budget=budget.token_budget, **keys))


@given(st.lists(costs(num_modalities=2), min_size=1, max_size=8), flat_budgets | budgets, st.none() | st.integers(1, 9))
def test_what_is_tried_is_within_the_budgets_and_full(drawn: list[Cost], budget: Budget, size: int | None) -> None:
    rows = first_rows(drawn, budget, size, 2)
    groups = [[one.cost for one in samples] for samples in rows.heaviest(budget)]
    assert max(budget.shape(group)[2] for group in groups) >= max(cost.patches for cost in drawn)
    for group in groups:
        assert len({cost.modality for cost in group}) == 1
        assert len(group) <= rows.most_samples
        assert len(group) == 1 or within(group, budget)
        for text in (cost for cost in drawn if not cost.patches and cost.modality == group[0].modality):
            assert len(group) == rows.most_samples or not within([*group, text], budget)


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
    assert most <= first_rows(drawn, budget, size, ranks, balance=balance).most_samples


@pytest.mark.parametrize(("max_patches", "tried"), [(200, [160]), (100, [160, 90]), (50, [160])])
def test_the_densest_image_that_fits_is_tried_and_larger_ones_alone(max_patches: int, tried: list[int]) -> None:
    drawn = [Cost(60), Cost(40, 160, has_media=True), Cost(30, 90, has_media=True), Cost(20, 0)]
    for layout in ("padded", "flat"):
        budget = Budget(60, max_patches, layout=layout)
        groups = first_rows(drawn, budget, None, 2).heaviest(budget)
        patches = [[one.cost.patches for one in group if one.cost.patches] for group in groups]
        assert [group for group in patches if group] == [[one] for one in tried]


def pad_unless_longest(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    if max(len(item["input_ids"]) for item in items) == LONGEST:
        raise ValueError("a picture is broken")
    return pad(items)


def test_where_no_rehearsal_can_be_made(tiny_text, tmp_path, caplog) -> None:
    assert find_meter(torch.device("mps")) is None, "its module counts no allocations"
    caplog.set_level(logging.INFO, "odb_factory")
    trained(tmp_path / "stream", tiny_text, CAPACITY, {"token_budget": 64}, dataset=Stream(), max_steps=1)
    assert "stream" in said_of_rehearsal(caplog)[0]
    broken = {"token_budget": 64, "on_error": "skip", "layout": "padded"}
    trained(tmp_path / "broken", tiny_text, CAPACITY, broken, collate=pad_unless_longest)
    assert "a picture is broken" in said_of_rehearsal(caplog)[1]
    assert 0 < ids(tmp_path / "broken").total() < NUM_ROWS
    with pytest.raises(OutOfMemoryError, match="^rehearsal: .* a sample alone cannot be cut: lower cutoff_len"):
        trained(tmp_path / "row", tiny_text, 8 * MIB, {"token_budget": 40})


def on_two_ranks(rank: int, model: str, output_dir: str) -> dict[str, Any]:
    """One rank has less memory than the other. Returns what was chosen, what was left behind, and two trainings."""
    os.environ["LOCAL_RANK"] = str(rank)
    watch = session.choose_budgets = Watch()
    auto_budget.LIMIT_S = 600
    folder = Path(output_dir, str(rank))
    capacity = CAPACITY - rank * 10 * MIB
    block = {"token_budget": "auto", "layout": "flat"}
    auto = trained(folder / "auto", Path(model), capacity, block)
    (found,) = watch.chosen
    number = trained(folder / "number", Path(model), None, block | {"token_budget": found.token_budget})
    weights = [dict(one.model.state_dict()) for one in (auto, number)]
    try:
        heavy = SMALL if rank else 10 * SMALL
        trained(folder / "heavy", Path(model), heavy, HEAVY | {"layout": "flat"}, **AT_ONCE)
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
    assert first["refused"].startswith("rehearsal: out of memory in ")
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
    without = trained(folder / "without", Path(model), None, block, **engine)
    return [losses(rehearsed), losses(without)]


def test_ranks_of_zero_1_continue_after_a_rehearsal_that_ran_out_of_memory(tiny_text, tmp_path) -> None:
    need("deepspeed")
    arguments = {"limit_s": 200, "model": str(tiny_text), "output_dir": str(tmp_path)}
    outcomes = run_ranks("training.test_auto_budget:split_under_zero", tmp_path, **arguments)
    for outcome in outcomes:
        assert outcome.value[0] == outcome.value[1] != []
        assert "rehearsal: out of memory in the heaviest" in outcome.said
