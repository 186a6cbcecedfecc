"""examples/benchmark/all.py in its shortest form: every part runs, figures belong together, the page has them all."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import run_command

FOLDER = Path(__file__).parents[2] / "examples" / "benchmark"
LIMIT_S = 280


def run_all(folder: Path, *options: str) -> str:
    """What it prints; it ends well, and none of its processes outlives the call."""
    command = [sys.executable, str(FOLDER / "all.py"), "--short", "--output-dir", str(folder), *options]
    return run_command(command, LIMIT_S)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planning")
    run_all(folder, "--parts", "planning")
    return folder


@pytest.fixture(scope="module")
def short_form(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    run_all(folder)
    return folder


def figures(folder: Path, part: str) -> Any:
    return json.loads((folder / part / "figures.json").read_text("utf-8"))


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, found)
    spec.loader.exec_module(found)
    return found


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S + 20)
def test_the_page_has_every_part(short_form: Path) -> None:
    """Pictures and tables; what has no short form is not measured; what is done is not run again."""
    page = (short_form / "benchmarks.md").read_text("utf-8")
    parts = {path.parent.name for path in short_form.glob("*/done.json")}
    assert parts == {
        *(
            "planning",
            "planning_real",
            "train_text_1",
            "stages",
            "evaluation",
            "head",
            "loader",
            "start",
            "scale",
            "partitions",
        )
    }
    assert page.count("Not measured.") == page.count("\n## ") - len(parts) - 1
    short = page.split("\n## In short\n")[1].split("\n## ")[0]
    assert "| text, 1 rank | " in short and "8 ranks" not in short, "none were planned"
    for part in parts:
        tables = [line for line in (short_form / part / "tables.md").read_text("utf-8").splitlines() if line[:1] == "|"]
        assert len(tables) > 2 and all(line in page for line in tables), part
        assert f"`{json.loads((short_form / part / 'done.json').read_text('utf-8'))['command']}`" in page
    pictures = {path.relative_to(short_form).as_posix() for path in short_form.glob("*/*.png")}
    assert pictures and all(f"]({picture})" in page for picture in pictures)
    assert "- Machine: " in page and "- Versions: " in page and "- Date: " in page
    began = {path: path.stat().st_mtime_ns for path in short_form.glob("*/done.json")}
    assert run_all(short_form).count("done before") == len(parts)
    assert began == {path: path.stat().st_mtime_ns for path in short_form.glob("*/done.json")}


def test_the_plan(planned: Path) -> None:
    """On a small scale: odb before methods that keep N, balanced before alone, flat before padded, below the bound."""
    rows = figures(planned, "planning")
    for images in (False, True):
        mine = {row["name"]: row for row in rows if row["images"] == images}
        reached = {name: row["efficiency"] for name, row in mine.items() if "why" not in row}
        odb, bound = reached["odb, keep, flat"], reached["what no cut can exceed"]
        others = [value for name, value in reached.items() if name.startswith(("fixed", "length-grouped"))]
        assert len(others) == 8 and max(others) < odb and 0.98 * bound < odb <= bound
        assert reached["odb, keep, `balance: false`"] < reached["odb, keep"] < odb
        assert reached["odb, keep, flat, `balance: false`"] < odb
        assert mine["odb, keep, flat"]["padding"] == 0 < mine["odb, keep"]["padding"] < mine["fixed, 8 rows"]["padding"]
        assert mine["odb, keep, flat"]["balance"] > 0.9 and mine["odb, keep, flat"]["samples"] == 64
        assert (mine["odb, keep, flat"]["balance_patches"] is None) == (not images)
        assert max(mine[name]["peak"] for name in reached if name.startswith("odb")) <= 16384
        packs = mine["LLaMA-Factory's packing, neat_packing"]
        assert ("why" in packs) == images
    packed = {row["name"]: row for row in rows if not row["images"]}["LLaMA-Factory's packing, neat_packing"]
    assert 0.9 < packed["efficiency"] < 1 and packed["peak"] == 16384
    missing = {row["name"] for row in rows if "why" in row and not row["images"]}
    assert {f"batch_rebalance, {count}" for count in ("1 row", "2 rows", "4 rows", "8 rows")} <= missing
    assert importlib.util.find_spec("odb") is not None or "online-dynamic-batching" in missing


@pytest.mark.nightly
def test_the_trainings(short_form: Path) -> None:
    """I9: odb has the optimizer steps and losses of fixed batches; the same samples and tokens for everyone."""
    (rows,) = figures(short_form, "train_text_1")["trainings"].values()
    fixed, ours = rows
    assert (fixed["name"], ours["name"]) == ("fixed batch", "odb")
    assert ours["peak_padded_tokens"] <= fixed["peak_padded_tokens"] and ours["steps"] < fixed["steps"]
    for row in rows:
        assert round(row["samples_per_second"] * row["seconds"]) == 64
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(fixed["real_tokens"])
        assert row["padding"] == pytest.approx(1 - row["tokens_per_second"] / row["padded_tokens_per_second"])
        assert 0 < row["validation_loss"] < 8.5 and row["peak_memory"] > 0
    assert ours["optimizer_steps"] == fixed["optimizer_steps"] == len(fixed["losses"]) > 1
    assert ours["losses"] == pytest.approx(fixed["losses"], rel=1e-4)
    assert ours["validation_loss"] == pytest.approx(fixed["validation_loss"], rel=1e-4)


@pytest.mark.nightly
def test_the_loaders(short_form: Path) -> None:
    rows = figures(short_form, "loader")
    assert {"plain DataLoader", "odb_factory"} <= {row["loader"] for row in rows}
    for row in rows:
        assert row["samples_per_second"] > 0 and row["peak_mib"] > 0 and 0 <= row["blocked"] <= 1
        assert 0 <= row["padding"] < 1 and row["real_tokens_per_second"] <= row["padded_tokens_per_second"]
        if row["layout"] == "flat":
            assert row["padding"] == 0
        elif row["loader"] == "odb_factory":
            assert 0 < row["padding"] < rows[0]["padding"], "micro-batches of several samples of like length"


@pytest.mark.nightly
def test_starts_and_scale(short_form: Path) -> None:
    starts = figures(short_form, "start")
    assert [(run["rows"], run["name"]) for run in starts] == [(40, "stock"), (40, "odb")]
    for run in starts:
        assert 0 < run["reading"] < run["first_step"] and 0 < run["start_up"] < run["first_step"] and run["rest"] > 0
    groups = [row for row in figures(short_form, "scale") if "group_size" in row]
    assert [(row["ranks"], row["group_size"], row["sockets"]) for row in groups] == [(8, 4, 4), (12, 4, 5)]
    assert all(row["efficiency"] <= row["bound"] and 0 < row["sent"] < 20 for row in groups)


def test_the_table_of_starts_says_who_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"stock": 4.0, "stock, streaming": 6.0, "odb": 5.0}
    shared = {"rows": 10, "file_mb": 0.1, "start_up": 1.0, "reading": 0.5, "rest": 3.5}
    starts = [shared | {"name": name, "first_step": first_step} for name, first_step in seconds.items()]
    _, _, stock, streaming, odb = module("start", monkeypatch).table(starts).splitlines()
    assert "**4.0 s**" in stock and "10 (0.1 MB)" in stock
    assert "1.5 x later" in streaming and "**" not in streaming
    assert "1.2 x later" in odb and "3.5 s" in odb and "**" not in odb


def test_a_part_that_fails_is_run_again_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmarks = module("all", monkeypatch)
    part = benchmarks.Part("broken", "Broken", 1, "A part.", ("scale.py", "--nothing-like-this"))
    assert not benchmarks.run(part, tmp_path, False, tmp_path)
    assert benchmarks.page.collect(tmp_path, ["broken"]) == {}
    assert benchmarks.page.make({}, [part]).endswith("## Broken\nA part.\n\nNot measured.\n")
    assert "unrecognized arguments" in (tmp_path / "broken" / "log.txt").read_text("utf-8")


def test_published_parts_stand_beside_earlier_ones(
    planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmarks = module("all", monkeypatch)
    before = tmp_path / "benchmarks"
    before.mkdir()
    ended = json.loads((planned / "planning" / "done.json").read_text("utf-8")) | {"machine": "an earlier machine"}
    earlier = {"done": ended, "tables": "published before", "figures": {}, "pictures": [], "in_short": {}}
    (before / "figures.json").write_text(json.dumps({"start": earlier}), "utf-8")
    benchmarks.page.publish(tmp_path, planned, benchmarks.PARTS)
    page = (tmp_path / "benchmarks.md").read_text("utf-8")
    links = re.findall(r"\]\((benchmarks/.+?png)\)", page)
    assert links and {tmp_path / link for link in links} == set(tmp_path.glob("**/*.png"))
    assert "published before" in page and "an earlier machine" in page
    assert "[more tables](benchmarks/planning.md)" in page and (before / "planning.md").exists()
    assert set(json.loads((before / "figures.json").read_text("utf-8"))) == {"planning", "start"}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--quick"], id="quick"),
        *(
            pytest.param(["--model", model], id=model, marks=pytest.mark.nightly)
            for model in ("qwen3_1_7b", "qwen2_5_vl_7b")
        ),
    ],
)
def test_the_gpu_run_at_tiny_scale(options: list[str], tmp_path: Path) -> None:
    """One table of what has run; what has its figures is not run again."""
    script = FOLDER.parents[1] / "benchmarks" / "gpu.py"
    command = [sys.executable, str(script), "--tiny", *options, "--output-dir", str(tmp_path)]
    said = run_command([*command, "--limit", str(LIMIT_S)], LIMIT_S + 20)
    assert "all is done" in said
    found = {
        one["name"]: one for one in map(json.loads, (path.read_text("utf-8") for path in tmp_path.glob("*/*.json")))
    }
    assert not [one for one in found.values() if "failed" in one and "batch_rebalance" not in one["name"]]
    stock, ours = found["mix/stock, 4 rows"], found["mix/odb"]
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-2)  # bf16; a mean over other micro-batches
    assert ours["micro_batches"] < stock["micro_batches"]
    assert ours["forward_tokens"] == 2 * ours["computed_tokens"], "a CPU recomputes all"
    assert all(f"| {name.partition('/')[2]} |" in said for name in found if "/" in name)
    parts = json.loads((tmp_path / "parts.json").read_text("utf-8"))
    assert all("ms" in parts[name]["odb"] for name in ("patch_embedding", "attention", "head, 64 x 32"))
    assert "all is done" in run_command(command, LIMIT_S)
