"""A report says what real trainings did: LLaMA-Factory's on two ranks, stock and with odb, and one that was resumed.

The figures are held against what the runs counted themselves, in `odb_summary.json` and the Trainer's history.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from run_report.browser import Opened, open_page
from same_training import launch
from support import read_jsonl, read_log, training_config
from training.test_resume import BLOCK, train

from odb_factory.cli.main import main
from odb_factory.report.figures import read_run, report_of

LIMIT_S = 240
NUM_RANKS = 2
TRAINED = {"texts": 48, "pictures": 24}


@pytest.fixture(scope="module")
def runs(tiny_vl: Path, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The output folders of the same YAML with an `odb:` block and without, on two ranks, two data sets mixed."""
    folder = tmp_path_factory.mktemp("runs")
    common = {
        "dataset": ",".join(TRAINED),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "eval_dataset": "texts",
        "eval_strategy": "epoch",
        "per_device_eval_batch_size": 8,
        "logging_steps": 3,
    }
    odb = {"token_budget": 1024, "max_patches": 2000, "audit": True}
    configs = [
        training_config(tiny_vl, data_dir, folder / "with_odb", **common, odb=odb),
        training_config(tiny_vl, data_dir, folder / "stock", **common),
    ]
    launch(configs, folder, NUM_RANKS)
    return folder / "with_odb", folder / "stock"


@pytest.mark.timeout(LIMIT_S + 60)
def test_figures_are_those_the_run_counted(runs: tuple[Path, Path]) -> None:
    run = read_run(runs[0])
    summary = json.loads((runs[0] / "odb_summary.json").read_text())
    totals = run["totals"]
    assert (run["kind"], run["finished"], run["asked"]["ranks"]) == ("odb", True, NUM_RANKS)
    assert totals["samples"] == summary["samples"] == 2 * sum(TRAINED.values())
    for name in ("optimizer_steps", "tokens", "padded_tokens", "padding_ratio", "balance", "patch_balance", "units_cv"):
        assert totals[name] == pytest.approx(summary[name]), name
    results = json.loads((runs[0] / "all_results.json").read_text())
    assert totals["budget_use"] == pytest.approx(read_log(runs[0])[-1]["odb/budget_use"], abs=1e-4)
    assert (totals["seconds"], totals["seconds_from"]) == (results["train_runtime"], "train_runtime")
    # The audits of both ranks come to the same, optimizer step by optimizer step and in all.
    for name in ("samples", "tokens", "padded_tokens", "units"):
        total = summary[name]
        assert sum(run["optimizer_steps"][name]) == total, name
        if name != "units":
            assert sum(line[name] for line in run["by_rank"]) == total, name
    assert run["distributions"]["length"]["count"] == summary["samples"]
    assert sum(run["distributions"]["tokens_of_micro_batch"]["counts"]) + summary["idle_micro_batches"] == sum(
        line["micro_batches"] for line in run["by_rank"]
    )
    logged = [entry for entry in read_log(runs[0]) if "loss" in entry]
    assert [(one["step"], one["loss"], one["learning_rate"]) for one in run["entries"]] == [
        (one["step"], one["loss"], one["learning_rate"]) for one in logged
    ]
    assert [one["eval_loss"] for one in run["evaluations"]] == [
        one["eval_loss"] for one in read_log(runs[0]) if "eval_loss" in one
    ]


def test_times_and_rates_are_of_the_log(runs: tuple[Path, Path]) -> None:
    entries = read_run(runs[0])["entries"]
    lines = [line for line in read_jsonl(runs[0] / "odb_log.jsonl") if "sums" in line]
    begin = read_jsonl(runs[0] / "odb_log.jsonl")[0]["time"]
    assert [entry["seconds"] for entry in entries] == pytest.approx([line["time"] - begin for line in lines])
    assert [(entry["first_step"], entry["step"]) for entry in entries] == [(k - 2, k) for k in range(3, 19, 3)]
    took = lines[1]["time"] - lines[0]["time"]
    assert entries[1]["tokens_per_second"] == pytest.approx(lines[1]["sums"]["tokens"] / took)
    assert entries[1]["seconds_per_step"] == pytest.approx(took / 3)
    for name in ("balance", "padding_ratio", "micro_batches", "units_per_step"):
        assert [entry[name] for entry in entries] == [line["logs"][f"odb/{name}"] for line in lines], name


