"""`odb-factory compare`: the folders of real trainings, and broken folders."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from training.toy_training import make

from odb_factory.cli.main import main

STATE = {"global_step": 1, "max_steps": 2, "log_history": []}


@pytest.fixture(scope="session")
def folders(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The output folders of a training with odb and of a stock training."""
    paths = []
    for name, block in (("odb", {"token_budget": 256}), ("stock", None)):
        folder = tmp_path_factory.mktemp("runs") / name
        options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "save_strategy": "epoch"}
        trainer = make(tiny_text, folder, block=block, **options)
        trainer.train()
        trainer.save_state()
        paths.append(str(folder))
    return paths[0], paths[1]


def compare(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[str, str]:
    assert main(["compare", *arguments]) == 0
    return capsys.readouterr()


def test_two_trainings_as_json(folders: tuple[str, str], capsys) -> None:
    output = json.loads(compare(capsys, *folders, "--json")[0])
    figures = output["figures"]
    states = [json.loads(Path(folder, "trainer_state.json").read_text()) for folder in folders]
    assert figures["optimizer steps"] == [8, 8] == [state["global_step"] for state in states]
    losses = [[entry["loss"] for entry in state["log_history"] if "loss" in entry] for state in states]
    assert figures["last loss"] == [run_losses[-1] for run_losses in losses]
    mean = sum(abs(a - b) for a, b in zip(*losses)) / 8
    assert figures["mean loss difference"] == [None, pytest.approx(mean)] and 0 < mean < 1e-4
    assert figures["train_runtime"] == [state["log_history"][-1]["train_runtime"] for state in states]
    assert figures["odb/tokens_per_second"][0] > 0 and figures["odb/tokens_per_second"][1] is None
    assert output["differences"] == {"odb": ["on", None]}
    assert not any(list(Path(folder).glob("*.html")) for folder in folders)


def texts_of(page: Path) -> set[str]:
    """The texts of a page, which runs and fetches nothing."""
    content = page.read_text(encoding="utf-8")
    assert not re.search("<(script|link|img)", content)
    assert all(address.startswith("#") for address in re.findall('(?:src|href)="([^"]*)', content))
    return set(map(html.unescape, re.findall(">([^<]+)<", content)))


def test_the_page_has_the_table_and_the_curves(folders, tmp_path: Path, capsys) -> None:
    """One run has HTML, terminal colours and mathematics in its name; the other run has not ended."""
    evil, running = tmp_path / "<script>\x1b[31m $x_", tmp_path / "running"
    for folder, source in zip((evil, running), folders):
        folder.mkdir()
        state = json.loads(Path(source, "trainer_state.json").read_text())
        state["log_history"] = state["log_history"][:3] if folder == running else state["log_history"]
        (folder / "trainer_state.json").write_text(json.dumps(state))
        (folder / "README.md").write_text(f"### Training hyperparameters\n\n- seed: 42\n- adam: {len(folder.name)}\n")
        (folder / "run.yaml").write_text(f"template: qwen\nlr: {len(source)}\nnested: {{same: 1, other: {source}}}\n")
    (running / "checkpoint-3").mkdir()
    (running / "trainer_state.json").rename(running / "checkpoint-3" / "trainer_state.json")
    out, err = compare(capsys, str(evil), str(running))
    assert "\x1b" not in out and str(evil / "odb_compare_running.html") in err
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:] if line}
    assert rows["nested.other"] == list(folders) and not {"template", "nested.same", "seed"} & rows.keys()
    assert rows["adam"] == [str(len(evil.name)), "7"]
    texts = texts_of(evil / "odb_compare_running.html")
    assert {"loss", "grad_norm", "learning_rate", "tokens/s", "odb/tokens_per_second"} <= texts
    assert any("<script>" in text for text in texts)


def test_yamls_name_their_folders_and_llamafactory_logs_speed_and_memory(folders, tmp_path: Path, capsys) -> None:
    paths = []
    for name, memory in (("a", 2.0), ("b", 8.0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "trainer_state.json").write_text(Path(folders[1], "trainer_state.json").read_text())
        lines = [{"current_steps": step, "throughput": 10.0 * step, "vram_reserved": memory} for step in (1, 2, 3)]
        (folder / "trainer_log.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"current_st')
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(f"output_dir: {folder}\nlearning_rate: {memory}\n")
    content = json.loads(compare(capsys, *map(str, paths), "--json", "--html", str(tmp_path / "page.html"))[0])
    assert content["figures"]["memory, GiB"] == [2, 8] and content["figures"]["tokens/s"] == [20, 20]
    assert content["differences"]["learning_rate"] == [2, 8]
    assert {"tokens/s", "memory, GiB", "loss difference", "0.25"} <= texts_of(tmp_path / "page.html")


BROKEN = [
    ("trainer_state.json", '{"global_step": 3'),
    ("trainer_state.json", "[]"),
    ("trainer_state.json", "{}"),
    ("trainer_state.json", json.dumps(STATE | {"log_history": [{"loss": 1.0}]})),
    ("trainer_state.json", json.dumps(STATE | {"log_history": 3})),
    ("odb_summary.json", "{"),
    ("run.yaml", "a: [1"),
]


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_a_broken_file_is_one_line(name: str, text: str, tmp_path: Path, capsys) -> None:
    """A folder without a training and a page that cannot be written, too."""
    (tmp_path / "run").mkdir()
    for file, content in {"trainer_state.json": json.dumps(STATE), name: text}.items():
        (tmp_path / "run" / file).write_text(content)
    for arguments in (["run"], ["."], ["run", "--html", str(tmp_path)]):
        assert main(["compare", str(tmp_path / arguments[0]), *arguments[1:]]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and str(tmp_path) in error
        assert arguments != ["run"] or name in error


def test_without_matplotlib_the_table_alone(folders, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out, err = compare(capsys, *folders)
    assert "last loss" in out and "odb_factory[tools]" in err and err.count("\n") == 1


def test_a_reader_that_stops_is_no_error(folders) -> None:
    """For example `odb-factory compare A B | head -1`."""
    command = [sys.executable, "-u", "-m", "odb_factory.cli.main", "compare", *folders]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
