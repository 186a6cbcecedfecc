"""What reports make of logs: resumes, broken lines, files of several runs, figures that are not known."""

from __future__ import annotations

import datetime
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from run_report.folders import BEGAN, audit_line, begin, end, entry, write_lines, write_stock
from test_docs import REFERENCE, first_column

from odb_factory.report.figures import histogram, read_run, report_of, to_json
from odb_factory.report.page import make_page
from odb_factory.report.read import Files, read_audit

LOG = "odb_log.jsonl"


def test_seconds_go_on_after_a_resume_and_what_is_taken_again_counts_once(tmp_path: Path) -> None:
    """Entries every 2 optimizer steps; checkpoint at 5: steps 6 and beyond are taken again by the second process."""
    lines = [begin(), *(entry(k, BEGAN + 10 * k, steps=2) for k in (2, 4, 6, 8))]
    later = BEGAN + 5000
    lines += [begin(5, later), entry(6, later + 7, loss=3.0), *(entry(k, later + 10 * k, steps=2) for k in (8, 10))]
    write_lines(tmp_path / LOG, [*lines, end(10, later + 101)])
    run = read_run(tmp_path)
    assert [(one["step"], one["seconds"], one["first_step"]) for one in run["entries"]] == [
        (2, 20, 1),
        (4, 40, 3),
        (6, 47, 6),
        (8, 120, 7),
        (10, 140, 9),
    ]
    assert run["entries"][2]["loss"] == 3.0 and run["entries"][2]["seconds_per_step"] == 7
    assert run["totals"]["tokens"] is None, "those of optimizer step 5 are in no entry"
    assert run["totals"]["seconds_from"] == "log"


def test_stock_runs_that_were_resumed(tmp_path: Path) -> None:
    write_stock(tmp_path, [5.0, 4.0, 3.0, 2.0])
    (tmp_path / "trainer_state.json").unlink()
    more = [{"current_steps": 3, "loss": 3.1, "elapsed_time": "0:00:05"}]
    more += [{"current_steps": 4, "loss": 2.1, "elapsed_time": "1 day, 2:00:01"}]
    with (tmp_path / "trainer_log.jsonl").open("a") as log:
        log.write("".join(json.dumps(line) + "\n" for line in more))
    run = read_run(tmp_path)
    assert [(one["step"], one["loss"], one["seconds"]) for one in run["entries"]] == [
        (1, 5.0, 2),
        (2, 4.0, 4),
        (3, 3.1, 9),
        (4, 2.1, 4 + 26 * 3600 + 1),
    ]
    assert not run["finished"] and any("resumed 1 time:" in note for note in run["notes"])


def test_figures_that_are_no_numbers(tmp_path: Path) -> None:
    lines = [
        begin(),
        entry(1, BEGAN + 1),
        entry(2, BEGAN + 2, loss=float("nan")),
        entry(3, BEGAN + 3, grad_norm=np.inf),
    ]
    write_lines(tmp_path / LOG, lines)
    run = read_run(tmp_path)
    assert [one["loss"] for one in run["entries"]] == [1.0, None, 1.0] and run["entries"][2]["grad_norm"] is None
    assert any(note.startswith("2 logged figures NaN or infinite") for note in run["notes"])
    json.loads(to_json(report_of([tmp_path, tmp_path])), parse_constant=pytest.fail)


def test_ranks_that_are_gone_after_a_resume(tmp_path: Path) -> None:
    """Two ranks, then one: what rank 1 did behind the checkpoint is taken again by rank 0."""
    later = BEGAN + 100
    write_lines(tmp_path / LOG, [begin(ranks=2), entry(3, BEGAN + 3, steps=3), begin(2, later), entry(3, later + 1)])
    of_rank = [[audit_line(k, [10 + k, rank + 1], BEGAN + k) for k in (1, 2, 3)] for rank in range(2)]
    write_lines(tmp_path / "odb_audit_rank0.jsonl", [*of_rank[0], audit_line(3, [50, 51, 52], later + 1)])
    write_lines(tmp_path / "odb_audit_rank1.jsonl", of_rank[1])
    run = read_run(tmp_path)
    assert run["optimizer_steps"]["samples"] == [4, 4, 3]
    assert run["optimizer_steps"]["padded_tokens"] == [44, 48, 156]
    assert [line["samples"] for line in run["by_rank"]] == [2 + 2 + 3, 4]
    assert any("with 1 and 2 ranks" in note for note in run["notes"])


