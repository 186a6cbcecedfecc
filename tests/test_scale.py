"""What the benchmarks of the planning say of many ranks holds on a small scale."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "benchmark"


@pytest.fixture(params=["scale", "contestants"])
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    # By its path: tests/planning is imported as `planning` too.
    spec = importlib.util.spec_from_file_location(f"benchmark_{request.param}", FOLDER / f"{request.param}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", ["scale"], indirect=True)
def test_bytes_grow_no_more_than_linearly_with_ranks(script: ModuleType) -> None:
    """A message is bounded by the window of one rank: 29 bytes a sample and a header."""
    for ranks in (2, 8, 32):
        measured = script.measure(ranks, window=32, token_budget=2048, num_rounds=2)
        assert measured.received <= ranks * (29 * 32 + 128)
        assert 0 < measured.steps <= 32


@pytest.mark.timeout(120)
@pytest.mark.parametrize("script", ["contestants"], indirect=True)
def test_a_loader_on_real_ranks_gives_the_steps_of_the_simulation(script: ModuleType) -> None:
    epoch = script.Epoch("MM-Mix", ranks=2, size=1500)
    run = script.processes.run(
        script.processes.OURS, epoch.shares, token_budget=script.TOKEN_BUDGET, window=script.WINDOW
    )
    assert run.max(axis=0).tolist() == script.fill(epoch).most.tolist()
