"""Options of LLaMA-Factory beside an `odb:` block: each does what it does in stock, or a line says what it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from distributed.rows import write_uneven_rows
from llamafactory.hparams import TrainingArguments
from same_training import Training, check_same_training, report, train
from stock import load_data
from support import training_config

BLOCK = {"token_budget": 256, "audit": True}
MIXES = (
    {"mix_strategy": "concat", "val_size": 6},
    {"mix_strategy": "interleave_under", "val_size": 0.2},
    {"mix_strategy": "interleave_over", "interleave_probs": "0.7,0.3", "eval_dataset": "few,fewer"},
    {"max_samples": 7, "eval_dataset": "few,fewer", "eval_on_each_dataset": True},
)
IS_NEW = "train_sampling_strategy" in TrainingArguments.__dataclass_fields__
BY_LENGTH: dict[str, Any] = {"train_sampling_strategy": "group_by_length"} if IS_NEW else {"group_by_length": True}
COUNTED = {} if IS_NEW else {"include_tokens_per_second": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"one": 20, "other": 12, "few": 3, "fewer": 2, "mixed": 12}
    return write_uneven_rows(tmp_path_factory.mktemp("rows"), sizes)


def rows_of(config: dict[str, Any]) -> dict[str, Any]:
    """What `get_dataset` makes of the training data, and of each set that is evaluated."""
    module = load_data(config)
    evaluated = module["eval_dataset"]
    evaluated = evaluated if isinstance(evaluated, dict) else {"": evaluated}
    sets = {"training": module["train_dataset"]} | evaluated
    return {name: [rows[index]["input_ids"] for index in range(len(rows))] for name, rows in sets.items()}


def test_data_sets_are_mixed_held_out_and_evaluated_as_in_stock(tiny_text, data, tmp_path) -> None:
    config = training_config(tiny_text, data, tmp_path / "out", dataset="one,other")
    for mix in MIXES:
        ours, stock = rows_of(config | mix | {"odb": BLOCK}), rows_of(config | mix)
        assert ours == stock, mix
        assert len(stock) == (3 if "eval_on_each_dataset" in mix else 2)


def pair(model: Path, data: Path, folder: Path, ours: dict[str, Any], **changes: Any) -> tuple[Training, Training]:
    """A training with odb and the changes `ours`, and stock's; each evaluates by generating."""
    given = {
        "predict_with_generate": True,
        "generation_max_length": 150,
        "cutoff_len": 140,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    config = training_config(model, data, folder / "stock", **(given | changes))
    return train(config | ours | {"odb": BLOCK, "output_dir": str(folder / "odb")}), train(config)


def test_samples_are_grouped_by_length_as_in_stock(tiny_text, data, tmp_path) -> None:
    names = {"dataset": "one,other", "eval_strategy": "no", "predict_with_generate": False}
    ours, stock = pair(tiny_text, data, tmp_path, {}, **names, **BY_LENGTH)
    report("group_by_length", check_same_training(ours, stock))


def test_generating_evaluations_and_figures_are_those_of_stock(tiny_text, data, tmp_path) -> None:
    """ROUGE of two sets, each by itself; tokens a second without a pass over the data."""
    names = {"dataset": "one,other", "mix_strategy": "interleave_over", "eval_dataset": "few,fewer"}
    counted = {"include_effective_tokens_per_second": True, "eval_on_each_dataset": True}
    ours, stock = pair(tiny_text, data, tmp_path, COUNTED, **names, **counted)
    figures = {name for entry in stock.log for name in entry}
    assert {"eval_few_rouge-l", "eval_fewer_bleu-4"} <= figures
    report("predict_with_generate, text", check_same_training(without_rates(ours), stock))
    mine, its = (json.loads((tmp_path / name / "train_results.json").read_text()) for name in ("odb", "stock"))
    tokens = mine["effective_tokens_per_sec"] * mine["train_runtime"]
    summary = json.loads((tmp_path / "odb" / "odb_summary.json").read_text())
    assert "effective_tokens_per_sec" in its and tokens == pytest.approx(summary["tokens"])
    if COUNTED:
        assert mine["train_tokens_per_second"] * mine["train_runtime"] == pytest.approx(summary["padded_tokens"], 1e-2)


def without_rates(ours: Training) -> Training:
    for entry in ours.log:
        entry.pop("train_tokens_per_second", None)
    return ours


def test_tokens_a_second_of_pairs_need_no_pass(tiny_text, tmp_path) -> None:
    """Which would end in an error on a row that LLaMA-Factory drops."""

    def said(who: str, words: str) -> dict[str, str]:
        return {"from": who, "value": words}

    pairs: list[dict[str, Any]] = [
        {"conversations": [said("human", "why?")], "chosen": said("gpt", "so " * k), "rejected": said("gpt", "no")}
        for k in range(1, 9)
    ]
    pairs[5]["conversations"] *= 2
    (tmp_path / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    info = {"pairs": {"file_name": "pairs.json", "formatting": "sharegpt", "ranking": True, "columns": columns}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    given = {"stage": "dpo", "dataset": "pairs", "max_steps": 2, "include_effective_tokens_per_second": True}
    train(training_config(tiny_text, tmp_path, tmp_path / "out", **given, odb=BLOCK))
    results, summary = (
        json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("train_results", "odb_summary")
    )
    assert results["effective_tokens_per_sec"] * results["train_runtime"] == pytest.approx(summary["tokens"])


@pytest.mark.skipif(
    transformers.__version__ >= "5", reason="stock fails: LLaMA-Factory's collator gives no mm_token_type_ids there"
)
def test_images_train_as_in_stock_where_evaluations_generate(tiny_vl, data, tmp_path) -> None:
    """Its collator is given no model then, and positions of images are made in the forward."""
    ours, stock = pair(tiny_vl, data, tmp_path, {}, dataset="mixed", val_size=4, max_steps=2, eval_steps=2)
    report("predict_with_generate, tiny Qwen3-VL", check_same_training(ours, stock))
