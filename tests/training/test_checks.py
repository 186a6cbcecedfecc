"""Trainers and arguments that cannot work with online batches are refused in one line, before the first step."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from toy import NUM_ROWS, Rows, item, pad
from training.toy_training import BLOCK, FILL, arguments, audit, ids, make, train
from transformers import (
    Qwen2Config,
    Qwen2ForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)

from odb_factory import Collation, ConfigError, Cost, DataError, ODBConfig, ODBTrainer, enable_odb
from odb_factory.data.observe import count_supervised, measure_batch
from odb_factory.training.checks import check_arguments

HSDP = {"dp_replicate_size": 2, "dp_shard_size": 2}
SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def refuses(trainer: Trainer, key: str) -> None:
    """Its training ends before any step, in one line that begins with `key`."""
    with pytest.raises((ConfigError, DataError)) as refused:
        trainer.train()
    assert str(refused.value).startswith(key) and "\n" not in str(refused.value)
    assert trainer.state.global_step == 0
    assert trainer.odb.training is None


def step_at_once(parameter: torch.Tensor) -> None:
    parameter.grad = None


def t5() -> Any:
    config = T5Config(vocab_size=64, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def classifier() -> Any:
    return Qwen2ForSequenceClassification(Qwen2Config(**SMALL, num_key_value_heads=2, pad_token_id=0))


def has(**attributes: Any) -> Callable[[Trainer], None]:
    """Sets attributes of a trainer. attributes: functions that make the values."""
    return lambda trainer: vars(trainer).update({name: make() for name, make in attributes.items()})


def tensor_parallel(trainer: Trainer) -> None:
    trainer.model._tp_size = 2


def acts_in_backward(trainer: Trainer) -> None:
    next(iter(trainer.model.parameters())).register_post_accumulate_grad_hook(step_at_once)


def loss_of_a_text(trainer: Trainer) -> None:
    """TRL 1.x sets such a text with transformers before 5.19."""
    trainer.compute_loss_func = "non-None value to disable scaling"


class Generates(Trainer):
    """Like TRL's GKDTrainer: in some steps the model generates the answers."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if random.random() < 0.5:
            inputs["input_ids"] = self.model.generate(inputs["input_ids"], max_new_tokens=2)
        return super().training_step(model, inputs, num_items_in_batch)


class Rolls(Trainer):
    """Like TRL's GRPOTrainer: `_prepare_inputs` makes rows."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs({key: value.repeat(2, 1) for key, value in inputs.items()})


class Needs(Trainer):
    """Its rows come from a server that does not exist before training."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return self.server.rows(inputs)


class Decays(Trainer):
    """Its loss has a term of weights."""

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        squares = sum(weight.square().sum() for weight in model.parameters())
        return super().compute_loss(model, *args, **kwargs) + squares


REFUSED: list[tuple[type[Trainer], Callable[[Trainer], None], str]] = [
    (Trainer, has(model=t5), "model.__class__.__name__: 'T5ForConditionalGeneration'"),
    (Trainer, has(model=classifier), "model.__class__.__name__: 'Qwen2ForSequenceClassification'"),
    (Trainer, has(train_dataset=lambda: Rows(num_rows=0)), "train_dataset: "),
    (Trainer, tensor_parallel, "model._tp_size: 2 "),
    (Trainer, acts_in_backward, "training.test_checks.step_at_once "),
    (Trainer, loss_of_a_text, "compute_loss_func: 'non-None value"),
    # Refused for what they do with a batch
    (Generates, has(), "trainer: a Generates "),
    (Rolls, has(), "trainer: a Rolls "),
    (Needs, has(), "trainer: a Needs "),
    (Decays, has(), "how Decays weighs "),
]


@pytest.mark.parametrize(("kind", "change", "key"), REFUSED, ids=[key for *_, key in REFUSED])
def test_a_trainer_that_cannot_work_is_refused(tiny_text, tmp_path, kind: Any, change: Any, key: str) -> None:
    """The trial restores random numbers and methods, and leaves no gradient."""
    trainer = make(tiny_text, tmp_path, block=BLOCK, trainer_class=kind)
    change(trainer)
    state = random.getstate()
    refuses(trainer, key)
    assert random.getstate() == state
    assert not {"generate", "compute_loss"} & (vars(trainer) | vars(trainer.model)).keys()
    assert all(weight.grad is None for weight in trainer.model.parameters())


# Labels


@pytest.mark.parametrize("labels", [1, np.int64(1), torch.tensor(1), 0.5])
def test_one_label_for_a_sample_is_refused(labels: Any) -> None:
    """In a loop, or with a custom model."""
    with pytest.raises(DataError, match=r"labels.*one label for each token"):
        count_supervised(labels)
    with pytest.raises(DataError, match=r"labels.*one label for each token"):
        measure_batch({"input_ids": torch.ones(3, 4, dtype=torch.long), "labels": torch.ones(3)})