def test_samples_are_known_by_data_set(runs: tuple[Path, Path]) -> None:
    run = read_run(runs[0])
    assert {line["name"]: line["samples"] for line in run["datasets"]} == {
        name: 2 * rows for name, rows in TRAINED.items()
    }
    assert sum(line["tokens"] for line in run["datasets"]) == run["totals"]["tokens"]
    assert run["asked"]["about"]["dataset"] == list(TRAINED)
    begin = (runs[0] / "odb_log.jsonl").read_text().splitlines()[0]
    assert "file" in json.loads(begin)["about"]["rows_of"] and len(begin) < 6000, "no line grows with the rows"


def test_stock_is_shown_as_far_as_its_logs_go(runs: tuple[Path, Path]) -> None:
    run = read_run(runs[1])
    assert (run["kind"], run["finished"], run["totals"]["optimizer_steps"]) == ("stock", True, 18)
    assert run["totals"]["samples"] == 2 * sum(TRAINED.values())
    assert [entry["loss"] for entry in run["entries"]] == [one["loss"] for one in read_log(runs[1]) if "loss" in one]
    elapsed = [line for line in read_jsonl(runs[1] / "trainer_log.jsonl") if "loss" in line]
    assert [f"0:00:{entry['seconds']:02.0f}" for entry in run["entries"]] == [one["elapsed_time"] for one in elapsed]
    unknown = ("tokens", "padding_ratio", "balance", "patch_balance", "budget_use", "data_wait_s")
    assert all(run["totals"][name] is None for name in unknown)
    assert all(entry[name] is None for entry in run["entries"] for name in ("padding_ratio", "tokens_per_second"))
    assert (run["by_rank"], run["datasets"], run["distributions"]) == (None, None, None)
    assert run["asked"]["arguments"]["train_batch_size"] == 2
    assert any("Stock training logs no tokens" in note for note in run["notes"])


def test_two_runs_are_compared_by_what_their_logs_show(runs: tuple[Path, Path]) -> None:
    figures = report_of(list(runs))
    ours, stock = (json.loads((folder / "all_results.json").read_text())["train_runtime"] for folder in runs)
    found = figures["comparison"]
    assert found["same_amount"] and found["same_learning_rates"]
    assert found["largest_loss_difference"] < 1e-5 and found["first_different_step"] is None, "I9"
    assert found["time_ratio"] == pytest.approx(ours / stock)
    assert figures["headline"].startswith("with_odb and stock each took 18 optimizer steps on 144 samples, with ")


