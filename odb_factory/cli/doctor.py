"""`odb-factory doctor`: whether activation will work here, and how to fix what is in the way. Imports no torch."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import wave
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.console import Console
from rich.table import Table
from rich.text import Text

from odb_factory.errors import one_line
from odb_factory.llamafactory import activation, hooks
from odb_factory.llamafactory.activation import DISABLE, NEWEST_TESTED, SEAMS
from odb_factory.version import SUMS_OFFLOADED_GRADIENTS, installed_version

PROBE_TIMEOUT_S = 300
ENTRY_POINT = "odb_factory.llamafactory.activation:activate"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
OTHER_PACKAGE = "online-dynamic-batching"
TORCH_SET = 'pip install --upgrade "torch<2.13" torchvision torchaudio'  # the extra `llamafactory` says why below 2.13
SUPPORTED = {
    "python": ">=3.11",
    "odb_factory": "",
    "llamafactory": activation.SUPPORTED,
    "transformers": ">=4.55",
    "torch": ">=2.6",
    "accelerate": "",
    "datasets": "",
}
"""What must be installed, and which versions odb_factory supports (all, where LLaMA-Factory itself sets them)."""
_FIXES = {"python": "make an environment with a Python of 3.11 or newer"}
OPTIONAL = {"deepspeed": "only ZeRO needs it: pip install deepspeed"}
_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}


class Check(NamedTuple):
    """ok; note: what some trainings lack; warning: activation works, something else may not; problem: activation does
    not work."""

    status: Literal["ok", "note", "warning", "problem"]
    what: str
    fix: str = ""


@dataclass(kw_only=True)
class Probe:
    """What the imports showed.

    active: `import torch` placed the hook. switched_off: `ODB_FACTORY_DISABLE` forbids it.
    errors: what a module raised when imported, by module. hooked, unhooked: seams by their full name.
    own_keys: odb keys in the arguments of this LLaMA-Factory. gpus: names of the CUDA devices.
    kernels: what computes attention of flat rows in bf16, by the name of the GPU (or "cpu", where there is none).
    crash: how the process ended, if it wrote nothing.
    """

    active: bool = False
    switched_off: bool = False
    errors: dict[str, str] = field(default_factory=dict)
    hooked: list[str] = field(default_factory=list)
    unhooked: list[str] = field(default_factory=list)
    own_keys: list[str] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)
    kernels: dict[str, str] = field(default_factory=dict)
    crash: str | None = None


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


def examine_environment() -> int:
    """Print every check and one verdict. Returns 0 if `llamafactory-cli train` will be activated, 1 if not."""
    console = Console()
    with console.status("importing torch and LLaMA-Factory"):
        facts = _gather()
    num_problems = _print(console, checks_of(facts))
    verdict = "Ready: `llamafactory-cli train` forms batches online for every YAML with an odb: block."
    if num_problems:
        verdict = f"Not ready: {num_problems} problem{'s' if num_problems > 1 else ''} to fix."
    if facts.versions.get("llamafactory") is None:
        verdict += " Loops and Trainers of your own (ODBDataLoader, enable_odb) work without LLaMA-Factory."
    probe = facts.probe
    if num_problems == 1 and probe.hooked and not (probe.active or probe.unhooked or probe.switched_off):
        verdict += " Until then, `odb-factory train my.yaml` activates odb_factory by itself."
    console.print(verdict, markup=False, highlight=False, soft_wrap=True)
    return 1 if num_problems else 0


def examine_checkpoint(folder: Path) -> int:
    """Print what is wrong with a checkpoint. Returns 0 if all of it can be loaded, 1 if not."""
    from odb_factory.training.checkpoint import examine  # it imports torch

    console = Console()
    with console.status(f"reading {folder}"):
        checks = [Check("problem" if is_problem else "ok", text) for text, is_problem in examine(folder)]
    num_problems = _print(console, checks)
    print(
        f"Not whole: {num_problems} problem{'s' * (num_problems > 1)}." if num_problems else "The checkpoint is whole."
    )
    return 1 if num_problems else 0


def _print(console: Console, checks: Iterable[Check]) -> int:
    """Print checks, as a table on a terminal. Returns the number of problems."""
    table, num_problems = Table("", "what", title="odb-factory doctor"), 0
    for status, what, fix in checks:
        num_problems += status == "problem"
        if console.is_terminal:
            table.add_row(Text(status, _COLOURS[status]), Text.assemble(what, (f"\n-> {fix}" if fix else "", "bold")))
        else:
            print(f"{status:8} {what}" + (f"\n{'':8} -> {fix}" if fix else ""))
    if console.is_terminal:
        console.print(table)
    return num_problems


# ----------------------------------------------------------------------------------------------------------------------
# Look at this Python.


def _gather() -> Facts:
    """Installed packages, the entry point, the environment, and the imports of a training."""
    pins = {} if installed_version("llamafactory") is None else pins_of_llamafactory()
    packages = [*SUPPORTED, *OPTIONAL, OTHER_PACKAGE, "torchvision", "torchaudio", *pins]
    versions = {name: installed_version(name) for name in packages} | {"python": platform.python_version()}
    declared = [point.value for point in metadata.entry_points(group="torch.backends", name="odb_factory")]
    return Facts(
        versions=versions,
        pins=pins,
        entry_point=next((value for value in declared if value != ENTRY_POINT), next(iter(declared), None)),
        environment=dict(os.environ),
        probe=_probe(),
    )


def pins_of_llamafactory() -> dict[str, SpecifierSet]:
    """The versions of other packages that the installed LLaMA-Factory asks for, by package.

    From its metadata, with the extra `deepspeed`.
    """
    asked = [Requirement(text) for text in metadata.requires("llamafactory") or ()]
    asked = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": "deepspeed"})]
    found: dict[str, SpecifierSet] = {}
    for one in asked:
        if one.specifier:
            found[one.name] = found.get(one.name, SpecifierSet()) & one.specifier
    return found


def _probe() -> Probe:
    """`look_at_imports` in a new process, as a training would start: no folder shadows a package."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "probe.json")
        command = [sys.executable, "-P", "-m", "odb_factory.cli.doctor", str(answer)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return Probe(crash=f"no end within {PROBE_TIMEOUT_S} s")
        if answer.exists():
            return Probe(**json.loads(answer.read_text(encoding="utf-8")))
    last_line = (ended.stderr.strip().splitlines() or ["no message"])[-1]
    return Probe(crash=f"exit code {ended.returncode}: {last_line}")


# ----------------------------------------------------------------------------------------------------------------------
# In the new process: the imports of a training, and their outcome.


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
    import torch

    probe.gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    for name in ("torchvision", "torchaudio"):
        _imports(name, probe)
    if "torchaudio" in sys.modules:
        _read_audio(probe)
    imported = [_imports(name, probe) for name in SEAMS]  # all are tried
    if all(imported):
        _look_at_seams(probe)
        data_arguments = sys.modules["llamafactory.hparams.parser"].DataArguments
        names = [item.name for item in dataclasses.fields(data_arguments)]
        from odb_factory.model.attention import Need

        devices = {name: torch.device("cuda", index) for index, name in enumerate(probe.gpus)}
        devices = devices or {"cpu": torch.device("cpu")}
        probe.kernels = {name: Need(device=device, dtype=torch.bfloat16).kernel for name, device in devices.items()}
        probe.own_keys = [name for name in names if name in ("odb", "use_odb") or name.startswith("odb_")]
    return probe


def _read_audio(probe: Probe) -> None:
    """10 ms of WAV, as LLaMA-Factory reads it: whether torchcodec and FFmpeg load shows only then."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "silence.wav"))
        with wave.open(path, "wb") as clip:
            clip.setparams((1, 2, 16_000, 160, "NONE", "not compressed"))
            clip.writeframes(bytes(320))
        try:
            sys.modules["torchaudio"].load(path)
        except Exception as error:  # of whichever library it calls
            probe.errors["torchaudio.load"] = one_line(error).partition(". ")[0]


def _look_at_seams(probe: Probe) -> None:
    for seam in hooks.seams():
        module, _, path = seam.partition(".")
        target: Any = sys.modules[module]
        for part in path.split("."):
            target = getattr(target, part, None)
        # A wrapper takes the name and module of what it wraps; its code tells where it comes from.
        code = getattr(target, "__code__", None)
        is_hooked = code is not None and code.co_filename == hooks.__file__
        (probe.hooked if is_hooked else probe.unhooked).append(seam)


def _imports(name: str, probe: Probe) -> bool:
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken installation can raise anything
        probe.errors[name] = " ".join(f"{type(error).__name__}: {error}".split())
    return name not in probe.errors


# ----------------------------------------------------------------------------------------------------------------------
# The checks: generators over what was found.


def checks_of(facts: Facts) -> Iterator[Check]:
    for examine in CHECKS:
        yield from examine(facts)


def _versions(facts: Facts) -> Iterator[Check]:
    for name, supported in SUPPORTED.items():
        version, fix = facts.versions.get(name), _FIXES.get(name, f'pip install "{name}{supported}"')
        if version is None:
            yield Check("problem", f"{name} is not installed", fix)
        elif not SpecifierSet(supported).contains(version, prereleases=True):
            yield Check("problem", f"{name} {version} is not supported, {supported} is", fix)
        elif name == "llamafactory" and hooks.is_newer(version):
            yield Check(
                "warning",
                f"llamafactory {version} is newer than what odb_factory was tested with ({NEWEST_TESTED})",
                "if all functions are hooked (see below) training works; a newer odb_factory may know this release",
            )
        else:
            yield Check("ok", f"{name} {version}" + (f" (supported: {supported})" if supported else ""))
    for name, hint in OPTIONAL.items():
        version = facts.versions.get(name)
        if version is None:
            yield Check("note", f"{name} is not installed; {hint}")
        elif name == "deepspeed" and Version(version) < Version(SUMS_OFFLOADED_GRADIENTS):
            what = f"ZeRO-2 with offload_optimizer is refused: deepspeed {version} loses gradients of micro-batches"
            newer = f'pip install "deepspeed>={SUMS_OFFLOADED_GRADIENTS}" (LLaMA-Factory takes it, too)'
            yield Check("note", what, f"only that needs it: {newer}")
        else:
            yield Check("ok", f"{name} {version}")


def _pins(facts: Facts) -> Iterator[Check]:
    """Packages that LLaMA-Factory was not released with: neither it nor odb_factory has been tested with them."""
    others = {
        name: (version, specifier)
        for name, specifier in facts.pins.items()
        if (version := facts.versions.get(name)) and not specifier.contains(version, prereleases=True)
    }
    for name, (version, specifier) in others.items():
        what = f"{name} {version} is outside what LLaMA-Factory asks for ({specifier})"
        yield Check("warning", what, f'pip install "{name}{specifier}"')
    if facts.pins and not others:
        yield Check("ok", "every package is within the versions that LLaMA-Factory asks for")


def _entry_point(facts: Facts) -> Iterator[Check]:
    if facts.entry_point == ENTRY_POINT:
        yield Check("ok", "the entry point that activates odb_factory is declared")
        return
    how = "is not declared" if facts.entry_point is None else f"names {facts.entry_point}"
    yield Check(
        "problem",
        f"the entry point that activates odb_factory {how}: its metadata is missing or old",
        "install it again, in its checkout: pip install -e .",
    )


def _activation(facts: Facts) -> Iterator[Check]:
    probe, environment = facts.probe, facts.environment
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
    elif facts.entry_point == ENTRY_POINT:  # else its own check has named the problem
        yield Check("problem", "torch does not call the entry point", TORCH_SET)


def _seams(facts: Facts) -> Iterator[Check]:
    probe = facts.probe
    failed = [name for name in SEAMS if name in probe.errors]
    if facts.versions.get("llamafactory") is None:
        return  # named as not installed
    if failed:
        what = f"{failed[0]} cannot be imported: {probe.errors[failed[0]]}"
        yield Check("problem", what, "fix what the message names; `llamafactory-cli version` shows it in full")
    elif probe.unhooked:
        yield Check(
            "problem",
            f"not found in this LLaMA-Factory, or not hooked: {', '.join(probe.unhooked)}",
            f'install a supported release: pip install "llamafactory{SUPPORTED["llamafactory"]}"',
        )
    elif probe.hooked:  # else torch failed, which its own check has named
        yield Check("ok", f"all {len(probe.hooked)} functions of LLaMA-Factory that odb_factory needs are hooked")


def _other_packages(facts: Facts) -> Iterator[Check]:
    if version := facts.versions.get(OTHER_PACKAGE):
        yield Check(
            "warning",
            f"{OTHER_PACKAGE} {version} is installed, which forms batches online too",
            f"use one of the two in a run: take its calls (`import odb`) out, or pip uninstall {OTHER_PACKAGE}",
        )
    if facts.probe.own_keys:
        yield Check(
            "warning",
            f"this LLaMA-Factory already has odb keys: {', '.join(facts.probe.own_keys)}",
            "the plugin takes the block first; take the patch out (docs/llamafactory.md), or install a stock release",
        )
    if not version and not facts.probe.own_keys:
        yield Check("ok", "no other package or patch for online batching is in the way")


def _media_libraries(facts: Facts) -> Iterator[Check]:
    for name, media in (("torchvision", "images and videos"), ("torchaudio", "audio")):
        if error := facts.probe.errors.get(name):
            fix = f"models with {media} need it; install a set that works together: {TORCH_SET}"
            yield Check("warning", f"{name} cannot be loaded beside torch: {error}", fix)
        elif version := facts.versions.get(name):
            yield Check("ok", f"{name} {version} loads beside torch")
    if error := facts.probe.errors.get("torchaudio.load"):
        fix = "only audio data need that: pip install torchcodec, and FFmpeg of the system"
        yield Check("note", f"torchaudio cannot read audio files ({error})", fix)


def _devices(facts: Facts) -> Iterator[Check]:
    """GPUs, and what computes flat rows of a model that is loaded with sdpa (`flash_attn: auto`, `sdpa`)."""
    gpus = facts.probe.gpus
    seen = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: {', '.join(dict.fromkeys(gpus))}"
    yield Check("ok" if gpus else "note", f"{seen if gpus else 'no CUDA GPU seen'}; {os.cpu_count()} CPU cores")
    for name, kernels in facts.probe.kernels.items():
        yield Check("ok", f"attention of flat rows (sdpa models) on {name}: {kernels}")


CHECKS: tuple[Callable[[Facts], Iterator[Check]], ...] = (
    _versions,
    _pins,
    _entry_point,
    _activation,
    _seams,
    _other_packages,
    _media_libraries,
    _devices,
)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(dataclasses.asdict(look_at_imports())), encoding="utf-8")
