"""Reports of files that are not what they must be: counted and named, never a traceback, and never a made-up zero."""

from __future__ import annotations

import datetime
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_report.folders import BEGAN, audit_line, begin, end, entry, write_lines, write_stock

from odb_factory.errors import ODBError
from odb_factory.report.compare import report_of as report
from odb_factory.report.figures import read_run, to_json
from odb_factory.report.page import make_page

LOG, TRAINER_LOG, STATE = "odb_log.jsonl", "trainer_log.jsonl", "trainer_state.json"
AUDIT, SUMMARY = "odb_audit_rank0.jsonl", "odb_summary.json"
DATA_SETS = "odb_data_sets_00000000.zlib"
"""Of rows 0 to 3: two of each data set."""
WRONG = ("x", [1, 2], None, -1, KeyError)
"""KeyError: taken away."""
EXTREME = ({"a": 1}, True, 0, 2**31 - 1, 2**62, 10**400, 1e308, float("nan"), float("inf"))
Files = dict[str, list[Any]]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """The records of a run that is over: all logs, a summary, an audit. The state and the summary are one record."""
    write_stock(tmp_path, [1.0, 1.0, 1.0])
    (tmp_path / DATA_SETS).write_bytes(zlib.compress(np.array([0, 0, 1, 1], "<i2").tobytes()))
    about = {"dataset": ["a", "b"], "rows_of": {"names": ["a", "b"], "file": DATA_SETS}}
    logged = [begin(**about), *(entry(k, BEGAN + 2 * k) for k in (1, 2, 3)), end(3, BEGAN + 8)]
    summary = {
        "optimizer_steps": 3,
        "samples": 12,
        "tokens": 180,
        "padded_tokens": 240,
        "balance": 1.0,
        "units_cv": 0.0,
    }
    summary |= {"patch_balance": 1.0, "data_wait_s": 1.5, "left_out": {"invalid": 2}, "not_trained": 0, "overlong": 1}
    made = {
        name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in (TRAINER_LOG, STATE)
    }
    for line in made[STATE][0]["log_history"]:
        line["odb/balance"] = 1.0
    return made | {LOG: logged, AUDIT: [audit_line(k, [15, 15, 15, 15]) for k in (1, 2, 3)], SUMMARY: [summary]}


def write(folder: Path, files: Files) -> Path:
    for name, records in files.items():
        write_lines(folder / name, records)
    return folder


def stock_state(files: Files) -> list[Any]:
    """As without odb."""
    state = json.loads(json.dumps(files[STATE]))
    for line in state[0]["log_history"]:
        del line["odb/balance"]
    return state


def shown(folder: Path) -> dict[str, Any]:
    """The run, once page and JSON have been made of it, alone and beside another."""
    for figures in (report([folder]), report([folder, folder])):
        make_page(figures, datetime.datetime(2026, 1, 1))
        to_json(figures)
    return figures["runs"][0]


def test_a_whole_run_has_no_broken_lines(files: Files, tmp_path: Path) -> None:
    run = shown(write(tmp_path, files))
    assert run["files"]["broken_lines"] == {} and run["files"]["broken_files"] == [] and run["finished"]
    assert [line["samples"] for line in run["datasets"]] == [6, 6] and run["totals"]["samples"] == 12


@pytest.mark.parametrize(
    ("name", "number", "path", "value"),
    [
        (LOG, 2, ("optimizer_step",), "x"),
        (LOG, 2, ("sums", "samples"), [1, 2]),
        (LOG, 2, ("logs", "loss"), "x"),
        (LOG, 0, ("ranks",), "two"),
        (LOG, 0, ("config",), None),
        (LOG, 0, ("config", "token_budget"), [1]),
        (LOG, 1, ("event",), "beginning"),
        (TRAINER_LOG, 1, ("current_steps",), "x"),
        (TRAINER_LOG, 1, ("elapsed_time",), "soon"),
        (STATE, 0, ("log_history",), 3),
        (STATE, 0, ("log_history", 1), "x"),
        (STATE, 0, ("log_history", 1, "step"), None),
        (SUMMARY, 0, ("samples",), None),
        (SUMMARY, 0, ("left_out",), 3),
        (AUDIT, 1, ("lengths",), ["a"]),
        (AUDIT, 1, ("parts",), 0),
        (AUDIT, 1, ("ids",), [1]),
    ],
)
def test_a_wrong_type_is_counted_and_named(
    files: Files, tmp_path: Path, name: str, number: int, path: tuple[Any, ...], value: Any
) -> None:
    _set(files[name][number], path, value)
    run = shown(write(tmp_path, files))
    is_file = name in (STATE, SUMMARY) and path != ("log_history", 1) and len(path) < 3
    assert run["files"]["broken_files"] == ([name] if is_file else [])
    assert run["files"]["broken_lines"] == ({} if is_file else {name: 1})
    assert sum(note.startswith(name) and "left out" in note for note in run["notes"]) == 1


@pytest.mark.parametrize(
    "values", [WRONG, pytest.param(EXTREME, marks=pytest.mark.full_grid)], ids=["wrong", "extreme"]
)
def test_no_value_in_any_place_ends_in_a_traceback(files: Files, tmp_path: Path, values: tuple[Any, ...]) -> None:
    """Every key of every kind of record, with values of every type in its place, or gone."""
    write(tmp_path, files)
    cases, at = 0, datetime.datetime(2026, 1, 1)
    for name, records in files.items():
        for number in (0, 1, len(records) - 1) if name == LOG else (0,):
            for path in _paths(records[number]):
                for value in values:
                    changed = json.loads(json.dumps(records))
                    _set(changed[number], path, value)
                    write_lines(tmp_path / name, changed)
                    figures = report([tmp_path])
                    make_page(figures, at)
                    json.dumps(figures, allow_nan=False)
                    cases += 1
        write_lines(tmp_path / name, records)
    assert cases > 80 * len(values)


