"""A user's mistake ends in one line without a traceback: before the launch, or on each rank under torchrun."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from llamafactory.hparams import get_ray_args, get_train_args
from llamafactory.train.tuner import run_exp
from support import run_llamafactory, training_config

from odb_factory.cli.plan import read
from odb_factory.errors import ConfigError, ODBError
from odb_factory.llamafactory import block, hooks, uncaught
from odb_factory.llamafactory.hooks import launch
from odb_factory.llamafactory.hooks import read as read_yaml

BLOCK = {"token_budget": 1024}


@pytest.fixture
def config(tiny_text: Path, data_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return training_config(tiny_text, data_dir, tmp_path / "out", odb=BLOCK)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`command("train", text)` makes `llamafactory-cli train my.yaml` the command line; the excepthook is restored."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(uncaught, "_before", None)  # a training in this process may have installed the hook

    def command(name: str, text: str, *overrides: str) -> Path:
        path = tmp_path / "my.yaml"
        path.write_text(text, encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["llamafactory-cli", name, str(path), *overrides])
        return path

    return command


# Before the launch


ODB = "odb:\n  token_budget: 1\n"
LONG = "9" * 5000


@pytest.mark.parametrize(
    ("text", "overrides", "start"),
    [
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
        (ODB + "do_train: true\npacking: true\nuse_mca: true\n", (), "use_mca: True .* packing: True "),
        ("obd:\n  token_budget: 1\n", (), "obd: "),
        ("seed: 1\n", ("obd.token_budget=1",), "obd: "),
        # Flat keys, and keys of forks of LLaMA-Factory
        ("odb.token_budget: 1\n", (), "odb.token_budget: "),
        ("enable_odb: true\nodb_token_budget: 1\n", (), "enable_odb: "),
        ("token_budget: 1\n", (), "token_budget: "),
        ("odb_token_budget: 1\n", (), "odb_token_budget: "),
        # Values that no YAML reader can load
        ("odb:\n  token_budget: !!set {1024}\n", (), "odb.token_budget|.*cannot be read"),
        (f"odb:\n  token_budget: {LONG}\n", (), ".*my.yaml: .*digits"),
        (ODB + "  ~: 2\n", (), ".*my.yaml: .*Key"),
        (ODB + "x: \0\n", (), ".*my.yaml: "),
        (f"odb:\n  token_budget: {'[' * 2000}{']' * 2000}\n", (), ".*my.yaml: "),
        (f"odb:\n  token_budget: '{LONG}'\n", (), "odb.token_budget: "),
    ],
)
def test_mistakes_in_the_yaml_are_reported_before_the_launch(
    command: Callable[..., Path], text: str, overrides: tuple[str, ...], start: str
) -> None:
    """start: a pattern of the start of the message."""
    with pytest.raises(ConfigError) as caught:
        block.checked(read_yaml(str(command("train", text)), overrides=overrides))
    message = str(caught.value)
    assert re.match(start, message) and "\n" not in message, message


@pytest.mark.parametrize(
    ("module", "name", "text", "overrides", "start"),
    [
        ("llamafactory.launcher", "train", ODB, ["odb.overlong=sometimes"], "odb.overlong: 'sometimes'"),
        ("llamafactory.v1.launcher", "merge", "model: x\n", ["odb.token_budget=1"], "odb: `llamafactory-cli merge` "),
        *(
            (module, name, ODB, [], f"odb: `llamafactory-cli {name}` ")
            for module, name in (
                *(("llamafactory.launcher", name) for name in ("chat", "export", "api")),
                *(("llamafactory.v1.launcher", name) for name in ("merge", "dpo", "rm")),
            )
        ),
    ],
)
def test_launchers_refuse_a_block(command, monkeypatch, module, name, text, overrides, start) -> None:
    """With FORCE_TORCHRUN torchrun is not started."""
    for variable in ("USE_V1",) if "v1" in module else ("FORCE_TORCHRUN",):
        monkeypatch.setenv(variable, "1")
    command(name, text, *overrides)
    with pytest.raises(ConfigError, match=f"^{start}"):
        importlib.import_module(module).launch()


def test_the_driver_of_ray_refuses_a_block_that_cannot_work(config, monkeypatch) -> None:
    monkeypatch.setenv("USE_RAY", "1")
    monkeypatch.setenv("USE_MEGATRON_BRIDGE", "1")
    with pytest.raises(ConfigError, match="USE_MEGATRON_BRIDGE: '1' selects"):
        run_exp(config)
    monkeypatch.delenv("USE_MEGATRON_BRIDGE")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with pytest.raises(ConfigError, match="USE_RAY: Ray is not installed|AUTOLOAD: '0' keeps odb out of Ray's workers"):
        run_exp(config)


def test_without_a_block_the_launcher_is_stocks(command: Callable[..., Path], monkeypatch) -> None:
    path, before = command("train", "seed: 010\n# odb:\n"), sys.excepthook
    for argv in (["train", str(path)], ["train", "none.yaml"], ["train"], ["version"], []):
        monkeypatch.setattr(sys, "argv", ["llamafactory-cli", *argv])
        assert launch(lambda: "stock") == "stock"
    assert sys.excepthook is before


# The arguments that LLaMA-Factory gets


def test_a_block_is_kept_for_one_training_only(config: dict[str, Any]) -> None:
    changes = {"per_device_train_batch_size": 4, "dataloader_drop_last": True, "learning_rate": 1, "save_steps": 10}
    parsed = get_train_args(config | changes | {"eval_strategy": "no", "report_to": ["none"]})
    assert parsed[2].per_device_train_batch_size == 4, "optimizer steps of any size are taken"
    assert hooks._active is not None and hooks._active.keeps and hooks._active.token_budget == 1024
    get_train_args({key: value for key, value in config.items() if key != "odb"})
    assert hooks._active is None


def test_an_override_takes_the_block_out(config, command: Callable[..., Path], monkeypatch) -> None:
    path = command("train", yaml.safe_dump(config), "odb=null")
    get_train_args(dict(config))
    assert hooks._active is not None
    assert launch(lambda: "stock") == "stock"
    assert "odb" not in read(path, ["odb=null"]).keys
    emptied = config | {"odb": None}
    get_ray_args(emptied)  # the driver hands the same arguments to its workers
    assert "odb" not in emptied
    monkeypatch.setattr(sys, "argv", ["launcher.py", str(path), "odb=null"])
    get_train_args()
    assert hooks._active is None


def test_documents_stay_whole(config, caplog) -> None:
    args = config | {"stage": "pt"}
    assert get_train_args(args)[1].packing is False and "packing" not in args
    assert sum("documents stay whole" in message for message in caplog.messages) == 1
    del args["odb"]
    assert get_train_args(args)[1].packing is True, "stock's default without a block"


# How a process ends


def test_an_error_of_llamafactory_keeps_its_traceback(config: dict[str, Any]) -> None:
    ended = run_llamafactory(config, "dataset=nope")
    assert ended.returncode == 1 and "Traceback" in ended.stdout
    assert "nope" in ended.stdout.splitlines()[-1]
    assert not any("[odb]" in line and "nope" in line for line in ended.stdout.splitlines())


@pytest.mark.versions
def test_each_rank_ends_in_one_line_and_torchrun_adds_none(config: dict[str, Any]) -> None:
    """A mistake that only the ranks find, in their parsed arguments."""
    two_ranks = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}
    ended = run_llamafactory(config | {"ddp_backend": "gloo"}, "auto_find_batch_size=true", env=two_ranks)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stdout and "torch.distributed.elastic" not in ended.stdout
    lines = ended.stdout.splitlines()
    ours = [line for line in lines if "auto_find_batch_size: True does not go with odb" in line]
    assert len(set(ours)) == len(ours) and 1 <= len(ours) <= 2  # torchrun may end the second rank before it prints
    assert all(line.startswith("[rank") and ": [odb] " in line for line in ours)
    assert lines[-1] in ours


def test_which_errors_are_shortened(command, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)

    def end_by(error: Exception) -> str:
        try:
            raise error
        except Exception:
            sys.excepthook(*sys.exc_info())
        return capsys.readouterr().err

    assert "Traceback" in end_by(ODBError("two\nlines")), "no run has had a block"
    uncaught.install()
    uncaught.install()
    assert end_by(ODBError("two\nlines")) == "[odb] two lines\n"
    shown = end_by(ValueError("of another library"))
    assert shown.startswith("Traceback") and "[odb]" not in shown, "not an error of odb"
    monkeypatch.setenv("ODB_FACTORY_TRACEBACK", "1")
    assert "Traceback" in end_by(ODBError("two\nlines"))
    uncaught.uninstall()
    assert sys.excepthook is sys.__excepthook__


def test_a_process_that_another_rank_ends_leaves_no_folder(tmp_path: Path) -> None:
    """The folder in which multiprocessing keeps its sockets."""
    code = (
        "import multiprocessing.util; from odb_factory.llamafactory.uncaught import end_process\n"
        "multiprocessing.util.get_temp_dir(); end_process('rank 1 has ended')"
    )
    env = os.environ | {"TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "[odb] rank 1 has ended\n")
    assert not list(tmp_path.iterdir())
