"""`recompute: auto`: micro-batches within a bound run without gradient checkpointing: the same numbers (I8, I9)."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cpu_meter import CPUMeter
from distributed.ranks import run_ranks
from support import need, read_audit, shimmed
from training import toy_training
from training.toy_training import check_same, history
from training.trainings import Memory, Training, deepspeed_forgotten, make_odb
from transformers import AutoModelForCausalLM, TrainerCallback

from odb_factory import enable_odb
from odb_factory.errors import OutOfMemoryError
from odb_factory.model.engine import engine_of
from odb_factory.training import budgets
from odb_factory.training.budgets import Recompute, checkpointing_modules

FULL = Training(batch=3, unequal=1, arguments={"gradient_checkpointing": True}, block={"layout": "flat"})
LORA = replace(FULL, lora=True, block={"layout": "padded"})
BOUND = 60
"""Tokens of the largest micro-batch without recomputation; the budget is 96."""
MIB = 2**20


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


def test_the_bound_is_measured_and_the_search_leaves_nothing_behind(tiny_text, tmp_path, caplog, monkeypatch) -> None:
    """On a CPU whose memory is counted (MiB): more memory gives a larger bound, too little memory none."""
    caplog.set_level(logging.INFO, "odb_factory")
    monkeypatch.setattr(budgets, "LIMIT_S", 600)  # a busy machine ends no search
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


# Several ranks

ENGINES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ddp": ("ddp", {}, {}),
    "zero3": ("deepspeed", {"zero": 3}, {}),
    "fsdp2": ("sharded", {}, {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}),
}
"""The name from `engine_of`, changes to a training, changes to its arguments."""


def on_two_ranks(rank: int, path: str, output_dir: str, engine: str) -> dict[str, Any]:
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
    outcomes = run_ranks("training.test_recompute:on_two_ranks", tmp_path, limit_s=400, env=env, **arguments)
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
