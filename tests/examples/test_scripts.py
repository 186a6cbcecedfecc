"""examples/slurm.sh as a job of two nodes, with stand-ins for the two Slurm commands that it calls; the notebook in a
fresh kernel; and the scripts of benchmarks/ with small arguments."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from nbclient import NotebookClient
from support import CHECKPOINTS, read_log, run_command, training_config

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sh"
SCONTROL = "#!/bin/bash\necho localhost\necho other\n"
SRUN = """#!/bin/bash
shift
for node in 0 1; do SLURM_NODEID=$node "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait $task || exit 1; done
"""
RECORDS_ITS_INPUT = '#!/bin/bash\n{ env; printf "%s\\n" "$@"; } > "${0%/*}/node$NODE_RANK"\n'
OVERRIDE = "odb.global_batch_size=16"


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., None]:
    """Runs the script on a YAML, with the given commands first on PATH."""
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "two", "SLURM_NNODES": "2", "NPROC_PER_NODE": "1"}

    def run(settings: Path, **commands: str) -> None:
        for name, text in {"scontrol": SCONTROL, "srun": SRUN, **commands}.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        run_command([str(SCRIPT), str(settings), OVERRIDE], 200, environment=os.environ | slurm | {"PATH": path})

    return run


def test_each_node_gets_its_rank_and_the_address(job: Callable[..., None], tmp_path: Path) -> None:
    """In variables that LLaMA-Factory's launcher reads, as in tests/distributed/test_two_nodes.py."""
    job(tmp_path / "my.yaml", **{"llamafactory-cli": RECORDS_ITS_INPUT})
    port = 20000 + os.getpid() % 20000
    shared = {"FORCE_TORCHRUN=1", "NNODES=2", "NPROC_PER_NODE=1", "MASTER_ADDR=localhost", f"MASTER_PORT={port}"}
    for node in range(2):
        lines = (tmp_path / f"node{node}").read_text().splitlines()
        assert shared | {f"NODE_RANK={node}"} <= set(lines)
        assert lines[-3:] == ["train", str(tmp_path / "my.yaml"), OVERRIDE]


@pytest.mark.nightly
def test_the_script_trains_on_two_nodes(job: Callable[..., None], tiny_text, data_dir, tmp_path) -> None:
    odb = {"token_budget": 1024, "global_batch_size": 12}
    config = training_config(tiny_text, data_dir, tmp_path / "out", ddp_backend="gloo", odb=odb)
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    job(tmp_path / "my.yaml")
    assert [entry["step"] for entry in read_log(tmp_path / "out") if "loss" in entry] == [1, 2, 3]


# The notebook

NOTEBOOK = Path(__file__).parents[2] / "examples" / "online_grouping.ipynb"
NOTEBOOK_LIMIT_S = 120


COMMITTED = nbformat.read(NOTEBOOK, as_version=4)


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def numbers_of(text: str, name: str) -> list[float]:
    """The figures of a run in the notebook's table: batches, padding (%), budget use (%), largest batch (tokens)."""
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return [float(word.strip("%").replace(",", "")) for word in line.split()[1:]]


@pytest.mark.nightly
def test_the_outputs_agree_with_the_text(tmp_path: Path) -> None:
    notebook = nbformat.from_dict({**COMMITTED})
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=NOTEBOOK_LIMIT_S, kernel_name="python3", resources=resources).execute()
    text = "".join(output.text for output in outputs(notebook) if output.output_type == "stream")
    assert sum("image/png" in output.get("data", {}) for output in outputs(notebook)) == 3
    fixed, grouped, odb = (numbers_of(text, name) for name in ("fixed", "length-grouped", "odb"))
    assert all(run[3] <= 4096 for run in (fixed, grouped, odb))
    assert odb[0] < fixed[0] / 4 and odb[1] < fixed[1] / 2 and odb[0] * odb[2] < fixed[0] * fixed[2] / 2
    assert "each {1} times" in text
    scaled, mean = (line.split()[-1] for line in text.splitlines() if line.startswith(("sum of the", "mean over")))
    assert float(scaled) == pytest.approx(float(mean), abs=2e-6)


def test_no_outputs_are_committed() -> None:
    assert outputs(COMMITTED) == []


# The scripts of benchmarks/

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BENCHMARK_LIMIT_S, GRID_LIMIT_S = 280, 1200


def run_benchmark(script: str, path: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """The output of the script, and the lines of its JSON file."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments, "--json", str(path)]
    output = run_command(command, BENCHMARK_LIMIT_S)
    return output, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


SMALL = ("--samples", "256", "--ranks", "2", "--batch-size", "32", "--rows", "1", "4")


@pytest.mark.nightly
def test_methods(tmp_path: Path) -> None:
    """I9, I4: odb cuts stock's optimizer steps, within the budget, better than methods that read all lengths first."""
    methods = ("standard", "sorted", "hfg", "gmt", "bmt", "neat_packing", "batch_rebalance", "odb", "odb, padded")
    printed, rows = run_benchmark(
        "methods.py", tmp_path / "m", *SMALL, "--methods", *methods, "odb, balance: false", "odb, fill"
    )
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
    _, rows = run_benchmark("loader.py", tmp_path / "l", "--short")
    measured = {(row["part"].split(" light ")[-1], row["measure"]) for row in rows}
    assert {(part, "samples_per_s") for part in ("text", "pictures")} < measured
    assert {("rows", "first_batch_s"), ("rows", "resume_s"), ("Trainer", "overhead_ms")} < measured
    for row in rows:
        assert row["keep"] > 0
        if row["measure"] == "samples_per_s":
            assert row["keep / plain"] == pytest.approx(row["keep"] / row["plain"])


def test_scale(tmp_path: Path) -> None:
    """The messages of a gather grow with the ranks; those of an exchange are bounded by them."""
    sizes = ("2x8", "16x8", "64x8", "2048x1")
    _, (message, *rows) = run_benchmark("scale.py", tmp_path / "s", "--sizes", *sizes, "--check", "2")
    assert message["message"]["latency_s"] > 0 < message["message"]["bytes_per_s"]
    *planned, real = rows
    two, sixteen, *_ = planned
    assert sixteen["gather_s"] == pytest.approx(15 * two["gather_s"])
    moving = [row for row in planned if row["samples"] > 1]
    assert all(0 < row["messages"] <= 2 * (row["ranks"] - 1) and row["exchange_s"] > 0 for row in moving)
    assert [row["is_measured"] for row in planned] == [True, True, True, False]
    assert real["real_gather_s"] > 0


GRID = [pytest.mark.nightly, pytest.mark.timeout(GRID_LIMIT_S + BENCHMARK_LIMIT_S)]
"""About twenty trainings: all methods for a model."""


@pytest.mark.skipif(not CHECKPOINTS, reason="LLaMA-Factory's own checkpointing fails here, in stock too")
@pytest.mark.parametrize(
    ("options", "limit_s"),
    [
        pytest.param(["--quick"], BENCHMARK_LIMIT_S, id="quick", marks=pytest.mark.nightly),
        *(
            pytest.param(["--model", model], GRID_LIMIT_S, id=model, marks=GRID)
            for model in ("qwen3_1_7b", "qwen2_5_vl_7b")
        ),
    ],
)
def test_the_gpu_run_at_tiny_scale(options: list[str], limit_s: int, tmp_path: Path) -> None:
    """One table of all runs; a run that has its figures is not repeated."""
    script = BENCHMARKS / "gpu.py"
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
    assert "all is done" in run_command(command, BENCHMARK_LIMIT_S)