def test_the_page_in_a_browser(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    arguments = ["report", *map(str, runs), "--html", str(page), "--json", str(figures)]
    assert main(arguments) == 0
    assert "with_odb and stock each took 18" in capsys.readouterr().out
    assert 20_000 < page.stat().st_size < 2_000_000
    opened = open_page(page, tmp_path)
    assert not opened.console and not opened.requests
    _shows(opened, json.loads(figures.read_text()))
    assert opened.drawings >= 16


def _shows(opened: Opened, figures: dict[str, Any]) -> None:
    """The tiles have the figures of the JSON, and say in words what is not known."""
    for name, shown in opened.figures.items():
        assert shown == [run["totals"][name] for run in figures["runs"]], name
    assert {"padding_ratio", "balance", "seconds", "samples"} <= opened.figures.keys()
    assert figures["headline"] in opened.text


def test_a_run_under_way(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Killed within a write: what is there is shown, half a line is left out, and nothing is made up."""
    folder = tmp_path / "half"
    shutil.copytree(runs[0], folder)
    for name in ("odb_summary.json", "trainer_state.json", "all_results.json", "trainer_log.jsonl", "README.md"):
        (folder / name).unlink()
    lines = (folder / "odb_log.jsonl").read_text().splitlines(keepends=True)
    entries = [k for k, line in enumerate(lines) if '"sums"' in line]
    (folder / "odb_log.jsonl").write_text("".join(lines[: entries[2] + 1]) + lines[entries[3]][:40])
    audit = (folder / "odb_audit_rank1.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in audit if json.loads(line)["optimizer_step"] <= 10]
    (folder / "odb_audit_rank1.jsonl").write_text("".join(kept) + '{"epoch": 1, "optim')
    run, whole = read_run(folder), read_run(runs[0])
    assert not run["finished"] and run["entries"] == whole["entries"][:3]
    broken = [(one["file"], one["count"], one["wrong"]) for one in run["files"]["broken"]]
    assert broken == [("odb_log.jsonl", 1, "half written"), ("odb_audit_rank1.jsonl", 1, "half written")]
    assert run["optimizer_steps"]["step"] == list(range(1, 11)), "those that both ranks have done"
    assert run["totals"]["max_steps"] == 18
    assert any("8 optimizer steps left out" in note for note in run["notes"])
    headline = report_of([folder])["headline"]
    assert headline.startswith("half: so far: ")
    both = report_of([folder, runs[1]])
    assert both["comparison"]["time_ratio"] is None and "half has not finished" in both["headline"]


def test_a_resumed_run_is_one_run(tiny_text: Path, tmp_path: Path) -> None:
    """Stopped between two checkpoints: what was taken again counts once, and seconds go on."""
    common = {"block": BLOCK, "save_steps": 2, "logging_steps": 1}
    train(tiny_text, tmp_path / "whole", **common)
    folder = tmp_path / "resumed"
    train(tiny_text, folder, stop=5, **common)
    train(tiny_text, folder, resume=str(folder / "checkpoint-4"), **common)
    whole, resumed = read_run(tmp_path / "whole"), read_run(folder)
    assert resumed["finished"] and [one["optimizer_steps"] for one in resumed["processes"]] == [0, 4]
    for name in ("optimizer_steps", "samples", "tokens", "padded_tokens", "units", "padding_ratio", "balance"):
        assert resumed["totals"][name] == whole["totals"][name], name
    for name in ("optimizer_steps", "distributions"):
        assert resumed[name] == whole[name], name
    assert [(one["step"], one["first_step"], one["samples"]) for one in resumed["entries"]] == [
        (one["step"], one["first_step"], one["samples"]) for one in whole["entries"]
    ]
    seconds = [entry["seconds"] for entry in resumed["entries"]]
    assert seconds == sorted(seconds) and all(entry["seconds_per_step"] > 0 for entry in resumed["entries"])
    assert (resumed["totals"]["seconds"], resumed["totals"]["seconds_from"]) == (seconds[-1], "log")
    assert any("resumed 1 time:" in note for note in resumed["notes"])
    # Another run in the same folder begins its files anew.
    train(tiny_text, folder, num_train_epochs=1, **common)
    again = read_run(folder)
    assert len(again["processes"]) == 1 and len(again["entries"]) == again["totals"]["optimizer_steps"] == 8
    assert sum(again["optimizer_steps"]["samples"]) == again["totals"]["samples"]


def test_a_log_that_cannot_be_written_does_not_end_the_training(tiny_text: Path, tmp_path: Path, caplog) -> None:
    (tmp_path / "odb_log.jsonl").mkdir()
    trainer = train(tiny_text, tmp_path, block=BLOCK, save_strategy="no", num_train_epochs=1)
    assert trainer.state.global_step == 8
    (said,) = [record.getMessage() for record in caplog.records if "cannot be written" in record.getMessage()]
    assert "training continues" in said and str(tmp_path / "odb_log.jsonl") in said
