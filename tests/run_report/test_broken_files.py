"""Reports of files that are not what they must be: counted and named, never a traceback, and never a made-up zero."""

from __future__ import annotations

import datetime
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import Markup
from run_report.folders import BEGAN, audit_line, begin, end, entry, write_lines, write_stock

from odb_factory.errors import ODBError
from odb_factory.report import page
from odb_factory.report.figures import read_run, report_of, to_json
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
    logged[0]["layout"] = {"name": "flat", "reason": "the model allows it"}
    summary = {
        "optimizer_steps": 3,
        "samples": 12,
        "tokens": 180,
        "padded_tokens": 240,
        "balance": 1.0,
        "units_cv": 0.0,
    }
    summary |= {"patch_balance": 1.0, "data_wait_s": 1.5, "left_out": {"invalid": 2}, "remainder": 0, "overlong": 1}
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
    """The run, once page and JSON have been made of it beside itself."""
    figures = report_of([folder, folder])
    make_page(figures, datetime.datetime(2026, 1, 1))
    json.loads(to_json(figures), parse_constant=pytest.fail)
    return figures["runs"][0]


def test_a_whole_run_has_no_broken_lines(files: Files, tmp_path: Path) -> None:
    run = shown(write(tmp_path, files))
    assert run["files"]["broken"] == [] and run["finished"]
    assert [line["samples"] for line in run["datasets"]] == [6, 6] and run["totals"]["samples"] == 12


@pytest.mark.parametrize(
    ("name", "number", "path", "value", "wrong"),
    [
        (LOG, 2, ("optimizer_step",), "x", "log.optimizer_step: "),
        (LOG, 2, ("sums", "samples"), [1, 2], "log.sums.samples"),
        (LOG, 2, ("logs", "loss"), "x", "log.logs.loss"),
        (LOG, 0, ("ranks",), "two", "begin.ranks: Input should be a valid integer"),
        (LOG, 0, ("config",), None, "begin.config: "),
        (LOG, 1, ("event",), "beginning", "Input tag"),
        (TRAINER_LOG, 1, ("current_steps",), "x", "current_steps: "),
        (TRAINER_LOG, 1, ("elapsed_time",), "soon", "elapsed_time: "),
        (STATE, 0, ("log_history",), 3, "log_history: Input should be a valid array"),
        (STATE, 0, ("log_history", 1), "x", "log_history.1: "),
        (STATE, 0, ("log_history", 1, "step"), None, "step is not a whole number"),
        (SUMMARY, 0, ("samples",), "x", "samples: "),
        (SUMMARY, 0, ("left_out",), 3, "left_out: "),
        (AUDIT, 1, ("lengths",), ["a"], "lengths.0: "),
        (AUDIT, 1, ("parts",), 0, "parts: Input should be greater than 0"),
        (AUDIT, 1, ("ids",), [1], "Value error, ids and lengths are not of one length"),
    ],
)
def test_a_wrong_value_is_counted_and_named(
    files: Files, tmp_path: Path, name: str, number: int, path: tuple[Any, ...], value: Any, wrong: str
) -> None:
    _set(files[name][number], path, value)
    run = shown(write(tmp_path, files))
    is_file = name in (STATE, SUMMARY) and len(path) < 3
    (broken,) = run["files"]["broken"]
    line = None if is_file else 2 if name == STATE else number + 1
    assert (broken["file"], broken["count"], broken["line"]) == (name, 1, line)
    assert broken["wrong"].startswith(wrong)
    assert sum(note.startswith(name) and "left out" in note and wrong in note for note in run["notes"]) == 1


@pytest.mark.parametrize("values", [WRONG, pytest.param(EXTREME, marks=pytest.mark.nightly)], ids=["wrong", "extreme"])
def test_no_value_in_any_place_ends_in_a_traceback(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: tuple[Any, ...]
) -> None:
    """Every key of every kind of record, with values of every type in its place, or gone."""
    if values is WRONG:  # charts are prepared, but not written as SVG, which takes most of the time
        monkeypatch.setattr(page, "_svg", lambda figure, meaning: Markup())
    write(tmp_path, files)
    pages: dict[str, dict[str, Any]] = {}
    cases, at = 0, datetime.datetime(2026, 1, 1)
    for name, records in files.items():
        for number in (0, 1, len(records) - 1) if name == LOG else (0,):
            for path in _paths(records[number]):
                for value in values:
                    changed = json.loads(json.dumps(records))
                    _set(changed[number], path, value)
                    write_lines(tmp_path / name, changed)
                    figures = report_of([tmp_path])
                    to_json(figures)
                    shown = {key: value for key, value in figures["runs"][0].items() if key not in ("files", "notes")}
                    kind = repr(shown) if values is EXTREME else re.sub(r"[0-9.]+", "0", repr(shown))
                    pages.setdefault(kind, figures)
                    cases += 1
        write_lines(tmp_path / name, records)
    assert cases > 80 * len(values)
    for figures in pages.values():
        make_page(figures, at)


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


