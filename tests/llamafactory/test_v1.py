"""LLaMA-Factory's v1 (`USE_V1=1`) trains with a block as with its strategy `normal`, without padding (I8, I9).

`CELLS` names the trainings; the trainings of a launch (release, ranks) run one after the other in its processes. The
wide grid: `pytest -s -m nightly tests/llamafactory/test_v1.py`; -s shows the difference of each training from v1's.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from support import BIN, end_of, read_jsonl, run_command, shimmed
from tiny_models import TinyModels

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
LAUNCH_TIMEOUT_S = 500
RELATIVE = 1e-5
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "ships", "sail", "home"]


IMAGES = {"model": "tied_vl", "train_dataset": "pictures", "micro_batch_size": 1}
"""v1 cannot collate rows with and without images in one micro-batch."""
LORA = {"peft_config": {"name": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all"}}
CELLS: dict[str, dict[str, Any]] = {
    "sft": {},
    "workers": {"batching_workers": 2},
    "padded": {"odb": {"layout": "padded"}},
    "cut": {"cutoff_len": 64},
    "recomputed": {"enable_activation_checkpointing": True},
    "own share": {"odb": {"balance": False}},
    "lora": LORA,
    "fsdp2": {"dist_config": {"name": "fsdp2"}},
    "a step of two": {"global_batch_size": 4, "micro_batch_size": 1},
    "images": IMAGES,
}
"""Arguments of both trainings, and keys of the block."""
LAUNCHES: dict[str, tuple[str, int, list[str]]] = {
    "one rank": ("installed", 1, ["sft"]),
    "two ranks": ("installed", 2, ["sft"]),
    "main, one rank": ("main", 1, ["images"]),
}
GRID: dict[str, tuple[str, int, list[str]]] = {
    "one rank, grid": ("installed", 1, ["workers", "padded", "cut", "recomputed", "lora"]),
    "two ranks, grid": ("installed", 2, ["workers", "own share", "a step of two", "fsdp2"]),
    "main, one rank, grid": ("main", 1, ["sft"]),
    "main, two ranks, grid": ("main", 2, ["sft", "fsdp2"]),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rows of `sft` and `pictures`, and the YAML of each for v1."""
    folder, rng = tmp_path_factory.mktemp("v1"), random.Random(0)

    def text(*lengths: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.choice(lengths)))

    sft = [{"instruction": text(2, 9, 20), "input": "", "output": text(2, 3, 5, 8, 40, 90)} for _ in range(50)]
    pictures = []
    for number in range(26):
        names = [str(folder / f"{number}_{image}.png") for image in range((1, 0, 2, 0)[number % 4])]
        for name in names:
            size = (rng.randrange(40, 300), rng.randrange(40, 300))
            Image.new("RGB", size, tuple(rng.randrange(256) for _ in range(3))).save(name)
        tags = "<image>" * len(names)
        pictures.append({"instruction": tags + text(2, 9), "input": "", "output": text(2, 5, 40), "images": names})
    for name, data in (("sft", sft), ("pictures", pictures)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in data))
        info = {"rows": {"path": str(path), "source": "local", "converter": "alpaca"}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(info))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """`environment("main")`: variables that select LLaMA-Factory's main branch; skips if there is no wheel."""

    def get(release: str) -> dict[str, str]:
        path = [str(ROOT), os.environ["PYTHONPATH"]]
        if release == "main":
            wheels = sorted(ROOT.parent.glob("shared/wheels/llamafactory-*.dev*.whl"))
            wheel = os.environ.get("LLAMAFACTORY_MAIN_WHEEL") or (str(wheels[-1]) if wheels else None)
            if wheel is None:
                pytest.skip("no wheel of LLaMA-Factory's main branch (LLAMAFACTORY_MAIN_WHEEL)")
            folder = tmp_path_factory.getbasetemp() / "main"
            if not folder.exists():
                zipfile.ZipFile(wheel).extractall(folder)
            path.insert(0, str(folder))
        paths = {"PYTHONPATH": os.pathsep.join(path), "DISABLE_VERSION_CHECK": "1"}
        return os.environ | shimmed("v1_on_cpu") | paths

    return get


@pytest.fixture(scope="module")
def arguments(rows: Path, tiny_text, tiny_vl, tmp_path_factory) -> Callable[..., dict[str, Any]]:
    models = TinyModels(tiny_text, tiny_vl, tmp_path_factory.mktemp("v1_models"))

    def get(output_dir: Path, **changes: Any) -> dict[str, Any]:
        options = {
            "model": "text",
            "model_class": "llm",
            "train_dataset": "sft",
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "cutoff_len": 512,
            "learning_rate": 1e-3,
            "bf16": False,
            "batching_workers": 0,
            "num_train_epochs": 2,
            "enable_activation_checkpointing": False,
            "output_dir": str(output_dir),
        } | changes
        options["model"] = str(models(options["model"]))  # v1 cannot resume a model with a tied head
        options["train_dataset"] = str(rows / f"{options['train_dataset']}.yaml")
        return options

    return get


