"""A type checker sees the types of the package, installed by `pip` from a folder (editable) and as a wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="mypy is not installed: pip install mypy")

ROOT = Path(__file__).parents[1]
LIMIT_S = 1200
RIGHT = """
import torch
from torch import Tensor
from transformers import Trainer

import odb_factory
from odb_factory import Cost, ODBDataLoader, ODBStepInfo, apply_odb, enable_odb, pop_step_info


def collate(items: list[list[int]]) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor(items)}


class Mine(ODBDataLoader[dict[str, Tensor]]):
    pass


with ODBDataLoader([[1, 2]], batch_size=4, token_budget=8192, collate_fn=collate, cost_fn=len) as loader:
    for batch in loader:
        tokens: Tensor = batch["input_ids"]
        info: ODBStepInfo = pop_step_info(batch)
        samples: int = info.samples_all_ranks
    steps: int = loader.num_optimizer_steps or loader.estimate_optimizer_steps()


def train(trainer: Trainer, dataloader: torch.utils.data.DataLoader[Tensor]) -> Cost:
    enable_odb(trainer, token_budget="auto", loss_scaling="stock")
    with apply_odb(dataloader, token_budget=8192) as handle:
        handle.set_epoch(1)
    print(odb_factory.__version__)
    return Cost(tokens=3, units=1)
"""
WRONG = """
import odb_factory
from odb_factory import ODBDataLoader, enable_odb, pop_step_info

loader = ODBDataLoader([], token_budgett=8192, collate_fn=str)  # call-arg
loader.set_epochs(1)  # attr-defined
pop_step_info({}).all_samples_this_step  # attr-defined
enable_odb(None, token_budget="8k")  # arg-type
odb_factory.scale_loss  # attr-defined
"""


def installed(folder: Path, *options: str) -> Path:
    """The interpreter of a new environment with odb_factory installed by pip, and all other packages of this one."""
    source = folder / "source"
    shutil.copytree(ROOT / "odb_factory", source / "odb_factory", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True, timeout=LIMIT_S)
    python = folder / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    install += [*options, str(source)]
    subprocess.run(install, check=True, timeout=LIMIT_S)
    if not options:
        shutil.rmtree(source)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "zz_others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.nightly
@pytest.mark.timeout(3 * LIMIT_S)
def test_mypy_strict_finds_what_is_misspelt_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    expected = [(number, line.split("  # ")[1]) for number, line in enumerate(WRONG.splitlines(), 1) if "  # " in line]
    for name, options in {"editable": ["-e"], "wheel": []}.items():
        python = installed(tmp_path / name, *options)
        check = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "--no-error-summary"]
        check += ["--hide-error-context", "--cache-dir", str(tmp_path / "cache"), "right.py", "wrong.py"]
        done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
        errors = [line for line in done.stdout.splitlines() if ": error: " in line]
        found = [(int(line.split(":")[1]), line.rsplit("[", 1)[1].rstrip("]")) for line in errors]
        assert found == expected and all(line.startswith("wrong.py:") for line in errors), (name, done.stdout)
