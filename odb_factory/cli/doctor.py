"""`odb-factory doctor`: says whether activation will work here, and how to fix what is in the way."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from odb_factory.cli.doctor_checks import CHECKS, ENTRY_POINT, OPTIONAL, OTHER_PACKAGE, SUPPORTED, Check, Facts
from odb_factory.cli.doctor_probe import Probe
from odb_factory.llamafactory import releases
from odb_factory.version import installed_version

PROBE_TIMEOUT_S = 300
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


def main(argv: Sequence[str]) -> int:
    """Print every check and one verdict. Returns 0 if `llamafactory-cli train` will be activated, 1 if not.

    Given a checkpoint, it looks at that alone: 0 if all of it can be loaded.
    """
    parser = argparse.ArgumentParser(prog="odb-factory doctor", description=__doc__)
    parser.add_argument("checkpoint", nargs="?", type=Path, help="compare the files of this checkpoint instead")
    arguments = parser.parse_args(argv)
    console = Console()
    if arguments.checkpoint is not None:
        return _checkpoint(console, arguments.checkpoint)
    with console.status("importing torch and LLaMA-Factory"):
        facts = gather()
    checks = [check for examine in CHECKS for check in examine(facts)]
    if console.is_terminal:
        console.print(_table(checks))
    else:
        _print_plain(checks)
    num_problems = sum(check.status == "problem" for check in checks)
    console.print(_verdict(facts, num_problems), markup=False, highlight=False, soft_wrap=True)
    return 1 if num_problems else 0


def _checkpoint(console: Console, folder: Path) -> int:
    from odb_factory.training.checkpoint import examine  # it imports torch

    with console.status(f"reading {folder}"):
        checks = [Check("problem" if line.is_problem else "ok", line.text) for line in examine(folder)]
    if console.is_terminal:
        console.print(_table(checks))
    else:
        _print_plain(checks)
    num_problems = sum(check.status == "problem" for check in checks)
    print(
        f"Not whole: {num_problems} problem{'s' * (num_problems > 1)}." if num_problems else "The checkpoint is whole."
    )
    return 1 if num_problems else 0


def gather() -> Facts:
    """Look at this Python: installed packages, the entry point, the environment, and the imports of a training."""
    pins = {} if installed_version("llamafactory") is None else releases.pins()
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


def _probe() -> Probe:
    """Run `doctor_probe` as a new process would run a training: nothing imported yet, no folder shadowing a package."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "probe.json")
        command = [sys.executable, "-P", "-m", "odb_factory.cli.doctor_probe", str(answer)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return Probe(crash=f"no end within {PROBE_TIMEOUT_S} s")
        if answer.exists():
            return Probe(**json.loads(answer.read_text(encoding="utf-8")))
    last_line = (ended.stderr.strip().splitlines() or ["no message"])[-1]
    return Probe(crash=f"exit code {ended.returncode}: {last_line}")


def _table(checks: list[Check]) -> Table:
    table = Table("", "what", title="odb-factory doctor")
    for check in checks:
        fix = Text(f"\n-> {check.fix}", "bold") if check.fix else ""
        table.add_row(Text(check.status, _COLOURS[check.status]), Text(check.what).append_text(Text.assemble(fix)))
    return table


def _print_plain(checks: list[Check]) -> None:
    for check in checks:
        print(f"{check.status:8} {check.what}")
        if check.fix:
            print(f"{'':8} -> {check.fix}")


def _verdict(facts: Facts, num_problems: int) -> str:
    if not num_problems:
        return "Ready: `llamafactory-cli train` forms batches online for every YAML with an odb: block."
    verdict = f"Not ready: {num_problems} problem{'s' if num_problems > 1 else ''} to fix."
    probe = facts.probe
    if num_problems == 1 and probe.hooked and not (probe.active or probe.unhooked or probe.switched_off):
        verdict += " Until then, `odb-factory train my.yaml` activates odb_factory by itself."
    return verdict
