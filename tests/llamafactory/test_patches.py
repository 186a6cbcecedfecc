"""The diffs for forks fit the released sources and train as the plugin does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from llamafactory.train.tuner import run_exp
from support import once, read_audit, read_log, run_llamafactory, training_config

pytestmark = pytest.mark.timeout(240)

PATCHES = {path.stem.removeprefix("llamafactory-"): path for path in Path(__file__).parents[2].glob("patches/*.diff")}
DOWNLOAD_TIMEOUT_S = 60


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkout("0.9.5")` is the source of that release as it was published."""
    folder = tmp_path_factory.mktemp("released")

    def get(release: str) -> Path:
        root = folder / f"llamafactory-{release}"
        if not root.exists():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llamafactory"]
            command += ["--dest", str(folder), f"llamafactory=={release}"]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S)
            except subprocess.SubprocessError as error:
                pytest.skip(f"pip cannot get the source of llamafactory {release}: {type(error).__name__}")
            shutil.unpack_archive(f"{root}.tar.gz", folder)
        return root

    return get


def apply(root: Path, release: str, *options: str) -> str:
    """What `git apply` says. root: the folder of the source, in no repository."""
    git = ["git", "apply", *options, str(PATCHES[release])]
    ended = subprocess.run(git, cwd=root, capture_output=True, text=True, env=os.environ | {"GIT_DIR": "nowhere"})
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("release", sorted(PATCHES))
def test_a_release_takes_its_patch_and_gives_it_back(checkout, tmp_path: Path, release: str) -> None:
    shutil.copytree(checkout(release) / "src", tmp_path / "src")
    stock = content(tmp_path)
    apply(tmp_path, release)
    patched = content(tmp_path)
    changed = [name for name in stock if patched[name] != stock[name]]
    assert len(changed) == 8 and patched.keys() == stock.keys()
    for name in changed:
        compile(patched[name], name, "exec")
    apply(tmp_path, release, "--reverse")
    assert content(tmp_path) == stock


# Training: with the release that is installed, whose transformers is installed too.


@pytest.fixture(scope="module")
def patched(checkout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to put on PYTHONPATH: the installed release with its patch."""
    release = metadata.version("llamafactory")
    if release not in PATCHES:
        pytest.skip(f"there is no patch for llamafactory {release}, which is installed")
    folder = tmp_path_factory.mktemp("patched")
    shutil.copytree(checkout(release) / "src", folder / "src")
    apply(folder, release)
    return folder / "src"


def before_ours(patched: Path) -> str:
    """A PYTHONPATH on which the fork comes before what this process imports, this checkout for instance."""
    return os.pathsep.join([str(patched), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def train(patched, tiny_text, data_dir, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple]:
    """(output folder, ended process) of two steps, hooked by the plugin in this process, by the patch, or by both."""
    folder = tmp_path_factory.mktemp("trained")
    path = before_ours(patched)
    ways = {"patch": {"ODB_FACTORY_DISABLE": "1", "PYTHONPATH": path}, "both": {"PYTHONPATH": path}}

    @once
    def train(way: str) -> tuple:
        block = {"token_budget": 256, "buffer_size": 24, "audit": True}
        config = training_config(tiny_text, data_dir, folder / way, max_steps=2, val_size=4, odb=block)
        config["per_device_train_batch_size"] = 4
        if way == "plugin":
            run_exp(config | {"odb": block | {"token_budget": 768}})
            return folder / way, None
        return folder / way, run_llamafactory(config, "odb.token_budget=768", env=ways[way])

    return train


@pytest.mark.versions
@pytest.mark.parametrize("way", ["patch", pytest.param("both", marks=pytest.mark.nightly)])
def test_odb_attaches_once_and_trains_the_same_whichever_way(train, way: str) -> None:
    """Same groups, same losses, no preprocessing pass of the training rows; who hooked it in is in the log."""
    (plugin_dir, _), (output_dir, ended) = train("plugin"), train(way)
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert ended.stdout.count("online dynamic batching is on") == 1
    assert ("called by the patched workflow" in ended.stdout) == (way == "patch")
    assert "one optimizer step: 4 samples, as in stock training" in ended.stdout
    assert ended.stdout.count("Running tokenizer on dataset: 100%") <= 1, "of the rows for evaluation only"
    audit = read_audit(output_dir)
    assert {line["optimizer_step"] for line in audit} == {1, 2}
    assert all(line["rows"] * line["length"] <= 768 for line in audit if line["rows"] > 1)
    summary = json.loads((output_dir / "odb_summary.json").read_text())
    assert (summary["optimizer_steps"], summary["config"]["token_budget"]) == (2, 768)
    assert audit == read_audit(plugin_dir)
    losses = [[entry.get("loss") for entry in read_log(folder)] for folder in (plugin_dir, output_dir)]
    assert losses[0] == losses[1]


def run_code(code: str, stdin: Any, **env: str) -> CompletedProcess:
    command = [sys.executable, "-P", "-c", code]
    ended = subprocess.run(
        command, input=json.dumps(stdin), env=os.environ | env, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended


def test_without_a_block_a_patched_fork_trains_where_odb_factory_is_not_installed(
    patched, tiny_text, data_dir, tmp_path
) -> None:
    config = training_config(tiny_text, data_dir, tmp_path / "out", max_steps=2)
    code = (
        "import json, sys\n"
        "sys.modules['odb_factory'] = None\n"
        "from llamafactory.train.tuner import run_exp\n"
        "config = json.load(sys.stdin)\n"
        "run_exp(dict(config))\n"
        "try: run_exp(config | {'odb': {'token_budget': 8}})\n"
        "except ImportError as error: print('with a block:', error)"
    )
    done = run_code(code, config, TORCH_DEVICE_BACKEND_AUTOLOAD="0", PYTHONPATH=str(patched))
    assert "Running tokenizer on dataset" in done.stderr
    assert len([entry for entry in read_log(tmp_path / "out") if "loss" in entry]) == 2
    said = done.stdout.splitlines()[-1]
    assert said.startswith("with a block:") and "odb_factory" in said
