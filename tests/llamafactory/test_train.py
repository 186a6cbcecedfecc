"""Whole trainings of real LLaMA-Factory: coverage, exact loss, progress, images that fail, LLaMA Board."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from distributed.rows import check_audits, check_books, losses, read_audits, row
from llamafactory.hparams import TrainingArguments
from llamafactory.train.tuner import run_exp
from PIL import Image
from same_training import configurations, launch, train, write_rows
from support import read_jsonl, read_log, run_llamafactory, training_config, write_dataset

BLOCK = {"token_budget": 1024, "buffer_size": 24, "audit": True}
# Newest transformers take a share of the steps as `warmup_steps` only.
WARMUP_SHARE = "warmup_ratio" if "warmup_ratio" in TrainingArguments.__dataclass_fields__ else "warmup_steps"


def ids_by_epoch(audit: list[dict[str, Any]]) -> dict[int, Counter]:
    epochs: dict[int, Counter] = {}
    for line in audit:
        epochs.setdefault(line["epoch"], Counter()).update(line["ids"])
    return epochs


@pytest.mark.versions
def test_command_line_trains_images_and_text_every_row_once(tiny_vl, data_dir, tmp_path) -> None:
    """I1, I2, I4, I9 in the audit of `llamafactory-cli train`, with a dotted override of the block."""
    changes = {"dataset": "texts,pictures", "num_train_epochs": 2, "odb": BLOCK | {"max_patches": 900}}
    changes |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    config = training_config(tiny_vl, data_dir, tmp_path / "out", **changes)
    ended = run_llamafactory(config, "odb.token_budget=1536")
    assert ended.returncode == 0, ended.stdout[-3000:]
    audits = read_audits(tmp_path / "out", 1)
    check_audits(audits, ids=range(72), accumulation=4, batch=4, token_budget=1536, max_patches=900, epochs=2)
    orders = [[line["ids"] for line in audits[0] if line["epoch"] == epoch] for epoch in (0, 1)]
    assert orders[0] != orders[1], "a new order every epoch"
    summary = check_books(tmp_path / "out", audits, left_out={})
    assert (summary["optimizer_steps"], summary["config"]["token_budget"]) == (10, 1536)
    assert "[odb] done: 144 samples in 10 optimizer steps" in ended.stdout
    assert "Running tokenizer on dataset" not in ended.stdout, "there must be no offline tokenization pass"


def test_without_a_block_stock_is_unchanged(tiny_vl, data_dir, tmp_path) -> None:
    """The same YAML and seed give the same losses to the last digit, with and without the plugin."""
    losses = []
    for name, env in (("with", {}), ("without", {"ODB_FACTORY_DISABLE": "1"})):
        config = training_config(tiny_vl, data_dir, tmp_path / name, dataset="texts,pictures", max_steps=6)
        ended = run_llamafactory(config, env=env)
        assert ended.returncode == 0, ended.stdout[-3000:]
        losses.append([(entry.get("loss"), entry.get("grad_norm")) for entry in read_log(tmp_path / name)])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 7


def test_filled_steps_are_scheduled_saved_and_evaluated_by_samples(tiny_text, data_dir, tmp_path) -> None:
    """With `fill` the number of steps is unknown, so progress is the share of samples."""
    out = tmp_path / "out"
    changes = {"num_train_epochs": 2.5, "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine"}
    changes |= {"val_size": 8, "eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}
    changes |= {"odb": BLOCK | {"token_budget": 768, "global_batch_size": "fill"}, WARMUP_SHARE: 0.2}
    run_exp(training_config(tiny_text, data_dir, out, **changes))
    audit, log = read_audits(out, 1)[0], read_log(out)
    rows = 40
    epochs = ids_by_epoch(audit)
    assert epochs[0] == epochs[1] == Counter(range(rows))
    assert rows / 2 <= epochs[2].total() < rows, "half an epoch, to within one step"
    state = json.loads((out / "trainer_state.json").read_text())
    steps = audit[-1]["optimizer_step"]
    assert state["global_step"] == state["max_steps"] == steps
    assert state["num_train_epochs"] == 3

    def share_after(optimizer_step: int) -> float:
        done = sum(len(line["ids"]) for line in audit if line["optimizer_step"] <= optimizer_step)
        return min(done / (2.5 * rows), 1)

    # To within one step: the number of steps is estimated, and the warm-up is rounded to a step.
    for entry in (entry for entry in log if "loss" in entry):
        if entry["step"] < steps:
            assert entry["epoch"] == pytest.approx(2.5 * share_after(entry["step"]))
        share = share_after(entry["step"] - 1)
        expected = share / 0.2 if share < 0.2 else 0.5 * (1 + math.cos(math.pi * (share - 0.2) / 0.8))
        assert entry["learning_rate"] == pytest.approx(1e-3 * expected, abs=1e-3 / (0.2 * steps))
        metrics = ("micro_batches", "padding_ratio", "budget_use", "samples_per_second", "data_wait_share")
        assert entry.keys() >= {f"odb/{name}" for name in metrics}
    evaluations = [entry["step"] for entry in log if "eval_loss" in entry]
    every_fifth = list(range(5, steps + 1, 5))
    assert evaluations in (every_fifth, [*every_fifth, steps]), "transformers 5 evaluates at the end as well"
    saved = sorted(int(path.name.split("-")[1]) for path in out.glob("checkpoint-*"))
    assert set(saved) >= set(evaluations)
    lines = read_jsonl(out / "trainer_log.jsonl")
    assert lines[-1]["percentage"] == 100 and lines[-1]["total_steps"] == steps
    for line in lines:
        assert abs(line["percentage"] / 100 - share_after(line["current_steps"])) < 1 / steps
    assert log[-1]["train_samples_per_second"] == pytest.approx(
        sum(epoch.total() for epoch in epochs.values()) / log[-1]["train_runtime"], rel=1e-3
    )


def test_early_stopping_and_best_model(tiny_text, data_dir, tmp_path) -> None:
    """Other callbacks work, and a stopped run writes its summary."""
    changes = {"num_train_epochs": 50, "learning_rate": 0.0, "val_size": 8, "eval_strategy": "epoch"}
    changes |= {"save_strategy": "epoch", "load_best_model_at_end": True, "early_stopping_steps": 2}
    run_exp(training_config(tiny_text, data_dir, tmp_path / "out", odb=BLOCK, **changes))
    audit = read_audits(tmp_path / "out", 1)[0]
    assert sorted(ids_by_epoch(audit)) == [0, 1, 2]
    assert json.loads((tmp_path / "out" / "odb_summary.json").read_text())["epochs"] == 3


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_tokens_per_second_need_no_pass_over_the_data(stage: str, tiny_text: Path, tmp_path: Path) -> None:
    """Such a pass would fail on the row that LLaMA-Factory drops: it has two questions, or no answer."""
    rows_dir, out = write_rows(tmp_path / "rows"), tmp_path / "out"
    path = rows_dir / ("pairs.json" if stage == "dpo" else "talks.json")
    rows = json.loads(path.read_text(encoding="utf-8"))
    rows[5]["conversations"] = rows[5]["conversations"][:1] * (2 if stage == "dpo" else 1)
    path.write_text(json.dumps(rows), encoding="utf-8")
    changes = {"max_steps": 2, "val_size": 0, "eval_strategy": "no", "include_effective_tokens_per_second": True}
    run_exp(configurations(lambda _: tiny_text, rows_dir)(stage, out, odb=BLOCK, **changes))
    results, summary = (json.loads((out / f"{name}.json").read_text()) for name in ("train_results", "odb_summary"))
    assert results["effective_tokens_per_sec"] * results["train_runtime"] == pytest.approx(summary["tokens"])


NUM_ROWS, ACCUMULATION = 32, 4
LOST = {5: 2, 22: 6}
"""Optimizer step of each row whose image is cut off: its header is whole, so it fails when it is collated."""


def configured(tiny_vl: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """The learning rate is almost 0, so that the loss of an optimizer step depends only on its rows."""
    folder.mkdir(parents=True)
    for name in ("fine.png", "cut.png"):
        Image.radial_gradient("L").resize((64, 96)).convert("RGB").save(folder / name)
    if folder.name == "odb":
        (folder / "cut.png").write_bytes((folder / "cut.png").read_bytes()[:200])
    rows = [row(3 + (k * 11) % 38, ["cut.png" if k in LOST else "fine.png"]) for k in range(NUM_ROWS)]
    write_dataset(folder, {"rows": rows})
    block = {"token_budget": 256, "audit": True, "on_error": "skip"}
    settings = {"learning_rate": 1e-12, "gradient_accumulation_steps": ACCUMULATION, "disable_shuffling": True}
    return training_config(tiny_vl, folder, folder / "out", dataset="rows", odb=block, **settings | changes)


@pytest.mark.timeout(600)
def test_an_image_that_fails_after_it_was_observed_is_left_out(tiny_vl, tmp_path) -> None:
    """`on_error` also decides about images that fail at collation (I2, I9)."""
    num_ranks = 2
    config = configured(tiny_vl, tmp_path / "odb", gradient_accumulation_steps=ACCUMULATION // num_ranks)
    folder = Path(config["output_dir"])
    ended = launch([config | {"ddp_backend": "gloo"}], folder.parent, num_ranks)
    audits = read_audits(folder, num_ranks)
    ids = Counter(id for audit in audits for line in audit for id in line["ids"])
    assert ids == Counter(set(range(NUM_ROWS)) - LOST.keys()), "I2"
    check_books(folder, audits, left_out={"collation": 2})
    assert sum(rank.output.count("left out (collation): ") for rank in ended) == 2
    # The other optimizer steps are stock's.
    stock = configured(tiny_vl, tmp_path / "stock")
    del stock["odb"]
    train(stock)
    odb_losses, stock_losses = (losses(Path(run["output_dir"])) for run in (config, stock))
    for step, (odb_loss, stock_loss) in enumerate(zip(odb_losses, stock_losses, strict=True), 1):
        if step not in LOST.values():
            assert odb_loss == pytest.approx(stock_loss, rel=1e-4), step


def test_the_odb_key_in_extra_arguments_of_llama_board_is_a_block(tiny_text, data_dir, tmp_path, monkeypatch) -> None:
    """LLaMA Board builds its page without a server, its runner writes the YAML, and the test trains that YAML."""
    pytest.importorskip("gradio", reason="gradio is not installed: LLaMA-Factory's pin excludes the newest releases")
    from llamafactory.webui import interface, runner
    from llamafactory.webui.common import save_cmd

    engines = []

    class Engine(interface.Engine):
        def __init__(self, *args: object, **kwargs: object):
            super().__init__(*args, **kwargs)
            engines.append(self)

    monkeypatch.setattr(interface, "Engine", Engine)
    interface.create_ui()
    (engine,) = engines
    monkeypatch.setattr(runner, "get_save_dir", lambda *names: str(tmp_path / "out"))
    extra = {"odb": {"token_budget": 2048, "audit": True}, "max_steps": 3, "use_cpu": True, "optim": "adamw_torch"}
    entered = {
        "top.model_path": str(tiny_text),
        "top.model_name": "tiny",
        "top.template": "qwen",
        "train.dataset_dir": str(data_dir),
        "train.dataset": ["texts"],
        "train.compute_type": "fp32",
        "train.extra_args": json.dumps(extra),
    }
    manager = engine.manager
    data = {element: getattr(element, "value", None) for element in manager.get_elem_list()}
    data |= {manager.get_elem_by_id(name): value for name, value in entered.items()}
    path = save_cmd(engine.runner._parse_train_args(data))

    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", path])
    monkeypatch.setenv("LLAMABOARD_ENABLED", "1")
    monkeypatch.setenv("LLAMABOARD_WORKDIR", str(tmp_path / "out"))
    run_exp()
    samples = [len(line["ids"]) for line in read_jsonl(tmp_path / "out" / "odb_audit_rank0.jsonl")]
    assert sum(samples) == 3 * 16, "batch size 2 and accumulation 8 are the page's defaults"
    progress = read_jsonl(tmp_path / "out" / "trainer_log.jsonl")
    assert {line["total_steps"] for line in progress} == {3}, "for the progress bar"
