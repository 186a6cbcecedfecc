"""I9 and I10: the same YAML with `layout: flat` is the same training as stock's: rows, rates, losses, weights.

The wide grid: `pytest -s -m full_grid tests/llamafactory/test_flat_training.py`; -s shows how far the runs differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
import torch
from distributed.conftest import deepspeed_op  # noqa: F401  (a fixture)
from distributed.rows import write_uneven_rows
from distributed.test_engines import ENGINES, deepspeed_config
from llamafactory.train.tuner import run_exp
from safetensors.torch import load_file
from same_training import RELATIVE, Training, check_same_training, report, train
from support import read_jsonl, shimmed, training_config
from transformers import AutoConfig

NUM_EVAL = 4
NUM_ROWS = {"texts": 28, "mixed": 28}
"""Those that are evaluated too. The others are whole micro-batches, which stock else fills up by repeating rows."""
BLOCKS = {"texts": {"token_budget": 384}, "mixed": {"token_budget": 512, "max_patches": 300}}
FLAT = {"layout": "flat", "audit": True}
STEPS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}

Pair = Callable[..., tuple[Training, Training]]


@pytest.fixture(scope="module")
def rows_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_uneven_rows(tmp_path_factory.mktemp("rows"), NUM_ROWS)


@pytest.fixture
def config_of(tiny_text: Path, tiny_vl: Path, rows_dir: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`config_of("odb", "texts", ...)`: two epochs with evaluations in between; flat where it is for odb."""

    def config_of(name: str, dataset: str, **changes: Any) -> dict[str, Any]:
        defaults: dict[str, Any] = {
            "dataset": dataset,
            "num_train_epochs": 2,
            "lr_scheduler_type": "cosine",
            "val_size": NUM_EVAL,
            "per_device_eval_batch_size": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "include_num_input_tokens_seen": True,
            "freeze_vision_tower": False,
            "freeze_multi_modal_projector": False,
        }
        model = tiny_vl if dataset == "mixed" else tiny_text
        block = {"odb": BLOCKS[dataset] | FLAT} if name == "odb" else {}
        return training_config(model, rows_dir, tmp_path / name, **(defaults | STEPS | changes | block))

    return config_of


@pytest.fixture
def pair(config_of: Callable[..., dict[str, Any]], tmp_path: Path) -> Pair:
    """`pair("texts", num_ranks, ...)`: the training in flat micro-batches and the stock training of the same YAML."""

    def pair(
        dataset: str, num_ranks: int = 1, *, env: dict[str, str] | None = None, **changes: Any
    ) -> tuple[Training, Training]:
        ours, stock = (train(config_of(name, dataset, **changes), num_ranks, env) for name in ("odb", "stock"))
        assert is_flat(tmp_path / "odb", BLOCKS[dataset]["token_budget"])
        return ours, stock

    return pair


def is_flat(output_dir: Path, token_budget: int) -> bool:
    """Several samples in one row, as collated, and never more tokens than the budget but for one alone."""
    lines = read_jsonl(output_dir / "odb_audit_rank0.jsonl")
    assert all(line["rows"] == 1 and line["length"] == sum(line["segments"]) for line in lines)
    assert all(line["length"] <= token_budget for line in lines if len(line["ids"]) > 1), "I4"
    return any(len(line["ids"]) > 1 for line in lines)


def test_text_on_two_ranks(pair: Pair) -> None:
    ours, stock = pair("texts", 2)
    assert max(ours.num_micro_batches) > 1
    report("flat, text, 2 ranks", check_same_training(ours, stock))


@pytest.mark.versions
def test_vision_language_rows(pair: Pair) -> None:
    """Rows with none, one and two pictures; a group without any has a dummy image as a segment of its own."""
    ours, stock = pair("mixed", per_device_train_batch_size=3)
    assert max(ours.num_micro_batches) > 1
    report("flat, tiny Qwen3-VL, 1 rank", check_same_training(ours, stock))


TEXT_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "tie_word_embeddings", "vocab_size", "eos_token_id", "pad_token_id", "head_dim",
)  # fmt: skip
DELTA = {"layer_types": ["linear_attention", "full_attention"]} | {
    f"linear_{name}": value
    for name, value in {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8}.items()
}


def with_gated_delta_net(tiny: Path, folder: Path) -> Path:
    """The tiny Qwen2 or Qwen3-VL as a Qwen3.5: every other layer is a Gated DeltaNet."""
    copytree(tiny, folder)
    config = AutoConfig.from_pretrained(tiny)
    text = {key: value for key, value in config.get_text_config().to_dict().items() if key in TEXT_KEYS} | DELTA
    torch.manual_seed(0)
    from transformers import (
        Qwen3_5Config,
        Qwen3_5ForCausalLM,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5TextConfig,
    )

    if hasattr(config, "vision_config"):
        ids = {key: value for key, value in config.to_dict().items() if key.endswith("_token_id")}
        vision = config.vision_config.to_dict()
        del vision["model_type"], vision["deepstack_visual_indexes"]
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision, **ids))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("dataset", "num_ranks"), [("texts", 1), ("mixed", 1)])
def test_qwen3_5(pair: Pair, tiny_text: Path, tiny_vl: Path, tmp_path: Path, dataset: str, num_ranks: int) -> None:
    """The Gated DeltaNet computes padded groups, the rest is flat; gradient checkpointing is on, as ever."""
    model = with_gated_delta_net(tiny_vl if dataset == "mixed" else tiny_text, tmp_path / "qwen3_5")
    ours, stock = pair(
        dataset, num_ranks, model_name_or_path=str(model), per_device_train_batch_size=3 if dataset == "mixed" else 2
    )
    assert max(ours.num_micro_batches) > 1
    report(f"flat, tiny Qwen3.5, {dataset}, {num_ranks} ranks", check_same_training(ours, stock))


