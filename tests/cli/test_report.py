"""`odb-factory report`: its files, its page, its mistakes."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_report.browser import open_page
from run_report.folders import BEGAN, audit_line, begin, end, entry, write_lines, write_stock

from odb_factory.cli.main import main
from odb_factory.report import page
from odb_factory.report.page import prose
from odb_factory.report.words import number, seconds_text

COLOUR = re.compile(r"(?:url\(#|href=\"#)")
EVIL = '<script>alert(1)</script><img src="http://example.invalid/x.png">&'


def write_odb(folder: Path, steps: int = 6) -> Path:
    """A finished run of one rank with an audit."""
    entries = [entry(k, BEGAN + 2 * k, loss=9 / k) for k in range(1, steps + 1)]
    write_lines(folder / "odb_log.jsonl", [begin(model=EVIL), *entries, end(steps, BEGAN + 2 * steps + 1)])
    audit = [audit_line(k, [10 + k, 20, 15, 15 - k]) for k in range(1, steps + 1)]
    write_lines(folder / "odb_audit_rank0.jsonl", audit)
    return folder


def run(*arguments: object) -> int:
    return main(["report", *map(str, arguments)])


def test_the_page_is_in_the_folder_and_says_what_the_json_says(tmp_path: Path, capsys) -> None:
    folder = write_odb(tmp_path / "run")
    assert run(folder, "--json", tmp_path / "figures.json") == 0
    said = capsys.readouterr().out
    assert said.startswith("run: 24 samples in 6 optimizer steps, 12.0 s; padding 25.0%; loss from 9 to 1.5.")
    assert str(folder / "odb_report.html") in said and str(tmp_path / "figures.json") in said
    figures = json.loads((tmp_path / "figures.json").read_text())
    page = (folder / "odb_report.html").read_text()
    assert figures["headline"] in re.sub("<[^>]+>", "", page)
    for name, value in re.findall(r'data-figure="(\w+)"><data value="([^"]+)"', page):
        assert float(value) == figures["runs"][0]["totals"][name]
    # It reads nothing but what it is given, however often, and prints JSON alone where that is asked for.
    assert run(folder, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out) == figures


def test_texts_that_are_no_utf_8_and_figures_that_are_no_numbers(tmp_path: Path, capsys) -> None:
    """A path that is not UTF-8 is written with a lone surrogate; a loss that has diverged is NaN."""
    folder = tmp_path / "run"
    lines = [begin(model="broken \ud800 name"), entry(1, BEGAN + 1, loss=9.0), entry(2, BEGAN + 2, loss=float("nan"))]
    lines[0]["arguments"] = {"learning_rate": float("inf")}
    write_lines(folder / "odb_log.jsonl", [*lines, entry(3, BEGAN + 3, loss=float("nan")), end(3, BEGAN + 4)])
    assert run(folder, "--json", tmp_path / "figures.json") == 0
    assert "run: the loss is NaN or infinite from optimizer step 2 on; " in capsys.readouterr().out
    text = (tmp_path / "figures.json").read_text()
    json.loads(text, parse_constant=pytest.fail)
    assert "\\ud8" not in text and "broken ? name" in (folder / "odb_report.html").read_text()
    other = write_odb(tmp_path / "other")
    assert run(folder, other) == 0
    assert "The loss of run is NaN or infinite from optimizer step 2 on; run and other" in capsys.readouterr().out


def test_a_page_that_cannot_be_made_leaves_the_one_before(tmp_path: Path, monkeypatch, capsys) -> None:
    folder = write_odb(tmp_path / "run")
    assert run(folder) == 0
    before = (folder / "odb_report.html").read_text()

    def full(path: Path, *_: Any, **__: Any) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert run(folder) != 0
    assert "No space left" in capsys.readouterr().err
    assert (folder / "odb_report.html").read_text() == before


def test_nothing_in_the_page_is_taken_for_markup(tmp_path: Path) -> None:
    """Names and settings come from files; as text they are shown, and a browser asks for nothing because of them."""
    folder = write_odb(tmp_path / "a <b>bold<b> & 'run'")
    stock = write_stock(tmp_path / "<img src=x onerror=alert(1)>", [1.0, 2.0])
    page = tmp_path / "page.html"
    assert run(folder, stock, "--html", page) == 0
    tags: list[tuple[str, Any]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append((tag, attrs))  # type: ignore[method-assign]
    parser.feed(page.read_text())
    assert not {tag for tag, _ in tags} & {"script", "img", "iframe", "object", "b"}
    assert {value for tag, attrs in tags for name, value in attrs if name in ("href", "src")} == {"data:,"}
    opened = open_page(page, tmp_path)
    assert not opened.console and not opened.requests
    assert EVIL in opened.text and "a <b>bold<b> & 'run'" in opened.text


def test_a_browser_that_is_asked_for_more_is_found_out(tmp_path: Path) -> None:
    """The look into the browser sees what it looks for."""
    page = tmp_path / "page.html"
    page.write_text(
        '<html><body><img src="http://example.invalid/x.png"><script>console.error(1)</script></body></html>'
    )
    opened = open_page(page, tmp_path)
    assert set(opened.requests) == {"http://example.invalid/x.png"} and opened.console


def test_long_runs_make_small_pages(tmp_path: Path) -> None:
    folder = write_odb(tmp_path / "run", steps=5_000)
    assert run(folder) == 0
    assert (folder / "odb_report.html").stat().st_size < 500_000


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "nowhere", "there is no such folder"),
        (lambda folder: folder, "there is no run in it"),
        (lambda folder: write_odb(folder) / "odb_log.jsonl", "there is no such folder"),
    ],
)
def test_folders_without_a_run(tmp_path: Path, capsys, make: Any, said: str) -> None:
    folder = make(tmp_path)
    assert run(folder) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"odb-factory report: {folder}: {said}")


def test_files_that_cannot_be_written(tmp_path: Path, capsys) -> None:
    folder = write_odb(tmp_path / "run")
    for option in ("--html", "--json"):
        assert run(folder, option, tmp_path / "no" / "file") == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(f"cannot be written (No such file or directory); give another file with {option}.")


def test_page_and_figures_are_two_files(tmp_path: Path, capsys, monkeypatch) -> None:
    folder = write_odb(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for options in (("--html", "both", "--json", tmp_path / "both"), ("--json", "run/../run/odb_report.html")):
        assert run(folder, *options) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "cannot be one file; give --json another" in line
    assert not (tmp_path / "both").exists() and not (folder / "odb_report.html").exists()
    assert run("run", "--html", "page.html") == 0
    assert "trained with odb, finished" in " ".join((tmp_path / "page.html").read_text().split())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_that_cannot_be_read(tmp_path: Path, capsys) -> None:
    folder = write_odb(tmp_path / "run")
    (folder / "odb_log.jsonl").chmod(0)
    assert run(folder) == 1
    assert "cannot be read" in capsys.readouterr().err


# The drawings


def test_no_peak_is_lost_in_a_long_line() -> None:
    points = np.stack((np.arange(10_000.0), np.ones(10_000)), axis=1)
    points[7_777, 1] = 100.0
    thinned = page._thinned(points)
    assert thinned[:, 1].max() == 100 and len(thinned) <= page.MOST_POINTS + 2
    assert (np.diff(thinned[:, 0]) > 0).all() and thinned[-1, 0] == 9_999


def test_drawings_of_little_or_nothing() -> None:
    nothing = page.Line([(1.0, float("nan")), (2.0, 1e308)])
    assert page.draw_lines([], "x", "y") == page.draw_lines([nothing], "x", "y") == ""
    for points in ([(1.0, 0.0)], [(1.0, 2.0), (2.0, 2.0)], [(-1.0, 1e299)]):
        assert page.draw_lines([page.Line(points)], page.SECONDS, "y", to_one=True).startswith("<svg viewBox=")
    one = {"edges": [0, 1], "counts": [4], "count": 4}
    drawing = page.draw_histograms({0: one, 1: one}, "<x>", mark=3)
    assert (
        "var(--s0)" in drawing
        and "var(--mark)" in drawing
        and "&lt;x&gt;" in drawing
        and "#" not in COLOUR.sub("", drawing)
    )


def test_ticks_are_short() -> None:
    assert [page.tick(value) for value in (0, 0.5, 2e-5, 9000, 12_000, 1.5e6)] == [
        "0",
        "0.5",
        "2e-05",
        "9000",
        "12k",
        "1.5M",
    ]


def test_one_rank_has_no_chart_of_balance_and_a_count_no_half_tick(tmp_path: Path) -> None:
    assert run(write_odb(tmp_path / "run")) == 0
    page = (tmp_path / "run" / "odb_report.html").read_text()
    assert "<h3>Balance</h3>" not in page and "<h2>Ranks</h2>" not in page and 'data-figure="balance"' not in page
    drawing = page.split("<h3>Micro-batches of an optimizer step</h3>")[1].split("</figure>")[0]
    ticks = re.findall(r">([0-9.]+)</text>", drawing.split('id="matplotlib.axis_2"')[0])
    assert ticks and all(tick.isdecimal() for tick in ticks)


def test_prose_keeps_numbers_whole_and_code_as_code() -> None:
    assert prose("to 2.3e-07 in 2 min 04 s of `plan <x>`, 'a'") == (
        'to <span class="n">2.3e-07</span> in <span class="n">2 min 04 s</span> of <code>plan &lt;x&gt;</code>, '
        "&#39;a&#39;"
    )


def test_numbers_for_people() -> None:
    assert [number(value) for value in (None, 0.0, 12345.0, 12345.6, 0.00012346, 1.5)] == [
        "not known", "0", "12,345", "12,346", "0.0001235", "1.5",
    ]  # fmt: skip
    assert [seconds_text(value) for value in (0.04, 59.9, 119.7, 3600 * 30 + 61)] == [
        "0.0 s", "59.9 s", "2 min 00 s", "30 h 01 min",
    ]  # fmt: skip
