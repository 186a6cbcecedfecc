"""The checks of `odb-factory doctor`: small functions of what was found, each returning `Check`s."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from packaging.specifiers import SpecifierSet

from odb_factory.cli.doctor_probe import Probe
from odb_factory.llamafactory import releases
from odb_factory.llamafactory.activation import DISABLE, SEAMS

ENTRY_POINT = "odb_factory.llamafactory.activation:activate"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
OTHER_PACKAGE = "online-dynamic-batching"
TORCH_SET = 'pip install --upgrade "torch>=2.5,<2.13" torchvision torchaudio'  # setup.cfg says why below 2.13

SUPPORTED = {
    "python": ">=3.11",
    "odb_factory": "",
    "llamafactory": releases.SUPPORTED,
    "transformers": ">=4.55",
    "torch": ">=2.5,<2.13",
    "accelerate": "",
    "datasets": "",
}
"""What must be installed, and which versions odb_factory supports (all, where LLaMA-Factory itself sets them)."""
_FIXES = {"python": "make an environment with a Python of 3.11 or newer", "torch": TORCH_SET}
OPTIONAL = {"deepspeed": 'only ZeRO needs it: pip install "odb_factory[deepspeed]"'}


@dataclass(frozen=True)
class Check:
    """ok; warning: activation works, something else may not; problem: activation does not work."""

    status: Literal["ok", "warning", "problem"]
    what: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the machine looks like: versions by package (None: not installed), the entry point, environment, imports.

    pins: the versions that LLaMA-Factory asks for, by package.
    """

    versions: Mapping[str, str | None]
    pins: Mapping[str, SpecifierSet] = field(default_factory=dict)
    entry_point: str | None = ENTRY_POINT
    environment: Mapping[str, str] = field(default_factory=dict)
    probe: Probe = field(default_factory=Probe)


def versions(facts: Facts) -> list[Check]:
    checks = []
    for name, supported in SUPPORTED.items():
        version, fix = facts.versions.get(name), _FIXES.get(name, f'pip install "{name}{supported}"')
        if version is None:
            checks.append(Check("problem", f"{name} is not installed", fix))
        elif not SpecifierSet(supported).contains(version, prereleases=True):
            checks.append(Check("problem", f"{name} {version} is not supported, {supported} is", fix))
        elif name == "llamafactory" and releases.is_newer(version):
            checks.append(
                Check(
                    "warning",
                    f"llamafactory {version} is newer than what odb_factory was tested with ({releases.NEWEST_TESTED})",
                    "if all places are hooked (below) training goes on; a newer odb_factory may know this release",
                )
            )
        else:
            checks.append(Check("ok", f"{name} {version}" + (f" (supported: {supported})" if supported else "")))
    for name, hint in OPTIONAL.items():
        version = facts.versions.get(name)
        checks.append(Check("ok", f"{name} {version}" if version else f"{name} is not installed; {hint}"))
    return checks


def pinned(facts: Facts) -> list[Check]:
    """Packages that LLaMA-Factory was not released with: neither it nor odb_factory has been tested with them."""
    checks = [
        Check(
            "warning",
            f"{name} {version} is outside what LLaMA-Factory asks for ({specifier})",
            f'pip install "{name}{specifier}"',
        )
        for name, specifier in facts.pins.items()
        if (version := facts.versions.get(name)) and not specifier.contains(version, prereleases=True)
    ]
    return checks or [Check("ok", "every package is within the versions that LLaMA-Factory asks for")]


def entry_point(facts: Facts) -> list[Check]:
    if facts.entry_point == ENTRY_POINT:
        return [Check("ok", "the entry point that activates odb_factory is declared")]
    how = "is not declared" if facts.entry_point is None else f"names {facts.entry_point}"
    return [
        Check(
            "problem",
            f"the entry point that activates odb_factory {how}: its metadata is missing or old",
            "install it again: pip install odb_factory (in a checkout: pip install -e .)",
        )
    ]


