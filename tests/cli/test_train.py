"""`odb-factory` and `odb-factory train`: the explicit way in trains with odb where torch does not activate it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from odb_factory.cli.main import COMMANDS, main

pytestmark = pytest.mark.timeout(240)

CONFIGS = Path(__file__).parents[2] / "yaml_configs"
ROWS = 6
# What a real model on GPUs needs and the tiny one on a CPU has not.
ON_A_CPU = (
    "use_cpu=true",
    "deepspeed=null",
    "ddp_backend=gloo",
    "preprocessing_num_workers=1",
    "dataloader_num_workers=1",
)


@pytest.fixture(scope="module")
def workplace(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out as the comments of tiny_cpu.yaml and sharegpt4o.yaml ask for."""
    folder = tmp_path_factory.mktemp("workplace")
    shutil.copytree(CONFIGS, folder / "yaml_configs")
    (folder / "tiny_qwen3_vl").symlink_to(tiny_vl)
    answers = [f"A picture of {60 + 40 * k} pixels, and so on. " * (1 + k) for k in range(ROWS)]

    images = folder / "data" / "sharegpt4o" / "images" / "inner"
    images.mkdir(parents=True)
    for k in range(ROWS):
        Image.new("RGB", (60 + 40 * k, 100), "teal").save(images / f"{k}.jpg")
    with (folder / "data" / "sharegpt4o" / "sharegpt4o.jsonl").open("w", encoding="utf-8") as lines:
        for k, answer in enumerate(answers):
            turns = [{"from": "human", "value": "<image>\nDescribe it."}, {"from": "gpt", "value": answer}]
            print(json.dumps({"image": f"inner/{k}.jpg", "conversations": turns}), file=lines)

    mix = folder / "mm_mix_data"
    mix.mkdir()
    rows = [
        {
            "messages": [{"role": "user", "content": "<image>Describe it."}, {"role": "assistant", "content": answer}],
            "images": [str(images / f"{k}.jpg")],
        }
        for k, answer in enumerate(answers)
    ]
    (mix / "mm_mix.json").write_text(json.dumps(rows), encoding="utf-8")
    entry = {
        "file_name": "mm_mix.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "images"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    }
    (mix / "dataset_info.json").write_text(json.dumps({"mm_mix": entry}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trainings(odb_factory, workplace: Path) -> dict[str, subprocess.CompletedProcess]:
    """Real runs side by side: two of two optimizer steps, with torch's own activation switched off; one refused."""
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    two_steps = ("max_steps=2", "gradient_accumulation_steps=1", "odb.token_budget=512")
    started = {
        "tiny_cpu": odb_factory("train", "yaml_configs/tiny_cpu.yaml", *two_steps, cwd=workplace, **off),
        "sharegpt4o": odb_factory(
            "train",
            "yaml_configs/sharegpt4o.yaml",
            "model_name_or_path=./tiny_qwen3_vl",
            *ON_A_CPU,
            *two_steps,
            cwd=workplace,
            FORCE_TORCHRUN="1",
            NPROC_PER_NODE="1",
            **off,
        ),
        "wrong block": odb_factory(
            "train", "yaml_configs/tiny_cpu.yaml", "output_dir=saves/none", "odb.token_bugdet=1", cwd=workplace
        ),
    }
    return {name: command.end() for name, command in started.items()}


@pytest.mark.parametrize(("name", "by_torchrun"), [("tiny_cpu", False), ("sharegpt4o", True)])
def test_trains_with_odb_although_torch_does_not_activate(
    trainings: dict[str, subprocess.CompletedProcess], workplace: Path, name: str, by_torchrun: bool
) -> None:
    ended = trainings[name]
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output[-4000:]
    assert ("Initializing 1 distributed tasks" in output) == by_torchrun
    assert "layout: flat" in output and "layout: padded" not in output, "also in bf16 (sharegpt4o), by the check"
    summary = json.loads((workplace / "saves" / name / "odb_summary.json").read_text(encoding="utf-8"))
    assert summary["optimizer_steps"] == 2
    assert summary["dataset_samples"] == ROWS and summary["samples"] >= ROWS // 2
    assert summary["left_out"] == {}
    assert summary["config"]["token_budget"] == 512


def test_disabled_refuses_in_one_line(odb_factory, workplace: Path) -> None:
    ended = odb_factory("train", "yaml_configs/tiny_cpu.yaml", cwd=workplace, ODB_FACTORY_DISABLE="1").end()
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
def test_what_is_not_understood_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_start_imports_nothing_heavy() -> None:
    """So every command starts in a moment."""
    code = "import sys; from odb_factory.cli.main import main; main(['compare', 'nowhere']); print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    heavy = {"torch", "transformers", "llamafactory", "rich", "numpy", "matplotlib"}
    assert not heavy & {*ended.stdout.split()} and ended.stderr.startswith("odb-factory compare: nowhere")
