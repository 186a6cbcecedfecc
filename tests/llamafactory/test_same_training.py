"""I9: the same YAML with an `odb:` block is the same training as without: same samples, rates, losses, weights.

The wide grid: `pytest -s -m full_grid tests/llamafactory/test_same_training.py`; -s shows how far the runs differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed.conftest import deepspeed_op  # noqa: F401  (a fixture)
from distributed.rows import INVALID, row, write_uneven_rows
from distributed.test_engines import ENGINES, deepspeed_config
from llamafactory.hparams import FinetuningArguments
from llamafactory.train.tuner import run_exp
from same_training import RELATIVE, Training, check_same_training, deviation, report, side_by_side, train
from support import read_jsonl, training_config, write_dataset

NUM_EVAL = 6
NUM_ROWS = {"texts": 42, "many_texts": 86, "mixed": 30}
"""Those that are evaluated too. The others are whole micro-batches, which stock else fills up by repeating rows."""
TEXT, MIXED = {"token_budget": 256}, {"token_budget": 512, "max_patches": 300}

Pair = Callable[..., tuple[Training, Training]]


@pytest.fixture(scope="module")
def rows_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_uneven_rows(tmp_path_factory.mktemp("rows"), NUM_ROWS)


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
        dataset: str, num_ranks: int = 1, *, env: dict[str, str] | None = None, **changes: Any
    ) -> tuple[Training, Training]:
        model, budget = (tiny_vl, MIXED) if dataset == "mixed" else (tiny_text, TEXT)
        return side_by_side(config_of(model, rows_dir, tmp_path, dataset, **changes), budget, num_ranks, env)

    return pair


@pytest.mark.versions
def test_text_on_two_ranks(pair: Pair) -> None:
    ours, stock = pair("texts", 2, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert [len(step) for step in stock.rows] == [8, 8, 8, 8, 4] * 3, "the last optimizer step of an epoch is smaller"
    assert len(set(ours.num_micro_batches)) > 1, "K differs from step to step"
    report("text, 2 ranks", check_same_training(ours, stock))


@pytest.mark.versions
def test_vision_language_rows_on_one_rank(pair: Pair) -> None:
    ours, stock = pair("mixed", per_device_train_batch_size=3, gradient_accumulation_steps=3)
    assert [len(step) for step in stock.rows] == [9, 9, 6] * 3
    assert len(set(ours.num_micro_batches)) > 1, "K differs from step to step"
    report("tiny Qwen3-VL, 1 rank", check_same_training(ours, stock))


SMOOTHED = {"label_smoothing_factor": 0.1}
ASFT = {"use_asft_loss": True, "max_samples": 36, "val_size": 0, "eval_strategy": "no"}
"""Stock cannot evaluate with it."""
OWN_LOSSES = {
    "asft, text": ("texts", ASFT),
    "asft, tiny Qwen3-VL": ("mixed", ASFT),
    "dft, text": ("texts", {"use_dft_loss": True}),
    "dft, tiny Qwen3-VL": ("mixed", {"use_dft_loss": True}),
    "eaft, text": ("texts", {"use_eaft_loss": True}),
    "eaft, tiny Qwen3-VL": ("mixed", {"use_eaft_loss": True}),
    "label smoothing, text": ("texts", SMOOTHED),
    "label smoothing, tiny Qwen3-VL": ("mixed", SMOOTHED),
    "label smoothing of all labels, text": ("texts", SMOOTHED | {"train_on_prompt": True}),
    "label smoothing of all labels, tiny Qwen3-VL": ("mixed", SMOOTHED | {"train_on_prompt": True}),
}
"""Losses that LLaMA-Factory or the trainer computes, and divides each in its own way."""
FLAT = ("asft, text", "asft, tiny Qwen3-VL")


def check_own_loss(pair: Pair, name: str, tmp_path: Path) -> None:
    dataset, changes = OWN_LOSSES[name]
    if missing := [key for key in changes if key.startswith("use_") and not hasattr(FinetuningArguments, key)]:
        pytest.skip(f"this release has no {missing[0]}")
    steps = {"per_device_train_batch_size": 3 if dataset == "mixed" else 2, "gradient_accumulation_steps": 3}
    steps["num_train_epochs"] = 1
    ours, stock = pair(dataset, **steps | changes)
    found = check_same_training(ours, stock)
    report(name, found)
    audit = read_jsonl(tmp_path / "odb" / "odb_audit_rank0.jsonl")
    assert all(line["rows"] == 1 for line in audit) or name not in FLAT
    assert found.grad_norm < RELATIVE


@pytest.mark.parametrize("name", ["asft, tiny Qwen3-VL", "label smoothing, tiny Qwen3-VL"])
def test_losses_that_stock_divides_in_its_own_way(pair: Pair, name: str, tmp_path: Path) -> None:
    """On two ranks: `test_stages_are_the_same_training_on_two_ranks`, `tests/training/test_same_training.py`, and all
    in `test_stage_grid.py`."""
    check_own_loss(pair, name, tmp_path)


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
    assert found.loss > 5 * RELATIVE and found.weights > 100 * RELATIVE


def test_rows_that_llamafactory_drops_are_told(
    tiny_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stock shuffles what its preprocessing pass leaves, which nobody knows without such a pass."""
    write_dataset(tmp_path, {"texts": [INVALID if k % 4 == 3 else row(3 + k) for k in range(16)]})
    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "disable_shuffling": True}
    run_exp(training_config(tiny_text, tmp_path, tmp_path / "out", odb=TEXT, **steps))
    told = [message for message in caplog.messages if "LLaMA-Factory's preprocessing drops" in message]
    assert len(told) == 1 and "(1 by optimizer step 1)" in told[0] and "tokenized_path" in told[0]


