"""`token_budget: auto`, the rehearsal and `recompute: auto` on a CPU whose tensors are counted, and the policies of
`oom`. Trials leave nothing behind, and the numbers are the same (I8, I9)."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_meter import CPUMeter
from distributed.ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from plan_checks import budgets, costs, flat_budgets, within
from same_training import RELATIVE, deviation, read
from support import need, read_audit, shimmed
from toy import NUM_ROWS, Stream, a_micro_batch, pad
from training import toy_training
from training.toy_training import Sequential, arguments, check_same, history, ids, losses
from training.trainings import BLOCK, ODB, SGD, Memory, Training, deepspeed_forgotten, make_odb, zero
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from odb_factory import ConfigError, ODBConfig, ODBDataLoader, enable_odb
from odb_factory.data.samples import Measured, Sample
from odb_factory.errors import CollectiveError, ODBError, OutOfMemoryError
from odb_factory.memory import is_out_of_memory
from odb_factory.model.engine import engine_of
from odb_factory.planner import Budget, Cost, Media, make_metadata, plan_optimizer_step
from odb_factory.training import budgets as trials
from odb_factory.training.budgets import Recompute, checkpointing_modules, heaviest, most_samples_of
from odb_factory.training.oom import MemoryWatch

# A budget of auto, and the rehearsal

MIB = 2**20
CAPACITY = 40 * MIB
"""A training of the tiny model needs about 10 MiB, and each token some 60 KiB."""
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


def with_memory(folder: Path, model: Any, capacity: int | None, block: dict[str, Any], **changes: Any) -> Trainer:
    trainer = toy_training.make(model, folder, **{"gradient_accumulation_steps": 2} | changes)
    block = {"buffer_size": 16, "audit": True} | block
    enable_odb(trainer, memory_meter=None if capacity is None else CPUMeter(capacity), **block)
    trainer.train(resume_from_checkpoint=changes.get("resume_from_checkpoint"))
    return trainer


def budget_of(trainer: Trainer) -> int:
    """The budget that the training has chosen."""
    return trainer.odb.resolved.token_budget


def check_same_read_audit(ours: Trainer, other: Trainer) -> None:
    check_same(ours, other)
    audits = [read_audit(Path(trainer.args.output_dir), trainer.args.process_index) for trainer in (ours, other)]
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
    auto = with_memory(tmp_path / "auto", tiny_text, CAPACITY, block | {"token_budget": "auto"}, **changes)
    budget = budget_of(auto)
    (line,) = [message for message in caplog.messages if f"token_budget: auto is {budget}" in message]
    used, limit = (float(line.split(" MiB")[part].split()[-1]) for part in (0, 1))
    assert 0.85 * limit < used <= limit == pytest.approx(0.9 * CAPACITY / MIB, abs=0.1)
    number = block | {"token_budget": budget}
    caplog.clear()
    rehearsed = with_memory(tmp_path / "rehearsed", tiny_text, 10 * CAPACITY, number, **changes)
    without = with_memory(tmp_path / "without", tiny_text, None, number, **changes)
    (line,) = rehearsals(caplog)  # `without` has no meter
    weights = sum(weight.numel() * weight.element_size() for weight in without.model.parameters())
    assert float(line.split("peak ")[1].split()[0]) * MIB > 4 * weights, "with gradients and two moments"
    for trainer in (auto, rehearsed):
        check_same_read_audit(trainer, without)
        assert trainer._metrics == without._metrics
    half = block | {"token_budget": "auto", "memory_fraction": 0.45}
    assert budget_of(with_memory(tmp_path / "half", tiny_text, CAPACITY, half, max_steps=1, **changes)) < 0.5 * budget


def test_a_resume_keeps_what_was_chosen_unless_a_number_is_given(tiny_text, tmp_path, caplog) -> None:
    block = AUTO | {"max_patches": "auto"}
    saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    budget = budget_of(with_memory(tmp_path, tiny_text, CAPACITY, block, **saves))
    assert any("max_patches: auto is none" in message for message in caplog.messages)
    rest = {"resume_from_checkpoint": str(tmp_path / "checkpoint-2"), "max_steps": 3}
    kept = with_memory(tmp_path / "kept", tiny_text, 2 * CAPACITY, block, **rest)
    assert budget_of(kept) == budget
    number = {"token_budget": budget, "layout": "flat"}
    assert losses(kept) == losses(with_memory(tmp_path / "number", tiny_text, None, number, **rest))
    with_memory(tmp_path / "other", tiny_text, None, number | {"token_budget": LONGEST}, **rest)
    assert max(line["length"] for line in read_audit(tmp_path / "other")) <= LONGEST


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
        with_memory(tmp_path, tiny_text, capacity, block, **changes)
    assert "\n" not in str(refused.value)


def test_a_loop_has_no_auto_and_no_split() -> None:
    for key, value in (("token_budget", "auto"), ("oom", "split")):
        with pytest.raises(ConfigError, match=f"^odb.{key}: {value!r} "):
            ODBDataLoader([], **{"token_budget": 64, "collate_fn": pad, key: value})  # type: ignore[arg-type]


def test_a_search_ends_in_time_with_what_memory_held(tiny_text, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(trials, "LIMIT_S", 0)
    assert budget_of(with_memory(tmp_path, tiny_text, CAPACITY, AUTO, max_steps=1)) == LONGEST


def test_ranks_that_cannot_continue_do_not_run_out_of_memory(tiny_text, tmp_path, monkeypatch) -> None:
    """FSDP: no trial begins that the two trials before it show to be too large."""
    monkeypatch.setattr(trials, "engine_of", lambda model: "sharded")
    monkeypatch.setattr(trials, "why_not_split", lambda args: "FSDP")
    assert budget_of(with_memory(tmp_path, tiny_text, CAPACITY, AUTO, max_steps=1, **LARGE_STEPS)) > 300
    with pytest.raises(ConfigError, match="^odb.token_budget: 'auto' ran out of memory"):
        with_memory(tmp_path, tiny_text, 7 * MIB, AUTO, max_steps=1)


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
        with_memory(tmp_path / "heavy", tiny_text, SMALL, block, **AT_ONCE)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "heavy" / "odb_audit_rank0.jsonl").exists()
    with_memory(tmp_path / "split", tiny_text, SMALL, block | {"oom": "split"}, **AT_ONCE)
    (failed,) = rehearsals(caplog)
    assert failed.endswith("oom: split: training begins nevertheless")
    assert ids(tmp_path / "split").total() == NUM_ROWS


def samples_of(drawn: list[Cost]) -> list[Sample]:
    return [Sample(number, cost, b"") for number, cost in enumerate(drawn)]


@given(st.lists(costs(), min_size=1, max_size=24), flat_budgets | budgets, st.integers(1, 6), st.booleans())
def test_no_plan_has_more_samples_in_a_micro_batch(
    drawn: list[Cost], budget: Budget, ranks: int, balance: bool
) -> None:
    of_ranks = [drawn[rank::ranks] for rank in range(ranks)]
    buffers = [make_metadata(of_rank, exhausted=False) for of_rank in of_ranks]
    plan = plan_optimizer_step(buffers, budget, balance=balance)
    most = max(len(group) for groups in plan.groups for group in groups)
    assert most <= most_samples_of(len(drawn), ranks, balance=balance)


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


def pad_unless_longest(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    if max(len(item["input_ids"]) for item in items) == LONGEST:
        raise ValueError("a picture is broken")
    return pad(items)


def test_a_rehearsal_without_a_trial(tiny_text, tmp_path, caplog) -> None:
    with_memory(tmp_path / "stream", tiny_text, CAPACITY, {"token_budget": 64}, dataset=Stream(), max_steps=1)
    broken = {"token_budget": 64, "on_error": "skip", "layout": "padded"}
    with_memory(tmp_path / "broken", tiny_text, CAPACITY, broken, collate=pad_unless_longest)
    assert [word in line for word, line in zip(("stream", "a picture is broken"), rehearsals(caplog))] == [True, True]
    assert 0 < ids(tmp_path / "broken").total() < NUM_ROWS
    with pytest.raises(OutOfMemoryError, match="^rehearsal: .* lower cutoff_len"):
        with_memory(tmp_path / "row", tiny_text, 6 * MIB, {"token_budget": 40})


def with_less_memory_on_rank_1(rank: int, model: str, output_dir: str) -> dict[str, Any]:
    """One rank has less memory than the other. Returns the budget of `auto`, the refusal of a rehearsal, and the losses
    under ZeRO-1 with a rehearsal that runs out of memory and without a rehearsal."""
    os.environ["LOCAL_RANK"] = str(rank)
    trials.LIMIT_S = 600
    folder, refused = Path(output_dir, str(rank)), ""
    with deepspeed_forgotten():
        auto = with_memory(folder / "auto", Path(model), CAPACITY - rank * 10 * MIB, AUTO)
        budget = budget_of(auto)
        check_same_read_audit(auto, with_memory(folder / "number", Path(model), None, AUTO | {"token_budget": budget}))
        try:
            with_memory(folder / "heavy", Path(model), SMALL if rank else 10 * SMALL, HEAVY, **AT_ONCE)
        except ODBError as error:
            refused = str(error)
    engine = {"deepspeed": zero(1), "use_cpu": False, "max_steps": 1} | AT_ONCE
    under_zero = []
    for name, capacity in (("rehearsed", SMALL // 2 if rank else 10 * SMALL), ("without", None)):
        with deepspeed_forgotten():
            split = HEAVY | {"oom": "split"}
            under_zero.append(losses(with_memory(folder / name, Path(model), capacity, split, **engine)))
    return {"budget": budget, "refused": refused, "under zero": under_zero}


def test_two_ranks_take_the_budget_of_the_smaller_memory(tiny_text, tmp_path) -> None:
    arguments = {"model": str(tiny_text), "output_dir": str(tmp_path)}
    outcomes = run_ranks("training.test_budgets:with_less_memory_on_rank_1", tmp_path, limit_s=300, **arguments)
    first, second = (outcome.value for outcome in outcomes)
    assert first["budget"] > 100
    assert first["refused"] == second["refused"]
    assert first["refused"].startswith("rehearsal: out of memory in ")
    for outcome in outcomes:
        rehearsed, without = outcome.value["under zero"]
        assert rehearsed == without != []
        assert "rehearsal: out of memory in the heaviest" in outcome.output, "under ZeRO-1 ranks continue"
    assert any("of the 27.0 MiB that 90% of the memory are" in outcome.output for outcome in outcomes)


# Gradient checkpointing only where memory needs it

FULL = Training(batch=3, unequal=1, arguments={"gradient_checkpointing": True}, block={"layout": "flat"})
LORA = replace(FULL, lora=True, block={"layout": "padded"})
BOUND = 60
"""Tokens of the largest micro-batch without recomputation; the budget is 96."""


class ByHand(TrainerCallback):
    """Sets the bound of a training, and the memory of the simulated accelerator, after the trials. calls: the tokens of
    each forward of the first layer, repeated forwards included."""

    def __init__(self, bound: int | None, *, by_plan: bool = False, memory: dict[str, Any] | None = None):
        self.bound, self.by_plan, self.memory = bound, by_plan, memory
        self.calls: list[int] = []
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            return
        model = self.trainer.model_wrapped
        if self.bound is not None:
            assert self.trainer.odb.training.recompute is None, "no memory is counted on a CPU"
            self.trainer.odb.training.recompute = Recompute(model, [(self.bound, 0)], by_plan=self.by_plan)
        if self.memory is not None:
            self.trainer.memory = Memory(self.trainer.model, phase="backward", **self.memory)
        (layer,) = [module for name, module in model.named_modules() if name.endswith(".layers.0.self_attn")]
        layer.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: Any) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        self.calls.append(states.shape[0] * states.shape[1])


def train(
    training: Training,
    path: str | Path,
    folder: Path,
    by_hand: ByHand,
    *,
    reentrant: bool = False,
    dropout: float = 0.0,
    meter: CPUMeter | None = None,
    **changes: Any,
) -> Any:
    changes["gradient_checkpointing_kwargs"] = {"use_reentrant": reentrant}
    trainer = make_odb(training, path, folder, meter=meter, callbacks=[by_hand], **changes)
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
    by_hand.trainer = trainer
    trainer.train()
    return trainer


def expected_calls(audit: list[dict[str, Any]], held: list[bool]) -> list[int]:
    """A micro-batch that is recomputed has two calls."""
    sizes = [line["rows"] * line["length"] for line in audit]
    return [size for size, is_held in zip(sizes, held, strict=True) for _ in range(1 if is_held else 2)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("training", [FULL, LORA], ids=["full", "lora"])
def test_losses_equal_those_of_always_to_the_last_bit(
    tiny_text: Path, tmp_path: Path, training: Training, reentrant: bool, dropout: float
) -> None:
    """Dropout masks, too: a recomputation draws the random numbers of the forward."""
    auto, always = ByHand(BOUND), ByHand(None)
    options: dict[str, Any] = {"reentrant": reentrant, "dropout": dropout}
    trained = train(training, tiny_text, tmp_path / "auto", auto, **options)
    without_bound = replace(training, block=training.block | {"recompute": "always"})
    other = train(without_bound, tiny_text, tmp_path / "always", always, **options)
    check_same(trained, other)
    audit = read_audit(tmp_path / "auto")
    held = [line["rows"] * line["length"] <= BOUND for line in audit]
    assert {True, False} == {*held}, "both kinds of micro-batches occurred"
    assert auto.calls == expected_calls(audit, held)
    assert always.calls == expected_calls(audit, [False] * len(held))
    if dropout:
        without = train(training, tiny_text, tmp_path / "without", ByHand(None), reentrant=reentrant)
        assert history(without) != history(trained)


def test_the_bound_is_measured_and_the_search_leaves_nothing_behind(tiny_text, tmp_path, caplog) -> None:
    """On a CPU whose memory is counted (MiB): more memory gives a larger bound, too little memory none."""
    block: dict[str, Any] = {"token_budget": 256, "layout": "flat", "audit": True, "oom": "split"}
    many = {"gradient_checkpointing": True, "gradient_accumulation_steps": 8, "per_device_train_batch_size": 2}
    bounds, trainers = [], []
    for capacity in (None, 8, 11, 400):
        folder, by_hand = tmp_path / str(capacity), ByHand(None)
        trainer = toy_training.make(tiny_text, folder, callbacks=[by_hand], **many)
        meter = None if capacity is None else CPUMeter(capacity * MIB)
        by_hand.trainer = enable_odb(trainer, memory_meter=meter, **block)
        caplog.clear()
        trainer.train()
        trainers.append(trainer)
        lines = [message for message in caplog.messages if message.startswith("recompute: auto")]
        assert len(lines) == (capacity is not None)
        bounds.append(int(lines[0].split("up to ")[1].split()[0]) if "up to" in "".join(lines) else 0)
        audit = read_audit(folder)
        assert by_hand.calls == expected_calls(audit, [line["length"] <= bounds[-1] for line in audit])
        check_same(trainer, trainers[0])
    assert bounds[:2] == [0, 0] and 40 < bounds[2] < max(line["length"] for line in audit) <= bounds[3] <= 256


@pytest.mark.parametrize("oom", ["raise", "split"])
def test_out_of_memory_lowers_the_bound_and_the_micro_batch_runs_again(
    tiny_text: Path, tmp_path: Path, caplog, oom: str
) -> None:
    """Once, on one rank also with `oom: raise`."""
    by_hand = ByHand(None, memory={"most": BOUND, "spares_recomputed": True})
    training = replace(FULL, block=FULL.block | {"oom": oom})
    trained = train(training, tiny_text, tmp_path / "short", by_hand, meter=CPUMeter(400 * MIB))
    always = train(FULL, tiny_text, tmp_path / "always", ByHand(None))
    assert history(trained) == history(always)
    (warning,) = [message for message in caplog.messages if "runs again with gradient checkpointing" in message]
    assert trained.memory.fails == 1
    audit = read_audit(tmp_path / "short")
    assert all(line["parts"] == 1 for line in audit), "nothing is cut"
    lowered = int(warning.split(" = ")[1].split()[0]) * 3 // 4
    later = [line for line in audit if line["optimizer_step"] > 1]
    calls = expected_calls(later, [line["length"] <= lowered for line in later])
    assert by_hand.calls[-len(calls) :] == calls


def test_out_of_memory_with_recomputation_ends_as_without_the_key(tiny_text: Path, tmp_path: Path) -> None:
    with pytest.raises(OutOfMemoryError, match="token_budget"):
        train(FULL, tiny_text, tmp_path, ByHand(None, memory={"most": BOUND}), meter=CPUMeter(400 * MIB))


def test_checkpointing_that_moves_activations_to_the_host_is_left_alone(tiny_text: Path) -> None:
    from llamafactory.model.model_utils.checkpointing import _gradient_checkpointing_enable

    model = AutoModelForCausalLM.from_pretrained(tiny_text)
    assert checkpointing_modules(model) == []
    model.gradient_checkpointing_enable()
    assert len(checkpointing_modules(model)) > model.config.num_hidden_layers
    _gradient_checkpointing_enable(model)
    assert len(checkpointing_modules(model)) > model.config.num_hidden_layers
    _gradient_checkpointing_enable(model, use_unsloth_gc=True)
    assert checkpointing_modules(model) == []


ENGINES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ddp": ("ddp", {}, {}),
    "zero3": ("deepspeed", {"zero": 3}, {}),
    "fsdp2": ("sharded", {}, {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}),
}
"""The name from `engine_of`, changes to a training, changes to its arguments."""


def with_a_bound(rank: int, path: str, output_dir: str, engine: str) -> dict[str, Any]:
    """Calls of the first layer and the history of four trainings: full and LoRA, with a bound and `always`."""
    os.environ["LOCAL_RANK"] = str(rank)
    name, changes, arguments = ENGINES[engine]
    done: dict[str, Any] = {}
    for tuning, training in {"full": FULL, "lora": LORA}.items():
        for mode in ("auto", "always"):
            by_hand = ByHand(BOUND if mode == "auto" else None, by_plan=engine != "ddp")
            reentrant = engine == "zero3"  # torch's other checkpoints do not know its empty parameters, in stock too
            with deepspeed_forgotten():
                of_two = replace(training, unequal=2, **changes)
                folder = Path(output_dir, f"{tuning}_{mode}")
                trainer = train(of_two, path, folder, by_hand, reentrant=reentrant, **arguments)
            assert engine_of(trainer.model_wrapped) == name
            done[f"{tuning}_{mode}"] = by_hand.calls, history(trainer)
    return done


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_on_two_ranks_equal_those_of_always_to_the_last_bit(tiny_text, tmp_path, engine: str) -> None:
    """Under FSDP2 and ZeRO-3 both ranks decide by the larger micro-batch of the micro-step."""
    if engine == "zero3":
        need("deepspeed")
    env = shimmed("fsdp_on_cpu") if engine == "fsdp2" else {}
    arguments = {"path": str(tiny_text), "output_dir": str(tmp_path), "engine": engine}
    outcomes = run_ranks("training.test_budgets:with_a_bound", tmp_path, limit_s=400, env=env, **arguments)
    for tuning in ("full", "lora"):
        audits = [read_audit(tmp_path / f"{tuning}_auto", rank) for rank in range(2)]
        sizes = [[line["rows"] * line["length"] for line in audit] for audit in audits]
        largest = [max(pair) for pair in zip(*sizes, strict=True)]
        for rank, outcome in enumerate(outcomes):
            (calls, figures), (calls_of_always, of_always) = (
                outcome.value[f"{tuning}_{m}"] for m in ("auto", "always")
            )
            assert figures == of_always != []
            held = [size <= BOUND for size in (sizes[rank] if engine == "ddp" else largest)]
            assert {*held} == {True, False}
            assert calls == expected_calls(audits[rank], held)
            assert calls_of_always == expected_calls(audits[rank], [False] * len(held))


# Out of memory: named (`oom: raise`), cut in two with the same gradient (`split`), or left out (`skip`)

TEXT = Training(unequal=2, batch=3, arguments=SGD, block={"layout": "padded"}, kinds=(ODB,))
WITHOUT = {
    "text": TEXT,
    "flat": replace(TEXT, block={"layout": "flat"}),
    "images": replace(TEXT, model="vl", rows=44, batch=2),
    "zero": replace(TEXT, zero=1),
    "filled": replace(TEXT, batch=1, block=TEXT.block | {"global_batch_size": "fill", "loss_scaling": "none"}),
}
"""Trainings with enough memory."""


def short(name: str, oom: str, memory: tuple[int, int], phase: str = "forward", **changes: Any) -> Training:
    """memory: tokens that each rank holds."""
    block = WITHOUT[name].block | {"oom": oom}
    return replace(WITHOUT[name], memory=memory, phase=phase, block=block, **changes)


ANY = 10**6
CHECKPOINTING = {"gradient_checkpointing": True}
SPLIT = {
    "text, forward": short("text", "split", (56, ANY)),
    "flat, backward": short("flat", "split", (ANY, 56), "backward"),
    "images, backward": short("images", "split", (60, 70), "backward"),
    "filled, forward": short("filled", "split", (60, 60)),
    "zero, backward": short("zero", "split", (60, 56), "backward"),
    "text, checkpointing": short("text", "split", (60, 56), "backward", arguments=SGD | CHECKPOINTING),
}
SKIP = {
    "skip, text": short("text", "skip", (56, ANY)),
    "skip, images, backward": short("images", "skip", (60, 70), "backward"),
    "skip, zero, backward": short("zero", "skip", (60, 56), "backward"),
}
ENDS = {
    "alone": short("text", "split", (ANY, 40)),
    "most": short("text", "skip", (ANY, 20)),
    "raise": short("text", "raise", (60, ANY)),  # the last: the other rank ends with this one
}
SETS = {"2_ranks": (2, WITHOUT | SPLIT | SKIP | ENDS)}


@pytest.fixture
def two_ranks(trained: Any) -> Any:
    """`two_ranks("text")`: the folder, the end of each rank, the summary, and the audit of each rank."""

    def get(name: str) -> tuple[Path, list[dict[str, Any]], dict[str, Any], list[list[dict[str, Any]]]]:
        path, ends = trained("2_ranks", name)
        folder = path / ODB
        summary = json.loads((folder / "odb_summary.json").read_text())
        return folder, ends, summary, [read_audit(folder, rank) for rank in range(2)]

    return get


@pytest.mark.parametrize("name", SPLIT)
def test_two_ranks_take_the_same_optimizer_steps(name: str, two_ranks: Any) -> None:
    """The same figures and weights (`fill`: in the first step, because later steps are filled otherwise)."""
    folder, ends, summary, audits = two_ranks(name)
    cell = name.split(",")[0]
    assert {(end["leaked"], end["error"]) for end in ends} == {(0, None)}
    assert summary["oom_cuts"] == sum(end["fails"] for end in ends) > 0
    ours, without = read(folder, 2), read(two_ranks(cell)[0], 2)
    if cell == "filled":
        for figure in ("loss", "grad_norm"):
            assert ours.log[0][figure] == pytest.approx(without.log[0][figure], rel=RELATIVE)
    else:
        differences = deviation(ours, without)
        assert max(differences.loss, differences.weights) < RELATIVE
        assert differences.grad_norm < (1e-4 if SPLIT[name].zero else RELATIVE)  # DeepSpeed sums squares in float32
    rows = Counter(row for audit in audits for line in audit for row in line["ids"])
    assert rows == Counter(dict.fromkeys(range(SPLIT[name].rows), 2))


def test_later_plans_are_lower_on_all_ranks(two_ranks: Any) -> None:
    """Memory was short on rank 0 alone; steps that were planned ahead keep their plan."""
    _, _, summary, audits = two_ranks("text, forward")
    lowered = summary["lowered_to"]["token_budget"]
    assert lowered < BLOCK["token_budget"]
    for rank, audit in enumerate(audits):
        sizes = [line["rows"] * line["length"] for line in audit if len(line["ids"]) > 1]
        assert max(sizes[len(sizes) // 2 :]) <= lowered
        assert rank == 0 or max(sizes) > lowered
        assert {line["parts"] for line in audit} == ({1, 2} if rank == 0 else {1})


@pytest.mark.parametrize("name", SKIP)
def test_a_micro_batch_that_does_not_fit_is_left_out(name: str, two_ranks: Any) -> None:
    """Each row once an epoch, trained on or left out and counted on all ranks; the others weigh as planned."""
    _, ends, summary, audits = two_ranks(name)
    assert {(end["leaked"], end["error"]) for end in ends} == {(0, None)}
    lines = audits[0] + audits[1]
    computed = Counter(row for line in lines for row in line["ids"])
    gone = Counter(dict.fromkeys(range(SKIP[name].rows), 2)) - computed
    assert gone and max(computed.values()) <= 2
    assert summary["left_out"] == {"out_of_memory": gone.total()} and summary["oom_cuts"] == 0
    assert summary["samples"] == computed.total()
    assert summary["idle_micro_batches"] >= sum(end["fails"] for end in ends) > 0
    # They add nothing to the gradient.
    of_step = [line for line in lines if line["optimizer_step"] == 1]
    assert any(line["idle"] for line in of_step) and all(line["weight"] == 0 for line in of_step if line["idle"])


def keys_of(message: str) -> list[str]:
    """The settings that a message advises."""
    assert "\n" not in message
    return re.findall("`(.*?)`", message)


@pytest.mark.parametrize(
    ("name", "rank", "samples", "keys"),
    [
        ("alone", 1, "row 2", ["overlong: drop", "token_budget: 33"]),
        ("raise", 0, "rows 10, 8, 6", ["token_budget: 72", "oom: split"]),
    ],
)
def test_all_ranks_end_with_the_key_to_lower(name: str, rank: int, samples: str, keys: list[str], trained: Any) -> None:
    """In one line: each rank reports the rank that ran out of memory."""
    _, ends = trained("2_ranks", name)
    line = ends[rank]["error"]
    assert ends[rank]["cause"] == "OutOfMemoryError" and keys_of(line) == keys
    assert "micro-batch 1 of 2 of optimizer step 1: " in line and samples in line
    assert f"rank {rank} left the training: {line}" in ends[1 - rank]["error"]


def test_skip_ends_all_ranks_if_an_optimizer_step_would_lose_most_of_its_loss(trained: Any) -> None:
    first, second = (end["error"] for end in trained("2_ranks", "most")[1])
    assert first == second and first.startswith("oom: skip ") and keys_of(first)[0].startswith("token_budget: ")


def train_with_a_gathering_loss(rank: int, path: str, output_dir: str, method: str) -> str:
    """The error of a training whose loss calls a method of accelerate's Accelerator."""
    os.environ["LOCAL_RANK"] = str(rank)

    class Gathers(Sequential):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            getattr(self.accelerator, method)(loss.detach())
            return loss

    trainer = make_odb(SPLIT["text, forward"], path, Path(output_dir), Gathers)
    Memory(trainer.model, 56 if rank == 0 else ANY)
    with pytest.raises(ODBError) as ended:
        trainer.train()
    return str(ended.value)


