"""I9 in bfloat16: odb is no further from stock than stock is from itself where only rounding differs.

How much bfloat16 rounds depends on the cut, so a fixed tolerance would say nothing. Each cell trains stock as the YAML
says, and again in ways that are the same training but for rounding: the same optimizer steps in other micro-batches, or
in float32 where another cut is another loss. The largest difference between these, times FACTOR, bounds that of odb.

The grid: `pytest -s -m nightly tests/llamafactory/test_precision.py`; -s prints both differences.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from same_training import Config, Training, configurations, deviation, report, train, write_rows
from tiny_models import TinyModels
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

FACTOR = 3
ROWS = 12
"""Of an optimizer step."""
FLOAT32 = {"bf16": False, "pure_bf16": False}
"""For a loss that depends on the cut: a mean of means (vision-language), or with estimates of micro-batches (kto)."""
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


CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", BF16),
    "sft, pure": ("sft", PURE),
    "sft, lora": ("sft", BF16 | LORA),
    "sft, images": ("sft", IMAGES | BF16),
    "sft, images, pure": ("sft", IMAGES | PURE),
    "sft, images, lora": ("sft", IMAGES | BF16 | LORA),
    "pt": ("pt", BF16 | {"packing": False}),
    "rm": ("rm", BF16),
    "dpo": ("dpo", BF16),
    "dpo, lora": ("dpo", BF16 | LORA),
    "dpo, pure, lora": ("dpo", PURE | LORA),
    "kto": ("kto", BF16),
    "kto, pure": ("kto", PURE),
    "kto, lora": ("kto", BF16 | LORA),
}
"""Stage, and what the YAML says."""
ROUNDING = 2**-9
"""Half the relative distance of bfloat16 numbers: the norm of a gradient may differ by it whatever stock's does."""


OF_PREFERENCES = 1e-4
"""What sums of log-probabilities differ by in dpo's cuts. kto has no cut to compare with, for its loss depends on it,
and one training in float32 may be nearer to stock's by chance."""


@pytest.fixture(scope="module")
def config_of(tiny_text: Path, tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Models saved in bfloat16, as real ones are: LLaMA-Factory loads weights in the dtype they were saved in."""
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
    """LLaMA-Factory looks for a GPU that does."""
    monkeypatch.setattr("llamafactory.hparams.parser.is_torch_bf16_gpu_available", lambda: True)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    "name", ["sft, images", *(pytest.param(name, marks=pytest.mark.nightly) for name in CELLS if name != "sft, images")]
)
def test_odb_is_as_near_to_stock_as_stock_is_to_itself(name: str, config_of: Config, tmp_path: Path) -> None:
    stage, changes = CELLS[name]
    cuts = {
        number: {"per_device_train_batch_size": number, "gradient_accumulation_steps": ROWS // number}
        for number in (1, 2, 3, 6)
    }
    config = cuts.pop(2) | changes
    block = config.pop("odb", BLOCK)
    depends_on_the_cut = stage == "kto" or "template" in changes

    def trained(kind: str, changes: dict[str, Any]) -> Training:
        return train(config_of(stage, tmp_path / kind, **config | changes))

    ours, stock = trained("odb", {"odb": block}), trained("stock", {})
    found, exact = deviation(ours, stock), deviation(trained("float32", FLOAT32), stock)
    rounding = [exact]
    if not depends_on_the_cut:
        rounding = [deviation(trained(f"cut{number}", cut), stock) for number, cut in cuts.items()]
    # Stock rounds the gradients of all labels alike, in every cut, for they are nearly -1 / tokens; odb does not.
    loss, weights = max(one.loss for one in rounding), max(one.weights for one in rounding)
    grad_norm = max(one.grad_norm for one in [*rounding, exact])
    report(name, found)
    print(f"stock itself: loss {loss:.1e}, grad_norm {grad_norm:.1e}, weights {weights:.1e}")
    assert ours.rows == stock.rows
    assert ours.learning_rates == stock.learning_rates
    assert max(ours.num_micro_batches) > 1
    assert found.loss <= FACTOR * max(loss, OF_PREFERENCES * (stage == "kto"))
    assert found.grad_norm <= max(FACTOR * grad_norm, ROUNDING)
    assert found.weights <= FACTOR * weights