# The wide grid.


@pytest.mark.full_grid
@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_text_grid(pair: Pair, num_ranks: int, accumulation: int, batch: int) -> None:
    steps = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    name = f"text, {num_ranks} ranks, {accumulation} x {batch} rows"
    report(name, check_same_training(*pair("many_texts", num_ranks, **steps)))


@pytest.mark.full_grid
@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_vision_language_grid(pair: Pair, num_ranks: int, accumulation: int, batch: int) -> None:
    steps = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    name = f"tiny Qwen3-VL, {num_ranks} ranks, {accumulation} x {batch} rows"
    report(name, check_same_training(*pair("mixed", num_ranks, **steps)))


@pytest.mark.full_grid
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "fsdp", "fsdp2"])
def test_engines(pair: Pair, name: str, num_ranks: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    engine = ENGINES[name]
    changes = engine.changes | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    if engine.deepspeed_stage:
        request.getfixturevalue("deepspeed_op")
        changes["deepspeed"] = deepspeed_config(engine.deepspeed_stage, tmp_path)
    ours, stock = pair("mixed", num_ranks, env=engine.env, save_strategy="no", save_only_model=False, **changes)
    assert stock.weights or name.startswith("fsdp")
    found = check_same_training(ours, stock, shards_parameters=name in ("zero3", "fsdp", "fsdp2"))
    report(f"tiny Qwen3-VL, {num_ranks} ranks, {name}", found)


@pytest.mark.full_grid
@pytest.mark.parametrize(
    ("dataset", "num_ranks", "changes"),
    [
        ("texts", 2, {"finetuning_type": "lora"}),
        ("mixed", 1, {"finetuning_type": "lora"}),
        ("texts", 1, {"train_on_prompt": True}),  # stock counts labels that nothing predicts
        ("texts", 2, {"dataloader_drop_last": True, "per_device_train_batch_size": 4}),
        ("texts", 2, {"average_tokens_across_devices": False}),
        ("texts", 1, {"max_steps": 7, "lr_scheduler_type": "linear"}),
        ("texts", 1, {"disable_shuffling": True, "eval_strategy": "epoch", "save_strategy": "epoch"}),
    ],
)
def test_other_settings(pair: Pair, dataset: str, num_ranks: int, changes: dict[str, Any]) -> None:
    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    report(
        f"{dataset}, {num_ranks} ranks, {changes}", check_same_training(*pair(dataset, num_ranks, **(steps | changes)))
    )


@pytest.mark.full_grid
@pytest.mark.parametrize("name", OWN_LOSSES)
def test_losses_of_a_trainer(pair: Pair, name: str, tmp_path: Path) -> None:
    check_own_loss(pair, name, tmp_path)


@pytest.mark.full_grid
def test_rows_that_llamafactory_drops_beforehand(tiny_text: Path, tmp_path: Path) -> None:
    """With `tokenized_path` its own pass has been made, and the steps are stock's."""
    write_dataset(tmp_path, {"texts": [INVALID if k % 4 == 3 else row(3 + k) for k in range(40)]})
    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "val_size": 0.1}
    ours, stock = (
        train(config_of(tiny_text, tmp_path, tmp_path / name, "texts", tokenized_path=f"{tmp_path}/{name}_", **more))
        for name, more in (("odb", steps | {"odb": TEXT | {"audit": True}}), ("stock", steps))
    )
    report("tokenized beforehand", check_same_training(ours, stock))