@pytest.mark.parametrize("method", ["gather", "reduce"])
def test_a_loss_that_gathers_over_ranks_is_refused_before_it_waits(tiny_text, tmp_path, method: str) -> None:
    """A rank that restarts its step would gather alone, while the others wait for the step to end."""
    options = {"path": str(tiny_text), "output_dir": str(tmp_path), "method": method}
    function = "training.test_budgets:train_with_a_gathering_loss"
    for outcome in run_ranks(function, tmp_path, limit_s=120, **options):
        line = outcome.value
        assert "odb.oom: 'split'" in line and f"accelerator.{method}," in line and "\n" not in line


def test_errors_that_report_a_lack_of_memory() -> None:
    for message in ("NPU out of memory", "DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"):
        assert is_out_of_memory(RuntimeError(f"an error: {message} when calling"))
    assert not is_out_of_memory(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))
    assert not is_out_of_memory(CollectiveError("rank 1 left the training: out of memory in micro-batch 1"))


@pytest.mark.parametrize(
    ("block", "held", "failed", "num_samples", "advice"),
    [
        ({}, [], (4, 250, 0), 4, ["token_budget: 750", "oom: split"]),
        ({}, [(4, 250, 400)], (4, 240, 4000), 4, ["max_patches: 3000", "oom: split"]),
        ({}, [], (1, 2000, 0), 1, ["cutoff_len", "overlong: drop", "token_budget: 1500"]),
        ({}, [(1, 900, 100)], (1, 900, 800), 1, ["image_max_pixels", "overlong: drop", "max_patches: 600"]),
        ({"balance_encoder": True}, [(1, 900, 100)], (1, 900, 800), 3, ["max_patches: 600", "balance_encoder: false"]),
    ],
)
def test_advice(
    tmp_path: Path, block: dict[str, Any], held: list, failed: tuple, num_samples: int, advice: list[str]
) -> None:
    """held, failed: (rows, length, patches) of a micro-batch."""
    config = ODBConfig(**{"token_budget": 1000, **block})
    watch = MemoryWatch(config, Budget(config.token_budget, config.max_patches), arguments(tmp_path))

    def measured(rows: int, length: int, patches: int) -> Measured:
        return Measured(rows, length, Media(patches), units=1)

    for shape in held:
        watch.held(measured(*shape))
    with pytest.raises(OutOfMemoryError, match="micro-batch 1 of 1 of optimizer step 7: ") as caught:
        with watch.named(a_micro_batch(ids=tuple(range(num_samples))), measured(*failed), optimizer_step=7):
            raise torch.OutOfMemoryError("CUDA out of memory")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert keys_of(str(caught.value)) == [key for key in advice if ":" in key]
    assert all(key in str(caught.value) for key in advice)