def _paths(record: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = record.items() if isinstance(record, dict) else enumerate(record[:1]) if isinstance(record, list) else ()
    for key, value in inner:
        yield (*before, key)
        yield from _paths(value, (*before, key))


def _set(record: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        record = record[key]
    if value is KeyError:
        del record[path[-1]]
    else:
        record[path[-1]] = value


# What is there is used, and what is not is said


def test_an_audit_without_parts_is_of_whole_micro_batches(files: Files, tmp_path: Path) -> None:
    whole = shown(write(tmp_path, files))
    for line in files[AUDIT]:
        del line["part"], line["parts"]
    run = shown(write(tmp_path, files))
    assert run == whole and run["datasets"][0]["samples"] == 6


def test_an_audit_of_no_use_makes_no_zeros(files: Files, tmp_path: Path) -> None:
    for line in files[AUDIT]:
        line["lengths"] = None
    run = shown(write(tmp_path, files))
    made = ("datasets", "by_rank", "distributions", "optimizer_steps", "lengths_of_successive_steps")
    assert [run[name] for name in made] == [None] * 5 and run["files"]["broken_lines"] == {AUDIT: 3}
    assert any(note.startswith("No line of the audits is of this run and whole") for note in run["notes"])


@pytest.mark.parametrize("rubbish", [b"", b"\xff\x00\xfe{]\n"])
def test_without_its_begin_line_the_rest_of_the_log_is_used(files: Files, tmp_path: Path, rubbish: bytes) -> None:
    write(tmp_path, files)
    (tmp_path / LOG).write_bytes(rubbish + b"".join((tmp_path / LOG).read_bytes().splitlines(keepends=True)[1:]))
    run = shown(tmp_path)
    assert run["files"]["broken_lines"] == ({LOG: 1} if rubbish else {}) and run["finished"]
    assert [one["tokens"] for one in run["entries"]] == [60, 60, 60] and run["kind"] == "odb"
    assert [one["seconds"] for one in run["entries"]] == [2, 4, 6], "trainer_log.jsonl has whole seconds"
    assert "odb_log.jsonl has no begin line, so settings, ranks and exact times are missing." in run["notes"]
    (tmp_path / LOG).write_bytes(b"\xff\x00\n\xfe\n")
    notes = shown(tmp_path)["notes"]
    assert f"{LOG}: 2 broken lines left out." in notes and not any("is not here" in note for note in notes)
    assert "odb_log.jsonl has no whole line, so settings, sums and exact times are missing." in notes


def test_a_resume_whose_begin_line_is_lost_counts_steps_once(tmp_path: Path) -> None:
    lines = [begin(), *(entry(k, BEGAN + k) for k in (1, 2, 3)), *(entry(k, BEGAN + 500 + k) for k in (2, 3, 4))]
    write_lines(tmp_path / LOG, [*lines, end(4, BEGAN + 505)])
    run = shown(tmp_path)
    assert [(one["step"], one["seconds"]) for one in run["entries"]] == [(1, 1), (2, None), (3, None), (4, None)]
    assert run["totals"]["seconds"] is None and run["totals"]["samples"] == 16
    assert any("lacks the begin line of a process" in note for note in run["notes"])


def test_no_kind_where_nothing_tells(files: Files, tmp_path: Path) -> None:
    """LLaMA-Factory's log has the same fields with odb and without."""
    files[STATE], found = stock_state(files), {}
    for others in ((), (STATE,), (AUDIT,), (SUMMARY,), (LOG,)):
        folder = tmp_path / "-".join(("log", *others))
        found[others] = shown(write(folder, {name: files[name] for name in (TRAINER_LOG, *others)}))
    assert [run["kind"] for run in found.values()] == [None, "stock", "odb", None, "odb"], "a summary is no log's end"
    assert any("not known whether it was trained with odb" in note for note in found[()]["notes"])
    assert "not known whether with odb, " in make_page(report([tmp_path / "log"]), datetime.datetime(2026, 1, 1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer_steps": 2}, "2 optimizer steps against 3"),
        ({"samples": 10, "tokens": 170}, "10 samples against 12 and 170 tokens against 180"),
        ({}, None),
    ],
)
def test_the_summary_of_another_run_is_named(files: Files, tmp_path: Path, changes: Any, said: str | None) -> None:
    files[SUMMARY][0] |= changes | {"padded_tokens": 200}
    run = shown(write(tmp_path, files))
    assert [note for note in run["notes"] if "another run" in note] == (
        [f"{SUMMARY} tells of another run ({said}) and is left out."] if said else []
    )
    assert run["totals"]["padded_tokens"] == (240 if said else 200)


def test_a_summary_beside_stock_is_of_another_run(files: Files, tmp_path: Path) -> None:
    write(tmp_path, {STATE: stock_state(files), SUMMARY: files[SUMMARY]})
    run = shown(tmp_path)
    assert run["kind"] == "stock" and run["totals"]["tokens"] is None
    assert any("tells of another run (one with odb)" in note for note in run["notes"])


def test_a_folder_of_nothing_but_rubbish_has_no_run(tmp_path: Path) -> None:
    for name in (LOG, TRAINER_LOG, STATE, AUDIT, SUMMARY):
        (tmp_path / name).write_bytes(b"\x00\xff" * 100)
    with pytest.raises(ODBError, match="there is no run in it"):
        read_run(tmp_path)
