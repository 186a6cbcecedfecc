"""Whole trainings through the real LLaMA-Factory: coverage, exact loss, honest progress."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from llamafactory.hparams import TrainingArguments
from llamafactory.train.tuner import run_exp
from same_training import train
from support import Convolutions, noise, read_jsonl, read_log, run_llamafactory, training_config

from odb_factory.errors import DataError

BLOCK = {"token_budget": 1024, "buffer_size": 24, "audit": True}
# transformers 5 takes a share of the steps as `warmup_steps`, its newest releases only so.
WARMUP_SHARE = "warmup_ratio" if "warmup_ratio" in TrainingArguments.__dataclass_fields__ else "warmup_steps"


def audit_of(output_dir: Path) -> list[dict[str, Any]]:
    return read_jsonl(output_dir / "odb_audit_rank0.jsonl")


def ids_by_epoch(audit: list[dict[str, Any]]) -> dict[int, Counter]:
    epochs: dict[int, Counter] = {}
    for line in audit:
        epochs.setdefault(line["epoch"], Counter()).update(line["ids"])
    return epochs


@pytest.mark.versions
def test_command_line_trains_images_and_text_every_row_once(tiny_vl, data_dir, tmp_path) -> None:
    """I1, I2, I4 by the audit of plain `llamafactory-cli train`, with a dotted override of the block."""
    config = training_config(
        tiny_vl,
        data_dir,
        tmp_path / "out",
        dataset="texts,pictures",
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        odb=BLOCK | {"max_patches": 900},
    )
    done = run_llamafactory(config, "odb.token_budget=1536")
    assert done.returncode == 0, done.stdout[-3000:]
    audit = audit_of(tmp_path / "out")
    assert ids_by_epoch(audit) == {0: Counter(range(72)), 1: Counter(range(72))}
    orders = [[line["ids"] for line in audit if line["epoch"] == epoch] for epoch in (0, 1)]
    assert orders[0] != orders[1], "a new order every epoch"
    samples = Counter()
    for line in audit:
        samples[line["optimizer_step"]] += len(line["ids"])
    assert list(samples.values()) == [16, 16, 16, 16, 8] * 2, "I9, as 4 x 4 rows without odb"
    for line in audit:
        if line["rows"] > 1:
            assert line["rows"] * line["length"] <= 1536 and line["patches"] <= 900
    summary = json.loads((tmp_path / "out" / "odb_summary.json").read_text())
    assert (summary["samples"], summary["left_out"], summary["micro_steps"]) == (144, {}, len(audit))
    assert summary["optimizer_steps"] == 10
    assert summary["config"]["token_budget"] == 1536
    assert "[odb] done: 144 samples in 10 optimizer steps" in done.stdout
    assert "Running tokenizer on dataset" not in done.stdout, "there must be no offline tokenization pass"


def test_without_a_block_stock_is_untouched(tiny_vl, data_dir, tmp_path) -> None:
    """The same YAML and seed give the same losses to the last digit, with the plugin and without."""
    losses = []
    for name in ("with", "without"):
        config = training_config(tiny_vl, data_dir, tmp_path / name, dataset="texts,pictures", max_steps=6)
        if name == "with":  # as pytest runs with it
            train(config)
        else:
            done = run_llamafactory(config, env={"ODB_FACTORY_DISABLE": "1"})
            assert done.returncode == 0, done.stdout[-3000:]
        losses.append([(entry.get("loss"), entry.get("grad_norm")) for entry in read_log(tmp_path / name)])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 7


def test_a_training_with_images_runs_no_convolution(tiny_vl, data_dir, tmp_path) -> None:
    """Stock's losses of the same steps. LLaMA-Factory's checkpoints do not know transformers 5.24."""
    changes = {"dataset": "pictures", "freeze_vision_tower": False, "max_steps": 3, "gradient_accumulation_steps": 4}
    changes["disable_gradient_checkpointing"] = True
    counts, losses = [], []
    for name, block in (("stock", {}), ("odb", {"odb": BLOCK})):
        with Convolutions() as convolutions:
            run_exp(training_config(tiny_vl, data_dir, tmp_path / name, **changes, **block))
        counts.append(convolutions.count)
        losses.append([entry["loss"] for entry in read_log(tmp_path / name) if "loss" in entry])
    assert counts[0] > 0 and counts[1] == 0
    assert losses[1] == pytest.approx(losses[0], abs=1e-6) and len(losses[0]) == 3


def test_filled_steps_progress_and_are_scheduled_saved_and_evaluated_as_they_say(tiny_text, data_dir, tmp_path) -> None:
    """With `fill`, where nobody knows the number of steps ahead: all go by the share of samples."""
    out = tmp_path / "out"
    config = training_config(
        tiny_text,
        data_dir,
        out,
        num_train_epochs=2.5,
        gradient_accumulation_steps=2,
        lr_scheduler_type="cosine",
        val_size=8,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="steps",
        save_steps=5,
        odb=BLOCK | {"token_budget": 768, "global_batch_size": "fill"},
        **{WARMUP_SHARE: 0.2},
    )
    run_exp(dict(config))
    audit, log = audit_of(out), read_log(out)
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

    # Within one step of the warm-up: the curve is drawn over an estimated number of steps, the warm-up rounded to one.
    for entry in (entry for entry in log if "loss" in entry):
        if entry["step"] < steps:
            assert entry["epoch"] == pytest.approx(2.5 * share_after(entry["step"]))
        share = share_after(entry["step"] - 1)
        expected = share / 0.2 if share < 0.2 else 0.5 * (1 + math.cos(math.pi * (share - 0.2) / 0.8))
        assert entry["learning_rate"] == pytest.approx(1e-3 * expected, abs=1e-3 / (0.2 * steps))
        assert set(entry) >= {
            "odb/micro_batches",
            "odb/padding_ratio",
            "odb/budget_use",
            "odb/samples_per_second",
            "odb/data_wait_share",
        }
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
    """Other callbacks keep their say; a run that is stopped ends cleanly with a summary of what it did."""
    config = training_config(
        tiny_text,
        data_dir,
        tmp_path / "out",
        num_train_epochs=50,
        learning_rate=0.0,
        val_size=8,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        early_stopping_steps=2,
        odb=BLOCK,
    )
    run_exp(dict(config))
    audit = audit_of(tmp_path / "out")
    assert sorted(ids_by_epoch(audit)) == [0, 1, 2]
    assert json.loads((tmp_path / "out" / "odb_summary.json").read_text())["epochs"] == 3


def test_unreadable_image_stops_or_is_skipped(tiny_vl, tmp_path) -> None:
    from support import write_dataset

    noise((90, 60)).convert("RGB").save(tmp_path / "good.png")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut_off.png").write_bytes(whole[: len(whole) // 2])
    turns = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "red and green"}]
    rows = [{"messages": turns, "images": ["cut_off.png" if k == 5 else "good.png"]} for k in range(9)]
    write_dataset(tmp_path, {"pictures": rows})
    config = training_config(tiny_vl, tmp_path, tmp_path / "out", dataset="pictures", odb=BLOCK)
    with pytest.raises(DataError, match=r"row 5 of pictures\.json.*cut_off\.png.*on_error: skip") as caught:
        run_exp(dict(config))
    assert "\n" not in str(caught.value)
    run_exp({**config, "odb": BLOCK | {"on_error": "skip"}})
    assert ids_by_epoch(audit_of(tmp_path / "out"))[0] == Counter(k for k in range(9) if k != 5)
    summary = json.loads((tmp_path / "out" / "odb_summary.json").read_text())
    assert summary["left_out"] == {"unreadable": 1}
