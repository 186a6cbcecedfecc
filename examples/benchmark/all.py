"""Every benchmark, one after the other, into one folder: JSON, tables, figures, and `benchmarks.md` made of them.

A part that is done is not run again, so a sitting may be interrupted, and goes on with the same command. What cannot be
measured here, for want of a device or of a rival, is said in the page.

    python examples/benchmark/all.py --rivals              # everything; two to three hours on two quiet cores
    python examples/benchmark/all.py --parts planning start
    python examples/benchmark/all.py --parts loader --again
    python examples/benchmark/all.py --publish             # what is done into docs/, with its figures as JSON
    python examples/benchmark/all.py --short               # the shortest form of everything: shows that it works
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import page
import rivals
from machine import commit, machine, versions
from parts import PARTS, Part

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
LINE = 110
"""Characters of a line of progress."""


def command_of(part: Part, is_short: bool) -> tuple[str, ...] | None:
    return part.short if is_short else part.command


def shown(command: Sequence[str]) -> str:
    """As a user types it at the root of the repository."""
    return shlex.join(
        command if command[0] == "pytest" else ("python", f"examples/benchmark/{command[0]}", *command[1:])
    )


def why_not(part: Part, is_short: bool) -> str | None:
    """Why it cannot be run on this machine, if so."""
    if part.cuda and not is_short:
        import torch

        if not torch.cuda.is_available():
            return "no CUDA device on the machine of these tables"
    return None


def run(part: Part, folder: Path, is_short: bool, environments: Path) -> bool:
    """Run it in its folder and write down how that went, in `done.json`; whether it went well."""
    command = command_of(part, is_short)
    assert command is not None
    output = folder / part.name
    output.mkdir(parents=True, exist_ok=True)
    beside = rivals.python_of(rivals.BESIDE, environments) if part.rivals else None
    python = str(beside or sys.executable)
    if command[0] == "pytest":
        line = [python, "-m", *command]
    else:
        line = [python, str(FOLDER / command[0]), *command[1:], "--output-dir", str(output)]
    newer = rivals.python_of(rivals.NEWER, environments)
    if command[0] == "planning.py" and newer is not None:
        line += ["--newer-transformers", str(newer)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    began, load = datetime.datetime.now(), os.getloadavg()[0]
    started, last = time.monotonic(), ""
    printed = output / "printed.txt"
    with printed.open("w", encoding="utf-8") as tables, (output / "log.txt").open("w") as log:
        process = subprocess.Popen(
            line,
            stdout=tables,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        assert process.stderr is not None
        try:
            for text in process.stderr:
                log.write(text)
                if text.strip() and "%|" not in text:  # no bars
                    last = text.strip()
                    print(f"  {time.monotonic() - started:6.0f} s  {last[:LINE]}", flush=True)
            process.wait()
        finally:
            if process.poll() is None:  # this one is ended
                os.killpg(process.pid, signal.SIGTERM)
    told = page.body(printed.read_text(encoding="utf-8"), command[0])
    (output / page.TABLES).write_text(told + "\n", encoding="utf-8")
    done = {
        "command": shown(command),
        "returncode": process.returncode,
        "began": f"{began:%Y-%m-%d %H:%M}",
        "seconds": time.monotonic() - started,
        "load": load,
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }
    (output / page.DONE).write_text(json.dumps(done, indent=2), encoding="utf-8")
    if process.returncode:
        print(
            f"{part.name}: exit code {process.returncode}: {last[:LINE]} (all of it: {output / 'log.txt'})", flush=True
        )
    return process.returncode == 0


def publish(folder: Path) -> None:
    """The parts that are done into docs/, in place of what was published of them, and the page of all there are."""
    published = ROOT / "docs" / page.FIGURES
    for part in PARTS:
        if page.done(folder, part.name):
            target = published / part.name
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            for path in page.files(folder / part.name):
                shutil.copyfile(path, target / path.name)
    text = page.make(published, PARTS, missing(published, is_short=False), figures_in=f"{page.FIGURES}/")
    (ROOT / "docs" / "benchmarks.md").write_text(text, encoding="utf-8")
    print(f"published: {ROOT / 'docs' / 'benchmarks.md'}")


def missing(folder: Path, is_short: bool) -> dict[str, str]:
    """Why a part has no tables there, if it has none."""
    return {part.name: why_not(part, is_short) or page.why_not(folder, part.name) for part in PARTS}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="run parts that are done, too")
    parser.add_argument("--rivals", action="store_true", help="make environments for rivals first (pip, 0.2 GB)")
    parser.add_argument("--publish", action="store_true", help="what is done into docs/, beside what is published")
    parser.add_argument("--short", action="store_true", help="the shortest form: shows that all of it works")
    parser.add_argument("--output-dir", type=Path, help="(saves/benchmark; with --short saves/benchmark_short)")
    given = parser.parse_args(arguments)
    if given.short and given.publish:
        parser.error("--short measures nothing that could be published")
    folder = (given.output_dir or ROOT / "saves" / f"benchmark{'_short' * given.short}").resolve()
    environments = folder / "environments"
    if given.rivals:
        for name, requirements in rivals.REQUIREMENTS.items():
            print(f"environment of its own: {', '.join(requirements)}", flush=True)
            rivals.make(name, environments)
    chosen = [part for part in PARTS if part.name in given.parts and command_of(part, given.short)]
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for number, part in enumerate(chosen, 1):
        head = f"[{number}/{len(chosen)}] {part.name}"
        if given.again:
            shutil.rmtree(folder / part.name, ignore_errors=True)
        if page.done(folder, part.name):
            print(f"{head}: done before", flush=True)
        elif why := why_not(part, given.short):
            print(f"{head}: not measured: {why}", flush=True)
        else:
            minutes = "" if given.short else f", about {part.minutes} minutes"
            print(f"{head}: {datetime.datetime.now():%H:%M}{minutes}", flush=True)
            failed += not run(part, folder, given.short, environments)
    text = page.make(folder, PARTS, missing(folder, given.short))
    (folder / "benchmarks.md").write_text(text, encoding="utf-8")
    print(f"The page: {folder / 'benchmarks.md'}")
    if given.publish:
        publish(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on where this one stopped")
