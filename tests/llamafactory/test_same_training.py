"""I9: the same YAML with an `odb:` block is the same training as without: same samples, rates, losses, weights.

The wide grid: `pytest -s -m full_grid tests/llamafactory/test_same_training.py`; -s shows how far the runs differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed.rows import row
from PIL import Image
from same_training import Training, check_same_training, deviation, report, train
from support import training_config, write_dataset

NUM_EVAL = 6
BUDGET = {"texts": {"token_budget": 256}, "mixed": {"token_budget": 512, "max_patches": 300}}

Pair = Callable[..., tuple[Training, Training]]


@pytest.fixture(scope="module")
def rows_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`texts`: 42 rows of 3 to 100 words; `mixed`: 27 rows, some with one picture or two. No two rows are alike."""
    folder = tmp_path_factory.mktemp("rows")
    for name, size in (("wide", (128, 64)), ("tall", (64, 160))):
        Image.effect_noise(size, 60).convert("RGB").save(folder / f"{name}.png")
    pictures = [[], ["wide.png"], ["tall.png"], [], ["wide.png", "tall.png"]]
    texts = [row(3 + (k * 23) % 97) for k in range(42)]
    mixed = [row(3 + (k * 19) % 61, pictures[k % 5]) for k in range(27)]
    write_dataset(folder, {"texts": texts, "mixed": mixed})
    return folder


def config_of(model: Path, rows_dir: Path, output_dir: Path, dataset: str, **changes: Any) -> dict[str, Any]:
    """Cosine with warm-up, three epochs, evaluated and saved in between."""
    return (
        training_config(
            model,
            rows_dir,
            output_dir,
            dataset=dataset,
            num_train_epochs=3,
            lr_scheduler_type="cosine",
            warmup_steps=3,
            val_size=NUM_EVAL,
            per_device_eval_batch_size=2,
            eval_strategy="steps",
            eval_steps=4,
            save_strategy="steps",
            save_steps=4,
            include_num_input_tokens_seen=True,
            freeze_vision_tower=False,
            freeze_multi_modal_projector=False,
            save_only_model=True,
        )
        | changes
    )


@pytest.fixture
def pair(tiny_text: Path, tiny_vl: Path, rows_dir: Path, tmp_path: Path) -> Pair:
    """`pair("texts", num_ranks, ...)`: the training with odb and the stock training of the same YAML."""

    def pair(
        dataset: str,
        num_ranks: int = 1,
        env: dict[str, str] | None = None,
        odb: dict[str, Any] | None = None,
        **changes: Any,
    ) -> tuple[Training, Training]:
        model = tiny_text if dataset == "texts" else tiny_vl
        block = {"odb": BUDGET[dataset] | {"audit": True} | (odb or {})}
        ours, stock = (
            train(config_of(model, rows_dir, tmp_path / name, dataset, **changes, **more), num_ranks, env)
            for name, more in (("odb", block), ("stock", {}))
        )
        assert max(ours.num_micro_batches) != min(ours.num_micro_batches), "K should differ from step to step"
        return ours, stock

    return pair


def test_text_on_two_ranks(pair: Pair) -> None:
    ours, stock = pair("texts", 2, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert [len(step) for step in stock.rows] == [8, 8, 8, 8, 4] * 3, "the last optimizer step of an epoch is smaller"
    report("text, 2 ranks", check_same_training(ours, stock))


def test_vision_language_rows_on_one_rank(pair: Pair) -> None:
    ours, stock = pair("mixed", per_device_train_batch_size=3, gradient_accumulation_steps=2)
    report("tiny Qwen3-VL, 1 rank", check_same_training(ours, stock))


def test_the_comparison_finds_another_loss(tiny_vl: Path, rows_dir: Path, tmp_path: Path) -> None:
    """Two stock trainings on the same samples: the mean of means depends on how they are cut, and that is seen."""
    cuts = ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}, {"per_device_train_batch_size": 6})
    one, other = (
        train(config_of(tiny_vl, rows_dir, tmp_path / str(number), "mixed", max_steps=4, **cut))
        for number, cut in enumerate(cuts)
    )
    assert one.rows == other.rows
    found = deviation(one, other)
    report("stock, cut in another way", found)
    assert found.loss > 1e-4 and found.weights > 1e-4