def test_idle_micro_batches_have_no_tokens(tmp_path: Path) -> None:
    write_lines(tmp_path / LOG, [begin(ranks=2), entry(1, BEGAN + 1)])
    write_lines(tmp_path / "odb_audit_rank0.jsonl", [audit_line(1, [30])])
    write_lines(tmp_path / "odb_audit_rank1.jsonl", [audit_line(1, [], rows=1, length=30, patches=4)])
    run = read_run(tmp_path)
    assert run["optimizer_steps"]["padded_tokens"] == [30] and run["optimizer_steps"]["patches"] == [0]
    assert [(line["idle_micro_batches"], line["padded_tokens"]) for line in run["by_rank"]] == [(0, 30), (1, 0)]
    assert run["distributions"]["samples_of_micro_batch"]["count"] == 1


def test_a_micro_batch_that_was_cut_is_one(tmp_path: Path) -> None:
    """`oom: split`: its parts have a line each; ranks wait for all of them. One part alone is no whole step."""
    write_lines(tmp_path / LOG, [begin(ranks=2), entry(1, BEGAN + 1)])
    parts = [audit_line(1, [30, 10], part=0, parts=2), audit_line(1, [20], part=1, parts=2)]
    write_lines(tmp_path / "odb_audit_rank0.jsonl", [*parts, audit_line(2, [5], part=0, parts=2)])
    write_lines(tmp_path / "odb_audit_rank1.jsonl", [audit_line(1, [70]), audit_line(2, [5])])
    audit = read_audit(Files(tmp_path), [])
    assert audit is not None and audit.incomplete == 1
    steps = {name: values.tolist() for name, values in audit.steps.items()}
    assert (steps["step"], steps["padded_tokens"], steps["awaited_tokens"]) == ([1], [150], [160])
    assert [line["micro_batches"] for line in read_run(tmp_path)["by_rank"]] == [2, 2]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_summary_of_an_earlier_end_is_not_taken(tmp_path: Path, steps: int) -> None:
    """Of this run or of another one in the folder."""
    (tmp_path / "odb_summary.json").write_text(json.dumps({"optimizer_steps": steps, "samples": 999, "tokens": 1}))
    lines = [begin(), entry(1, BEGAN + 1), end(1, BEGAN + 2), begin(1, BEGAN + 50), entry(2, BEGAN + 60)]
    write_lines(tmp_path / LOG, lines)
    run = read_run(tmp_path)
    assert run["totals"]["samples"] == 8 and not run["finished"] and run["rows"]["left_out"] == {"invalid": 2}


def test_files_of_another_run_are_left_out(tmp_path: Path) -> None:
    """A stock run's log and state stand beside a newer run with odb in the same folder."""
    write_stock(tmp_path, [9.0, 8.0, 7.0])
    write_lines(tmp_path / LOG, [begin(), entry(1, BEGAN + 1), entry(2, BEGAN + 2)])
    run = read_run(tmp_path)
    assert [(one["step"], one["loss"]) for one in run["entries"]] == [(1, 1.0), (2, 1.0)]
    assert not run["finished"] and run["totals"]["samples"] == 8
    (note,) = [note for note in run["notes"] if "another run" in note]
    assert note == "trainer_log.jsonl has other losses at the same optimizer steps: another run, left out."


@pytest.mark.parametrize("values", [[5], [0, 0, 0], list(range(1000)), [1, 10_000_019], [3, 3, 4]])
def test_every_value_is_in_the_histogram(values: list[int]) -> None:
    made = histogram(np.array(values))
    counts, edges = made["counts"], made["edges"]
    assert len(edges) == len(counts) + 1 and len(counts) <= 40
    assert counts == [sum(low <= value < high for value in values) for low, high in itertools.pairwise(edges)]
    assert sum(counts) == made["count"] == len(values) and made["max"] == max(values)


# Two runs


def test_a_ratio_of_times_needs_the_same_steps_and_samples(tmp_path: Path) -> None:
    one = write_stock(tmp_path / "one", [4.0, 3.0], seconds=3)
    cases = {
        "equal": (write_stock(tmp_path / "equal", [4.0, 3.0], seconds=6), 0.5, "needed 50% of the time"),
        "losses": (
            write_stock(tmp_path / "losses", [4.0, 3.3], seconds=6),
            0.5,
            "differ from optimizer step 2 on, by 9.09%",
        ),
        "steps": (write_stock(tmp_path / "steps", [4.0, 3.0, 2.0]), None, "are different trainings: 2 optimizer steps"),
        "samples": (write_stock(tmp_path / "samples", [4.0, 3.0], samples=4), None, "on 8 samples."),
        "long": (write_stock(tmp_path / "long", [4.0, 3.0], seconds=800), None, "do not show that it was on as many"),
    }
    for other, ratio, said in cases.values():
        figures = report_of([one, other])
        assert figures["comparison"]["time_ratio"] == ratio, other
        assert said in figures["headline"], other
        assert ratio is not None or "of the time" not in figures["headline"]


