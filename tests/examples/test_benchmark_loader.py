"""The benchmark of the loader runs, and its table, JSON and picture are of every loader. How fast is not tested."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "benchmark" / "loader.py"


def test_every_loader_gives_all_samples_and_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--short", "--output-dir", tmp_path]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    rows = json.loads((tmp_path / "loader.json").read_text())["results"]
    if importlib.util.find_spec("odb") is None:
        assert "online-dynamic-batching is not installed and left out" in printed
        print(printed.splitlines()[0])
    loaders = {row["loader"] for row in rows}
    assert {"plain DataLoader", "odb_factory"} <= loaders
    assert len(loaders) == (2 if importlib.util.find_spec("odb") is None else 4)
    table = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(table) == len(rows) + 4, "two tables, each with a head of two lines"
    for row in rows:
        assert row["samples_per_second"] > 0 and row["peak_mib"] > 0 and 0 <= row["blocked"] <= 1
        assert 0 <= row["padding"] < 1 and row["real_tokens_per_second"] <= row["padded_tokens_per_second"]
    assert {row["layout"] for row in rows if row["loader"] == "odb_factory"} == {"padded", "flat"}
    for row in rows:
        if row["layout"] == "flat":
            assert row["padding"] == 0
        elif row["loader"] == "odb_factory":
            assert 0 < row["padding"] < rows[0]["padding"], "micro-batches of several samples of like length"
    assert (tmp_path / "loader.png").stat().st_size > 10_000
