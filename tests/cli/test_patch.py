"""The diffs for forks fit the released sources, train as the plugin does, and are put in whole or not at all."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from support import read_audit, read_log, run_llamafactory, training_config

from odb_factory.cli import patch_fit
from odb_factory.cli.main import main
from odb_factory.cli.patch import PATCHES

pytestmark = pytest.mark.timeout(240)

REPOSITORY = Path(__file__).parents[2]
DOWNLOAD_TIMEOUT_S = 60
WORKFLOW, LOADER = "llamafactory/train/sft/workflow.py", "llamafactory/data/loader.py"
TRAIN_CALL = "trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)"


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


@pytest.fixture
def fork(checkout, tmp_path: Path) -> Path:
    """A copy of the newest release, to be changed."""
    shutil.copytree(checkout(max(PATCHES)) / "src", tmp_path / "fork" / "src")
    return tmp_path / "fork"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(fork: Path, name: str, old: str, new: str) -> None:
    path = fork / "src" / name
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize("layout", ["src", "."], ids=["checkout", "site-packages"])
@pytest.mark.parametrize("release", sorted(PATCHES))
def test_a_release_takes_its_patch_and_gives_it_back(checkout, tmp_path, capsys, release: str, layout: str) -> None:
    shutil.copytree(checkout(release) / "src" / "llamafactory", tmp_path / layout / "llamafactory")
    stock = content(tmp_path)

    def patch(action: str) -> str:
        assert main(["patch", action, str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert f"LLaMA-Factory {release}" in out
        return out

    assert f"The patch of {release} fits" in patch("check")
    assert "not in it; nothing to do" in patch("revert")
    assert content(tmp_path) == stock
    assert "has been applied" in patch("apply")
    patched = content(tmp_path)
    changed = [name for name in stock if patched[name] != stock[name]]
    assert len(changed) == 8 and patched.keys() == stock.keys()
    for name in changed:
        compile(patched[name], name, "exec")
    assert f"The patch of {release} is in it" in patch("check")
    assert "already; nothing to do" in patch("apply")
    assert content(tmp_path) == patched
    assert "has been taken out" in patch("revert")
    assert content(tmp_path) == stock


def test_the_diffs_are_small_and_add_the_same_lines() -> None:
    added = []
    for path in PATCHES.values():
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 140
        added.append([line for line in lines if line.startswith("+") and not line.startswith("+++")])
    assert all(lines == added[0] for lines in added)
    assert sum("attach_block(" in line for line in added[0]) == 5, "one for each stage"


# Training: with the release that is installed, whose transformers is installed too.


@pytest.fixture(scope="module")
def patched(checkout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to put on PYTHONPATH: the installed release with its patch."""
    release = metadata.version("llamafactory")
    if release not in PATCHES:
        pytest.skip(f"there is no patch for llamafactory {release}, which is installed")
    folder = tmp_path_factory.mktemp("patched")
    shutil.copytree(checkout(release) / "src", folder / "src")
    assert main(["patch", "apply", str(folder)]) == 0
    return folder / "src"


@pytest.fixture(scope="module")
def train(patched, tiny_text, data_dir, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple]:
    """(output folder, ended process) of two steps, hooked by the plugin, by the patch, or with both present."""
    folder = tmp_path_factory.mktemp("trained")
    ways = {
        "plugin": {},
        "patch": {"ODB_FACTORY_DISABLE": "1", "PYTHONPATH": str(patched)},
        "both": {"PYTHONPATH": str(patched)},
    }

    @functools.cache
    def train(way: str) -> tuple:
        block = {"token_budget": 256, "buffer_size": 24, "audit": True}
        config = training_config(tiny_text, data_dir, folder / way, max_steps=2, val_size=4, odb=block)
        config["per_device_train_batch_size"] = 4
        return folder / way, run_llamafactory(config, "odb.token_budget=768", env=ways[way])

    return train