def test_optimizer_steps_after_the_last_logged_loss_count(tmp_path: Path) -> None:
    """As with 3 optimizer steps and `logging_steps: 2`."""
    stock = write_stock(tmp_path / "stock", [4.0, 3.0], unlogged=1)
    assert read_run(stock)["totals"]["optimizer_steps"] == 3
    longer = write_stock(tmp_path / "longer", [4.0, 3.0], unlogged=1, seconds=4)
    assert report_of([stock, longer])["comparison"]["time_ratio"] == 0.5


def test_resumed_runs_are_compared_until_the_last_common_entry(tmp_path: Path) -> None:
    lines = [begin(), entry(1, BEGAN + 3), begin(1, BEGAN + 500), entry(2, BEGAN + 504), end(2, BEGAN + 600)]
    write_lines(tmp_path / "ours" / LOG, lines)
    stock = write_stock(tmp_path / "stock", [1.0, 1.0], seconds=7, samples=4)
    found = report_of([tmp_path / "ours", stock])["comparison"]
    assert (found["seconds"], found["other_seconds"], found["time_ratio"]) == (7, 14, 0.5)


def test_a_run_that_was_cut_off_is_not_compared_in_time(tmp_path: Path) -> None:
    write_lines(tmp_path / "cut" / LOG, [begin(), entry(1, BEGAN + 3, loss=4.0), entry(2, BEGAN + 6, loss=3.0)])
    stock = write_stock(tmp_path / "stock", [4.0, 3.0])
    assert report_of([tmp_path / "cut", stock])["headline"] == (
        "cut and stock, with exactly the same losses in the 2 optimizer steps that both have logged, cannot be "
        "compared in time: cut has not finished."
    )


def test_settings_side_by_side(tmp_path: Path) -> None:
    """Both runs have what is in the Trainer's state; the rest is only in our log."""
    line = begin(ranks=2, model="m") | {"arguments": {"num_train_epochs": 2, "weight_decay": 0.1}}
    write_lines(tmp_path / "odb" / LOG, [line, entry(1, BEGAN + 3), end(1, BEGAN + 4)])
    stock = write_stock(tmp_path / "stock", [1.0], samples=4)
    for folder, steps in (("odb", 1), ("stock", 2)):
        state = {"log_history": [], "num_train_epochs": 2.0, "train_batch_size": 2, "logging_steps": steps}
        (tmp_path / folder / "trainer_state.json").write_text(json.dumps(state))
    figures = report_of([tmp_path / "odb", stock])
    found = {one["name"]: (one["value"], one["other_value"], one["same"]) for one in figures["comparison"]["settings"]}
    assert {name for name, (*_, same) in found.items() if same} == {"num_train_epochs", "train_batch_size"}
    assert found["logging_steps"] == ("1", "2", False) and found["weight_decay"] == ("0.1", None, None)
    page = make_page(figures, datetime.datetime(2026, 1, 1))
    assert f"3 of {len(found)} settings are in the files of both runs; different: logging_steps." in page
    assert '<tr class="differs"><td>logging_steps</td><td>1</td><td>2</td></tr>' in page


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [write_stock(tmp_path / place / "run", [1.0]) for place in "ab"]
    assert [run["name"] for run in report_of(runs)["runs"]] == [str(folder) for folder in runs]


def test_the_reference_has_every_field(tmp_path: Path) -> None:
    write_lines(tmp_path / LOG, [begin(), entry(1, BEGAN + 1)])
    figures = report_of([tmp_path, write_stock(tmp_path / "stock", [1.0])])
    documented = first_column("Report")
    assert documented == {"--html", "--json"} | figures["runs"][0].keys() | figures["comparison"].keys()
    totals = re.search(r"^\| `totals` \|.*$", REFERENCE, re.MULTILINE)
    assert all(f"`{name}`" in totals[0] for name in figures["runs"][0]["totals"] if name != "seconds_from")


def test_of_two_runs_the_headline_says_first_which_one_diverged(tmp_path: Path) -> None:
    lines = [begin(), entry(1, BEGAN + 3, loss=4.0), entry(2, BEGAN + 6, loss=math.nan), end(2, BEGAN + 9)]
    write_lines(tmp_path / "ours" / LOG, lines)
    stock = write_stock(tmp_path / "stock", [4.0, 3.0], samples=4)
    headline = report_of([tmp_path / "ours", stock])["headline"]
    assert headline.startswith(
        "The loss of ours is NaN or infinite from optimizer step 2 on; ours and stock each took 2"
    )
    assert "with exactly the same losses before that; " in headline
    assert report_of([tmp_path / "ours"])["headline"].startswith(
        "ours: the loss is NaN or infinite from optimizer step 2 on"
    )