# Columns


def patches_of(item: Any) -> Cost:
    return Cost(len(item["input_ids"]), patches=item["width"], units=len(item["input_ids"]) - 1)


@pytest.mark.parametrize("given_by", ["odb_n_patches", "cost_fn"])
def test_max_patches_holds_if_the_trainer_removes_the_column_of_patches(tiny_text, tmp_path, given_by: str) -> None:
    """I4. Patches are counted from columns that the model does not take and that do not reach the collator."""
    column = "odb_n_patches" if given_by == "odb_n_patches" else "width"
    rows = datasets.Dataset.from_list([item(k) | {column: 100, "note": "text"} for k in range(NUM_ROWS)])
    keys: list[set[str]] = []

    def collate(items: list[dict[str, Any]]) -> Any:
        keys.extend(set(item) for item in items)
        return pad(items)

    trainer = make(tiny_text, tmp_path, rows, collate=collate)
    cost_fn = patches_of if given_by == "cost_fn" else None
    enable_odb(trainer, token_budget=4096, max_patches=200, audit=True, cost_fn=cost_fn)
    trainer.train()
    assert max(len(line["ids"]) for line in audit(tmp_path)) == 2
    assert ids(tmp_path) == Counter(range(NUM_ROWS))
    assert trainer.args.remove_unused_columns
    assert all(columns == {"input_ids", "labels"} for columns in keys)


class PadsTo32:
    """Has the attribute of transformers' collators."""

    pad_to_multiple_of = 32

    def __call__(self, items: list[dict[str, Any]]) -> Any:
        rows = [np.asarray(item["input_ids"]) for item in items]
        return pad([{"input_ids": np.pad(row, (0, -len(row) % self.pad_to_multiple_of))} for row in rows])


def test_the_padding_of_a_collator_counts_inside_the_trainers_wrapper(tiny_text, tmp_path) -> None:
    """I4. The Trainer wraps its collator if the dataset is not one of `datasets`."""
    train(tiny_text, tmp_path, collate=PadsTo32(), block=BLOCK)
    assert max(line["rows"] * line["length"] for line in audit(tmp_path)) <= BLOCK["token_budget"]
    assert ids(tmp_path) == Counter(range(NUM_ROWS))


class Adds(Trainer):
    """A `_prepare_inputs` and a `training_step` that leave the rows unchanged."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(inputs) | {"use_cache": False}

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class Compares(Trainer):
    """Like TRL's DPOTrainer since 1.0: the collator makes two rows of a sample, and the loss compares them."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        chosen, rejected = model(**inputs).logits.mean((1, 2)).chunk(2)
        return (rejected - chosen).mean()


def test_a_trainer_that_compares_rows_of_a_sample_is_refused(tiny_text, tmp_path) -> None:
    """With a cost function and no weights it would train with another loss than stock."""

    def made(kind: type[Trainer], collator: Any) -> Trainer:
        trainer = make(tiny_text, tmp_path, trainer_class=kind, max_steps=1, collate=collator)
        enable_odb(trainer, **BLOCK | {"loss_scaling": "none", "layout": "padded"}, cost_fn=lambda row: 64)
        return trainer

    def twice(items: list[Any]) -> Any:
        return pad([*items, *items])

    refuses(made(Compares, twice), "trainer: a Compares makes 2 rows of a sample ")
    for kind, collator in ((Compares, pad), (Trainer, twice), (Adds, pad)):
        made(kind, collator).train()


# Arguments


def deepspeed(**section: Any) -> dict[str, Any]:
    return {"deepspeed": {"zero_optimization": {"stage": 2}} | section}


