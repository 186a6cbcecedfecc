"""`odb-factory doctor`: check versions, hooks, kernel and installs. A child process imports torch and LLaMA-Factory."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from odb_factory.llamafactory import activation, hooks
from odb_factory.llamafactory.activation import DISABLE, HOOKS, NEWEST_TESTED, SUPPORTED
from odb_factory.refusals import __version__, installed_version

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
RELEASES = {
    "python": (">=3.11", "3.13"),
    "torch": (">=2.8", "2.14.1"),
    "transformers": (">=5.6", "5.24.0"),
    "accelerate": ("", "1.15.0"),
    "llamafactory": (SUPPORTED, NEWEST_TESTED),
}
"""Package -> supported releases, newest tested release."""


Check = tuple[str, str, str]
"""Status (ok; note: something may be missing; problem), finding, and fix ("": nothing to fix)."""


def run(arguments: argparse.Namespace) -> int:
    """Print each check when it finishes, then a verdict. Returns 1 if there is a problem."""
    as_json, checks = arguments.json, []
    for status, finding, fix in _checks():
        checks.append({"status": status, "what": finding, "fix": fix})
        if not as_json:
            print(f"{status:8} {finding}" + (f"\n{'':8} -> {fix}" if fix else ""), flush=True)
    num_problems = sum(check["status"] == "problem" for check in checks)
    verdict = f"problems to fix: {num_problems}" if num_problems else "ready"
    print(json.dumps(checks, indent=2) if as_json else f"odb_factory {__version__}: {verdict}")
    return 1 if num_problems else 0


def _checks() -> Iterator[Check]:
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    for name, (supported, newest) in RELEASES.items():
        version = platform.python_version() if name == "python" else installed_version(name)
        finding = f"{name} {version or 'is not installed'} (supported: {supported or 'any'}, tested: up to {newest})"
        if version is None and name == "llamafactory":
            yield "note", finding, "its trainings and `odb-factory plan`, `demo` and `train` need it"
        elif version is None or not SpecifierSet(supported).contains(version, prereleases=True):
            yield "problem", finding, f'install a supported release: "{name}{supported}"'
        else:
            is_newer = Version(version).release[: newest.count(".") + 1] > Version(newest).release
            yield "note" if is_newer else "ok", finding, "this release is untested" * is_newer
    if installed_version(package := "online-dynamic-batching"):
        yield "note", f"{package} is installed, which forms batches online too", f"pip uninstall {package}"
    if f"{activation.__name__}:activate" not in {
        point.value for point in metadata.entry_points(group="torch.backends")
    }:
        finding = "the entry point that activates odb_factory is not declared: its metadata is missing or old"
        yield "problem", finding, "install it again, in its checkout: pip install -e ."
    # -P prevents files in the working folder from shadowing packages.
    child = subprocess.run([sys.executable, "-P", "-m", __spec__.name], capture_output=True, text=True)
    if child.returncode == 0:
        yield from json.loads(child.stdout.splitlines()[-1])
    else:
        finding = f"importing torch and LLaMA-Factory ended with exit code {child.returncode}"
        yield (
            "problem",
            f"{finding}: {' '.join(child.stderr.split())[-200:]}",
            "see all of it: python -m odb_factory.cli.doctor",
        )


def _checks_of_imports() -> Iterator[Check]:
    """Checks of the child process, which imports torch first, like `llamafactory-cli train`."""
    import torch

    from odb_factory.model.attention import kernel_of

    switch = next((name for name in (DISABLE, AUTOLOAD) if name in os.environ), None)
    if activation.is_active():
        yield "ok", "`import torch` activates odb_factory", ""
    else:
        fix = f"unset {switch}" if switch == DISABLE else "train with `odb-factory train my.yaml`"
        yield "problem", f"`import torch` does not activate odb_factory ({switch or 'it calls no entry point'})", fix
        os.environ.pop(DISABLE, None)
        activation.activate()  # so that the hooks can be checked
    for name in filter(installed_version, ("torchvision", "torchaudio")):
        if error := _error_of_import(name):
            yield (
                "note",
                f"{name} does not fit this torch: {error}",
                'pip install -U "torch<2.13" torchvision "torchaudio<2.11.1"',
            )
    if installed_version("llamafactory"):
        needed = [hook for hook in HOOKS if not hook.without]
        modules = dict.fromkeys(hook.module for hook in needed)
        if failed := [f"{name}: {error}" for name in modules if (error := _error_of_import(name))]:
            yield "problem", f"cannot be imported: {failed[0]}", "`llamafactory-cli version` shows all of it"
        elif unhooked := [hook.name for hook in needed if not _is_hooked(hook.name, hooks.__file__)]:
            finding = f"missing in this LLaMA-Factory, or not hooked: {', '.join(unhooked)}"
            yield "problem", finding, f'pip install "llamafactory{SUPPORTED}"'
        else:
            yield "ok", f"all {len(needed)} functions of LLaMA-Factory that odb_factory needs are hooked", ""
    for device in map(torch.device, range(torch.cuda.device_count()) if torch.cuda.is_available() else ["cpu"]):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        kernel = kernel_of(device, torch.bfloat16)
        yield "ok", f"attention of flat rows (models loaded with sdpa) on {name}: {kernel}", ""


def _error_of_import(name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken installation can raise anything
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def _is_hooked(seam: str, hooks_file: str) -> bool:
    """Whether `seam` is wrapped. A wrapper copies the function's name and module, but its code is in `hooks_file`."""
    target: Any = sys.modules["llamafactory"]
    for name in (*seam.split(".")[1:], "__code__", "co_filename"):
        target = getattr(target, name, None)
    return bool(target == hooks_file)


if __name__ == "__main__":
    print(f"\n{json.dumps([*_checks_of_imports()])}")
