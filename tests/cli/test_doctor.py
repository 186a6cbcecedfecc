"""`odb-factory doctor` tells the truth about this environment and says how to fix what it finds."""

from __future__ import annotations

import dataclasses
import json
import os
from subprocess import CompletedProcess

import pytest
import torch

from odb_factory.cli.doctor import SUPPORTED, Facts, Probe, checks_of

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def doctors(odb_factory, tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompletedProcess]:
    """The real command, side by side, in environments of different health."""
    other = tmp_path_factory.mktemp("other") / "online_dynamic_batching-0.1.2.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: online-dynamic-batching\nVersion: 0.1.2\n")
    # A checkout of LLaMA-Factory holds folders such as `data`; a file named `torch.py` makes the point.
    checkout = tmp_path_factory.mktemp("checkout")
    (checkout / "torch.py").write_text("raise RuntimeError('the wrong torch')")
    path = str(other.parent), os.environ.get("PYTHONPATH")
    started = {
        "sound": odb_factory("doctor", cwd=checkout, PYTHONPATH=os.pathsep.join(filter(None, path))),
        "json": odb_factory("doctor", "--json"),
        "autoload off": odb_factory("doctor", TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
        "disabled": odb_factory("doctor", ODB_FACTORY_DISABLE="1"),
    }
    return {name: command.end() for name, command in started.items()}


def test_sound_environment_is_ready(doctors: dict[str, CompletedProcess]) -> None:
    """Also where the working folder has files named like packages."""
    ended = doctors["sound"]
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[-1].startswith("Ready:")
    assert "ok       `import torch` activates odb_factory" in lines
    assert "ok       all 8 functions of LLaMA-Factory that odb_factory needs are hooked" in lines
    if not torch.cuda.is_available():
        kernel = "sdpa on runs of samples of equal length, because the device is cpu, not CUDA"
        assert f"ok       attention of flat rows (sdpa models) on cpu: {kernel}" in lines
    for package in SUPPORTED:
        assert any(line.startswith(f"ok       {package} ") for line in lines), package


def test_a_second_way_of_batching_is_a_warning(doctors: dict[str, CompletedProcess]) -> None:
    assert "warning  online-dynamic-batching 0.1.2 is installed" in doctors["sound"].stdout


def test_the_checks_as_json(doctors: dict[str, CompletedProcess]) -> None:
    checks = json.loads(doctors["json"].stdout)
    assert doctors["json"].returncode == 0 and all(check["status"] == "ok" for check in checks), checks


def test_a_switch_is_a_problem_with_its_fix(doctors: dict[str, CompletedProcess]) -> None:
    """The seams are looked at all the same, and no other command is promised where odb is switched off."""
    off, disabled = doctors["autoload off"], doctors["disabled"]
    assert off.returncode == disabled.returncode == 1
    assert "problem  TORCH_DEVICE_BACKEND_AUTOLOAD=0" in off.stdout
    assert "-> unset TORCH_DEVICE_BACKEND_AUTOLOAD" in off.stdout
    assert "are hooked" in off.stdout
    verdict = off.stdout.splitlines()[-1]
    assert verdict.startswith("Not ready: 1 problem") and "odb-factory train my.yaml" in verdict
    assert "problem  ODB_FACTORY_DISABLE=1" in disabled.stdout
    assert disabled.stdout.splitlines()[-1] == "Not ready: 1 problem to fix."


SOUND = Facts(
    versions={name: {"llamafactory": "0.9.5", "torch": "2.12.1"}.get(name, "99") for name in SUPPORTED},
    probe=Probe(active=True, hooked=["llamafactory.hparams.parser.get_train_args"]),
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"versions": SOUND.versions | {"llamafactory": "0.9.3"}}, "llamafactory 0.9.3 is not supported"),
        ({"versions": SOUND.versions | {"llamafactory": "1.0"}}, "llamafactory 1.0 is not supported"),
        ({"versions": SOUND.versions | {"llamafactory": "0.9.7"}}, "llamafactory 0.9.7 is newer than what"),
        ({"versions": SOUND.versions | {"datasets": None}}, "datasets is not installed"),
        ({"versions": SOUND.versions | {"transformers": "4.51.3"}}, "transformers 4.51.3 is not supported"),
        ({"entry_point": None, "probe": Probe(hooked=["x"])}, "is not declared"),
        ({"entry_point": "odb_factory.old:go", "probe": Probe(hooked=["x"])}, "names odb_factory.old:go"),
        ({"probe": Probe(hooked=["x"])}, "torch does not call the entry point"),
        ({"probe": Probe(crash="exit code -11: no message")}, "exit code -11"),
        ({"probe": Probe(errors={"torch": "OSError: libfoo"})}, "torch cannot be imported: OSError: libfoo"),
        ({"probe": Probe(active=True, errors={"llamafactory.data.loader": "ImportError: x"})}, "ImportError: x"),
        ({"probe": Probe(active=True, hooked=["x"], unhooked=["llamafactory.y"])}, "llamafactory.y"),
        (
            {"probe": Probe(active=True, hooked=["x"], errors={"torchaudio": "OSError: y"})},
            "torchaudio cannot be loaded",
        ),
    ],
)
def test_every_defect_is_named_once_with_a_fix(change: dict, expected: str | None) -> None:
    problems = [c for c in checks_of(dataclasses.replace(SOUND, **change)) if c.status in ("warning", "problem")]
    assert len(problems) == (expected is not None)
    for check in problems:
        assert expected in check.what
        assert check.fix