ZERO = {"deepspeed_plugin": True}
SPLITS = {"odb": {"oom": "split"}} | deepspeed(zero_optimization={"stage": 1})
ARGUMENTS: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    *(({"gradient_accumulation_steps": n}, "gradient_accumulation_steps", {}) for n in (0, -1)),
    *(({"num_train_epochs": n}, "num_train_epochs", {"num_train_epochs": n, "max_steps": 1}) for n in (0, -1)),
    *(
        ({"optim": name}, "optim", {})
        for name in ("galore_adamw_layerwise", "apollo_adamw_layerwise", "lomo", "adalomo")
    ),
    ({"_n_gpu": 2}, "n_gpu", {}),
    ({"auto_find_batch_size": True}, "auto_find_batch_size", {}),
    ({"accelerator_config.dispatch_batches": True}, "accelerator_config.dispatch_batches", {}),
    ({"accelerator_config.use_seedable_sampler": False}, "accelerator_config.use_seedable_sampler", {}),
    (
        {"world_size": 2, "accelerator_config.split_batches": True},
        "accelerator_config.split_batches",
        {"accelerator_config.split_batches": True},
    ),
    ({"world_size": 2, "ddp_static_graph": True}, "ddp_static_graph", {"ddp_static_graph": True}),
    # From LLaMA-Factory's `examples/deepspeed/ds_z2_autotp_config.json`
    (deepspeed(tensor_parallel={"autotp_size": 2}), "deepspeed.tensor_parallel.autotp_size", deepspeed()),
    (deepspeed(sequence_parallel_size=2), "deepspeed.sequence_parallel_size", deepspeed()),
    (
        deepspeed(scheduler={"type": "WarmupLR"}) | {"odb": {"global_batch_size": "fill"}},
        "deepspeed.scheduler.type",
        deepspeed(scheduler={"type": "WarmupLR"}),
    ),
    ({"parallelism": {"tp_size": 2}}, "parallelism_config.tp_size", {"parallelism": HSDP}),
    ({"parallelism": {"cp_size": 2}}, "parallelism_config.cp_size", {"parallelism": HSDP}),
    ({"odb": {"max_patches": "auto"}}, "odb.max_patches", {}),
    *(
        ({"odb": {"oom": policy}} | engine, "odb.oom", engine)
        for policy, engine in (
            ("split", {"fsdp": ["full_shard"]}),
            ("skip", {"ACCELERATE_USE_FSDP": "true"}),  # set by `accelerate launch`
            ("skip", {"torch_compile": True, "world_size": 2}),
        )
    ),
    *(
        ({"odb": {"oom": "split"}} | ZERO | deepspeed(zero_optimization=zero), "odb.oom", ZERO | SPLITS)
        for zero in ({"stage": 0}, {"stage": 1, "overlap_comm": True}, {"stage": 2}, {"stage": 3})
    ),
]
"""Arguments, the key that is refused, arguments that work."""


@pytest.mark.parametrize(
    ("wrong", "key", "right"), ARGUMENTS, ids=[f"{key}-{n}" for n, (_, key, _) in enumerate(ARGUMENTS)]
)
def test_arguments_that_cannot_work_are_refused(tmp_path, monkeypatch, wrong, key: str, right) -> None:
    """Before a model is loaded."""
    from accelerate import ParallelismConfig
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")

    def check(changes: dict[str, Any]) -> None:
        args, block = arguments(tmp_path), {"token_budget": 1024}
        for name, value in changes.items():
            if name == "world_size":
                monkeypatch.setattr(type(args), name, value)
            elif name == "deepspeed":
                args.hf_deepspeed_config = HfDeepSpeedConfig(value)
            elif name == "parallelism":
                args.parallelism_config = ParallelismConfig(**value)
            elif name == "odb":
                block |= value
            elif name.startswith("ACCELERATE"):
                monkeypatch.setenv(name, value)
            else:
                owner, _, attribute = name.rpartition(".")
                setattr(getattr(args, owner) if owner else args, attribute, value)
        check_arguments(args, ODBConfig(**block))

    with pytest.raises(ConfigError) as refused:
        check(wrong)
    assert str(refused.value).startswith(f"{key}: ") and "\n" not in str(refused.value)
    monkeypatch.undo()
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    check(right)


@pytest.mark.parametrize("name", ["tp_size", "cp_size"])
def test_parallelism_of_accelerate_launch_is_refused(tiny_text, tmp_path, monkeypatch, name: str) -> None:
    """The training arguments do not have it."""
    from accelerate import ParallelismConfig

    trainer = make(tiny_text, tmp_path, block=BLOCK)
    monkeypatch.setattr(trainer.accelerator.state, "parallelism_config", ParallelismConfig(**{name: 2}))
    refuses(trainer, f"accelerator.parallelism_config.{name}: 2 ranks")


def test_fewer_patches_than_the_collator_adds(tiny_text, tmp_path) -> None:
    trainer = make(tiny_text, tmp_path)
    with pytest.raises(ConfigError, match="^odb.max_patches: 1 is less than the 16"):
        enable_odb(trainer, token_budget=256, max_patches=1, collation=Collation(dummy_media_patches=16))


def test_drop_last_leaves_out_the_rows_that_stock_leaves_out(tiny_text, tmp_path) -> None:
    """With `fill` it is refused."""
    trainer = train(tiny_text, tmp_path, dataloader_drop_last=True, block=BLOCK)
    assert trainer.state.global_step == NUM_ROWS // 8
    assert sum(ids(tmp_path).values()) == NUM_ROWS // 8 * 8
    filled = make(tiny_text, tmp_path, dataloader_drop_last=True, block=FILL)
    refuses(filled, "drop_last: True ")