@pytest.mark.versions
@pytest.mark.parametrize("way", ["patch", pytest.param("both", marks=pytest.mark.full_grid)])
def test_odb_attaches_once_and_trains_the_same_whichever_way(train, way: str) -> None:
    """Same groups, same losses, no preprocessing pass of the training rows; who hooked it in is in the log."""
    (plugin_dir, _), (output_dir, ended) = train("plugin"), train(way)
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert ended.stdout.count("online dynamic batching is on") == 1
    assert ("called by the patched workflow" in ended.stdout) == (way == "patch")
    assert "44 samples, 11 optimizer steps an epoch" in ended.stdout
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


def test_mistakes_are_named_in_the_words_of_the_plugin(patched, tiny_text, data_dir, tmp_path) -> None:
    """Before a model is loaded; what a stage cannot have among them."""
    from llamafactory.hparams import get_train_args

    config = training_config(tiny_text, data_dir, tmp_path / "out", odb={"token_budget": 1024})
    changes = [
        {"odb": {"token_budgte": 1024}},
        {"odb": {"token_budget": "many"}},
        {"odb": None},
        {"odb": 512},
        {"cutoff_len": "abc"},
        {"odb": {"token_budget": 1024, "loss_scaling": "sample"}, "use_liger_kernel": True, "torch_compile": True},
        {"packing": True},
        {"use_mca": True},
        {"ignore_pad_token_for_loss": False},
        {"stage": "pt", "packing": True},
        {"stage": "rm", "odb": {"token_budget": 1024, "row_multiple": 64}},
        {"stage": "ppo", "reward_model": "x", "reward_model_type": "full"},
    ]
    expected = []
    for change in changes:
        with pytest.raises(ValueError) as caught:
            get_train_args(config | change)
        expected.append([type(caught.value).__name__, str(caught.value)])
    code = (
        "import json, sys, torch, llamafactory\n"
        "from llamafactory.hparams import get_train_args\n"
        "config, changes = json.load(sys.stdin)\n"
        "said = []\n"
        "for change in changes:\n"
        "    try: said.append(repr(get_train_args(config | change)))\n"
        "    except ValueError as error: said.append([type(error).__name__, str(error)])\n"
        "print(json.dumps([llamafactory.__file__, said]))"
    )
    done = run_code(code, [config, changes], ODB_FACTORY_DISABLE="1", PYTHONPATH=str(patched))
    home, said = json.loads(done.stdout.splitlines()[-1])
    assert Path(home).is_relative_to(patched)
    assert said == expected


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


# Forks: what has changed around the hunks, and what is in the way of all of them.


def test_a_fork_with_other_neighbours_and_version_takes_it(fork, capsys) -> None:
    edit(fork, WORKFLOW, "    # Training\n", "    report_to_us(trainer)\n")
    edit(fork, WORKFLOW, "        trainer.save_model()\n", "        save_it_our_way(trainer)\n")
    edit(fork, LOADER, "\n\nlogger = ", "\n\n# ours\n" * 40 + "\nlogger = ")
    edit(fork, "llamafactory/extras/env.py", f'VERSION = "{max(PATCHES)}"', 'VERSION = "1.0.dev0"')
    before = content(fork)
    assert main(["patch", "apply", str(fork)]) == 0
    workflow = (fork / "src" / WORKFLOW).read_text()
    lines = [line.strip() for line in workflow.splitlines()]
    assert lines.index("attach_block(trainer, data_args.odb)") + 2 == lines.index(f"train_result = {TRAIN_CALL}")
    assert main(["patch", "revert", str(fork)]) == 0
    assert content(fork) == before


