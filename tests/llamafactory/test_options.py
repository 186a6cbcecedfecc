"""Options of LLaMA-Factory beside an `odb:` block: each does what it does in stock, or a line says what it does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from distributed.rows import write_uneven_rows
from llamafactory.hparams import TrainingArguments
from same_training import check_same_training, report, train
from support import training_config

BLOCK = {"token_budget": 256, "audit": True}
IS_NEW = "train_sampling_strategy" in TrainingArguments.__dataclass_fields__
BY_LENGTH: dict[str, Any] = {"train_sampling_strategy": "group_by_length"} if IS_NEW else {"group_by_length": True}
COUNTED = {} if IS_NEW else {"include_tokens_per_second": True}


def test_samples_are_grouped_by_length_as_in_stock(tiny_text, tmp_path) -> None:
    """And tokens a second are reported without a pass over the data."""
    data = write_uneven_rows(tmp_path, {"one": 20, "other": 12})
    given = {"cutoff_len": 140, "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    given |= {"include_effective_tokens_per_second": True} | BY_LENGTH
    config = training_config(tiny_text, data, tmp_path / "stock", dataset="one,other", **given)
    ours = train(config | COUNTED | {"odb": BLOCK, "output_dir": str(tmp_path / "odb")})
    stock = train(config)
    for entry in ours.log:
        entry.pop("train_tokens_per_second", None)  # asked for by COUNTED alone
    report("group_by_length", check_same_training(ours, stock))
    mine, its = (json.loads((tmp_path / name / "train_results.json").read_text()) for name in ("odb", "stock"))
    summary = json.loads((tmp_path / "odb" / "odb_summary.json").read_text())
    assert "effective_tokens_per_sec" in its
    assert mine["effective_tokens_per_sec"] * mine["train_runtime"] == pytest.approx(summary["tokens"])
    if COUNTED:
        assert mine["train_tokens_per_second"] * mine["train_runtime"] == pytest.approx(summary["padded_tokens"], 1e-2)


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
