"""`odb-factory demo`: both trainings run, with the same losses; a training that fails ends in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from odb_factory.cli import demo
from odb_factory.cli.main import main

pytestmark = pytest.mark.timeout(600)


def test_stock_and_odb_have_the_same_losses(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SHORT_SAMPLES", 2 * demo.STEP_SIZE)
    assert main(["demo", "--short", "--json", "--output", str(tmp_path / "demo")]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["optimizer steps"] == [2, 2]
    assert figures["last loss"][0] == pytest.approx(figures["last loss"][1], rel=1e-5)
    assert figures["odb/tokens_per_second"][0] > 0 and (tmp_path / "demo" / "demo.html").is_file()


def test_a_failure_is_one_line(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CUTOFF_LEN", "none")
    assert main(["demo", "--short", "--output", str(tmp_path / "demo")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("odb-factory demo: stock: exit code ")
    (tmp_path / "file").write_text("")
    assert main(["demo", "--output", str(tmp_path / "file")]) == 1
    assert "--output" in capsys.readouterr().err
