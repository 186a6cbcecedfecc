"""Environments for rivals that cannot live beside LLaMA-Factory, or need not: made where they are asked for.

Each sees the packages of the environment that makes it, and has its own on top.
"""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from pathlib import Path

BESIDE, NEWER = "beside", "newer_transformers"
REQUIREMENTS = {
    BESIDE: ("online-dynamic-batching==0.1.2", "dynabatch==0.2.23"),
    # `train_sampling_strategy: batch_rebalance` came after the releases that LLaMA-Factory allows.
    NEWER: ("transformers==5.23.0",),
}


def python_of(name: str, folder: Path) -> Path | None:
    """Of the environment, if it is complete."""
    return _python(folder / name) if (folder / name / "complete").exists() else None


def make(name: str, folder: Path) -> Path:
    """The environment's Python. Raises `subprocess.CalledProcessError` where pip fails."""
    if (known := python_of(name, folder)) is not None:
        return known
    place = folder / name
    venv.create(place, with_pip=True, clear=True)
    python = _python(place)
    own = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True
    )
    lines = [f"import site; site.addsitedir({parent!r})" for parent in site.getsitepackages()]
    Path(own.stdout.strip(), "parent.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    subprocess.run([python, "-m", "pip", "install", "-q", *REQUIREMENTS[name]], check=True, stdout=sys.stderr)
    (place / "complete").touch()
    return python


def _python(place: Path) -> Path:
    return place / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
