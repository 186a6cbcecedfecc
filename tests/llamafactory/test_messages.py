"""A user's mistake ends in one line without a traceback, before the launch or on each rank under torchrun.

A refused training changes no file of its output folder, and is refused before a model is loaded if possible.

"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from llamafactory.hparams import FinetuningArguments, get_ray_args, get_train_args
from llamafactory.train.tuner import run_exp
from support import run_llamafactory, training_config
from tqdm import tqdm

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
        ("token_budget: 1\n", (), "token_budget: "),
        ("odb_token_budget: 1\n", (), "odb_token_budget: "),
        # Values that no YAML reader can load
        ("odb:\n  token_budget: !!set {1024}\n", (), "odb.token_budget|.*cannot be read"),
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
    bar = tqdm(total=3)
    assert end_by(ODBError("below the bar")).endswith("\n[odb] below the bar\n") and bar.disable
    shown = end_by(ValueError("of another library"))
    assert shown.startswith("Traceback") and "[odb]" not in shown, "not an error of odb"
    monkeypatch.setenv("ODB_FACTORY_TRACEBACK", "1")
    assert "Traceback" in end_by(ODBError("two\nlines"))
    uncaught.uninstall()
    assert sys.excepthook is sys.__excepthook__


FILL = {"token_budget": 256, "global_batch_size": "fill"}
FLAT = {"token_budget": 256, "layout": "flat"}
BEFORE_A_MODEL: list[tuple[dict[str, Any], str]] = [
    ({"odb": {"token_budget": "auto"}}, "odb.token_budget: 'auto'"),
    ({"odb": {"token_bugdet": 256}}, "odb.token_bugdet: 256"),
    ({"packing": True}, "packing: True"),
    ({"streaming": True, "stage": "kto", "max_steps": 1}, "streaming: True"),
    ({"streaming": True, "tokenized_path": "tokens", "max_steps": 1}, "streaming: True"),
    ({"shift_attn": True, "odb": FLAT}, "shift_attn: True"),
    ({"use_mca": True}, "use_mca: True"),
    ({"use_unsloth": True}, "use_unsloth: True"),
    ({"use_kt": True}, "use_kt: True"),
    ({"use_hyper_parallel": True}, "use_hyper_parallel: True"),
    ({"use_galore": True, "galore_layerwise": True}, "galore_layerwise: True"),
    ({"use_badam": True, "badam_mode": "ratio"}, "badam_mode: 'ratio'"),
    ({"ignore_pad_token_for_loss": False}, "ignore_pad_token_for_loss: False"),
    ({"stage": "ppo", "reward_model": "x", "reward_model_type": "full"}, "stage: 'ppo'"),
    ({"stage": "dpo", "pref_bco_weight": 0.5}, "pref_bco_weight: 0.5"),
    ({"mixture_of_depths": "convert"}, "mixture_of_depths: 'convert'"),
    ({"dataloader_num_workers": "2"}, "dataloader_num_workers: '2'"),
    ({"odb": None}, "odb: None"),
    # Values of a wrong type
    ({"cutoff_len": "abc"}, "cutoff_len: 'abc'"),
    ({"gradient_accumulation_steps": [2]}, r"gradient_accumulation_steps: \[2\]"),
    ({"resume_from_checkpoint": "no/such"}, "resume_from_checkpoint: 'no/such'"),
]
"""Changes to a YAML, and a pattern of the start of the message."""
WITH_A_MODEL: list[tuple[dict[str, Any], str]] = [
    ({"odb": {"token_budget": 16, "overlong": "error"}}, ".*overlong"),
    ({"odb": FILL | {"lr_scale": "sqrt", "buffer_size": 8}, "disable_shuffling": True}, "odb.lr_scale: 'sqrt'"),
    (
        # The patches of the fake image in a micro-batch without images
        {"template": "qwen3_vl", "dataset": "pictures", "odb": {"token_budget": 256, "max_patches": 1}},
        r"odb.max_patches: 1 is less than the \d+ patches",
    ),
    # In stock the loss of these optimizer steps is 0.
    ({"cutoff_len": 1}, ".*48 unsupervised"),
    ({"resume_from_checkpoint": "OUT/checkpoint-3"}, ".*checkpoint-3"),
]


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    """The output folder of an earlier training."""
    folder = tmp_path / "out"
    (folder / "checkpoint-3").mkdir(parents=True)
    names = ("odb_audit_rank0.jsonl", "odb_summary.json", "trainer_state.json")
    for name in (*names, "model.safetensors", "checkpoint-3/trainer_state.json"):
        (folder / name).write_text(f"{name} of the run before\n")
        os.utime(folder / name, (1_000_000_000, 1_000_000_000))
    return folder


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def refused(model: Path, data_dir: Path, output_dir: Path, changes: dict[str, Any], start: str) -> None:
    if "use_hyper_parallel" in changes and not hasattr(FinetuningArguments, "use_hyper_parallel"):
        pytest.skip("this release has no use_hyper_parallel")
    config = training_config(model, data_dir, output_dir, template="qwen", odb={"token_budget": 256, "audit": True})
    if "resume_from_checkpoint" in changes:
        changes = {"resume_from_checkpoint": changes["resume_from_checkpoint"].replace("OUT", str(output_dir))}
    before = files_of(output_dir)
    with pytest.raises(ODBError) as caught:
        run_exp(config | changes)
    message = str(caught.value)
    assert re.match(start, message) and "\n" not in message, message
    assert files_of(output_dir) == before


def ids(value: Any) -> str:
    return "-".join(value) if isinstance(value, dict) else value


@pytest.mark.parametrize(("changes", "start"), BEFORE_A_MODEL, ids=ids)
def test_before_a_model_is_loaded(tiny_text: Path, data_dir, output_dir, tmp_path, changes, start) -> None:
    """The model has no weights: loading it would be another error."""
    model = tmp_path / "model"
    shutil.copytree(tiny_text, model, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    refused(model, data_dir, output_dir, changes, start)
    assert hooks._active is None


@pytest.mark.parametrize(("changes", "start"), WITH_A_MODEL, ids=ids)
def test_with_a_model(tiny_text: Path, tiny_vl: Path, data_dir, output_dir, changes, start) -> None:
    refused(tiny_vl if "template" in changes else tiny_text, data_dir, output_dir, changes, start)
