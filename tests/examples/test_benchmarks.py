"""examples/benchmark/all.py in its shortest form: every part runs, figures belong together, the page has them all."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import MARK, end_marked_processes

FOLDER = Path(__file__).parents[2] / "examples" / "benchmark"
LIMIT_S = 280


def run_all(folder: Path, *options: str) -> str:
    """What it prints; it ends well, and none of its processes outlives the call."""
    mark = uuid.uuid4().hex
    environment = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", MARK: mark}
    try:
        ended = subprocess.run(
            [sys.executable, str(FOLDER / "all.py"), "--short", "--output-dir", str(folder), *options],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
    finally:
        end_marked_processes(mark)
    assert ended.returncode == 0, ended.stdout[-4000:]
    return ended.stdout


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


def load(folder: Path, part: str, name: str) -> Any:
    return json.loads((folder / part / name).read_text("utf-8"))


def has_odb() -> bool:
    return importlib.util.find_spec("odb") is not None


@pytest.mark.full_grid
@pytest.mark.timeout(LIMIT_S + 20)
def test_the_page_has_every_part(short_form: Path) -> None:
    """Figures and tables; what has no short form is said not to be measured; what is done is not run again."""
    page = (short_form / "benchmarks.md").read_text("utf-8")
    parts = {path.parent.name for path in short_form.glob("*/done.json")}
    assert parts == {
        *("planning", "planning_real", "train_text_1", "learning", "loader", "start", "scale", "beside", "gpu")
    }
    assert page.count("Not measured: ") == page.count("\n## ") - len(parts) - 1 == 7
    short = page.split("\n## In short\n")[1].split("\n## ")[0]
    assert "| text, 1 rank | " in short and "8 ranks" not in short, "none were planned"
    for part in parts:
        tables = [line for line in (short_form / part / "tables.md").read_text("utf-8").splitlines() if line[:1] == "|"]
        assert len(tables) > 3 and all(line in page for line in tables), part
        assert f"`{load(short_form, part, 'done.json')['command']}`" in page
    figures = {path.relative_to(short_form).as_posix() for path in short_form.glob("*/*.png")}
    assert len(figures) == 7 and all(f"]({figure})" in page for figure in figures)
    assert "- Machine: " in page and "- Versions: " in page and "- Date: " in page
    began = {path: path.stat().st_mtime_ns for path in short_form.glob("*/done.json")}
    assert run_all(short_form).count("done before") == len(parts)
    assert began == {path: path.stat().st_mtime_ns for path in short_form.glob("*/done.json")}


def test_the_plan(planned: Path) -> None:
    """On a small scale: odb before who keeps N, balanced before alone, flat before padded, below the bound."""
    rows = load(planned, "planning", "planning.json")
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
    assert has_odb() or "online-dynamic-batching" in missing


@pytest.mark.full_grid
def test_the_trainings(short_form: Path) -> None:
    """I9: odb has the optimizer steps and losses of fixed batches; the same samples and tokens for everyone."""
    (rows,) = load(short_form, "train_text_1", "train.json").values()
    fixed, ours = rows
    assert (fixed["name"], ours["name"]) == ("fixed batch", "odb")
    assert ours["peak_padded_tokens"] <= fixed["peak_padded_tokens"] and ours["steps"] < fixed["steps"]
    for row in rows:
        assert round(row["samples_per_second"] * row["seconds"]) == 64
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(fixed["real_tokens"])
        assert row["padding"] == pytest.approx(1 - row["tokens_per_second"] / row["padded_tokens_per_second"])
        assert 0 < row["validation_loss"] < 8.5 and row["peak_memory"] > 0
        assert row["seconds_spread"] == [row["seconds"]] * 2
    assert ours["optimizer_steps"] == fixed["optimizer_steps"] == len(fixed["losses"]) > 1
    assert ours["losses"] == pytest.approx(fixed["losses"], rel=1e-4)
    assert ours["validation_loss"] == pytest.approx(fixed["validation_loss"], rel=1e-4)
    learnt = load(short_form, "learning", "learning.json")
    assert learnt["odb"][0]["validation loss"] == pytest.approx(learnt["fixed batch"][0]["validation loss"], rel=1e-4)


@pytest.mark.full_grid
def test_the_loaders(short_form: Path) -> None:
    rows = load(short_form, "loader", "loader.json")["results"]
    loaders = {row["loader"] for row in rows}
    assert {"plain DataLoader", "odb_factory"} <= loaders and len(loaders) == (4 if has_odb() else 2)
    for row in rows:
        assert row["samples_per_second"] > 0 and row["peak_mib"] > 0 and 0 <= row["blocked"] <= 1
        assert 0 <= row["padding"] < 1 and row["real_tokens_per_second"] <= row["padded_tokens_per_second"]
        if row["layout"] == "flat":
            assert row["padding"] == 0
        elif row["loader"] == "odb_factory":
            assert 0 < row["padding"] < rows[0]["padding"], "micro-batches of several samples of like length"


@pytest.mark.full_grid
def test_the_start(short_form: Path) -> None:
    starts = load(short_form, "start", "start.json")
    assert [(run["rows"], run["name"]) for run in starts] == [(40, "stock"), (40, "odb")]
    for run in starts:
        assert 0 < run["reading"] < run["first_step"] and 0 < run["start_up"] < run["first_step"] and run["rest"] > 0
        stretches = run["start_up"] + run["reading"] + run["rest"]
        assert stretches == pytest.approx(run["first_step"])


@pytest.mark.full_grid
def test_the_cost_of_planning(short_form: Path) -> None:
    rows = load(short_form, "scale", "scale.json")
    rounds = [row for row in rows if "received" in row and "steps" in row]
    assert [(row["ranks"], row["balance"]) for row in rounds] == 2 * [(2, False), (8, False), (2, True), (8, True)]
    grouped = [row for row in rows if "group_size" in row]
    assert [(row["ranks"], row["group_size"]) for row in grouped] == [(8, 4), (8, 8)]
    assert grouped[0]["efficiency"] <= grouped[1]["efficiency"] <= grouped[1]["bound"]


@pytest.mark.full_grid
def test_one_gpu(short_form: Path) -> None:
    found = load(short_form, "gpu", "gpu.json")
    assert list(found["tables"]) == ["qwen3-vl-2b, MM-Mix", "text-0.5b, MM-Mix"]
    for rows in found["tables"].values():
        assert {"fixed batch", "length-grouped", "odb"} <= {row["name"] for row in rows}
        for row in rows:
            assert 1024 < row["peak_padded_tokens"] <= 2048, "filled, and within the cap"
            # The same samples and the same tokens for everyone.
            assert round(row["samples_per_second"] * row["seconds"]) == 48
            assert row["tokens_per_second"] * row["seconds"] == pytest.approx(
                rows[0]["tokens_per_second"] * rows[0]["seconds"]
            )
            assert row["of_limit"] > 0 and 0 < row["validation_loss"] < 8


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, found)
    spec.loader.exec_module(found)
    return found


def test_the_table_of_starts_says_who_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    start = module("start", monkeypatch)
    seconds = {"stock": 4.0, "stock, streaming": 6.0, "odb": 5.0}
    starts = [start.Start(10, name, 0.1, first_step, 1.0, 0.5) for name, first_step in seconds.items()]
    _, _, stock, streaming, odb = start.table(starts).splitlines()
    assert "**4.0 s**" in stock and "10 (0.1 MB)" in stock
    assert "1.5 x later" in streaming and "**" not in streaming
    assert "1.2 x later" in odb and "3.5 s" in odb and "**" not in odb


def test_a_part_that_fails_is_run_again_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmarks = module("all", monkeypatch)
    part = benchmarks.Part("broken", "Broken", "A part.", ("scale.py", "--nothing-like-this"), 1)
    assert not benchmarks.run(part, tmp_path, False, tmp_path)
    assert benchmarks.page.done(tmp_path, "broken") is None
    page = benchmarks.page.make(tmp_path, [part], {"broken": benchmarks.page.why_not(tmp_path, "broken")})
    assert page.endswith("## Broken\nA part.\n\nNot measured: it failed.\n")
    assert "unrecognized arguments" in (tmp_path / "broken" / "log.txt").read_text("utf-8")


@pytest.mark.full_grid
def test_published_parts_stand_beside_earlier_ones(
    short_form: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmarks = module("all", monkeypatch)
    monkeypatch.setattr(benchmarks, "ROOT", tmp_path)
    before = tmp_path / "docs" / "benchmarks"
    (before / "start").mkdir(parents=True)
    (before / "start" / "old.png").touch()
    earlier = load(short_form, "scale", "done.json") | {"machine": "a machine of long ago"}
    (before / "gradient").mkdir()
    (before / "gradient" / "done.json").write_text(json.dumps(earlier), "utf-8")
    (before / "gradient" / "tables.md").write_text("what was published before", "utf-8")
    benchmarks.publish(short_form)
    page = (tmp_path / "docs" / "benchmarks.md").read_text("utf-8")
    links = re.findall(r"\]\((benchmarks/.+?png)\)", page)
    assert len(links) == 7 and {tmp_path / "docs" / link for link in links} == set(tmp_path.glob("docs/**/*.png"))
    assert "what was published before" in page and " and a machine of long ago" in page
    assert json.loads((before / "start" / "start.json").read_text("utf-8")) == load(short_form, "start", "start.json")
    assert not (before / "planning" / "ranks_2.partial").exists()
