"""`odb-factory doctor`: versions, activation, hooks and kernels, and how to fix what is wrong. Imports no torch."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from odb_factory.llamafactory import activation, hooks
from odb_factory.llamafactory.activation import DISABLE, NEWEST_TESTED, SEAMS
from odb_factory.version import installed_version

PROBE_TIMEOUT_S = 300
ENTRY_POINT = "odb_factory.llamafactory.activation:activate"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
OTHER_PACKAGE = "online-dynamic-batching"
TORCH_SET = 'pip install --upgrade "torch<2.13" torchvision torchaudio'  # the extra `llamafactory` says why below 2.13
SUPPORTED = {
    "python": ">=3.11",
    "odb_factory": "",
    "llamafactory": activation.SUPPORTED,
    "transformers": ">=4.57.1",
    "torch": ">=2.6",
    "accelerate": "",
    "datasets": "",
}
"""Required packages and their supported versions (any, if LLaMA-Factory itself sets them)."""


class Check(NamedTuple):
    """status: ok; warning (training is activated, something else may fail); problem (training is not activated)."""

    status: str
    what: str
    fix: str = ""


@dataclass(kw_only=True)
class Probe:
    """The outcome of the imports of a training, in a process of its own.

    active: `import torch` placed the hook. switched_off: `ODB_FACTORY_DISABLE` forbids it. errors: of imports, by
    module. hooked, unhooked: seams by their full name. kernels: of attention of flat rows in bf16, by GPU (or "cpu").
    crash: how the process ended, if it wrote nothing.
    """

    active: bool = False
    switched_off: bool = False
    errors: dict[str, str] = field(default_factory=dict)
    hooked: list[str] = field(default_factory=list)
    unhooked: list[str] = field(default_factory=list)
    kernels: dict[str, str] = field(default_factory=dict)
    crash: str | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """versions: by package (None: not installed); entry_point: the declared one; environment: variables."""

    versions: Mapping[str, str | None]
    entry_point: str | None = ENTRY_POINT
    environment: Mapping[str, str] = field(default_factory=dict)
    probe: Probe = field(default_factory=Probe)


def main(argv: Sequence[str]) -> int:
    """Print every check and one verdict. Returns 0 if `llamafactory-cli train` will be activated, 1 if not."""
    parser = argparse.ArgumentParser(
        prog="odb-factory doctor",
        description="Check whether odb_factory will be active here, and name what fixes a problem.",
        epilog="example: odb-factory doctor --json",
    )
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    given = parser.parse_args(argv)
    facts = _gather()
    checks = [*checks_of(facts)]
    num_problems = sum(check.status == "problem" for check in checks)
    if given.json:
        print(json.dumps([check._asdict() for check in checks], indent=2))
        return 1 if num_problems else 0
    for status, what, fix in checks:
        print(f"{status:8} {what}" + (f"\n{'':8} -> {fix}" if fix else ""))
    verdict = "Ready: `llamafactory-cli train` forms batches online for every YAML with an odb: block."
    if num_problems:
        verdict = f"Not ready: {num_problems} problem{'s' if num_problems > 1 else ''} to fix."
    if facts.versions.get("llamafactory") is None:
        verdict += " Loops and Trainers of your own (ODBDataLoader, enable_odb) work without LLaMA-Factory."
    probe = facts.probe
    if num_problems == 1 and probe.hooked and not (probe.active or probe.unhooked or probe.switched_off):
        verdict += " Until then, `odb-factory train my.yaml` activates odb_factory by itself."
    print(verdict)
    return 1 if num_problems else 0


# ----------------------------------------------------------------------------------------------------------------------
# Look at this Python, and import in a new process what a training imports.


def _gather() -> Facts:
    packages = [*SUPPORTED, OTHER_PACKAGE]
    declared = [point.value for point in metadata.entry_points(group="torch.backends", name="odb_factory")]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "probe.json")
        # -P: no file of the working folder shadows a package
        command = [sys.executable, "-P", "-m", "odb_factory.cli.doctor", str(answer)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
            last_line = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            probe = Probe(crash=f"exit code {ended.returncode}: {last_line}")
        except subprocess.TimeoutExpired:
            probe = Probe(crash=f"no end within {PROBE_TIMEOUT_S} s")
        if answer.exists():
            probe = Probe(**json.loads(answer.read_text(encoding="utf-8")))
    return Facts(
        versions={name: installed_version(name) for name in packages} | {"python": platform.python_version()},
        entry_point=next((value for value in declared if value != ENTRY_POINT), next(iter(declared), None)),
        environment=dict(os.environ),
        probe=probe,
    )


def look_at_imports() -> Probe:
    """Import as `llamafactory-cli train` does, torch first, and look at what has been hooked."""
    probe = Probe()
    if not _imports("torch", probe):
        return probe
    probe.active = activation.is_active()
    activation.activate()
    probe.switched_off = not activation.is_active()
    os.environ.pop(DISABLE, None)
    activation.activate()  # so that the seams can be judged whatever is switched off
    for name in ("torchvision", "torchaudio"):
        if installed_version(name):
            _imports(name, probe)
    if all(_imports(name, probe) for name in SEAMS):
        for seam in hooks.seams():
            module, _, path = seam.partition(".")
            target: Any = sys.modules[module]
            for part in path.split("."):
                target = getattr(target, part, None)
            # A wrapper takes the name and module of what it wraps; its code tells where it comes from.
            code = getattr(target, "__code__", None)
            is_hooked = code is not None and code.co_filename == hooks.__file__
            (probe.hooked if is_hooked else probe.unhooked).append(seam)
    import torch

    from odb_factory.model.attention import Need

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]
    for device in devices:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        probe.kernels[name] = Need(device=device, dtype=torch.bfloat16).kernel
    return probe


def _imports(name: str, probe: Probe) -> bool:
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken installation can raise anything
        probe.errors[name] = " ".join(f"{type(error).__name__}: {error}".split())
    return name not in probe.errors


# ----------------------------------------------------------------------------------------------------------------------
# The checks.


def checks_of(facts: Facts) -> Iterator[Check]:
    for examine in (_versions, _activation, _hooks, _wrong_installs, _kernels):
        yield from examine(facts)


def _versions(facts: Facts) -> Iterator[Check]:
    from packaging.specifiers import SpecifierSet

    for name, supported in SUPPORTED.items():
        version, fix = facts.versions.get(name), f'pip install "{name}{supported}"'
        if name == "python":
            fix = "make an environment with a Python of 3.11 or newer"
        if version is None:
            yield Check("problem", f"{name} is not installed", fix)
        elif not SpecifierSet(supported).contains(version, prereleases=True):
            yield Check("problem", f"{name} {version} is not supported, {supported} is", fix)
        elif name == "llamafactory" and hooks.is_newer(version):
            what = f"llamafactory {version} is newer than what odb_factory was tested with ({NEWEST_TESTED})"
            yield Check("warning", what, "if all functions are hooked (see below) training works")
        else:
            yield Check("ok", f"{name} {version}" + (f" (supported: {supported})" if supported else ""))


def _activation(facts: Facts) -> Iterator[Check]:
    probe, environment = facts.probe, facts.environment
    if facts.entry_point == ENTRY_POINT:
        yield Check("ok", "the entry point that activates odb_factory is declared")
    else:
        how = "is not declared" if facts.entry_point is None else f"names {facts.entry_point}"
        what = f"the entry point that activates odb_factory {how}: its metadata is missing or old"
        yield Check("problem", what, "install it again, in its checkout: pip install -e .")
    if "torch" in probe.errors:
        yield Check("problem", f"torch cannot be imported: {probe.errors['torch']}", "fix torch first")
    elif probe.crash:
        what = f"importing torch and LLaMA-Factory ended the process: {probe.crash}"
        yield Check("problem", what, f'see it in full with: python -c "import torch, {next(reversed(SEAMS))}"')
    elif probe.switched_off:
        yield Check("problem", f"{DISABLE}={environment.get(DISABLE)} switches odb_factory off", f"unset {DISABLE}")
    elif probe.active:
        yield Check("ok", "`import torch` activates odb_factory")
    elif (value := environment.get(AUTOLOAD, "1")) != "1":
        yield Check("problem", f"{AUTOLOAD}={value} stops torch from calling entry points", f"unset {AUTOLOAD}")
    elif facts.entry_point == ENTRY_POINT:
        yield Check("problem", "torch does not call the entry point", TORCH_SET)


def _hooks(facts: Facts) -> Iterator[Check]:
    probe = facts.probe
    failed = [name for name in SEAMS if name in probe.errors]
    if failed and facts.versions.get("llamafactory") is not None:  # else it has been named as not installed
        what = f"{failed[0]} cannot be imported: {probe.errors[failed[0]]}"
        yield Check("problem", what, "fix what the message names; `llamafactory-cli version` shows it in full")
    elif probe.unhooked:
        what = f"not found in this LLaMA-Factory, or not hooked: {', '.join(probe.unhooked)}"
        yield Check("problem", what, f'install a supported release: pip install "llamafactory{activation.SUPPORTED}"')
    elif probe.hooked:
        yield Check("ok", f"all {len(probe.hooked)} functions of LLaMA-Factory that odb_factory needs are hooked")


def _wrong_installs(facts: Facts) -> Iterator[Check]:
    if version := facts.versions.get(OTHER_PACKAGE):
        what = f"{OTHER_PACKAGE} {version} is installed, which forms batches online too"
        yield Check("warning", what, f"use one of the two in a run: pip uninstall {OTHER_PACKAGE}")
    for name, media in (("torchvision", "images and videos"), ("torchaudio", "audio")):
        if error := facts.probe.errors.get(name):
            fix = f"models with {media} need it; install a set that works together: {TORCH_SET}"
            yield Check("warning", f"{name} cannot be loaded beside torch: {error}", fix)


def _kernels(facts: Facts) -> Iterator[Check]:
    """What computes attention of flat rows of a model that is loaded with sdpa (`flash_attn: auto`, `sdpa`)."""
    for name, kernel in facts.probe.kernels.items():
        yield Check("ok", f"attention of flat rows (sdpa models) on {name}: {kernel}")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(asdict(look_at_imports())), encoding="utf-8")
