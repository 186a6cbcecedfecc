"""`recompute: auto`: micro-batches within a bound run without gradient checkpointing: the same numbers (I8, I9)."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_meter import CPUMeter
from distributed.ranks import run_ranks
from support import CHECKPOINTS, need, read_audit, read_log, shimmed, training_config
from training import toy_training
from training.cases import Case, load_model
from training.gradient_ranks import Recorder, make, switch_on, zero
from training.oom_ranks import deepspeed_forgotten
from training.test_auto_budget import same, state_of
from training.toy_training import history
from transformers import AutoModelForCausalLM, TrainerCallback

from odb_factory import enable_odb
from odb_factory.errors import OutOfMemoryError
from odb_factory.model.engine import engine_of
from odb_factory.training import session
from odb_factory.training.recompute import Recompute, checkpointing_modules

TEXT = Case("text", "float32", 2, keep=3, loss_scaling="stock", layout="flat")
LORA = Case("text", "float32", 2, keep=3, loss_scaling="stock", layout="padded", lora=True)
BOUND = 60
"""Tokens; `TOKEN_BUDGET` is 96."""
MIB = 2**20
CAPACITIES = (None, 11, 16, 400)
"""MiB; a training of the toy rows needs about 10, and each token some 24 KiB without recomputation."""
OF_CHECKPOINTS = {"gradient_checkpointing": True, "gradient_accumulation_steps": 8, "per_device_train_batch_size": 2}


class ByHand(TrainerCallback):
    """Sets the bound of a training. calls: the tokens of each forward of the first layer, repeated ones included."""

    def __init__(self, held: list[tuple[int, int]] | None, *, by_plan: bool = False):
        self.held, self.by_plan = held, by_plan
        self.calls: list[int] = []
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:
            return
        model = self.trainer.model_wrapped
        if self.held is not None:
            assert self.trainer.odb.training.recompute is None, "no memory is counted on a CPU"
            self.trainer.odb.training.recompute = Recompute(model, self.held, by_plan=self.by_plan)
        (layer,) = [one for name, one in model.named_modules() if name.endswith(".layers.0.self_attn")]
        layer.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: Any) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        self.calls.append(states.shape[0] * states.shape[1])


def train(
    case: Case,
    path: str,
    folder: Path,
    by_hand: ByHand,
    *,
    reentrant: bool = False,
    dropout: float = 0.0,
    world_size: int = 1,
    meter: CPUMeter | None = None,
    block: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """A training that checkpoints."""
    model = load_model(case, path)
    for layer in (one for name, one in model.named_modules() if name.endswith(".self_attn")):
        layer.attention_dropout = dropout
    checkpoints = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    trainer = make(case, model, path, folder, world_size, **checkpoints | arguments)
    trainer.remove_callback(Recorder)
    trainer.add_callback(by_hand)
    by_hand.trainer = switch_on(trainer, case, memory_meter=meter, **block or {})
    trainer.train()
    return trainer


def expected_calls(audit: list[dict[str, Any]], held: list[bool]) -> list[int]:
    """Of a micro-batch that is recomputed, two."""
    sizes = [line["rows"] * line["length"] for line in audit]
    return [size for size, is_held in zip(sizes, held, strict=True) for _ in range(1 if is_held else 2)]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", [TEXT, LORA], ids=["full", "lora"])
def test_losses_are_those_of_always_to_the_last_bit(
    tiny_text, tmp_path, case: Case, reentrant: bool, dropout: float
) -> None:
    """With the same dropout masks, too: a recomputation takes its random numbers from where the forward took them."""
    auto, always = ByHand([(BOUND, 0)]), ByHand(None)
    options = {"reentrant": reentrant, "dropout": dropout}
    trained = train(case, str(tiny_text), tmp_path / "auto", auto, **options)
    other = train(case, str(tiny_text), tmp_path / "always", always, block={"recompute": "always"}, **options)
    assert history(trained) == history(other)
    assert same(trained.model.state_dict(), other.model.state_dict())
    audit = read_audit(tmp_path / "auto")
    held = [line["rows"] * line["length"] <= BOUND for line in audit]
    assert {True, False} == {*held}, "both kinds of micro-batches occurred"
    assert auto.calls == expected_calls(audit, held)
    assert always.calls == expected_calls(audit, [False] * len(held))
    if dropout:
        without = train(case, str(tiny_text), tmp_path / "without", ByHand(None), reentrant=reentrant)
        assert history(without) != history(trained)


def test_the_bound_is_measured_and_the_search_leaves_nothing_behind(tiny_text, tmp_path, monkeypatch, caplog) -> None:
    """On a CPU whose memory is counted: more memory gives a larger bound, and too little none."""
    caplog.set_level(logging.INFO, "odb_factory")
    changed, find = [], session.find_recompute

    def watched(trainer: Any) -> Recompute | None:
        before = state_of(trainer)
        found = find(trainer)
        after = state_of(trainer)
        changed.extend(key for key in before if not same(before[key], after[key]))
        return found

    monkeypatch.setattr(session, "find_recompute", watched)
    bounds, trainings = [], []
    for capacity in CAPACITIES:
        folder = tmp_path / str(capacity)
        by_hand = ByHand(None)
        trainer = toy_training.make(tiny_text, folder, callbacks=[by_hand], **OF_CHECKPOINTS)
        meter = None if capacity is None else CPUMeter(capacity * MIB)
        by_hand.trainer = enable_odb(trainer, memory_meter=meter, token_budget=256, layout="flat", audit=True)
        caplog.clear()
        trainer.train()
        trainings.append((toy_training.losses(trainer), trainer.model.state_dict()))
        lines = [one.getMessage() for one in caplog.records if one.getMessage().startswith("recompute: auto")]
        assert len(lines) == (capacity is not None)
        bounds.append(int(lines[0].split("up to ")[1].split()[0]) if "up to" in "".join(lines) else 0)
        audit = read_audit(folder)
        assert by_hand.calls == expected_calls(audit, [line["length"] <= bounds[-1] for line in audit])
    assert changed == []
    assert all(same(one, trainings[0]) for one in trainings)
    assert bounds[:2] == [0, 0] and 40 < bounds[2] < max(line["length"] for line in audit) <= bounds[3] <= 256


class Short(ByHand):
    """Memory runs out in the backward of more tokens, unless they are recomputed. of_all: recomputed or not."""

    def __init__(self, most: int, *, of_all: bool = False):
        super().__init__(None)
        self.most, self.of_all, self.fails = most, of_all, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_begin(args, state, control, **kwargs)
        if not state.global_step:
            self.trainer.model.get_input_embeddings().register_forward_hook(self._embedded)

    def _embedded(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        is_off = self.trainer.odb.training.recompute.is_off
        if output.shape[:-1].numel() > self.most and (is_off or self.of_all):
            output.register_hook(self._run_out)  # the gradients of all layers have been added

    def _run_out(self, _: torch.Tensor) -> None:
        self.fails += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("oom", ["raise", "split"])
def test_out_of_memory_lowers_the_bound_and_the_micro_batch_runs_again(tiny_text, tmp_path, caplog, oom: str) -> None:
    """On one rank with `oom: raise`, too; once."""
    short, meter = Short(BOUND), CPUMeter(400 * MIB)
    trained = train(TEXT, str(tiny_text), tmp_path / "short", short, meter=meter, block={"oom": oom})
    always = train(TEXT, str(tiny_text), tmp_path / "always", ByHand(None))
    assert history(trained) == history(always)
    warnings = [one.getMessage() for one in caplog.records if "runs again with gradient checkpointing" in one.message]
    assert len(warnings) == short.fails == 1
    audit = read_audit(tmp_path / "short")
    assert all(line["parts"] == 1 for line in audit), "nothing is cut"
    lowered = int(warnings[0].split(" = ")[1].split()[0]) * 3 // 4
    later = [line for line in audit if line["optimizer_step"] > 1]
    calls = expected_calls(later, [line["length"] <= lowered for line in later])
    assert short.calls[-len(calls) :] == calls


def test_out_of_memory_with_recomputation_ends_as_without_the_key(tiny_text, tmp_path) -> None:
    with pytest.raises(OutOfMemoryError, match="token_budget"):
        train(TEXT, str(tiny_text), tmp_path, Short(BOUND, of_all=True), meter=CPUMeter(400 * MIB))


@pytest.mark.skipif(not CHECKPOINTS, reason="LLaMA-Factory 0.9.5's checkpointing ends with these transformers")
@pytest.mark.parametrize("finetuning", ["full", "lora"])
def test_llamafactory_s_own_checkpointing(tiny_vl, data_dir, tmp_path, monkeypatch, finetuning: str) -> None:
    """Reentrant, with pictures: the tower and the language model are recomputed together, or neither is."""
    from llamafactory.train.tuner import run_exp

    calls, bound, held = {"always": 0, "auto": 0}, (0, 0), [False]
    for mode in calls:

        def count(*args: Any, mode: str = mode) -> None:
            calls[mode] += 1

        def find(trainer: Any, mode: str = mode, bound: Any = bound, count: Any = count) -> Recompute | None:
            for name, module in trainer.model.named_modules():
                if name.endswith(("layers.0.self_attn", "blocks.0.attn")):
                    module.register_forward_pre_hook(count)
            return Recompute(trainer.model_wrapped, [bound]) if mode == "auto" else None

        monkeypatch.setattr(session, "find_recompute", find)
        changes = {"finetuning_type": finetuning, "gradient_accumulation_steps": 4, "freeze_vision_tower": False}
        config = training_config(tiny_vl, data_dir, tmp_path / mode, dataset="pictures", max_steps=3, **changes)
        run_exp(config | {"odb": {"token_budget": 250, "max_patches": 400, "audit": True, "recompute": mode}})
        audit = read_audit(tmp_path / mode)
        sizes = [(line["rows"] * line["length"], line["patches"]) for line in audit]
        if mode == "always":
            bound = sorted(sizes)[len(sizes) // 2]
        held = [tokens <= bound[0] and patches <= bound[1] for tokens, patches in sizes]
    logs = [[entry for entry in read_log(tmp_path / mode) if "loss" in entry] for mode in calls]
    auto, always = ([(entry["loss"], entry["grad_norm"]) for entry in log] for log in logs)
    assert auto == always and len(auto) == 3
    assert {*held} == {True, False}
    assert calls["auto"] == 2 * sum(1 if one else 2 for one in held), "one layer of each"
    assert calls["always"] == 4 * len(held)


def test_checkpointing_that_moves_activations_to_the_host_is_left_alone(tiny_text) -> None:
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


ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero3": {"deepspeed": zero(3), "use_cpu": False},
    "fsdp2": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}},
}


def on_two_ranks(rank: int, path: str, output_dir: str, engine: str) -> dict[str, Any]:
    """Full and LoRA, each by hand and always."""
    os.environ["LOCAL_RANK"] = str(rank)
    done: dict[str, Any] = {}
    for name, case in {"full": TEXT, "lora": LORA}.items():
        for mode in ("auto", "always"):
            by_hand = ByHand([(BOUND, 0)] if mode == "auto" else None, by_plan=engine != "ddp")
            folder = Path(output_dir, f"{name}_{mode}")
            reentrant = engine == "zero3"  # torch's other checkpoints do not know its empty parameters, in stock too
            with deepspeed_forgotten():
                trainer = train(case, path, folder, by_hand, reentrant=reentrant, world_size=2, **ENGINES[engine])
            done[f"{name}_{mode}"] = {"calls": by_hand.calls, "figures": history(trainer)}
            done["engine"] = engine_of(trainer.model_wrapped)
    return done


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_on_two_ranks_are_those_of_always_to_the_last_bit(tiny_text, tmp_path, engine: str) -> None:
    """Under FSDP2 and ZeRO-3 both ranks decide by the larger micro-batch of the micro-step."""
    if engine == "zero3":
        need("deepspeed")
    outcomes = run_ranks(
        "training.test_recompute:on_two_ranks",
        tmp_path,
        limit_s=400,
        env=shimmed("fsdp_on_cpu") if engine == "fsdp2" else {},
        path=str(tiny_text),
        output_dir=str(tmp_path),
        engine=engine,
    )
    ranks = [outcome.value for outcome in outcomes]
    assert {one["engine"] for one in ranks} == {{"ddp": "ddp", "zero3": "deepspeed", "fsdp2": "sharded"}[engine]}
    for name in ("full", "lora"):
        audits = [read_audit(tmp_path / f"{name}_auto", rank) for rank in range(2)]
        sizes = [[line["rows"] * line["length"] for line in audit] for audit in audits]
        largest = [max(pair) for pair in zip(*sizes, strict=True)]
        for rank in range(2):
            auto, always = ranks[rank][f"{name}_auto"], ranks[rank][f"{name}_always"]
            assert auto["figures"] == always["figures"] != []
            decides = sizes[rank] if engine == "ddp" else largest
            held = [size <= BOUND for size in decides]
            assert {*held} == {True, False}
            assert auto["calls"] == expected_calls(audits[rank], held)
            assert always["calls"] == expected_calls(audits[rank], [False] * len(held))
