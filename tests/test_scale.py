"""The benchmark of the planning runs, and what it says holds on a small scale: bytes at most linear in ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "benchmark" / "scale.py"


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scale", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["scale"] = module
    spec.loader.exec_module(module)
    return module


def test_a_table_with_a_row_for_every_number_of_ranks(scale: ModuleType, capsys: pytest.CaptureFixture) -> None:
    results = scale.main(["--ranks", "2", "8", "--window", "32", "--token-budget", "2048", "--rounds", "2"])
    assert [result.ranks for result in results] == [2, 8]
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 4
    assert len({line.count("|") for line in table}) == 1


def test_bytes_grow_no_more_than_linearly_with_ranks(scale: ModuleType) -> None:
    """A message is bounded by the window of one rank: 16 bytes a sample and a header."""
    for ranks in (2, 8, 32):
        measured = scale.measure(ranks, window=32, token_budget=2048, num_rounds=2)
        assert measured.received <= ranks * (16 * 32 + 128)
        assert 0 < measured.steps <= measured.groups <= 32
