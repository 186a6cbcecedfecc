"""The benchmarks of the planning run, and what they say holds on a small scale."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

REALLY_RUN = "odb, fill, `balance: false`, really run"
FOLDER = Path(__file__).parents[1] / "examples" / "benchmark"


@pytest.fixture(params=["scale", "planning"])
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    # By its path: tests/planning is imported as `planning` too.
    spec = importlib.util.spec_from_file_location(f"benchmark_{request.param}", FOLDER / f"{request.param}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def tables(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("script", ["scale"], indirect=True)
def test_a_table_with_a_row_for_every_number_of_ranks(script: ModuleType, capsys: pytest.CaptureFixture) -> None:
    options = ["--ranks", "2", "8", "--window", "32", "--token-budget", "2048", "--rounds", "2"]
    results = script.main([*options, "--grouped", "8", "--group-sizes", "4", "8"])
    rounds = [(2, False), (8, False), (2, True), (8, True)]
    kept = [(2, True), (8, True), (2, False), (8, False)]
    assert [(result.ranks, result.balance) for result in results[:-2]] == 2 * rounds + 2 * kept
    assert [(result.ranks, result.group_size) for result in results[-2:]] == [(8, 4), (8, 8)]
    assert results[-2].efficiency <= results[-1].efficiency <= results[-1].bound
    lines = tables(capsys.readouterr().out)
    assert len(lines) == 16 + 10 + 4
    for part in (lines[:16], lines[16:26], lines[26:]):
        assert len({line.count("|") for line in part}) == 1


@pytest.mark.parametrize("script", ["scale"], indirect=True)
def test_bytes_grow_no_more_than_linearly_with_ranks(script: ModuleType) -> None:
    """A message is bounded by the window of one rank: 25 bytes a sample and a header."""
    for ranks in (2, 8, 32):
        measured = script.measure(ranks, window=32, token_budget=2048, num_rounds=2)
        assert measured.received <= ranks * (25 * 32 + 128)
        assert 0 < measured.steps <= 32


@pytest.mark.parametrize("script", ["planning"], indirect=True)
def test_no_online_way_plans_better(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """On a small scale: odb before the known online ways, balanced before alone, both below what is possible."""
    options = ["--ranks", "4", "--samples", "2000", "--seeds", "1", "--kept", "64", "256", "--kept-steps", "3"]
    options += ["--kept-images", "64"]
    (result,) = script.main([*options, "--output-dir", str(tmp_path)])
    assert (tmp_path / "planning.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "planning.json").read_text())[0] == result
    assert len({line.count("|") for line in tables(capsys.readouterr().out)}) == 1
    for workload in script.WORKLOADS:
        reached = {name: row[workload] for name, row in result["efficiency"].items()}
        alone, balanced = reached["odb, fill, `balance: false`"], reached["odb, fill"]
        assert max(reached["fixed batch, 8 rows"], reached["sort, fill, split to the largest count"]) < alone
        flat_alone, flat = reached["odb, fill, flat, `balance: false`"], reached["odb, fill, flat"]
        most = 1 / (1 + script.FIXED_COST / script.TOKEN_BUDGET)
        assert alone < balanced < flat < most
        assert alone < flat_alone < flat > 0.96
        fixed = max(efficiency for name, efficiency in reached.items() if name.startswith("fixed batch"))
        for size in (64, 256):
            ways = [script.kept.KEEP_PER_RANK, script.kept.KEEP, script.kept.BOUND]
            own, pooled, bound = (result["kept"][f"{way}, N = {size}"][workload] for way in ways)
            flat_own, flat = (
                result["kept"][f"{way}, N = {size}"][workload]
                for way in (script.kept.KEEP_FLAT_PER_RANK, script.kept.KEEP_FLAT)
            )
            assert fixed < own < min(flat_own, pooled) and max(flat_own, pooled) < flat <= bound
            assert flat > 0.98 * bound, "flat micro-batches can be made as even as the samples allow"
            assert pooled > 0.75, "kept optimizer batches are computed nearly as fast as full ones"
        figures = result["kept_with_images"][workload][f"{script.kept.KEEP_FLAT}, N = 64"]
        assert all(figures[name] > 0.85 * figures[f"bound of {name}"] for name in ("tokens", "patches"))


@pytest.mark.parametrize("script", ["planning"], indirect=True)
@pytest.mark.timeout(120)
def test_a_loader_on_real_ranks_gives_the_steps_of_the_simulation(script: ModuleType) -> None:
    samples = script.draw("MM-Mix", ranks=2, samples=1500)
    run = script.processes.run(REALLY_RUN, samples, token_budget=script.TOKEN_BUDGET, window=script.WINDOW)
    assert run == script.odb(samples)
