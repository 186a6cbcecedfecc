"""The installed command: `train` trains with odb if torch does not activate it, `doctor` names defects."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, CompletedProcess
from typing import Any

import pytest
from support import BIN, end_of

from odb_factory.cli.main import COMMANDS, main
from odb_factory.cli.mm_mix import build_builtin_mix

pytestmark = pytest.mark.timeout(300)

CONFIGS = Path(__file__).parents[2] / "yaml_configs"
AUTOLOAD, DISABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD", "ODB_FACTORY_DISABLE"
OFF = {AUTOLOAD: "0"}
YAML = "yaml_configs/tiny_cpu.yaml"
TWO_STEPS = ("max_steps=2", "gradient_accumulation_steps=1", "odb.token_budget=512")


def odb_factory(*arguments: str, cwd: Path, **environment: str) -> CompletedProcess:
    return end_of([str(BIN / "odb-factory"), *arguments], 180, cwd, os.environ | environment, stderr=PIPE)


def at_once(commands: dict[str, tuple[tuple[str, ...], dict[str, str]]], cwd: Path) -> dict[str, CompletedProcess]:
    """commands: arguments and environment by name."""
    with ThreadPoolExecutor() as pool:
        ends = {name: pool.submit(odb_factory, *words, cwd=cwd, **more) for name, (words, more) in commands.items()}
    return {name: end.result() for name, end in ends.items()}


# Training


@pytest.fixture(scope="module")
def workplace(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out as the comments of tiny_cpu.yaml ask for."""
    folder = tmp_path_factory.mktemp("workplace")
    shutil.copytree(CONFIGS, folder / "yaml_configs")
    (folder / "tiny_qwen3_vl").symlink_to(tiny_vl)
    build_builtin_mix(folder / "mm_mix_data", samples=8)
    return folder


def test_trains_with_odb_although_torch_does_not_activate(workplace: Path) -> None:
    """Two optimizer steps, with and without torchrun. A wrong block ends in one line, and so does odb switched off."""
    by_torchrun = OFF | {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "1"}
    ends = at_once(
        {
            "plain": (("train", YAML, "output_dir=saves/plain", *TWO_STEPS), OFF),
            "torchrun": (("train", YAML, "output_dir=saves/torchrun", *TWO_STEPS, "ddp_backend=gloo"), by_torchrun),
            "wrong block": (("train", YAML, "odb.token_bugdet=1"), {}),
            "disabled": (("train", YAML), {DISABLE: "1"}),
        },
        workplace,
    )
    for name in ("plain", "torchrun"):
        output = ends[name].stdout + ends[name].stderr
        assert ends[name].returncode == 0, output[-4000:]
        assert ("Initializing 1 distributed tasks" in output) == (name == "torchrun")
        assert "layout: flat" in output and "layout: padded" not in output
        summary = json.loads((workplace / "saves" / name / "odb_summary.json").read_text(encoding="utf-8"))
        assert (summary["optimizer_steps"], summary["samples"], summary["left_out"]) == (2, 4, {})
        assert summary["config"]["token_budget"] == 512
    wrong, disabled = ends["wrong block"], ends["disabled"]
    assert (wrong.returncode, disabled.returncode, disabled.stdout) == (1, 2, "")
    assert "Traceback" not in wrong.stderr
    assert "could not be activated" not in wrong.stderr, "torch calls the entry point amid our own activation"
    assert "token_bugdet" in wrong.stderr.splitlines()[-1] and "token_budget" in wrong.stderr.splitlines()[-1]
    assert DISABLE in disabled.stderr and disabled.stderr.count("\n") == 1


# The doctor

OTHER = ("online_dynamic_batching-0.1.2.dist-info/METADATA", "Name: online-dynamic-batching\nVersion: 0.1.2\n")
OLD = ("llamafactory-0.9.3.dist-info/METADATA", "Name: llamafactory\nVersion: 0.9.3\n")
AUDIO, TORCH = ("torchaudio.py", "raise OSError('libaudio')"), ("torch.py", "raise RuntimeError('the wrong torch')")

DOCTORS: dict[str, tuple[tuple[Any, ...], dict[str, str], int, dict[str, str]]] = {
    # files on sys.path, environment, exit code, status of the checks that contain a word
    "sound": ((OTHER,), {}, 0, {"online-dynamic-batching": "note", "import torch": "ok", "are hooked": "ok"}),
    "autoload off": ((OLD,), OFF, 1, {AUTOLOAD: "problem", "0.9.3": "problem", "are hooked": "ok"}),
    "broken media": ((AUDIO,), {}, 1, {"torchaudio does not fit": "note", "be imported: llamafactory": "problem"}),
    "disabled": ((), {DISABLE: "1"}, 1, {DISABLE: "problem", "are hooked": "ok"}),
    "broken torch": ((TORCH,), {}, 1, {"the wrong torch": "problem"}),
}


def test_every_defect_is_named_with_a_fix(tmp_path: Path) -> None:
    """In a working folder with a file that is named like a package. The text has a line per check and a verdict."""
    commands = {"text": (("doctor",), {})}
    for name, (files, environment, *_) in DOCTORS.items():
        for file, text in files:
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)
        path = os.pathsep.join(filter(None, (str(tmp_path / name), os.environ.get("PYTHONPATH"))))
        commands[name] = (("doctor", "--json"), environment | {"PYTHONPATH": path})
    (tmp_path / "torch.py").write_text(TORCH[1])
    ends = at_once(commands, tmp_path)
    lines = ends["text"].stdout.splitlines()
    assert any("kernel" in line or "sdpa" in line for line in lines) and "ready" in lines[-1]
    for name, (_, _, code, expected) in DOCTORS.items():
        checks = json.loads(ends[name].stdout)
        assert ends[name].returncode == code, (name, checks)
        for word, status in expected.items():
            assert [check["status"] for check in checks if word in check["what"]] == [status], (name, word, checks)
        assert {check["status"] for check in checks} <= {"ok", *expected.values()}, (name, checks)
        assert all(check["fix"] for check in checks if check["status"] == "problem")


# Arguments


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and f"example: odb-factory {command}" in text
    assert ("--json" in text) == (command != "train")


@pytest.mark.parametrize("arguments", [[], ["trian"], ["train"]])
def test_unknown_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
