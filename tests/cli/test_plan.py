"""`odb-factory plan`: its figures agree with the training, and its recommendation with its table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from distributed.rows import INVALID, row
from llamafactory.train.tuner import run_exp
from same_training import write_rows
from support import training_config, write_dataset

from odb_factory.cli.main import main
from odb_factory.cli.plan import memory_of, read

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("restored_environment")]

Plan = Callable[..., dict[str, Any]]
BATCHES = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "disable_shuffling": True}
FILL = {"global_batch_size": "fill"}


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture) -> Plan:
    """`plan(config, "--ranks", "2")`: the printed figures."""

    def plan(config: dict[str, Any], *arguments: str) -> dict[str, Any]:
        path = tmp_path / "my.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        capsys.readouterr()
        assert main(["plan", str(path), "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    return plan


@pytest.mark.parametrize(
    ("stage", "dataset", "layout"),
    [("sft", "talks", "flat"), ("pt", "documents", "padded"), ("dpo", "pairs", "padded"), ("kto", "judged", "padded")],
)
def test_the_plan_agrees_with_the_training(stage, dataset, layout, plan, tiny_text, tmp_path) -> None:
    """K and padding, except for rounding, with rows in the order of the data set."""
    block = {"token_budget": 300, "layout": layout}
    data = {"stage": stage, "dataset": dataset} | BATCHES
    config = training_config(tiny_text, write_rows(tmp_path / "rows"), tmp_path / "out", odb=block, **data)
    if stage == "pt":
        config |= {"train_sampling_strategy": "sequential"}
    figures = plan(config)
    run_exp(config | {"disable_gradient_checkpointing": True})
    summary = json.loads((tmp_path / "out" / "odb_summary.json").read_text(encoding="utf-8"))
    row = figures["budgets"][2]
    assert row["token_budget"] == 300 and row["k"] > 1 and figures["observed"] == figures["of"] == summary["samples"]
    assert row["k"] == pytest.approx(summary["micro_steps"] / summary["optimizer_steps"])
    assert row["padding"] == pytest.approx(summary["padding_ratio"], abs=0.02)


@pytest.mark.parametrize(
    ("block", "arguments", "step_size", "resampled"),
    [
        ({"token_budget": 512}, ("--ranks", "2"), 12, False),
        ({"token_budget": 512, "layout": "padded", "balance": False}, ("--ranks", "2", "--samples", "24"), 12, False),
        ({"token_budget": 64, "max_patches": 64, "overlong": "drop"}, (), 6, False),
        ({"token_budget": "auto", "max_patches": "auto"}, ("--ranks", "64", "--samples", "24"), 384, True),
        ({"token_budget": 256, "global_batch_size": 10}, (), 10, False),
        ({"token_budget": 256, "buffer_size": 16} | FILL, (), None, False),
        (None, ("per_device_train_batch_size=1",), 2, False),
    ],
)
def test_the_recommendation_follows_from_the_table(
    block, arguments, step_size, resampled, plan, tiny_vl, data_dir, tmp_path
) -> None:
    both = {"dataset": "texts,pictures", "cutoff_len": 512} | BATCHES
    config = training_config(tiny_vl, data_dir, tmp_path / "out", **both)
    figures = plan(config | ({} if block is None else {"odb": block}), *arguments)
    assert (figures["global_batch_size"], figures["resampled"]) == (step_size, resampled)
    table = {row["token_budget"]: row for row in figures["budgets"]}
    assert len(table) == 5 and list(table) == sorted(table)
    budget = figures["recommended"]["token_budget"]
    assert all(round(table[budget]["k"], 1) <= round(table[larger]["k"], 1) for larger in table if larger >= budget)
    assert all(0 <= row["padding"] < 1 and row["memory_gib"] > 0 for row in table.values())
    assert {line["data"] for line in figures["lengths"]} == {"all", "texts.json", "pictures.json"}


def test_text_and_picture(plan, tiny_text, data_dir, tmp_path, capsys) -> None:
    figures = plan(training_config(tiny_text, data_dir, tmp_path / "out", odb={"token_budget": 256}))
    assert main(["plan", str(tmp_path / "my.yaml"), "--png", str(tmp_path / "plan.png")]) == 0
    assert f"token_budget: {figures['recommended']['token_budget']} " in capsys.readouterr().out
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_a_training_for_another_machine(tiny_text, data_dir, tmp_path, monkeypatch) -> None:
    """DeepSpeed, bf16 and several ranks are planned in one process on a CPU."""
    (tmp_path / "zero3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    changes = {"deepspeed": str(tmp_path / "zero3.json"), "bf16": True, "tf32": True, "use_cpu": False}
    config = training_config(tiny_text, data_dir, tmp_path / "out", odb={"token_budget": 256}, **changes)
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("WORLD_SIZE", "4")
    four, eight = read(tmp_path / "my.yaml"), read(tmp_path / "my.yaml", ["odb.token_budget=200"], ranks=8)
    assert (four.ranks, four.step_size, four.token_budget) == (4, 4, 256)
    assert (eight.ranks, eight.step_size, eight.token_budget) == (8, 8, 200)
    memory, shared = memory_of(four), memory_of(eight)
    assert memory is not None and shared is not None and shared[0] < memory[0] and shared[1:] == memory[1:]


def test_memory_is_near_the_measurement_on_one_gpu(tiny_text, data_dir, tmp_path) -> None:
    """Qwen3-1.7B in pure bf16, 16,384 tokens: 17.4 GiB on an H200; stock, one row of 8,192 tokens: 27.8 GiB."""
    from transformers import Qwen3Config

    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
    sizes |= {"num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True}
    Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path / "model")
    changes = {"pure_bf16": True, "disable_gradient_checkpointing": False}
    config = training_config(tmp_path / "model", data_dir, tmp_path / "out", odb={"token_budget": 16384}, **changes)
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    memory = memory_of(read(tmp_path / "my.yaml"))
    assert memory is not None
    fixed, per_token, logits = memory
    assert (fixed + 16384 * per_token) / 2**30 == pytest.approx(17.4, rel=0.1)
    assert (fixed + 8192 * (per_token + logits)) / 2**30 == pytest.approx(27.8, rel=0.1)


def test_a_stream_and_rows_that_are_left_out(plan, tiny_text, tmp_path) -> None:
    (tmp_path / "shards").mkdir()
    lines = [json.dumps({"text": "the model reads a long line of words " * (1 + k % 5)}) for k in range(40)]
    (tmp_path / "shards" / "0.jsonl").write_text("\n".join(lines), encoding="utf-8")
    write_dataset(tmp_path, {"rows": [row(8 + k) for k in range(8)] + [INVALID], "none": [INVALID]})
    info = json.loads((tmp_path / "dataset_info.json").read_text())
    stream = {"script_url": "shards", "columns": {"prompt": "text"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info | {"shards": stream}), encoding="utf-8")
    config = training_config(tiny_text, tmp_path, tmp_path / "out", odb={"token_budget": 300}, dataset="rows")
    (problem,) = plan(config)["left_out"]
    assert problem.startswith("row 8: ")
    streaming = {"stage": "pt", "dataset": "shards", "streaming": True, "max_steps": 4}
    figures = plan(config | streaming, "--samples", "30")
    assert (figures["observed"], figures["of"]) == (30, None)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["odb.token_bugdet=1"], "token_bugdet"),
        (["do_train=false"], "do_train"),
        (["dataset=unknown"], "unknown"),
        (["model_name_or_path=/nowhere"], "nowhere"),
        (["dataset=none"], "dataset"),
        (["--png", "plan.jpg"], "--png"),
    ],
)
def test_a_mistake_is_one_line(arguments, word, tiny_text, tmp_path, capsys) -> None:
    write_dataset(tmp_path, {"texts": [row(8)], "none": [INVALID]})
    config = training_config(tiny_text, tmp_path, tmp_path / "out", odb={"token_budget": 256})
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    assert main(["plan", str(tmp_path / "my.yaml"), *arguments]) == 1
    out, err = capsys.readouterr()
    line = err.splitlines()[-1]
    assert out == "" and "Traceback" not in err and line.startswith("odb-factory plan: ") and word in line
