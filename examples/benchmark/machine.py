"""The machine and the versions that figures were measured with, as a reader is told."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import psutil

PACKAGES = ("torch", "transformers", "llamafactory", "accelerate", "trl")


def machine() -> str:
    memory = psutil.virtual_memory().total / 2**30
    return f"{processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}; {device()}"


def versions() -> str:
    found = [f"{name} {known}" for name in PACKAGES if (known := version(name))]
    return f"Python {platform.python_version()}, {', '.join(found)}"


def commit() -> str:
    """Of odb_factory, as it is measured."""
    asked = ["git", "describe", "--always", "--dirty"]
    told = subprocess.run(asked, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return told.stdout.strip() or "no commit"


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