def test_a_hunk_without_its_place_is_shown_and_can_be_added_by_hand(fork, capsys) -> None:
    edit(fork, WORKFLOW, f"        train_result = {TRAIN_CALL}", "        train_result = our_loop(trainer)")
    before = content(fork)
    for action in ("check", "apply"):
        assert main(["patch", action, str(fork)]) == 1
        out = capsys.readouterr().out
        assert f"src/{WORKFLOW}, hunk 1: neither it nor its place was found" in out
        assert f"src/{LOADER}, hunk 2: fits" in out
        shown = out.split(f"\n\nsrc/{WORKFLOW}, hunk 1\n")[1]
        assert "+            attach_block(trainer, data_args.odb)\n" in shown and "read_args" not in shown
        assert content(fork) == before
    by_hand = "".join(f"{line[1:]}\n" for line in shown.splitlines() if line.startswith("+"))
    edit(fork, WORKFLOW, "        train_result = our", f"{by_hand}        train_result = our")
    assert main(["patch", "check", str(fork)]) == 0
    assert "is in it but for 9 of 10 hunks, which fit" in capsys.readouterr().out
    for action in ("apply", "check", "revert"):
        assert main(["patch", action, str(fork)]) == 0
    assert content(fork) == before


def test_two_places_for_one_hunk_are_refused(fork, capsys) -> None:
    path = fork / "src" / WORKFLOW
    text = path.read_text(encoding="utf-8")
    path.write_text(text + text[text.index("def run_sft(") :].replace("def run_sft(", "def run_ours("))
    before = content(fork)
    assert main(["patch", "apply", str(fork)]) == 1
    assert f"src/{WORKFLOW}, hunk 1: fits in more than one place" in capsys.readouterr().out
    assert content(fork) == before


def test_a_changed_patch_is_not_taken_out_in_part(fork, capsys) -> None:
    assert main(["patch", "apply", str(fork)]) == 0
    edit(fork, WORKFLOW, "attach_block(trainer, data_args.odb)", "attach_block(trainer, dict(data_args.odb))")
    before = content(fork)
    for action in ("check", "apply", "revert"):
        capsys.readouterr()
        assert main(["patch", action, str(fork)]) == 1
        out = capsys.readouterr().out
        assert f"src/{WORKFLOW}, hunk 1: neither" in out and f"src/{LOADER}, hunk 1: is in it" in out
        assert content(fork) == before


def test_a_failure_while_writing_leaves_the_tree_as_it_was(fork, capsys, monkeypatch) -> None:
    before, replace, calls = content(fork), os.replace, []

    def fail_at_the_third(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 3:
            raise PermissionError(13, "Permission denied", str(target))
        replace(source, target)

    monkeypatch.setattr(patch_fit.os, "replace", fail_at_the_third)
    assert main(["patch", "apply", str(fork)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(calls[2]) in line and "nothing has been changed" in line
    assert content(fork) == before


def test_a_path_without_llamafactory_and_a_missing_git_end_in_one_line(tmp_path, capsys, monkeypatch) -> None:
    assert main(["patch", "check", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in line and "name a checkout" in line
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["patch", "check", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "git is not on PATH" in line and str(next(iter(PATCHES.values())).parent) in line


def test_git_settings_and_repositories_of_the_user_do_not_matter(fork, monkeypatch) -> None:
    """Also inside a repository, and with a configuration that would write other line ends."""
    subprocess.run(["git", "init", "--quiet", str(fork)], check=True)
    for config in (fork / "config", fork / ".git" / "config"):
        with config.open("a") as lines:
            lines.write("[core]\n\tautocrlf = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(fork / "config"))
    monkeypatch.setenv("GIT_DIR", str(fork / ".git"))
    monkeypatch.setenv("TMPDIR", str(fork))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = content(fork / "src")
    assert main(["patch", "apply", str(fork)]) == 0
    after = content(fork / "src")
    changed = [name for name in before if after[name] != before[name]]
    assert len(changed) == 8 and not any(b"\r" in after[name] for name in changed)


def test_the_diffs_are_installed_with_the_package(tmp_path) -> None:
    """What setuptools would put into a wheel is enough for the command."""
    if find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed, which builds the package")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    shutil.copytree(REPOSITORY / "odb_factory", tmp_path / "odb_factory")
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "build_py", "--build-lib", "built"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    code = "from odb_factory.cli.patch import PATCHES; print(*PATCHES.values())"
    found = run_code(code, None, PYTHONPATH=str(tmp_path / "built")).stdout.split()
    home = tmp_path / "built" / "odb_factory" / "patches"
    assert sorted(found) == sorted(str(home / path.name) for path in PATCHES.values())