def test_a_finished_training_writes_a_summary(tiny_text, tmp_path) -> None:
    """No samples, and the optimizer steps of the checkpoint."""
    first = train(tiny_text, tmp_path, save_strategy="epoch", block=BLOCK)
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    summary = json.loads((tmp_path / "odb_summary.json").read_text())
    (tmp_path / "odb_summary.json").unlink()
    again = train(tiny_text, tmp_path, block=BLOCK, resume=str(checkpoint))
    assert again.state.global_step == first.state.global_step
    resumed = json.loads((tmp_path / "odb_summary.json").read_text())
    assert summary["samples"] == NUM_ROWS and resumed["samples"] == 0
    assert (resumed["optimizer_steps"], resumed["epochs"]) == (summary["optimizer_steps"], summary["epochs"])


# Methods and logs


def of_unsloth(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise AssertionError


of_unsloth.__module__ = "unsloth_zoo.loss_utils"


@pytest.mark.parametrize("name", ["get_batch_samples", "training_step", "compute_loss"])
def test_methods_that_hide_those_of_odb_are_refused(tiny_text, tmp_path, monkeypatch, name: str) -> None:
    """Replaced on the class, as by unsloth, or on the object, as by its patches of LLaMA-Factory."""
    trainer = make(tiny_text, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, name, of_unsloth)
        with pytest.raises(ConfigError, match=rf"^enable_odb: unsloth_zoo.* has taken the place of Trainer.{name}"):
            enable_odb(trainer, **BLOCK)
    setattr(trainer, name, getattr(trainer, name))
    with pytest.raises(ConfigError, match=f"^enable_odb: {name} of this trainer has been replaced by "):
        enable_odb(trainer, **BLOCK)


class Loops(Trainer):
    """Like TRL's PPOTrainer."""

    def train(self) -> None:  # type: ignore[override]
        raise AssertionError


def test_a_trainer_with_its_own_loop_is_refused(tiny_text, tmp_path) -> None:
    with pytest.raises(ConfigError, match="^enable_odb: train of a Loops is not"):
        make(tiny_text, tmp_path, block=BLOCK, trainer_class=Loops)


def own_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    model.train()
    loss = self.compute_loss(model, inputs)
    self.accelerator.backward(loss)
    return loss.detach()


OVERRIDES = {"training_step": own_step, "compute_loss": lambda self, model, inputs, *_, **more: model(**inputs).loss}


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_without_super_is_refused_in_the_first_step(tiny_text, tmp_path, name: str) -> None:
    """In a subclass of `ODBTrainer`: the loss would not be weighed."""
    kind = type("Mine", (ODBTrainer,), {name: OVERRIDES[name]})
    trainer = make(tiny_text, tmp_path, odb=BLOCK, trainer_class=kind)
    with pytest.raises(ConfigError, match=f"^{name} of Mine .* super") as refused:
        trainer.train()
    assert "\n" not in str(refused.value)
    assert trainer.state.global_step == 0


def test_a_custom_log_does_not_end_the_interval(tiny_text, tmp_path) -> None:
    """`odb/...` entries cover all steps since the Trainer's own last log."""

    seen: list[Any] = []

    class Talks(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.log({"loss": 1.0, "mine": 1.0})
            return super().compute_loss(*args, **kwargs)

    class Talker(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.log({"loss": 2.0, "mine": 2.0})

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(logs.get("mine"))

    trainer = make(tiny_text, tmp_path, logging_steps=5, callbacks=[Talker()], trainer_class=Talks, block=BLOCK)
    trainer.train()
    history = trainer.state.log_history
    name = "odb/micro_batches"
    assert not [entry for entry in history if "mine" in entry and name in entry]
    assert seen.count(1.0) == len(audit(tmp_path)), "the measurement logs nothing"
    (first, *_) = [entry for entry in history if name in entry]
    lines = [line for line in audit(tmp_path) if line["optimizer_step"] <= first["step"]]
    assert first["step"] > 1
    assert first[name] == pytest.approx(len(lines) / first["step"], abs=0.01)


def test_active_dropout_is_logged_in_one_line(tiny_text, tmp_path, caplog) -> None:
    """In attention, and in a module such as the value head of LLaMA-Factory's reward models."""
    for attention, head in ((0.0, 0.0), (0.1, 0.0), (0.0, 0.1)):
        trainer = make(tiny_text, tmp_path, max_steps=1)
        trainer.model.model.layers[0].self_attn.attention_dropout = attention
        trainer.model.summary = torch.nn.Dropout(head)
        enable_odb(trainer, **BLOCK)
        trainer.train()
    attention_line, head_line = [message for message in caplog.messages if "dropout is" in message]
    assert "model.layers.0.self_attn: 0.1" in attention_line and "(summary: 0.1)" in head_line
    assert "\n" not in attention_line + head_line
