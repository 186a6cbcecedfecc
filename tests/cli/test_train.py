"""`odb-factory` and `odb-factory train`: the explicit command trains with odb if torch does not activate it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from odb_factory.cli.main import COMMANDS, main
from odb_factory.cli.mm_mix import build_builtin_mix

pytestmark = pytest.mark.timeout(240)

CONFIGS = Path(__file__).parents[2] / "yaml_configs"
YAML = "yaml_configs/tiny_cpu.yaml"
ROWS = 8


@pytest.fixture(scope="module")
def workplace(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out as the comments of tiny_cpu.yaml ask for."""
    folder = tmp_path_factory.mktemp("workplace")
    shutil.copytree(CONFIGS, folder / "yaml_configs")
    (folder / "tiny_qwen3_vl").symlink_to(tiny_vl)
    build_builtin_mix(folder / "mm_mix_data", samples=ROWS)
    return folder


@pytest.fixture(scope="module")
def trainings(odb_factory, workplace: Path) -> dict[str, subprocess.CompletedProcess]:
    """Real runs at the same time: two of two optimizer steps, with torch's activation switched off; a refused run."""
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    two_steps = ("max_steps=2", "gradient_accumulation_steps=1", "odb.token_budget=512")
    started = {
        name: odb_factory("train", YAML, f"output_dir=saves/{name}", *arguments, cwd=workplace, **environment)
        for name, arguments, environment in (
            ("plain", two_steps, off),
            ("torchrun", (*two_steps, "ddp_backend=gloo"), off | {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "1"}),
            ("wrong block", ("odb.token_bugdet=1",), {}),
        )
    }
    return {name: command.end() for name, command in started.items()}


@pytest.mark.parametrize("name", ["plain", "torchrun"])
def test_trains_with_odb_although_torch_does_not_activate(trainings, workplace, name: str) -> None:
    ended = trainings[name]
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output[-4000:]
    assert ("Initializing 1 distributed tasks" in output) == (name == "torchrun")
    assert "layout: flat" in output and "layout: padded" not in output
    summary = json.loads((workplace / "saves" / name / "odb_summary.json").read_text(encoding="utf-8"))
    assert (summary["optimizer_steps"], summary["samples"], summary["left_out"]) == (2, 4, {})
    assert summary["config"]["token_budget"] == 512


def test_disabled_refuses_in_one_line(odb_factory, workplace: Path) -> None:
    ended = odb_factory("train", YAML, cwd=workplace, ODB_FACTORY_DISABLE="1").end()
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert "ODB_FACTORY_DISABLE" in line


def test_a_wrong_block_ends_in_one_line(trainings: dict[str, subprocess.CompletedProcess]) -> None:
    ended = trainings["wrong block"]
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "could not be activated" not in ended.stderr, "torch calls the entry point amid our own activation"
    assert "token_bugdet" in ended.stderr.splitlines()[-1] and "token_budget" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert (
        ended.value.code == 0
        and f"example: odb-factory {command}" in text
        and ("--json" in text) == (command != "train")
    )


@pytest.mark.parametrize("arguments", [[], ["trian"], ["train"]])
def test_unknown_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_start_imports_nothing_heavy() -> None:
    """Every command starts fast."""
    code = "import sys; from odb_factory.cli.main import main; main(['compare', 'nowhere']); print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    heavy = {"torch", "transformers", "llamafactory", "rich", "numpy", "matplotlib"}
    assert not heavy & {*ended.stdout.split()} and ended.stderr.startswith("odb-factory compare: nowhere")
