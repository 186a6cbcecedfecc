"""I9 in bfloat16: odb differs from stock no more than stock differs from itself by rounding.

The rounding of bfloat16 depends on the micro-batches, so no fixed tolerance fits. Each cell trains stock as in the
YAML, and again with the same optimizer steps in other micro-batches, or in float32 if other micro-batches change the
loss. The largest difference between these trainings, times FACTOR, bounds the difference of odb.

The grid: `pytest -s -m nightly tests/llamafactory/test_precision.py`; -s prints both differences.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.test_engines import ENGINES, deepspeed_config
from same_training import Config, Training, configurations, deviation, launch, read, report, train, write_rows
from support import shimmed
from tiny_models import TinyModels
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

FACTOR = 3
ROWS = 12
"""Rows of an optimizer step."""
FLOAT32 = {"bf16": False, "pure_bf16": False}
"""For a loss that depends on the micro-batches: a mean of means (vision-language), or with estimates (kto)."""
BLOCK = {"token_budget": 320, "audit": True}
BF16, PURE = {"bf16": True}, {"pure_bf16": True}
LORA = {"finetuning_type": "lora"}
IMAGES = {
    "dataset": "albums",
    "template": "qwen3_vl",
    "max_samples": ROWS,
    "num_train_epochs": 4,
    "freeze_vision_tower": False,
    "freeze_multi_modal_projector": False,
    "odb": {"token_budget": 250, "max_patches": 300, "audit": True},
}
LIMIT_S = 1500


def steps_of(batch: int, num_ranks: int = 1) -> dict[str, int]:
    return {"per_device_train_batch_size": batch, "gradient_accumulation_steps": ROWS // batch // num_ranks}


@dataclass(frozen=True)
class Cell:
    """float32: compare with float32 in place of other micro-batches."""

    stage: str
    changes: dict[str, Any]
    float32: bool = False

    def trainings(self, num_ranks: int = 1) -> dict[str, dict[str, Any]]:
        """The trainings by name: with odb, stock, and those that differ from stock only by rounding."""
        stock = steps_of(2, num_ranks) | self.changes
        block = stock.pop("odb", BLOCK)
        cuts = [steps_of(batch, num_ranks) for batch in (1, 3, 6)]
        rounding = {} if self.float32 else {f"cut{number}": stock | changes for number, changes in enumerate(cuts)}
        return {"odb": stock | {"odb": block}, "stock": stock, "float32": stock | FLOAT32, **rounding}


CELLS = {
    "sft": Cell("sft", BF16),
    "sft, pure": Cell("sft", PURE),
    "sft, lora": Cell("sft", BF16 | LORA),
    "sft, images": Cell("sft", IMAGES | BF16, float32=True),
    "sft, images, pure": Cell("sft", IMAGES | PURE, float32=True),
    "sft, images, lora": Cell("sft", IMAGES | BF16 | LORA, float32=True),
    "pt": Cell("pt", BF16 | {"packing": False}),
    "rm": Cell("rm", BF16),
    "dpo": Cell("dpo", BF16),
    "dpo, lora": Cell("dpo", BF16 | LORA),
    "dpo, pure, lora": Cell("dpo", PURE | LORA),
    "kto": Cell("kto", BF16, float32=True),
    "kto, pure": Cell("kto", PURE, float32=True),
    "kto, lora": Cell("kto", BF16 | LORA, float32=True),
}
ON_TWO_RANKS = {name: CELLS[name] for name in ("sft", "sft, images", "dpo, lora", "kto, lora")}


ROUNDING = 2**-9
"""Half the relative distance of bfloat16 numbers: an allowed difference of gradient norms."""
KTO_LOSS = 1e-4
"""Difference of losses by rounding in dpo's trainings; kto's only other training may be close to stock by chance."""


def check(name: str, trained: dict[str, Training]) -> None:
    ours, stock = trained["odb"], trained["stock"]
    ours_to_stock, exact = deviation(ours, stock), deviation(trained["float32"], stock)
    rounding = [deviation(training, stock) for kind, training in trained.items() if kind.startswith("cut")] or [exact]
    loss, weights = max(stock.loss for stock in rounding), max(stock.weights for stock in rounding)
    # Stock rounds the gradients of all labels in the same way: they are close to -1 / tokens. odb does not.
    grad_norm = max(stock.grad_norm for stock in [*rounding, exact])
    report(name, ours_to_stock)
    print(f"stock itself: loss {loss:.1e}, grad_norm {grad_norm:.1e}, weights {weights:.1e}")
    assert ours.rows == stock.rows
    assert ours.learning_rates == stock.learning_rates
    assert max(ours.num_micro_batches) > 1
    assert ours_to_stock.loss <= FACTOR * max(loss, KTO_LOSS * ("kto" in name))
    assert ours_to_stock.grad_norm <= max(FACTOR * grad_norm, ROUNDING)
    assert ours_to_stock.weights <= FACTOR * weights


@pytest.fixture(scope="module")
def config_of(tiny_text: Path, tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Models saved in bfloat16, like real models: LLaMA-Factory loads weights in their saved dtype."""
    folder = tmp_path_factory.mktemp("bf16")
    models = {"text": folder / "bf16_text", "images": folder / "bf16_images"}
    of_stage = configurations(models.__getitem__, write_rows(folder / "rows"))
    for name, path, kind in (
        ("text", TinyModels(tiny_text, tiny_vl, folder)("text"), AutoModelForCausalLM),
        ("images", tiny_vl, AutoModelForImageTextToText),
    ):
        shutil.copytree(path, models[name])
        kind.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(models[name])

    def config_of(stage: str, output_dir: Path, **changes: Any) -> dict[str, Any]:
        common = {
            "model": "images" if "template" in changes else "text",
            "max_samples": 2 * ROWS,
            "val_size": 0,
            "eval_strategy": "no",
            "include_num_input_tokens_seen": False,
            "disable_gradient_checkpointing": True,
        }
        return of_stage(stage, output_dir, **common | changes)

    return config_of


@pytest.fixture(autouse=True)
def cpu_takes_pure_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaMA-Factory requires a GPU that takes bfloat16."""
    monkeypatch.setattr("llamafactory.hparams.parser.is_torch_bf16_gpu_available", lambda: True)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "sft, images")) for name in CELLS]
)
def test_one_rank(name: str, config_of: Config, tmp_path: Path) -> None:
    trainings = CELLS[name].trainings().items()
    check(name, {kind: train(config_of(CELLS[name].stage, tmp_path / kind, **changes)) for kind, changes in trainings})


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S + 300)
@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3"])
def test_two_ranks(engine: str, config_of: Config, tmp_path: Path) -> None:
    common = dict(ENGINES[engine].changes)
    if stage := ENGINES[engine].deepspeed_stage:
        common["deepspeed"] = deepspeed_config(stage, tmp_path)
    configs = {
        (name, kind): config_of(cell.stage, tmp_path / f"{name}_{kind}", **changes | common)
        for name, cell in ON_TWO_RANKS.items()
        for kind, changes in cell.trainings(2).items()
    }
    launch([*configs.values()], tmp_path, limit_s=LIMIT_S, env=shimmed("bf16_on_cpu"))
    for name in ON_TWO_RANKS:
        folders = {kind: tmp_path / f"{name}_{kind}" for cell, kind in configs if cell == name}
        trained = {kind: read(path, 2) for kind, path in folders.items()}
        check(f"{name}, 2 ranks, {engine}", trained)