def activation(facts: Facts) -> list[Check]:
    probe = facts.probe
    if "torch" in probe.errors:
        return [Check("problem", f"torch cannot be imported: {probe.errors['torch']}", "fix torch first")]
    if probe.crash:
        return [
            Check(
                "problem",
                f"importing torch and LLaMA-Factory ended the process: {probe.crash}",
                f'see it in full with: python -c "import torch, {SEAMS[-1]}"',
            )
        ]
    if probe.switched_off:
        value = facts.environment.get(DISABLE)
        return [Check("problem", f"{DISABLE}={value} switches odb_factory off", f"unset {DISABLE}")]
    if probe.active:
        return [Check("ok", "`import torch` activates odb_factory")]
    if (value := facts.environment.get(AUTOLOAD, "1")) != "1":
        return [Check("problem", f"{AUTOLOAD}={value} stops torch from calling entry points", f"unset {AUTOLOAD}")]
    if facts.entry_point != ENTRY_POINT:  # which has been said
        return []
    return [Check("problem", "torch does not call the entry point", TORCH_SET)]


def seams(facts: Facts) -> list[Check]:
    probe = facts.probe
    failed = [name for name in SEAMS if name in probe.errors]
    if failed:
        return [
            Check(
                "problem",
                f"{failed[0]} cannot be imported: {probe.errors[failed[0]]}",
                "fix what the message names; `llamafactory-cli version` shows it in full",
            )
        ]
    if probe.unhooked:
        return [
            Check(
                "problem",
                f"not found in this LLaMA-Factory, or not hooked: {', '.join(probe.unhooked)}",
                f'install a supported release: pip install "llamafactory{SUPPORTED["llamafactory"]}"',
            )
        ]
    if not probe.hooked:  # torch failed, which has been said
        return []
    return [Check("ok", f"all {len(probe.hooked)} places in LLaMA-Factory where odb_factory comes in are hooked")]


def launcher(facts: Facts) -> list[Check]:
    value = facts.environment.get("USE_V1", "")
    if value.lower() not in ("true", "y", "1"):
        return []
    return [
        Check("problem", f"USE_V1={value} selects LLaMA-Factory's v1 trainer, which odb does not drive", "unset USE_V1")
    ]


def other_packages(facts: Facts) -> list[Check]:
    checks = []
    if version := facts.versions.get(OTHER_PACKAGE):
        checks.append(
            Check(
                "warning",
                f"{OTHER_PACKAGE} {version} is installed, which forms batches online too",
                f"use one of the two in a run: take its calls (`import odb`) out, or pip uninstall {OTHER_PACKAGE}",
            )
        )
    if facts.probe.own_keys:
        checks.append(
            Check(
                "warning",
                f"this LLaMA-Factory has odb keys of its own: {', '.join(facts.probe.own_keys)}",
                "the plugin takes the block first; take the patch out (docs/versions.md), or install a stock release",
            )
        )
    return checks or [Check("ok", "no other package or patch for online batching is in the way")]


def media_libraries(facts: Facts) -> list[Check]:
    checks = []
    for name, media in (("torchvision", "images and videos"), ("torchaudio", "audio")):
        if error := facts.probe.errors.get(name):
            fix = f"models with {media} need it; install a set that works together: {TORCH_SET}"
            checks.append(Check("warning", f"{name} cannot be loaded beside torch: {error}", fix))
        elif version := facts.versions.get(name):
            checks.append(Check("ok", f"{name} {version} loads beside torch"))
    return checks


def devices(facts: Facts) -> list[Check]:
    gpus = facts.probe.gpus
    if not gpus:
        return [Check("ok", f"no CUDA GPU seen; {os.cpu_count()} CPU cores")]
    names = ", ".join(dict.fromkeys(gpus))
    return [Check("ok", f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: {names}; {os.cpu_count()} CPU cores")]


def kernels(facts: Facts) -> list[Check]:
    """What computes flat rows of a model that is loaded with sdpa (`flash_attn: auto`, `sdpa`)."""
    return [
        Check("ok", f"attention of flat rows (sdpa models) on {name}: {kernels}")
        for name, kernels in facts.probe.kernels.items()
    ]


CHECKS: tuple[Callable[[Facts], list[Check]], ...] = (
    versions,
    pinned,
    entry_point,
    activation,
    launcher,
    seams,
    other_packages,
    media_libraries,
    devices,
    kernels,
)
