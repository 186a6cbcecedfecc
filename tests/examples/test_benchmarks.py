"""The scripts of benchmarks/ run with small arguments, and their figures are consistent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support import CHECKPOINTS, run_command

FOLDER = Path(__file__).parents[2] / "benchmarks"
LIMIT_S, GRID_LIMIT_S = 280, 1200


def run(script: str, path: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """The output of the script, and the lines of its JSON file."""
    command = [sys.executable, str(FOLDER / script), *arguments, "--json", str(path)]
    output = run_command(command, LIMIT_S)
    return output, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


SMALL = ("--samples", "256", "--ranks", "2", "--batch-size", "32", "--rows", "1", "4")


def test_methods(tmp_path: Path) -> None:
    """I9, I4: odb cuts stock's optimizer steps, within the budget, better than methods that read all lengths first."""
    methods = ("standard", "sorted", "hfg", "gmt", "bmt", "neat_packing", "batch_rebalance", "odb", "odb, padded")
    printed, rows = run("methods.py", tmp_path / "m", *SMALL, "--methods", *methods, "odb, balance: false", "odb, fill")
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        best.setdefault(row["method"], row)
    assert {row["rows"] for row in rows if row["method"] == "standard"} == {1, 4}
    odb, limit = best["odb"], best["bound"]["efficiency"]
    assert max(best[name]["efficiency"] for name in ("standard", "hfg")) < odb["efficiency"] <= limit
    assert best["odb, balance: false"]["efficiency"] < odb["efficiency"]
    assert odb["padding"] == 0 < best["odb, padded"]["padding"] < 0.5
    kept = {name for name, row in best.items() if row.get("stock_steps") == 1}
    assert kept - {"batch_rebalance"} == {"standard", "odb", "odb, padded", "odb, balance: false"}
    assert best["hfg"]["samples_a_step"] == 32 and best["hfg"]["stock_steps"] == 0
    assert max(row["peak"] for name, row in best.items() if name.startswith("odb")) <= 16_384
    assert ("batch_rebalance" in best) or "batch_rebalance: skipped: transformers" in printed


@pytest.mark.nightly
def test_loader(tmp_path: Path) -> None:
    """I2: each loader gives every row once, or the script ends with an error."""
    _, rows = run("loader.py", tmp_path / "l", "--short")
    measured = {(row["part"].split(" light ")[-1], row["measure"]) for row in rows}
    assert {(part, "samples_per_s") for part in ("text", "pictures")} < measured
    assert {("rows", "first_batch_s"), ("rows", "resume_s"), ("Trainer", "micro_batch_ms")} < measured
    for row in rows:
        assert row["keep"] > 0
        if row["measure"] == "samples_per_s":
            assert row["keep / plain"] == pytest.approx(row["keep"] / row["plain"])


def test_scale(tmp_path: Path) -> None:
    """The messages of a gather grow with the ranks; those of an exchange are bounded by them."""
    sizes = ("2x8", "16x8", "64x8", "2048x1")
    _, (message, *rows) = run("scale.py", tmp_path / "s", "--sizes", *sizes, "--check", "2")
    assert message["message"]["latency_s"] > 0 < message["message"]["bytes_per_s"]
    *planned, real = rows
    two, sixteen, *_ = planned
    assert sixteen["gather_s"] == pytest.approx(15 * two["gather_s"])
    moving = [row for row in planned if row["samples"] > 1]
    assert all(0 < row["messages"] <= 2 * (row["ranks"] - 1) and row["exchange_s"] > 0 for row in moving)
    assert [row["is_measured"] for row in planned] == [True, True, True, False]
    assert real["real_gather_s"] > 0


GRID = [pytest.mark.nightly, pytest.mark.timeout(GRID_LIMIT_S + LIMIT_S)]
"""About twenty trainings: all methods for a model."""


@pytest.mark.skipif(not CHECKPOINTS, reason="LLaMA-Factory's own checkpointing fails here, in stock too")
@pytest.mark.parametrize(
    ("options", "limit_s"),
    [
        pytest.param(["--quick"], LIMIT_S, id="quick"),
        *(
            pytest.param(["--model", model], GRID_LIMIT_S, id=model, marks=GRID)
            for model in ("qwen3_1_7b", "qwen2_5_vl_7b")
        ),
    ],
)
def test_the_gpu_run_at_tiny_scale(options: list[str], limit_s: int, tmp_path: Path) -> None:
    """One table of all runs; a run that has its figures is not repeated."""
    script = FOLDER / "gpu.py"
    command = [sys.executable, str(script), "--tiny", *options, "--output-dir", str(tmp_path)]
    output = run_command([*command, "--limit", str(limit_s)], limit_s + 20)
    assert "all is done" in output
    results = {
        result["name"]: result
        for result in map(json.loads, (path.read_text("utf-8") for path in tmp_path.glob("*/*.json")))
    }
    assert not [result for result in results.values() if "failed" in result and "batch_rebalance" not in result["name"]]
    stock, ours = results["mix/stock, 4 rows"], results["mix/odb"]
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-2)  # bf16; a mean over other micro-batches
    assert ours["micro_batches"] < stock["micro_batches"]
    assert ours["forward_tokens"] == 2 * ours["computed_tokens"], "a CPU recomputes all"
    assert all(f"| {name.partition('/')[2]} |" in output for name in results if "/" in name)
    parts = json.loads((tmp_path / "parts.json").read_text("utf-8"))
    assert all("ms" in parts[name]["odb"] for name in ("patch_embedding", "attention", "head, 64 x 32"))
    assert "all is done" in run_command(command, LIMIT_S)