# The wide grid.


@pytest.mark.full_grid
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dataset", ["texts", "mixed"])
def test_ranks(pair: Pair, dataset: str, num_ranks: int) -> None:
    report(f"flat, {dataset}, {num_ranks} ranks", check_same_training(*pair(dataset, num_ranks)))


@pytest.mark.full_grid
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "fsdp", "fsdp2"])
@pytest.mark.parametrize("dataset", ["texts", "mixed"])
def test_engines(pair: Pair, dataset: str, name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    engine = ENGINES[name]
    changes = dict(engine.changes)
    if engine.deepspeed_stage:
        request.getfixturevalue("deepspeed_op")
        changes["deepspeed"] = deepspeed_config(engine.deepspeed_stage, tmp_path)
    if "fsdp_config" in changes and dataset == "texts":
        changes["fsdp_config"] = changes["fsdp_config"] | {"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}
    ours, stock = pair(dataset, 2, env=engine.env, **changes)
    found = check_same_training(ours, stock, shards_parameters=name in ("zero3", "fsdp", "fsdp2"))
    report(f"flat, {dataset}, 2 ranks, {name}", found)


@pytest.mark.full_grid
@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "fsdp2"])
def test_qwen3_5_on_engines(
    pair: Pair, tiny_text: Path, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The ranks differ in the number of groups that their rows need; under ZeRO-3 each row has as many."""
    engine = ENGINES[name]
    changes = engine.changes | {"model_name_or_path": str(with_gated_delta_net(tiny_text, tmp_path / "qwen3_5"))}
    if engine.deepspeed_stage:
        request.getfixturevalue("deepspeed_op")
        changes["deepspeed"] = deepspeed_config(engine.deepspeed_stage, tmp_path)
    if "fsdp_config" in changes:
        changes["fsdp_config"] = changes["fsdp_config"] | {"transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer"]}
    ours, stock = pair("texts", 2, env=engine.env | shimmed("small_groups"), **changes)
    found = check_same_training(ours, stock, shards_parameters=name in ("zero3", "fsdp2"))
    report(f"flat, Qwen3.5, 2 ranks, {name}", found)


@pytest.mark.full_grid
@pytest.mark.parametrize(
    ("dataset", "num_ranks", "changes"),
    [
        ("texts", 1, {"disable_gradient_checkpointing": True}),
        ("mixed", 1, {"disable_gradient_checkpointing": True}),
        ("texts", 1, {"use_reentrant_gc": False}),
        ("texts", 2, {"finetuning_type": "lora"}),
        ("mixed", 1, {"finetuning_type": "lora"}),
        ("texts", 1, {"flash_attn": "disabled"}),
        ("mixed", 1, {"flash_attn": "disabled"}),
        ("texts", 1, {"train_on_prompt": True}),
    ],
)
def test_other_settings(pair: Pair, dataset: str, num_ranks: int, changes: dict[str, Any]) -> None:
    report(f"flat, {dataset}, {num_ranks} ranks, {changes}", check_same_training(*pair(dataset, num_ranks, **changes)))


@pytest.mark.full_grid
@pytest.mark.parametrize("dataset", ["texts", "mixed"])
def test_resume_in_between(pair: Pair, config_of: Callable[..., dict[str, Any]], dataset: str, tmp_path: Path) -> None:
    """A flat training that goes on in the middle of an epoch is stock's that was never stopped."""
    saves = {"save_strategy": "steps", "save_steps": 4}
    _, stock = pair(dataset, **saves)
    for folder in (tmp_path / "odb").glob("checkpoint-*"):
        if folder.name != "checkpoint-4":
            rmtree(folder)
    (tmp_path / "odb_record.0").unlink()
    (tmp_path / "odb" / "odb_audit_rank0.jsonl").unlink()
    run_exp(config_of("odb", dataset, **saves, resume_from_checkpoint=str(tmp_path / "odb" / "checkpoint-4")))
    lines = read_jsonl(tmp_path / "odb" / "odb_audit_rank0.jsonl")
    assert lines[0]["optimizer_step"] == 5 and lines[0]["segments"]
    weights = load_file(tmp_path / "odb" / "model.safetensors")
    differences = [(weights[name] - its).double().norm() for name, its in stock.weights.items()]
    norms = [its.double().norm() for its in stock.weights.values()]
    found = float(torch.stack(differences).norm() / torch.stack(norms).norm())
    print(f"flat, {dataset}, resumed: weights {found:.1e}")
    assert found < RELATIVE
