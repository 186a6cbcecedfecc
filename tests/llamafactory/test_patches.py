"""The diff for forks applies to the installed release and trains as the plugin does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import llamafactory
import pytest
from llamafactory.train.tuner import run_exp
from support import RUN_TIMEOUT_S, read_audit, read_log, run_llamafactory, training_config

pytestmark = pytest.mark.timeout(600)

PATCH = Path(__file__).parents[2] / "patches" / f"llamafactory-{metadata.version('llamafactory')}.diff"


def apply(root: Path, *options: str) -> None:
    """root: the folder of the source, outside of any repository."""
    git = ["git", "apply", *options, str(PATCH)]
    ended = subprocess.run(git, cwd=root, capture_output=True, text=True, env=os.environ | {"GIT_DIR": "nowhere"})
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for PYTHONPATH: the installed release with its patch, which can be reversed."""
    if not PATCH.exists():
        pytest.skip(f"there is no {PATCH.name}, for the release that is installed")
    folder = tmp_path_factory.mktemp("patched")
    package = Path(llamafactory.__file__).parent
    shutil.copytree(package, folder / "src" / "llamafactory", ignore=shutil.ignore_patterns("__pycache__"))
    apply(folder)
    apply(folder, "--reverse")
    for path in (folder / "src" / "llamafactory").rglob("*.py"):
        assert path.read_bytes() == (package / path.relative_to(folder / "src" / "llamafactory")).read_bytes()
    apply(folder)
    return folder / "src"


@pytest.mark.versions
@pytest.mark.parametrize("way", ["patch", pytest.param("both", marks=pytest.mark.nightly)])
def test_odb_attaches_once_by_patch_or_plugin(patched, tiny_text, data_dir, tmp_path, way: str) -> None:
    """Same micro-batches and losses, no preprocessing pass over the training rows."""
    block = {"token_budget": 256, "buffer_size": 24, "audit": True}
    changes = {"max_steps": 2, "val_size": 4, "per_device_train_batch_size": 4}
    plugin, by_patch = (training_config(tiny_text, data_dir, tmp_path / name, **changes) for name in ("plugin", way))
    run_exp(plugin | {"odb": block | {"token_budget": 768}})
    # The fork comes first on the path.
    path = os.pathsep.join([str(patched), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"PYTHONPATH": path} | ({"ODB_FACTORY_DISABLE": "1"} if way == "patch" else {})
    ended = run_llamafactory(by_patch | {"odb": block}, "odb.token_budget=768", env=env)
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert ended.stdout.count("online dynamic batching is on") == 1
    assert ("called by the patched workflow" in ended.stdout) == (way == "patch")
    assert not re.search("Running tokenizer .*36/36", ended.stdout), "only rows for evaluation"
    audit = read_audit(tmp_path / way)
    assert {line["optimizer_step"] for line in audit} == {1, 2}
    assert all(line["rows"] * line["length"] <= 768 for line in audit if line["rows"] > 1)
    assert audit == read_audit(tmp_path / "plugin")
    losses = [[entry.get("loss") for entry in read_log(tmp_path / name)] for name in ("plugin", way)]
    assert losses[0] == losses[1]


WITHOUT_ODB_FACTORY = """
import json, sys
sys.modules['odb_factory'] = None
from llamafactory.train.tuner import run_exp
config = json.load(sys.stdin)
run_exp(dict(config))
try: run_exp(config | {'odb': {'token_budget': 8}})
except ImportError as error: print('with a block:', error)
"""


def test_without_a_block_a_patched_fork_trains_where_odb_factory_is_not_installed(
    patched, tiny_text, data_dir, tmp_path
) -> None:
    config = training_config(tiny_text, data_dir, tmp_path / "out", max_steps=2)
    command = [sys.executable, "-P", "-c", WITHOUT_ODB_FACTORY]
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(patched)}
    done = subprocess.run(
        command, input=json.dumps(config), env=env, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )
    assert done.returncode == 0 and "Running tokenizer on dataset" in done.stderr, done.stderr[-3000:]
    assert len([entry for entry in read_log(tmp_path / "out") if "loss" in entry]) == 2
    last_line = done.stdout.splitlines()[-1]
    assert last_line.startswith("with a block:") and "odb_factory" in last_line