def test_an_audit_without_parts_is_of_whole_micro_batches(files: Files, tmp_path: Path) -> None:
    whole = shown(write(tmp_path, files))
    for line in files[AUDIT]:
        del line["part"], line["parts"]
    assert shown(write(tmp_path, files)) == whole


def test_an_audit_of_no_use_makes_no_zeros(files: Files, tmp_path: Path) -> None:
    for line in files[AUDIT]:
        line["lengths"] = None
    run = shown(write(tmp_path, files))
    made = ("datasets", "by_rank", "distributions", "optimizer_steps")
    assert [run[name] for name in made] == [None] * 4 and run["files"]["broken"][0]["count"] == 3


def test_without_its_begin_line_the_rest_of_the_log_is_used(files: Files, tmp_path: Path) -> None:
    del files[LOG][0]
    run = shown(write(tmp_path, files))
    assert [one["tokens"] for one in run["entries"]] == [60, 60, 60] and run["kind"] == "odb" and run["finished"]
    assert [one["seconds"] for one in run["entries"]] == [None] * 3
    assert any("no whole begin line" in note for note in run["notes"])
    (tmp_path / LOG).write_bytes(b"\xff\x00\n\xfe\n")
    run = shown(tmp_path)
    assert [one["seconds"] for one in run["entries"]] == [2, 4, 6], "by trainer_log.jsonl"
    assert any(note.startswith(f"{LOG} has 2 broken lines, left out (line 1: ") for note in run["notes"])


def test_a_resume_whose_begin_line_is_lost_counts_steps_once(tmp_path: Path) -> None:
    lines = [begin(), *(entry(k, BEGAN + k) for k in (1, 2, 3)), *(entry(k, BEGAN + 500 + k) for k in (2, 3, 4))]
    write_lines(tmp_path / LOG, [*lines, end(4, BEGAN + 505)])
    run = shown(tmp_path)
    assert [(one["step"], one["seconds"]) for one in run["entries"]] == [(1, 1), (2, None), (3, None), (4, None)]
    assert run["totals"]["seconds"] is None and run["totals"]["samples"] == 16


def test_no_kind_where_nothing_shows_it(files: Files, tmp_path: Path) -> None:
    """LLaMA-Factory's log has the same fields with odb and without."""
    found = []
    for others in ((), (AUDIT,), (LOG,), (STATE,), (STATE,)):
        folder = tmp_path / "-".join(("log", *others))
        found.append(shown(write(folder, {name: files[name] for name in (TRAINER_LOG, *others)})))
        if others == (STATE,):  # as without odb, from now on
            for line in files[STATE][0]["log_history"]:
                line.pop("odb/balance", None)
    assert [run["kind"] for run in found] == [None, "odb", "odb", "odb", "stock"]
    assert any("trained with odb is not known" in note for note in found[0]["notes"])
    assert "not known whether with odb" in make_page(report_of([tmp_path / "log"]), datetime.datetime(2026, 1, 1))


def test_a_summary_of_another_run_is_not_taken(files: Files, tmp_path: Path) -> None:
    files[SUMMARY][0] |= {"padded_tokens": 200}
    assert shown(write(tmp_path, files))["totals"]["padded_tokens"] == 200
    files[SUMMARY][0] |= {"optimizer_steps": 2}
    assert shown(write(tmp_path, files))["totals"]["padded_tokens"] == 240


def test_a_folder_of_nothing_but_rubbish_has_no_run(tmp_path: Path) -> None:
    for name in (LOG, TRAINER_LOG, STATE, AUDIT, SUMMARY):
        (tmp_path / name).write_bytes(b"\x00\xff" * 100)
    with pytest.raises(ODBError, match="there is no run in it"):
        read_run(tmp_path)
