"""The benchmark of the start: every run gets to its first step, and its stretches of time add up."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "benchmark" / "start.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("start_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["start_benchmark"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(240)
def test_a_line_for_every_run_and_the_figures_in_files(benchmark, tmp_path, capsys) -> None:
    starts = benchmark.main(["--rows", "40", "--repeats", "1", "--output-dir", str(tmp_path / "out")])
    assert [(start.rows, start.name) for start in starts] == [(40, name) for name in benchmark.RUNS]
    for start in starts:
        assert 0 < start.reading < start.first_step and 0 < start.start_up < start.first_step and start.rest > 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(starts) and len({line.count("|") for line in lines}) == 1
    saved = json.loads((tmp_path / "out" / "start.json").read_text(encoding="utf-8"))
    assert [(run["rows"], run["name"], run["rest"]) for run in saved] == [(s.rows, s.name, s.rest) for s in starts]
    assert (tmp_path / "out" / "start.png").stat().st_size > 1000


def test_the_table_says_who_is_first(benchmark) -> None:
    seconds = {"stock": 4.0, "stock, streaming": 6.0, "odb": 5.0}
    starts = [benchmark.Start(10, name, 0.1, first_step, 1.0, 0.5) for name, first_step in seconds.items()]
    _, _, stock, streaming, odb = benchmark.table(starts).splitlines()
    assert "**4.0 s**" in stock and "10 (0.1 MB)" in stock
    assert "1.5 x later" in streaming and "**" not in streaming
    assert "1.2 x later" in odb and "3.5 s" in odb and "**" not in odb
