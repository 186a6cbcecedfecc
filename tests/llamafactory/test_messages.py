"""A user's mistake ends in one line without a traceback: by the command line, under torchrun, on every rank once."""

from __future__ import annotations

import copy
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from llamafactory.hparams import get_ray_args, get_train_args
from support import run_llamafactory, training_config

from odb_factory.cli.plan import read
from odb_factory.errors import ConfigError, ODBError
from odb_factory.llamafactory import block, hooks, uncaught
from odb_factory.llamafactory.launch import launch
from odb_factory.llamafactory.launch import read as read_yaml

BLOCK = {"token_budget": 1024}
TWO_RANKS = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}


@pytest.fixture
def config(tiny_text: Path, data_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return training_config(tiny_text, data_dir, tmp_path / "out", odb=BLOCK)


@pytest.fixture
def hook_undone(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = sys.excepthook
    monkeypatch.setattr(uncaught, "_before", None)  # a training in this process may have installed it
    yield
    uncaught.uninstall()
    sys.excepthook = before


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    path = tmp_path / "my.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        block.checked(read_yaml(str(path), overrides=overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_command_line_ends_in_one_line(config: dict[str, Any]) -> None:
    """Under torchrun as well: it is not even started."""
    done = run_llamafactory(config, "odb.overlong=sometimes", env=TWO_RANKS)
    assert done.returncode == 1
    assert done.stdout == "[odb] odb.overlong: 'sometimes' is not one of singleton, drop, error.\n"


def test_a_misspelt_block_is_noticed_where_the_launcher_cannot_see_it(config: dict[str, Any]) -> None:
    block = config.pop("odb")
    with pytest.raises(ConfigError, match="^obd: there is no such key; write a block `odb:`"):
        get_train_args(config | {"obd": block})


def test_an_override_takes_the_block_out(config, tmp_path, monkeypatch) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    get_train_args(dict(config))
    assert hooks._active is not None
    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", "train", str(path), "odb=null"])
    assert launch(lambda: "stock") == "stock"
    assert "odb" not in read(path, ["odb=null"]).keys
    given = config | {"odb": None}
    get_ray_args(given)  # the driver hands the same arguments to its workers
    assert "odb" not in given
    monkeypatch.setattr(sys, "argv", ["launcher.py", str(path), "odb=null"])
    get_train_args()
    assert hooks._active is None
    monkeypatch.setattr(sys, "argv", ["launcher.py", str(path)])
    with pytest.raises(ConfigError, match="^odb: None is not a block of keys"):
        get_train_args(config | {"odb": None})


def test_texts_that_llamafactory_takes_are_no_mistakes(config: dict[str, Any]) -> None:
    get_train_args(config | {"eval_strategy": "no", "save_steps": 10, "learning_rate": 1, "report_to": ["none"]})


def test_a_mistake_that_llamafactory_finds_is_shown_as_ever(config: dict[str, Any]) -> None:
    """With its traceback and not as one of ours."""
    done = run_llamafactory(config, "dataset=nope")
    assert done.returncode == 1 and "Traceback" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert "nope" in last and not any("[odb]" in line and "nope" in line for line in done.stdout.splitlines())


def test_each_rank_ends_in_one_line_and_torchrun_adds_none(config: dict[str, Any]) -> None:
    """What is known in the ranks only: here by the training arguments that they have made."""
    done = run_llamafactory(config | {"ddp_backend": "gloo"}, "auto_find_batch_size=true", env=TWO_RANKS)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    assert "torch.distributed.elastic" not in done.stdout
    lines = done.stdout.splitlines()
    ours = [line for line in lines if "auto_find_batch_size: True does not go with odb" in line]
    assert len(set(ours)) == len(ours) and 1 <= len(ours) <= 2  # torchrun may end the second one before it speaks
    assert all(line.startswith("[rank") and ": [odb] " in line for line in ours)
    assert lines[-1] in ours


ODB = "odb:\n  token_budget: 1\n"
LONG = "9" * 5000


@pytest.mark.parametrize(
    ("text", "overrides", "start"),
    [
        ("odb:\n  token_bugdet: 1\n", (), "odb.token_bugdet: 1 "),
        (ODB + "  rehears: false\n  joins: true\n", (), "odb.rehears: False .* odb.joins: True "),
        ("odb:\n  join: true\n  join: false\n", (), ".*my.yaml: .*line 3"),
        ("odb:\n\ttoken_budget: 1\n", (), ".*my.yaml: .*line 2"),
        (ODB + "seed: 1\nodb:\n  token_budget: 2\n", (), ".*my.yaml: .*line 4"),
        ("seed: 1\nodb: {token_budget: 1", (), ".*my.yaml: .*line 2"),
        (ODB, ("odb.token_budget",), "odb.token_budget: "),
        (ODB, ("odb={token_budget: [",), ".*odb={token_budget: .*: "),
        ("seed: 1\n", ("odb={token_budget:100}",), "odb.token_budget:100: "),
        (ODB, ("--odb.token_budget=2",), "--odb: "),
        (ODB + "overlong: drop\n", (), "overlong: 'drop' "),
        ("odb:\ntoken_budget: 1\n", (), "token_budget: "),
        (ODB + "dataloader_num_workers: -1\n", (), "dataloader_num_workers: -1 "),
        (ODB + "resume_from_checkpoint: 5\n", (), "resume_from_checkpoint: 5 "),
        (ODB + "resume_from_checkpoint: true\noutput_dir: no/pe\n", (), "resume_from_checkpoint: True .*no/pe"),
        (ODB + "do_train: true\npacking: true\n", (), "packing: True "),
        (ODB + "do_train: true\npacking: true\nuse_mca: true\n", (), "use_mca: True .* packing: True "),
        ("obd:\n  token_budget: 1\n", (), "obd: "),
        ("seed: 1\n", ("obd.token_budget=1",), "obd: "),
        # As flat keys, and as forks of LLaMA-Factory have them
        ("odb.token_budget: 1\n", (), "odb.token_budget: "),
        ("enable_odb: true\nodb_token_budget: 1\n", (), "enable_odb: "),
        ("token_budget: 1\n", (), "token_budget: "),
        ("odb_token_budget: 1\n", (), "odb_token_budget: "),
        # What no YAML reader makes a number, a text or a list of
        ("odb:\n  token_budget: !!set {1024}\n", (), "odb.token_budget|.*cannot be read"),
        (f"odb:\n  token_budget: {LONG}\n", (), ".*my.yaml: .*digits"),
        (ODB + "  ~: 2\n", (), ".*my.yaml: .*Key"),
        (ODB + "x: \0\n", (), ".*my.yaml: "),
        (f"odb:\n  token_budget: {'[' * 2000}{']' * 2000}\n", (), ".*my.yaml: "),
        (f"odb:\n  token_budget: '{LONG}'\n", (), "odb.token_budget: "),
        (ODB + "model_name_or_path: /no/pe\n", (), "model_name_or_path: '/no/pe' "),
        (ODB + "model_name_or_path: a/b/c\n", (), "model_name_or_path: 'a/b/c' "),
    ],
)
def test_what_the_yaml_shows_is_said_before_the_launch(
    tmp_path: Path, text: str, overrides: tuple[str, ...], start: str
) -> None:
    """start: a pattern of the message's first words."""
    assert re.match(start, message := refusal(tmp_path, text, *overrides)), message


@pytest.mark.parametrize("variable", ["USE_MCA", "USE_MEGATRON_BRIDGE"])
def test_other_backends_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setattr(os, "environ", copy.deepcopy(os.environ))  # as `datasets.map` with several processes leaves it
    monkeypatch.setenv(variable, "1")
    assert refusal(tmp_path, ODB).startswith(f"{variable}: '1' ")


def test_what_keeps_ray_from_training_is_said_by_its_driver(config, monkeypatch) -> None:
    from llamafactory.train.tuner import run_exp

    monkeypatch.setenv("USE_RAY", "1")
    monkeypatch.setenv("USE_MEGATRON_BRIDGE", "1")
    with pytest.raises(ConfigError, match="USE_MEGATRON_BRIDGE: '1' selects"):
        run_exp(config)
    monkeypatch.delenv("USE_MEGATRON_BRIDGE")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with pytest.raises(ConfigError, match="USE_RAY: Ray is not installed|AUTOLOAD: '0' keeps odb out of Ray's workers"):
        run_exp(config)


@pytest.mark.parametrize(
    ("module", "command", "overrides"),
    [
        ("llamafactory.v1.launcher", "merge", []),
        ("llamafactory.v1.launcher", "merge", ["odb.token_budget=1"]),
        *(("llamafactory.launcher", name, []) for name in ("chat", "export", "api")),
    ],
)
def test_launchers_that_do_not_train(tmp_path, monkeypatch, hook_undone, module, command, overrides) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("model: x\n" + ("" if overrides else ODB), encoding="utf-8")
    if "v1" in module:
        monkeypatch.setenv("USE_V1", "1")
    monkeypatch.setattr(sys, "argv", ["llamafactory-cli", command, str(path), *overrides])
    with pytest.raises(ConfigError, match=f"^odb: `llamafactory-cli {command}` "):
        importlib.import_module(module).launch()


def test_without_a_block_the_launcher_is_stocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("seed: 010\n# odb:\n", encoding="utf-8")
    before = sys.excepthook
    for argv in (["train", str(path)], ["train", str(tmp_path / "none.yaml")], ["train"], ["version"], []):
        monkeypatch.setattr(sys, "argv", ["llamafactory-cli", *argv])
        assert launch(lambda: "stock") == "stock"
    assert sys.excepthook is before


def test_which_errors_are_shortened(capsys, monkeypatch, hook_undone) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)

    def end_by(error: Exception) -> str:
        try:
            raise error
        except Exception:
            sys.excepthook(*sys.exc_info())
        return capsys.readouterr().err

    assert "Traceback" in end_by(ODBError("two\nlines")), "not before a block has been seen"
    uncaught.install()
    uncaught.install()
    assert end_by(ODBError("two\nlines")) == "[odb] two lines\n"
    shown = end_by(ValueError("of another library"))
    assert shown.startswith("Traceback") and "[odb]" not in shown, "it would look like one of ours"
    assert end_by(ODBError("two\nlines")) == "[odb] two lines\n"
    monkeypatch.setenv("ODB_FACTORY_TRACEBACK", "1")
    assert "Traceback" in end_by(ODBError("two\nlines"))
    hooks.uncaught.uninstall()
    assert sys.excepthook is sys.__excepthook__


def test_a_process_that_another_rank_ends_leaves_no_folder(tmp_path: Path) -> None:
    """In which multiprocessing keeps its sockets."""
    code = (
        "import multiprocessing.util; from odb_factory.llamafactory.uncaught import end_process\n"
        "multiprocessing.util.get_temp_dir(); end_process('rank 1 has ended')"
    )
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "[odb] rank 1 has ended\n")
    assert not list(tmp_path.iterdir())