def train(trainings: list[dict[str, Any]], ranks: int, env: dict[str, str], folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainings.json").write_text(json.dumps(trainings))
    script = [str(Path(__file__).with_name("v1_trainings.py")), str(folder / "trainings.json")]
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run_command([*launcher, *script], LAUNCH_TIMEOUT_S, environment=env)


def losses(output_dir: str) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_jsonl(Path(output_dir) / "trainer_log.jsonl")]


def padding(output_dir: str) -> int:
    audit = [line for path in Path(output_dir).glob("odb_audit_rank*.jsonl") for line in read_jsonl(path)]
    return sum(line["rows"] * line["length"] - sum(line["lengths"]) for line in audit if not line["idle"])


@pytest.mark.parametrize("launch", [*LAUNCHES, *(pytest.param(name, marks=pytest.mark.nightly) for name in GRID)])
def test_losses_equal_those_of_v1(launch: str, environment: Any, arguments: Any, tmp_path: Path) -> None:
    release, ranks, names = (LAUNCHES | GRID)[launch]
    trainings = []
    for name in names:
        changes = dict(CELLS[name])
        block = {"token_budget": 600, "audit": True} | changes.pop("odb", {})
        trainings += [arguments(tmp_path / name / "stock", **changes)]
        trainings += [arguments(tmp_path / name / "odb", odb=block, **changes)]
    output = train(trainings, ranks, environment(release), tmp_path)
    assert "layout: flat" in output
    for name, stock, odb in zip(names, trainings[::2], trainings[1::2], strict=True):
        stock_losses, odb_losses = (np.array(losses(training["output_dir"])) for training in (stock, odb))
        assert stock_losses.shape == odb_losses.shape and len(stock_losses) > 2
        difference = np.abs(odb_losses / stock_losses - 1).max()
        print(f"{launch}: {name}: loss and grad_norm differ by {difference:.0e}")
        assert difference < RELATIVE, name
        if name not in ("padded", "images"):
            assert padding(odb["output_dir"]) == 0, name


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_resumed_run_equals_the_unbroken_one(ranks: int, environment: Any, arguments: Any, tmp_path: Path) -> None:
    """From the middle of an epoch (of 6 optimizer steps), and from its end, when v1 iterates the epoch once more."""
    block = {"odb": {"token_budget": 600}}
    unbroken = arguments(tmp_path / "unbroken", save_steps=2, **block)
    resumed = {
        step: arguments(tmp_path / f"from_{step}", resume_from_checkpoint=f"{tmp_path}/unbroken/checkpoint-{step}")
        | block
        for step in (4, 6)
    }
    train([unbroken, *resumed.values()], ranks, environment("installed"), tmp_path)
    whole = losses(unbroken["output_dir"])
    for step, training in resumed.items():
        assert np.array(losses(training["output_dir"])) == pytest.approx(np.array(whole[step:]), rel=1e-6), step


def test_the_launcher_trains_and_refuses_in_one_line(environment: Any, arguments: Any, tmp_path: Path) -> None:
    env = environment("installed") | {"USE_V1": "1"}
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(arguments(tmp_path / "out", max_steps=2, odb={"token_budget": 600})))
    command = [str(BIN / "llamafactory-cli"), "sft", str(path)]
    torchrun = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "1"}
    output = run_command(command, LAUNCH_TIMEOUT_S, environment=env | torchrun)
    assert "online dynamic batching is on for v1's sft; layout: flat" in output
    assert len(losses(str(tmp_path / "out"))) == 2
    refused = end_of([*command, "odb.oom=skip"], 120, environment=env)
    assert refused.returncode == 1 and "Traceback" not in refused.stdout
    (line,) = [line for line in refused.stdout.splitlines() if line.startswith("[odb]")]
    assert line.startswith("[odb] odb.oom: ")


@pytest.mark.parametrize("change", sorted(path.stem for path in (ROOT / "patches" / "upstream").glob("*.diff")))
@pytest.mark.parametrize("tries", ["applies", pytest.param("its tests", marks=pytest.mark.nightly)])
def test_a_change_for_upstream(environment: Any, tmp_path: Path, change: str, tries: str) -> None:
    """The diffs are for the repository of LLaMA-Factory; the wheel contains its `src`."""
    env = environment("main")
    shutil.copytree(Path(env["PYTHONPATH"].split(os.pathsep)[0]) / "llamafactory", tmp_path / "src" / "llamafactory")
    diff = str(ROOT / "patches" / "upstream" / f"{change}.diff")
    for options in (["--check"], [], ["--check", "--reverse"]):
        subprocess.run(["git", "apply", *options, diff], cwd=tmp_path, check=True, env=env | {"GIT_DIR": "nowhere"})
    assert (ROOT / "patches" / "upstream" / f"{change}.md").is_file()
    if tries == "its tests":
        tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "tests_v1")]
        run_command(tests, LAUNCH_TIMEOUT_S, environment=env | {"PYTHONPATH": str(tmp_path / "src")})
