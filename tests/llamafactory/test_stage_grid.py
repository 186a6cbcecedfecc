"""The wide grid of stages x tuning x engine x layout (I9): `pytest -s -m full_grid tests/llamafactory`.

On two ranks, all trainings of a cell of tuning x engine in the processes of one launch; -s shows how far each differs
from stock's. docs/support.md has the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.conftest import deepspeed_op  # noqa: F401  (a fixture)
from distributed.test_engines import ENGINES, deepspeed_config
from llamafactory.hparams import FinetuningArguments
from llamafactory.train.tuner import run_exp
from safetensors.torch import load_file
from same_training import RELATIVE, check_same_training, report, train
from stage_training import ODB, VARIANTS, WHOLE, Config, configurations, on_ranks, same
from support import read_jsonl

pytestmark = pytest.mark.full_grid

TUNINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"finetuning_type": "lora"},
    "freeze": {"finetuning_type": "freeze", "freeze_trainable_layers": 1},
}
PADDED = {"odb": ODB | {"layout": "padded"}}
OF_PICTURES = {
    "template": "qwen3_vl",
    "val_size": 2,
    "odb": {"token_budget": 500, "max_patches": 300, "audit": True},
}
OF_KTO = {"include_num_input_tokens_seen": False}
"""odb counts those of the longer of the two rows of an example."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "sft_padded": ("sft", PADDED),
    "sft_images": ("sft", OF_PICTURES | {"dataset": "albums"}),
    "pt": ("pt", {}),
    "pt_padded": ("pt", PADDED),
    "rm": ("rm", {}),
    "dpo": ("dpo", {}),
    "dpo_images": ("dpo", OF_PICTURES | {"dataset": "pictures"}),
    "kto": ("kto", OF_KTO),
}
WRAPPED = {"text": ["Qwen2DecoderLayer"], "images": ["Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"]}
LIMIT_S = 1500
FINETUNING = FinetuningArguments.__dataclass_fields__


@pytest.fixture(scope="module")
def config_of(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return configurations(tiny_text, tmp_path_factory.mktemp("stages"))


@pytest.mark.timeout(LIMIT_S + 300)
@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("engine", ["ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp2"])
def test_two_ranks(
    engine: str,
    tuning: str,
    config_of: Config,
    tiny_vl: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by = ENGINES[engine]
    common = TUNINGS[tuning] | by.changes | {"num_train_epochs": 1}
    if engine != "ddp":
        common["eval_strategy"] = "no"
    if by.deepspeed_stage:
        request.getfixturevalue("deepspeed_op")
        common["deepspeed"] = deepspeed_config(by.deepspeed_stage, tmp_path)
    for name, value in by.env.items():
        monkeypatch.setenv(name, value)
    stages = {}
    for name, (stage, changes) in CASES.items():
        if stage == "rm" and "fsdp" in common:
            continue  # stock splits what it has saved whole, and FSDP saves no whole model on CPU
        more = dict(changes)
        if name.endswith("images"):
            more["model_name_or_path"] = str(tiny_vl)
        if "fsdp" in common:
            layers = WRAPPED["images" if name.endswith("images") else "text"]
            more["fsdp_config"] = common["fsdp_config"] | {"transformer_layer_cls_to_wrap": layers}
        stages[name] = (stage, common | more)
    shards = engine in ("zero3", "fsdp", "fsdp2")
    for name, (ours, stock) in on_ranks(config_of, tmp_path / "ranks", stages, limit_s=LIMIT_S).items():
        assert tuning == "lora" or bool(stock.weights) == ("fsdp" not in common), "FSDP saves shards here"
        is_kto = name == "kto"  # of which stock logs the figures of rank 0
        options = {"shards_parameters": shards, "counts_both_answers": is_kto, "of_all_ranks": not is_kto}
        same(f"{name}, {tuning}, 2 ranks, {engine}", ours, stock, **options)


@pytest.mark.timeout(960)
def test_variants_on_two_ranks(config_of: Config, tmp_path: Path) -> None:
    stages = {f"dpo_{name}": ("dpo", changes) for name, changes in VARIANTS.items()}
    for name, (ours, stock) in on_ranks(config_of, tmp_path / "ranks", stages, limit_s=900).items():
        same(f"{name}, 2 ranks", ours, stock)


@pytest.mark.timeout(960)
def test_losses_of_a_trainer_on_two_ranks(config_of: Config, tiny_vl: Path, tmp_path: Path) -> None:
    """Those that LLaMA-Factory's sft computes in place of the model; it cannot evaluate with asft."""
    losses: dict[str, dict[str, Any]] = {
        "dft": {"use_dft_loss": True},
        "dft, means of ranks": {"use_dft_loss": True, "average_tokens_across_devices": False},
        "eaft": {"use_eaft_loss": True},
        "asft": {"use_asft_loss": True},
        "smoothed": {"label_smoothing_factor": 0.1},
        "smoothed, all labels": {"label_smoothing_factor": 0.1, "train_on_prompt": True},
    }
    images = OF_PICTURES | {"dataset": "albums", "model_name_or_path": str(tiny_vl)}
    of_model = {"text": {"odb": ODB | {"token_budget": 256}}, "images": images}
    once = {"num_train_epochs": 1, "eval_strategy": "no"}
    stages = {
        f"{loss}, {model}": ("sft", once | changes | more)
        for loss, changes in losses.items()
        for model, more in of_model.items()
        if all(key in FINETUNING for key in changes if key.startswith("use_"))
    }
    for name, (ours, stock) in on_ranks(config_of, tmp_path / "ranks", stages, limit_s=900).items():
        found = check_same_training(ours, stock)
        report(f"{name}, 2 ranks", found)
        assert found.grad_norm < RELATIVE, name


@pytest.mark.parametrize("tuning", ["lora", "freeze"])
@pytest.mark.parametrize("stage", ["sft", "pt", "rm", "dpo", "kto"])
def test_one_rank(stage: str, tuning: str, config_of: Config, tmp_path: Path) -> None:
    changes = TUNINGS[tuning] | (OF_KTO if stage == "kto" else {})
    ours = train(config_of(stage, tmp_path / "odb", odb=ODB, **changes))
    stock = train(config_of(stage, tmp_path / "stock", **(changes | WHOLE.get(stage, {}))))
    same(f"{stage}, {tuning}", ours, stock, counts_both_answers=stage == "kto")


@pytest.mark.parametrize(
    ("stage", "tuning"),
    [("sft", "full"), ("pt", "full"), ("dpo", "full"), ("kto", "full"), ("kto", "lora"), ("sft", "lora")],
)
def test_a_resumed_training_is_the_same(stage: str, tuning: str, config_of: Config, tmp_path: Path) -> None:
    """LLaMA-Factory resumes no full training of a reward model."""
    saves = TUNINGS[tuning] | {"save_strategy": "steps", "save_steps": 3, "save_only_model": False, "odb": ODB}
    whole = train(config_of(stage, tmp_path / "out", **saves))
    again = {"resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-3"), "overwrite_output_dir": False}
    (saved,) = (path for path in (tmp_path / "out").glob("*model.safetensors"))
    saved.unlink()
    (tmp_path / "out" / "odb_audit_rank0.jsonl").unlink()
    run_exp(config_of(stage, tmp_path / "out", **(saves | again)))
    assert read_jsonl(tmp_path / "out" / "odb_audit_rank0.jsonl")[0]["optimizer_step"] == 4
    weights = load_file(saved)
    assert weights.keys() == whole.weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole.weights.items())
