"""`odb-factory doctor` in real environments: sound, switched off, with old or broken packages."""

from __future__ import annotations

import json
import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest

pytestmark = pytest.mark.timeout(300)

OTHER = ("online_dynamic_batching-0.1.2.dist-info/METADATA", "Name: online-dynamic-batching\nVersion: 0.1.2\n")
OLD = ("llamafactory-0.9.3.dist-info/METADATA", "Name: llamafactory\nVersion: 0.9.3\n")
AUDIO, TORCH = ("torchaudio.py", "raise OSError('libaudio')"), ("torch.py", "raise RuntimeError('the wrong torch')")
AUTOLOAD, DISABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD", "ODB_FACTORY_DISABLE"

CASES = {
    # files on sys.path, environment, exit code, status of the checks that contain a word
    "sound": ((OTHER,), {}, 0, {"online-dynamic-batching": "note", "import torch": "ok", "are hooked": "ok"}),
    "autoload off": ((OLD,), {AUTOLOAD: "0"}, 1, {AUTOLOAD: "problem", "0.9.3": "problem", "are hooked": "ok"}),
    "broken media": ((AUDIO,), {}, 1, {"torchaudio does not fit": "note", "be imported: llamafactory": "problem"}),
    "disabled": ((), {DISABLE: "1"}, 1, {DISABLE: "problem", "are hooked": "ok"}),
    "broken torch": ((TORCH,), {}, 1, {"the wrong torch": "problem"}),
}


@pytest.fixture(scope="module")
def doctors(odb_factory, tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompletedProcess]:
    """Run the command in all environments at once, in a working folder with a file that is named like a package."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "torch.py").write_text(TORCH[1])
    started = {}
    for name, (files, environment, _, _) in CASES.items():
        packages = tmp_path_factory.mktemp("packages")
        for file, text in files:
            (packages / file).parent.mkdir(exist_ok=True)
            (packages / file).write_text(text)
        path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
        started[name] = odb_factory("doctor", "--json", cwd=folder, PYTHONPATH=path, **environment)
    return {name: command.end() for name, command in started.items()}


@pytest.mark.parametrize("case", CASES)
def test_every_defect_is_named_with_a_fix(doctors: dict[str, CompletedProcess], case: str) -> None:
    _, _, code, expected = CASES[case]
    ended = doctors[case]
    checks = json.loads(ended.stdout)
    assert ended.returncode == code, checks
    for word, status in expected.items():
        assert [check["status"] for check in checks if word in check["what"]] == [status], (word, checks)
    assert {check["status"] for check in checks} <= {"ok", *expected.values()}, checks
    assert all(check["fix"] for check in checks if check["status"] == "problem")


def test_text_has_a_line_per_check_and_a_verdict(odb_factory, tmp_path: Path) -> None:
    lines = odb_factory("doctor", cwd=tmp_path).end().stdout.splitlines()
    assert any("kernel" in line or "sdpa" in line for line in lines) and "ready" in lines[-1]
